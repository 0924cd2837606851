//! Limits that change while the container runs. No command of ctr asks for it; kubelet, docker and nerdctl do.

use anyhow::{Result, ensure};
use serde_json::json;
use ttrpc::Code;

use super::Case;
use super::limits::{CGROUP_MOUNT, in_cgroup, weight_of_512_shares};
use crate::ctr::{Host, Task};
use crate::shim::{Shim, granted, invalid, precondition, refused};

pub(super) const CASES: &[Case] = &[
    Case::both("limits_change_in_a_running_container", limits_change),
    Case::both("what_is_left_out_stays", left_out_stays),
    Case::both("a_new_memory_limit_is_enforced", memory_enforced),
    Case::both("a_limit_far_above_the_first_can_be_used", memory_grows),
    Case::both("a_lower_memory_limit_leaves_what_had_more_alive", memory_shrinks),
    Case::both("limits_change_in_a_paused_container", paused),
    Case::both("an_impossible_limit_is_named_and_not_set", impossible),
    Case::both("processors_that_are_not_there_are_named_and_not_set", no_such_processor),
    Case::both("what_is_no_json_is_refused", no_json),
    Case::both("a_stopped_task_takes_none", stopped),
    // runc keeps what it set before it came to the limit that failed.
    Case::bulkhead("an_impossible_limit_leaves_the_others_as_they_were", impossible_among_others),
    Case::bulkhead("a_limit_below_the_usage_is_refused_if_that_is_asked_for", below_usage),
    Case::bulkhead("a_field_that_is_not_honoured_is_named", not_honoured),
];

const MIB: u64 = 1 << 20;

/// A container that does nothing, with a memory limit of 64 MiB and half a CPU, and that sees its cgroup.
fn limited(host: &Host) -> Result<(Task<'_>, Shim)> {
    let container =
        host.container().flags(["--memory-limit", "67108864", "--cpus", "0.5"]).flags(CGROUP_MOUNT);
    let task = container.detach(&["sleep", "1000"])?;
    let shim = Shim::of(host, task.id())?;
    Ok((task, shim))
}

/// Expects these contents of files of the container's cgroup.
fn cgroup_says(task: &Task<'_>, files: &[(&str, &str)]) -> Result<()> {
    for (file, content) in files {
        task.exec(&["sh", "-c", &in_cgroup(file)])?.succeeds()?.prints(&format!("{content}\n"))?;
    }
    Ok(())
}

fn limits_change(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    granted(shim.update(&json!({
        "memory": {"limit": 128 * MIB, "reservation": 16 * MIB},
        "cpu": {"shares": 512, "quota": 150_000, "period": 200_000},
        "pids": {"limit": 33},
        "unified": {"memory.high": "120586240"},
    })))?;
    cgroup_says(
        &task,
        &[
            ("memory.max", "134217728"),
            ("memory.low", "16777216"),
            ("cpu.weight", weight_of_512_shares(host)),
            ("cpu.max", "150000 200000"),
            ("pids.max", "33"),
            ("memory.high", "120586240"),
        ],
    )?;
    granted(shim.update(&json!({"memory": {"limit": -1, "swap": -1}, "pids": {"limit": -1}})))?;
    cgroup_says(&task, &[("memory.max", "max"), ("pids.max", "max")])
}

fn left_out_stays(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    granted(shim.update(&json!({"cpu": {"quota": 20_000}})))?;
    cgroup_says(&task, &[("cpu.max", "20000 100000"), ("memory.max", "67108864")])?;
    granted(shim.update(&json!({"cpu": {"period": 200_000}})))?;
    cgroup_says(&task, &[("cpu.max", "20000 200000")])?;
    granted(shim.update(&json!({})))?;
    granted(shim.update(&json!({"memory": {"limit": 0}, "cpu": {"quota": 0, "period": 0, "shares": 0}})))?;
    cgroup_says(&task, &[("cpu.max", "20000 200000"), ("memory.max", "67108864")])
}

fn memory_enforced(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    let buffer = ["dd", "if=/dev/zero", "of=/dev/null", "bs=32M", "count=1"];
    task.exec(&buffer)?.succeeds()?;
    granted(shim.update(&json!({"memory": {"limit": 16 * MIB}})))?;
    task.exec(&buffer)?.exits(137)?;
    granted(shim.update(&json!({"memory": {"limit": 64 * MIB}})))?;
    task.exec(&buffer)?.succeeds()?;
    Ok(())
}

