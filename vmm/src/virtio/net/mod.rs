//! Network device on a tap device (virtio 1.3, section 5.1).
//!
//! Each packet takes a single system call between the tap device and guest memory. If the driver agrees, checksums and
//! segmentation are left to the receiver on the other side of the tap device. One [thread](NetThread) serves all
//! network devices of a VM.

use std::{io, sync::Arc};

use virtio_bindings::{
    virtio_ids::VIRTIO_ID_NET,
    virtio_net::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
        VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
        VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
    },
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::QueueT;

use self::forwarding::ActiveCard;
pub use self::tap::Tap;
use super::{
    Activation, ActiveQueue, VirtioDevice, config_space::read_config, device_threads::Job,
    shared_thread::SharedThread,
};
use crate::jail::ThreadRole;

mod forwarding;
mod header;
#[allow(unsafe_code)]
mod tap;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

/// receiveq1, transmitq1 (virtio 1.3, 5.1.2).
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// UFO (UDP fragmentation offload) is not offered, because tap devices of Linux do not support it any more. There is no
/// control queue. So the driver cannot change the MAC address, and receives all packets of the tap device.
const FEATURES: [u32; 10] = [
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_RING_F_INDIRECT_DESC,
    VIRTIO_RING_F_EVENT_IDX,
];

/// USO (UDP segmentation offload) both ways. Offered if the tap device accepts [`tap::UDP_SEGMENTS`]: these came to
/// Linux together with the type of segments in a packet's header (6.2).
const USO_FEATURES: [u32; 3] = [VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_USO];

/// The thread of all network devices of a VM.
pub type NetThread = SharedThread<ActiveCard>;

/// The device.
pub struct Net {
    tap: Arc<Tap>,
    mac: [u8; 6],
    thread: NetThread,
    /// Its own in the thread.
    id: u32,
}

impl Net {
    /// Makes a device on a tap device, with the address `mac`, that `thread` serves.
    pub fn new(tap: Tap, mac: [u8; 6], thread: &NetThread) -> Self {
        Self { tap: Arc::new(tap), mac, thread: thread.clone(), id: thread.register() }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // A thread that does not stop keeps the tap device.
        let _ = self.thread.deactivate(self.id);
    }
}

/// The features that are offered on a tap device with or without USO.
fn offered(has_uso: bool) -> u64 {
    let uso: &[u32] = if has_uso { &USO_FEATURES } else { &[] };
    FEATURES.iter().chain(uso).fold(0, |features, bit| features | 1 << bit)
}

/// The TUN_F_* flags of the offloads that a driver with `features` accepts. Without GUEST_CSUM there are none (virtio
/// 1.3, 5.1.3.1). Linux has one switch for USO4 and USO6, and refuses one without the other.
fn offload(features: u64) -> u32 {
    let has = |bit: u32| features & 1 << bit != 0;
    let flag = |bit, flag| if has(bit) { flag } else { 0 };
    let uso = has(VIRTIO_NET_F_GUEST_USO4) && has(VIRTIO_NET_F_GUEST_USO6);
    if !has(VIRTIO_NET_F_GUEST_CSUM) {
        return 0;
    }
    libc::TUN_F_CSUM
        | flag(VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4)
        | flag(VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6)
        | if uso { tap::UDP_SEGMENTS } else { 0 }
}

impl VirtioDevice for Net {
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Net
    }

    /// All devices have one together.
    fn threads(&self) -> usize {
        0
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    /// They depend on the kernel of the host. So a clone on a host with another kernel than its template may be refused
    /// (`snapshot/device_state.rs`).
    fn features(&self) -> u64 {
        offered(self.tap.has_uso())
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// `mac` (virtio 1.3, 5.1.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config(&self.mac, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, queues, features, interrupt, log } = activation;
        let Ok([rx, tx]) = <[ActiveQueue; 2]>::try_from(queues) else {
            return Err(io::Error::other("virtio-net has 2 queues"));
        };
        if !rx.queue.ready() || !tx.queue.ready() {
            return Err(io::Error::other("the driver did not set up the queues of virtio-net"));
        }
        let card = ActiveCard {
            memory,
            tap: self.tap.clone(),
            rx,
            tx,
            interrupt,
            log,
            mergeable: features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0,
            features,
            offload: offload(features),
        };
        self.thread.activate(self.id, card)?;
        Ok(Vec::new())
    }

    fn deactivate(&mut self) -> io::Result<()> {
        self.thread.deactivate(self.id)
    }
}
