//! The journal of what a sandbox did to its host, so that whoever comes after it can undo it.
//!
//! One line of JSON for each side effect, appended *before* the effect. Undone in reverse, each step finding its
//! effect done, half done or never done. It lives on tmpfs beside what it describes and must outlive our process
//! but not the host: no fsync.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    mem,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
};
use serde::{Deserialize, Serialize};

use crate::{
    host_path, network,
    process::{self, ProcessId},
};

/// How long a killed process may take to end. It has only its memory to give back.
const KILL: Duration = Duration::from_secs(5);

/// How long a cgroup may stay busy after its last process ended: the kernel empties it a moment later.
const CGROUP_RETRIES: u32 = 100;
const CGROUP_PAUSE: Duration = Duration::from_millis(10);

/// One side effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "effect", rename_all = "snake_case")]
pub(crate) enum Effect {
    /// The shim's server that keeps this journal.
    Shim(ProcessId),
    /// A directory that was made.
    Directory { path: PathBuf },
    /// A file or socket that was made.
    File { path: PathBuf },
    /// A mount on `path`.
    Mount { path: PathBuf },
    /// A mount, with those on it, that was moved to `path` from where it was made, and arrived in the VMM's jail too.
    Moved { path: PathBuf },
    /// A cgroup that was made. `shared`: it may hold the cgroups of other sandboxes, the last of which removes it.
    Cgroup { path: PathBuf, shared: bool },
    /// An interface in a network namespace that is not ours was tied to the VMM's tap.
    Wires { netns: PathBuf, interface: String },
    /// A VMM is about to be spawned with this configuration; its pid is not known yet.
    VmmSpawn { config: PathBuf },
    /// The VMM that was spawned.
    Vmm(ProcessId),
}

/// Why something of the sandbox is still there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UndoError {
    #[error("{path}: cannot read the journal")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: line {line} is damaged, so what it names was left as it is")]
    Damaged { path: PathBuf, line: usize },
    #[error("cannot undo {effect}")]
    Effect { effect: Effect, source: io::Error },
}

/// An open journal: that of a sandbox, or of one container in it.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    effects: Vec<Effect>,
    damaged: Option<usize>,
}

impl Journal {
    /// Opens the journal at `path`, or begins one.
    pub(crate) fn open(path: &Path) -> Result<Self, UndoError> {
        let path = path.to_owned();
        let read_error = |source| UndoError::Read { path: path.clone(), source };
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(read_error)?;
        let text = fs::read(&path).map_err(read_error)?;
        let mut journal = Self { path, file, effects: Vec::new(), damaged: None };
        journal.parse(&text);
        Ok(journal)
    }

    /// A line without its end was being written when the writer died: its effect had not begun.
    fn parse(&mut self, text: &[u8]) {
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines = text.get(..whole).unwrap_or_default().split(|byte| *byte == b'\n');
        for (index, line) in lines.filter(|line| !line.is_empty()).enumerate() {
            match serde_json::from_slice(line) {
                Ok(effect) => self.effects.push(effect),
                Err(_) => self.damaged = Some(index + 1),
            }
        }
    }

    /// Notes a side effect that is about to happen.
    pub(crate) fn record(&mut self, effect: Effect) -> io::Result<()> {
        let mut line = serde_json::to_vec(&effect)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.effects.push(effect);
        Ok(())
    }

    /// Makes a directory, which may be there already.
    pub(crate) fn make_dir(&mut self, path: &Path) -> io::Result<()> {
        self.record(Effect::Directory { path: path.into() })?;
        host_path::make_dir(path)
    }

    /// The shim that kept this journal.
    pub(crate) fn shim(&self) -> Option<ProcessId> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Shim(process) => Some(*process),
            _ => None,
        })
    }

    /// The sandbox's VMM.
    pub(crate) fn vmm(&self) -> Option<ProcessId> {
        self.effects.iter().rev().find_map(|effect| match effect {
            Effect::Vmm(process) => Some(*process),
            _ => None,
        })
    }

    /// Ends the VMM ahead of everything else: what it has open keeps mounts busy. That it does not end is reported by
    /// [`Journal::undo`], which tries again.
    pub(crate) fn kill_vmm(&self) {
        let is_vmm = |effect: &&Effect| matches!(effect, Effect::Vmm(_) | Effect::VmmSpawn { .. });
        // Of the two the last knows most.
        if let Some(effect) = self.effects.iter().rev().find(is_vmm) {
            _ = effect.undo();
        }
    }

    /// Undoes everything, in reverse, and removes the journal. One effect that stays does not keep the others; the
    /// first such is reported, and the journal stays for another try. Blocks while processes end.
    pub(crate) fn undo(self) -> Result<(), UndoError> {
        let mut failed = self.damaged.map(|line| UndoError::Damaged { path: self.path.clone(), line });
        // Of the spawn that is looked at.
        let mut vmm_known = false;
        for effect in self.effects.iter().rev() {
            match effect {
                Effect::Vmm(_) => vmm_known = true,
                Effect::VmmSpawn { .. } if mem::take(&mut vmm_known) => continue,
                _ => {}
            }
            if let Err(source) = effect.undo() {
                tracing::warn!("cannot undo {effect}: {source}");
                failed.get_or_insert(UndoError::Effect { effect: effect.clone(), source });
            }
        }
        match failed {
            Some(error) => Err(error),
            None => fs::remove_file(&self.path).map_err(|source| UndoError::Effect {
                effect: Effect::File { path: self.path.clone() },
                source,
            }),
        }
    }
}

