use std::{
    fs::{self, File},
    io::{ErrorKind, Read, Write},
    net::Shutdown,
    os::{
        fd::AsRawFd,
        unix::{
            fs::FileExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    socket::{self, AddressFamily, SockFlag, SockType, UnixAddr},
};
use virtio_queue::desc::split::Descriptor;
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    connection::{BUF_ALLOC, Connection, Verdict},
    packet::{
        HEADER_LEN, HOST_CID, Header, OP_CREDIT_REQUEST, OP_CREDIT_UPDATE, OP_REQUEST, OP_RESPONSE, OP_RST,
        OP_RW, OP_SHUTDOWN, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM,
    },
    *,
};
use crate::{
    jail::testing::{End, drill},
    virtio::{
        chain::Buffers,
        event_loop::{EventError, EventHandler, Events},
        testing::{BUFFERS, Driver, NEXT, WRITE},
    },
};

const CID: u64 = 3;
const RX: usize = 0;
const TX: usize = 1;
/// Linux also has buffers of one page for packets to the guest.
const RX_BUFFER: u64 = 4096;
const RX_BUFFERS: u16 = 64;
const TX_BUFFER: u64 = 0x2_0000;
const TX_AREA: u64 = BUFFERS + RX_BUFFER * RX_BUFFERS as u64;
const TX_BUFFERS: u16 = 32;

/// A guest whose vsock driver is the test, and the sockets of the host.
struct Guest {
    driver: Driver,
    device: Vsock,
    dir: tempfile::TempDir,
    tx_next: u16,
    tx_free: u16,
    peer_alloc: u32,
}

/// A packet for the guest.
struct Packet {
    header: Header,
    payload: Vec<u8>,
}

impl Guest {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock.sock");
        let mut device = Vsock::new(listen(&path).unwrap(), path, CID).unwrap();
        let features = device.features();
        let mut driver = Driver::new(&mut device, features);
        for index in 0..RX_BUFFERS {
            let buffer = (BUFFERS + RX_BUFFER * u64::from(index), RX_BUFFER as u32, WRITE);
            driver.offer(RX, index, &[buffer]);
        }
        Self { driver, device, dir, tx_next: 0, tx_free: TX_BUFFERS, peer_alloc: 1 << 20 }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("vsock.sock")
    }

    fn header(&self, op: u16, host: u32, guest: u32) -> Header {
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: guest,
            dst_port: host,
            kind: TYPE_STREAM,
            op,
            buf_alloc: self.peer_alloc,
            ..Header::default()
        }
    }

    /// Sends a packet as Linux does, with header and payload in one buffer.
    fn send(&mut self, header: Header, payload: &[u8]) {
        while self.driver.used(TX).is_some() {
            self.tx_free += 1;
        }
        if self.tx_free == 0 {
            self.driver.wait_used(TX);
            self.tx_free += 1;
        }
        let index = self.tx_next % TX_BUFFERS;
        let addr = TX_AREA + TX_BUFFER * u64::from(index);
        self.driver.write(addr, &Header { len: payload.len() as u32, ..header }.to_bytes());
        self.driver.write(addr + HEADER_LEN as u64, payload);
        self.driver.offer(TX, index, &[(addr, (HEADER_LEN + payload.len()) as u32, 0)]);
        self.tx_next += 1;
        self.tx_free -= 1;
    }

    fn take(&mut self, (head, len): (u16, u32)) -> Packet {
        let addr = BUFFERS + RX_BUFFER * u64::from(head);
        let bytes = self.driver.read(addr, len as usize);
        let (header, payload) = bytes.split_first_chunk().unwrap();
        let packet = Packet { header: Header::parse(header), payload: payload.to_vec() };
        assert_eq!(packet.header.len as usize, packet.payload.len());
        self.driver.offer(RX, head, &[(addr, RX_BUFFER as u32, WRITE)]);
        packet
    }

    fn receive(&mut self) -> Packet {
        let used = self.driver.wait_used(RX);
        self.take(used)
    }

    fn expect(&mut self, op: u16) -> Header {
        let packet = self.receive();
        assert_eq!(packet.header.op, op, "{:?}", packet.header);
        assert!(packet.payload.is_empty() || op == OP_RW);
        packet.header
    }

    /// Checks that there is no further packet for the guest.
    fn expect_silence(&mut self) {
        self.driver.wait_interrupt(50);
        assert!(self.driver.used(RX).is_none());
    }

    /// Connects a client of the host, which writes `line`.
    fn client(&self, line: &str) -> UnixStream {
        let mut client = UnixStream::connect(self.path()).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        client
    }

    /// Connects a client of the host to a port of the guest. Returns its stream and its port.
    fn accept_from_host(&mut self, port: u32) -> (UnixStream, u32) {
        let mut client = self.client(&format!("CONNECT {port}\n"));
        let request = self.expect(OP_REQUEST);
        assert_eq!((request.src_cid, request.dst_cid, request.dst_port), (HOST_CID, CID, port));
        assert_eq!(request.buf_alloc, BUF_ALLOC);
        self.send(self.header(OP_RESPONSE, request.src_port, port), &[]);
        assert_eq!(read_line(&mut client), format!("OK {}", request.src_port));
        (client, request.src_port)
    }

    /// Connects a port of the guest to a listener at a port of the host.
    fn connect_to_host(&mut self, host: u32, guest: u32) -> UnixStream {
        let listener = UnixListener::bind(format!("{}_{host}", self.path().display())).unwrap();
        self.send(self.header(OP_REQUEST, host, guest), &[]);
        let response = self.expect(OP_RESPONSE);
        assert_eq!((response.src_port, response.dst_port), (host, guest));
        let stream = listener.accept().unwrap().0;
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// Sends all of `bytes`, and waits for credit as needed.
    fn send_all(&mut self, host: u32, guest: u32, bytes: &[u8]) {
        let (mut sent, mut forwarded) = (0u32, 0u32);
        for chunk in bytes.chunks(64 * 1024) {
            while sent + chunk.len() as u32 - forwarded > BUF_ALLOC {
                let header = self.receive().header;
                assert_eq!((header.op, header.buf_alloc), (OP_CREDIT_UPDATE, BUF_ALLOC));
                forwarded = header.fwd_cnt;
            }
            self.send(self.header(OP_RW, host, guest), chunk);
            sent += chunk.len() as u32;
        }
    }
}

