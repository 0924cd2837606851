//! How a program has ended.

use std::time::Duration;

/// The exit status after --timeout, as of timeout(1).
pub(super) const TIMED_OUT: u8 = 124;

/// How the program of a run has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Exited {
        status: u8,
        /// Whether the kernel has killed a process for want of memory.
        is_oom: bool,
    },
    TimedOut {
        after: Duration,
    },
    /// It was killed while it was being started: nobody knows whether it has run.
    Unknown {
        status: u8,
        /// The time of --timeout. None: a signal has ended it.
        after: Option<Duration>,
    },
}

impl End {
    pub(super) fn status(self) -> u8 {
        match self {
            Self::Exited { status, .. } | Self::Unknown { status, .. } => status,
            Self::TimedOut { .. } => TIMED_OUT,
        }
    }

    pub(super) fn message(self) -> String {
        match self {
            Self::Exited { status, is_oom: true } => {
                format!(
                    "exit status {status}, after a process was killed because the memory was full (--memory)"
                )
            }
            Self::Exited { status, is_oom: false } => format!("exit status {status}"),
            Self::TimedOut { after } => format!("it was killed after {after:?} (--timeout)"),
            Self::Unknown { after: Some(after), .. } => {
                format!(
                    "it was killed after {after:?} (--timeout) while it was being started; it may have run"
                )
            }
            Self::Unknown { after: None, .. } => {
                "it was killed after a signal while it was being started; it may have run".into()
            }
        }
    }
}
