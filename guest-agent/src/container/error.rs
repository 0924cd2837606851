//! Why something could not be done with a container.

use std::{io, time::Duration};

use crate::{
    cgroup::CgroupError, guest_reserve::HugePagesError, network::NetworkError, spec::SpecError,
    stage::launcher::ProcessError, streams::StreamMissing,
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
    /// The huge pages that it asks for.
    #[error(transparent)]
    HugePages(#[from] HugePagesError),
    /// The container's init, or another process of it.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The network card.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// Its request comes after that to undo it.
    #[error("update {0} is not made any more, because it was undone")]
    UpdateUndone(u64),
    /// It was started before.
    #[error("container {0} has been started already")]
    AlreadyStarted(String),
    /// It mounts no socket of the host there, or was deleted.
    #[error("mounts[{1}] of container {0} is no socket of the host")]
    NoHostSocket(String, u32),
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
