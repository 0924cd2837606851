//! Several pairs of queues, and the control queue.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_ERR, VIRTIO_NET_OK,
};

use super::*;
use crate::{
    GuestMemory,
    bus::BusDevice,
    layout::Resources,
    memory,
    snapshot::DeviceState,
    virtio::{mmio::MmioTransport, testing::MEMORY},
};

/// Bytes between the buffers of two pairs.
pub(super) const BUFFERS_OF_PAIR: u64 = 0x20_0000;
const PAIRS: u64 = 1 << VIRTIO_NET_F_MQ | 1 << VIRTIO_NET_F_CTRL_VQ;
const BUFFER: u64 = 4096;
/// The control queue of two pairs, and its place for a driver that knows one pair only.
const CONTROL: usize = 4;
const EARLY_CONTROL: usize = 2;
const COMMAND: u64 = TX_BUFFER + 0x10_0000;
const ANSWER: u64 = COMMAND + 0x1000;
const EARLY: u64 = COMMAND + 0x2000;
const OK: u8 = VIRTIO_NET_OK as u8;
const ERR: u8 = VIRTIO_NET_ERR as u8;
const SET: [u8; 2] = [VIRTIO_NET_CTRL_MQ as u8, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET as u8];

impl Guest {
    /// A guest with two pairs.
    fn with_pairs(features: u64) -> Self {
        Self::of_two(card_of(&NetThreads::start(2).unwrap(), 1500), features)
    }

    fn of_two(mut device: Net, features: u64) -> Self {
        let mut driver = Driver::new(&mut device, features);
        let pairs = if features & 1 << VIRTIO_NET_F_MQ != 0 { 2 } else { 1 };
        offer_room(&mut driver, pairs);
        Self::by(driver, device, BUFFER)
    }

    /// Gives a command, and returns the answer.
    fn command(&mut self, queue: usize, bytes: &[u8]) -> u8 {
        self.driver.write(COMMAND, bytes);
        self.driver.write(ANSWER, &[0xff]);
        self.driver.offer(queue, 0, &[(COMMAND, bytes.len() as u32, 0), (ANSWER, 1, WRITE)]);
        assert_eq!(self.driver.wait_used(queue), (0, 1));
        self.driver.read(ANSWER, 1)[0]
    }

    fn set_pairs(&mut self, count: u16) -> u8 {
        self.command(CONTROL, &[&SET[..], &count.to_le_bytes()].concat())
    }

    /// Datagrams of many sources arrive. Says how many by each pair.
    fn count_by_pair(&mut self) -> [usize; 2] {
        for _ in 0..20 {
            UdpSocket::bind((HOST, 0)).unwrap().send_to(b"x", (GUEST, 7001)).unwrap();
        }
        let mut counts = [0; 2];
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while counts.iter().sum::<usize>() < 20 {
            assert!(std::time::Instant::now() < deadline, "{counts:?} of 20 came");
            for (pair, count) in counts.iter_mut().enumerate() {
                *count += std::iter::from_fn(|| self.driver.used(RX + 2 * pair)).count();
            }
            self.driver.wait_interrupt(10);
        }
        counts
    }

    /// Sends a datagram by a pair, and receives the host's answer by the same.
    fn talk(&mut self, pair: usize, host_mac: &[u8]) {
        self.pair = pair;
        let text = format!("by the pair {pair}");
        self.send(&self.udp(host_mac, text.as_bytes()));
        let mut payload = [0; 100];
        let (len, from) = self.socket.recv_from(&mut payload).unwrap();
        assert_eq!((&payload[..len], from), (text.as_bytes(), (GUEST, 7001).into()));
        self.socket.send_to(text.as_bytes(), from).unwrap();
        // The kernel of the host answers by the queue by which it got the last packet of a connection.
        assert_eq!(self.receive().0[42..], *text.as_bytes());
    }
}

fn offer_room(driver: &mut Driver, pairs: usize) {
    for pair in 0..pairs {
        for index in 0..RX_BUFFERS {
            let address = BUFFERS + BUFFERS_OF_PAIR * pair as u64 + BUFFER * u64::from(index);
            driver.offer(RX + 2 * pair, index, &[(address, BUFFER as u32, WRITE)]);
        }
    }
}

