use std::{
    net::{Ipv4Addr, UdpSocket},
    os::fd::AsRawFd,
    thread,
    time::Duration,
};

use bulkhead_vmm_api::tap::HEADER_LEN;
use virtio_queue::desc::split::Descriptor;
use vmm_sys_util::ioctl::ioctl_with_mut_ref;

use super::*;
use crate::virtio::testing::{BUFFERS, Driver, NEXT, WRITE};

mod pairs;

const RX: usize = 0;
const TX: usize = 1;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 8, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 8, 2);
const RX_BUFFERS: u16 = 64;
const TX_BUFFER: u64 = BUFFERS + 0x100_0000;
const MERGEABLE: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;
/// Bytes of a datagram of those that are left together.
const SEGMENT: u16 = 1000;
/// The header of datagrams that are left together, by IPv4: NEEDS_CSUM, UDP_L4, hdr_len, gso_size, csum_start,
/// csum_offset, num_buffers.
const TOGETHER: [u8; HEADER_LEN] =
    [1, 5, 42, 0, (SEGMENT & 0xff) as u8, (SEGMENT >> 8) as u8, 34, 0, 6, 0, 0, 0];
/// What a guest needs to get such, and to send such.
const GETS_TOGETHER: u64 =
    1 << VIRTIO_NET_F_GUEST_CSUM | 1 << VIRTIO_NET_F_GUEST_USO4 | 1 << VIRTIO_NET_F_GUEST_USO6;
const SENDS_TOGETHER: u64 = 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_USO;

/// `struct ifreq`: a name, and 24 bytes for the argument.
#[repr(C)]
struct Ifreq {
    name: [u8; 16],
    data: [u8; 24],
}

impl Ifreq {
    fn new(data: &[u8]) -> Self {
        let mut request = Self { name: *b"tap0\0\0\0\0\0\0\0\0\0\0\0\0", data: [0; 24] };
        request.data[..data.len()].copy_from_slice(data);
        request
    }

    fn ip(address: Ipv4Addr) -> Self {
        let mut data = [0; 8];
        data[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        data[4..].copy_from_slice(&address.octets());
        Self::new(&data)
    }

    fn set(mut self, fd: &impl AsRawFd, request: u64) {
        // SAFETY: each request that is used here takes an ifreq, and `self` has its layout.
        let result = unsafe { ioctl_with_mut_ref(fd, request, &mut self) };
        assert_eq!(result, 0, "{request:#x}: {}", io::Error::last_os_error());
    }
}

/// Makes a device in a new network namespace of this thread. Its tap device has the address HOST.
fn card(mtu: u32) -> Net {
    card_of(&NetThreads::start(1).unwrap(), mtu)
}

/// Makes a device that the threads `net` serve, with a pair of queues for each of them, in a new network namespace of
/// the calling thread.
fn card_of(net: &NetThreads, mtu: u32) -> Net {
    crate::netns::enter(None).expect("these tests make a network namespace and a tap: run them as root");
    let tap = Tap::create("tap0", net.count()).expect("these tests need /dev/net/tun: modprobe tun");
    let card = Net::new(tap, MAC, net);
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // IPv6 packets of the kernel would disturb the tests.
    std::fs::write("/proc/sys/net/ipv6/conf/tap0/disable_ipv6", "1").unwrap();
    Ifreq::new(&mtu.to_ne_bytes()).set(&socket, libc::SIOCSIFMTU);
    Ifreq::ip(HOST).set(&socket, libc::SIOCSIFADDR);
    Ifreq::ip(Ipv4Addr::new(255, 255, 255, 0)).set(&socket, libc::SIOCSIFNETMASK);
    Ifreq::new(&(libc::IFF_UP as u16).to_ne_bytes()).set(&socket, libc::SIOCSIFFLAGS);
    card
}

/// A guest whose network driver is the test, and a socket of the host behind the tap device. Both are in the network
/// namespace of the thread that made them.
struct Guest {
    driver: Driver,
    device: Net,
    socket: UdpSocket,
    buffer: u64,
    tx_next: u16,
    /// The pair of queues that it uses now.
    pair: usize,
}

impl Guest {
    fn new(features: u64, buffer: u64) -> Self {
        Self::on(card(9000), features, buffer)
    }

