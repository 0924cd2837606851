//! A pod: its VM, its containers, and what they have on the host.

mod block_io;
pub(crate) mod container;
pub(crate) mod container_files;
pub(crate) mod container_resources;
pub(crate) mod container_role;
pub(crate) mod create_request;
pub(crate) mod cri;
mod device_mounts;
mod devices;
mod guest_spec;
mod huge_pages;
#[expect(clippy::module_inception, reason = "the type that the layer is named after")]
pub(crate) mod pod;
pub(crate) mod pod_vm;
mod tmpfs_sizes;
pub(crate) mod vcpus;