fn read_line(stream: &mut UnixStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

fn read_to_end(mut stream: UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 7 + index / 251) as u8).collect()
}

#[test]
fn a_client_of_the_host_talks_to_the_guest() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.accept_from_host(1024);

    client.write_all(b"question").unwrap();
    let packet = guest.receive();
    assert_eq!((packet.header.op, &packet.payload[..]), (OP_RW, &b"question"[..]));

    guest.send(guest.header(OP_RW, port, 1024), b"answer\n");
    assert_eq!(read_line(&mut client), "answer");
    let control = guest.device.control();
    assert_eq!((control.received(), control.sent()), (8, 7), "the payload is counted, and no header");
}

#[test]
fn what_follows_the_connect_line_at_once_is_not_lost() {
    let mut guest = Guest::new();
    let _client = guest.client("CONNECT 7\nearly");
    let request = guest.expect(OP_REQUEST);
    guest.expect_silence();
    guest.send(guest.header(OP_RESPONSE, request.src_port, 7), &[]);
    assert_eq!(guest.receive().payload, b"early");
}

#[test]
fn a_client_that_writes_no_connect_line_is_hung_up_on() {
    let guest = Guest::new();
    for line in
        ["GET / HTTP/1.1\n", "CONNECT x\n", "CONNECT 00000000001 0000000001\n", "CONNECT 1 1073741824\n"]
    {
        let end = guest.client(line).read(&mut [0]);
        assert!(matches!(&end, Ok(0)) || end.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
    }
}

#[test]
fn a_client_may_choose_the_port_that_it_comes_from_unless_another_has_it() {
    let mut guest = Guest::new();
    let mut client = guest.client("CONNECT 1025 7\n");
    let request = guest.expect(OP_REQUEST);
    assert_eq!((request.src_port, request.dst_port), (7, 1025));
    assert_eq!(guest.client("CONNECT 1025 7\n").read(&mut [0]).unwrap(), 0);
    guest.send(guest.header(OP_RESPONSE, 7, 1025), &[]);
    assert_eq!(read_line(&mut client), "OK 7");
    guest.send(guest.header(OP_RST, 7, 1025), &[]);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    let _again = guest.client("CONNECT 1025 7\n");
    assert_eq!(guest.expect(OP_REQUEST).src_port, 7);
}

#[test]
fn a_client_sees_the_end_when_nobody_listens_in_the_guest() {
    let mut guest = Guest::new();
    let mut client = guest.client("CONNECT 1024\n");
    let request = guest.expect(OP_REQUEST);
    guest.send(guest.header(OP_RST, request.src_port, 1024), &[]);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    guest.expect_silence();
}

#[test]
fn a_client_that_gives_up_before_the_answer_resets_the_guest() {
    let mut guest = Guest::new();
    let client = guest.client("CONNECT 1024\n");
    let request = guest.expect(OP_REQUEST);
    drop(client);
    assert_eq!(guest.expect(OP_RST).src_port, request.src_port);
}

#[test]
fn the_guest_talks_to_a_listener_of_the_host() {
    let mut guest = Guest::new();
    let mut stream = guest.connect_to_host(1026, 5000);
    guest.send(guest.header(OP_RW, 1026, 5000), &[1, 0, 0, 0]);
    let mut version = [0; 4];
    stream.read_exact(&mut version).unwrap();
    assert_eq!(version, [1, 0, 0, 0]);
}

#[test]
fn the_guest_is_refused_where_nobody_listens() {
    let mut guest = Guest::new();
    guest.send(guest.header(OP_REQUEST, 1026, 5000), &[]);
    let reset = guest.expect(OP_RST);
    assert_eq!((reset.src_port, reset.dst_port), (1026, 5000));
}

#[test]
fn packets_without_a_connection_are_answered_by_a_reset() {
    let mut guest = Guest::new();
    for op in [OP_RW, OP_RESPONSE, OP_SHUTDOWN, OP_CREDIT_UPDATE, 0, 99] {
        guest.send(guest.header(op, 1, 2), &[]);
        let reset = guest.expect(OP_RST);
        assert_eq!((reset.src_port, reset.dst_port), (1, 2));
    }
    // A socket type that is not supported, and a CID that does not exist.
    guest.send(Header { kind: 2, ..guest.header(OP_REQUEST, 1, 2) }, &[]);
    assert_eq!(guest.expect(OP_RST).kind, 2);
    guest.send(Header { dst_cid: 77, ..guest.header(OP_REQUEST, 1, 2) }, &[]);
    assert_eq!(guest.expect(OP_RST).src_cid, 77);
    // A RST gets no answer, and neither does a packet from another CID.
    guest.send(guest.header(OP_RST, 1, 2), &[]);
    guest.send(Header { src_cid: 4, ..guest.header(OP_RW, 1, 2) }, &[]);
    guest.expect_silence();
}

#[test]
fn megabytes_go_to_a_slow_host_within_the_credit() {
    let mut guest = Guest::new();
    let stream = guest.connect_to_host(9, 5000);
    let sent = pattern(8 << 20);
    let reader = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        read_to_end(stream)
    });
    guest.send_all(9, 5000, &sent);
    guest.send(Header { flags: SHUTDOWN_BOTH, ..guest.header(OP_SHUTDOWN, 9, 5000) }, &[]);
    while guest.receive().header.op != OP_RST {}
    assert!(reader.join().unwrap() == sent, "what arrived is not what was sent");
}

