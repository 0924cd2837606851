//! Why the VMM cannot enter its jail.

use std::{io, path::PathBuf};

use super::{landlock::LandlockError, seccomp::FilterError};

/// A part of the jail that could not be set up. The VMM does not run without it.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error("cannot enter the jail: cannot close the file descriptors that the VMM inherited")]
    Descriptors(#[source] io::Error),
    #[error("cannot enter the jail: cannot set {what}")]
    Set { what: &'static str, source: io::Error },
    #[error("cannot enter the jail: cannot bind {path} into it")]
    Source { path: PathBuf, source: io::Error },
    #[error("cannot enter the jail: cannot make {what}")]
    Root { what: &'static str, source: io::Error },
    #[error("cannot enter the jail: cannot set the Landlock rules")]
    Landlock(#[from] LandlockError),
    #[error("cannot enter the jail: cannot install the seccomp filter of the thread {thread}")]
    Filter { thread: &'static str, source: FilterError },
}
