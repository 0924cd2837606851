//! How processes end.

use std::time::SystemTime;

use protobuf::well_known_types::timestamp::Timestamp;

/// Exit status of a process that ended with its VM, as if by SIGKILL: 128 + 9.
const KILLED: u32 = 137;

/// Exit status of a process that could not be started.
const NOT_STARTED: u32 = 255;

/// How and when a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exit {
    /// 0..255, or 128 + the signal that killed it.
    pub(crate) status: u32,
    pub(crate) at: SystemTime,
}

impl Exit {
    /// It ended now, with everything else in its VM.
    pub(crate) fn killed() -> Self {
        Self { status: KILLED, at: SystemTime::now() }
    }

    /// Its execve never happened.
    pub(crate) fn not_started() -> Self {
        Self { status: NOT_STARTED, at: SystemTime::now() }
    }
}

/// As protobuf writes a time.
pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::from(time)
}
