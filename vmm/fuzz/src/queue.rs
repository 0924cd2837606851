//! The queue code by itself: rings and tables with any contents, and what every device does with its chains.

use std::io;

use anyhow::Result;
use bulkhead_vmm::{
    GuestMemory, memory,
    virtio::{ActiveQueue, Interrupt, chain::Chain},
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{input::Input, meddle};

/// Two adjacent ranges, so that a buffer may be in both, and a third range at a distance.
const PIECES: [(u64, u64); 3] = [(0, 0x8000), (0x8000, 0x8000), (0x10_0000, 0x1000)];
const TABLE: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const MAX_SIZE: u16 = 256;
/// Addresses of buffers and indirect tables: in both adjacent ranges, at the end of a range, and outside of memory.
const PLACES: [u64; 8] = [0x4000, 0x5000, 0x7ff8, 0x8000, 0xfff0, 0x10_0000, 0x20_0000, u64::MAX - 15];
/// Their lengths: of a table with one descriptor, of the longest legal table and a longer one, and more than all
/// memory.
const LENS: [u32; 8] = [0, 1, 16, 44, 16 * 256, 16 * 257, 0x10_0000, u32::MAX];

/// A queue. The input is its driver.
struct Queues {
    memory: GuestMemory,
    queue: ActiveQueue,
    interrupt: Interrupt,
}

/// Runs the program, until the device would stop serving the driver.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let mut queues = Queues::new(&mut input)?;
    while !input.is_over() {
        match input.below(8) {
            0..=3 => queues.describe(&mut input),
            4 => queues.write(AVAIL + 4 + 2 * u64::from(input.u8()), &input.u16().to_le_bytes()),
            5 => queues.write(AVAIL + 2, &(input.u16() % 512).to_le_bytes()),
            6 => queues.write(u64::from(input.u16()), input.bytes(16)),
            _ => {
                if !meddle::as_device(|| queues.serve()) {
                    return Ok(());
                }
            }
        }
    }
    meddle::end();
    queues.serve();
    Ok(())
}

impl Queues {
    fn new(input: &mut Input) -> io::Result<Self> {
        let memory = memory::lay_out(&PIECES, 0).map_err(io::Error::other)?;
        let mut queue = Queue::new(MAX_SIZE).map_err(io::Error::other)?;
        queue.set_size(1 << input.below(9));
        queue.set_desc_table_address(Some(TABLE as u32), None);
        queue.set_avail_ring_address(Some(AVAIL as u32), None);
        queue.set_used_ring_address(Some(USED as u32), None);
        queue.set_event_idx(input.u8() & 1 == 0);
        queue.set_ready(true);
        let queue = ActiveQueue { queue, kick: EventFd::new(EFD_NONBLOCK)?, index: 0 };
        meddle::begin(&memory);
        Ok(Self { memory, queue, interrupt: Interrupt::new(EventFd::new(EFD_NONBLOCK)?) })
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        // The program writes only to memory.
        let _ = self.memory.write(bytes, GuestAddress(address));
    }

    /// Writes a descriptor to the table of the queue, or to an indirect table.
    fn describe(&self, input: &mut Input) {
        let table = input.choose(&[TABLE, TABLE, TABLE, PLACES[0], PLACES[1]]);
        let mut descriptor = [0; 16];
        let place = 16 * u64::from(input.u8());
        descriptor[..8].copy_from_slice(&input.choose(&PLACES).to_le_bytes());
        descriptor[8..12].copy_from_slice(&input.choose(&LENS).to_le_bytes());
        descriptor[12..14].copy_from_slice(&u16::from(input.u8() % 8).to_le_bytes());
        descriptor[14..].copy_from_slice(&u16::from(input.u8()).to_le_bytes());
        self.write(table + place, &descriptor);
    }

    /// Serves all available chains as devices do. Returns false if the driver broke the queue.
    fn serve(&mut self) -> bool {
        let size = self.queue.queue.size();
        // The driver does nothing meanwhile, so there are at most as many chains as the ring has entries.
        for _ in 0..=size {
            match self.serve_one(size) {
                Ok(true) => {}
                Ok(false) => return !matches!(self.queue.rearm(&self.memory), Ok(true) | Err(_)),
                Err(()) => return false,
            }
        }
        assert!(meddle::is_on(), "a queue of {size} had more than {size} chains");
        true
    }

    /// Serves one chain. Returns false if there is none.
    fn serve_one(&mut self, size: u16) -> Result<bool, ()> {
        let Some(chain) = self.queue.pop(&self.memory).map_err(drop)? else { return Ok(false) };
        let Chain { head, mut readable, mut writable } =
            Chain::walk(&self.memory, chain, size).map_err(drop)?;
        // A descriptor is in at most two ranges.
        assert!(readable.slices().len() + writable.slices().len() <= 2 * usize::from(size));
        let (read, room) = (readable.len(), writable.len());
        let header = readable.read_array::<44>();
        assert_eq!(readable.len(), read - header.map_or(0, |header| header.len()));
        let written = writable.write(&[7; 5000]);
        assert_eq!((written, writable.len()), (room.min(5000), room - room.min(5000)));
        self.queue.push(&self.memory, head, written as u32).map_err(drop)?;
        self.queue.notify(&self.memory, &self.interrupt).map_err(drop)?;
        Ok(true)
    }
}
