//! An upgrade while a pod runs. The later version has the same programs, but for a mark at their end: so a process
//! shows from which of the two its program comes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::commands::{hidden, show};
use super::trial::ctr_run;
use super::{VERSION, files, packed};
use crate::dist::{BIN, Dist, LIB};
use crate::rig::Session;

/// What follows the program in its file. Whoever executes an ELF file does not look there.
const MARK: &str = "bulkhead: later version";

/// The parts of a pod that have a process each.
const SHIM: &str = "containerd-shim-bulkhead-v2";
const VMM: &str = "bulkhead-vmm";

/// The version of the later one. dpkg takes it for a higher one.
pub(super) fn version() -> String {
    format!("{VERSION}+later")
}

/// Packs the later version into the directory. Returns the archive and the package.
pub(super) fn pack(dist: &Dist, directory: &Path) -> Result<[PathBuf; 2]> {
    let mut files = files(dist)?;
    for path in [format!("{BIN}/{SHIM}"), format!("{LIB}/{VMM}")] {
        let file = files.iter_mut().find(|file| file.path == path);
        file.with_context(|| format!("there is no {path} to mark"))?.data.extend_from_slice(MARK.as_bytes());
    }
    let [archive, package] = packed(&version(), files)?;
    let write = |(name, bytes): (String, Vec<u8>)| -> Result<PathBuf> {
        let path = directory.join(name);
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    };
    Ok([write(archive)?, write(package)?])
}

/// Upgrades by the command `install` while a pod runs: it goes on with the old programs, and the next one has the new
/// ones.
pub(super) fn try_out(session: &mut Session, install: &str) -> Result<()> {
    show(session, &ctr_run("--detach", "running", "sleep 1000"))?;
    ensure!(marks(session, "running")? == [false; 2], "a pod has later programs than the installed ones");
    show(session, install)?;
    if install.starts_with("dpkg") {
        let installed = show(session, "dpkg-query --showformat '${Version}' --show bulkhead")?;
        ensure!(installed == version(), "dpkg has not upgraded the package: it has {installed}");
    }
    show(session, "ctr task exec --exec-id one running true")?;
    show(session, &ctr_run("--rm", "second", "true"))?;
    show(session, &ctr_run("--detach", "third", "sleep 1000"))?;
    ensure!(marks(session, "third")? == [true; 2], "a pod that was made after the upgrade has old programs");
    ensure!(marks(session, "running")? == [false; 2], "the programs of a pod that runs have changed");
    show(session, "ctr task exec --exec-id two running true")?;
    for pod in ["running", "third"] {
        show(session, &format!("ctr task rm --force {pod}; ctr container rm {pod}"))?;
    }
    Ok(())
}

/// A pod, as `bulkhead ps` lists it.
#[derive(Debug, Deserialize)]
struct Pod {
    id: String,
    shim_pid: Option<u32>,
    vmm_pid: Option<u32>,
}

/// Whether the shim and the VMM of the pod are marked.
fn marks(session: &mut Session, id: &str) -> Result<[bool; 2]> {
    let pods: Vec<Pod> = serde_json::from_str(&hidden(session, "bulkhead ps --json")?)?;
    let pod = pods.into_iter().find(|pod| pod.id == id);
    let pod = pod.with_context(|| format!("bulkhead ps does not list the pod {id}"))?;
    let (shim, vmm) = (pod.shim_pid.context("it has no shim")?, pod.vmm_pid.context("it has no VMM")?);
    let mut is_marked = |pid: u32, program: &str| -> Result<bool> {
        // The file of a process that runs can be read, also after it was replaced.
        let end =
            hidden(session, &format!("readlink /proc/{pid}/exe; tail -c {} /proc/{pid}/exe", MARK.len()))?;
        ensure!(end.contains(program), "the process {pid} of {id} is not {program}: {end}");
        Ok(end.ends_with(MARK))
    };
    Ok([is_marked(shim, SHIM)?, is_marked(vmm, VMM)?])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn dpkg_takes_the_later_version_for_a_higher_one() {
        let compared = Command::new("dpkg").args(["--compare-versions", &version(), "gt", VERSION]).status();
        assert!(compared.unwrap().success());
    }
}
