//! A pod: its VM, its containers, and what they have on the host.

pub(crate) mod container;
pub(crate) mod cri;
mod devices;
pub(crate) mod files;
#[expect(clippy::module_inception, reason = "the type that the layer is named after")]
pub(crate) mod pod;
pub(crate) mod pod_vm;
pub(crate) mod request;
pub(crate) mod role;
pub(crate) mod usage;
