//! Network device on a tap device (virtio 1.3, section 5.1).
//!
//! Each packet takes a single system call between the tap device and guest memory. If the driver agrees, checksums and
//! segmentation are left to the receiver on the other side of the tap device. A device has a pair of queues for each
//! queue of its tap device. [Threads](NetThreads) serve the pairs of all network devices of a VM, those with the same
//! number together.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

use virtio_bindings::{
    virtio_ids::VIRTIO_ID_NET,
    virtio_net::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4,
        VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_TSO4,
        VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ,
        VIRTIO_NET_F_MRG_RXBUF,
    },
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::QueueT;

pub use self::tap::Tap;
use self::{forwarding::ActivePair, pairs::Pairs, tap::Pace};
use super::{
    Activation, ActiveQueue, VirtioDevice, config_space::read_config, device_threads::Job,
    queue_threads::QueueThreads,
};
use crate::jail::{ThreadError, ThreadRole};

mod control;
mod forwarding;
mod header;
mod pairs;
#[allow(unsafe_code)]
mod tap;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

/// receiveq1 and transmitq1, receiveq2 and transmitq2, and so on (virtio 1.3, 5.1.2).
const PAIR_SIZES: [u16; 2] = [256, 256];
/// The control queue, which comes last.
const CONTROL_SIZE: u16 = 64;
/// Where it is if the driver has not negotiated VIRTIO_NET_F_MQ.
const SECOND_PAIR: usize = 2;

/// UFO (UDP fragmentation offload) is not offered, because tap devices of Linux do not support it any more. No command
/// of the control queue is about addresses. So the driver cannot change the MAC address, and receives all packets of
/// the tap device.
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

/// Offered if there are several pairs. Without them there is no control queue.
const PAIRS_FEATURES: [u32; 2] = [VIRTIO_NET_F_MQ, VIRTIO_NET_F_CTRL_VQ];

/// The threads of all network devices of a VM, and how often these may change their taps.
#[derive(Clone)]
pub struct NetThreads {
    threads: QueueThreads<ActivePair>,
    pace: Pace,
}

impl NetThreads {
    /// See [`QueueThreads::start`].
    pub fn start(count: usize) -> Result<Self, ThreadError> {
        Ok(Self { threads: QueueThreads::start(count)?, pace: Pace::default() })
    }

    /// See [`QueueThreads::count`].
    pub fn count(&self) -> usize {
        self.threads.count()
    }
}

/// The device.
pub struct Net {
    tap: Arc<Tap>,
    /// The configuration (virtio 1.3, 5.1.4): `mac`, and if there are several pairs `status` and `max_virtqueue_pairs`.
    config: Vec<u8>,
    queue_sizes: Vec<u16>,
    pairs: u16,
    /// How many pairs are in use, as the driver has said last.
    wanted: Arc<AtomicU16>,
    /// As above, for the driver of a device that continues. It has said so before the device was saved.
    restored: Option<u16>,
    threads: QueueThreads<ActivePair>,
    /// Its own in the threads.
    id: u32,
}

impl Net {
    /// Makes a device on a tap device, with the address `mac`, that `threads` serve. It has a pair of queues for each
    /// queue of the tap, if there are as many threads.
    pub fn new(tap: Tap, mac: [u8; 6], threads: &NetThreads) -> Self {
        let pairs = tap.queues().min(threads.count());
        let mut config = mac.to_vec();
        let mut queue_sizes = PAIR_SIZES.repeat(pairs);
        if pairs > 1 {
            let status = [0; 2];
            config.extend(status);
            config.extend((pairs as u16).to_le_bytes());
            queue_sizes.push(CONTROL_SIZE);
        }
        Self {
            tap: Arc::new(tap.with_pace(threads.pace.clone())),
            config,
            queue_sizes,
            pairs: pairs as u16,
            wanted: Arc::default(),
            restored: None,
            threads: threads.threads.clone(),
            id: threads.threads.register(),
        }
    }

    /// The queues of the pairs that the driver may use, and the control queue if there is one.
    fn sort(&self, queues: Vec<ActiveQueue>, features: u64) -> (Vec<[ActiveQueue; 2]>, Option<ActiveQueue>) {
        let has = |bit: u32| features & 1 << bit != 0;
        let pairs = if has(VIRTIO_NET_F_MQ) { usize::from(self.pairs) } else { 1 };
        // The place of the control queue is that of the second pair then (virtio 1.3, 5.1.2).
        let place = if has(VIRTIO_NET_F_MQ) { pairs * 2 } else { SECOND_PAIR };
        let mut queues: Vec<_> =
            queues.into_iter().map(|queue| Some(queue).filter(|it| it.queue.ready())).collect();
        let control = queues.get_mut(place).and_then(Option::take).filter(|_| has(VIRTIO_NET_F_CTRL_VQ));
        let pair = |pair: &mut [Option<ActiveQueue>]| match pair {
            [rx, tx] => Some([rx.take()?, tx.take()?]),
            _ => None,
        };
        // A driver that has not set a pair up cannot use those that follow.
        (queues.chunks_mut(2).take(pairs).map_while(pair).collect(), control)
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // A thread that does not stop keeps the tap device.
        let _ = self.threads.deactivate(self.id);
    }
}

/// The features that are offered on a tap device with or without USO, and with one queue or several.
fn offered(has_uso: bool, has_pairs: bool) -> u64 {
    let uso: &[u32] = if has_uso { &USO_FEATURES } else { &[] };
    let pairs: &[u32] = if has_pairs { &PAIRS_FEATURES } else { &[] };
    FEATURES.iter().chain(uso).chain(pairs).fold(0, |features, bit| features | 1 << bit)
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

    /// All devices have theirs together.
    fn threads(&self) -> usize {
        0
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    /// They depend on the kernel of the host. So a clone on a host with another kernel than its template may be refused
    /// (`snapshot/device_state.rs`).
    fn features(&self) -> u64 {
        offered(self.tap.has_uso(), self.pairs > 1)
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, queues, features, interrupt, log } = activation;
        let (pairs, mut control) = self.sort(queues, features);
        let ready = pairs.len() as u16;
        if ready == 0 {
            return Err(io::Error::other("the driver did not set up the queues of virtio-net"));
        }
        // At first the driver uses one (virtio 1.3, 5.1.6.5.5).
        self.wanted = Arc::new(AtomicU16::new(self.restored.take().unwrap_or(1)));
        let in_use = Arc::new(Pairs::new(self.wanted.clone(), ready, self.threads.wakers()));
        let part = |(index, [rx, tx]): (usize, [ActiveQueue; 2])| {
            Some(ActivePair {
                memory: memory.clone(),
                tap: self.tap.clone(),
                pairs: in_use.clone(),
                index,
                control: control.take(),
                rx,
                tx,
                interrupt: interrupt.clone(),
                log: log.clone(),
                mergeable: features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0,
                features,
                offload: offload(features),
            })
        };
        let parts = pairs.into_iter().enumerate().map(part).collect();
        self.threads.activate(self.id, parts)?;
        Ok(Vec::new())
    }

    fn deactivate(&mut self) -> io::Result<()> {
        self.threads.deactivate(self.id)
    }

    fn driver_state(&self) -> u16 {
        self.wanted.load(Ordering::SeqCst)
    }

    fn set_driver_state(&mut self, state: u16) -> io::Result<()> {
        if !(1..=self.pairs).contains(&state) {
            return Err(io::Error::other("it has fewer pairs of queues than its driver uses"));
        }
        self.restored = Some(state);
        Ok(())
    }
}
