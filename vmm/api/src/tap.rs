//! Tap devices as the VMM's network devices need them. Both the VMM and its client make them: the VMM those of its
//! configuration, before it is in its jail, and the client those that it attaches later. And what the client needs of
//! an interface whose packets it redirects to one.
//!
//! This is unsafe because no safe functions exist for the ioctls of tap devices, and for this option of a socket.

use std::{
    ffi::{c_int, c_ulong},
    fs::File,
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
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

/// Makes the tap device `name` in the network namespace of this thread, with this many queues. Each file is a queue.
/// Reads and writes do not block. The kernel removes the device when all of them are closed. It is an error if there is
/// one of this name: with several queues, these would become queues of another VMM's.
pub fn create(name: &str, queues: usize) -> io::Result<Vec<File>> {
    let several = if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    let new = |queue| if queue == 0 { libc::IFF_TUN_EXCL } else { 0 };
    (0..queues).map(|queue| open_queue(name, FLAGS | several | new(queue))).collect()
}

/// Makes the device with its first queue, or adds a queue to the device.
fn open_queue(name: &str, flags: c_int) -> io::Result<File> {
    let mut request = Request { flags: flags as i16, ..Request::default() };
    // The name must end with a NUL.
    let room = &mut request.name[..libc::IFNAMSIZ - 1];
    let place = room.get_mut(..name.len()).ok_or(io::ErrorKind::InvalidInput)?;
    place.copy_from_slice(name.as_bytes());
    let tun = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: TUNSETIFF reads and writes a `struct ifreq`, and `request` has its layout.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as c_ulong, &raw mut request) })?;
    let header_len = HEADER_LEN as c_int;
    // SAFETY: TUNSETVNETHDRSZ reads an int.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETVNETHDRSZ as c_ulong, &raw const header_len) })?;
    Ok(tun)
}

/// Attaches a queue to its tap device, or detaches it. The kernel gives packets to attached queues only. A new queue is
/// attached. It is an error if it is so already.
pub fn set_attached(queue: &impl AsRawFd, is_attached: bool) -> io::Result<()> {
    let flags = if is_attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
    let request = Request { flags: flags as i16, ..Request::default() };
    // SAFETY: TUNSETQUEUE reads a `struct ifreq`, and `request` has its layout.
    check(unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNSETQUEUE as c_ulong, &raw const request) })
}

/// Has the interface `index` of this thread's network namespace pass on packets to all multicast groups, and not only
/// to those that the host has joined, until the socket that is returned is closed (packet(7), PACKET_MR_ALLMULTI).
/// Others who ask for that, or stop doing so, are not disturbed. The socket receives nothing.
pub fn pass_all_multicast(index: u32) -> io::Result<OwnedFd> {
    let index = c_int::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the arguments are numbers.
    let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    check(socket)?;
    // SAFETY: socket(2) has just made this descriptor, and nobody else knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let request = libc::packet_mreq {
        mr_ifindex: index,
        mr_type: libc::PACKET_MR_ALLMULTI as u16,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    let len = size_of_val(&request) as libc::socklen_t;
    let (level, name) = (libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP);
    // SAFETY: the value of PACKET_ADD_MEMBERSHIP is a `struct packet_mreq` of this length.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const request).cast(), len) })?;
    Ok(socket)
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
