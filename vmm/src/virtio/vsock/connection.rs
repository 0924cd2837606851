//! One stream between a Unix socket of the host and a vsock socket of the guest (virtio 1.3, 5.10.6).

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    net::Shutdown,
    num::Wrapping,
    os::unix::net::UnixStream,
};

use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile};
use vmm_sys_util::epoll::EventSet;

use super::packet::{
    HOST_CID, Header, OP_CREDIT_REQUEST, OP_CREDIT_UPDATE, OP_REQUEST, OP_RESPONSE, OP_RW, OP_SHUTDOWN,
    SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM,
};
use crate::virtio::chain::Buffers;

/// The size of the receive buffer of a connection, for a host that does not read. It is four of Linux's largest
/// packets (64 KiB), so that the guest can continue to send until a credit update arrives.
pub(super) const BUF_ALLOC: u32 = 256 * 1024;
/// The device sends a credit update when half of the buffer was freed, unless another packet has reported that.
const CREDIT_STEP: u32 = BUF_ALLOC / 2;
/// The largest payload of a packet to the guest. Linux has the same limit.
const MAX_PAYLOAD: usize = 64 * 1024;

/// The ports of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// The state of a connection after a packet or an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It continues.
    Alive,
    /// It has ended, and the guest must get a RST. Data that the guest has sent is still delivered.
    Reset,
    /// It has ended, and the guest knows that. Data that the guest has sent is still delivered.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The host has connected. OP_REQUEST must be sent to the guest.
    Request,
    /// OP_REQUEST was sent, and the guest has not answered yet.
    Requested,
    /// The guest has connected. OP_RESPONSE must be sent to it.
    Response,
    Established,
}

/// One connection.
pub(super) struct Connection {
    pub(super) ports: Ports,
    guest_cid: u64,
    phase: Phase,
    to_host: ToHost,
    to_guest: ToGuest,
    /// Whether the connection is in the queue of those that have something to send.
    pub(super) queued: bool,
}

/// The direction from the guest to the host. Counters are modulo 2^32, as in packets.
pub(super) struct ToHost {
    stream: UnixStream,
    /// Data that the Unix socket has not taken yet, at most [`BUF_ALLOC`].
    waiting: VecDeque<u8>,
    received: Wrapping<u32>,
    /// The number of bytes that were delivered, or dropped because the host has closed the socket.
    forwarded: Wrapping<u32>,
    /// The value of `forwarded` in the last packet to the guest.
    reported: Wrapping<u32>,
    /// The guest sends no more data.
    ended: bool,
    /// The Unix socket was shut down for writing after that.
    is_shut_down: bool,
    /// The host reads no more data.
    host_closed: bool,
    /// A credit update must be sent.
    update_due: bool,
}

/// The direction from the host to the guest.
struct ToGuest {
    sent: Wrapping<u32>,
    peer_alloc: u32,
    peer_forwarded: Wrapping<u32>,
    /// Whether the Unix socket may have data. Its events are edge-triggered, so this stays set until a read returns
    /// EAGAIN.
    readable: bool,
    /// The host sends no more data.
    ended: bool,
    /// The guest receives no more data.
    guest_closed: bool,
    /// OP_CREDIT_REQUEST was sent, and the guest has given no credit since.
    credit_requested: bool,
    /// The flags of the last OP_SHUTDOWN that was sent.
    shutdown_sent: u32,
}

impl Connection {
    /// A connection from a client of the host to the guest.
    pub(super) fn from_host(stream: UnixStream, ports: Ports, guest_cid: u64) -> Self {
        Self::new(stream, ports, guest_cid, Phase::Request)
    }

    /// A connection from the guest, which has sent `request`, to `stream`.
    pub(super) fn from_guest(stream: UnixStream, request: &Header, guest_cid: u64) -> Self {
        let ports = Ports { host: request.dst_port, guest: request.src_port };
        let mut connection = Self::new(stream, ports, guest_cid, Phase::Response);
        connection.to_guest.take_credit(request);
        connection
    }