impl Effect {
    fn undo(&self) -> io::Result<()> {
        match self {
            // `delete` ends a living shim before it undoes anything; the shim that undoes its own is this process.
            Effect::Shim(_) => Ok(()),
            Effect::Directory { path } => gone(host_path::remove_dir(path)),
            Effect::File { path } => gone(host_path::remove_file(path)),
            Effect::Mount { path } => unmount(path),
            Effect::Moved { path } => unmount_everywhere(path),
            Effect::Cgroup { path, shared } => remove_cgroup(path, *shared),
            Effect::Wires { netns, interface } => network::untie(netns, interface).map_err(io::Error::other),
            Effect::VmmSpawn { config } => {
                process::running_with(config)?.into_iter().try_for_each(|process| process.kill(KILL))
            }
            Effect::Vmm(process) => process.kill(KILL),
        }
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shim(process) => write!(formatter, "the shim, process {}", process.pid),
            Self::Directory { path } => write!(formatter, "the directory {}", path.display()),
            Self::File { path } => write!(formatter, "the file {}", path.display()),
            Self::Mount { path } => write!(formatter, "the mount on {}", path.display()),
            Self::Cgroup { path, .. } => write!(formatter, "the cgroup {}", path.display()),
            Self::Wires { netns, interface } => {
                write!(formatter, "the wires of {interface} in {}", netns.display())
            }
            Self::Moved { path } => write!(formatter, "the mounts on {}", path.display()),
            Self::VmmSpawn { config } => write!(formatter, "the start of a VMM with {}", config.display()),
            Self::Vmm(process) => write!(formatter, "the VMM, process {}", process.pid),
        }
    }
}

/// What is not there needs no removal.
fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Unmounts what is mounted at `path`, with all that is mounted on it. What is still in use leaves the tree now, and ends
/// with its last user.
fn unmount(path: &Path) -> io::Result<()> {
    // Private first: below a recursive bind of a shared mount, an unmount would travel back to the host's own.
    detach(path, Some(MsFlags::MS_REC | MsFlags::MS_PRIVATE))
}

/// The same for what no other mount is the peer of, so that it goes wherever it arrived: each of its mounts is shared, and
/// an unmount of what was made private would stay here.
fn unmount_everywhere(path: &Path) -> io::Result<()> {
    detach(path, None)
}

fn detach(path: &Path, propagation: Option<MsFlags>) -> io::Result<()> {
    let place = match host_path::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let place = host_path::of(&place);
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

fn remove_cgroup(path: &Path, shared: bool) -> io::Result<()> {
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
    use std::process::Command;

    use super::*;
    use crate::testing::{executed_with, private_mounts};

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
    fn finds_a_vmm_whose_pid_was_never_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let config = dir.path().join("vmm.json");
        journal.record(Effect::VmmSpawn { config: config.clone() }).unwrap();
        let mut vmm = executed_with(&config);
        journal.undo().unwrap();
        assert!(!vmm.wait().unwrap().success());
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
            Effect::Vmm(ProcessId { pid: u32::MAX, start_time: 1 }),
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
    fn a_damaged_line_is_reported_and_the_others_are_undone() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        journal.make_dir(&dir.path().join("one")).unwrap();
        journal.file.write_all(b"{{{\n").unwrap();
        journal.make_dir(&dir.path().join("two")).unwrap();
        let error = Journal::open(&dir.path().join("journal")).unwrap().undo().unwrap_err();
        assert!(matches!(error, UndoError::Damaged { line: 2, .. }), "{error}");
        assert!(!dir.path().join("one").exists() && !dir.path().join("two").exists());
        assert!(dir.path().join("journal").exists());
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
