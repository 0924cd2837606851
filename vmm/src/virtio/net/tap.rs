//! A tap of the host, read and written straight from and to the guest's memory.
//!
//! This is unsafe because the tap's ioctls have no safe form.

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

/// An Ethernet interface, packets with nothing but virtio-net headers in front.
const FLAGS: i32 = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// `struct ifreq` with its flags.
#[repr(C)]
#[derive(Default)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: i16,
    rest: [u8; 22],
}

/// A tap with virtio-net headers. Reads and writes do not wait.
pub(super) struct Tap {
    fd: OwnedFd,
}

impl Tap {
    /// Makes the tap `name` in this thread's network namespace. Its packets have headers of `header_len` bytes in
    /// front; it is gone when the value is.
    pub(super) fn create(name: &str, header_len: i32) -> io::Result<Self> {
        let mut request = Request { flags: FLAGS as i16, ..Request::default() };
        // The last byte stays 0.
        let room = &mut request.name[..libc::IFNAMSIZ - 1];
        let place = room.get_mut(..name.len()).ok_or(io::ErrorKind::InvalidInput)?;
        place.copy_from_slice(name.as_bytes());
        let tun =
            File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
        let fd = OwnedFd::from(tun);
        // SAFETY: TUNSETIFF reads one ifreq, and `request` is laid out as one.
        check(unsafe { ioctl_with_ref(&fd, libc::TUNSETIFF, &request) })?;
        // SAFETY: TUNSETVNETHDRSZ reads one int.
        check(unsafe { ioctl_with_ref(&fd, libc::TUNSETVNETHDRSZ, &header_len) })?;
        Ok(Self { fd })
    }

    /// What the reader of the tap can handle, TUN_F_*.
    pub(super) fn set_offload(&self, flags: u32) -> io::Result<()> {
        // SAFETY: TUNSETOFFLOAD takes a number and touches no memory.
        check(unsafe { ioctl_with_val(&self.fd, libc::TUNSETOFFLOAD, flags.into()) })
    }

    /// Reads one packet to `slices`, cut off where they end. Returns the bytes that were written.
    pub(super) fn read<'a, 'm: 'a>(
        &self,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        iovecs: &mut Iovecs,
    ) -> io::Result<usize> {
        iovecs.read(&self.fd, slices)
    }

    /// Writes the packet that `slices` hold.
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
