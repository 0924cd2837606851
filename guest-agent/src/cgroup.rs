//! The containers' cgroups, in the guest's cgroup v2 hierarchy.

mod changes;
pub mod containers;
pub mod files;
mod freezer;
mod update;

use std::{
    fs,
    io::{self, ErrorKind, Write},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::timeout;

pub use self::update::Replaced;
use crate::syscall::{self, BpfInstruction};

/// Where the hierarchy is mounted.
pub const ROOT: &str = "/sys/fs/cgroup";

/// How long [`Cgroup::remove`] waits for killed processes to end. The shim gives DeleteContainer 10 s.
const REMOVE_PATIENCE: Duration = Duration::from_secs(8);
/// How long the kernel may take to drop caches. It continues without us.
const RECLAIM_PATIENCE: Duration = Duration::from_secs(2);
/// How long it waits before another attempt.
const REMOVE_PAUSE: Duration = Duration::from_millis(5);

/// What could not be done with a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A setting of the spec was not accepted.
    #[error("{field}: writing {value:?} to {file}: {source}")]
    Setting {
        /// The field of the spec.
        field: String,
        /// The file of the cgroup.
        file: String,
        /// What was written.
        value: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel reclaims memory.
    #[error("the kernel has not changed the cgroup within {seconds} s; it may change it later")]
    Slow {
        /// How long was waited.
        seconds: u64,
    },
    /// Anything else.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// One write to a file of the container's cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Field of the spec, for errors.
    pub field: String,
    /// File in the cgroup's directory.
    pub file: String,
    /// What is written.
    pub value: String,
    /// Whether the file's absence means that the limit holds anyway.
    pub optional: bool,
}

/// A container's cgroup. It exists until [`Cgroup::remove`].
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    /// The cgroup around that of a container of the pod.
    around: Option<PathBuf>,
    /// The device program that is attached.
    device_program: Mutex<Option<OwnedFd>>,
    /// Held by who makes a change for which the kernel may have to reclaim memory. See [`Cgroup::change`].
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Cgroup {
    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the directory.
    pub fn create(path: PathBuf) -> Result<Self, CgroupError> {
        fs::create_dir(&path).map_err(io_error("creating", &path))?;
        Ok(Self { path, around: None, device_program: Mutex::default(), turn: Arc::default() })
    }

    /// Sets limits, and attaches the device program.
    pub fn configure(&self, settings: &[Setting], devices: &[BpfInstruction]) -> Result<(), CgroupError> {
        for setting in settings {
            self.set(setting)?;
        }
        self.allow_devices(devices).map(drop)
    }

    fn set(&self, setting: &Setting) -> Result<(), CgroupError> {
        match self.write(&setting.file, &setting.value) {
            Err(error) if setting.optional && error.kind() == ErrorKind::NotFound => Ok(()),
            other => other.map_err(|source| CgroupError::Setting {
                field: setting.field.clone(),
                file: setting.file.clone(),
                value: setting.value.clone(),
                source,
            }),
        }
    }

    /// Attaches the device program, in place of one that was attached before, which is returned.
    fn allow_devices(&self, devices: &[BpfInstruction]) -> Result<Option<OwnedFd>, CgroupError> {
        let program = syscall::load_device_program(devices);
        self.attach_program(program.map_err(io_error("loading the device program of", &self.path))?)
    }

    fn attach_program(&self, program: OwnedFd) -> Result<Option<OwnedFd>, CgroupError> {
        let mut attached = self.device_program.lock().unwrap_or_else(PoisonError::into_inner);
        let attach = || -> io::Result<()> {
            let directory = fs::File::open(&self.path)?;
            let replaced = attached.as_ref().map(OwnedFd::as_fd);
            syscall::attach_device_program(program.as_fd(), directory.as_fd(), replaced)
        };
        attach().map_err(io_error("attaching the device program to", &self.path))?;
        Ok(attached.replace(program))
    }

    /// Kills every process in it. A cgroup that is gone has none.
    pub fn kill(&self) -> Result<(), CgroupError> {
        kill(&self.path)
    }

    /// Processes in it and below it, in the agent's pid namespace.
    pub fn pids(&self) -> Result<Vec<u32>, CgroupError> {
        let mut pids = Vec::new();
        for directory in tree(&self.path).map_err(io_error("reading", &self.path))? {
            let file = directory.join("cgroup.procs");
            match fs::read_to_string(&file) {
                Ok(text) => pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok())),
                // The container removed it meanwhile.
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(io_error("reading", &file)(error)),
            }
        }
        pids.sort_unstable();
        Ok(pids)
    }

    /// Kills what is left in it, and removes it with all that the container made below it. An error if a process is
    /// left after [`REMOVE_PATIENCE`], as one may be that waits for a file system, or if a change of the cgroup is not
    /// made yet. Then this can be tried again.
    pub async fn remove(&self) -> Result<(), CgroupError> {
        // Also what a privileged container has put beside the container's own cgroup.
        kill(self.top())?;
        let left = || io_error("removing", self.top())(ErrorKind::ResourceBusy.into());
        let removed = async {
            // rmdir(2) waits in the kernel for who is in a call on a file of the cgroup.
            let _turn = self.turn.lock().await;
            self.removed().await
        };
        timeout(REMOVE_PATIENCE, removed).await.unwrap_or_else(|_| Err(left()))
    }

    /// Kills what is left in it, and has the kernel drop the caches that are charged to it. What takes too long is left
    /// to be dropped when the memory is needed.
    pub async fn kill_and_reclaim(&self) -> Result<(), CgroupError> {
        kill(self.top())?;
        let dropped = async {
            self.emptied().await?;
            let top = self.top().to_owned();
            // EAGAIN: some of it cannot be reclaimed.
            self.in_turn(move || drop(reclaim(&top))).await
        };
        timeout(RECLAIM_PATIENCE, dropped).await.unwrap_or(Ok(()))
    }

    async fn removed(&self) -> Result<(), CgroupError> {
        loop {
            self.emptied().await?;
            match remove_tree(self.top()) {
                // The container makes a cgroup below at this moment, or a process that is about to end is counted
                // still.
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    tokio::time::sleep(REMOVE_PAUSE).await
                }
                Err(error) if is_gone(&error) => return Ok(()),
                other => return other.map_err(io_error("removing", self.top())),
            }
        }
    }

    /// Waits until no process is in it.
    async fn emptied(&self) -> Result<(), CgroupError> {
        let emptied =
            self.watch("cgroup.events", |events| (events.get("populated") == Some(&0)).then_some(()));
        match emptied.await {
            Err(CgroupError::Io { source, .. }) if is_gone(&source) => Ok(()),
            other => other,
        }
    }
}

fn kill(cgroup: &Path) -> Result<(), CgroupError> {
    let file = cgroup.join("cgroup.kill");
    match write(&file, "1") {
        Err(error) if is_gone(&error) => Ok(()),
        other => other.map_err(io_error("writing", &file)),
    }
}

/// Has the kernel reclaim all memory of a cgroup in which no process is. Only caches are left in it.
fn reclaim(cgroup: &Path) -> io::Result<()> {
    let charged = fs::read_to_string(cgroup.join("memory.current"))?;
    write(&cgroup.join("memory.reclaim"), charged.trim_end())
}

/// The directory and those below it, parents first.
fn tree(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut directories = vec![root.to_owned()];
    let mut next = 0;
    while next < directories.len() {
        for entry in fs::read_dir(&directories[next])? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                directories.push(entry.path());
            }
        }
        next += 1;
    }
    Ok(directories)
}

fn remove_tree(root: &Path) -> io::Result<()> {
    for directory in tree(root)?.iter().rev() {
        fs::remove_dir(directory)?;
    }
    Ok(())
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

/// Into a file that the kernel made.
fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(path)?.write_all(value.as_bytes())
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Io { action, path, source }
}