#[test]
fn a_connection_has_the_pair_by_which_the_guest_sends() {
    alone(|| {
        let threads = NetThreads::start(2).unwrap();
        let mut guest = Guest::of_two(card_of(&threads, 1500), PAIRS);
        let host_mac = guest.answer_arp();
        // The threads wait for events anew while the second queue of the tap is detached.
        let mut other = Net::new(Tap::create("tap1", 2).unwrap(), MAC, &threads);
        let _driver = Driver::new(&mut other, PAIRS);
        // What is sent too early by the second pair waits until that is in use.
        let frame = [&[0; HEADER_LEN], &guest.udp(&host_mac, b"early")[..]].concat();
        guest.driver.write(EARLY, &frame);
        guest.driver.offer(TX + 2, 200, &[(EARLY, frame.len() as u32, 0)]);
        guest.talk(0, &host_mac);
        assert!(guest.driver.used(TX + 2).is_none());
        assert_eq!(guest.set_pairs(2), OK);
        guest.driver.wait_used(TX + 2);
        let mut payload = [0; 100];
        let (len, _) = guest.socket.recv_from(&mut payload).unwrap();
        assert_eq!(&payload[..len], b"early");
        for _ in 0..3 {
            guest.talk(1, &host_mac);
            guest.talk(0, &host_mac);
        }
        // A pair goes and comes back.
        assert_eq!((guest.set_pairs(1), guest.set_pairs(2)), (OK, OK));
        guest.talk(1, &host_mac);
    });
}

#[test]
fn packets_come_by_as_many_pairs_as_the_driver_has_said() {
    alone(|| {
        let mut guest = Guest::with_pairs(PAIRS);
        guest.answer_arp();
        assert_eq!(guest.count_by_pair(), [20, 0], "at first there is one");
        assert_eq!(guest.set_pairs(2), OK);
        offer_room(&mut guest.driver, 2);
        let [first, second] = guest.count_by_pair();
        assert!(first > 0 && second > 0, "{first} {second}");
        assert_eq!(guest.device.driver_state(), 2);
        assert_eq!(guest.set_pairs(1), OK);
        offer_room(&mut guest.driver, 1);
        assert_eq!(guest.count_by_pair(), [20, 0]);
        // The next driver begins with one again.
        assert_eq!(guest.set_pairs(2), OK);
        guest.driver.reset();
        guest.device.deactivate().unwrap();
        guest.driver = Driver::new(&mut guest.device, PAIRS);
        offer_room(&mut guest.driver, 2);
        // Its threads have begun when this is answered. Until then packets would come to both queues of the tap.
        assert_eq!(guest.set_pairs(0), ERR);
        assert_eq!(guest.count_by_pair(), [20, 0]);
    });
}

#[test]
fn a_driver_that_knows_one_pair_has_one_and_no_command_changes_that() {
    alone(|| {
        for features in [0, 1 << VIRTIO_NET_F_MQ, 1 << VIRTIO_NET_F_CTRL_VQ] {
            let mut guest = Guest::with_pairs(features);
            guest.answer_arp();
            if features == 1 << VIRTIO_NET_F_CTRL_VQ {
                // Its control queue comes after the first pair, where other drivers have the second one.
                let command = [&SET[..], &2u16.to_le_bytes()].concat();
                assert_eq!(guest.command(EARLY_CONTROL, &command), ERR);
            }
            assert_eq!(guest.count_by_pair(), [20, 0], "{features:#x}");
        }
    });
}

