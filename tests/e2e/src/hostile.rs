//! A guest without a kernel: a few instructions that play a list of writes and reads, made here, in the place of one.
//! It starts as the VMM starts a kernel (Linux, Documentation/arch/x86/boot.rst, "64-bit boot protocol"), takes no
//! interrupt, and so does to each device whatever the list says, in no order that a driver would keep to.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::fixtures::noise;
use crate::probe::{Bits, elf};

/// What it says on its console when all was played, and a device served it after that.
pub(crate) const DONE: &str = "\nall was played\n";

/// How often it does something at random.
const TIMES: usize = 16_000;
/// Bytes of noise that one time takes at most.
const DICE: usize = 8 * 8;

/// Where the VMM has its virtio devices, a page each, and how many there can be.
const DEVICES: u32 = 0xd000_0000;
const DEVICE_SIZE: u32 = 0x1000;
const SLOTS: u64 = 19;
/// Those that a pod has: entropy, vsock, files, network.
const PRESENT: u64 = 4;
/// The page directories of the VMM's first GiB, and a free page for another.
const PDPT: u32 = 0xa000;
const DIRECTORY: u32 = 0xc000;
/// Rings and buffers; below is the code, which the devices must not be told to write to.
const RINGS: u32 = 0x0100_0000;
/// For the queue that is used as it should be, where nothing was before.
const CLEAN: u32 = 0x0300_0000;
const QUEUE_SIZE: u64 = 16;
const SERIAL: u32 = 0x3f8;
const RESET_PORT: u64 = 0x64;
const RESET: u64 = 0xfe;

/// Registers (virtio 1.3, 4.2.2).
const STATUS: u32 = 0x70;
const NOTIFY: u32 = 0x50;

/// What the instructions can do. The numbers are those in the list; 0 ends it.
#[derive(Clone, Copy)]
enum Act {
    Write32 = 1,
    Write64 = 2,
    Write8 = 3,
    Read32 = 4,
    Out8 = 5,
    Out32 = 6,
    In8 = 7,
    /// Waits until the word there has this value.
    Await = 8,
}

/// Their instructions: the address is in rdi and dx, the value in rax.
const INSTRUCTIONS: [(Act, &[u8]); 8] = [
    (Act::Write32, &[0x89, 0x07]),
    (Act::Write64, &[0x48, 0x89, 0x07]),
    (Act::Write8, &[0x88, 0x07]),
    (Act::Read32, &[0x8b, 0x07]),
    (Act::Out8, &[0xee]),
    (Act::Out32, &[0xef]),
    (Act::In8, &[0xec]),
    // cmp [rdi], eax; jne back to it.
    (Act::Await, &[0x39, 0x07, 0x75, 0xfc]),
];

/// Writes the guest, as a kernel's ELF file.
pub(crate) fn write(file: &Path) -> Result<()> {
    let code = [player(), list()].concat();
    fs::write(file, elf(Bits::B64, &code)).with_context(|| format!("cannot write {}", file.display()))
}

/// The instructions that play the list, which follows them.
fn player() -> Vec<u8> {
    // lodsd; mov ecx, eax; lodsd; mov edi, eax; mov edx, eax; lodsq.
    let mut body = vec![0xad, 0x89, 0xc1, 0xad, 0x89, 0xc7, 0x89, 0xc2, 0x48, 0xad];
    for (act, instructions) in INSTRUCTIONS {
        // cmp ecx, ACT; jne over what follows; the instructions; jmp to the first of the body.
        body.extend([0x83, 0xf9, act as u8, 0x75, instructions.len() as u8 + 5]);
        body.extend(instructions);
        let back = -(body.len() as i32 + 5);
        body.push(0xe9);
        body.extend(back.to_le_bytes());
    }
    // hlt, with interrupts off; and again, should something wake it.
    body.extend([0xf4, 0xeb, 0xfd]);
    // cld; lea rsi, [rip + the list].
    let mut code = vec![0xfc, 0x48, 0x8d, 0x35];
    code.extend((body.len() as u32).to_le_bytes());
    code.extend(body);
    code
}

