//! Threads that are in their jails before they have anything to do.

use std::{
    io,
    sync::mpsc::channel,
    thread::{Builder, JoinHandle},
};

use super::{Duty, JailError, enter_thread};

/// Why there is no such thread.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    #[error("cannot start the thread {name}")]
    Start { name: String, source: io::Error },
    #[error(transparent)]
    Jail(#[from] JailError),
    #[error("the thread {name} ended before it was ready")]
    Ended { name: String },
}

/// Starts a thread called `name`, and returns when it is in the jail of its duty. There it does `body`.
pub fn spawn(
    name: String,
    duty: Duty,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, ThreadError> {
    let (entered, jailed) = channel();
    let confined = move || {
        let confined = enter_thread(duty);
        let failed = confined.is_err();
        // Whoever starts it waits for this word.
        if entered.send(confined).is_ok() && !failed {
            body();
        }
    };
    match Builder::new().name(name.clone()).spawn(confined) {
        Ok(thread) => {
            jailed.recv().map_err(|_| ThreadError::Ended { name })??;
            Ok(thread)
        }
        Err(source) => Err(ThreadError::Start { name, source }),
    }
}
