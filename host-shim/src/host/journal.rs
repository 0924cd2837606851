//! The journal of a pod's side effects on its host, by which they are undone.
//!
//! It has one line of JSON for each side effect, which is appended *before* the effect. It is undone in reverse; each
//! effect may have happened, half happened or not happened. The journal is on tmpfs, like what it describes. It must
//! outlive the shim but not the host, so there is no fsync.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    host::{no_symlinks, process_id::ProcessId},
    types::text::one_line,
};

/// One side effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "effect", rename_all = "snake_case")]
pub(crate) enum Effect {
    /// The shim's server that keeps this journal.
    Shim(ProcessId),
    /// The shim's socket, which the shim removes itself unless it crashes.
    ShimSocket { path: PathBuf },
    /// The bundle of a container. It is no side effect; it says whether containerd still knows the container.
    Bundle { path: PathBuf },
    /// A directory that was made.
    Directory { path: PathBuf },
    /// A file or socket that was made.
    File { path: PathBuf },
    /// A mount on `path`.
    Mount { path: PathBuf },
    /// A mount that was moved to `path`, with the mounts on it. It has propagated to the VMM's mount namespace.
    Moved { path: PathBuf },
    /// A cgroup that was made. `shared`: it may have cgroups of other pods below it. The last pod removes it.
    Cgroup { path: PathBuf, shared: bool },
    /// The redirects between the VMM's tap and an interface in a network namespace that was given.
    /// Earlier versions call it `wires`.
    #[serde(alias = "wires")]
    Redirect { netns: PathBuf, interface: String },
    /// A VMM is about to be spawned with this configuration; its pid is not known yet.
    VmmSpawn { config: PathBuf },
    /// The VMM that was spawned.
    Vmm(ProcessId),
}

/// Why a journal was not undone completely.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UndoError {
    #[error("{path}: cannot read the journal")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: cannot list the journals")]
    List { path: PathBuf, source: io::Error },
    #[error("{path}: cannot lock the state directory")]
    Lock { path: PathBuf, source: io::Error },
    #[error("{path}: cannot unmount what is mounted here")]
    Unmount { path: PathBuf, source: io::Error },
    #[error("{path}: another process has been cleaning this up for {seconds} s")]
    Busy { path: PathBuf, seconds: u64 },
    #[error("{path}: cannot end what runs in this cgroup of the pod")]
    Kill { path: PathBuf, source: io::Error },
    #[error("{path}: a line is damaged, so it is not known whether all VMMs of the pod were killed")]
    Damaged { path: PathBuf },
    #[error("cannot undo {effect}")]
    Effect { effect: Effect, source: io::Error },
    /// All else is undone.
    #[error(
        "{path}: the VMM, process {}, does not end although it was killed: most likely a disk or a file system of the \
         host hangs; what it was writing may still reach the disk when that continues, so fence the storage before \
         its data is used elsewhere; after its end `bulkhead gc` removes the pod's cgroup and journal",
        listed(pids)
    )]
    VmmHangs { path: PathBuf, pids: Vec<u32> },
}

/// An open journal of a pod or of one of its containers.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(super) path: PathBuf,
    pub(super) file: File,
    pub(super) effects: Vec<Effect>,
    /// The last line that cannot be read: its number and its text.
    pub(super) damaged: Option<(usize, String)>,
}

impl Journal {
    /// Opens the journal at `path`, or begins one.
    pub(crate) fn open(path: &Path) -> Result<Self, UndoError> {
        Self::open_with(OpenOptions::new().append(true).create(true), path)
    }

    /// Reads the journal at `path`, for somebody who looks at another pod. Its shim may be about to remove the state
    /// directory, so no journal is made.
    pub(crate) fn look(path: &Path) -> Result<Self, UndoError> {
        Self::open_with(OpenOptions::new().read(true), path)
    }

