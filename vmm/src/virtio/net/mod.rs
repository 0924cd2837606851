//! virtio-net on a tap (virtio 1.3, section 5.1).
//!
//! Packets go between the tap and guest memory in one system call each, in both directions; checksums and segmentation
//! are left to whoever is at the other end of the tap, where the driver agrees.

use std::{io, sync::Arc};

use virtio_bindings::{
    virtio_ids::VIRTIO_ID_NET,
    virtio_net::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
        VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
    },
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::QueueT;

use self::{
    serve::{HEADER_LEN, Service},
    tap::Tap,
};
use super::{Activation, ActiveQueue, VirtioDevice, common, worker::Job};
use crate::jail::Duty;

mod serve;
#[allow(unsafe_code)]
mod tap;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

/// receiveq1, transmitq1 (virtio 1.3, 5.1.2).
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// UDP is not cut by the device: Linux's taps do not send uncut UDP (UFO) any more. There is no control queue, so the
/// driver cannot change the card's address, and gets all that the tap has.
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

/// Why there is no network card.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    #[error("a tap takes /dev/net/tun and a name that is free")]
    Tap(#[source] io::Error),
}

/// The device.
pub struct Net {
    tap: Arc<Tap>,
    mac: [u8; 6],
}

impl Net {
    /// A card with the address `mac` on a new tap, `tap`, in this thread's network namespace.
    pub fn new(tap: &str, mac: [u8; 6]) -> Result<Self, NetError> {
        let tap = Tap::create(tap, HEADER_LEN as i32).map_err(NetError::Tap)?;
        Ok(Self { tap: Arc::new(tap), mac })
    }
}

/// What the tap may leave undone, TUN_F_*, for a driver with `features` (virtio 1.3, 5.1.3.1: none without the
/// checksum).
fn offload(features: u64) -> u32 {
    let has = |bit: u32| features & 1 << bit != 0;
    let flag = |bit, flag| if has(bit) { flag } else { 0 };
    if !has(VIRTIO_NET_F_GUEST_CSUM) {
        return 0;
    }
    libc::TUN_F_CSUM
        | flag(VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4)
        | flag(VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6)
}

impl VirtioDevice for Net {
    fn duty(&self) -> Duty {
        Duty::Net
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        FEATURES.iter().fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// `mac` (virtio 1.3, 5.1.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        common::read_config(&self.mac, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Job> {
        let Activation { memory, queues, features, interrupt, log } = activation;
        let Ok([rx, tx]) = <[ActiveQueue; 2]>::try_from(queues) else {
            return Err(io::Error::other("virtio-net has two queues"));
        };
        if !rx.queue.ready() || !tx.queue.ready() {
            return Err(io::Error::other("the driver did not set up the queues of virtio-net"));
        }
        let mergeable = features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
        let tap = self.tap.clone();
        Ok(Box::new(move |stop| {
            let service = Service::new(&memory, &tap, &interrupt, mergeable);
            let served = service.run(rx, tx, offload(features), stop);
            common::conclude("virtio-net", served, &interrupt, &log);
        }))
    }
}
