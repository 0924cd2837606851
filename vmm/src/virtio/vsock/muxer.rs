//! The connections of a vsock device. Passes packets between them and the guest.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind, Read},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use bulkhead_vmm_api::FIRST_HOST_PORT;
use nix::{
    errno::Errno,
    sys::{
        socket::{self, AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr},
        time::TimeSpec,
        timerfd::{Expiration, TimerSetTimeFlags},
    },
};
use vmm_sys_util::epoll::EventSet;

use super::{
    connection::{Connection, Ports, ToHost, Verdict},
    host_sockets::HostSockets,
    packet::{HOST_CID, Header, OP_REQUEST, OP_RST, TYPE_STREAM},
};
use crate::virtio::chain::Buffers;
use crate::virtio::event_loop::Events;

/// The most connections, including those that the guest has closed and whose data is still being delivered. Together
/// with [`super::connection::BUF_ALLOC`] this limits the memory that a guest can make the device use.
const MAX_PEERS: usize = 1024;
/// If this many RST packets wait for buffers of the guest, the device takes no packets from the guest (virtio 1.3,
/// 5.10.6.1.1, resource exhaustion).
const MAX_RESETS: usize = 256;
/// The length of `CONNECT ` and two numbers of ten digits, without the newline.
const MAX_CONNECT_LINE: usize = 29;

/// The pause before the next attempt to accept clients, after the process had no file descriptors or memory for one.
/// No event reports when there are some again.
const PAUSE: Duration = Duration::from_millis(100);

/// A Unix socket of the host.
enum Peer {
    /// A client that has not sent its complete CONNECT line yet.
    Handshake(Handshake),
    Connection(Box<Connection>),
    /// The guest has closed its side. The host has not read all data of the guest yet.
    Draining(ToHost),
}

struct Handshake {
    stream: UnixStream,
    line: Vec<u8>,
}

/// A RST packet for the guest.
struct Reset {
    host_cid: u64,
    ports: Ports,
    kind: u16,
}

/// The connections. Each Unix socket is in the set of events with a token that is never used again.
pub(super) struct Muxer<'e> {
    events: &'e Events,
    host: &'e HostSockets,
    peers: HashMap<u64, Peer>,
    by_ports: HashMap<Ports, u64>,
    /// The connections that have something to send to the guest. Each is in the queue at most once.
    ready: VecDeque<u64>,
    resets: VecDeque<Reset>,
    next_token: u64,
    next_port: u32,
}

impl<'e> Muxer<'e> {
    /// A muxer without connections. It uses tokens from `first_token` on. The caller adds the sockets of `host` to
    /// `events`.
    pub(super) fn new(events: &'e Events, host: &'e HostSockets, first_token: u64) -> Self {
        Self {
            events,
            host,
            peers: HashMap::new(),
            by_ports: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            next_token: first_token,
            next_port: FIRST_HOST_PORT,
        }
    }