/// The whole list.
fn list() -> Vec<u8> {
    let mut list = List { bytes: Vec::new(), dice: noise(TIMES * DICE), rolled: 0 };
    // Page tables for the devices: a large page that is written through to them (present, writable, uncached, large).
    list.add(Act::Write64, PDPT + 3 * 8, u64::from(DIRECTORY) | 3);
    let entry = (DEVICES >> 21) & 511;
    list.add(Act::Write64, DIRECTORY + 8 * entry, u64::from(DEVICES) | 0x93);
    for _ in 0..TIMES {
        list.misbehave();
    }
    list.behave();
    // A sane serial line: 8 bits, no interrupts, no loopback.
    for (register, value) in [(3, 3), (1, 0), (4, 0)] {
        list.add(Act::Out8, SERIAL + register, value);
    }
    DONE.bytes().for_each(|byte| list.add(Act::Out8, SERIAL, byte.into()));
    list.bytes.extend([0; 16]);
    list.bytes
}

struct List {
    bytes: Vec<u8>,
    dice: Vec<u8>,
    rolled: usize,
}

impl List {
    fn add(&mut self, act: Act, address: u32, value: u64) {
        self.bytes.extend((act as u32).to_le_bytes());
        self.bytes.extend(address.to_le_bytes());
        self.bytes.extend(value.to_le_bytes());
    }

    /// A number below `end`.
    fn roll(&mut self, end: u64) -> u64 {
        let word = self.dice.get(self.rolled..self.rolled + 8).and_then(|bytes| bytes.try_into().ok());
        self.rolled += 8;
        u64::from_le_bytes(word.unwrap_or_default()) % end
    }

    /// One act that no driver would do, or a few that begin as one would.
    fn misbehave(&mut self) {
        let device = DEVICES + DEVICE_SIZE * self.roll(PRESENT) as u32;
        match self.roll(16) {
            0 => {
                self.start(device, RINGS, 3);
                // As many chains as a queue can have, of whatever is described there.
                (0..3).for_each(|queue| {
                    self.add(Act::Write32, RINGS + 0x1_0000 * queue + 0x8000, QUEUE_SIZE << 16)
                });
                (0..3).for_each(|queue| self.add(Act::Write32, device + NOTIFY, queue));
            }
            1..=3 => self.write_any_register(),
            4 => {
                let address = DEVICES + self.roll(SLOTS * u64::from(DEVICE_SIZE)) as u32;
                self.add(Act::Read32, address, 0);
            }
            5 => self.use_any_port(),
            6..=9 => self.describe_any_buffer(),
            10 | 11 => {
                // An entry of an available ring; its flags and its index are before.
                let ring = RINGS + 0x1_0000 * self.roll(3) as u32 + 0x8000;
                let (place, value) = (2 * self.roll(QUEUE_SIZE + 2) as u32, self.roll(QUEUE_SIZE + 2));
                self.add(Act::Write8, ring + place, value);
            }
            _ => {
                let queue = self.roll(4);
                self.add(Act::Write32, device + NOTIFY, queue);
            }
        }
    }

    fn write_any_register(&mut self) {
        const WIDTHS: [Act; 5] = [Act::Write32, Act::Write32, Act::Write32, Act::Write64, Act::Write8];
        let device = DEVICES + DEVICE_SIZE * self.roll(SLOTS) as u32;
        let offset = match self.roll(4) {
            0 => self.roll(u64::from(DEVICE_SIZE) - 8) as u32,
            _ => 4 * self.roll(0x50) as u32,
        };
        let value = match self.roll(2) {
            0 => self.roll(16),
            _ => self.roll(1 << 32),
        };
        // Rings of any place, but not of the code's.
        let value = if (0x7c..0xa8).contains(&offset) { value | u64::from(RINGS) } else { value };
        let width = WIDTHS[self.roll(WIDTHS.len() as u64) as usize];
        self.add(width, device + offset, value);
    }

