//! A tap device of the host. Packets are read to guest memory and written from it without a copy.
//!
//! This is unsafe because no safe functions exist for the ioctls of tap devices.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
};

use vm_memory::VolatileSlice;
use vmm_sys_util::ioctl::{ioctl_with_ref, ioctl_with_val};

use crate::virtio::iovecs::Iovecs;

/// An Ethernet interface whose packets have a virtio-net header and no other header in front.
const FLAGS: i32 = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// `struct ifreq` with its flags.
#[repr(C)]
#[derive(Default)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: i16,
    rest: [u8; 22],
}

/// A tap device. Reads and writes do not block.
pub(super) struct Tap {
    fd: OwnedFd,
}

impl Tap {
    /// Makes the tap device `name` in the network namespace of this thread. Its packets have virtio-net headers of
    /// `header_len` bytes. The kernel removes it when this value is dropped.
    pub(super) fn create(name: &str, header_len: i32) -> io::Result<Self> {
        let mut request = Request { flags: FLAGS as i16, ..Request::default() };
        // The name must end with a NUL.
        let room = &mut request.name[..libc::IFNAMSIZ - 1];
        let place = room.get_mut(..name.len()).ok_or(io::ErrorKind::InvalidInput)?;
        place.copy_from_slice(name.as_bytes());
        let tun =
            File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
        let fd = OwnedFd::from(tun);
        // SAFETY: TUNSETIFF reads a `struct ifreq`, and `request` has its layout.
        check(unsafe { ioctl_with_ref(&fd, libc::TUNSETIFF, &request) })?;
        // SAFETY: TUNSETVNETHDRSZ reads an int.
        check(unsafe { ioctl_with_ref(&fd, libc::TUNSETVNETHDRSZ, &header_len) })?;
        Ok(Self { fd })
    }

    /// Sets the offloads (TUN_F_*) that the reader of this device accepts.
    pub(super) fn set_offload(&self, flags: u32) -> io::Result<()> {
        // SAFETY: the argument of TUNSETOFFLOAD is a number, not an address.
        check(unsafe { ioctl_with_val(&self.fd, libc::TUNSETOFFLOAD, flags.into()) })
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

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
