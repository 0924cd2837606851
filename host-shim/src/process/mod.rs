//! The processes of a container, and what becomes of them.

pub(crate) mod error;
pub(crate) mod exec;
pub(crate) mod exec_request;
pub(crate) mod failure;
pub(crate) mod oom;
#[expect(clippy::module_inception, reason = "the type that the layer is named after")]
pub(crate) mod process;
pub(crate) mod running_guest;
pub(crate) mod state;