#[test]
fn what_the_guest_sent_before_it_closed_is_delivered_to_a_host_that_reads_later() {
    for last in [OP_SHUTDOWN, OP_RST] {
        let mut guest = Guest::new();
        let stream = guest.connect_to_host(9, 5000);
        // The guest uses all of its credit, which is more than the socket takes.
        let sent = pattern(BUF_ALLOC as usize);
        guest.send_all(9, 5000, &sent);
        guest.send(Header { flags: SHUTDOWN_BOTH, ..guest.header(last, 9, 5000) }, &[]);
        if last == OP_SHUTDOWN {
            while guest.receive().header.op != OP_RST {}
        }
        assert!(read_to_end(stream) == sent, "what arrived is not what was sent");
    }
}

#[test]
fn a_guest_that_sends_more_than_its_credit_is_reset() {
    let mut guest = Guest::new();
    let _stream = guest.connect_to_host(9, 5000);
    let chunk = pattern(64 * 1024);
    // At some time the socket and the buffer are full. The guest continues later.
    for _ in 0..32 {
        guest.send(guest.header(OP_RW, 9, 5000), &chunk);
    }
    while guest.receive().header.op != OP_RST {}
}

#[test]
fn megabytes_go_to_a_guest_with_a_small_buffer() {
    let mut guest = Guest::new();
    guest.peer_alloc = 6000;
    let (mut client, port) = guest.accept_from_host(1024);
    let sent = pattern(4 << 20);
    let copy = sent.clone();
    let writer = thread::spawn(move || {
        client.write_all(&copy).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        client
    });
    let mut received = Vec::new();
    loop {
        let packet = guest.receive();
        match packet.header.op {
            OP_RW => {
                received.extend(packet.payload);
                let header = guest.header(OP_CREDIT_UPDATE, port, 1024);
                guest.send(Header { fwd_cnt: received.len() as u32, ..header }, &[]);
            }
            OP_CREDIT_REQUEST => {}
            _ => {
                assert_eq!((packet.header.op, packet.header.flags), (OP_SHUTDOWN, SHUTDOWN_SEND));
                break;
            }
        }
    }
    assert!(received == sent, "what arrived is not what was sent");
    let mut client = writer.join().unwrap();
    // The other direction still works.
    guest.send(guest.header(OP_RW, port, 1024), b"done\n");
    assert_eq!(read_line(&mut client), "done");
}

