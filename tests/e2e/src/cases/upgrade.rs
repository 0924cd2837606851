//! Bulkhead is installed anew while pods run: those go on with the version that they began with, and new ones have the
//! new version.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::Case;
use super::crash::kill_shim;
use super::templates::template_of_pod;
use crate::ctr::Host;
use crate::fixtures::MovedAway;
use crate::pods::Pod;
use crate::snapshot::the_process_of;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("a_running_pod_keeps_its_version_and_a_new_one_has_the_new_one", beside_a_pod),
    Case::bulkhead("a_container_outlives_an_upgrade_while_containerd_is_down", while_down),
    Case::bulkhead("a_shim_that_dies_after_an_upgrade_is_cleaned_up_by_the_new_version", shim_dies),
];

const SHIM: &str = "/usr/local/bin/containerd-shim-bulkhead-v2";
const VMM: &str = "/usr/lib/bulkhead/bulkhead-vmm";
const KERNEL: &str = "/usr/lib/bulkhead/vmlinux";
const INITRAMFS: &str = "/usr/lib/bulkhead/initramfs.cpio";

const SLEEP: [&str; 2] = ["sleep", "1000"];
const RELEASE: [&str; 2] = ["uname", "-r"];

/// Another version of Bulkhead, installed in the place of the one that there was, which comes back when this is
/// dropped. Its kernel says another release. All other files are longer, and do the same.
struct Upgrade {
    /// What `uname -r` prints in a new pod.
    release: String,
    _before: [MovedAway; 4],
}

impl Upgrade {
    /// Installs it. `release` is what `uname -r` prints in a pod of the version that is there.
    fn install(release: &str) -> Result<Self> {
        let before = release.trim_end();
        let mut newer = before.to_owned();
        newer.pop();
        newer.push('X');
        let longer = |mut content: Vec<u8>| {
            content.extend([0; 512]);
            content
        };
        let other_release = |content: Vec<u8>| replaced(&content, before.as_bytes(), newer.as_bytes());
        Ok(Self {
            _before: [
                replace(SHIM, longer)?,
                replace(VMM, longer)?,
                replace(INITRAMFS, longer)?,
                replace(KERNEL, other_release)?,
            ],
            release: format!("{newer}\n"),
        })
    }
}

/// Moves the file away, and writes another one in its place.
fn replace(place: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Result<MovedAway> {
    let place = Path::new(place);
    let content = fs::read(place).with_context(|| format!("cannot read {}", place.display()))?;
    let mode = fs::metadata(place)?.permissions().mode();
    let before = MovedAway::file(place)?;
    let mut file = fs::OpenOptions::new().create_new(true).write(true).mode(mode).open(place)?;
    file.write_all(&change(content)).with_context(|| format!("cannot write {}", place.display()))?;
    Ok(before)
}

fn replaced(content: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut changed = content.to_vec();
    for at in 0..content.len().saturating_sub(from.len()) {
        if content[at..].starts_with(from) {
            changed[at..at + from.len()].copy_from_slice(to);
        }
    }
    changed
}

/// Device and inode.
fn identity(path: impl AsRef<Path>) -> Result<(u64, u64)> {
    let path = path.as_ref();
    let found = fs::metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
    Ok((found.dev(), found.ino()))
}

/// The file that a process executes.
fn program_of(pid: u32) -> Result<(u64, u64)> {
    identity(format!("/proc/{pid}/exe"))
}

/// The placeholder processes of a pod's containers on the host: children of its shim.
pub(super) fn placeholder_processes(shim: u32) -> Result<Vec<u32>> {
    let children = fs::read_to_string(format!("/proc/{shim}/task/{shim}/children"))?;
    let is_one = |pid: &u32| {
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.split(|byte| *byte == 0).nth(1) == Some(b"placeholder-process")
    };
    Ok(children.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(is_one).collect())
}

fn beside_a_pod(host: &Host) -> Result<()> {
    host.pods()?.leave_nothing(host, || {
        let old = Pod::start(host)?;
        let first = old.container().start(&SLEEP)?;
        let release = first.exec(&RELEASE)?.succeeds()?.text();
        let template = template_of_pod(&old)?;
        let shim = the_process_of(host.runtime().shim(), old.id())?;
        let upgrade = Upgrade::install(&release)?;

        first.exec(&RELEASE)?.succeeds()?.prints(&release)?;
        let second = old.container().start(&["sh", "-c", "uname -r; sleep 1000"])?;
        second.wait_for(&release)?;
        for pid in placeholder_processes(shim)? {
            let (expected, came) = (program_of(shim)?, program_of(pid)?);
            ensure!(
                came == expected,
                "expected  a placeholder process of the version of its shim, {expected:?}\ncame      {came:?}"
            );
        }

        let new = Pod::start(host)?;
        new.container().run(&RELEASE)?.succeeds()?.prints(&upgrade.release)?;
        for (program, place) in [(host.runtime().shim(), SHIM), ("bulkhead-vmm", VMM)] {
            let (installed, old) = (identity(place)?, program_of(the_process_of(program, old.id())?)?);
            let new = program_of(the_process_of(program, new.id())?)?;
            ensure!(
                new == installed && old != installed,
                "expected  only the new pod to run {place}, {installed:?}\ncame      {new:?}, and {old:?} of the old pod"
            );
        }
        let of_new: PathBuf = template_of_pod(&new)?;
        ensure!(
            of_new != template && !template.try_exists()?,
            "expected  another template in the place of {template:?}\ncame      {of_new:?}"
        );

        second.stop(1)?;
        second.remove()?;
        first.exec(&RELEASE)?.succeeds()?.prints(&release)?;
        first.stop(0)?;
        old.remove()?;
        new.remove()
    })
}

fn while_down(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    let pod = Pod::start(host)?;
    let container = pod.container().start(&SLEEP)?;
    let release = container.exec(&RELEASE)?.succeeds()?.text();
    let mut upgrade = None;
    pods.while_containerd_is_down(|| {
        upgrade = Some(Upgrade::install(&release)?);
        Ok(())
    })?;
    container.exec(&RELEASE)?.succeeds()?.prints(&release)?;
    pod.container().run(&RELEASE)?.succeeds()?.prints(&release)?;
    container.stop(0)?;
    container.remove()?;
    pod.remove()
}

/// containerd then executes the `delete` of the program that is installed now.
fn shim_dies(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let task = host.container().flags(["--null-io"]).detach(&SLEEP)?;
        let release = task.exec(&RELEASE)?.succeeds()?.text();
        let upgrade = Upgrade::install(&release)?;
        kill_shim(host, &task)?;
        task.remove_container()?;
        host.run(&RELEASE)?.succeeds()?.prints(&upgrade.release).map(drop)
    })
}
