//! Tap devices as the VMM's network devices need them. Both the VMM and its client make them: the VMM those of its
//! configuration, before it is in its jail, and the client those that it attaches later.
//!
//! This is unsafe because no safe functions exist for the ioctls of tap devices.

use std::{
    ffi::{c_int, c_ulong},
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
};

/// Bytes of `struct virtio_net_hdr` with `num_buffers`, which precedes every packet (virtio 1.3, 5.1.6).
pub const HEADER_LEN: usize = 12;

/// An Ethernet interface whose packets have a virtio-net header and no other header in front.
const FLAGS: c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// `struct ifreq` with its flags.
#[repr(C)]
#[derive(Default)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: i16,
    rest: [u8; 22],
}

/// Makes the tap device `name` in the network namespace of this thread. Reads and writes do not block. The kernel
/// removes it when the file is closed.
pub fn create(name: &str) -> io::Result<File> {
    let mut request = Request { flags: FLAGS as i16, ..Request::default() };
    // The name must end with a NUL.
    let room = &mut request.name[..libc::IFNAMSIZ - 1];
    let place = room.get_mut(..name.len()).ok_or(io::ErrorKind::InvalidInput)?;
    place.copy_from_slice(name.as_bytes());
    let tun = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: TUNSETIFF reads a `struct ifreq`, and `request` has its layout.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as c_ulong, &raw const request) })?;
    let header_len = HEADER_LEN as c_int;
    // SAFETY: TUNSETVNETHDRSZ reads an int.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETVNETHDRSZ as c_ulong, &raw const header_len) })?;
    Ok(tun)
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
