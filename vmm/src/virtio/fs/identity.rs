//! The identity of a file.

use bulkhead_vmm_api::SharedSocket;
use rustix::fs::{FileType, Statx};

use super::file_stat::FileStat;

/// The identity of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Id {
    pub(super) device: u64,
    inode: u64,
    /// A directory may be mounted twice, with different mounts below it. 0 for a socket or a FIFO.
    mount: u64,
    /// A hash of the target of a symbolic link; 0 for other files. The guest caches the target as long as the node.
    /// But a file system may use the inode number of a removed link for a new one, and links of procfs change their
    /// targets.
    target_hash: u64,
}

impl Id {
    pub(super) fn of(stat: &FileStat) -> Self {
        let mount = if is_socket_or_fifo(kind_of(stat)) { 0 } else { stat.stx_mnt_id };
        Self { device: device_of(stat), inode: stat.stx_ino, mount, target_hash: stat.target_hash }
    }

    /// That of a socket.
    pub(super) fn of_socket(socket: &SharedSocket) -> Self {
        Self { device: device(socket.major, socket.minor), inode: socket.inode, mount: 0, target_hash: 0 }
    }
}

/// The number of the file system that a file is on.
pub(super) fn device_of(stat: &Statx) -> u64 {
    device(stat.stx_dev_major, stat.stx_dev_minor)
}

fn device(major: u32, minor: u32) -> u64 {
    u64::from(major) << 32 | u64::from(minor)
}

/// Whether processes of the guest communicate by files of this kind: sockets and FIFOs. Each container of a pod mounts
/// a volume for itself. Two of them reach the same socket only if the guest's kernel has one inode for both mounts.
pub(super) fn is_socket_or_fifo(kind: FileType) -> bool {
    matches!(kind, FileType::Socket | FileType::Fifo)
}

pub(super) fn kind_of(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}
