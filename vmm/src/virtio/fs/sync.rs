//! Writes to the disks of the host what the guest has written to files.
//!
//! Linux sends SYNCFS for sync(2) and syncfs(2), once for each super block of virtio-fs, with the node of its root. The
//! guest has one super block for each device, whatever the host has mounted in the share. So the request does not say
//! for which file system syncfs(2) was called, and all of them are synced. On runc, sync(2) syncs all of the host.
//!
//! One of them may not respond, such as NFS, and then the request waits for it. A share handles one such request at a
//! time, so that takes one of its threads at most, whatever the guest sends (see `requests`).

use std::{
    collections::HashSet,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::{
    fs::{OFlags, syncfs},
    io::Errno,
};

use super::{
    abi::Result,
    file_server::{Answer, Server, done},
    identity::device_of,
};

impl Server {
    /// `fuse_syncfs_in`: syncs the file systems of all mounts that the guest uses, each once. Returns the first error,
    /// after all were tried.
    ///
    /// EBUSY: another thread does that. Only a driver that changes a request after it has sent it gets this.
    pub(super) fn sync_file_systems(&mut self) -> Result<Answer> {
        let shared = self.shared.clone();
        let _only = Syncing::begin(&shared.is_syncing)?;
        let mounts = self.tables().nodes.mounts();
        // A file system may have several mounts, and a mount several device numbers.
        let (mut synced, mut devices) = (HashSet::new(), HashSet::new());
        let mut result = Ok(done());
        for mounted in mounts {
            if synced.contains(&mounted.mount) || devices.contains(&mounted.device) {
                continue;
            }
            let opened = self.open_node(mounted.node, OFlags::RDONLY);
            match opened.and_then(|(file, stat)| syncfs(file).map(|()| stat)) {
                Ok(stat) => {
                    synced.insert(stat.stx_mnt_id);
                    devices.insert(device_of(&stat));
                }
                // The host has unmounted or replaced it.
                Err(Errno::STALE) => {}
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }
}

/// Exists while a thread of a share syncs.
struct Syncing<'s>(&'s AtomicBool);

impl<'s> Syncing<'s> {
    fn begin(is_syncing: &'s AtomicBool) -> Result<Self> {
        if is_syncing.swap(true, Ordering::AcqRel) { Err(Errno::BUSY) } else { Ok(Self(is_syncing)) }
    }
}

impl Drop for Syncing<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