    fn use_any_port(&mut self) {
        let port = match self.roll(2) {
            0 => self.roll(1 << 16) as u32,
            _ => SERIAL + self.roll(8) as u32,
        };
        let value = self.roll(1 << 32);
        // Not its own end.
        if u64::from(port) == RESET_PORT && value & 0xff == RESET {
            return;
        }
        let act = [Act::Out8, Act::Out32, Act::In8][self.roll(3) as usize];
        self.add(act, port, value);
    }

    /// In memory, in a device's registers, or nowhere; linked to itself, or to what is none.
    fn describe_any_buffer(&mut self) {
        let table = RINGS + 0x1_0000 * self.roll(3) as u32;
        let place = table + 16 * self.roll(QUEUE_SIZE) as u32;
        let address = match self.roll(8) {
            0 => self.roll(u64::MAX) | 1 << 40,
            1 => u64::from(DEVICES) + self.roll(0x1_0000),
            _ => u64::from(RINGS) + self.roll(0x300_0000),
        };
        let length = match self.roll(4) {
            0 => self.roll(1 << 32),
            _ => self.roll(0x2000),
        };
        // Next, write and indirect are the lowest three flags (virtio 1.3, 2.7.5).
        let (flags, next) = (self.roll(8), self.roll(QUEUE_SIZE + 2));
        self.add(Act::Write64, place, address);
        self.add(Act::Write64, place + 8, length | flags << 32 | next << 48);
    }

    /// Resets a device and begins as a driver does, with queues whose rings are at `base`.
    fn start(&mut self, device: u32, base: u32, queues: u32) {
        for status in [0, 1, 3] {
            self.add(Act::Write32, device + STATUS, status);
        }
        // VIRTIO_F_VERSION_1 alone: bit 0 of the second word.
        for (register, value) in [(0x24, 1), (0x20, 1), (STATUS, 11)] {
            self.add(Act::Write32, device + register, value);
        }
        for queue in 0..queues {
            let rings = u64::from(base + 0x1_0000 * queue);
            let registers = [
                (0x30, queue.into()),
                (0x38, QUEUE_SIZE),
                (0x80, rings),
                (0x90, rings + 0x8000),
                (0xa0, rings + 0xa000),
            ];
            for (register, value) in registers {
                self.add(Act::Write32, device + register, value);
            }
            self.add(Act::Write32, device + 0x44, 1);
        }
        self.add(Act::Write32, device + STATUS, 15);
    }

    /// Resets all devices, and has the first one, that for entropy, fill a buffer.
    fn behave(&mut self) {
        const LENGTH: u64 = 64;
        const DEVICE_WRITES: u64 = 2;
        for slot in 0..SLOTS as u32 {
            self.add(Act::Write32, DEVICES + DEVICE_SIZE * slot + STATUS, 0);
        }
        self.start(DEVICES, CLEAN, 1);
        self.add(Act::Write64, CLEAN, u64::from(CLEAN) + 0x1000);
        self.add(Act::Write64, CLEAN + 8, LENGTH | DEVICE_WRITES << 32);
        // The first entry is 0 already; the index of the next one is 1.
        self.add(Act::Write32, CLEAN + 0x8000, 1 << 16);
        self.add(Act::Write32, DEVICES + NOTIFY, 0);
        // The length in the first entry of the used ring.
        self.add(Act::Await, CLEAN + 0xa000 + 8, LENGTH);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_fits_below_its_rings_and_is_the_same_every_time() {
        let list = list();
        assert_eq!(list.len() % 16, 0);
        assert!(0x40_0000 + player().len() + list.len() < RINGS as usize);
        assert!(list.len() > 16 * TIMES / 2);
        assert_eq!(list, super::list());
    }
}
