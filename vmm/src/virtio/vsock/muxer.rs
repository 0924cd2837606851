//! All connections of one vsock device, and the packets between them and the guest.

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

/// Connections of both directions at once, including those that only deliver what is left. With
/// [`super::connection::BUF_ALLOC`] it bounds what a guest can make the device hold.
const MAX_PEERS: usize = 1024;
/// Packets of the guest are left in its queue while this many RSTs wait for room in the other, as virtio 1.3,
/// 5.10.6.1.1 allows a device whose resources are exhausted.
const MAX_RESETS: usize = 256;
/// `CONNECT ` and two numbers of ten digits, without the end of the line.
const MAX_CONNECT_LINE: usize = 29;

/// How long the clients of the host wait that cannot be accepted for want of descriptors or memory. No event tells when
/// there are some again.
const PAUSE: Duration = Duration::from_millis(100);

/// One Unix socket and what it is used for.
enum Peer {
    /// A client of the host that has not ended its CONNECT line yet.
    Handshake(Handshake),
    Connection(Box<Connection>),
    /// The guest's side is over; the host still has to read what the guest sent.
    Rest(ToHost),
}

struct Handshake {
    stream: UnixStream,
    line: Vec<u8>,
}

/// Whom a RST is for, as the headers of both name them.
struct Reset {
    host_cid: u64,
    ports: Ports,
    kind: u16,
}

/// The connections. Each Unix socket is in the worker's set of events under a token that is never used
/// again.
pub(super) struct Muxer<'e> {
    events: &'e Events,
    host: &'e HostSockets,
    peers: HashMap<u64, Peer>,
    by_ports: HashMap<Ports, u64>,
    /// Connections that want to send to the guest, each at most once.
    ready: VecDeque<u64>,
    resets: VecDeque<Reset>,
    next_token: u64,
    next_port: u32,
}

impl<'e> Muxer<'e> {
    /// No connections yet. Tokens from `first_token` on are the muxer's own; `host` is registered by the caller.
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

    /// Accepts the clients of the host that wait.
    pub(super) fn accept(&mut self) {
        loop {
            match self.host.listener.accept() {
                // A client that is one too many sees the end of its stream.
                Ok((stream, _)) if self.peers.len() < MAX_PEERS && stream.set_nonblocking(true).is_ok() => {
                    self.add(stream.as_raw_fd(), Peer::Handshake(Handshake { stream, line: Vec::new() }));
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                // Out of descriptors or memory.
                Err(_) => return self.accept_later(),
            }
        }
    }

    fn accept_later(&self) {
        let later = Expiration::OneShot(TimeSpec::from_duration(PAUSE));
        // A timer that exists takes any time (timerfd_settime(2)).
        let _ = self.host.retry.set(later, TimerSetTimeFlags::empty());
    }

    /// Takes an event of the socket that is known by `token`.
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
            Some(Peer::Rest(rest)) => {
                rest.flush();
                if rest.is_done() {
                    self.peers.remove(&token);
                }
                return;
            }
            // It went while its event was on the way.
            None => return,
        };
        self.conclude(token, verdict);
    }

    /// Whether [`Self::receive`] may be called: each packet may need a RST to be remembered.
    pub(super) fn can_receive(&self) -> bool {
        self.resets.len() < MAX_RESETS
    }

    /// Takes a packet that the guest sent. `payload` has `header.len` bytes.
    pub(super) fn receive(&mut self, header: &Header, payload: Buffers) {
        if header.src_cid != self.host.guest_cid {
            // Nobody's packet: there is nobody to answer.
            return;
        }
        let ports = Ports { host: header.dst_port, guest: header.src_port };
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            // Another machine, or a type that is not served (virtio 1.3, 5.10.6.4.1).
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

    /// Whether [`Self::next_packet`] may have something for the guest.
    pub(super) fn wants_to_send(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// The next packet for the guest, if there is one after all; its payload is written to `space`, all of which each
    /// connection finds until one has something to write. They take turns.
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

    /// Whether a client may connect from `host`, if it named that, to `guest`.
    fn is_free(&self, guest: u32, host: Option<u32>) -> bool {
        host.is_none_or(|host| host < FIRST_HOST_PORT && !self.by_ports.contains_key(&Ports { host, guest }))
    }

    /// Turns a handshake into a connection to a port of the guest.
    fn ask_guest(&mut self, token: u64, guest: u32, host: Option<u32>) {
        let Some(Peer::Handshake(handshake)) = self.peers.remove(&token) else { return };
        let ports = Ports { host: host.unwrap_or_else(|| self.unused_port(guest)), guest };
        let connection = Connection::from_host(handshake.stream, ports, self.host.guest_cid);
        self.peers.insert(token, Peer::Connection(Box::new(connection)));
        self.by_ports.insert(ports, token);
        self.queue(token);
    }

    /// A port of the host's side that has no connection to `guest` yet. There are more ports than connections.
    fn unused_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.next_port;
            self.next_port = host.checked_add(1).unwrap_or(FIRST_HOST_PORT);
            if !self.by_ports.contains_key(&Ports { host, guest }) {
                return host;
            }
        }
    }

    /// Serves OP_REQUEST: connects to whoever listens for the port, or says that nobody does.
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

    /// Keeps `peer`, whose socket is `fd`, and watches it. None: it could not be watched and is closed.
    fn add(&mut self, fd: RawFd, peer: Peer) -> Option<u64> {
        let token = self.next_token;
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP;
        self.events.watch(fd, events, token).ok()?;
        self.next_token += 1;
        self.peers.insert(token, peer);
        Some(token)
    }

    /// Gives a connection its turn to send, if it wants one.
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
            self.peers.insert(token, Peer::Rest(rest));
        }
    }

    /// Answers a packet that belongs to no connection.
    fn reset(&mut self, header: &Header, ports: Ports) {
        if header.op != OP_RST {
            self.resets.push_back(Reset { host_cid: header.dst_cid, ports, kind: header.kind });
        }
    }
}

/// Connects without waiting: a listener whose backlog is full is as good as none.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    socket::connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket.into())
}

/// How far a CONNECT line has come.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    More,
    /// For a port of the guest; the host's side may have named its own.
    Asked {
        guest: u32,
        host: Option<u32>,
    },
    Failed,
}

impl Handshake {
    /// Reads on, up to the end of the line: what follows belongs to the stream, and stays in the socket until the guest has
    /// room for it.
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
            // They are there.
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

/// Parses a CONNECT line without its end.
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
