//! Why a process did not run.

use std::io;

/// The exit status where Bulkhead itself has failed, as of docker.
pub(crate) const FAILED: u8 = 125;

/// Why a command has failed before, or instead of, its process.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProcessError {
    #[error("--tty: standard input is no terminal")]
    NoTerminal,
    #[error("cannot set the modes of the terminal")]
    Terminal(#[source] io::Error),
    #[error("--env {name}: this command has no such variable; write {name}=VALUE")]
    NoVariable { name: String },
    #[error("--env {name}: the variable is not UTF-8")]
    NotUtf8 { name: String },
    #[error("--user {user}: {reason}")]
    User { user: String, reason: String },
    #[error("the working directory {path:?} is not absolute (--workdir)")]
    Workdir { path: String },
    #[error(
        "the current directory cannot be the program's working directory: {reason}; name another (--workdir)"
    )]
    CurrentDirectory { reason: String },
    #[error("cannot begin")]
    Begin(#[source] io::Error),
    #[error("cannot write the output of the program, which was therefore killed if it still ran")]
    Output(#[source] io::Error),
    #[error("the shim does not answer: {reason}")]
    Lost { reason: String },
    #[error("{0}")]
    Refused(String),
    #[error("{message}")]
    NoProgram { message: String, status: u8 },
    #[error("ended by a signal before the program ran")]
    Interrupted { status: u8 },
}

impl ProcessError {
    /// The exit status: 126 or 127 if there is no such program, as of a shell.
    pub(crate) fn status(&self) -> u8 {
        match self {
            Self::NoProgram { status, .. } | Self::Interrupted { status } => *status,
            _ => FAILED,
        }
    }
}
