//! A tap of the host, read and written straight from and to the guest's memory.
//!
//! The only unsafe code of the devices is here: the tap's ioctls have no safe form, and neither has a scattered read
//! or write of memory that somebody else changes meanwhile.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
};

use vm_memory::VolatileSlice;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

/// What the shim has to open the tap with.
pub(super) const FLAGS: i32 = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

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
    /// Takes the tap, whose packets will have headers of `header_len` bytes in front.
    pub(super) fn new(fd: OwnedFd, header_len: i32) -> io::Result<Self> {
        let mut request = Request::default();
        // SAFETY: TUNGETIFF writes one ifreq, and `request` is laid out as one.
        check(unsafe { ioctl_with_mut_ref(&fd, libc::TUNGETIFF, &mut request) })?;
        if i32::from(request.flags) & FLAGS != FLAGS {
            return Err(io::Error::other("it was not opened with IFF_TAP | IFF_NO_PI | IFF_VNET_HDR"));
        }
        // SAFETY: TUNSETVNETHDRSZ reads one int.
        check(unsafe { ioctl_with_ref(&fd, libc::TUNSETVNETHDRSZ, &header_len) })?;
        // SAFETY: FIONBIO reads one int.
        check(unsafe { ioctl_with_ref(&fd, libc::FIONBIO, &1i32) })?;
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
        let iovecs = iovecs.fill(slices);
        // SAFETY: each of `iovecs` is a piece of guest memory that its VolatileSlice has checked and keeps mapped until
        // this function returns. It is the guest's memory to lose, and no reference to it exists in Rust.
        let count = unsafe { libc::readv(self.fd.as_raw_fd(), iovecs.as_ptr(), iovecs.len() as i32) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Writes the packet that `slices` hold.
    pub(super) fn write<'a, 'm: 'a>(
        &self,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        iovecs: &mut Iovecs,
    ) -> io::Result<usize> {
        let iovecs = iovecs.fill(slices);
        // SAFETY: as above; the kernel copies the bytes once, and validates its copy.
        let count = unsafe { libc::writev(self.fd.as_raw_fd(), iovecs.as_ptr(), iovecs.len() as i32) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Room for the addresses of a packet's pieces, used again for each packet.
#[derive(Default)]
pub(super) struct Iovecs(Vec<libc::iovec>);

impl Iovecs {
    /// As many of `slices` as the kernel takes at once.
    fn fill<'a, 'm: 'a>(&mut self, slices: impl Iterator<Item = &'a VolatileSlice<'m>>) -> &[libc::iovec] {
        self.0.clear();
        self.0.extend(slices.take(libc::UIO_MAXIOV as usize).map(|slice| libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        }));
        &self.0
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
