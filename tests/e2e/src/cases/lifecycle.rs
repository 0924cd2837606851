//! A container's life: it starts, it ends with a status, it is killed, and containerd knows.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::sys::utsname::uname;
use nix::unistd::Pid;

use super::Case;
use crate::command::{Cmd, Finished, wait_until};
use crate::ctr::{Host, Runtime};
use crate::events::Events;
use crate::fixtures::scratch;
use crate::shim::{Shim, granted};
use crate::snapshot::the_process_of;

pub(super) const CASES: &[Case] = &[
    Case::both("a_container_runs_on_the_kernel_its_runtime_promises", kernel),
    Case::both("a_command_that_succeeds_gives_0", success),
    Case::both("the_exit_status_is_the_commands", exit_status),
    Case::both("a_container_killed_by_sigkill_gives_137", sigkill),
    Case::both("a_process_killed_in_the_container_gives_137_to_its_shell", sigkill_inside),
    Case::both("init_without_a_handler_ignores_sigterm", sigterm_ignored),
    Case::both("init_handles_sigterm_and_chooses_its_status", sigterm_handled),
    Case::both("a_signal_to_all_reaches_every_process", signal_to_all),
    Case::both("the_container_ends_with_its_init", ends_with_init),
    Case::both("a_stopped_task_stays_until_it_is_deleted", stopped_until_deleted),
    Case::both("tasks_lists_processes", lists_processes),
    // The client of Debian's 1.6 takes a container's command for a mistake when it is not to be started.
    Case::both("a_container_is_created_first_and_started_later", create_then_start).since(1, 7),
    Case::both("a_container_is_started_a_second_time", started_again).since(1, 7),
    Case::both("events_tell_the_life_in_order", events_in_order),
    Case::both("two_containers_at_once_live_in_separate_worlds", separate_worlds),
    Case::both("a_container_outlives_containerd", outlives_containerd),
    Case::both("programs_may_end_by_themselves_when_the_host_shuts_down", host_shuts_down),
];

fn kernel(host: &Host) -> Result<()> {
    is_promised_kernel(host, &host.run(&["uname", "-r"])?)
}

/// Expects of a container's `uname -r` the host's release on runc, and another one on Bulkhead.
pub(super) fn is_promised_kernel(host: &Host, finished: &Finished) -> Result<()> {
    let hosts = uname().context("uname")?.release().to_string_lossy().into_owned();
    let containers = finished.succeeds()?.text().trim().to_owned();
    match host.runtime() {
        Runtime::Runc => finished.prints(&format!("{hosts}\n"))?,
        Runtime::Bulkhead => {
            let other = !containers.is_empty() && containers != hosts;
            finished.check(&format!("a kernel of its own, not the host's {hosts}"), other)?
        }
    };
    Ok(())
}

fn success(host: &Host) -> Result<()> {
    host.run(&["true"])?.exits(0)?.prints("")?.complains("")?;
    Ok(())
}

fn exit_status(host: &Host) -> Result<()> {
    host.sh("exit 7")?.exits(7)?;
    host.run(&["false"])?.exits(1)?;
    host.sh("exit 255")?.exits(255)?;
    Ok(())
}

fn sigkill(host: &Host) -> Result<()> {
    let mut attached = host.container().start(&["sh", "-c", "echo ready; exec sleep 1000"])?;
    attached.running.wait_for("ready\n")?;
    attached.task.kill("SIGKILL")?;
    attached.running.close_input();
    attached.finish()?.exits(137)?;

    let task = host.container().detach(&["sleep", "1000"])?;
    task.dies()
}

fn sigkill_inside(host: &Host) -> Result<()> {
    // Not of init itself: the kernel protects the init of a pid namespace from its own signals.
    host.sh("sh -c 'kill -9 $$'; exit $?")?.exits(137)?;
    Ok(())
}

fn sigterm_ignored(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    task.kill("SIGTERM")?;
    // The signal does not wait for anything (proc_pid_status(5)), and its process is there.
    let pending = task.exec(&["grep", "-E", "^(SigPnd|ShdPnd)", "/proc/1/status"])?;
    pending.succeeds()?.prints("SigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n")?;
    task.wait_for_state("RUNNING")?;
    task.dies()
}

fn sigterm_handled(host: &Host) -> Result<()> {
    let script = "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.1; done";
    let mut attached = host.container().start(&["sh", "-c", script])?;
    attached.running.wait_for("ready\n")?;
    attached.task.kill("SIGTERM")?;
    attached.running.close_input();
    attached.finish()?.exits(3)?.prints("ready\nbye\n")?;
    Ok(())
}

fn signal_to_all(host: &Host) -> Result<()> {
    let script = "sleep 1000 & echo ready; wait $!; echo child=$?; exit 5";
    let mut attached = host.container().start(&["sh", "-c", script])?;
    attached.running.wait_for("ready\n")?;
    // init has no handler for it, so only the child dies of it.
    attached.task.kill_all("SIGTERM")?;
    attached.running.close_input();
    attached.finish()?.exits(5)?.says("child", "143")?;
    Ok(())
}

fn ends_with_init(host: &Host) -> Result<()> {
    // The child holds the output open; it must not hold the container.
    host.sh("sleep 1000 & exit 4")?.exits(4)?;
    Ok(())
}

fn stopped_until_deleted(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sh", "-c", "exit 5"])?;
    task.wait_for_state("STOPPED")?;
    let id = task.id().to_owned();
    // As a user sees it, by ctr.
    let listed = || Ok::<_, anyhow::Error>(host.ctr(["tasks", "ls"]).run()?.succeeds()?.text());
    let list = listed()?;
    let row = list.lines().find(|row| row.starts_with(&id));
    ensure!(row.is_some_and(|row| row.contains("STOPPED")), "expected  {id} STOPPED\ncame      {list}");
    let status = task.delete()?;
    ensure!(status == 5, "expected  exit status 5 of the deleted task\ncame      {status}");
    let list = listed()?;
    ensure!(!list.contains(&id), "expected  no task after its deletion\ncame      {list}");
    Ok(())
}

