//! The memory device, by a guest that sends any request. It plugs no more than is usable, and memory that was not
//! granted is not accessible.

use anyhow::{Context, Result, ensure};
use bulkhead_vmm::{
    GuestMemory,
    memory::{self, Region},
    virtio::mem::{BLOCK, Mem, MemControl},
};
use vm_memory::{GuestAddress, GuestMemoryRegion as _};

use crate::{
    guest::{BUFFERS, Buffer, Guest, PIECES},
    input::Input,
};

const ROOM: u64 = 16;
const REQUEST: u64 = BUFFERS;
const RESPONSE: u64 = BUFFERS + 0x100;
const REQUEST_LEN: u32 = 24;
const RESPONSE_LEN: u32 = 10;
const PLUG: u16 = 0;
const UNPLUG_ALL: u16 = 2;
const ACK: [u8; 2] = [0, 0];

/// A VMM that adds memory to its guest.
struct Vmm {
    memory: GuestMemory,
    control: MemControl,
    wanted: u64,
}

impl Vmm {
    /// Requests that the guest has so many blocks.
    fn want(&mut self, blocks: u64) -> Result<()> {
        if blocks > self.wanted {
            region(&self.memory)?.grow(blocks * BLOCK, || Ok(()))?;
            self.wanted = blocks;
        }
        self.control.request(blocks * BLOCK).context("the device cannot be notified")
    }
}

fn region(memory: &GuestMemory) -> Result<&Region> {
    memory.growing().context("the guest has no room")
}

/// Runs the program.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let memory = memory::lay_out(&PIECES, ROOM * BLOCK)?;
    let device = Mem::new(region(&memory)?)?;
    let mut vmm = Vmm { memory: memory.clone(), control: device.control(), wanted: 0 };
    let start = region(&memory)?.start_addr().0;
    let mut guest = Guest::with_memory(memory, Box::new(device), "mem")?;
    guest.start();
    while !input.is_over() {
        match input.below(8) {
            0 => guest.misbehave(&mut input),
            1 => guest.start(),
            2 => vmm.want(input.below(ROOM as usize + 1) as u64)?,
            _ => {
                let (kind, address) = (u16::from(input.u8() % 5), address(&mut input, start));
                let count = if input.u8() < 240 { u16::from(input.u8() % 20) } else { input.u16() };
                request(&mut guest, kind, address, count, buffers(&mut input, start));
            }
        }
        ensure!(vmm.control.plugged() <= vmm.wanted * BLOCK, "more is plugged than is wanted");
        let beyond = GuestAddress(start + vmm.wanted * BLOCK);
        let is_memory = vm_memory::GuestMemoryBackend::address_in_range(&vmm.memory, beyond);
        ensure!(!is_memory, "what was not granted is memory");
    }
    guest.behave();
    plugs_what_is_wanted(&mut guest, &mut vmm, start)
}

/// The address of a block, an address near one, or any address.
fn address(input: &mut Input, start: u64) -> u64 {
    match input.u8() {
        0..=239 => start + u64::from(input.u8() % 20) * BLOCK,
        240..=247 => start.wrapping_add(input.u32().into()),
        _ => input.u64(),
    }
}

/// The buffers of a request: most often legal, or in the device's own region.
fn buffers(input: &mut Input, start: u64) -> [Buffer; 2] {
    let usual = input.u8();
    let place = if usual < 240 { REQUEST } else { start + u64::from(input.u8()) * (BLOCK / 4) };
    let len = if usual % 16 < 14 { REQUEST_LEN } else { input.u8().into() };
    [
        Buffer { address: place, len, write: false },
        Buffer { address: RESPONSE, len: RESPONSE_LEN, write: usual % 16 != 15 },
    ]
}

fn request(guest: &mut Guest, kind: u16, address: u64, count: u16, buffers: [Buffer; 2]) {
    let mut request = [0; REQUEST_LEN as usize];
    request[..2].copy_from_slice(&kind.to_le_bytes());
    request[8..16].copy_from_slice(&address.to_le_bytes());
    request[16..18].copy_from_slice(&count.to_le_bytes());
    guest.write(buffers[0].address, &request);
    guest.offer(0, &buffers);
    guest.kick(0);
}

/// A legal driver gets the requested memory and can use it.
fn plugs_what_is_wanted(guest: &mut Guest, vmm: &mut Vmm, start: u64) -> Result<()> {
    guest.start();
    vmm.want(ROOM)?;
    let proper = || {
        [
            Buffer { address: REQUEST, len: REQUEST_LEN, write: false },
            Buffer { address: RESPONSE, len: RESPONSE_LEN, write: true },
        ]
    };
    for (kind, expected) in [(UNPLUG_ALL, 0), (PLUG, ROOM * BLOCK)] {
        request(guest, kind, start, ROOM as u16, proper());
        ensure!(guest.read(RESPONSE, 2) == ACK, "the device refuses {kind}");
        ensure!(vmm.control.plugged() == expected, "the device has not done {kind}");
    }
    let last = start + ROOM * BLOCK - 8;
    guest.write(last, b"in use!\n");
    ensure!(guest.read(last, 8) == b"in use!\n", "what was plugged is no memory");
    Ok(())
}
