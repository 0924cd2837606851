use vm_memory::Bytes;

use super::*;
use crate::{
    memory,
    virtio::testing::{BUFFERS, Driver, MEMORY, WRITE},
};

/// The capacity of the region: 16 blocks.
const ROOM: u64 = 16 * BLOCK;
const REQUEST: u64 = BUFFERS;
const RESPONSE: u64 = BUFFERS + 0x1000;

const ACK: [u8; RESPONSE_LEN] = [0; RESPONSE_LEN];
const ERROR: [u8; RESPONSE_LEN] = [3, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A guest with a memory device.
struct Guest {
    device: Mem,
    control: MemControl,
    memory: GuestMemory,
    driver: Driver,
}

impl Guest {
    fn new() -> Self {
        let memory = memory::lay_out(&[(0, MEMORY)], ROOM).unwrap();
        let mut device = Mem::new(memory.growing().unwrap()).unwrap();
        let driver = Driver::with_memory(memory.clone(), &mut device, UNPLUGGED_INACCESSIBLE);
        Self { control: device.control(), device, memory, driver }
    }

    /// A guest that was requested to plug this number of blocks.
    fn asked(blocks: u64) -> Self {
        let guest = Self::new();
        guest.ask(blocks);
        guest
    }

    fn ask(&self, blocks: u64) {
        self.memory.growing().unwrap().grow(blocks * BLOCK, || Ok(())).unwrap();
        self.control.request(blocks * BLOCK).unwrap();
    }

    /// The address of a block.
    fn address(&self, block: u64) -> u64 {
        self.memory.growing().unwrap().start_addr().0 + block * BLOCK
    }

    /// Sends a request and returns the response.
    fn request(&mut self, kind: u16, address: u64, count: u16) -> Vec<u8> {
        let mut request = [0; REQUEST_LEN];
        request[..2].copy_from_slice(&kind.to_le_bytes());
        request[8..16].copy_from_slice(&address.to_le_bytes());
        request[16..18].copy_from_slice(&count.to_le_bytes());
        self.driver.write(REQUEST, &request);
        self.driver.write(RESPONSE, &[0xff; RESPONSE_LEN]);
        self.driver.offer(0, 0, &[(REQUEST, REQUEST_LEN as u32, 0), (RESPONSE, RESPONSE_LEN as u32, WRITE)]);
        assert_eq!(self.driver.wait_used(0), (0, RESPONSE_LEN as u32));
        self.driver.read(RESPONSE, RESPONSE_LEN)
    }

    fn of_blocks(&mut self, kind: u16, first: u64, count: u16) -> Vec<u8> {
        self.request(kind, self.address(first), count)
    }

    fn state(&mut self, first: u64, count: u16) -> u8 {
        let response = self.of_blocks(request::STATE, first, count);
        assert_eq!(response[..8], ACK[..8]);
        response[8]
    }

    /// The 64-bit fields of the configuration.
    fn config(&self) -> [u64; 7] {
        let mut config = [0; CONFIG_LEN];
        self.device.read_config(0, &mut config);
        let mut fields = config.chunks(8).map(|field| u64::from_le_bytes(field.try_into().unwrap()));
        [(); 7].map(|()| fields.next().unwrap())
    }
}

#[test]
fn the_driver_is_told_what_is_wanted_and_the_vmm_what_was_done() {
    let mut guest = Guest::new();
    let start = guest.address(0);
    assert_eq!(guest.config(), [BLOCK, 0, start, ROOM, 0, 0, 0]);
    let generation = guest.device.config_generation();

    guest.ask(4);
    guest.driver.wait_config_changed();
    assert_eq!(guest.config(), [BLOCK, 0, start, ROOM, 4 * BLOCK, 0, 4 * BLOCK]);
    assert_ne!(guest.device.config_generation(), generation);

    assert_eq!(guest.of_blocks(request::PLUG, 0, 3), ACK);
    assert_eq!((guest.config()[5], guest.control.plugged()), (3 * BLOCK, 3 * BLOCK));
    assert_eq!(guest.control.progress().read().unwrap(), 1);
    assert_eq!([guest.state(0, 3), guest.state(3, 1), guest.state(2, 2)], [0, 1, 2]);
}

#[test]
fn less_is_never_asked_for() {
    let guest = Guest::asked(4);
    guest.control.request(BLOCK).unwrap();
    assert_eq!(guest.config()[4..], [4 * BLOCK, 0, 4 * BLOCK]);
}

#[test]
fn more_than_was_asked_for_is_not_plugged() {
    let mut guest = Guest::asked(4);
    assert_eq!(guest.of_blocks(request::PLUG, 0, 3), ACK);
    assert_eq!(guest.of_blocks(request::PLUG, 2, 2), ERROR, "one of them is plugged");
    assert_eq!(guest.of_blocks(request::PLUG, 3, 2), ERROR, "one of them is not usable");
    assert_eq!(guest.of_blocks(request::PLUG, 3, 1), ACK);
    assert_eq!(guest.of_blocks(request::PLUG, 4, 1), ERROR, "it is not usable");
}

#[test]
fn what_is_unplugged_goes_back_to_the_host() {
    let mut guest = Guest::asked(4);
    assert_eq!(guest.of_blocks(request::PLUG, 0, 4), ACK);
    let words = |guest: &Guest| {
        [0, 1, 2, 3].map(|block| guest.memory.read_obj::<u64>(GuestAddress(guest.address(block))).unwrap())
    };
    for block in 0..4 {
        guest.memory.write_obj(7u64, GuestAddress(guest.address(block))).unwrap();
    }
    assert_eq!(guest.of_blocks(request::UNPLUG, 1, 2), ACK);
    assert_eq!((words(&guest), guest.control.plugged()), ([7, 0, 0, 7], 2 * BLOCK));
    assert_eq!(guest.of_blocks(request::UNPLUG, 0, 2), ERROR, "one of them is unplugged");
    assert_eq!(guest.request(request::UNPLUG_ALL, 0, 0), ACK);
    assert_eq!((words(&guest), guest.control.plugged()), ([0; 4], 0));
    assert_eq!(guest.of_blocks(request::PLUG, 0, 4), ACK);
}

#[test]
fn blocks_that_are_not_there_are_refused() {
    let mut guest = Guest::asked(4);
    let start = guest.address(0);
    for (address, count) in [
        (start, 0),
        (start, 5),
        (start, u16::MAX),
        (start + 4096, 1),
        (start + 4 * BLOCK, 1),
        (start - BLOCK, 1),
        (0, 1),
        (u64::MAX - BLOCK + 1, 1),
    ] {
        for kind in [request::PLUG, request::UNPLUG, request::STATE] {
            assert_eq!(guest.request(kind, address, count), ERROR, "{kind} {address:#x} {count}");
        }
    }
    assert_eq!(guest.of_blocks(77, 0, 1), ERROR);
    assert_eq!(guest.control.plugged(), 0);
}

#[test]
fn what_was_plugged_outlives_a_reset() {
    let mut guest = Guest::asked(4);
    assert_eq!(guest.of_blocks(request::PLUG, 0, 4), ACK);
    guest.driver.reset();
    assert_eq!(guest.config()[5], 4 * BLOCK);
}

#[test]
fn a_buffer_beyond_what_is_usable_breaks_the_device() {
    let mut guest = Guest::asked(4);
    let beyond = guest.address(4);
    let buffers = [(beyond, REQUEST_LEN as u32, 0), (RESPONSE, RESPONSE_LEN as u32, WRITE)];
    guest.driver.offer(0, 0, &buffers);
    guest.driver.wait_needs_reset();
    assert!(guest.driver.used(0).is_none());
}

#[test]
fn a_request_that_is_none_breaks_the_device() {
    for buffers in [
        [(REQUEST, REQUEST_LEN as u32 - 1, 0), (RESPONSE, RESPONSE_LEN as u32, WRITE)],
        [(REQUEST, REQUEST_LEN as u32, 0), (RESPONSE, RESPONSE_LEN as u32 - 1, WRITE)],
    ] {
        let mut guest = Guest::new();
        guest.driver.offer(0, 0, &buffers);
        guest.driver.wait_needs_reset();
    }
    let mut guest = Guest::new();
    guest.driver.break_avail_index(0);
    guest.driver.wait_needs_reset();
}