fn lists_processes(host: &Host) -> Result<()> {
    let script = "sleep 1000 & sleep 1000 & echo ready; wait";
    let mut attached = host.container().start(&["sh", "-c", script])?;
    attached.running.wait_for("ready\n")?;
    let list = host.ctr(["tasks", "ps", attached.task.id()]).run()?;
    let text = list.succeeds()?.text();
    let rows = text.lines().filter(|row| row.split_whitespace().next().is_some_and(is_number)).count();
    list.check("the three processes of the container", rows == 3)?;
    attached.task.kill("SIGKILL")?;
    attached.running.close_input();
    attached.finish()?.exits(137)?;
    Ok(())
}

fn is_number(word: &str) -> bool {
    word.parse::<u32>().is_ok()
}

fn create_then_start(host: &Host) -> Result<()> {
    let task = host.container().create(&["sh", "-c", "echo started; exit 6"])?;
    ensure!(host.task_state(task.id())?.is_none(), "expected  a container without a task\ncame      a task");
    host.ctr(["tasks", "start", task.id()]).run()?.exits(6)?.prints("started\n")?;
    task.remove_container()
}

fn started_again(host: &Host) -> Result<()> {
    let task = host.container().create(&["sh", "-c", "test ! -e /was-here && touch /was-here"])?;
    host.ctr(["tasks", "start", task.id()]).run()?.exits(0)?;
    // What the first run wrote is the container's, and still there.
    host.ctr(["tasks", "start", task.id()]).run()?.exits(1)?;
    task.remove_container()
}

fn events_in_order(host: &Host) -> Result<()> {
    let events = Events::subscribe(host)?;
    let began = SystemTime::now();
    let container = host.container();
    let id = container.id().to_owned();
    container.run(&["sh", "-c", "exit 9"])?.exits(9)?;
    let seen = events.expect_life(host, &id, &["/tasks/create", "/tasks/start", "/tasks/exit"])?;
    for event in seen.iter().skip(2) {
        let status = event.exit_status();
        ensure!(
            status == 9,
            "expected  exit_status 9 in {}\ncame      {status}: {}",
            event.topic,
            event.fields
        );
        let exited = event.exited_at()?;
        let now = SystemTime::now();
        ensure!(
            began <= exited && exited <= now,
            "expected  exited_at from {began:?} to {now:?}\ncame      {exited:?}"
        );
    }
    Ok(())
}

fn separate_worlds(host: &Host) -> Result<()> {
    let script = |name: &str| format!("echo {name} > /tmp/mine; echo ready; cat; ls /tmp; cat /tmp/mine; ps");
    let (one, two) = (script("one"), script("two"));
    let mut first = host.container().start(&["sh", "-c", &one])?;
    let mut second = host.container().start(&["sh", "-c", &two])?;
    for (attached, name) in [(&mut first, "one"), (&mut second, "two")] {
        attached.running.wait_for("ready\n").context(name)?;
    }
    first.running.close_input();
    second.running.close_input();
    for (attached, own, other) in [(first, "echo one", "echo two"), (second, "echo two", "echo one")] {
        let finished = attached.finish()?;
        let text = finished.succeeds()?.text();
        finished.check("its own processes", text.contains(own))?;
        finished.check("none of the other's processes", !text.contains(other))?;
        let name = own.trim_start_matches("echo ");
        finished.check("its own file only", text.starts_with(&format!("ready\nmine\n{name}\n")))?;
    }
    Ok(())
}

fn outlives_containerd(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sh", "-c", "trap 'exit 8' TERM; while :; do sleep 0.1; done"])?;
    task.wait_for_state("RUNNING")?;
    Cmd::new("systemctl").args(["restart", "containerd"]).run()?.succeeds()?;
    task.wait_for_state("RUNNING")?;
    task.kill("SIGTERM")?;
    task.ends(8)
}

/// systemd sends SIGTERM to all processes then.
fn host_shuts_down(host: &Host) -> Result<()> {
    let volume = scratch()?;
    let script =
        "trap 'sleep 1; echo ended >/vol/end; exit' TERM; touch /vol/ready; while :; do sleep 0.1; done";
    let container = host.container().flags(["--null-io"]).bind(volume.path(), "/vol", "rbind:rw");
    let task = container.detach(&["sh", "-c", script])?;
    let patience = host.patience(Duration::from_secs(10));
    wait_until("the program to run", patience, || Ok(volume.path().join("ready").exists()))?;
    // The container's init, or the VMM, and then the shim.
    let first = granted(Shim::of(host, task.id())?.state(""))?.pid;
    let pids = [first, the_process_of(host.runtime().shim(), task.id())?];
    let without_containerd = || {
        for pid in pids {
            kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM).context("cannot send SIGTERM")?;
        }
        wait_until("the end of all processes", patience, || {
            Ok(!pids.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()))
        })
    };
    // It ends first. Otherwise it would kill a container whose shim has ended.
    Cmd::new("systemctl").args(["stop", "containerd"]).run()?.succeeds()?;
    let ended = without_containerd();
    Cmd::new("systemctl").args(["start", "containerd"]).run()?.succeeds()?;
    ended?;
    let end = fs::read_to_string(volume.path().join("end")).context("the program could not end by itself")?;
    ensure!(end == "ended\n", "expected  ended\ncame      {end:?}");
    task.remove_container()
}
