//! Limits on block devices of the host. The host's kernel has them in the cgroup of the process that reads and writes:
//! on runc that of the container, on Bulkhead that of the VMM.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::Case;
use super::devices::Loop;
use crate::command::Size;
use crate::ctr::{Host, Runtime};
use crate::fixtures::Spec;
use crate::shim::{Shim, granted};

pub(super) const CASES: &[Case] = &[
    Case::both("limits_are_those_of_the_cgroup_on_the_host", limits),
    Case::both("a_device_that_does_not_exist_is_named", missing),
];

/// Numbers of a block device that no host has.
const MISSING: (i64, i64) = (259, 999_999);

/// A node of a loop device has these numbers, as the kernel writes them.
fn numbers(device: &Loop) -> Result<String> {
    let name = Path::new(device.path()).file_name().context("the node has no name")?;
    let file = Path::new("/sys/class/block").join(name).join("dev");
    Ok(fs::read_to_string(file)?.trim().to_owned())
}

/// The cgroup of this process on the host.
fn cgroup_of(pid: &str) -> Result<PathBuf> {
    let place = fs::read_to_string(format!("/proc/{pid}/cgroup")).context("the container has no process")?;
    let path = place.lines().find_map(|line| line.strip_prefix("0::/")).context("no cgroup of version 2")?;
    Ok(Path::new("/sys/fs/cgroup").join(path))
}

/// Expects this line in a file of a cgroup.
fn has_line(cgroup: &Path, file: &str, expected: &str) -> Result<()> {
    let file = cgroup.join(file);
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let found = text.lines().any(|line| line == expected);
    ensure!(found, "expected  the line {expected:?} in {}\ncame      {text:?}", file.display());
    Ok(())
}

fn limits(host: &Host) -> Result<()> {
    let device = Loop::new()?;
    let device = numbers(&device)?;
    let (major, minor) = device.split_once(':').context("no numbers")?;
    let rate = |rate: u64| -> Result<Value> {
        Ok(json!([{ "major": major.parse::<u32>()?, "minor": minor.parse::<u32>()?, "rate": rate }]))
    };
    let limits = json!({
        "weight": 300, "throttleReadBpsDevice": rate(1 << 20)?, "throttleWriteBpsDevice": rate(2 << 20)?,
        "throttleReadIOPSDevice": rate(100)?, "throttleWriteIOPSDevice": rate(200)?,
    });
    let spec = Spec::of(host, &["sleep", "1000"])?.with("/process", "terminal", true.into())?;
    let spec = spec.with("/linux/resources", "blockIO", limits)?;
    let rooted = spec.detach_in_terminal(host.container(), Size { width: 80, height: 24 })?;
    let shim = Shim::of(host, rooted.task.id())?;
    let cgroup = cgroup_of(&granted(shim.state(""))?.pid.to_string())?;
    let most = format!("{device} rbps=1048576 wbps=2097152 riops=100 wiops=200");
    has_line(&cgroup, "io.max", &most)?;
    has_line(&cgroup, "io.weight", "default 2930")?;
    granted(shim.update(&json!({ "blockIO": { "weight": 1000 } })))?;
    has_line(&cgroup, "io.weight", "default 10000")?;
    // What an update leaves out stays.
    has_line(&cgroup, "io.max", &most)
}

fn missing(host: &Host) -> Result<()> {
    let (major, minor) = MISSING;
    let limit = json!({ "throttleReadBpsDevice": [{ "major": major, "minor": minor, "rate": 1 << 20 }] });
    let finished =
        Spec::of(host, &["true"])?.with("/linux/resources", "blockIO", limit)?.run(host.container())?;
    match host.runtime() {
        Runtime::Runc => finished.fails_with("io.max")?.fails_with("no such device")?,
        Runtime::Bulkhead => finished
            .fails_with(
                "linux.resources.blockIO.throttleReadBpsDevice: the host's block device 259:999999 does not exist",
            )?
            .says_one_line()?,
    };
    Ok(())
}
