//! What leaves the shim for others on the host: the streams of processes, loggers, and events for containerd.

pub(crate) mod events;
pub(crate) mod logger;
pub(crate) mod streams;
