//! Memory runs out: whoever is killed for it, containerd hears of it, and of the reason before the end.

use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};

use super::Case;
use super::hangs::journal;
use super::metrics::{OOM_KILLS, measured};
use super::templates::state_dir;
use crate::command::Cmd;
use crate::counts;
use crate::ctr::{Container, Host, NAMESPACE, Runtime, Task};
use crate::events::{Event, Events};
use crate::fixtures::{CONFIGURATION, Replaced};

pub(super) const CASES: &[Case] = &[
    Case::both("a_container_beyond_its_limit_is_an_oom_event_and_137", container_killed),
    Case::both("a_child_beyond_the_limit_is_an_oom_event_and_the_container_lives", child_killed),
    Case::both("an_exec_beyond_the_limit_is_an_oom_event_and_137", exec_killed),
    Case::both("a_program_that_takes_memory_little_by_little_is_killed", slow_leak),
    Case::both("a_container_within_its_limit_is_none", none),
    Case::bulkhead("a_vm_without_memory_is_told_from_a_limit", vm_without_memory),
];

const LIMIT: [&str; 2] = ["--memory-limit", "33554432"];

/// One buffer of 100 MiB, filled. Not by what a container begins with: runc's shim looks out for kills from when the
/// container runs, and does not hear of an earlier one.
const HOG: [&str; 5] = ["dd", "if=/dev/zero", "of=/dev/null", "bs=100M", "count=1"];

fn limited(host: &Host) -> Container<'_> {
    host.container().flags(LIMIT)
}

/// The events up to the one of a kill. That of the end of the process comes after it: always on Bulkhead, most often
/// on runc.
fn until_oom(host: &Host, events: &Events, task: &Task<'_>) -> Result<Vec<Event>> {
    let seen = events.of_task_until(task.id(), "/tasks/oom")?;
    let ended = seen.iter().any(|event| event.topic == "/tasks/exit");
    ensure!(
        host.runtime() == Runtime::Runc || !ended,
        "expected  the event of the kill before that of the end\ncame      {:?}",
        seen.iter().map(|event| &event.topic).collect::<Vec<_>>()
    );
    Ok(seen)
}

/// The exit status of the process, whether it is among the events seen or still to come.
fn exit_status(events: &Events, task: &Task<'_>, seen: Vec<Event>) -> Result<u64> {
    let exit = seen.into_iter().find(|event| event.topic == "/tasks/exit");
    let later = || Ok(events.of_task_until(task.id(), "/tasks/exit")?.pop());
    let exit = exit.map_or_else(later, |exit| Ok::<_, anyhow::Error>(Some(exit)))?;
    Ok(exit.map_or(0, |exit| exit.exit_status()))
}

fn container_killed(host: &Host) -> Result<()> {
    let events = Events::subscribe(host)?;
    let script = format!("trap go=1 USR1; until test $go; do sleep 0.1; done; exec {}", HOG.join(" "));
    let task = limited(host).detach(&["sh", "-c", &script])?;
    task.kill("SIGUSR1")?;
    let seen = match host.runtime() {
        Runtime::Bulkhead => until_oom(host, &events, &task)?,
        // Its shim stops looking for kills when it finds the container empty, which a container may be after its only
        // process was killed and before the shim has read that it was: the event is lost then.
        Runtime::Runc => Vec::new(),
    };
    let status = exit_status(&events, &task, seen)?;
    ensure!(status == 137, "expected  exit_status 137\ncame      {status}");
    task.ends(137)
}

fn child_killed(host: &Host) -> Result<()> {
    let events = Events::subscribe(host)?;
    let script = format!("read go; {} 2>/dev/null; echo survived $?; cat", HOG.join(" "));
    let mut attached = limited(host).start(&["sh", "-c", &script])?;
    attached.task.wait_for_state("RUNNING")?;
    attached.running.write(b"go\n")?;
    attached.running.wait_for("survived 137\n")?;
    until_oom(host, &events, &attached.task)?;
    let kills = measured(host, &attached.task, &OOM_KILLS)?;
    ensure!(kills == 1, "expected  one kill in the metrics\ncame      {kills}");
    if host.runtime() == Runtime::Bulkhead {
        let text = Cmd::new("bulkhead").args(["metrics"]).run()?.succeeds()?.text();
        let pod = format!("pod=\"{}\"}} 1", attached.task.id());
        let mut lines = text.lines().filter(|line| line.starts_with("bulkhead_pod_oom_kills_total{"));
        ensure!(lines.any(|line| line.ends_with(&pod)), "expected  one kill of {pod}\ncame      {text}");
    }
    attached.running.close_input();
    attached.finish()?.succeeds()?;
    Ok(())
}

fn exec_killed(host: &Host) -> Result<()> {
    let events = Events::subscribe(host)?;
    let task = limited(host).detach(&["sleep", "1000"])?;
    task.exec(&HOG)?.exits(137)?;
    let seen = until_oom(host, &events, &task)?;
    let status = exit_status(&events, &task, seen)?;
    ensure!(status == 137, "expected  exit_status 137 of the exec\ncame      {status}");
    task.wait_for_state("RUNNING")
}

/// It executes its own code all the while, and the kernel must not think that it gets on by reading that code again.
fn slow_leak(host: &Host) -> Result<()> {
    let task = limited(host).detach(&["awk", "BEGIN { for (;;) held[n++] = sprintf(\"%65535s\", \"\") }"])?;
    task.wait_for_state("STOPPED")?;
    if host.runtime() == Runtime::Bulkhead {
        let control = state_dir(NAMESPACE, task.id())?.join("control.sock");
        let reads = counts::requests(&control)?.remove("READ").context("the VMM counts no READ")?;
        // 16 of them read the whole program.
        ensure!(reads <= 50.0, "expected  the program read about once\ncame      {reads} requests to read");
    }
    task.ends(137)
}

fn none(host: &Host) -> Result<()> {
    let events = Events::subscribe(host)?;
    let task = limited(host).detach(&[
        "sh",
        "-c",
        "dd if=/dev/zero of=/dev/null bs=10M count=1; kill -9 $$; exit 5",
    ])?;
    let seen = events.of_task_until(task.id(), "/tasks/exit")?;
    ensure!(
        !seen.iter().any(|event| event.topic == "/tasks/oom"),
        "expected  no event of a kill for want of memory\ncame      one"
    );
    Ok(())
}

fn vm_without_memory(host: &Host) -> Result<()> {
    let since = SystemTime::now();
    let events = Events::subscribe(host)?;
    let _configured = Replaced::file(Path::new(CONFIGURATION), "max_memory_mib = 256\n")?;
    // Each holds its buffer until its output is read, which nobody does: 400 MiB in a VM of 256 MiB.
    let script =
        "for i in 1 2 3 4 5 6 7 8; do dd if=/dev/zero bs=50M count=1 2>/dev/null | sleep 1000 & done; wait";
    let task = host.container().detach(&["sh", "-c", script])?;
    until_oom(host, &events, &task)?;
    task.wait_for_state("RUNNING")?;
    let text = journal(since)?;
    for words in ["the VM ran out of memory", "max_memory_mib in /etc/bulkhead/config.toml", task.id()] {
        ensure!(text.contains(words), "expected  {words:?} in containerd's journal\ncame      {text}");
    }
    Ok(())
}
