//! Socket device (virtio 1.3, section 5.10) on Unix sockets of the host.
//!
//! A process of the host connects to a port of the guest in two steps: it connects to the Unix socket of the device,
//! and writes `CONNECT <port>\n`. With `CONNECT <port> <port of the host>\n` it chooses the source port. The guest
//! reaches port P of the host at the Unix socket of the same name with `_P` appended. The kernel of the host needs no
//! vsock support, and VMs may share a CID.
//!
//! Payload goes directly between guest memory and the Unix sockets. If a Unix socket takes only a part, the
//! connection keeps the rest, which is limited by the credit that the guest has.

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

use self::{
    host_sockets::{HostSockets, Payload},
    transfer::Service,
};
use super::{Activation, ActiveQueue, VirtioDevice, config_space::read_config, device, device_threads::Job};
use crate::jail::ThreadRole;

mod connection;
mod host_sockets;
mod muxer;
mod packet;
#[cfg(test)]
mod tests;
mod transfer;

/// rx, tx, event (virtio 1.3, 5.10.2).
const QUEUE_SIZES: [u16; 3] = [256, 256, 16];
/// CIDs have 32 bits. 0, 1, 2 and 0xffffffff are reserved (virtio 1.3, 5.10.4).
const GUEST_CIDS: std::ops::Range<u64> = 3..0xffff_ffff;

/// Why a vsock device could not be made.
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
    host: HostSockets,
}

impl Vsock {
    /// Makes a device that accepts connections of the host at `listener`. The guest reaches port P of the host at the
    /// socket `path` with `_P` appended.
    pub fn new(listener: UnixListener, path: PathBuf, guest_cid: u64) -> Result<Self, VsockError> {
        if !GUEST_CIDS.contains(&guest_cid) {
            return Err(VsockError::Cid { cid: guest_cid });
        }
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let retry = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).map_err(VsockError::Timer)?;
        let (listener, retry) = (Arc::new(listener), Arc::new(retry));
        Ok(Self { host: HostSockets { listener, retry, path, guest_cid, payload: Arc::default() } })
    }

    /// The VMM's side of the device.
    pub fn control(&self) -> VsockControl {
        VsockControl(self.host.payload.clone())
    }
}

/// The VMM's side of the device: how much has passed it.
pub struct VsockControl(Arc<Payload>);

impl VsockControl {
    /// Bytes of payload that the guest has received since the VMM has started.
    pub fn received(&self) -> u64 {
        self.0.received()
    }

    /// Bytes of payload that the guest has sent.
    pub fn sent(&self) -> u64 {
        self.0.sent()
    }
}

/// Listens at `path`, which must not exist. Only the user of the VMM can connect. Connections wait until the guest's
/// driver is ready. The VMM does not remove the socket.
pub fn listen(path: &Path) -> Result<UnixListener, VsockError> {
    let failed = |source| VsockError::Listen { path: path.to_owned(), source };
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

impl VirtioDevice for Vsock {
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Vsock
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    /// If no socket type is negotiated, the device supports stream sockets only (virtio 1.3, 5.10.3).
    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// `guest_cid` (virtio 1.3, 5.10.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config(&self.host.guest_cid.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, queues, interrupt, log, .. } = activation;
        // The event queue is for VIRTIO_VSOCK_EVENT_TRANSPORT_RESET after a migration (virtio 1.3, 5.10.6.7). VMs are
        // not migrated, so the device does not use the queue.
        let Ok([rx, tx, _event]) = <[ActiveQueue; 3]>::try_from(queues) else {
            return Err(io::Error::other("virtio-vsock has 3 queues"));
        };
        if !rx.queue.ready() || !tx.queue.ready() {
            return Err(io::Error::other("the driver did not set up the queues of virtio-vsock"));
        }
        let host = self.host.clone();
        Ok(vec![device::job("virtio-vsock", interrupt, log, move |interrupt, stop| {
            Service { memory: &memory, interrupt, rx, tx }.run(&host, stop)
        })])
    }
}
