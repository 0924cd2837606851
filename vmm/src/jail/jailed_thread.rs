//! Starts threads that enter their jail before they do anything else.

use std::{
    io,
    sync::mpsc::{Receiver, channel},
    thread::{Builder, JoinHandle},
};

use super::{JailError, ThreadRole, enter_thread};

/// Why a thread did not start.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    #[error("cannot start the thread {name}")]
    Start { name: String, source: io::Error },
    #[error(transparent)]
    Jail(#[from] JailError),
    #[error("the thread {name} ended before it was ready")]
    Ended { name: String },
}

/// A thread that may still be entering its jail.
pub struct StartedThread {
    name: String,
    handle: JoinHandle<()>,
    jailed: Receiver<Result<(), JailError>>,
}

impl StartedThread {
    /// Waits until the thread has entered its jail.
    pub fn wait(self) -> Result<JoinHandle<()>, ThreadError> {
        let Self { name, handle, jailed } = self;
        jailed.recv().map_err(|_| ThreadError::Ended { name })??;
        Ok(handle)
    }
}

/// Starts a thread called `name`, and returns when the thread has entered the jail of its role. The thread then runs
/// `body`.
pub fn spawn(
    name: String,
    role: ThreadRole,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, ThreadError> {
    start(name, role, body)?.wait()
}

/// Does the same without waiting, so that several threads enter their jails at the same time.
pub fn start(
    name: String,
    role: ThreadRole,
    body: impl FnOnce() + Send + 'static,
) -> Result<StartedThread, ThreadError> {
    let (entered, jailed) = channel();
    let confined = move || {
        let confined = enter_thread(role);
        let failed = confined.is_err();
        if entered.send(confined).is_ok() && !failed {
            body();
        }
    };
    match Builder::new().name(name.clone()).spawn(confined) {
        Ok(handle) => Ok(StartedThread { name, handle, jailed }),
        Err(source) => Err(ThreadError::Start { name, source }),
    }
}
