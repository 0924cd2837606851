//! What a container uses, as containerd's clients ask for it.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use serde_json::Value;

use super::Case;
use crate::command::wait_until;
use crate::ctr::{Host, Task};
use crate::shim::{Shim, granted};

pub(super) const CASES: &[Case] = &[
    Case::both("they_show_the_memory_in_use_and_its_limit", memory),
    Case::both("they_count_the_processes", processes),
    Case::both("they_show_the_time_on_a_cpu", cpu),
    Case::both("those_of_a_stopped_task_have_no_process", stopped),
    Case::both("they_have_the_form_of_the_hosts_cgroups", form),
];

/// How long a number may take to become what it must.
const SETTLES: Duration = Duration::from_secs(10);

/// A number of the metrics: where it is on a host of cgroup v2, and where on one of v1, with its unit in terms of v2's.
pub(super) struct Number {
    v2: &'static str,
    v1: &'static str,
    v1_unit: u64,
}

pub(super) const PROCESSES: Number = Number { v2: "/pids/current", v1: "/pids/current", v1_unit: 1 };
pub(super) const MEMORY: Number = Number { v2: "/memory/usage", v1: "/memory/usage/usage", v1_unit: 1 };
pub(super) const MEMORY_LIMIT: Number =
    Number { v2: "/memory/usage_limit", v1: "/memory/usage/limit", v1_unit: 1 };
pub(super) const CPU_MICROSECONDS: Number =
    Number { v2: "/cpu/usage_usec", v1: "/cpu/usage/total", v1_unit: 1000 };
pub(super) const OOM_KILLS: Number =
    Number { v2: "/memory_events/oom_kill", v1: "/memory_oom_control/oom_kill", v1_unit: 1 };

fn is_unified() -> Result<bool> {
    Ok(statfs("/sys/fs/cgroup").context("/sys/fs/cgroup")?.filesystem_type() == CGROUP2_SUPER_MAGIC)
}

/// What `ctr tasks metrics` says of it; JSON leaves a zero out.
pub(super) fn measured(host: &Host, task: &Task<'_>, number: &Number) -> Result<u64> {
    let finished = host.ctr(["tasks", "metrics", "--format", "json", task.id()]).run()?;
    let metrics: Value =
        serde_json::from_slice(&finished.succeeds()?.stdout).context("metrics are not JSON")?;
    let (place, unit) = if is_unified()? { (number.v2, 1) } else { (number.v1, number.v1_unit) };
    Ok(metrics.pointer(place).and_then(Value::as_u64).unwrap_or(0) / unit)
}

fn memory(host: &Host) -> Result<()> {
    const LIMIT: u64 = 64 << 20;
    const HELD: u64 = 20 << 20;
    let script = format!("head -c {HELD} /dev/zero > /dev/shm/held; echo ready; cat");
    let container = host.container().flags(["--memory-limit", &LIMIT.to_string()]);
    let mut attached = container.start(&["sh", "-c", &script])?;
    attached.running.wait_for("ready\n")?;
    let (used, limit) =
        (measured(host, &attached.task, &MEMORY)?, measured(host, &attached.task, &MEMORY_LIMIT)?);
    ensure!(
        (HELD..LIMIT).contains(&used),
        "expected  {HELD} bytes or more in use, below the limit\ncame      {used}"
    );
    ensure!(limit == LIMIT, "expected  the limit {LIMIT}\ncame      {limit}");
    attached.running.close_input();
    attached.finish()?.succeeds()?;
    Ok(())
}

fn processes(host: &Host) -> Result<()> {
    let script = "sleep 1000 & sleep 1000 & echo ready; wait";
    let attached = host.container().start(&["sh", "-c", script])?;
    attached.running.wait_for("ready\n")?;
    let count = measured(host, &attached.task, &PROCESSES)?;
    ensure!(count == 3, "expected  3 processes\ncame      {count}");
    Ok(())
}

fn cpu(host: &Host) -> Result<()> {
    let idle = host.container().detach(&["sleep", "1000"])?;
    let idle_before = measured(host, &idle, &CPU_MICROSECONDS)?;
    let busy = host.container().detach(&["sh", "-c", "while :; do :; done"])?;
    let before = measured(host, &busy, &CPU_MICROSECONDS)?;
    let used = |task: &Task<'_>, before: u64| {
        measured(host, task, &CPU_MICROSECONDS).map(|now| now.saturating_sub(before))
    };
    let a_second_more = || Ok(used(&busy, before)? >= 1_000_000);
    wait_until("the busy container to use a second of CPU", host.patience(SETTLES), a_second_more)?;
    let idle_used = used(&idle, idle_before)?;
    ensure!(
        idle_used < 500_000,
        "expected  the idle container to use less than half of that\ncame      {idle_used} us"
    );
    Ok(())
}

fn stopped(host: &Host) -> Result<()> {
    let task = host.container().detach(&["true"])?;
    task.wait_for_state("STOPPED")?;
    let count = measured(host, &task, &PROCESSES)?;
    ensure!(count == 0, "expected  no process\ncame      {count}");
    Ok(())
}

fn form(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let version = if is_unified()? { "v2" } else { "v1" };
    let expected = format!("io.containerd.cgroups.{version}.Metrics");
    let metrics = granted(Shim::of(host, task.id())?.stats())?;
    // Some shims write a whole URL.
    match metrics.type_url.rsplit('/').next() {
        Some(name) if name == expected && !metrics.value.is_empty() => Ok(()),
        name => bail!("expected  {expected}\ncame      {name:?}, {} bytes", metrics.value.len()),
    }
}
