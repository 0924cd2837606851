//! The device nodes that a container can get, because the guest's kernel has these devices. The end-to-end tests
//! compare the list with the kernel.

/// Whether a device transfers characters or blocks. The numbers of the two have nothing to do with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A character device.
    Char,
    /// A block device.
    Block,
}

/// A device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Its usual path.
    pub path: &'static str,
    /// See [`Kind`].
    pub kind: Kind,
    /// Linux has assigned its numbers for good (admin-guide/devices.txt), so that they mean the same device on the
    /// host.
    pub major: u32,
    /// See `major`.
    pub minor: u32,
}

/// All of them.
pub const DEVICES: &[Device] = &[
    char("/dev/null", 1, 3),
    char("/dev/zero", 1, 5),
    char("/dev/full", 1, 7),
    char("/dev/random", 1, 8),
    char("/dev/urandom", 1, 9),
    // The log of the guest's kernel.
    char("/dev/kmsg", 1, 11),
    char("/dev/tty", 5, 0),
    char("/dev/ptmx", 5, 2),
    // The host's generator, by the virtio device.
    char("/dev/hwrng", 10, 183),
    char("/dev/net/tun", 10, 200),
    char("/dev/fuse", 10, 229),
    char("/dev/btrfs-control", 10, 234),
    char("/dev/autofs", 10, 235),
    char("/dev/mapper/control", 10, 236),
    char("/dev/loop-control", 10, 237),
    // The guest's own, which are made of files of the guest.
    block("/dev/loop0", 7, 0),
    block("/dev/loop1", 7, 1),
    block("/dev/loop2", 7, 2),
    block("/dev/loop3", 7, 3),
    block("/dev/loop4", 7, 4),
    block("/dev/loop5", 7, 5),
    block("/dev/loop6", 7, 6),
    block("/dev/loop7", 7, 7),
];

const fn char(path: &'static str, major: u32, minor: u32) -> Device {
    Device { path, kind: Kind::Char, major, minor }
}

const fn block(path: &'static str, major: u32, minor: u32) -> Device {
    Device { path, kind: Kind::Block, major, minor }
}