    fn on(mut device: Net, features: u64, buffer: u64) -> Self {
        let mut driver = Driver::new(&mut device, features);
        for index in 0..RX_BUFFERS {
            driver.offer(RX, index, &[(BUFFERS + buffer * u64::from(index), buffer as u32, WRITE)]);
        }
        Self::by(driver, device, buffer)
    }

    fn by(driver: Driver, device: Net, buffer: u64) -> Self {
        let socket = UdpSocket::bind((HOST, 7000)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { driver, device, socket, buffer, tx_next: 0, pair: 0 }
    }

    /// Returns the next packet without its header, and the number of its buffers.
    fn receive(&mut self) -> (Vec<u8>, u16) {
        let (_, frame, buffers) = self.receive_with_header();
        (frame, buffers)
    }

    /// Returns the next packet's header, the packet, and the number of its buffers.
    fn receive_with_header(&mut self) -> (Vec<u8>, Vec<u8>, u16) {
        let mut bytes = Vec::new();
        let mut expected = 1;
        let mut count = 0;
        while count < expected {
            // All buffers of a packet are used together.
            let rx = RX + 2 * self.pair;
            let used = if count == 0 { Some(self.driver.wait_used(rx)) } else { self.driver.used(rx) };
            let (head, len) = used.unwrap();
            let addr = BUFFERS + pairs::BUFFERS_OF_PAIR * self.pair as u64 + self.buffer * u64::from(head);
            bytes.extend(self.driver.read(addr, len as usize));
            if count == 0 {
                expected = u16::from_le_bytes([bytes[10], bytes[11]]);
            }
            count += 1;
            self.driver.offer(rx, head, &[(addr, self.buffer as u32, WRITE)]);
        }
        let frame = bytes.split_off(HEADER_LEN);
        (bytes, frame, expected)
    }

    fn send(&mut self, frame: &[u8]) {
        self.send_with([0; HEADER_LEN], frame);
    }

    /// Sends a frame in two buffers, as Linux does.
    fn send_with(&mut self, header: [u8; HEADER_LEN], frame: &[u8]) {
        self.driver.write(TX_BUFFER, &header);
        self.driver.write(TX_BUFFER + 0x1000, frame);
        let first = self.tx_next % 64 * 2;
        self.tx_next += 1;
        let pieces = [(TX_BUFFER, HEADER_LEN as u32, 0), (TX_BUFFER + 0x1000, frame.len() as u32, 0)];
        let tx = TX + 2 * self.pair;
        self.driver.offer(tx, first, &pieces);
        self.driver.wait_used(tx);
    }

    /// Answers the host's ARP request for the address of the guest, so that the host can send packets. Returns the
    /// host's MAC address.
    fn answer_arp(&mut self) -> Vec<u8> {
        self.socket.send_to(b"first", (GUEST, 7001)).unwrap();
        let (question, _) = self.receive();
        assert_eq!(question[12..14], [8, 6], "ARP");
        let mut answer = question.clone();
        answer[..6].copy_from_slice(&question[6..12]);
        answer[6..12].copy_from_slice(&MAC);
        answer[21] = 2;
        answer[22..28].copy_from_slice(&MAC);
        answer[28..32].copy_from_slice(&question[38..42]);
        answer[32..42].copy_from_slice(&question[22..32]);
        self.send(&answer);
        assert_eq!(self.receive().0[42..], *b"first");
        question[6..12].to_vec()
    }

    /// Has the host send what `payload` is at once, as datagrams of SEGMENT bytes.
    fn host_sends(&self, payload: &[u8]) {
        let size = libc::c_int::from(SEGMENT);
        // SAFETY: the value of UDP_SEGMENT is an int, which lives until the call has returned.
        let result = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_UDP,
                libc::UDP_SEGMENT,
                (&raw const size).cast(),
                size_of_val(&size) as u32,
            )
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        self.socket.send_to(payload, (GUEST, 7001)).unwrap();
    }

