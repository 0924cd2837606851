//! What the shim does on the host, and the journal by which it is undone.

pub(crate) mod apparmor;
pub(crate) mod blocking;
pub(crate) mod cgroup;
pub(crate) mod cgroup_changes;
pub(crate) mod cgroup_limits;
pub(crate) mod child_log;
pub(crate) mod clock;
mod directory_lock;
pub(crate) mod hooks;
pub(crate) mod journal;
pub(crate) mod memory;
pub(crate) mod memory_promises;
pub(crate) mod memory_volumes;
mod mountinfo;
pub(crate) mod network;
pub(crate) mod no_symlinks;
pub(crate) mod pending_operations;
pub(crate) mod placeholder_process;
pub(crate) mod pod_cgroups;
pub(crate) mod process_id;
pub(crate) mod processors;
pub(crate) mod remount;
pub(crate) mod rootfs;
pub(crate) mod sandbox_files;
pub(crate) mod share;
pub(crate) mod state_dir;
pub(crate) mod undo;
