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

/// Bytes that a connection holds for a host that does not read. Four of Linux's largest packets (64 KiB), so that the
/// guest keeps sending while its credit is on the way.
pub(super) const BUF_ALLOC: u32 = 256 * 1024;
/// The guest hears of freed space when it is half of the buffer, if no packet told it before.
const CREDIT_STEP: u32 = BUF_ALLOC / 2;
/// The most that one packet to the guest carries, the same as Linux's limit.
const MAX_PAYLOAD: usize = 64 * 1024;

/// Both ends of a connection: the port that the host's side has and the one that the guest's side has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// What a packet of the guest or an event of the host made of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It goes on.
    Alive,
    /// It is over and the guest must be told by a RST. What the guest sent before is still delivered.
    Reset,
    /// It is over and the guest knows. What the guest sent before is still delivered.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The host connected; the guest has to be asked.
    Request,
    /// The guest was asked and has not answered.
    Requested,
    /// The guest connected and has to hear that it worked.
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
    /// Whether it waits for its turn to send to the guest.
    pub(super) queued: bool,
}

/// The half that carries the guest's bytes to the host. Counters are modulo 2^32, as on the wire.
pub(super) struct ToHost {
    stream: UnixStream,
    /// What the Unix socket did not take yet, at most [`BUF_ALLOC`].
    waiting: VecDeque<u8>,
    received: Wrapping<u32>,
    /// Bytes handed on, or thrown away because the host has gone.
    forwarded: Wrapping<u32>,
    /// `forwarded`, as the guest last heard it.
    told: Wrapping<u32>,
    /// The guest will send no more.
    ended: bool,
    /// The host has heard of that.
    end_told: bool,
    /// The host will read no more.
    deaf: bool,
    update_due: bool,
}

/// The half that carries the host's bytes to the guest.
struct ToGuest {
    sent: Wrapping<u32>,
    peer_alloc: u32,
    peer_forwarded: Wrapping<u32>,
    /// The Unix socket may have something to read. Its events are edge-triggered, so this holds until a read says no.
    readable: bool,
    /// The host will send no more.
    ended: bool,
    /// The guest will receive no more.
    deaf: bool,
    /// The guest was asked for credit and none came since.
    asked: bool,
    /// Flags of the last OP_SHUTDOWN sent.
    shutdown_sent: u32,
}

impl Connection {
    /// A connection that a client of the host wants to the guest.
    pub(super) fn from_host(stream: UnixStream, ports: Ports, guest_cid: u64) -> Self {
        Self::new(stream, ports, guest_cid, Phase::Request)
    }

    /// A connection that the guest asked for with `request`, made to `stream`.
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
            told: Wrapping(0),
            ended: false,
            end_told: false,
            deaf: false,
            update_due: false,
        };
        let to_guest = ToGuest {
            sent: Wrapping(0),
            peer_alloc: 0,
            peer_forwarded: Wrapping(0),
            // The client may have sent something right behind its CONNECT line, whose edge is spent.
            readable: true,
            ended: false,
            deaf: false,
            asked: false,
            shutdown_sent: 0,
        };
        Self { ports, guest_cid, phase, to_host, to_guest, queued: false }
    }

    /// Takes a packet that the guest sent on this connection. `payload` has `header.len` bytes.
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
        // A few bytes into an empty socket: they fit, or the client has gone.
        match (&self.to_host.stream).write_all(format!("OK {}\n", self.ports.host).as_bytes()) {
            Ok(()) => Verdict::Alive,
            Err(_) => Verdict::Reset,
        }
    }

    fn guest_shut_down(&mut self, flags: u32) -> Verdict {
        if flags & SHUTDOWN_SEND != 0 {
            self.to_host.end();
        }
        if flags & SHUTDOWN_RECEIVE != 0 && !self.to_guest.deaf {
            self.to_guest.deaf = true;
            // Fails when the client has gone, and then there is nobody left to be told.
            let _ = self.to_host.stream.shutdown(Shutdown::Read);
        }
        if self.to_host.ended && self.to_guest.deaf { Verdict::Reset } else { Verdict::Alive }
    }

    /// Takes what epoll says about the Unix socket.
    pub(super) fn on_event(&mut self, events: EventSet) -> Verdict {
        if events.intersects(EventSet::IN | EventSet::READ_HANG_UP | EventSet::HANG_UP | EventSet::ERROR) {
            self.to_guest.readable = true;
        }
        if events.intersects(EventSet::HANG_UP | EventSet::ERROR) {
            match self.phase {
                // The guest has not heard of it.
                Phase::Request => return Verdict::Closed,
                Phase::Requested => return Verdict::Reset,
                Phase::Response | Phase::Established => self.to_host.give_up(),
            }
        } else if events.contains(EventSet::OUT) {
            self.to_host.flush();
        }
        Verdict::Alive
    }

    /// Whether [`Self::next_packet`] has something to say.
    pub(super) fn wants_to_send(&self) -> bool {
        match self.phase {
            Phase::Request | Phase::Response => true,
            Phase::Requested => false,
            Phase::Established => {
                self.to_host.update_due
                    || self.shutdown_flags() != self.to_guest.shutdown_sent
                    || self.to_guest.may_read() && (self.to_guest.credit() > 0 || !self.to_guest.asked)
            }
        }
    }

    /// The next packet for the guest, if there is one after all; its payload is written to `space`.
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
            if self.to_guest.asked {
                return None;
            }
            self.to_guest.asked = true;
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

    /// What the host has shut down so far.
    fn shutdown_flags(&self) -> u32 {
        match (self.to_guest.ended, self.to_host.deaf) {
            (false, false) => 0,
            (false, true) => SHUTDOWN_RECEIVE,
            (true, false) => SHUTDOWN_SEND,
            (true, true) => SHUTDOWN_BOTH,
        }
    }

    /// A header to the guest. Each one tells how much was forwarded, so no update is due any more.
    fn header(&mut self, op: u16, len: u32, flags: u32) -> Header {
        self.to_host.told = self.to_host.forwarded;
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

    /// Lets go of the guest's side. The rest has to be kept until it [has nothing waiting](ToHost::is_done).
    pub(super) fn into_rest(mut self) -> ToHost {
        self.to_host.end();
        self.to_host
    }
}

