//! Limits on block devices of the host. The host's kernel has them in the cgroup of the process that reads and writes:
//! on runc that of the container, on Bulkhead that of the VMM.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::Case;
use super::devices::Loop;
use crate::ctr::{Host, Runtime};
use crate::docker::Client;
use crate::fixtures::Spec;

pub(super) const CASES: &[Case] = &[
    Case::both("dockers_flags_are_limits_of_the_cgroup_on_the_host", limits),
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
    let limit = |rate: &str| format!("{}:{rate}", device.path());
    let (read, write) = (limit("1mb"), limit("2mb"));
    let (reads, writes) = (limit("100"), limit("200"));
    let flags = ["--device-read-bps", &read, "--device-write-bps", &write, "--device-read-iops", &reads];
    let more = ["--device-write-iops", &writes, "--blkio-weight", "300"];
    let made = Client::of(host)?.container().flags(flags).flags(more).detach(&["sleep", "1000"])?;
    let cgroup = cgroup_of(&made.inspect("/State/Pid")?.to_string())?;
    let most = format!("{} rbps=1048576 wbps=2097152 riops=100 wiops=200", numbers(&device)?);
    has_line(&cgroup, "io.max", &most)?;
    has_line(&cgroup, "io.weight", "default 2930")?;
    made.docker(&["update", "--blkio-weight", "1000"])?.succeeds()?;
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
