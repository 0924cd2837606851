//! The signals that a command passes on to its process.

use std::fs;

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

/// The signals that are passed on to the program, but for those that this command was started to ignore (nohup).
pub(crate) struct Signals {
    hangup: Option<Signal>,
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
}

impl Signals {
    /// From now on, none of them ends this command.
    pub(crate) fn catch() -> Result<Self, ProcessError> {
        // Without this file they are all caught.
        Self::catch_but(ignored(&fs::read_to_string("/proc/self/status").unwrap_or_default()))
    }

    fn catch_but(ignored: u64) -> Result<Self, ProcessError> {
        let catch = |number: i32| {
            let is_ignored = ignored >> (number - 1) & 1 == 1;
            (!is_ignored)
                .then(|| signal(SignalKind::from_raw(number)))
                .transpose()
                .map_err(ProcessError::Begin)
        };
        Ok(Self { hangup: catch(SIGHUP)?, interrupt: catch(SIGINT)?, terminate: catch(SIGTERM)? })
    }

    /// The next of them.
    pub(crate) async fn next(&mut self) -> i32 {
        tokio::select! {
            () = come(&mut self.hangup) => SIGHUP,
            () = come(&mut self.interrupt) => SIGINT,
            () = come(&mut self.terminate) => SIGTERM,
        }
    }
}

async fn come(signal: &mut Option<Signal>) {
    let came = match signal {
        Some(signal) => signal.recv().await,
        None => None,
    };
    if came.is_none() {
        std::future::pending().await
    }
}

/// The signals that a process ignores, by its `status` (proc_pid_status(5)): the lowest bit is the signal 1.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}

/// The signal came before the program ran.
pub(crate) fn interrupted(signal: i32) -> ProcessError {
    ProcessError::Interrupted { status: SIGNALLED | signal.to_le_bytes()[0] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_signal_that_is_ignored_stays_so() {
        // As of a program of nohup, which also ignores SIGPIPE.
        let ignored = ignored("Name:\tbulkhead\nSigBlk:\t0000000000000004\nSigIgn:\t0000000000001001\n");
        assert_eq!(ignored, 0x1001);
        let signals = Signals::catch_but(ignored).unwrap();
        assert!(signals.hangup.is_none() && signals.interrupt.is_some() && signals.terminate.is_some());
        let mut signals = Signals::catch_but(0).unwrap();
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGHUP).unwrap();
        assert_eq!(signals.next().await, SIGHUP);
    }
}
