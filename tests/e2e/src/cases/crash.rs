//! Parts die without warning; the user hears of it at once, and nothing is left.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Case;
use super::templates::state_dir;
use crate::command::wait_until;
use crate::ctr::{Host, NAMESPACE, Task};
use crate::events::Events;
use crate::snapshot::{pids, processes_of, the_process_of};

pub(super) const CASES: &[Case] = &[
    Case::both("a_killed_shim_is_cleaned_up_by_delete", shim_killed),
    // See lifecycle: the client of Debian's 1.6.
    Case::both("after_a_killed_shim_the_next_container_runs", next_after_shim_killed).since(1, 7),
    Case::bulkhead("a_killed_vm_ends_its_task_within_a_second", vm_killed),
    Case::bulkhead("a_killed_vm_ends_an_attached_run_with_137", vm_killed_attached),
    Case::bulkhead("a_killed_vm_takes_no_other_with_it", vm_killed_beside_another),
    // runc's shim leaves its socket behind when it is killed.
    Case::bulkhead("a_killed_shim_leaves_nothing_and_no_vm", shim_killed_leaves_nothing),
    Case::bulkhead("what_takes_longer_than_containerd_waits_for_delete_is_undone_later", undone_later),
    Case::bulkhead("the_next_container_of_the_id_waits_for_what_is_still_undone", next_waits),
    Case::bulkhead("a_damaged_journal_leaves_nothing_in_the_cgroup_of_the_pod", damaged_journal),
];

/// How soon the end of a VM must be the exit of its task, by the shim's own clock even on an emulated machine.
const VM_DEATH_IS_NEWS: Duration = Duration::from_secs(1);

/// Kills the one process of this program and container with SIGKILL. When it was killed.
pub(super) fn kill_process(program: &str, id: &str) -> Result<Instant> {
    let pid = i32::try_from(the_process_of(program, id)?).context("a pid")?;
    let at = Instant::now();
    kill(Pid::from_raw(pid), Signal::SIGKILL)
        .with_context(|| format!("cannot kill {program}, process {pid}"))?;
    Ok(at)
}

/// Kills the shim and waits until containerd, which sees the connection break, has run the shim's `delete`: it
/// then tells of an exit and a deletion in the task's name.
pub(super) fn kill_shim(host: &Host, task: &Task<'_>) -> Result<()> {
    let events = Events::subscribe(host)?;
    kill_process(host.runtime().shim(), task.id())?;
    let seen = events.of_task_until(task.id(), "/tasks/delete")?;
    let exit = seen
        .iter()
        .find(|event| event.topic == "/tasks/exit")
        .context("no exit event before the deletion's")?;
    ensure!(exit.exit_status() == 137, "expected  exit_status 137\ncame      {}", exit.fields);
    Ok(())
}

fn shim_killed(host: &Host) -> Result<()> {
    let task = host.container().flags(["--null-io"]).detach(&["sleep", "1000"])?;
    kill_shim(host, &task)?;
    // On a busy host the rest is undone after containerd has heard of the end.
    let mut left = Vec::new();
    let ended = wait_until("the end of all processes of the container", host.patience(UNDONE), || {
        left = pids()?.into_iter().map(|pid| (pid, command_of(pid))).collect();
        left.retain(|(_, command)| command.contains(task.id()) || command == "sleep 1000 ");
        Ok(left.is_empty())
    });
    ended.with_context(|| format!("expected  no process of the container\ncame      {left:?}"))?;
    task.remove_container()
}

/// The command line of a process, with a blank after each word. Nothing if it has ended.
fn command_of(pid: u32) -> String {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&command).replace('\0', " ")
}

fn shim_killed_leaves_nothing(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        // Without stdio: the FIFOs are ctr's, which removes them only when it deletes the task itself.
        let task = host.container().flags(["--null-io"]).detach(&["sleep", "1000"])?;
        let vms = processes_of("bulkhead-vmm", task.id())?;
        ensure!(vms.len() == 1, "expected  one VM of {}\ncame      {vms:?}", task.id());
        kill_shim(host, &task)?;
        // It was killed before its task is forgotten.
        wait_until("the end of the VM", host.patience(VM_DEATH_IS_NEWS), || {
            Ok(processes_of("bulkhead-vmm", task.id())?.is_empty())
        })?;
        task.remove_container()
    })
}

/// How long what goes on after `delete` may take.
const UNDONE: Duration = Duration::from_secs(30);

/// Takes the lock of whoever cleans up a pod, so that nobody else does.
fn lock(state: &Path) -> Result<Flock<File>> {
    let directory = File::open(state).with_context(|| format!("cannot open {}", state.display()))?;
    Flock::lock(directory, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, errno)| errno)
        .context("somebody else has the lock of the pod")
}

/// containerd kills `delete` after five seconds, and never runs it again.
fn undone_later(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let task = host.container().flags(["--null-io"]).detach(&["sleep", "1000"])?;
        let state = state_dir(NAMESPACE, task.id())?;
        let locked = lock(&state)?;
        // The exit is that of the pod, not containerd's 255 of a `delete` that has failed.
        kill_shim(host, &task)?;
        ensure!(state.exists(), "expected  {} while it is locked\ncame      it is gone", state.display());
        wait_until("the end of the VM", host.patience(VM_DEATH_IS_NEWS), || {
            Ok(processes_of("bulkhead-vmm", task.id())?.is_empty())
        })?;
        drop(locked);
        wait_until("the undo", host.patience(UNDONE), || Ok(!state.exists()))?;
        task.remove_container()
    })
}

