//! virtio-vsock on Unix sockets (virtio 1.3, section 5.10).
//!
//! The host reaches a port of the guest by connecting to one Unix socket and writing `CONNECT <port>\n`, or `CONNECT
//! <port> <port of the host>\n` to have it come from a port of its choice; the guest reaches port P of the host at the
//! Unix socket of the same name with `_P` behind it. So nothing is asked of the host's kernel, and two VMs may have the
//! same CID.
//!
//! Bytes go between guest memory and the sockets without a stop, but for those that a Unix socket does not take at
//! once: they wait in the connection, within the credit that the guest was given.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::{
    errno::Errno,
    sys::timerfd::{ClockId, TimerFd, TimerFlags},
};
use virtio_bindings::{virtio_ids::VIRTIO_ID_VSOCK, virtio_ring::VIRTIO_RING_F_EVENT_IDX};
use virtio_queue::QueueT;

use self::serve::{Host, Service};
use super::{Activation, ActiveQueue, VirtioDevice, common, worker::Job};
use crate::jail::Duty;

mod connection;
mod muxer;
mod packet;
mod serve;
#[cfg(test)]
mod tests;

/// rx, tx, event (virtio 1.3, 5.10.2).
const QUEUE_SIZES: [u16; 3] = [256, 256, 16];
/// A CID is 32 bits wide; 0, 1 and 2 and the last one have a meaning of their own (virtio 1.3, 5.10.4).
const GUEST_CIDS: std::ops::Range<u64> = 3..0xffff_ffff;

/// Why there is no vsock device.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    #[error("{cid} cannot be a guest's CID, which is at least 3 and less than 0xffffffff")]
    Cid { cid: u64 },
    #[error("cannot listen at {}", path.display())]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot make a timer")]
    Timer(#[source] Errno),
}

/// The device.
pub struct Vsock {
    host: Host,
}

impl Vsock {
    /// Serves the clients of `listener`. The guest reaches port P of the host at `path` with `_P` behind it.
    pub fn new(listener: UnixListener, path: PathBuf, guest_cid: u64) -> Result<Self, VsockError> {
        if !GUEST_CIDS.contains(&guest_cid) {
            return Err(VsockError::Cid { cid: guest_cid });
        }
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let retry = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).map_err(VsockError::Timer)?;
        let (listener, retry) = (Arc::new(listener), Arc::new(retry));
        Ok(Self { host: Host { listener, retry, path, guest_cid } })
    }
}

/// Listens at `path`, which must not exist, is whoever's to remove who removes its directory, and is open to the VMM's own
/// user only. Clients that come before the guest's driver is ready wait.
pub fn listen(path: &Path) -> Result<UnixListener, VsockError> {
    let failed = |source| VsockError::Listen { path: path.to_owned(), source };
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

impl VirtioDevice for Vsock {
    fn duty(&self) -> Duty {
        Duty::Vsock
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    /// Streams only: without a feature bit of a socket type the type is stream (virtio 1.3, 5.10.3).
    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// `guest_cid` (virtio 1.3, 5.10.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        common::read_config(&self.host.guest_cid.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Job> {
        let Activation { memory, queues, interrupt, log, .. } = activation;
        // The event queue tells a driver that its connections are gone after a migration; there is none, so nothing
        // is ever put there.
        let Ok([rx, tx, _event]) = <[ActiveQueue; 3]>::try_from(queues) else {
            return Err(io::Error::other("virtio-vsock has three queues"));
        };
        if !rx.queue.ready() || !tx.queue.ready() {
            return Err(io::Error::other("the driver did not set up the queues of virtio-vsock"));
        }
        let host = self.host.clone();
        Ok(Box::new(move |stop| {
            let served = Service::new(&memory, rx, tx, &interrupt).run(&host, stop);
            common::conclude("virtio-vsock", served, &interrupt, &log);
        }))
    }
}