#[test]
fn no_more_is_sent_than_the_guest_has_room_for() {
    let mut guest = Guest::new();
    guest.peer_alloc = 10;
    let (mut client, port) = guest.accept_from_host(1024);
    client.write_all(&pattern(100)).unwrap();
    assert_eq!(guest.receive().payload.len(), 10);
    guest.expect(OP_CREDIT_REQUEST);
    guest.expect_silence();
    // An impossible counter gives no credit either.
    guest.send(Header { fwd_cnt: 4_000_000, ..guest.header(OP_CREDIT_UPDATE, port, 1024) }, &[]);
    guest.expect_silence();
    guest.send(Header { fwd_cnt: 3, ..guest.header(OP_CREDIT_UPDATE, port, 1024) }, &[]);
    assert_eq!(guest.receive().payload.len(), 3);
}

#[test]
fn the_guest_may_ask_for_its_credit() {
    let mut guest = Guest::new();
    let (_client, port) = guest.accept_from_host(1024);
    guest.send(guest.header(OP_RW, port, 1024), b"12345");
    guest.send(guest.header(OP_CREDIT_REQUEST, port, 1024), &[]);
    assert_eq!(guest.expect(OP_CREDIT_UPDATE).fwd_cnt, 5);
}

#[test]
fn each_half_is_closed_by_itself() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.accept_from_host(1024);
    // The guest shuts down its direction. The host sees the end, and can still write.
    guest.send(Header { flags: SHUTDOWN_SEND, ..guest.header(OP_SHUTDOWN, port, 1024) }, &[]);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    client.write_all(b"late").unwrap();
    assert_eq!(guest.receive().payload, b"late");
    // The guest shuts down the other direction too. The connection ends.
    guest.send(Header { flags: SHUTDOWN_RECEIVE, ..guest.header(OP_SHUTDOWN, port, 1024) }, &[]);
    guest.expect(OP_RST);
    assert_eq!(client.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
}

