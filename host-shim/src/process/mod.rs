//! The processes of a container, and what becomes of them.

pub(crate) mod error;
pub(crate) mod exec;
pub(crate) mod exec_request;
pub(crate) mod oom;
pub(crate) mod state;
pub(crate) mod vm_end;
