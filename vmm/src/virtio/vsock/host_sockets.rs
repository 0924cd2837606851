//! The host's side of a vsock device.

use std::{os::unix::net::UnixListener, path::PathBuf, sync::Arc};

use nix::sys::timerfd::TimerFd;

/// The sockets of the host, by which its processes and the guest connect to each other.
#[derive(Clone)]
pub(super) struct HostSockets {
    /// Accepts connections from the host to the guest.
    pub(super) listener: Arc<UnixListener>,
    /// Readable when the device has to try again to accept connections.
    pub(super) retry: Arc<TimerFd>,
    /// The path of `listener`. With `_P` appended it is the socket that the guest reaches as port P of the host.
    pub(super) path: PathBuf,
    pub(super) guest_cid: u64,
}
