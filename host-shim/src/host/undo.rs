//! Undoes a journal, from its last entry to its first. An entry may have happened completely, in part, or not at all.

use std::{
    fs, io, mem,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
};

use crate::{
    host::{
        journal::{Effect, Journal, UndoError},
        mountinfo, network,
        no_symlinks::{self, gone},
        process_id,
        vmm_ends::VmmEnds,
    },
    types::error::chain,
};

/// How long the undo of a pod's or a container's side effects may take. Then the request fails. If the storage hangs, a
/// later request tries again.
pub(crate) const UNDO: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 30 });

/// How long a cgroup may stay busy after its last process ended: the kernel empties it a moment later.
const CGROUP_RETRIES: u32 = 100;
const CGROUP_PAUSE: Duration = Duration::from_millis(10);

impl Journal {
    /// Kills the VMMs, and waits for none of them. One that fails does not stop the rest.
    pub(super) fn send_kills(&self) -> Result<(), UndoError> {
        let mut result = Ok(());
        for effect in self.reversed() {
            let sent = match effect {
                Effect::Vmm(process) => process.send_kill().map(drop),
                Effect::VmmSpawn { config } => process_id::vmms_with(config)
                    .and_then(|vmms| vmms.into_iter().try_for_each(|vmm| vmm.send_kill().map(drop))),
                _ => Ok(()),
            };
            result = result.and(sent.map_err(|source| UndoError::Effect { effect: effect.clone(), source }));
        }
        result
    }

    /// Ends the VMMs first, because their open files keep mounts busy. [`Journal::undo`] reports a failure: it tries
    /// again.
    pub(super) fn kill_vmms(&self, ends: &mut VmmEnds) {
        // None waits for the end of another one.
        drop(self.send_kills());
        for effect in self.reversed() {
            if let Effect::Vmm(_) | Effect::VmmSpawn { .. } = effect {
                drop(effect.undo(ends));
            }
        }
    }

    /// The effects from the last one to the first, without the spawns whose processes are among them.
    fn reversed(&self) -> impl Iterator<Item = &Effect> {
        let mut is_known = false;
        self.effects.iter().rev().filter(move |effect| match effect {
            Effect::Vmm(_) => {
                is_known = true;
                true
            }
            Effect::VmmSpawn { .. } => !mem::take(&mut is_known),
            _ => true,
        })
    }

    /// Undoes all effects in reverse, and removes the journal. An effect that cannot be undone does not stop the
    /// rest. The first one is the error, and the journal stays for another try. A line that cannot be read is logged:
    /// another try would not read it either. Blocks while processes end.
    pub(crate) fn undo(self) -> Result<(), UndoError> {
        self.undo_effects(&mut VmmEnds::begin())?;
        // Gone: a Delete that was given up has hung in another thread meanwhile, and has done the same.
        gone(fs::remove_file(&self.path))
            .map_err(|source| UndoError::Effect { effect: Effect::File { path: self.path }, source })
    }

    /// [`Journal::undo`], but the journal stays. The VMMs may have been told to end already.
    pub(super) fn undo_effects(&self, ends: &mut VmmEnds) -> Result<(), UndoError> {
        if let Some((line, text)) = &self.damaged {
            let path = self.path.display();
            tracing::error!(%path, line, text, "a line of the journal is damaged, and what it names may be left");
        }
        let mut failed = None;
        for effect in self.reversed() {
            let Err(source) = effect.undo(ends) else { continue };
            match failed {
                // The first failure is the caller's to report.
                None => failed = Some(UndoError::Effect { effect: effect.clone(), source }),
                Some(_) => {
                    tracing::warn!(%effect, error = chain(&source), "an effect on the host cannot be undone");
                }
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        match ends.hung() {
            pids if pids.is_empty() => Ok(()),
            pids => Err(UndoError::VmmHangs { path: self.path.parent().unwrap_or(&self.path).into(), pids }),
        }
    }
}

impl Effect {
    fn undo(&self, ends: &mut VmmEnds) -> io::Result<()> {
        match self {
            // A living shim is this process, or was ended before its journal is undone.
            Effect::Shim(_) | Effect::ShimSocket { .. } | Effect::Bundle { .. } => Ok(()),
            Effect::Directory { path } => gone(no_symlinks::remove_dir(path)),
            Effect::File { path } => gone(no_symlinks::remove_file(path)),
            Effect::Mount { path } => unmount(path),
            Effect::Moved { path } => unmount_everywhere(path),
            // A VMM that hangs keeps those that it is in, and the parents of these.
            Effect::Cgroup { path, shared } => remove_cgroup(path, *shared || !ends.hung().is_empty()),
            Effect::Redirect { netns, interface } => {
                network::remove_redirect(netns, interface).map_err(io::Error::other)
            }
            Effect::VmmSpawn { config } => ends.kill_running_with(config),
            Effect::Vmm(process) => ends.kill(*process),
        }
    }
}

/// Unmounts all that is mounted at `path` and below it. This is for mounts that a damaged journal may have named.
pub(super) fn unmount_tree(path: &Path) -> io::Result<()> {
    // A later mount may be on an earlier one.
    mounts_below(path)?.iter().rev().try_for_each(|point| unmount(point))
}

/// Removes the directory at `path` with all that is in it. Nothing may be mounted there.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    if let Some(point) = mounts_below(path)?.first() {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("{} is mounted", point.display())));
    }
    // Something may have been mounted since.
    gone(no_symlinks::remove_tree(path))
}

