//! The host's side of a vsock device.

use std::{
    os::unix::net::UnixListener,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

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
    pub(super) payload: Arc<Payload>,
}

/// The bytes of payload that the guest has received and sent. Those of a connection that was reset count too.
#[derive(Debug, Default)]
pub(super) struct Payload {
    received: AtomicU64,
    sent: AtomicU64,
}

impl Payload {
    pub(super) fn add_received(&self, bytes: u32) {
        self.received.fetch_add(bytes.into(), Ordering::Relaxed);
    }

    pub(super) fn add_sent(&self, bytes: u32) {
        self.sent.fetch_add(bytes.into(), Ordering::Relaxed);
    }

    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}
