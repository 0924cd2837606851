//! The worker of a network card: its queues on one side, the tap on the other.

use std::{collections::VecDeque, io, os::fd::AsRawFd};

use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::tap::Tap;
use crate::{
    GuestMemory,
    virtio::{
        ActiveQueue, Interrupt,
        chain::{Chain, ChainError},
        iovecs::Iovecs,
        queue::QueueError,
        worker::{Events, no_events},
    },
};

/// `struct virtio_net_hdr_v1`, in front of every packet (virtio 1.3, 5.1.6).
pub(super) const HEADER_LEN: usize = 12;
/// Where `num_buffers` is in it, its last two bytes.
const NUM_BUFFERS: usize = 10;
/// The largest packet that is still to be cut, and its header (virtio 1.3, 5.1.6.3.1).
const MAX_PACKET: usize = 65550 + HEADER_LEN;

const TOKEN_RX: u64 = 0;
const TOKEN_TX: u64 = 1;
const TOKEN_TAP: u64 = 2;
/// Packets handled in one direction before the other direction, and the stop event, have their turn.
const TURN: usize = 256;
/// Packets after which the driver is told, so that it works on them while the device goes on.
const BATCH: usize = 32;

/// Why a network card stopped serving its driver.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    #[error("a queue is broken")]
    Queue(#[from] QueueError),
    #[error("a packet's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("a chain of {len} bytes is too short for a packet's header")]
    NoHeader { len: usize },
    #[error("cannot wait for events")]
    Epoll(#[source] io::Error),
    #[error("the tap does not do what the driver leaves undone")]
    Offload(#[source] io::Error),
}

/// The card at work.
pub(super) struct Service<'m> {
    memory: &'m GuestMemory,
    tap: &'m Tap,
    interrupt: &'m Interrupt,
    /// A packet may lie in several chains (VIRTIO_NET_F_MRG_RXBUF).
    mergeable: bool,
    /// Chains that were taken from the receive queue and wait for packets, and their bytes.
    room: VecDeque<Chain<'m>>,
    room_len: usize,
    iovecs: Iovecs,
    /// What may be possible, as far as is known: events are edge-triggered.
    tap_readable: bool,
    tap_writable: bool,
    rx_pending: bool,
    tx_pending: bool,
}

impl<'m> Service<'m> {
    pub(super) fn new(
        memory: &'m GuestMemory,
        tap: &'m Tap,
        interrupt: &'m Interrupt,
        mergeable: bool,
    ) -> Self {
        Self {
            memory,
            tap,
            interrupt,
            mergeable,
            room: VecDeque::new(),
            room_len: 0,
            iovecs: Iovecs::default(),
            tap_readable: true,
            tap_writable: true,
            rx_pending: true,
            tx_pending: true,
        }
    }

    /// Serves until `stop` is readable, or the driver does something illegal. `offload`, TUN_F_*: what the driver can
    /// handle.
    pub(super) fn run(
        mut self,
        mut rx: ActiveQueue,
        mut tx: ActiveQueue,
        offload: u32,
        stop: &EventFd,
    ) -> Result<(), ServeError> {
        self.tap.set_offload(offload).map_err(ServeError::Offload)?;
        let events = Events::new(stop).map_err(ServeError::Epoll)?;
        for (fd, wanted, token) in [
            (rx.kick.as_raw_fd(), EventSet::IN, TOKEN_RX),
            (tx.kick.as_raw_fd(), EventSet::IN, TOKEN_TX),
            (self.tap.as_raw_fd(), EventSet::IN | EventSet::OUT, TOKEN_TAP),
        ] {
            events.watch(fd, wanted, token).map_err(ServeError::Epoll)?;
        }

        let mut came = no_events();
        loop {
            let busy = self.tx_pending && self.tap_writable || self.rx_pending && self.tap_readable;
            let Some(came) = events.wait(busy, &mut came).map_err(ServeError::Epoll)? else { return Ok(()) };
            for (token, events) in came {
                match token {
                    TOKEN_RX => self.rx_pending = true,
                    TOKEN_TX => self.tx_pending = true,
                    _ => {
                        self.tap_readable |= events.contains(EventSet::IN);
                        self.tap_writable |= events.contains(EventSet::OUT);
                    }
                }
            }
            self.transmit(&mut tx)?;
            self.receive(&mut rx)?;
        }
    }

    /// Writes the guest's packets to the tap, as long as it takes them.
    fn transmit(&mut self, tx: &mut ActiveQueue) -> Result<(), ServeError> {
        let mut unsaid = 0;
        for _ in 0..TURN {
            if !self.tx_pending || !self.tap_writable {
                break;
            }
            let Some(chain) = tx.pop(self.memory)? else {
                self.tx_pending = tx.rearm(self.memory)?;
                continue;
            };
            let Chain { head, readable: packet, .. } = Chain::walk(self.memory, chain, tx.queue.size())?;
            if packet.len() < HEADER_LEN {
                return Err(ServeError::NoHeader { len: packet.len() });
            }
            // The kernel checks the header and the packet. What it does not take for good is dropped, as on a wire.
            if packet.len() <= MAX_PACKET
                && let Err(error) = self.tap.write(packet.slices(), &mut self.iovecs)
                && matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
            {
                self.tap_writable = error.kind() == io::ErrorKind::Interrupted;
                tx.queue.go_to_previous_position();
                continue;
            }
            tx.push(self.memory, head, 0)?;
            unsaid += 1;
            if unsaid == BATCH {
                tx.notify(self.memory, self.interrupt)?;
                unsaid = 0;
            }
        }
        if unsaid > 0 {
            tx.notify(self.memory, self.interrupt)?;
        }
        Ok(())
    }

    /// Reads the tap's packets to the guest, as long as it has room. Meanwhile they wait in the tap's own queue, which
    /// drops what is too much.
    fn receive(&mut self, rx: &mut ActiveQueue) -> Result<(), ServeError> {
        let mut unsaid = 0;
        for _ in 0..TURN {
            if !self.tap_readable || !self.make_room(rx)? {
                break;
            }
            let chains = if self.mergeable { self.room.len() } else { 1 };
            let slices = self.room.iter().take(chains).flat_map(|chain| chain.writable.slices());
            match self.tap.read(slices, &mut self.iovecs) {
                Ok(len) if len >= HEADER_LEN => {
                    self.deliver(rx, len)?;
                    unsaid += 1;
                }
                // Not a packet.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Empty, or gone for good.
                Err(_) => self.tap_readable = false,
            }
            if unsaid == BATCH {
                rx.notify(self.memory, self.interrupt)?;
                unsaid = 0;
            }
        }
        if unsaid > 0 {
            rx.notify(self.memory, self.interrupt)?;
        }
        Ok(())
    }

    /// Takes chains until the largest packet has room or the driver can give no more; without merging until there is one,
    /// of which the driver has to see that it is large enough (virtio 1.3, 5.1.6.3.1). False: the driver has to make more
    /// available.
    fn make_room(&mut self, rx: &mut ActiveQueue) -> Result<bool, ServeError> {
        let enough = if self.mergeable { MAX_PACKET } else { 1 };
        while self.room_len < enough && self.room.len() < usize::from(rx.queue.size()) {
            let Some(chain) = rx.pop(self.memory)? else {
                self.rx_pending = rx.rearm(self.memory)?;
                if self.rx_pending {
                    continue;
                }
                return Ok(false);
            };
            let chain = Chain::walk(self.memory, chain, rx.queue.size())?;
            let len = chain.writable.len();
            if len < HEADER_LEN {
                return Err(ServeError::NoHeader { len });
            }
            self.room_len += len;
            self.room.push_back(chain);
        }
        Ok(true)
    }

    /// Gives the driver the chains that a packet of `len` bytes lies in.
    fn deliver(&mut self, rx: &mut ActiveQueue, len: usize) -> Result<(), ServeError> {
        let mut used = Vec::with_capacity(1);
        let mut header = None;
        let mut rest = len;
        while rest > 0 {
            let Some(mut chain) = self.room.pop_front() else { break };
            let room = chain.writable.len();
            self.room_len -= room;
            let filled = room.min(rest);
            rest -= filled;
            used.push((chain.head, filled as u32));
            header.get_or_insert_with(|| chain.writable.split_front(HEADER_LEN));
        }
        if let Some(mut header) = header {
            header.split_front(NUM_BUFFERS);
            header.write(&(used.len() as u16).to_le_bytes());
        }
        push_together(rx, self.memory, self.interrupt, &used)
    }
}

/// Gives several chains back at once, so that the driver never sees a packet in part.
fn push_together(
    queue: &mut ActiveQueue,
    memory: &GuestMemory,
    interrupt: &Interrupt,
    used: &[(u16, u32)],
) -> Result<(), ServeError> {
    let Some(((head, len), before)) = used.split_last() else { return Ok(()) };
    if before.is_empty() {
        return Ok(queue.push(memory, *head, *len)?);
    }
    // All but the last are written to the used ring first (virtio 1.3, 2.7.8), and become visible with the last.
    let (ring, size) = (queue.queue.used_ring(), queue.queue.size());
    let mut next = queue.queue.next_used();
    for (head, len) in before {
        let slot = GuestAddress(ring + 4 + 8 * u64::from(next % size));
        let element = u64::from(*head) | u64::from(*len) << 32;
        memory.write_slice(&element.to_le_bytes(), slot).map_err(broken)?;
        next = next.wrapping_add(1);
    }
    queue.queue.set_next_used(next);
    queue.push(memory, *head, *len)?;
    // Whether the driver wants to know is counted in `push` only, so it is always told.
    Ok(interrupt.used().map_err(QueueError::Interrupt)?)
}

fn broken(error: vm_memory::GuestMemoryError) -> ServeError {
    ServeError::Queue(QueueError::Ring(virtio_queue::Error::GuestMemory(error)))
}
