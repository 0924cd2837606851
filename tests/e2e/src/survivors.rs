//! What lives longer than the containers of a test: containerd, and a container that runs all the while. They must not
//! keep anything of the containers that are gone.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::ctr::{Host, Task};
use crate::snapshot::{pids, the_process_of};

/// The name of containerd among them.
pub(crate) const CONTAINERD: &str = "containerd";

/// The processes, by name and pid.
pub(crate) struct Survivors {
    processes: Vec<(&'static str, u32)>,
}

/// What a process uses.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Usage {
    /// Its program.
    pub(crate) name: &'static str,
    /// Its open descriptors.
    pub(crate) descriptors: u64,
    /// Its anonymous memory, KiB: a VMM's with that of its guest.
    pub(crate) memory_kib: u64,
}

impl Survivors {
    /// containerd, and the shim and the VMM of this container.
    pub(crate) fn find(host: &Host, neighbour: &Task<'_>) -> Result<Self> {
        let one = |program: &str| the_process_of(program, neighbour.id());
        let (shim, vmm) = (one(host.runtime().shim())?, one("bulkhead-vmm")?);
        Ok(Self { processes: vec![(CONTAINERD, containerd()?), ("shim", shim), ("VMM", vmm)] })
    }

    /// What they use now.
    pub(crate) fn usage(&self) -> Result<Vec<Usage>> {
        self.processes.iter().map(|(name, pid)| Usage::of(name, *pid)).collect()
    }
}

impl Usage {
    fn of(name: &'static str, pid: u32) -> Result<Self> {
        let process = Path::new("/proc").join(pid.to_string());
        let context = || format!("{name}, process {pid}, has ended");
        let descriptors = fs::read_dir(process.join("fd")).with_context(context)?.count();
        let status = fs::read_to_string(process.join("status")).with_context(context)?;
        let memory = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let memory = memory.and_then(|line| line.split_whitespace().next()).with_context(context)?;
        Ok(Self { name, descriptors: u64::try_from(descriptors)?, memory_kib: memory.parse()? })
    }
}

/// The mounts of the host.
pub(crate) fn mounts() -> Result<u64> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("cannot read the table of mounts")?;
    Ok(u64::try_from(table.lines().count())?)
}

/// The host's containerd, which systemd has started.
fn containerd() -> Result<u32> {
    let is_it = |pid: &u32| {
        let file = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        file("comm").trim() == "containerd" && file("cgroup").contains("/containerd.service")
    };
    pids()?.into_iter().find(is_it).context("containerd does not run")
}