    /// Sends a UDP packet from the guest to the socket of the host.
    fn udp(&self, host_mac: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut ip = vec![0x45, 0];
        ip.extend((28 + payload.len() as u16).to_be_bytes());
        ip.extend([0, 0, 0, 0, 64, 17, 0, 0]);
        ip.extend(GUEST.octets());
        ip.extend(HOST.octets());
        let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
        let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        ip.extend(7001u16.to_be_bytes());
        ip.extend(7000u16.to_be_bytes());
        ip.extend((8 + payload.len() as u16).to_be_bytes());
        ip.extend([0, 0]); // no checksum
        [host_mac, &MAC, &[8, 0], &ip, payload].concat()
    }
}

/// The frame of datagrams that are left together: their checksum is that of the pseudo-header (virtio 1.3, 5.1.6.2).
fn together(mut frame: Vec<u8>) -> Vec<u8> {
    let length = [0, 17, frame[38], frame[39]];
    let sum: u32 = frame[26..34]
        .chunks(2)
        .chain(length.chunks(2))
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]))
        .sum();
    let checksum = ((sum & 0xffff) + (sum >> 16)) as u16;
    frame[40..42].copy_from_slice(&checksum.to_be_bytes());
    frame
}

/// Runs `story` in a new thread, whose network namespace ends with it.
fn alone(story: impl FnOnce() + Send + 'static) {
    if let Err(panic) = thread::spawn(story).join() {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn host_and_guest_talk_through_the_tap() {
    for features in [0, MERGEABLE, MERGEABLE | 1 << VIRTIO_RING_F_EVENT_IDX] {
        alone(move || {
            let mut guest = Guest::new(features, 16384);
            guest.answer_arp();
            guest.socket.send_to(b"to the guest", (GUEST, 7001)).unwrap();
            let (frame, buffers) = guest.receive();
            assert_eq!((&frame[42..], buffers), (&b"to the guest"[..], 1));

            let host_mac = frame[6..12].to_vec();
            guest.send(&guest.udp(&host_mac, b"to the host"));
            let mut payload = [0; 100];
            let (len, from) = guest.socket.recv_from(&mut payload).unwrap();
            assert_eq!((&payload[..len], from), (&b"to the host"[..], (GUEST, 7001).into()));
        });
    }
}

#[test]
fn datagrams_that_the_guest_leaves_together_are_split_by_the_host() {
    alone(|| {
        let mut guest = Guest::new(SENDS_TOGETHER, 16384);
        let host_mac = guest.answer_arp();
        let payload: Vec<u8> = (0..2500).map(|index| (index / 7) as u8).collect();
        let frame = together(guest.udp(&host_mac, &payload));
        guest.send_with(TOGETHER, &frame);
        for part in payload.chunks(SEGMENT.into()) {
            let mut came = [0; 3000];
            let (len, from) = guest.socket.recv_from(&mut came).unwrap();
            assert_eq!((&came[..len], from), (part, (GUEST, 7001).into()));
        }
    });
}

#[test]
fn what_the_driver_has_not_negotiated_is_not_sent() {
    alone(|| {
        for features in [0, 1 << VIRTIO_NET_F_CSUM, 1 << VIRTIO_NET_F_HOST_USO] {
            let mut guest = Guest::new(features, 16384);
            let host_mac = guest.answer_arp();
            let frame = together(guest.udp(&host_mac, &[7; 2500]));
            guest.send_with(TOGETHER, &frame);
            guest.send(&guest.udp(&host_mac, b"alone"));
            let mut came = [0; 3000];
            let (len, _) = guest.socket.recv_from(&mut came).unwrap();
            assert_eq!(came[..len], *b"alone", "{features:#x}");
        }
    });
}

#[test]
fn datagrams_that_the_host_leaves_together_are_split_by_the_guest() {
    alone(|| {
        let payload: Vec<u8> = (0..60_000).map(|index| (index / 7) as u8).collect();
        for buffer in [65_562, 1500] {
            let mut guest = Guest::new(GETS_TOGETHER | MERGEABLE, buffer);
            guest.answer_arp();
            guest.host_sends(&payload);
            let (header, frame, buffers) = guest.receive_with_header();
            assert_eq!((header[0], header[1], buffers), (1, 5, (60_054u64.div_ceil(buffer)) as u16));
            assert_eq!([header[4], header[5]], SEGMENT.to_le_bytes());
            assert!(frame[42..] == payload);
        }
    });
}

#[test]
fn a_guest_that_cannot_split_datagrams_gets_each() {
    alone(|| {
        for features in [0, GETS_TOGETHER & !(1 << VIRTIO_NET_F_GUEST_USO6)] {
            let mut guest = Guest::new(features | MERGEABLE, 16384);
            guest.answer_arp();
            let payload: Vec<u8> = (0..2500).map(|index| (index / 7) as u8).collect();
            guest.host_sends(&payload);
            for part in payload.chunks(SEGMENT.into()) {
                let (header, frame, _) = guest.receive_with_header();
                assert_eq!((header[1], &frame[42..]), (0, part));
            }
        }
    });
}

#[test]
fn uso_is_offered_if_the_kernel_has_it() {
    let uso = 1 << VIRTIO_NET_F_GUEST_USO4 | 1 << VIRTIO_NET_F_GUEST_USO6 | 1 << VIRTIO_NET_F_HOST_USO;
    assert_eq!(offered(true, false), offered(false, false) | uso);
    assert_eq!(offered(false, true) & uso, 0);
    // The unit tests of the VMM need Linux 6.12, which has it.
    alone(move || assert_eq!(card(1500).features(), offered(true, false)));
}

#[test]
fn a_packet_may_lie_in_several_buffers() {
    alone(|| {
        let mut guest = Guest::new(MERGEABLE, 1500);
        guest.answer_arp();
        let payload: Vec<u8> = (0..5000).map(|index| (index / 3) as u8).collect();
        // This is enough to use all buffers more than once.
        for _ in 0..50 {
            guest.socket.send_to(&payload, (GUEST, 7001)).unwrap();
            let (frame, buffers) = guest.receive();
            assert_eq!(buffers, 4);
            assert!(frame[42..] == payload);
        }
    });
}

#[test]
fn a_guest_without_room_gets_its_packets_later() {
    alone(|| {
        let mut device = card(1500);
        let mut driver = Driver::new(&mut device, 0);
        let socket = UdpSocket::bind((HOST, 7000)).unwrap();
        socket.send_to(b"x", (GUEST, 7001)).unwrap();
        driver.wait_interrupt(50);
        assert!(driver.used(RX).is_none());
        driver.offer(RX, 0, &[(BUFFERS, 2048, WRITE)]);
        let (_, len) = driver.wait_used(RX);
        assert_eq!(len as usize, HEADER_LEN + 42);
    });
}

#[test]
fn what_is_no_packet_is_dropped() {
    alone(|| {
        let mut guest = Guest::new(0, 16384);
        guest.answer_arp();
        // An empty packet, a short one, one with an invalid header, and one that is too long.
        guest.send(&[]);
        guest.send(&[1, 2, 3]);
        guest.driver.write(TX_BUFFER, &[0xff; HEADER_LEN + 100]);
        for len in [HEADER_LEN as u32 + 100, 0x2_0000] {
            guest.driver.offer(TX, 0, &[(TX_BUFFER, len, 0)]);
            guest.driver.wait_used(TX);
        }
        guest.socket.send_to(b"still there", (GUEST, 7001)).unwrap();
        assert_eq!(guest.receive().0[42..], *b"still there");
    });
}

#[test]
fn an_illegal_chain_asks_for_a_reset() {
    let illegal: [fn(&mut Driver); 6] = [
        |driver| driver.offer(TX, 0, &[(TX_BUFFER, HEADER_LEN as u32 - 1, 0)]),
        |driver| driver.offer(TX, 0, &[(TX_BUFFER, 100, WRITE)]),
        |driver| driver.offer(TX, 0, &[(1 << 40, 100, 0)]),
        |driver| {
            driver.describe(TX, 0, Descriptor::new(TX_BUFFER, 100, NEXT, 0));
            driver.publish(TX, 0);
        },
        |driver| driver.break_avail_index(TX),
        |driver| driver.break_avail_index(RX),
    ];
    for act in illegal {
        alone(move || {
            let mut guest = Guest::new(0, 16384);
            guest.answer_arp();
            act(&mut guest.driver);
            // The device looks at the receive queue when a packet arrives.
            for _ in 0..RX_BUFFERS + 1 {
                guest.socket.send_to(b"x", (GUEST, 7001)).unwrap();
            }
            guest.driver.wait_needs_reset();
        });
    }
}

#[test]
fn a_receive_buffer_that_cannot_hold_a_header_asks_for_a_reset() {
    alone(|| {
        let mut device = card(1500);
        let mut driver = Driver::new(&mut device, MERGEABLE);
        driver.offer(RX, 0, &[(BUFFERS, 8, WRITE)]);
        UdpSocket::bind((HOST, 7000)).unwrap().send_to(b"x", (GUEST, 7001)).unwrap();
        driver.wait_needs_reset();
    });
}

#[test]
fn the_card_serves_again_after_a_reset() {
    alone(|| {
        let mut guest = Guest::new(MERGEABLE, 2048);
        guest.driver.reset();
        guest.driver = Driver::new(&mut guest.device, 0);
        guest.buffer = 16384;
        guest.driver.offer(RX, 0, &[(BUFFERS, 16384, WRITE)]);
        guest.driver.offer(RX, 1, &[(BUFFERS + 16384, 16384, WRITE)]);
        guest.answer_arp();
    });
}

#[test]
fn one_thread_serves_several_cards() {
    alone(|| {
        let net = NetThreads::start(1).unwrap();
        let mut guest = Guest::on(card_of(&net, 9000), MERGEABLE, 2048);
        guest.answer_arp();
        let mut expect = |text: &[u8]| {
            guest.socket.send_to(text, (GUEST, 7001)).unwrap();
            assert_eq!(guest.receive().0[42..], *text);
        };
        let mut other = Net::new(Tap::create("tap1", 1).unwrap(), MAC, &net);
        for _ in 0..3 {
            let _driver = Driver::new(&mut other, 0);
            expect(b"while the other one is active");
            other.deactivate().unwrap();
            expect(b"while it is not");
        }
        let mut driver = Driver::new(&mut other, 0);
        driver.break_avail_index(TX);
        driver.wait_needs_reset();
        expect(b"after it has failed");
        let _driver = Driver::new(&mut other, 0);
        drop(other);
        expect(b"after its end");
        assert!(Tap::create("tap1", 1).is_ok());
    });
}

#[test]
fn a_card_whose_driver_changes_offloads_too_often_needs_a_reset() {
    alone(|| {
        let net = NetThreads::start(1).unwrap();
        let mut card = card_of(&net, 1500);
        let mut other = Net::new(Tap::create("tap1", 1).unwrap(), MAC, &net);
        // All cards of a VM have their turns together.
        net.pace.use_up();
        for card in [&mut card, &mut other] {
            Driver::new(card, 1 << VIRTIO_NET_F_GUEST_CSUM).wait_needs_reset();
        }
        // A driver that changes nothing is served.
        let mut guest = Guest::on(card, 0, 16384);
        guest.answer_arp();
    });
}

#[test]
fn the_tap_is_the_cards_alone_and_ends_with_it() {
    alone(|| {
        let card = card(1500);
        assert!(Tap::create("tap0", 1).is_err());
        drop(card);
        // Those of another VMM would otherwise become further queues of this one.
        let several = Tap::create("tap0", 3).unwrap();
        for queues in [1, 3] {
            let refused = Tap::create("tap0", queues).err().and_then(|error| error.raw_os_error());
            assert_eq!(refused, Some(libc::EBUSY), "{queues}");
        }
        drop(several);
        assert!(Tap::create("tap0", 1).is_ok());
        assert!(Tap::create("a-name-that-is-too-long", 1).is_err());
    });
}

#[test]
fn the_tap_leaves_undone_what_the_driver_can_do() {
    let feature = |bit: u32| 1u64 << bit;
    let checksum = feature(VIRTIO_NET_F_GUEST_CSUM);
    assert_eq!(offload(0), 0);
    assert_eq!(offload(feature(VIRTIO_NET_F_GUEST_TSO4)), 0);
    assert_eq!(offload(checksum), libc::TUN_F_CSUM);
    assert_eq!(offload(checksum | feature(VIRTIO_NET_F_GUEST_TSO6)), libc::TUN_F_CSUM | libc::TUN_F_TSO6);
    assert_eq!(offload(GETS_TOGETHER), libc::TUN_F_CSUM | libc::TUN_F_USO4 | libc::TUN_F_USO6);
    // The kernel would refuse one without the other.
    for one in [VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6] {
        assert_eq!(offload(checksum | feature(one)), libc::TUN_F_CSUM);
    }
}

#[test]
fn the_configuration_is_the_address() {
    alone(|| {
        let device = card(1500);
        let mut mac = [0; 6];
        device.read_config(0, &mut mac);
        assert_eq!(mac, MAC);
    });
}