    /// Accepts all waiting clients of the host.
    pub(super) fn accept(&mut self) {
        loop {
            match self.host.listener.accept() {
                // If there are too many connections, the socket is closed at once.
                Ok((stream, _)) if self.peers.len() < MAX_PEERS && stream.set_nonblocking(true).is_ok() => {
                    self.add(stream.as_raw_fd(), Peer::Handshake(Handshake { stream, line: Vec::new() }));
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                // The process has no file descriptors or no memory.
                Err(_) => return self.accept_later(),
            }
        }
    }

    fn accept_later(&self) {
        let later = Expiration::OneShot(TimeSpec::from_duration(PAUSE));
        // timerfd_settime(2) does not fail for a valid timer and a valid time.
        let _ = self.host.retry.set(later, TimerSetTimeFlags::empty());
    }

    /// Handles an event of the socket with this token.
    pub(super) fn on_event(&mut self, token: u64, events: EventSet) {
        let verdict = match self.peers.get_mut(&token) {
            Some(Peer::Handshake(handshake)) => match handshake.read() {
                Progress::More => return,
                Progress::Asked { guest, host } if self.is_free(guest, host) => {
                    return self.ask_guest(token, guest, host);
                }
                Progress::Asked { .. } | Progress::Failed => {
                    self.peers.remove(&token);
                    return;
                }
            },
            Some(Peer::Connection(connection)) => connection.on_event(events),
            Some(Peer::Draining(rest)) => {
                rest.flush();
                if rest.is_done() {
                    self.peers.remove(&token);
                }
                return;
            }
            // The socket was closed after the event was reported.
            None => return,
        };
        self.conclude(token, verdict);
    }

    /// Whether [`Self::receive`] may be called. Each packet may add a RST packet.
    pub(super) fn can_receive(&self) -> bool {
        self.resets.len() < MAX_RESETS
    }

    /// Handles a packet of the guest. `payload` has `header.len` bytes.
    pub(super) fn receive(&mut self, header: &Header, payload: Buffers) {
        if header.src_cid != self.host.guest_cid {
            // The source is not the guest, so an answer would have no destination.
            return;
        }
        let ports = Ports { host: header.dst_port, guest: header.src_port };
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            // The destination is not the host, or the socket type is not supported (virtio 1.3, 5.10.6.4.1).
            return self.reset(header, ports);
        }
        let Some(&token) = self.by_ports.get(&ports) else {
            return match header.op {
                OP_REQUEST => self.connect_to_host(header, ports),
                OP_RST => {}
                _ => self.reset(header, ports),
            };
        };
        let Some(Peer::Connection(connection)) = self.peers.get_mut(&token) else { return };
        let verdict = match header.op {
            OP_RST => Verdict::Closed,
            _ => connection.receive(header, payload),
        };
        self.conclude(token, verdict);
    }

    /// Whether [`Self::next_packet`] may return a packet.
    pub(super) fn wants_to_send(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Returns the next packet for the guest, if there is one, and writes its payload to the front of `space`. The
    /// connections take turns.
    pub(super) fn next_packet(&mut self, space: &Buffers) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(Header {
                src_cid: reset.host_cid,
                dst_cid: self.host.guest_cid,
                src_port: reset.ports.host,
                dst_port: reset.ports.guest,
                kind: reset.kind,
                op: OP_RST,
                ..Header::default()
            });
        }
        while let Some(token) = self.ready.pop_front() {
            let Some(Peer::Connection(connection)) = self.peers.get_mut(&token) else { continue };
            connection.queued = false;
            if let Some(header) = connection.next_packet(space) {
                self.queue(token);
                return Some(header);
            }
        }
        None
    }

    /// Whether a client may connect to the port `guest`, from the port `host` if it has chosen one.
    fn is_free(&self, guest: u32, host: Option<u32>) -> bool {
        host.is_none_or(|host| host < FIRST_HOST_PORT && !self.by_ports.contains_key(&Ports { host, guest }))
    }

    /// Makes a handshake a connection to a port of the guest.
    fn ask_guest(&mut self, token: u64, guest: u32, host: Option<u32>) {
        let Some(Peer::Handshake(handshake)) = self.peers.remove(&token) else { return };
        let ports = Ports { host: host.unwrap_or_else(|| self.unused_port(guest)), guest };
        let connection = Connection::from_host(handshake.stream, ports, self.host.guest_cid);
        self.peers.insert(token, Peer::Connection(Box::new(connection)));
        self.by_ports.insert(ports, token);
        self.queue(token);
    }

    /// Returns a port of the host without a connection to `guest`. There are more ports than connections.
    fn unused_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.next_port;
            self.next_port = host.checked_add(1).unwrap_or(FIRST_HOST_PORT);
            if !self.by_ports.contains_key(&Ports { host, guest }) {
                return host;
            }
        }
    }

    /// Handles OP_REQUEST: connects to the socket of the port, or answers with RST.
    fn connect_to_host(&mut self, request: &Header, ports: Ports) {
        if self.peers.len() >= MAX_PEERS {
            return self.reset(request, ports);
        }
        let mut path = PathBuf::from(&self.host.path).into_os_string();
        path.push(format!("_{}", ports.host));
        let Ok(stream) = connect(Path::new(&path)) else { return self.reset(request, ports) };
        let fd = stream.as_raw_fd();
        let connection = Connection::from_guest(stream, request, self.host.guest_cid);
        match self.add(fd, Peer::Connection(Box::new(connection))) {
            Some(token) => {
                self.by_ports.insert(ports, token);
                self.queue(token);
            }
            None => self.reset(request, ports),
        }
    }

    /// Adds `peer`, whose socket is `fd`, and watches its events. If that fails, closes the socket and returns None.
    fn add(&mut self, fd: RawFd, peer: Peer) -> Option<u64> {
        let token = self.next_token;
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP;
        self.events.watch(fd, events, token).ok()?;
        self.next_token += 1;
        self.peers.insert(token, peer);
        Some(token)
    }

    /// Adds a connection to the queue if it has something to send.
    fn queue(&mut self, token: u64) {
        if let Some(Peer::Connection(connection)) = self.peers.get_mut(&token)
            && !connection.queued
            && connection.wants_to_send()
        {
            connection.queued = true;
            self.ready.push_back(token);
        }
    }

    fn conclude(&mut self, token: u64, verdict: Verdict) {
        if verdict == Verdict::Alive {
            return self.queue(token);
        }
        let Some(Peer::Connection(connection)) = self.peers.remove(&token) else { return };
        self.by_ports.remove(&connection.ports);
        if connection.queued {
            self.ready.retain(|ready| *ready != token);
        }
        if verdict == Verdict::Reset {
            self.resets.push_back(Reset { host_cid: HOST_CID, ports: connection.ports, kind: TYPE_STREAM });
        }
        let rest = connection.into_rest();
        if !rest.is_done() {
            self.peers.insert(token, Peer::Draining(rest));
        }
    }

    /// Answers a packet that belongs to no connection.
    fn reset(&mut self, header: &Header, ports: Ports) {
        if header.op != OP_RST {
            self.resets.push_back(Reset { host_cid: header.dst_cid, ports, kind: header.kind });
        }
    }
}