fn next_waits(host: &Host) -> Result<()> {
    let task = host.container().create(&["sleep", "1000"])?;
    let start = || host.ctr(["tasks", "start", "--null-io", "--detach", task.id()]).run();
    start()?.succeeds()?;
    let state = state_dir(NAMESPACE, task.id())?;
    let locked = lock(&state)?;
    kill_shim(host, &task)?;
    let old = shim_in(&state)?;
    thread::scope(|scope| {
        let next = scope.spawn(start);
        // Not before its shim runs, which waits.
        wait_until("the next shim", host.patience(UNDONE), || {
            let serves = |pid: &u32| command_of(*pid).ends_with(" serve ");
            Ok(processes_of(host.runtime().shim(), task.id())?.iter().any(serves) || next.is_finished())
        })?;
        drop(locked);
        match next.join() {
            Ok(started) => started?.succeeds().map(drop),
            Err(_) => anyhow::bail!("the thread that starts it panicked"),
        }
    })?;
    task.wait_for_state("RUNNING")?;
    task.exec(&["true"])?.succeeds()?;
    let new = shim_in(&state)?;
    ensure!(old != new, "expected  another shim in the journal\ncame      {new}");
    Ok(())
}

/// The line of a pod's journal with its shim.
fn shim_in(state: &Path) -> Result<String> {
    let text = fs::read_to_string(state.join("journal"))?;
    text.lines().next().map(str::to_owned).context("an empty journal")
}

/// A process in the pod's cgroup, of which neither the command line nor the journal says that it is the pod's: a VMM
/// that its guest has taken over could hide like that.
fn damaged_journal(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let task = host.container().flags(["--null-io"]).detach(&["sleep", "1000"])?;
        let vmm = the_process_of("bulkhead-vmm", task.id())?;
        let cgroup = fs::read_to_string(format!("/proc/{vmm}/cgroup"))?;
        let cgroup = cgroup.lines().find_map(|line| line.strip_prefix("0::/")).context("no cgroup v2")?;
        let cgroup = Path::new("/sys/fs/cgroup").join(cgroup);
        let mut hidden = Command::new("sleep").arg("1000").spawn().context("cannot run sleep")?;
        fs::write(cgroup.join("cgroup.procs"), hidden.id().to_string())?;
        let journal = state_dir(NAMESPACE, task.id())?.join("journal");
        let text = fs::read_to_string(&journal)?;
        fs::write(&journal, text.replace("\"cgroup\"", "\"cg").replace("\"vmm\"", "\"v"))?;
        kill_shim(host, &task)?;
        let ended = hidden.try_wait()?;
        // Not at all if it has ended.
        let _ = hidden.kill();
        let status = hidden.wait()?;
        ensure!(
            ended.is_some_and(|status| status.signal() == Some(Signal::SIGKILL as i32)),
            "expected  the process in the cgroup killed\ncame      {ended:?}, and {status} by the test"
        );
        task.remove_container()
    })
}

fn next_after_shim_killed(host: &Host) -> Result<()> {
    let task = host.container().create(&["sleep", "1000"])?;
    let start = || host.ctr(["tasks", "start", "--null-io", "--detach", task.id()]).run();
    start()?.succeeds()?;
    kill_shim(host, &task)?;
    // The same container: its id, its directories and its sockets are free again.
    start()?.succeeds()?;
    task.wait_for_state("RUNNING")
}

fn vm_killed(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let events = Events::subscribe(host)?;
        let task = host.container().detach(&["sleep", "1000"])?;
        let wall_clock = SystemTime::now();
        let killed = kill_process("bulkhead-vmm", task.id())?;
        let seen = events.of_task_until(task.id(), "/tasks/exit")?;
        let exit = seen.last().context("no event")?;
        ensure!(exit.exit_status() == 137, "expected  exit_status 137\ncame      {}", exit.fields);
        let exited =
            exit.exited_at()?.duration_since(wall_clock).context("exited_at is before the VM's death")?;
        ensure!(
            exited <= VM_DEATH_IS_NEWS,
            "expected  exited_at within {VM_DEATH_IS_NEWS:?} of the VM's death\ncame      {exited:?} after it"
        );
        let (heard, limit) = (exit.read.saturating_duration_since(killed), host.patience(VM_DEATH_IS_NEWS));
        ensure!(
            heard <= limit,
            "expected  to hear of it within {limit:?}\ncame      the event after {heard:?}"
        );
        task.ends(137)
    })
}

fn vm_killed_attached(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let mut attached = host.container().start(&["sh", "-c", "echo ready; sleep 1000"])?;
        attached.running.wait_for("ready\n")?;
        kill_process("bulkhead-vmm", attached.task.id())?;
        attached.running.close_input();
        attached.finish()?.exits(137)?.prints("ready\n")?;
        Ok(())
    })
}

fn vm_killed_beside_another(host: &Host) -> Result<()> {
    let mut survivor = host.container().start(&["cat"])?;
    survivor.running.write(b"before\n")?;
    survivor.running.wait_for("before\n")?;
    let victim = host.container().detach(&["sleep", "1000"])?;
    kill_process("bulkhead-vmm", victim.id())?;
    victim.wait_for_state("STOPPED")?;
    survivor.running.write(b"after\n")?;
    survivor.running.wait_for("after\n")?;
    survivor.running.close_input();
    survivor.finish()?.succeeds()?;
    Ok(())
}
