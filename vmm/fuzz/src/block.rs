//! The block device, by a guest that sends any request. It changes nothing but the part of the file that is its disk,
//! and gets no other bytes.

use std::{fs::File, os::unix::fs::FileExt};

use anyhow::{Result, ensure};
use bulkhead_vmm::virtio::block::{Block, BlockThreads};

use crate::{
    guest::{BUFFERS, Buffer, Guest},
    input::Input,
};

/// The queue of the last check, and how many there are.
const QUEUE: usize = 0;
const QUEUES: usize = 2;
const SECTOR: u64 = 512;
/// Sectors of the disk. The file has half a sector more.
const SECTORS: u64 = 64;
const BEYOND: [u8; 256] = [0xbe; 256];
const HEADER: u64 = BUFFERS;
const SEGMENT: u64 = BUFFERS + 0x100;
const STATUS: u64 = BUFFERS + 0x200;
const DATA: u64 = BUFFERS + 0x1000;
/// The types of requests (virtio 1.3, 5.2.6): IN, OUT, FLUSH, GET_ID, DISCARD, WRITE_ZEROES and SECURE_ERASE.
const KINDS: [u32; 7] = [0, 1, 4, 8, 11, 13, 14];

/// Runs the program.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let file = tempfile::tempfile()?;
    file.set_len(SECTORS * SECTOR)?;
    file.write_all_at(&BEYOND, SECTORS * SECTOR)?;
    let read_only = input.u8() % 4 == 3;
    let device = Block::open(file.try_clone()?, "8:16", read_only, true, &BlockThreads::start(QUEUES)?)?;
    let mut guest = Guest::new(Box::new(device), "block")?;
    guest.start();
    while !input.is_over() {
        // The low bits say what is done, and the highest one by which queue.
        let act = input.u8();
        match act % 8 {
            0 => guest.misbehave(&mut input),
            1 => guest.start(),
            _ => ask(&mut guest, usize::from(act >> 7), &mut input),
        }
    }
    guest.behave();
    check(&mut guest, &file, read_only)
}

/// Sends a request that is legal or nearly so.
fn ask(guest: &mut Guest, queue: usize, input: &mut Input) {
    let kind = if input.u8() < 240 { input.choose(&KINDS) } else { input.u32() };
    let sector = sector(input);
    write_header(guest, kind, sector);
    let segment = [&sector.to_le_bytes()[..], &u32::from(input.u8()).to_le_bytes(), &flags(input)].concat();
    guest.write(SEGMENT, &segment);
    let mut buffers = vec![Buffer { address: HEADER, len: 16, write: false }];
    match kind {
        11 | 13 => buffers.push(Buffer { address: SEGMENT, len: 16, write: false }),
        _ => buffers.extend((0..input.below(4)).map(|_| data(input, kind != 1))),
    }
    buffers.push(Buffer { address: STATUS, len: 1, write: true });
    if input.u8() > 240 {
        buffers.remove(input.below(buffers.len()));
    }
    guest.offer(queue, &buffers);
    guest.kick(queue);
}

fn sector(input: &mut Input) -> u64 {
    if input.u8() < 220 { u64::from(input.u8()) % (SECTORS + 2) } else { input.u64() }
}

fn flags(input: &mut Input) -> [u8; 4] {
    if input.u8() < 220 { u32::from(input.u8() % 2) } else { input.u32() }.to_le_bytes()
}

fn data(input: &mut Input, write: bool) -> Buffer {
    let usual = input.u8();
    let len = if usual < 220 { u32::from(usual % 16) * SECTOR as u32 } else { input.u32() };
    Buffer { address: DATA + u64::from(input.u8()) * 16, len, write }
}

fn write_header(guest: &Guest, kind: u32, sector: u64) {
    guest.write(HEADER, &[&kind.to_le_bytes(), &[0; 4], &sector.to_le_bytes()[..]].concat());
}

fn check(guest: &mut Guest, file: &File, read_only: bool) -> Result<()> {
    ensure!(file.metadata()?.len() == SECTORS * SECTOR + BEYOND.len() as u64, "the file has another size");
    let mut beyond = [0; BEYOND.len()];
    file.read_exact_at(&mut beyond, SECTORS * SECTOR)?;
    ensure!(beyond == BEYOND, "what is not on the disk has changed");
    let mut disk = vec![0; (SECTORS * SECTOR) as usize];
    file.read_exact_at(&mut disk, 0)?;
    ensure!(!read_only || disk.iter().all(|byte| *byte == 0), "a disk that is read-only has changed");
    // The next driver reads what is there.
    guest.start();
    write_header(guest, 0, 5);
    let buffers = [
        Buffer { address: HEADER, len: 16, write: false },
        Buffer { address: DATA, len: SECTOR as u32, write: true },
        Buffer { address: STATUS, len: 1, write: true },
    ];
    guest.offer(QUEUE, &buffers);
    guest.kick(QUEUE);
    ensure!(
        guest.used(QUEUE) == 1 && guest.read(STATUS, 1) == [0],
        "the disk does not serve its next driver"
    );
    let sector = 5 * SECTOR as usize..6 * SECTOR as usize;
    ensure!(guest.read(DATA, SECTOR as usize) == disk[sector], "the disk has other contents than its file");
    Ok(())
}