/// Connects without blocking. If the backlog of the listener is full, this fails.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    socket::connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket.into())
}

/// The state of a CONNECT line.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    More,
    /// The line is complete. The client may have chosen its port of the host.
    Asked {
        guest: u32,
        host: Option<u32>,
    },
    Failed,
}

impl Handshake {
    /// Reads up to the end of the line. Further bytes belong to the stream and stay in the socket.
    fn read(&mut self) -> Progress {
        let mut bytes = [0; MAX_CONNECT_LINE + 1];
        loop {
            let room = &mut bytes[..=MAX_CONNECT_LINE - self.line.len()];
            let seen = match socket::recv(self.stream.as_raw_fd(), room, MsgFlags::MSG_PEEK) {
                Ok(0) => return Progress::Failed,
                Ok(seen) => &mut room[..seen],
                Err(Errno::EAGAIN) => return Progress::More,
                Err(Errno::EINTR) => continue,
                Err(_) => return Progress::Failed,
            };
            let end = seen.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(seen.len(), |end| end + 1);
            // These bytes are in the socket already.
            if (&self.stream).read_exact(&mut seen[..taken]).is_err() {
                return Progress::Failed;
            }
            self.line.extend(&seen[..end.unwrap_or(taken)]);
            if end.is_some() {
                return parse_connect(&self.line).unwrap_or(Progress::Failed);
            }
            if self.line.len() > MAX_CONNECT_LINE {
                return Progress::Failed;
            }
        }
    }
}

/// Parses a CONNECT line without its newline.
fn parse_connect(line: &[u8]) -> Option<Progress> {
    let ports = std::str::from_utf8(line).ok()?.strip_prefix("CONNECT ")?;
    Some(match ports.split_once(' ') {
        None => Progress::Asked { guest: ports.parse().ok()?, host: None },
        Some((guest, host)) => Progress::Asked { guest: guest.parse().ok()?, host: Some(host.parse().ok()?) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_connect_line_with_a_port_is_one() {
        let asked = |guest, host| Some(Progress::Asked { guest, host });
        assert_eq!(parse_connect(b"CONNECT 1024"), asked(1024, None));
        assert_eq!(parse_connect(b"CONNECT 4294967295 4294967295"), asked(u32::MAX, Some(u32::MAX)));
        let wrong: [&[u8]; 9] = [
            b"",
            b"CONNECT",
            b"CONNECT ",
            b"CONNECT 4294967296",
            b"connect 1",
            b"CONNECT \xff",
            b"CONNECT 1 ",
            b"CONNECT 1  2",
            b"CONNECT 1 2 3",
        ];
        for line in wrong {
            assert_eq!(parse_connect(line), None, "{line:?}");
        }
    }
}