#[test]
fn a_host_that_closes_shuts_down_both_halves_and_the_guest_ends_it() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.accept_from_host(1024);
    client.write_all(b"last words").unwrap();
    drop(client);
    assert_eq!(guest.receive().payload, b"last words");
    // The device sends one packet for both directions, or one for each.
    let shutdown = guest.expect(OP_SHUTDOWN);
    if shutdown.flags == SHUTDOWN_SEND {
        assert_eq!(guest.expect(OP_SHUTDOWN).flags, SHUTDOWN_BOTH);
    } else {
        assert_eq!(shutdown.flags, SHUTDOWN_BOTH);
    }
    // Data that the guest sends meanwhile is dropped, but its credit is returned.
    guest.send(guest.header(OP_RW, port, 1024), &pattern(60_000));
    guest.send(guest.header(OP_CREDIT_REQUEST, port, 1024), &[]);
    assert_eq!(guest.expect(OP_CREDIT_UPDATE).fwd_cnt, 60_000);
    guest.send(guest.header(OP_RST, port, 1024), &[]);
    guest.send(guest.header(OP_RW, port, 1024), &[]);
    guest.expect(OP_RST);
}

#[test]
fn many_connections_at_once_do_not_disturb_each_other() {
    let mut guest = Guest::new();
    let mut clients: Vec<_> = (0..50).map(|port| (guest.accept_from_host(port), port)).collect();
    for ((client, _), guest_port) in &mut clients {
        client.write_all(&guest_port.to_le_bytes()).unwrap();
    }
    for _ in 0..clients.len() {
        let packet = guest.receive();
        assert_eq!(packet.payload, packet.header.dst_port.to_le_bytes());
    }
    for ((client, host_port), guest_port) in &mut clients {
        let text = format!("{guest_port}\n");
        guest.send(guest.header(OP_RW, *host_port, *guest_port), text.as_bytes());
        assert_eq!(read_line(client), guest_port.to_string());
    }
}

#[test]
fn one_with_nothing_to_say_does_not_take_the_turn_of_another() {
    let mut guest = Guest::new();
    let mut clients = [1024, 1025].map(|port| {
        let client = guest.client(&format!("CONNECT {port}\n"));
        (client, guest.expect(OP_REQUEST))
    });
    // Without buffers of the guest, both connections wait.
    for _ in 0..RX_BUFFERS {
        guest.send(guest.header(OP_RW, 1, 2), &[]);
    }
    for (client, request) in &mut clients {
        guest.send(guest.header(OP_RESPONSE, request.src_port, request.dst_port), &[]);
        read_line(client);
    }
    clients[1].0.write_all(b"hello").unwrap();
    thread::sleep(Duration::from_millis(50));
    for _ in 0..RX_BUFFERS {
        guest.expect(OP_RST);
    }
    assert_eq!(guest.receive().payload, b"hello");
}

#[test]
fn a_reset_of_the_device_ends_its_connections_and_it_serves_again() {
    let mut guest = Guest::new();
    let (mut client, _) = guest.accept_from_host(1024);
    guest.driver.reset();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    // A client connects while there is no driver.
    let _early = guest.client("CONNECT 5\n");
    guest.driver = Driver::new(&mut guest.device, 0);
    guest.driver.offer(RX, 0, &[(BUFFERS, RX_BUFFER as u32, WRITE)]);
    assert_eq!(guest.expect(OP_REQUEST).dst_port, 5);
}

#[test]
fn a_socket_that_exists_and_a_cid_that_cannot_be_are_errors() {
    let guest = Guest::new();
    assert!(matches!(listen(&guest.path()), Err(VsockError::Listen { .. })));
    for cid in [0, 1, 2, 0xffff_ffff, 0x1_0000_0003] {
        let path = guest.dir.path().join(cid.to_string());
        let device = Vsock::new(listen(&path).unwrap(), path, cid);
        assert!(matches!(device, Err(VsockError::Cid { .. })), "{cid}");
    }
    assert!(guest.path().exists());
}