/// Removes all that is in the directory at `path`, except for what has the name `kept`. Nothing may be mounted there.
pub(super) fn remove_all_but(path: &Path, kept: &str) -> io::Result<()> {
    let entries = match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name() != kept {
            remove_tree(&entry.path())?;
        }
    }
    Ok(())
}

/// The mount points at `path` and below it, in the order in which they were mounted.
fn mounts_below(path: &Path) -> io::Result<Vec<PathBuf>> {
    let table = mountinfo::read()?;
    let points = mountinfo::mounts(&table).map(|mount| mount.place);
    Ok(points.filter(|point| point.starts_with(path)).collect())
}

/// Unmounts what is mounted at `path`, with the mounts on it. A mount in use is detached, and ends with its last
/// user.
fn unmount(path: &Path) -> io::Result<()> {
    // It becomes private first. Otherwise an unmount below a recursive bind of a shared mount would propagate to the
    // host.
    detach(path, Some(MsFlags::MS_REC | MsFlags::MS_PRIVATE))
}

/// The same in all mount namespaces that the mount has propagated to. No mount of the host is its peer.
fn unmount_everywhere(path: &Path) -> io::Result<()> {
    detach(path, None)
}

fn detach(path: &Path, propagation: Option<MsFlags>) -> io::Result<()> {
    let place = match no_symlinks::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let place = no_symlinks::proc_path(&place);
    if let Some(propagation) = propagation {
        match mount(None::<&str>, &place, None::<&str>, propagation, None::<&str>) {
            // Nothing is mounted on it.
            Err(Errno::EINVAL) => return Ok(()),
            other => other?,
        }
    }
    match umount2(&place, MntFlags::MNT_DETACH) {
        Err(Errno::EINVAL) => Ok(()),
        other => Ok(other?),
    }
}

/// Removes a cgroup, which may be busy for a moment after its last process has ended. One that is `shared` stays while
/// another pod uses it.
pub(super) fn remove_cgroup(path: &Path, shared: bool) -> io::Result<()> {
    let mut retries = if shared { 0 } else { CGROUP_RETRIES };
    loop {
        match gone(fs::remove_dir(path)) {
            Err(e) if is_busy(&e) && shared => return Ok(()),
            Err(e) if is_busy(&e) && retries > 0 => {
                retries -= 1;
                std::thread::sleep(CGROUP_PAUSE);
            }
            other => return other,
        }
    }
}

fn is_busy(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::DirectoryNotEmpty)
}

#[cfg(test)]
mod tests {
    use std::{io::Write, process::Command};

    use super::*;
    use crate::{
        host::process_id::{ProcessId, VMM_OPTION},
        testing::{PidNamespace, Unending, private_mounts, vmm_with},
    };

    #[test]
    fn undoes_in_reverse_and_leaves_nothing() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        fs::create_dir(&state).unwrap();
        let mut journal = Journal::open(&state.join("journal")).unwrap();
        journal.make_dir(&state.join("share")).unwrap();
        journal.make_dir(&state.join("share/rootfs")).unwrap();
        let target = state.join("share/rootfs");
        journal.record(Effect::Mount { path: target.clone() }).unwrap();
        mount(Some("t"), &target, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::create_dir(target.join("sub")).unwrap();
        mount(Some("t"), &target.join("sub"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        journal.record(Effect::File { path: state.join("vmm.json") }).unwrap();
        fs::write(state.join("vmm.json"), "").unwrap();
        let mut vmm = Command::new("sleep").arg("60").spawn().unwrap();
        journal.record(Effect::VmmSpawn { config: state.join("vmm.json") }).unwrap();
        journal.record(Effect::Vmm(ProcessId::of(vmm.id()).unwrap())).unwrap();
        drop(journal);

        Journal::open(&state.join("journal")).unwrap().undo().unwrap();
        assert!(!vmm.wait().unwrap().success());
        assert_eq!(fs::read_dir(&state).unwrap().count(), 0);
    }

    #[test]
    fn reads_what_an_earlier_version_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        fs::write(&path, "{\"effect\":\"wires\",\"netns\":\"/run/netns/pod\",\"interface\":\"eth0\"}\n")
            .unwrap();
        let redirect = Effect::Redirect { netns: "/run/netns/pod".into(), interface: "eth0".into() };
        assert_eq!(Journal::open(&path).unwrap().effects, [redirect]);
    }

    #[test]
    fn finds_a_vmm_whose_pid_was_never_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let config = dir.path().join("vmm.json");
        journal.record(Effect::VmmSpawn { config: config.clone() }).unwrap();
        let mut vmm = vmm_with(&config);
        journal.undo().unwrap();
        assert!(!vmm.wait().unwrap().success());
    }

