//! What leaves the shim for others on the host: the streams of processes, loggers, and events for containerd.

pub(crate) mod events;
mod file_writer;
pub(crate) mod logger;
pub(crate) mod streams;