#[test]
fn the_configuration_is_the_cid() {
    let mut cid = [0; 8];
    Guest::new().device.read_config(0, &mut cid);
    assert_eq!(u64::from_le_bytes(cid), CID);
}

#[test]
fn an_illegal_chain_asks_for_a_reset_and_hangs_up_on_all() {
    let illegal: [&dyn Fn(&mut Driver); 7] = [
        // A chain with a loop.
        &|driver| {
            driver.describe(TX, 0, Descriptor::new(TX_AREA, 44, NEXT, 1));
            driver.describe(TX, 1, Descriptor::new(TX_AREA, 44, NEXT, 0));
            driver.publish(TX, 0);
        },
        // A buffer outside of memory.
        &|driver| driver.offer(TX, 0, &[(1 << 40, 44, 0)]),
        // A descriptor that does not exist.
        &|driver| driver.publish(TX, 60000),
        // A chain without readable bytes.
        &|driver| driver.offer(TX, 0, &[(TX_AREA, 44, WRITE)]),
        // A part of a header.
        &|driver| driver.offer(TX, 0, &[(TX_AREA, 43, 0)]),
        // A payload that is missing.
        &|driver| {
            let header = Header { src_cid: CID, dst_cid: HOST_CID, len: 5, op: OP_RW, ..Header::default() };
            driver.write(TX_AREA, &header.to_bytes());
            driver.offer(TX, 0, &[(TX_AREA, 48, 0)]);
        },
        &|driver| driver.break_avail_index(TX),
    ];
    for (index, act) in illegal.iter().enumerate() {
        let mut guest = Guest::new();
        let (mut client, _) = guest.accept_from_host(1024);
        act(&mut guest.driver);
        guest.driver.wait_needs_reset();
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "illegal act {index}");
    }
}

#[test]
fn a_buffer_that_cannot_hold_a_header_asks_for_a_reset() {
    let mut guest = Guest::new();
    for _ in 0..RX_BUFFERS {
        guest.send(guest.header(OP_RW, 1, 2), &[]);
        guest.driver.wait_used(RX);
    }
    guest.driver.offer(RX, 0, &[(BUFFERS, 43, WRITE)]);
    guest.send(guest.header(OP_RW, 1, 2), &[]);
    guest.driver.wait_needs_reset();
}

#[test]
fn a_guest_that_takes_no_packets_cannot_pile_up_resets() {
    let mut guest = Guest::new();
    // This is more than the device and the queue can hold. The rest stays in the queue of the guest.
    let packet = guest.header(OP_RW, 1, 2);
    let addr = TX_AREA;
    guest.driver.write(addr, &packet.to_bytes());
    for taken in [255, 256 + usize::from(RX_BUFFERS) - 255] {
        for index in 0..255 {
            guest.driver.offer(TX, index, &[(addr, HEADER_LEN as u32, 0)]);
        }
        let mut used = 0;
        let deadline = Instant::now() + Duration::from_secs(30);
        while used < taken {
            assert!(Instant::now() < deadline, "only {used} of {taken} were taken");
            guest.driver.wait_interrupt(100);
            while guest.driver.used(TX).is_some() {
                used += 1;
            }
        }
        guest.driver.wait_interrupt(100);
        assert!(used == taken && guest.driver.used(TX).is_none(), "more than {taken} were taken");
    }
    // The device continues, and all packets are answered.
    for _ in 0..2 * 255 {
        guest.expect(OP_RST);
    }
    guest.expect_silence();
}

/// Passes events to a connection for some turns.
struct Turns<'s> {
    connection: Connection,
    events: usize,
    left: usize,
    stop: &'s EventFd,
}

