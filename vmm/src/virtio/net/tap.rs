//! A tap device of the host. Packets are read to guest memory and written from it without a copy.
//!
//! This is unsafe because no safe function exists for the ioctl of tap devices.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
};

use bulkhead_vmm_api::tap;
use vm_memory::VolatileSlice;
use vmm_sys_util::ioctl::ioctl_with_val;

use crate::virtio::iovecs::Iovecs;

/// A tap device. Reads and writes do not block.
pub struct Tap {
    fd: OwnedFd,
}

impl Tap {
    /// Makes the tap device `name` in the network namespace of this thread. The kernel removes it when this value is
    /// dropped.
    pub fn create(name: &str) -> io::Result<Self> {
        tap::create(name).map(Self::from)
    }

    /// Sets the offloads (TUN_F_*) that the reader of this device accepts.
    pub(super) fn set_offload(&self, flags: u32) -> io::Result<()> {
        // SAFETY: the argument of TUNSETOFFLOAD is a number, not an address.
        let result = unsafe { ioctl_with_val(&self.fd, libc::TUNSETOFFLOAD, flags.into()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Reads a packet to `slices`, and truncates it if it is longer. Returns the number of bytes that were written
    /// there.
    pub(super) fn read<'a, 'm: 'a>(
        &self,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        iovecs: &mut Iovecs,
    ) -> io::Result<usize> {
        iovecs.read(&self.fd, slices)
    }

    /// Writes the packet that is in `slices`.
    pub(super) fn write<'a, 'm: 'a>(
        &self,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        iovecs: &mut Iovecs,
    ) -> io::Result<usize> {
        iovecs.write(&self.fd, slices)
    }
}

/// One that was made by [`tap::create`].
impl From<File> for Tap {
    fn from(file: File) -> Self {
        Self { fd: file.into() }
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