    fn new(stream: UnixStream, ports: Ports, guest_cid: u64, phase: Phase) -> Self {
        let to_host = ToHost {
            stream,
            waiting: VecDeque::new(),
            received: Wrapping(0),
            forwarded: Wrapping(0),
            reported: Wrapping(0),
            ended: false,
            is_shut_down: false,
            host_closed: false,
            update_due: false,
        };
        let to_guest = ToGuest {
            sent: Wrapping(0),
            peer_alloc: 0,
            peer_forwarded: Wrapping(0),
            // The client may have sent data together with its CONNECT line. The event for that was handled already.
            readable: true,
            ended: false,
            guest_closed: false,
            credit_requested: false,
            shutdown_sent: 0,
        };
        Self { ports, guest_cid, phase, to_host, to_guest, queued: false }
    }

    /// Handles a packet of the guest for this connection. `payload` has `header.len` bytes.
    pub(super) fn receive(&mut self, header: &Header, payload: Buffers) -> Verdict {
        self.to_guest.take_credit(header);
        match (self.phase, header.op) {
            (Phase::Requested, OP_RESPONSE) => self.establish(),
            (Phase::Response | Phase::Established, OP_RW) => self.to_host.take(&payload),
            (Phase::Response | Phase::Established, OP_SHUTDOWN) => self.guest_shut_down(header.flags),
            (Phase::Response | Phase::Established, OP_CREDIT_UPDATE) => Verdict::Alive,
            (Phase::Response | Phase::Established, OP_CREDIT_REQUEST) => {
                self.to_host.update_due = true;
                Verdict::Alive
            }
            _ => Verdict::Reset,
        }
    }

    fn establish(&mut self) -> Verdict {
        self.phase = Phase::Established;
        // The send buffer of the socket is empty, so this fails only if the client has closed the socket.
        match (&self.to_host.stream).write_all(format!("OK {}\n", self.ports.host).as_bytes()) {
            Ok(()) => Verdict::Alive,
            Err(_) => Verdict::Reset,
        }
    }

    fn guest_shut_down(&mut self, flags: u32) -> Verdict {
        if flags & SHUTDOWN_SEND != 0 {
            self.to_host.end();
        }
        if flags & SHUTDOWN_RECEIVE != 0 && !self.to_guest.guest_closed {
            self.to_guest.guest_closed = true;
            // Fails if the client has closed the socket.
            let _ = self.to_host.stream.shutdown(Shutdown::Read);
        }
        if self.to_host.ended && self.to_guest.guest_closed { Verdict::Reset } else { Verdict::Alive }
    }

    /// Handles events of the Unix socket.
    pub(super) fn on_event(&mut self, events: EventSet) -> Verdict {
        if events.intersects(EventSet::IN | EventSet::READ_HANG_UP | EventSet::HANG_UP | EventSet::ERROR) {
            self.to_guest.readable = true;
        }
        if events.intersects(EventSet::HANG_UP | EventSet::ERROR) {
            match self.phase {
                // The guest does not know of the connection yet.
                Phase::Request => return Verdict::Closed,
                Phase::Requested => return Verdict::Reset,
                Phase::Response | Phase::Established => self.to_host.give_up(),
            }
        } else if events.contains(EventSet::OUT) {
            self.to_host.flush();
        }
        Verdict::Alive
    }

    /// Whether [`Self::next_packet`] may return a packet.
    pub(super) fn wants_to_send(&self) -> bool {
        match self.phase {
            Phase::Request | Phase::Response => true,
            Phase::Requested => false,
            Phase::Established => {
                self.to_host.update_due
                    || self.shutdown_flags() != self.to_guest.shutdown_sent
                    || self.to_guest.may_read()
                        && (self.to_guest.credit() > 0 || !self.to_guest.credit_requested)
            }
        }
    }

