//! The signals that a command passes on to its process.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::process::error::ProcessError;

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
pub(crate) const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// What a shell adds to the number of the signal that has ended a program.
pub(crate) const SIGNALLED: u8 = 128;

/// The exit status of a program that was killed.
pub(crate) const KILLED: u8 = SIGNALLED | SIGKILL.to_le_bytes()[0];

/// The signals that are passed on to the program.
pub(crate) struct Signals {
    hangup: Signal,
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// From now on, none of them ends this command.
    pub(crate) fn catch() -> Result<Self, ProcessError> {
        let catch = |kind| signal(kind).map_err(ProcessError::Begin);
        Ok(Self {
            hangup: catch(SignalKind::hangup())?,
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
        })
    }

    /// The next of them.
    pub(crate) async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.hangup.recv() => SIGHUP,
            _ = self.interrupt.recv() => SIGINT,
            _ = self.terminate.recv() => SIGTERM,
        }
    }
}

/// The signal came before the program ran.
pub(crate) fn interrupted(signal: i32) -> ProcessError {
    ProcessError::Interrupted { status: SIGNALLED | signal.to_le_bytes()[0] }
}
