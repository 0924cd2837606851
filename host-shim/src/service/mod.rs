//! What containerd calls: the commands of the program, the server, and its Task and Sandbox services.

pub(crate) mod args;
pub(crate) mod bootstrap;
mod caller;
mod connections;
pub(crate) mod delete;
pub(crate) mod info;
mod log_format;
pub(crate) mod logging;
pub(crate) mod rpc_status;
pub(crate) mod sandbox;
pub(crate) mod server;
pub(crate) mod task;
pub(crate) mod undo;
