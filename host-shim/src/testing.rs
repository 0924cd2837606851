//! What several tests share.

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

/// Gives the test's thread, and the threads and processes that it starts, mounts of their own. Needs root, as the
/// shim does.
pub(crate) fn private_mounts() {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
}
