//! The device nodes that a container can get, because the guest's kernel has these devices. The end-to-end tests
//! compare the list with the kernel.

/// A character device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CharDevice {
    /// Its usual path.
    pub path: &'static str,
    /// Linux has assigned its numbers for good (admin-guide/devices.txt), so that they mean the same device on the
    /// host.
    pub major: u32,
    /// See `major`.
    pub minor: u32,
}

/// All of them. The guest has no block device.
pub const DEVICES: &[CharDevice] = &[
    device("/dev/null", 1, 3),
    device("/dev/zero", 1, 5),
    device("/dev/full", 1, 7),
    device("/dev/random", 1, 8),
    device("/dev/urandom", 1, 9),
    // The log of the guest's kernel.
    device("/dev/kmsg", 1, 11),
    device("/dev/tty", 5, 0),
    device("/dev/ptmx", 5, 2),
    // The host's generator, by the virtio device.
    device("/dev/hwrng", 10, 183),
    device("/dev/net/tun", 10, 200),
    device("/dev/fuse", 10, 229),
];

const fn device(path: &'static str, major: u32, minor: u32) -> CharDevice {
    CharDevice { path, major, minor }
}
