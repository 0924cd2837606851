//! Forwards packets between a pair of queues of a network device and a queue of its tap device.

use std::{collections::VecDeque, io, iter, os::fd::AsRawFd, sync::Arc};

use bulkhead_vmm_api::tap::HEADER_LEN;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress, VolatileSlice};
use vmm_sys_util::epoll::EventSet;

use super::{
    control::{CommandError, Controlled},
    header,
    pairs::Pairs,
    tap::{Tap, TapQueue},
};
use crate::{
    GuestMemory,
    jail::ThreadRole,
    rate_limited_log::RateLimitedLog,
    virtio::{
        ActiveQueue, Interrupt,
        chain::{Chain, ChainError},
        event_loop::{EventError, Events},
        iovecs::Iovecs,
        queue::{Outcome, QueueError, Turn},
        shared_thread::{ActiveDevice, Service},
    },
};

/// Offset of `num_buffers`, the last field.
const NUM_BUFFERS: usize = 10;
/// Bytes of the largest frame before segmentation, and with its header (virtio 1.3, 5.1.6.3.1).
const MAX_FRAME: usize = 65550;
const MAX_PACKET: usize = MAX_FRAME + HEADER_LEN;

/// The sources of a device's events.
const RX: u64 = 0;
const TX: u64 = 1;
const TAP: u64 = 2;
const CONTROL: u64 = 3;

/// Of each direction.
const TURN: Turn = Turn { chains: 256, batch: 32 };
/// Of the control queue.
const COMMANDS: Turn = Turn { chains: 4, batch: 1 };

