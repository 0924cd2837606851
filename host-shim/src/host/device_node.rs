//! Device nodes of the host.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

use rustix::fs::{major, minor};

/// Where the kernel makes device nodes (devtmpfs).
pub(crate) const NODES: &str = "/dev";
/// Where the kernel lists character devices by their numbers (kernel, Documentation/ABI/stable/sysfs-dev).
const CHARACTER_DEVICES: &str = "/sys/dev/char";

/// A device node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceNode {
    /// It is of a block device, otherwise of a character device.
    pub(crate) is_block: bool,
    pub(crate) major: u32,
    pub(crate) minor: u32,
    /// Its permissions.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl DeviceNode {
    /// None: it is something else than a device node.
    pub(crate) fn of(found: &Metadata) -> Option<Self> {
        let (kind, number) = (found.file_type(), found.rdev());
        (kind.is_block_device() || kind.is_char_device()).then(|| Self {
            is_block: kind.is_block_device(),
            major: major(number),
            minor: minor(number),
            mode: found.mode() & 0o7777,
            uid: found.uid(),
            gid: found.gid(),
        })
    }

    /// What is at this path. A symbolic link is no device node.
    pub(crate) fn at(path: &Path) -> io::Result<Option<Self>> {
        fs::symlink_metadata(path).map(|found| Self::of(&found))
    }
}

/// Whether the host has a character device with these numbers.
pub(crate) fn is_character_device(major: i64, minor: i64) -> bool {
    Path::new(CHARACTER_DEVICES).join(format!("{major}:{minor}")).exists()
}