    fn open_with(options: &OpenOptions, path: &Path) -> Result<Self, UndoError> {
        let path = path.to_owned();
        let read_error = |source| UndoError::Read { path: path.clone(), source };
        let file = options.open(&path).map_err(read_error)?;
        let text = fs::read(&path).map_err(read_error)?;
        let mut journal = Self { path, file, effects: Vec::new(), damaged: None };
        journal.parse(&text);
        Ok(journal)
    }

    /// A line without an end was being written when the shim died. Its effect had not begun.
    fn parse(&mut self, text: &[u8]) {
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines = text.get(..whole).unwrap_or_default().split(|byte| *byte == b'\n');
        for (index, line) in lines.filter(|line| !line.is_empty()).enumerate() {
            match serde_json::from_slice(line) {
                Ok(effect) => self.effects.push(effect),
                Err(_) => self.damaged = Some((index + 1, text_of(line))),
            }
        }
    }

    /// Records a side effect that is about to happen.
    pub(crate) fn record(&mut self, effect: Effect) -> io::Result<()> {
        let mut line = serde_json::to_vec(&effect)?;
        line.push(b'\n');
        let length = self.file.metadata()?.len();
        if let Err(error) = self.file.write_all(&line) {
            // The disk may be full. A part of the line would make one that cannot be read of the next.
            self.file.set_len(length)?;
            return Err(error);
        }
        self.effects.push(effect);
        Ok(())
    }

    /// Makes a directory, unless it exists.
    pub(crate) fn make_dir(&mut self, path: &Path) -> io::Result<()> {
        self.record(Effect::Directory { path: path.into() })?;
        no_symlinks::make_dir(path)
    }

    /// The shim that kept this journal.
    pub(crate) fn shim(&self) -> Option<ProcessId> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Shim(process) => Some(*process),
            _ => None,
        })
    }

    /// The bundle that the journal belongs to.
    pub(crate) fn bundle(&self) -> Option<&Path> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Bundle { path } => Some(path.as_path()),
            _ => None,
        })
    }

    /// The shim's socket.
    pub(crate) fn shim_socket(&self) -> Option<&Path> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::ShimSocket { path } => Some(path.as_path()),
            _ => None,
        })
    }

    /// The number of the last line that cannot be read, and its text.
    pub(crate) fn damaged(&self) -> Option<&(usize, String)> {
        self.damaged.as_ref()
    }

    /// Whether a line cannot be read. What it names on the host is not known.
    pub(crate) fn is_damaged(&self) -> bool {
        self.damaged.is_some()
    }

    /// The pod's VMM.
    pub(crate) fn vmm(&self) -> Option<ProcessId> {
        self.effects.iter().rev().find_map(|effect| match effect {
            Effect::Vmm(process) => Some(*process),
            _ => None,
        })
    }
}

/// Pids for a message.
fn listed(pids: &[u32]) -> String {
    pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// A damaged line for the log.
fn text_of(line: &[u8]) -> String {
    const MOST: usize = 200;
    one_line(&String::from_utf8_lossy(line.get(..MOST).unwrap_or(line)))
}

impl fmt::Display for Effect {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ShimSocket { path } => write!(formatter, "the shim's socket {}", path.display()),
            Self::Bundle { path } => write!(formatter, "the bundle {}", path.display()),
            Self::Shim(process) => write!(formatter, "the shim, process {}", process.pid),
            Self::Directory { path } => write!(formatter, "the directory {}", path.display()),
            Self::File { path } => write!(formatter, "the file {}", path.display()),
            Self::Mount { path } => write!(formatter, "the mount on {}", path.display()),
            Self::Cgroup { path, .. } => write!(formatter, "the cgroup {}", path.display()),
            Self::Redirect { netns, interface } => {
                write!(formatter, "the redirect of {interface} in {}", netns.display())
            }
            Self::Moved { path } => write!(formatter, "the mounts on {}", path.display()),
            Self::VmmSpawn { config } => write!(formatter, "the start of a VMM with {}", config.display()),
            Self::Vmm(process) => write!(formatter, "the VMM, process {}", process.pid),
        }
    }
}
