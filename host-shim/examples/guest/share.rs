//! The share, which is a bind mount here, and not a virtio-fs mount.

use std::{fs, io, os::fd::AsFd, path::Path};

use bulkhead_agent::syscall::{MountAttr, attr, mount_setattr};
use bulkhead_agent_api::SHARE_DIR;
use nix::mount::{MsFlags, mount};

/// Mounts this directory as the share. What the shim mounts in it later arrives there too.
pub(crate) fn mount_from(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(SHARE_DIR)?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    Ok(mount(Some(directory), SHARE_DIR, None::<&str>, flags, None::<&str>)?)
}

/// Lets the programs and devices in the share be used. The shim forbids that on its mounts, and a guest sees only the
/// files below them.
pub(crate) fn lift_restrictions() -> io::Result<()> {
    let share = match fs::File::open(SHARE_DIR) {
        // The sandbox is not started.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    mount_setattr(share.as_fd(), true, &MountAttr::new(0, attr::NOSUID | attr::NODEV | attr::NOEXEC))
}
