//! A process that a shim starts for a command, with the streams and the terminal of the command: what `bulkhead run`
//! and `bulkhead exec` have in common.

pub(crate) mod attached;
pub(crate) mod client;
pub(crate) mod environment;
mod error;
pub(crate) mod inherited;
pub(crate) mod locked_directory;
pub(crate) mod regular_file;
pub(crate) mod signals;
pub(crate) mod streams;
pub(crate) mod terminal;
pub(crate) mod user;

use tokio::runtime::{Builder, Runtime};

pub(crate) use self::error::{FAILED, ProcessError};

/// The runtime of a command: one thread.
pub(crate) fn runtime() -> Result<Runtime, ProcessError> {
    Builder::new_current_thread().enable_all().build().map_err(ProcessError::Begin)
}

/// For tests: the options of a command, from the words after its name.
#[cfg(test)]
pub(crate) fn options<O: clap::Args>(words: &[&str]) -> Result<O, clap::Error> {
    let line = [&["command"], words].concat();
    O::from_arg_matches(&O::augment_args(clap::Command::new("command")).try_get_matches_from(line)?)
}
