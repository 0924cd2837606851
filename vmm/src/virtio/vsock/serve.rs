//! The worker of a vsock device: its queues on one side, the muxer on the other.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixListener,
    },
    path::PathBuf,
    sync::Arc,
};

use nix::sys::timerfd::TimerFd;
use virtio_queue::{QueueOwnedT, QueueT};
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::{
    muxer::Muxer,
    packet::{HEADER_LEN, Header},
};
use crate::{
    GuestMemory,
    virtio::{
        ActiveQueue, Interrupt,
        chain::{Buffers, Chain, ChainError},
        queue::QueueError,
        worker::{Events, no_events},
    },
};

const TOKEN_RX: u64 = 0;
const TOKEN_TX: u64 = 1;
const TOKEN_LISTENER: u64 = 2;
const TOKEN_RETRY: u64 = 3;
const FIRST_PEER_TOKEN: u64 = 4;
/// Packets handled in one direction before the other direction, and the stop event, have their turn.
const TURN: usize = 256;
/// Packets after which the driver is told, so that it works on them while the device goes on.
const BATCH: usize = 16;

/// The host's side of the device.
#[derive(Clone)]
pub(super) struct Host {
    pub(super) listener: Arc<UnixListener>,
    /// Readable when clients that could not be accepted are to be tried again.
    pub(super) retry: Arc<TimerFd>,
    /// Path of `listener`, which the guest's connections to port P of the host extend by `_P`.
    pub(super) path: PathBuf,
    pub(super) guest_cid: u64,
}

/// Why a vsock device stopped serving its driver.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    #[error("a queue is broken")]
    Queue(#[from] QueueError),
    #[error("a packet's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("a chain of {len} bytes is too short for a packet's header")]
    NoHeader { len: usize },
    #[error("a packet says that it carries {said} bytes, its chain holds {held}")]
    Length { said: u32, held: usize },
    #[error("cannot wait for events")]
    Epoll(#[source] io::Error),
}

/// The guest's side of the device.
pub(super) struct Service<'m> {
    memory: &'m GuestMemory,
    rx: ActiveQueue,
    tx: ActiveQueue,
    interrupt: &'m Interrupt,
    /// The guest's queue may have packets for which no kick will come.
    tx_pending: bool,
    /// The same of its buffers for packets.
    rx_pending: bool,
}

impl<'m> Service<'m> {
    pub(super) fn new(
        memory: &'m GuestMemory,
        rx: ActiveQueue,
        tx: ActiveQueue,
        interrupt: &'m Interrupt,
    ) -> Self {
        // The driver may have filled both before their kicks were looked at.
        Self { memory, rx, tx, interrupt, tx_pending: true, rx_pending: true }
    }

    /// Serves until `stop` is readable, or the driver does something illegal. All connections end with it.
    pub(super) fn run(mut self, host: &Host, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop).map_err(ServeError::Epoll)?;
        for (fd, token) in [
            (self.rx.kick.as_raw_fd(), TOKEN_RX),
            (self.tx.kick.as_raw_fd(), TOKEN_TX),
            (host.listener.as_raw_fd(), TOKEN_LISTENER),
            (host.retry.as_fd().as_raw_fd(), TOKEN_RETRY),
        ] {
            events.watch(fd, EventSet::IN, token).map_err(ServeError::Epoll)?;
        }
        let mut muxer = Muxer::new(&events, host, FIRST_PEER_TOKEN);

        let mut came = no_events();
        loop {
            let busy = self.tx_pending && muxer.can_receive() || self.rx_pending && muxer.wants_to_send();
            let Some(came) = events.wait(busy, &mut came).map_err(ServeError::Epoll)? else { return Ok(()) };
            for (token, events) in came {
                match token {
                    TOKEN_RX => self.rx_pending = true,
                    TOKEN_TX => self.tx_pending = true,
                    TOKEN_LISTENER | TOKEN_RETRY => muxer.accept(),
                    token => muxer.on_event(token, events),
                }
            }
            self.receive(&mut muxer)?;
            self.send(&mut muxer)?;
        }
    }

    /// Takes what the guest sent, as long as there is room for the answers.
    fn receive(&mut self, muxer: &mut Muxer) -> Result<(), ServeError> {
        let mut unsaid = 0;
        for _ in 0..TURN {
            if !self.tx_pending || !muxer.can_receive() {
                break;
            }
            let Some(chain) = self.tx.pop(self.memory)? else {
                self.tx_pending = self.tx.rearm(self.memory)?;
                continue;
            };
            let Chain { head, mut readable, .. } = Chain::walk(self.memory, chain, self.tx.queue.size())?;
            let held = readable.len();
            let header = readable.read_array().ok_or(ServeError::NoHeader { len: held })?;
            let header = Header::parse(&header);
            if header.len as usize > readable.len() {
                return Err(ServeError::Length { said: header.len, held: readable.len() });
            }
            muxer.receive(&header, readable.split_front(header.len as usize));
            self.tx.push(self.memory, head, 0)?;
            unsaid += 1;
            if unsaid == BATCH {
                self.tx.notify(self.memory, self.interrupt)?;
                unsaid = 0;
            }
        }
        if unsaid > 0 {
            self.tx.notify(self.memory, self.interrupt)?;
        }
        Ok(())
    }

    /// Gives the guest what there is for it, as long as it has room.
    fn send(&mut self, muxer: &mut Muxer) -> Result<(), ServeError> {
        let mut unsaid = 0;
        for _ in 0..TURN {
            if !self.rx_pending || !muxer.wants_to_send() {
                break;
            }
            let Some(chain) = self.rx.pop(self.memory)? else {
                self.rx_pending = self.rx.rearm(self.memory)?;
                continue;
            };
            let Chain { head, mut writable, .. } = Chain::walk(self.memory, chain, self.rx.queue.size())?;
            let len = writable.len();
            let mut place: Buffers = writable.split_front(HEADER_LEN);
            if place.len() < HEADER_LEN {
                return Err(ServeError::NoHeader { len });
            }
            let Some(header) = muxer.next_packet(&writable) else {
                // Nothing after all; the chain stays available.
                self.rx.queue.go_to_previous_position();
                continue;
            };
            place.write(&header.to_bytes());
            self.rx.push(self.memory, head, HEADER_LEN as u32 + header.len)?;
            unsaid += 1;
            if unsaid == BATCH {
                self.rx.notify(self.memory, self.interrupt)?;
                unsaid = 0;
            }
        }
        if unsaid > 0 {
            self.rx.notify(self.memory, self.interrupt)?;
        }
        Ok(())
    }
}