#[test]
fn a_command_that_makes_no_sense_changes_nothing() {
    alone(|| {
        let mut guest = Guest::with_pairs(PAIRS);
        let host_mac = guest.answer_arp();
        for before in [1, 2] {
            assert_eq!(guest.set_pairs(before), OK);
            for count in [0, 3, 4, 255, 256, 0x8000, 0xffff] {
                assert_eq!(guest.set_pairs(count), ERR, "{count}");
            }
            let [class, command] = SET;
            let others: [&[u8]; 7] = [
                &SET,
                &[class, command, 1],
                &[class, command, 1, 0, 0],
                &[class, command + 1, 1, 0],
                &[class + 1, command, 1, 0],
                &[VIRTIO_NET_CTRL_MAC as u8, 1, 2, 0, 0, 0, 0, 9],
                &[0xff; 4096],
            ];
            for other in others {
                assert_eq!(guest.command(CONTROL, other), ERR, "{other:?}");
            }
            assert_eq!(guest.device.driver_state(), before);
            guest.talk(usize::from(before) - 1, &host_mac);
        }
        // However often it asks, it gets an answer.
        let answers: Vec<_> = (0..500).map(|round| guest.set_pairs(1 + round % 2)).collect();
        assert!(answers.contains(&OK) && answers.contains(&ERR));
        guest.driver.write(ANSWER, &[0xff]);
        guest.talk(0, &host_mac);
    });
}

#[test]
fn an_illegal_chain_of_the_control_queue_asks_for_a_reset() {
    let chains: [&[(u64, u32, u16)]; 4] = [
        &[(COMMAND, 4, 0)],
        &[(COMMAND, 1, 0), (ANSWER, 1, WRITE)],
        &[(ANSWER, 1, WRITE)],
        &[(1 << 40, 4, 0), (ANSWER, 1, WRITE)],
    ];
    for chain in chains {
        alone(move || {
            let mut guest = Guest::with_pairs(PAIRS);
            guest.driver.offer(CONTROL, 0, chain);
            guest.driver.wait_needs_reset();
            guest.device.deactivate().unwrap();
            guest.driver = Driver::new(&mut guest.device, PAIRS);
            offer_room(&mut guest.driver, 2);
            assert_eq!(guest.set_pairs(2), OK);
        });
    }
}

#[test]
fn a_pair_that_the_driver_has_not_set_up_cannot_be_used() {
    alone(|| {
        for missing in [2, 3] {
            let mut device = card_of(&NetThreads::start(2).unwrap(), 1500);
            let memory = memory::lay_out(&[(0, MEMORY)], 0).unwrap();
            let mut driver = Driver::with_queues(memory, &mut device, PAIRS, |queue| queue != missing);
            offer_room(&mut driver, 1);
            let mut guest = Guest::by(driver, device, BUFFER);
            let host_mac = guest.answer_arp();
            assert_eq!([2, 1, 2].map(|count| guest.set_pairs(count)), [ERR, OK, ERR]);
            guest.talk(0, &host_mac);
        }
        // Without a control queue there is one pair, and without the first pair there is nothing.
        let mut device = card_of(&NetThreads::start(2).unwrap(), 1500);
        let memory = memory::lay_out(&[(0, MEMORY)], 0).unwrap();
        let mut driver = Driver::with_queues(memory, &mut device, PAIRS, |queue| queue != CONTROL);
        offer_room(&mut driver, 1);
        let mut guest = Guest::by(driver, device, BUFFER);
        guest.answer_arp();
        assert_eq!(guest.count_by_pair(), [20, 0]);
    });
}

#[test]
fn a_card_that_continues_has_the_pairs_that_its_driver_uses() {
    alone(|| {
        let mut card = card_of(&NetThreads::start(2).unwrap(), 1500);
        for illegal in [0, 3, 0xffff] {
            assert!(card.set_driver_state(illegal).is_err(), "{illegal}");
        }
        card.set_driver_state(2).unwrap();
        let mut guest = Guest::of_two(card, PAIRS);
        assert_eq!(guest.device.driver_state(), 2);
        // The host learns the guest's address from its question, and answers by any pair.
        guest.pair = 1;
        let question = [&MAC[..], &GUEST.octets(), &[0; 6], &HOST.octets()].concat();
        guest.send(&[&[0xff; 6], &MAC[..], &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &question].concat());
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while guest.driver.used(0).or_else(|| guest.driver.used(2)).is_none() {
            assert!(std::time::Instant::now() < deadline, "no answer came");
            guest.driver.wait_interrupt(10);
        }
        let [first, second] = guest.count_by_pair();
        assert!(first > 0 && second > 0, "{first} {second}");
    });
}