    /// Returns the next packet for the guest, if there is one, and writes its payload to the front of `space`.
    pub(super) fn next_packet(&mut self, space: &Buffers) -> Option<Header> {
        match self.phase {
            Phase::Request => {
                self.phase = Phase::Requested;
                Some(self.header(OP_REQUEST, 0, 0))
            }
            Phase::Requested => None,
            Phase::Response => {
                self.phase = Phase::Established;
                Some(self.header(OP_RESPONSE, 0, 0))
            }
            Phase::Established => self.next_data(space).or_else(|| self.next_control()),
        }
    }

    fn next_data(&mut self, space: &Buffers) -> Option<Header> {
        if !self.to_guest.may_read() {
            return None;
        }
        let credit = self.to_guest.credit();
        if credit == 0 {
            if self.to_guest.credit_requested {
                return None;
            }
            self.to_guest.credit_requested = true;
            return Some(self.header(OP_CREDIT_REQUEST, 0, 0));
        }
        let limit = MAX_PAYLOAD.min(credit as usize);
        let len = self.to_guest.read(&self.to_host.stream, &space.clone().split_front(limit));
        (len > 0).then(|| self.header(OP_RW, len, 0))
    }

    fn next_control(&mut self) -> Option<Header> {
        let flags = self.shutdown_flags();
        if flags != self.to_guest.shutdown_sent {
            self.to_guest.shutdown_sent = flags;
            return Some(self.header(OP_SHUTDOWN, 0, flags));
        }
        self.to_host.update_due.then(|| self.header(OP_CREDIT_UPDATE, 0, 0))
    }

    /// The flags for what the host has shut down so far.
    fn shutdown_flags(&self) -> u32 {
        match (self.to_guest.ended, self.to_host.host_closed) {
            (false, false) => 0,
            (false, true) => SHUTDOWN_RECEIVE,
            (true, false) => SHUTDOWN_SEND,
            (true, true) => SHUTDOWN_BOTH,
        }
    }

    /// The header of a packet to the guest. Each packet reports the credit, so no credit update is needed after it.
    fn header(&mut self, op: u16, len: u32, flags: u32) -> Header {
        self.to_host.reported = self.to_host.forwarded;
        self.to_host.update_due = false;
        Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: self.ports.host,
            dst_port: self.ports.guest,
            len,
            kind: TYPE_STREAM,
            op,
            flags,
            buf_alloc: BUF_ALLOC,
            fwd_cnt: self.to_host.forwarded.0,
        }
    }

    /// Ends the guest's side. The result must be kept until [all data is delivered](ToHost::is_done).
    pub(super) fn into_rest(mut self) -> ToHost {
        self.to_host.end();
        self.to_host
    }
}

impl ToHost {
    /// Handles the payload of an OP_RW packet.
    fn take(&mut self, payload: &Buffers) -> Verdict {
        let Ok(len) = u32::try_from(payload.len()) else { return Verdict::Reset };
        let held = (self.received - self.forwarded).0;
        if self.ended || len > BUF_ALLOC.saturating_sub(held) {
            // The guest has sent data after its OP_SHUTDOWN, or more than its credit (virtio 1.3, 5.10.6.3).
            return Verdict::Reset;
        }
        self.received += len;
        if self.host_closed {
            self.forward(len as usize);
            return Verdict::Alive;
        }
        for slice in payload.slices() {
            let written = if self.waiting.is_empty() { self.write(slice) } else { 0 };
            if self.host_closed {
                // The host has just closed the socket. The rest of the packet is dropped.
                self.forward((self.received - self.forwarded).0 as usize);
                break;
            }
            self.keep(slice, written);
        }
        Verdict::Alive
    }

    /// Writes as much of `slice` as the socket takes, directly from guest memory.
    fn write(&mut self, slice: &VolatileSlice) -> usize {
        loop {
            match (&self.stream).write_volatile(slice) {
                Ok(written) => {
                    self.forward(written);
                    return written;
                }
                Err(VolatileMemoryError::IOError(error)) if error.kind() == ErrorKind::Interrupted => {}
                Err(VolatileMemoryError::IOError(error)) if error.kind() == ErrorKind::WouldBlock => {
                    return 0;
                }
                Err(_) => {
                    self.give_up();
                    return 0;
                }
            }
        }
    }