fn memory_grows(host: &Host) -> Result<()> {
    let task = host.container().flags(["--memory-limit", "134217728"]).detach(&["sleep", "1000"])?;
    let shim = Shim::of(host, task.id())?;
    let fills = |size: &str| task.exec(&["dd", "if=/dev/zero", "of=/dev/null", size, "count=1"]);
    fills("bs=200M")?.exits(137)?;
    granted(shim.update(&json!({"memory": {"limit": 700 * MIB}})))?;
    fills("bs=600M")?.succeeds()?;
    Ok(())
}

fn memory_shrinks(host: &Host) -> Result<()> {
    let task = host.container().flags(["--memory-limit", "734003200"]).detach(&["sleep", "1000"])?;
    let shim = Shim::of(host, task.id())?;
    task.exec(&["dd", "if=/dev/zero", "of=/dev/null", "bs=600M", "count=1"])?.succeeds()?;
    // At once: a VM has not given back yet what its guest has freed.
    granted(shim.update(&json!({"memory": {"limit": 64 * MIB}})))?;
    task.exec(&["true"])?.succeeds()?;
    Ok(())
}

fn paused(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    granted(shim.pause())?;
    granted(shim.update(&json!({"pids": {"limit": 21}})))?;
    granted(shim.resume())?;
    cgroup_says(&task, &[("pids.max", "21")])
}

fn impossible(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    // The kernel's shortest period is a millisecond.
    let update = json!({"cpu": {"quota": 50_000, "period": 5}});
    refused(shim.update(&update))?.with(invalid(host))?.saying("cpu.max")?;
    cgroup_says(&task, &[("cpu.max", "50000 100000")])
}

fn no_such_processor(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    let update = json!({"cpu": {"cpus": "4000"}});
    refused(shim.update(&update))?.with(invalid(host))?.saying("cpuset.cpus")?;
    cgroup_says(&task, &[("cpuset.cpus", "")])
}

fn impossible_among_others(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    let update = json!({"memory": {"limit": 128 * MIB}, "cpu": {"quota": 20_000, "cpus": "4000"}});
    refused(shim.update(&update))?.saying("linux.resources.cpu.cpus")?;
    cgroup_says(&task, &[("memory.max", "67108864"), ("cpu.max", "50000 100000"), ("cpuset.cpus", "")])
}

fn no_json(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    refused(shim.update_of(b"{\"memory\": {\"limit\": ".to_vec()))?.with(invalid(host))?;
    refused(shim.update_of(b"{\"memory\": {\"limit\": \"much\"}}".to_vec()))?.with(invalid(host))?;
    cgroup_says(&task, &[("memory.max", "67108864")])
}

fn stopped(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    task.kill("SIGKILL")?;
    task.wait_for_state("STOPPED")?;
    refused(shim.update(&json!({"pids": {"limit": 5}})))?.with(precondition(host))?;
    Ok(())
}

fn below_usage(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    let update = json!({"memory": {"limit": 4096, "checkBeforeUpdate": true}});
    refused(shim.update(&update))?.with(Code::INVALID_ARGUMENT)?.saying("linux.resources.memory.limit")?;
    ensure!(granted(shim.pids())? == 1, "expected  the container's one process to live");
    cgroup_says(&task, &[("memory.max", "67108864")])
}

fn not_honoured(host: &Host) -> Result<()> {
    let (task, shim) = limited(host)?;
    for (update, field) in [
        (json!({"memory": {"limit": 128 * MIB, "swappiness": 10}}), "linux.resources.memory.swappiness"),
        (json!({"memory": {"limit": 128 * MIB}, "network": {"classID": 7}}), "linux.resources.network"),
        (
            json!({"memory": {"limit": 128 * MIB}, "cpu": {"realtimeRuntime": 7}}),
            "linux.resources.cpu.realtime",
        ),
    ] {
        refused(shim.update(&update))?.with(Code::UNIMPLEMENTED)?.saying(field)?;
    }
    cgroup_says(&task, &[("memory.max", "67108864")])
}
