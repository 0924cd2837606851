//! A container of the pod: create, start, exec, signal, pause, update, delete.

mod create;
mod delete;
mod exec;
mod network;
mod oom;
mod pause;
mod process;
mod signal;
mod start;
mod stats;
mod stdio;
mod update;

use std::{io, os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Duration};

use tokio::sync::{Mutex, RwLock};

use self::exec::Execs;
pub use self::{
    create::{Environment, Joined, Request},
    exec::ExecRequest,
    oom::OomCounts,
    process::Process,
    stdio::StreamIds,
};
use crate::{
    cgroup::{Cgroup, CgroupError},
    config::CommonConfig,
    network::NetworkError,
    process::parent::{Control, ProcessError},
    spec::SpecError,
    streams::StreamMissing,
};

/// Why something could not be done with a container.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// The id could not name a directory.
    #[error(
        "{0:?} is no id of a container or process: letters, digits, '.', '_' and '-' make one, and a letter or digit \
         begins it"
    )]
    Id(String),
    /// The spec is refused.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A standard stream is missing.
    #[error(transparent)]
    Stream(#[from] StreamMissing),
    /// The cgroup.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The container's init, or another process of it.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The network card.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// It was started before.
    #[error("container {0} has been started already")]
    AlreadyStarted(String),
    /// It runs.
    #[error("container {0} is still running")]
    Running(String),
    /// Its init has ended. As runc words it.
    #[error("cannot exec in a stopped container")]
    Stopped,
    /// A container of the pod whose namespace was wanted.
    #[error("container {0}, whose namespace is to be joined, has ended")]
    JoinedEnded(String),
    /// Its processes are stopped.
    #[error("cannot exec in a paused container")]
    Paused,
    /// They go on.
    #[error("not all processes of the container stopped within {} s", .0.as_secs())]
    NotPaused(Duration),
    /// A process has this id.
    #[error("exec {0} already exists")]
    ExecExists(String),
    /// No process has this id.
    #[error("exec {0} not found")]
    NoExec(String),
    /// There is no process any more.
    #[error("process already finished")]
    Finished,
    /// It has no terminal.
    #[error("the process has no terminal")]
    NoTerminal,
    /// Not a size of a terminal.
    #[error("a window of {width} x {height} is more than a terminal can have")]
    WindowSize {
        /// Columns.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// No such signal.
    #[error("{0} is no signal")]
    Signal(u32),
    /// The system refused.
    #[error("{action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// A container whose init exists or has existed.
pub struct Container {
    id: String,
    cgroup: Arc<Cgroup>,
    init: Arc<Process>,
    /// By which other processes enter the container.
    init_pidfd: OwnedFd,
    /// Until it is started.
    control: Mutex<Option<Control>>,
    /// Held while a process joins.
    is_paused: RwLock<bool>,
    /// Of its init, and of each process that joins it.
    common: CommonConfig,
    /// Files below /proc/sys and their values, for when it is started.
    interface_sysctls: Vec<(PathBuf, String)>,
    /// Its other processes that the agent has made.
    execs: Arc<Execs>,
}

impl Container {
    /// Of its init, in the agent's pid namespace.
    pub fn pid(&self) -> i32 {
        self.init.pid()
    }
}

/// As containerd demands of ids, which also makes them names of files.
fn check_id(id: &str) -> Result<(), ContainerError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let begins_well = id.starts_with(|c: char| c.is_ascii_alphanumeric());
    if begins_well && id.len() <= 200 && id.chars().all(is_allowed) {
        Ok(())
    } else {
        Err(ContainerError::Id(id.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_plain_names() {
        for id in ["demo", "0a-b_c.d", "f00"] {
            check_id(id).unwrap();
        }
        for id in ["", ".", "..", "a/b", "-a", ".a", "a b", "\u{e4}", &"a".repeat(201)] {
            assert!(check_id(id).is_err(), "{id:?}");
        }
    }
}
