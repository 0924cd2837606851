//! The identity of a file.

use rustix::fs::{FileType, Statx};

/// The identity of a file, from what `stat_at` (`file_stat`) has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Id {
    pub(super) device: u64,
    inode: u64,
    /// A directory may be mounted at two places, with different mounts below it. 0 for a meeting place.
    mount: u64,
    /// A hash of the target of a symbolic link; 0 for other files. The guest caches the target as long as the node.
    /// But a file system may use the inode number of a removed link for a new one, and links of procfs change their
    /// targets.
    target: i64,
}

impl Id {
    pub(super) fn of(stat: &Statx) -> Self {
        let device = u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor);
        let kind = kind_of(stat);
        let target = if kind == FileType::Symlink { stat.stx_btime.tv_sec } else { 0 };
        let mount = if is_meeting_place(kind) { 0 } else { stat.stx_mnt_id };
        Self { device, inode: stat.stx_ino, mount, target }
    }
}

/// Whether processes of the guest meet at files of this kind: sockets and pipes. Containers of a pod mount a volume
/// each for itself, and meet only if the guest's kernel has one inode for both.
pub(super) fn is_meeting_place(kind: FileType) -> bool {
    matches!(kind, FileType::Socket | FileType::Fifo)
}

pub(super) fn kind_of(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}