/// Why a network device stops serving its driver.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error("a queue is broken")]
    Queue(#[from] QueueError),
    #[error("a packet's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("a chain of {len} bytes is too short for a packet's header")]
    NoHeader { len: usize },
    #[error("a command is illegal")]
    Command(#[from] CommandError),
    #[error("cannot set the offloads of the tap device")]
    Offload(#[source] io::Error),
    #[error("cannot attach or detach the queues of the tap device")]
    Queues(#[source] io::Error),
}

/// A pair of queues of an active device, and the control queue with the first pair.
pub(super) struct ActivePair {
    pub(super) memory: GuestMemory,
    pub(super) tap: Arc<Tap>,
    pub(super) pairs: Arc<Pairs>,
    /// Of the pair, and of the queue of the tap.
    pub(super) index: usize,
    pub(super) control: Option<ActiveQueue>,
    pub(super) rx: ActiveQueue,
    pub(super) tx: ActiveQueue,
    pub(super) interrupt: Arc<Interrupt>,
    pub(super) log: Arc<RateLimitedLog>,
    /// Whether a packet may span several chains (VIRTIO_NET_F_MRG_RXBUF).
    pub(super) mergeable: bool,
    /// Those that the driver has negotiated.
    pub(super) features: u64,
    /// The TUN_F_* flags of the offloads that the driver accepts.
    pub(super) offload: u32,
}

/// A pair that is being served.
pub(crate) struct Forwarding<'m> {
    memory: &'m GuestMemory,
    queue: Option<TapQueue<'m>>,
    controlled: Controlled<'m>,
    /// Of the pair.
    index: usize,
    control: Option<&'m mut ActiveQueue>,
    interrupt: &'m Interrupt,
    log: &'m RateLimitedLog,
    mergeable: bool,
    /// The offloads that are to be set, by the first pair.
    offload: Option<u32>,
    rx: &'m mut ActiveQueue,
    tx: &'m mut ActiveQueue,
    /// Chains that were taken from the receive queue and have no packet yet.
    free: VecDeque<Chain<'m>>,
    /// Writable bytes of these chains.
    free_len: usize,
    /// See [`ActiveQueue::notify_since`].
    rx_announced: u16,
    iovecs: Iovecs,
    /// Events are edge-triggered. So each of these stays set until an attempt shows that there is nothing left to do.
    tap_readable: bool,
    tap_writable: bool,
    rx_pending: bool,
    tx_pending: bool,
    control_pending: bool,
}

impl ActiveDevice for ActivePair {
    const NAME: &'static str = "virtio-net";
    const ROLE: ThreadRole = ThreadRole::Net;

    type Service<'d> = Forwarding<'d>;

    fn watch(&self, events: &Events, token: impl Fn(u64) -> u64) -> Result<(), EventError> {
        events.watch(self.rx.kick.as_raw_fd(), EventSet::IN, token(RX))?;
        events.watch(self.tx.kick.as_raw_fd(), EventSet::IN, token(TX))?;
        if let Some(control) = &self.control {
            events.watch(control.kick.as_raw_fd(), EventSet::IN, token(CONTROL))?;
        }
        let queue = self.tap.queue(self.index)?;
        events.watch(queue.as_raw_fd(), EventSet::IN | EventSet::OUT, token(TAP))
    }

    fn reporting(&self) -> (&Interrupt, &RateLimitedLog) {
        (&self.interrupt, &self.log)
    }

    fn begin(&mut self) -> Forwarding<'_> {
        Forwarding {
            memory: &self.memory,
            queue: self.tap.queue(self.index).ok().map(TapQueue),
            controlled: Controlled { tap: &self.tap, pairs: &self.pairs, features: self.features },
            index: self.index,
            control: self.control.as_mut(),
            interrupt: &self.interrupt,
            log: &self.log,
            mergeable: self.mergeable,
            offload: (self.index == 0).then_some(self.offload),
            rx_announced: self.rx.queue.next_used(),
            rx: &mut self.rx,
            tx: &mut self.tx,
            free: VecDeque::new(),
            free_len: 0,
            iovecs: Iovecs::default(),
            tap_readable: true,
            tap_writable: true,
            rx_pending: true,
            tx_pending: true,
            control_pending: true,
        }
    }
}

impl Service for Forwarding<'_> {
    type Error = ServeError;

    fn on_event(&mut self, source: u64, events: EventSet) {
        match source {
            RX => self.rx_pending = true,
            TX => self.tx_pending = true,
            CONTROL => self.control_pending = true,
            _ => {
                self.tap_readable |= events.contains(EventSet::IN);
                self.tap_writable |= events.contains(EventSet::OUT);
            }
        }
    }

    fn serve_queues(&mut self) -> Result<bool, ServeError> {
        if let Some(offload) = self.offload.take() {
            let Controlled { tap, pairs, .. } = self.controlled;
            tap.set_offload(offload).map_err(ServeError::Offload)?;
            pairs.begin(tap).map_err(ServeError::Queues)?;
        }
        if let Some(control) = &mut self.control
            && self.control_pending
        {
            let command = |chain: Chain| Ok::<_, ServeError>(self.controlled.command(chain)?);
            self.control_pending = control.serve(self.memory, self.interrupt, COMMANDS, command)?;
        }
        let is_busy = self.control.is_some() && self.control_pending;
        if !self.controlled.pairs.has(self.index) {
            return Ok(is_busy);
        }
        if self.tx_pending && self.tap_writable {
            self.transmit()?;
        }
        self.receive()?;
        let is_forwarding = self.tx_pending && self.tap_writable || self.rx_pending && self.tap_readable;
        Ok(is_busy || is_forwarding)
    }

    fn reporting(&self) -> (&Interrupt, &RateLimitedLog) {
        (self.interrupt, self.log)
    }

    /// The chains that have no packet yet are available again.
    fn end(self) {
        // Chains are used in the order in which the driver made them available.
        self.rx.queue.set_next_avail(self.rx.queue.next_used());
    }
}

