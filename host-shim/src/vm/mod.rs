//! The client of the VMM: its process, its sockets, and templates.

pub(crate) mod control_socket;
pub(crate) mod memory;
pub(crate) mod start;
pub(crate) mod template;
pub(crate) mod vmm;
pub(crate) mod vsock;
mod working_set;