impl ToHost {
    /// Takes the payload of an OP_RW packet.
    fn take(&mut self, payload: &Buffers) -> Verdict {
        let Ok(len) = u32::try_from(payload.len()) else { return Verdict::Reset };
        let held = (self.received - self.forwarded).0;
        if self.ended || len > BUF_ALLOC.saturating_sub(held) {
            // The guest sends after it said that it would not, or more than it was allowed (5.10.6.3).
            return Verdict::Reset;
        }
        self.received += len;
        if self.deaf {
            self.forward(len as usize);
            return Verdict::Alive;
        }
        for slice in payload.slices() {
            let written = if self.waiting.is_empty() { self.write(slice) } else { 0 };
            if self.deaf {
                // The host has gone meanwhile, and with it what this packet brings.
                self.forward((self.received - self.forwarded).0 as usize);
                break;
            }
            self.keep(slice, written);
        }
        Verdict::Alive
    }

    /// Writes what the socket takes of `slice`, straight from the guest's memory.
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

    /// Copies what of `slice` follows its first `from` bytes to the end of what waits.
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

    /// Writes what waits, as far as the socket takes it.
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
        // Once: a shutdown is an event of the very socket, which would bring the device here again, and so on for ever.
        if self.ended && !self.end_told {
            self.end_told = true;
            // Fails when the client has gone, and then there is nobody left to be told.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// The guest will send no more: the host hears of it once it has been sent all.
    fn end(&mut self) {
        self.ended = true;
        self.flush();
    }

    /// The host will read no more: nothing is kept for it.
    pub(super) fn give_up(&mut self) {
        self.deaf = true;
        self.forward(self.waiting.len());
        self.waiting = VecDeque::new();
    }

    /// Counts `count` bytes, at most [`BUF_ALLOC`], as having left the buffer.
    fn forward(&mut self, count: usize) {
        self.forwarded += count as u32;
        self.update_due |= (self.forwarded - self.told).0 >= CREDIT_STEP;
    }

    /// Whether all was delivered.
    pub(super) fn is_done(&self) -> bool {
        self.waiting.is_empty()
    }
}

impl Drop for ToHost {
    fn drop(&mut self) {
        // A Unix socket that is closed with something unread makes its other end see ECONNRESET instead of the end.
        // After the shutdown nothing can be added, so this ends.
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
            self.asked = false;
        }
    }

    /// Bytes that the guest has room for (virtio 1.3, 5.10.6.3).
    fn credit(&self) -> u32 {
        self.peer_alloc.saturating_sub((self.sent - self.peer_forwarded).0)
    }

    fn may_read(&self) -> bool {
        self.readable && !self.ended && !self.deaf
    }

    /// Reads from the socket straight into the guest's memory, and says how much. Zero: nothing there, or the end.
    fn read(&mut self, stream: &UnixStream, space: &Buffers) -> u32 {
        let mut total = 0;
        for slice in space.slices() {
            let count = self.read_slice(stream, slice);
            // At most MAX_PAYLOAD in sum.
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
                // ECONNRESET: the host closed with something unread. It sends no more.
                Err(_) => self.ended = true,
            }
            return 0;
        }
    }
}
