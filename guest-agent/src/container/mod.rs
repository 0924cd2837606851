//! A container of the pod: create, start, signal, delete.

mod create;
mod delete;
mod signal;
mod start;
mod stdio;

use std::{io, sync::Arc};

use tokio::{sync::Mutex, task::AbortHandle};

pub use self::{
    create::{Environment, Request},
    stdio::StreamIds,
};
use crate::{
    cgroup::{Cgroup, CgroupError},
    process::parent::{Control, InitError},
    reaper::{Exit, ExitReceiver},
    spec::SpecError,
    streams::StreamMissing,
};

/// Why something could not be done with a container.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// The id could not name a directory.
    #[error(
        "{0:?} is no container id: letters, digits, '.', '_' and '-' make one, and a letter or digit begins it"
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
    /// The container's init.
    #[error(transparent)]
    Init(#[from] InitError),
    /// It was started before.
    #[error("container {0} has been started already")]
    AlreadyStarted(String),
    /// It runs.
    #[error("container {0} is still running")]
    Running(String),
    /// There is no process any more.
    #[error("process already finished")]
    Finished,
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
    pid: i32,
    cgroup: Arc<Cgroup>,
    /// The init's end.
    exit: ExitReceiver,
    /// The init's end, once its output was handed over.
    finished: ExitReceiver,
    /// Until it is started.
    control: Mutex<Option<Control>>,
    /// The copies of its streams.
    copies: Vec<AbortHandle>,
}

impl Container {
    /// Of its init, in the agent's pid namespace.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// How its init ended, once it has, and its output was handed to the stream connections.
    pub async fn wait(&self) -> Result<Exit, ContainerError> {
        let mut finished = self.finished.clone();
        let ended = finished.wait_for(Option::is_some).await;
        // The sender is gone without a value only if the guest is about to end.
        ended.ok().and_then(|exit| *exit).ok_or(ContainerError::Finished)
    }

    fn has_ended(&self) -> bool {
        self.exit.borrow().is_some()
    }
}