impl Forwarding<'_> {
    /// Writes the guest's packets to the tap device, until that takes no more.
    fn transmit(&mut self) -> Result<(), ServeError> {
        let Some(queue) = self.queue else { return Ok(()) };
        let (iovecs, tap_writable, features) =
            (&mut self.iovecs, &mut self.tap_writable, self.controlled.features);
        self.tx_pending = self.tx.serve(self.memory, self.interrupt, TURN, |chain: Chain| {
            let mut frame = chain.readable;
            let len = frame.len();
            let Some(header) = frame.read_array() else { return Err(ServeError::NoHeader { len }) };
            // A packet that is dropped here is lost as on a wire, and so is one that the kernel rejects, which checks
            // the frame.
            if frame.len() <= MAX_FRAME
                && let Some(mut header) = header::checked(header, frame.len(), features)
                && let header = VolatileSlice::from(header.as_mut_slice())
                && let Err(error) = queue.write(iter::once(&header).chain(frame.slices()), iovecs)
                && matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
            {
                *tap_writable = error.kind() == io::ErrorKind::Interrupted;
                return Ok(Outcome::Postponed);
            }
            Ok(Outcome::Used(0))
        })?;
        Ok(())
    }

    /// Reads packets from the tap device to the guest, as long as the guest has buffers. Other packets stay in the
    /// queue of the tap device, which drops those that are too many.
    fn receive(&mut self) -> Result<(), ServeError> {
        let Some(queue) = self.queue else { return Ok(()) };
        let (memory, interrupt) = (self.memory, self.interrupt);
        let mut unannounced = 0;
        for _ in 0..TURN.chains {
            if !self.tap_readable || !self.take_free_chains()? {
                break;
            }
            let chains = if self.mergeable { self.free.len() } else { 1 };
            let slices = self.free.iter().take(chains).flat_map(|chain| chain.writable.slices());
            match queue.read(slices, &mut self.iovecs) {
                Ok(len) if len >= HEADER_LEN => {
                    self.deliver(len)?;
                    unannounced += 1;
                }
                // This is no packet.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The tap device has no packet, or is gone.
                Err(_) => self.tap_readable = false,
            }
            if unannounced == TURN.batch {
                self.rx.notify_since(memory, interrupt, &mut self.rx_announced)?;
                unannounced = 0;
            }
        }
        if unannounced > 0 {
            self.rx.notify_since(memory, interrupt, &mut self.rx_announced)?;
        }
        Ok(())
    }

    /// Takes chains from the receive queue until they have room for the largest packet. If packets cannot span
    /// several chains, takes a single chain: the driver has to make it large enough (virtio 1.3, 5.1.6.3.1). Returns
    /// false if the driver has to make more chains available.
    fn take_free_chains(&mut self) -> Result<bool, ServeError> {
        let (memory, rx) = (self.memory, &mut *self.rx);
        let enough = if self.mergeable { MAX_PACKET } else { 1 };
        while self.free_len < enough && self.free.len() < usize::from(rx.queue.size()) {
            let Some(chain) = rx.pop(memory)? else {
                self.rx_pending = rx.rearm(memory)?;
                if self.rx_pending {
                    continue;
                }
                return Ok(false);
            };
            let chain = Chain::walk(memory, chain, rx.queue.size())?;
            let len = chain.writable.len();
            if len < HEADER_LEN {
                return Err(ServeError::NoHeader { len });
            }
            self.free_len += len;
            self.free.push_back(chain);
        }
        Ok(true)
    }

    /// Gives the chains that contain a packet of `len` bytes back to the driver.
    fn deliver(&mut self, len: usize) -> Result<(), ServeError> {
        let mut used = Vec::with_capacity(1);
        let mut header = None;
        let mut rest = len;
        while rest > 0 {
            let Some(mut chain) = self.free.pop_front() else { break };
            let room = chain.writable.len();
            self.free_len -= room;
            let filled = room.min(rest);
            rest -= filled;
            used.push((chain.head, filled as u32));
            header.get_or_insert_with(|| chain.writable.split_front(HEADER_LEN));
        }
        if let Some(mut header) = header {
            header.split_front(NUM_BUFFERS);
            header.write(&(used.len() as u16).to_le_bytes());
        }
        push_together(self.rx, self.memory, &used)
    }
}

/// Gives several chains back at once, so that the driver never sees a part of a packet.
fn push_together(
    queue: &mut ActiveQueue,
    memory: &GuestMemory,
    used: &[(u16, u32)],
) -> Result<(), ServeError> {
    let Some(((head, len), before)) = used.split_last() else { return Ok(()) };
    if before.is_empty() {
        return Ok(queue.push(memory, *head, *len)?);
    }
    // All but the last are written to the used ring first. They become visible when the last one updates the index
    // (virtio 1.3, 2.7.8).
    let (ring, size) = (queue.queue.used_ring(), queue.queue.size());
    let mut next = queue.queue.next_used();
    for (head, len) in before {
        let slot = GuestAddress(ring + 4 + 8 * u64::from(next % size));
        let element = u64::from(*head) | u64::from(*len) << 32;
        memory.write_slice(&element.to_le_bytes(), slot).map_err(broken)?;
        next = next.wrapping_add(1);
    }
    queue.queue.set_next_used(next);
    Ok(queue.push(memory, *head, *len)?)
}

fn broken(error: vm_memory::GuestMemoryError) -> ServeError {
    ServeError::Queue(QueueError::Ring(virtio_queue::Error::GuestMemory(error)))
}
