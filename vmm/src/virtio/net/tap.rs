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

/// UDP datagrams of both versions of IP, which the kernel has left together.
pub(super) const UDP_SEGMENTS: u32 = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// A tap device. Reads and writes do not block.
pub struct Tap {
    fd: OwnedFd,
    has_uso: bool,
}

impl Tap {
    /// Makes the tap device `name` in the network namespace of this thread. The kernel removes it when this value is
    /// dropped.
    pub fn create(name: &str) -> io::Result<Self> {
        Self::new(tap::create(name)?)
    }

    /// Takes a tap device that [`tap::create`] has made, and asks the kernel whether it knows USO. Returns an error if
    /// `file` is something else.
    pub fn new(file: File) -> io::Result<Self> {
        let mut tap = Self { fd: file.into(), has_uso: false };
        tap.has_uso = tap.accepts(UDP_SEGMENTS)?;
        Ok(tap)
    }

    /// Whether the device can leave UDP datagrams together, and split those that its owner has left together.
    pub(super) fn has_uso(&self) -> bool {
        self.has_uso
    }

    /// Whether the kernel knows these offloads (TUN_F_*). Afterwards the reader accepts none.
    fn accepts(&self, flags: u32) -> io::Result<bool> {
        let accepted = match self.set_offload(libc::TUN_F_CSUM | flags) {
            Ok(()) => true,
            // An older kernel does not know them.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => false,
            Err(error) => return Err(error),
        };
        self.set_offload(0)?;
        Ok(accepted)
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

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Calls `story` with a tap device in a network namespace that ends with it.
    fn with_tap(story: impl FnOnce(&Tap) + Send + 'static) {
        let story = move || {
            crate::netns::enter(None).expect("this test makes a network namespace: run it as root");
            story(&Tap::create("tap0").expect("this test needs /dev/net/tun: modprobe tun"));
        };
        thread::spawn(story).join().unwrap();
    }

    /// As it is on a kernel that is older than USO.
    #[test]
    fn offloads_that_the_kernel_does_not_know_are_not_there() {
        with_tap(|tap| {
            assert!(tap.accepts(libc::TUN_F_TSO4 | libc::TUN_F_TSO6).unwrap());
            assert!(!tap.accepts(1 << 31).unwrap());
            assert!(!tap.accepts(UDP_SEGMENTS | 1 << 31).unwrap());
            assert!(tap.set_offload(libc::TUN_F_CSUM | libc::TUN_F_TSO4).is_ok());
        });
    }

    #[test]
    fn what_is_no_tap_is_refused() {
        let file = File::open("/dev/null").unwrap();
        assert!(Tap::new(file).is_err());
    }
}
