//! The share, which is a bind mount here, and not a virtio-fs mount.

use std::{fs, io, os::fd::AsFd, path::Path};

use bulkhead_agent::syscall::{MountAttr, attr, mount_setattr};
use bulkhead_agent_api::{ROOTS_DIR, SHARE_DIR};
use nix::mount::{MsFlags, mount};

/// Mounts this directory as the share at `place`. What the shim mounts in it later arrives there too.
pub(crate) fn mount_from(directory: &Path, place: &Path) -> io::Result<()> {
    fs::create_dir_all(place)?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    Ok(mount(Some(directory), place, None::<&str>, flags, None::<&str>)?)
}

/// Lets the programs and devices in the share be used. The shim forbids that on its mounts, and a guest sees only the
/// files below them.
pub(crate) fn lift_restrictions() -> io::Result<()> {
    for place in [SHARE_DIR, ROOTS_DIR] {
        let share = match fs::File::open(place) {
            // The sandbox is not started.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        mount_setattr(share.as_fd(), true, &MountAttr::new(0, attr::NOSUID | attr::NODEV | attr::NOEXEC))?;
    }
    Ok(())
}
