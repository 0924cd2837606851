//! A process that a shim starts for a command, with the streams and the terminal of the command: what `bulkhead run`
//! and `bulkhead exec` have in common.

pub(crate) mod attached;
pub(crate) mod client;
pub(crate) mod environment;
mod error;
pub(crate) mod locked_directory;
pub(crate) mod regular_file;
pub(crate) mod signals;
pub(crate) mod streams;
pub(crate) mod terminal;
pub(crate) mod user;

pub(crate) use self::error::{FAILED, ProcessError};
