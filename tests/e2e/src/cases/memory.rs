//! What a guest has of the host's memory, and gives back.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Case;
use super::jail::Vmm;
use super::templates::template_of;
use crate::command::wait_until;
use crate::ctr::{Container, Host, Task};

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("512_mib_that_a_container_frees_are_back_on_the_host_within_10_seconds", half_a_gibibyte),
    Case::bulkhead("a_clone_gives_back_what_a_container_frees", clone),
];

/// The promise, on an ordinary machine: how soon memory that a container has freed is the host's again.
const BACK: Duration = Duration::from_secs(10);
/// What may be missing of it: pieces that are too small for the guest to report, and what its kernel keeps at hand.
const KEPT_MIB: u64 = 32;

fn half_a_gibibyte(host: &Host) -> Result<()> {
    gives_back(host, &with_held(host.container().flags(["--memory-limit", "629145600"]))?, 512)
}

fn clone(host: &Host) -> Result<()> {
    let task = with_held(host.container())?;
    template_of(&task)?;
    gives_back(host, &task, 128)
}

/// A container that can hold memory: what is in files of /held.
fn with_held(container: Container<'_>) -> Result<Task<'_>> {
    let mount = ["--mount", "type=tmpfs,src=tmpfs,dst=/held,options=size=560m"];
    container.flags(mount).detach(&["sleep", "1000"])
}

/// Expects that `mib` that were in use are the host's soon after the container has freed them, and that what is in use
/// stays.
fn gives_back(host: &Host, task: &Task<'_>, mib: u64) -> Result<()> {
    let sh = |script: &str| task.exec(&["sh", "-c", script])?.succeeds().map(drop);
    sh("dd if=/dev/urandom of=/held/used bs=1M count=16 && md5sum /held/used > /held/sum")?;
    let before = vmm_mib(task)?;

    sh(&format!("dd if=/dev/zero of=/held/freed bs=1M count={mib}"))?;
    let held = vmm_mib(task)?;
    // Some of it fits into what the VM had already.
    let expected = before + mib - KEPT_MIB;
    ensure!(held >= expected, "expected  {expected} MiB or more in use\ncame      {held}");
    sh("rm /held/freed")?;
    let what = format!("{held} MiB in use to become {before} again, or {KEPT_MIB} more");
    wait_until(&what, host.patience(BACK), || Ok(vmm_mib(task)? <= before + KEPT_MIB))?;

    sh("md5sum -c /held/sum")
}

/// What the VMM of a container takes of the host's memory, its guest included: its proportional set (proc_pid_smaps(5)).
fn vmm_mib(task: &Task<'_>) -> Result<u64> {
    let text = Vmm::of(task)?.read("smaps_rollup")?;
    let kib =
        text.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse().ok());
    let kib: u64 = kib.with_context(|| format!("no Pss in {text:?}"))?;
    Ok(kib / 1024)
}