impl EventHandler for Turns<'_> {
    type Error = EventError;

    fn on_event(&mut self, _token: u64, events: EventSet) -> Result<(), EventError> {
        self.events += 1;
        assert_eq!(self.connection.on_event(events), Verdict::Alive);
        Ok(())
    }

    fn serve_queues(&mut self) -> Result<bool, EventError> {
        self.left -= 1;
        if self.left == 0 {
            self.stop.write(1).unwrap();
        }
        Ok(true)
    }
}

#[test]
fn the_end_of_what_the_guest_sends_is_told_once() {
    let (device, mut host) = UnixStream::pair().unwrap();
    device.set_nonblocking(true).unwrap();
    let stop = EventFd::new(EFD_NONBLOCK).unwrap();
    let events = Events::new(&stop).unwrap();
    events.watch(device.as_raw_fd(), EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP, 0).unwrap();
    let mut connection = Connection::from_guest(device, &Header::default(), CID);

    let shutdown = Header { op: OP_SHUTDOWN, flags: SHUTDOWN_SEND, ..Header::default() };
    assert_eq!(connection.receive(&shutdown, Buffers::default()), Verdict::Alive);
    assert_eq!(host.read(&mut [0]).unwrap(), 0);
    // The shutdown of the socket is an event of the same socket. There must be no further event.
    let mut turns = Turns { connection, events: 0, left: 5, stop: &stop };
    events.run(&mut turns).unwrap();
    assert_eq!(turns.events, 1);
}

/// A thread of this process that can be observed when no file can be opened.
struct Observed {
    state: File,
    call: File,
}

impl Observed {
    fn named(name: &str) -> Self {
        let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
        let is_it = |task: &PathBuf| fs::read_to_string(task.join("comm")).unwrap().trim_end() == name;
        let task = tasks.into_iter().find(is_it).unwrap();
        let open = |file| File::open(task.join(file)).unwrap();
        Self { state: open("stat"), call: open("syscall") }
    }

    /// Waits until the thread sleeps in epoll_wait(2). So it has handled all events and does not spin.
    fn wait_until_it_rests(&self) {
        let read = |file: &File| {
            let mut text = [0; 512];
            let len = file.read_at(&mut text, 0).unwrap();
            String::from_utf8_lossy(&text[..len]).into_owned()
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        // The state is read first, because a thread that is being woken is still in its system call but not asleep.
        while !(read(&self.state).contains(") S ")
            && read(&self.call).starts_with(&format!("{} ", libc::SYS_epoll_wait)))
        {
            assert!(Instant::now() < deadline, "the thread does not rest");
            thread::yield_now();
        }
    }
}

/// Limits new descriptors of the process to numbers below `limit`. Open descriptors stay open.
fn limit_descriptors(limit: u64) {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, limit, hard).unwrap();
}

#[test]
fn who_connects_while_there_are_no_descriptors_is_served_when_there_are() {
    let body = || {
        let mut guest = Guest::new();
        let worker = Observed::named("vsock");
        worker.wait_until_it_rests();
        let (plenty, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let listener = UnixListener::bind(format!("{}_9", guest.path().display())).unwrap();
        let client = socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();

        limit_descriptors(0);
        socket::connect(client.as_raw_fd(), &UnixAddr::new(&guest.path()).unwrap()).unwrap();
        let mut client = UnixStream::from(client);
        client.write_all(b"CONNECT 1024\n").unwrap();
        // The guest gets a RST at once. It can try again.
        guest.send(guest.header(OP_REQUEST, 9, 5000), &[]);
        assert_eq!(guest.expect(OP_RST).src_port, 9);
        worker.wait_until_it_rests();

        // No event reports that there are descriptors again.
        limit_descriptors(plenty);
        let request = guest.expect(OP_REQUEST);
        assert_eq!(request.dst_port, 1024);
        guest.send(guest.header(OP_RESPONSE, request.src_port, 1024), &[]);
        assert_eq!(read_line(&mut client), format!("OK {}", request.src_port));
        guest.send(guest.header(OP_REQUEST, 9, 5000), &[]);
        guest.expect(OP_RESPONSE);
        listener.accept().unwrap();
    };
    drill(body, End::succeeds);
}