    #[test]
    fn a_vmm_that_hangs_does_not_keep_the_rest_from_being_undone_whichever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let mut journal = Journal::open(&path).unwrap();
        let made = dir.path().join("made");
        journal.make_dir(&made).unwrap();
        // That of a template, and that of the pod.
        let template = PidNamespace::new();
        let unending = Unending::new(template.first);
        let mut vmm = Command::new("sleep").arg("60").spawn().unwrap();
        for pid in [template.first, vmm.id()] {
            journal.record(Effect::VmmSpawn { config: dir.path().join("vmm.json") }).unwrap();
            journal.record(Effect::Vmm(ProcessId::of(pid).unwrap())).unwrap();
        }
        let error = journal.undo().unwrap_err();
        let is_template = |pids: &[u32]| pids == [template.first];
        assert!(matches!(&error, UndoError::VmmHangs { pids, .. } if is_template(pids)), "{error}");
        assert!(!vmm.wait().unwrap().success());
        assert!(!made.exists());
        drop(unending);
        Journal::open(&path).unwrap().undo().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_vmm_that_hangs_and_whose_pid_was_never_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let config = dir.path().join("vmm.json");
        journal.record(Effect::VmmSpawn { config: config.clone() }).unwrap();
        let namespace = PidNamespace::with(&[VMM_OPTION.as_ref(), &config]);
        let unending = Unending::new(namespace.first);
        let error = journal.undo().unwrap_err();
        let text = format!("the VMM, process {}, does not end", namespace.first);
        assert!(error.to_string().contains(&text), "{error}");
        drop(unending);
    }

    #[test]
    fn effects_that_never_happened_are_no_error() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let path = dir.path().join("never");
        for effect in [
            Effect::Directory { path: path.clone() },
            Effect::File { path: path.clone() },
            Effect::Mount { path: path.clone() },
            Effect::Mount { path: dir.path().into() },
            Effect::Moved { path: path.clone() },
            Effect::Moved { path: dir.path().into() },
            Effect::Cgroup { path: path.clone(), shared: false },
            Effect::Vmm(ProcessId { pid: u32::MAX, start_time: 1, pid_namespace: None }),
        ] {
            journal.record(effect).unwrap();
        }
        journal.undo().unwrap();
    }

    #[test]
    fn a_torn_last_line_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("kept");
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        journal.make_dir(&dir.path().join("made")).unwrap();
        fs::create_dir(&kept).unwrap();
        let torn = format!(r#"{{"effect":"directory","path":"{}"}}"#, kept.display());
        journal.file.write_all(torn.as_bytes()).unwrap();
        Journal::open(&dir.path().join("journal")).unwrap().undo().unwrap();
        assert!(kept.exists() && !dir.path().join("made").exists());
    }

    #[test]
    fn a_damaged_line_does_not_keep_the_others_from_being_undone_nor_the_journal() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        journal.make_dir(&dir.path().join("one")).unwrap();
        journal.file.write_all(b"{{{\n").unwrap();
        journal.make_dir(&dir.path().join("two")).unwrap();
        let journal = Journal::open(&dir.path().join("journal")).unwrap();
        assert_eq!(journal.damaged, Some((2, "{{{".into())));
        journal.undo().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn mount_points_with_blanks_are_found() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("a b\\"), dir.path().join("a b\\/c"));
        for place in [&one, &two] {
            fs::create_dir(place).unwrap();
            mount(Some("t"), place, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        }
        assert_eq!(mounts_below(dir.path()).unwrap(), [one.clone(), two]);
        assert!(remove_tree(dir.path()).is_err() && one.exists());
        unmount_tree(&one).unwrap();
        remove_tree(dir.path()).unwrap();
        assert!(!dir.path().exists());
    }

    #[test]
    fn a_line_that_did_not_fit_on_the_disk_damages_none_that_follows() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        mount(Some("t"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some("size=8k")).unwrap();
        fs::write(dir.path().join("filler"), [0; 4096]).unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let made = dir.path().join("made");
        let full = loop {
            // No divisor of a page: the last line is cut.
            if let Err(e) = journal.record(Effect::File { path: dir.path().join("x".repeat(100)) }) {
                break e;
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        fs::remove_file(dir.path().join("filler")).unwrap();
        journal.make_dir(&made).unwrap();
        drop(journal);
        Journal::open(&dir.path().join("journal")).unwrap().undo().unwrap();
        assert!(!made.exists());
        umount2(dir.path(), MntFlags::MNT_DETACH).unwrap();
    }

    #[test]
    fn what_someone_else_put_there_is_never_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let made = dir.path().join("made");
        journal.make_dir(&made).unwrap();
        fs::write(made.join("theirs"), "data").unwrap();
        let error = journal.undo().unwrap_err().to_string();
        assert_eq!(error, format!("cannot undo the directory {}", made.display()));
        assert_eq!(fs::read_to_string(made.join("theirs")).unwrap(), "data");
    }
}