#[test]
fn a_card_with_one_queue_has_no_control_queue() {
    alone(|| {
        let one = card(1500);
        assert_eq!((one.features() & PAIRS, one.queue_sizes()), (0, &[256, 256][..]));
        let mut config = [0xaa; 10];
        one.read_config(0, &mut config);
        assert_eq!(config[6..], [0xaa; 4]);
        let two = card_of(&NetThreads::start(2).unwrap(), 1500);
        assert_eq!((two.features() & PAIRS, two.queue_sizes()), (PAIRS, &[256, 256, 256, 256, 64][..]));
        two.read_config(0, &mut config);
        assert_eq!(config, [2, 0, 0, 0, 0, 1, 0, 0, 2, 0]);
    });
}

/// The card behind a transport.
fn plugged(memory: &GuestMemory) -> MmioTransport {
    let card = card_of(&NetThreads::start(2).unwrap(), 1500);
    let resources = Resources { address: 0xd000_0000, gsi: 5 };
    MmioTransport::new(Box::new(card), memory.clone(), resources).unwrap()
}

/// Initializes the card by its registers (virtio 1.3, 4.2.2), with its queues where [`Driver`] has them.
fn initialize(transport: &MmioTransport) {
    let write = |register: u64, value: u32| transport.write(register, &value.to_le_bytes());
    let (low, high) = (PAIRS as u32, 1);
    for (register, value) in [(0x70, 3), (0x24, 0), (0x20, low), (0x24, 1), (0x20, high), (0x70, 11)] {
        write(register, value);
    }
    for queue in 0..=CONTROL as u32 {
        let base = 0x1_0000 * (queue + 1);
        for (register, value) in
            [(0x30, queue), (0x38, 64), (0x80, base), (0x90, base + 0x8000), (0xa0, base + 0xa000), (0x44, 1)]
        {
            write(register, value);
        }
    }
    write(0x70, 15);
}

#[test]
fn the_saved_state_of_a_card_has_the_number_of_its_pairs() {
    use vm_memory::{Bytes, GuestAddress};
    alone(|| {
        let memory = memory::lay_out(&[(0, MEMORY)], 0).unwrap();
        let card = plugged(&memory);
        initialize(&card);
        let rings = 0x1_0000 * (CONTROL as u64 + 1);
        let write = |bytes: &[u8], address: u64| memory.write_slice(bytes, GuestAddress(address)).unwrap();
        // The command, with its descriptors: address, length, flags, next.
        write(&[&SET[..], &2u16.to_le_bytes()].concat(), COMMAND);
        write(&[0xff], ANSWER);
        write(&[&COMMAND.to_le_bytes()[..], &4u32.to_le_bytes(), &[1, 0, 1, 0]].concat(), rings);
        write(&[&ANSWER.to_le_bytes()[..], &1u32.to_le_bytes(), &[2, 0, 0, 0]].concat(), rings + 16);
        write(&[0, 0, 1, 0, 0, 0], rings + 0x8000);
        card.write(0x50, &(CONTROL as u32).to_le_bytes());
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while memory.read_obj::<u8>(GuestAddress(ANSWER)).unwrap() == 0xff {
            assert!(std::time::Instant::now() < deadline, "the command is not answered");
            thread::yield_now();
        }
        assert_eq!(memory.read_obj::<u8>(GuestAddress(ANSWER)).unwrap(), OK);
        let saved = serde_json::to_value(DeviceState::save(&card).unwrap()).unwrap();
        assert_eq!(saved["driver_state"], 2);
        drop(card);

        let restore = |state: &serde_json::Value| {
            let clone = plugged(&memory);
            let state: DeviceState = serde_json::from_value(state.clone()).unwrap();
            state.prepare(&clone).unwrap();
            state.restore(&clone).map(|()| clone)
        };
        let clone = restore(&saved).unwrap();
        // Its clone has two pairs, and so have the clones of that.
        assert_eq!(serde_json::to_value(DeviceState::save(&clone).unwrap()).unwrap()["driver_state"], 2);
        for illegal in [0, 3, 0xffff] {
            let mut damaged = saved.clone();
            damaged["driver_state"] = illegal.into();
            assert!(restore(&damaged).is_err(), "{illegal}");
        }
    });
}