    /// Copies `slice` without its first `from` bytes to the buffer.
    fn keep(&mut self, slice: &VolatileSlice, from: usize) {
        let mut chunk = [0; 4096];
        let mut rest = slice.offset(from);
        while let Ok(slice) = rest {
            if slice.is_empty() {
                break;
            }
            let copied = slice.copy_to(&mut chunk);
            self.waiting.extend(&chunk[..copied]);
            rest = slice.offset(copied);
        }
    }

    /// Writes as much of the buffer as the socket takes.
    pub(super) fn flush(&mut self) {
        while !self.waiting.is_empty() {
            match (&self.stream).write(self.waiting.as_slices().0) {
                Ok(written) => {
                    self.waiting.drain(..written);
                    self.forward(written);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.give_up(),
            }
        }
        // This is done once, because a shutdown causes an event of the same socket, which would cause the next
        // shutdown.
        if self.ended && !self.is_shut_down {
            self.is_shut_down = true;
            // Fails if the client has closed the socket.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// The guest sends no more data. The socket is shut down after all data was written.
    fn end(&mut self) {
        self.ended = true;
        self.flush();
    }

    /// The host reads no more data. The buffer is dropped.
    pub(super) fn give_up(&mut self) {
        self.host_closed = true;
        self.forward(self.waiting.len());
        self.waiting = VecDeque::new();
    }

    /// Counts `count` bytes, at most [`BUF_ALLOC`], that have left the buffer.
    fn forward(&mut self, count: usize) {
        self.forwarded += count as u32;
        self.update_due |= (self.forwarded - self.reported).0 >= CREDIT_STEP;
    }

    /// Whether all data was delivered.
    pub(super) fn is_done(&self) -> bool {
        self.waiting.is_empty()
    }
}

impl Drop for ToHost {
    fn drop(&mut self) {
        // If a Unix socket is closed with unread data, its peer gets ECONNRESET instead of the end of the stream.
        // After the shutdown the peer cannot add data, so this loop ends.
        let _ = self.stream.shutdown(Shutdown::Both);
        let mut unread = [0; 4096];
        while matches!((&self.stream).read(&mut unread), Ok(count) if count > 0) {}
    }
}

impl ToGuest {
    fn take_credit(&mut self, header: &Header) {
        self.peer_alloc = header.buf_alloc;
        self.peer_forwarded = Wrapping(header.fwd_cnt);
        if self.credit() > 0 {
            self.credit_requested = false;
        }
    }

    /// The free bytes in the receive buffer of the guest (virtio 1.3, 5.10.6.3).
    fn credit(&self) -> u32 {
        self.peer_alloc.saturating_sub((self.sent - self.peer_forwarded).0)
    }

    fn may_read(&self) -> bool {
        self.readable && !self.ended && !self.guest_closed
    }

    /// Reads from the socket directly to guest memory. Returns the number of bytes, which is 0 if there is no data or
    /// at the end of the stream.
    fn read(&mut self, stream: &UnixStream, space: &Buffers) -> u32 {
        let mut total = 0;
        for slice in space.slices() {
            let count = self.read_slice(stream, slice);
            // The sum is at most MAX_PAYLOAD.
            total += count as u32;
            if count < slice.len() {
                break;
            }
        }
        self.sent += total;
        total
    }

    fn read_slice(&mut self, mut stream: &UnixStream, slice: &VolatileSlice) -> usize {
        loop {
            match stream.read_volatile(&mut slice.clone()) {
                Ok(0) => self.ended = true,
                Ok(count) => return count,
                Err(VolatileMemoryError::IOError(error)) if error.kind() == ErrorKind::Interrupted => {
                    continue;
                }
                Err(VolatileMemoryError::IOError(error)) if error.kind() == ErrorKind::WouldBlock => {
                    self.readable = false;
                }
                // ECONNRESET means that the host has closed the socket with unread data. It sends no more.
                Err(_) => self.ended = true,
            }
            return 0;
        }
    }
}
