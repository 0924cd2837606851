//! Why nothing was run in a container.

use std::{io, path::PathBuf};

use bulkhead_host_shim::operator::PodAddressError;

use crate::{
    error::CommandError,
    process::{FAILED, ProcessError},
};

/// Why `bulkhead exec` has failed before, or instead of, the program. Names are the user's own, or were made
/// fit for one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecError {
    #[error("`bulkhead exec` must be run as root")]
    NotRoot,
    #[error(transparent)]
    Find(#[from] CommandError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("ended by a signal while the program was being started; it may have run")]
    MayHaveRun { status: u8 },
    #[error(
        "the pod {pod} cannot be looked at: it is made or removed at this moment, or its journal is damaged; try again, \
         and see what `bulkhead ps` says"
    )]
    Unknown { pod: String, source: Option<PodAddressError> },
    #[error(
        "the pod {pod} has crashed: its shim has died, and its VM is to be ended; delete it by the client that has \
         created it, such as kubectl, docker or ctr"
    )]
    Crashed { pod: String },
    #[error("the pod {pod} is a leftover, which no client knows any more; `bulkhead gc` removes it")]
    Leftover { pod: String },
    #[error("the pod {pod} has no shim that can be asked: it is a template that is being made")]
    NoShim { pod: String },
    #[error("the pod {pod} has no container: none was created in it yet, or all were deleted")]
    NoContainer { pod: String },
    #[error("the pod {pod} has several containers: {containers}; name one with --container")]
    SeveralContainers { pod: String, containers: String },
    #[error("the pod {pod} has no container {wanted}; it has {containers}")]
    NoSuchContainer { pod: String, wanted: String, containers: String },
    #[error("the container {container} was created and not started; start it first")]
    NotStarted { container: String },
    #[error("the container {container} is paused; resume it first, by the client that has paused it")]
    Paused { container: String },
    #[error("the container {container} has ended; its client removes it, or starts a new one")]
    Ended { container: String },
    #[error("another pod with the id {pod} has taken its place in this moment; try again")]
    Replaced { pod: String },
    #[error(
        "{most} programs of `bulkhead exec` run in this pod, and more could keep containerd from its shim; end one of \
         them first"
    )]
    TooMany { most: usize },
    #[error("{path}: cannot read the spec of the container")]
    Spec { path: PathBuf, source: io::Error },
    #[error("{path}: it is no spec of a container: it has no {field}")]
    NoField { path: PathBuf, field: &'static str },
    #[error(
        "--user {user}: the root directory {path} of the container cannot be read on the host; give a number"
    )]
    Root { user: String, path: PathBuf, source: io::Error },
    #[error("--user {user}: the files of the container do not answer within {seconds} s; give a number")]
    SlowRoot { user: String, seconds: u64 },
    #[error("{path}: cannot prepare it")]
    Prepare { path: PathBuf, source: io::Error },
    #[error("{path}: cannot remove it; `bulkhead gc` tries again")]
    Remove { path: PathBuf, source: io::Error },
}

impl ExecError {
    /// The exit status: 126 or 127 if there is no such program, as of a shell.
    pub(super) fn status(&self) -> u8 {
        match self {
            Self::Process(error) => error.status(),
            Self::MayHaveRun { status } => *status,
            _ => FAILED,
        }
    }
}
