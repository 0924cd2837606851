//! Transfers packets between the queues of a vsock device and its connections.

use std::os::fd::{AsFd, AsRawFd};

use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::{
    host_sockets::{HostSockets, Payload},
    muxer::Muxer,
    packet::{HEADER_LEN, Header},
};
use crate::{
    GuestMemory,
    virtio::{
        ActiveQueue, Interrupt,
        chain::{Chain, ChainError},
        event_loop::{EventError, EventHandler, Events},
        queue::{Outcome, QueueError, Turn},
    },
};

const TOKEN_RX: u64 = 0;
const TOKEN_TX: u64 = 1;
const TOKEN_LISTENER: u64 = 2;
const TOKEN_RETRY: u64 = 3;
const FIRST_MUXER_TOKEN: u64 = 4;
/// Of each direction.
const TURN: Turn = Turn { chains: 256, batch: 16 };

/// Why a vsock device stops serving its driver.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    #[error("a queue is broken")]
    Queue(#[from] QueueError),
    #[error("a packet's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("a chain of {len} bytes is too short for a packet's header")]
    NoHeader { len: usize },
    #[error("a packet's header announces {announced} bytes of payload, but its chain contains {contained}")]
    Length { announced: u32, contained: usize },
    #[error(transparent)]
    Events(#[from] EventError),
}

/// The queues of the active device.
pub(super) struct Service<'m> {
    pub(super) memory: &'m GuestMemory,
    pub(super) interrupt: &'m Interrupt,
    pub(super) rx: ActiveQueue,
    pub(super) tx: ActiveQueue,
}

/// The active device.
struct Transfer<'m, 'e> {
    service: Service<'m>,
    payload: &'e Payload,
    muxer: Muxer<'e>,
    /// Whether the transmit queue may contain packets for which the driver will not notify the device.
    tx_pending: bool,
    /// Whether the receive queue may contain buffers for which the driver will not notify the device.
    rx_pending: bool,
}

impl Service<'_> {
    /// Serves until `stop` is signalled, or the driver does something illegal. Then it closes all connections.
    pub(super) fn run(self, host: &HostSockets, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop)?;
        for (fd, token) in [
            (self.rx.kick.as_raw_fd(), TOKEN_RX),
            (self.tx.kick.as_raw_fd(), TOKEN_TX),
            (host.listener.as_raw_fd(), TOKEN_LISTENER),
            (host.retry.as_fd().as_raw_fd(), TOKEN_RETRY),
        ] {
            events.watch(fd, EventSet::IN, token)?;
        }
        let muxer = Muxer::new(&events, host, FIRST_MUXER_TOKEN);
        events.run(&mut Transfer {
            service: self,
            payload: &host.payload,
            muxer,
            tx_pending: true,
            rx_pending: true,
        })
    }
}

impl EventHandler for Transfer<'_, '_> {
    type Error = ServeError;

    fn on_event(&mut self, token: u64, events: EventSet) -> Result<(), ServeError> {
        match token {
            TOKEN_RX => self.rx_pending = true,
            TOKEN_TX => self.tx_pending = true,
            TOKEN_LISTENER | TOKEN_RETRY => self.muxer.accept(),
            token => self.muxer.on_event(token, events),
        }
        Ok(())
    }

    fn serve_queues(&mut self) -> Result<bool, ServeError> {
        if self.tx_pending && self.muxer.can_receive() {
            self.receive()?;
        }
        if self.rx_pending && self.muxer.wants_to_send() {
            self.send()?;
        }
        Ok(self.tx_pending && self.muxer.can_receive() || self.rx_pending && self.muxer.wants_to_send())
    }
}

impl Transfer<'_, '_> {
    /// Passes the guest's packets to the muxer, as long as it has room for its answers.
    fn receive(&mut self) -> Result<(), ServeError> {
        let (Service { memory, interrupt, tx, .. }, muxer) = (&mut self.service, &mut self.muxer);
        let payload = self.payload;
        self.tx_pending = tx.serve(memory, interrupt, TURN, |mut chain: Chain| {
            if !muxer.can_receive() {
                return Ok(Outcome::Postponed);
            }
            let len = chain.readable.len();
            let header = chain.readable.read_array().ok_or(ServeError::NoHeader { len })?;
            let header = Header::parse(&header);
            let contained = chain.readable.len();
            if header.len as usize > contained {
                return Err(ServeError::Length { announced: header.len, contained });
            }
            payload.add_sent(header.len);
            muxer.receive(&header, chain.readable.split_front(header.len as usize));
            Ok(Outcome::Used(0))
        })?;
        Ok(())
    }

    /// Sends the muxer's packets to the guest, as long as the guest has buffers.
    fn send(&mut self) -> Result<(), ServeError> {
        let (Service { memory, interrupt, rx, .. }, muxer) = (&mut self.service, &mut self.muxer);
        let payload = self.payload;
        self.rx_pending = rx.serve(memory, interrupt, TURN, |mut chain: Chain| {
            let len = chain.writable.len();
            let mut front = chain.writable.split_front(HEADER_LEN);
            if front.len() < HEADER_LEN {
                return Err(ServeError::NoHeader { len });
            }
            let Some(header) = muxer.next_packet(&chain.writable) else { return Ok(Outcome::Postponed) };
            front.write(&header.to_bytes());
            payload.add_received(header.len);
            Ok(Outcome::Used(HEADER_LEN as u32 + header.len))
        })?;
        Ok(())
    }
}
