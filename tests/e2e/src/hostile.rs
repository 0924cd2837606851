//! A guest without a kernel: a few instructions that play a list of writes and reads, made here, in the place of one.
//! It starts as the VMM starts a kernel (Linux, Documentation/arch/x86/boot.rst, "64-bit boot protocol"), takes no
//! interrupt, and so does to each device whatever the list says, in no order that a driver would keep to.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use bulkhead_vmm_api::Transport;

use self::layout::Layout;
use crate::fixtures::noise;
use crate::probe::{Bits, elf};

mod layout;

/// What it says on its console when all was played, and a device served it after that.
pub(crate) const DONE: &str = "\nall was played\n";

/// How often it does something at random.
const TIMES: usize = 16_000;
/// With the transport that few guests have.
const FEW_TIMES: usize = 4_000;
/// Bytes of noise that one time takes at most.
const DICE: usize = 10 * 8;

/// The first devices, which a pod has: entropy, vsock, files.
const PRESENT: u64 = 4;
/// The page directories of the VMM's first GiB, and a free page for another.
const PDPT: u32 = 0xa000;
const DIRECTORY: u32 = 0xc000;
/// Rings and buffers; below is the code, which the devices must not be told to write to.
const RINGS: u32 = 0x0100_0000;
/// For the queue that is used as it should be, where no buffer was before.
const CLEAN: u32 = 0x0300_0000;
const QUEUE_SIZE: u64 = 16;
const SERIAL: u32 = 0x3f8;
const RESET_PORT: u64 = 0x64;
const RESET: u64 = 0xfe;

/// What the instructions can do. The numbers are those in the list; 0 ends it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Act {
    Write32 = 1,
    Write64 = 2,
    Write16 = 3,
    Write8 = 4,
    Read32 = 5,
    Out8 = 6,
    Out16 = 7,
    Out32 = 8,
    In8 = 9,
    In32 = 10,
    /// Waits until the word there has this value.
    Await = 11,
}

/// Their instructions: the address is in rdi and dx, the value in rax.
const INSTRUCTIONS: [(Act, &[u8]); 11] = [
    (Act::Write32, &[0x89, 0x07]),
    (Act::Write64, &[0x48, 0x89, 0x07]),
    (Act::Write16, &[0x66, 0x89, 0x07]),
    (Act::Write8, &[0x88, 0x07]),
    (Act::Read32, &[0x8b, 0x07]),
    (Act::Out8, &[0xee]),
    (Act::Out16, &[0x66, 0xef]),
    (Act::Out32, &[0xef]),
    (Act::In8, &[0xec]),
    (Act::In32, &[0xed]),
    // cmp [rdi], eax; jne back to it.
    (Act::Await, &[0x39, 0x07, 0x75, 0xfc]),
];

/// Writes the guest, as a kernel's ELF file, for devices with this transport.
pub(crate) fn write(file: &Path, transport: Transport) -> Result<()> {
    let code = [player(), list(transport)].concat();
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
fn list(transport: Transport) -> Vec<u8> {
    let (layout, times) = match transport {
        Transport::Mmio => (&layout::MMIO, FEW_TIMES),
        Transport::Pci => (&layout::PCI, TIMES),
    };
    let mut list = List { layout, transport, bytes: Vec::new(), dice: noise(times * DICE), rolled: 0 };
    // Page tables for the devices: a large page that is written through to them (present, writable, uncached, large).
    list.add(Act::Write64, PDPT + 3 * 8, u64::from(DIRECTORY) | 3);
    let entry = (layout.devices >> 21) & 511;
    list.add(Act::Write64, DIRECTORY + 8 * entry, u64::from(layout.devices) | 0x93);
    (0..layout.slots).for_each(|slot| list.enable(slot));
    for _ in 0..times {
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
    layout: &'static Layout,
    transport: Transport,
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
        let slot = self.roll(PRESENT);
        let kinds = if self.transport == Transport::Pci { 20 } else { 16 };
        match self.roll(kinds) {
            0 => {
                self.start(slot, RINGS, 3);
                // As many chains as a queue can have, of whatever is described there.
                (0..3).for_each(|queue| {
                    self.add(Act::Write32, RINGS + 0x1_0000 * queue + 0x8000, QUEUE_SIZE << 16)
                });
                (0..3).for_each(|queue| self.notify(slot, queue));
            }
            1..=3 => self.write_any_register(),
            4 => {
                let size = self.layout.slots * u64::from(self.layout.device_size);
                let address = self.layout.devices + self.roll(size) as u32;
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
            12..=15 => {
                let queue = self.roll(4);
                self.notify(slot, queue);
            }
            16 | 17 => self.write_any_message(),
            18 => self.access_any_configuration(),
            _ => self.control_messages(),
        }
    }

    fn write(&mut self, slot: u64, register: layout::Register, value: u64) {
        self.add(register.write, self.layout.device(slot) + register.offset, value);
    }

    fn notify(&mut self, slot: u64, queue: u64) {
        let layout::Register { offset, write } = self.layout.notify;
        let offset = offset + self.layout.notify_step * queue as u32;
        self.write(slot, layout::Register { offset, write }, queue);
    }

    fn any_width(&mut self) -> Act {
        const WIDTHS: [Act; 6] =
            [Act::Write32, Act::Write32, Act::Write32, Act::Write64, Act::Write16, Act::Write8];
        WIDTHS[self.roll(WIDTHS.len() as u64) as usize]
    }

    fn write_any_register(&mut self) {
        let slot = self.roll(self.layout.slots);
        let registers = self.layout.registers();
        let register = match self.roll(4) {
            0 => {
                let offset = self.roll(u64::from(self.layout.device_size) - 8) as u32;
                layout::Register { offset, write: self.any_width() }
            }
            1 => layout::Register { offset: 4 * self.roll(0x50) as u32, write: self.any_width() },
            _ => registers[self.roll(registers.len() as u64) as usize],
        };
        let value = match self.roll(2) {
            0 => self.roll(16),
            _ => self.roll(1 << 32),
        };
        // Rings of any place, but not of the code's.
        let value = if self.layout.is_ring(register.offset) { value | u64::from(RINGS) } else { value };
        self.write(slot, register, value);
    }

    /// Any words of an entry of the table of messages, or a message that a driver could have written.
    fn write_any_message(&mut self) {
        // One more than an entry's number can be.
        let entry = layout::TABLE + 16 * self.roll(17) as u32;
        let slot = self.roll(PRESENT + 2);
        if self.roll(4) == 0 {
            let (offset, write) = (entry + self.roll(16) as u32, self.any_width());
            let value = self.roll(1 << 32);
            return self.write(slot, layout::Register { offset, write }, value);
        }
        // A processor that may not exist, a vector and whether the message is masked (Intel SDM 3, 11.11).
        let address = 0xfee0_0000 | self.roll(4) << 12;
        let (data, control) = (self.roll(1 << 9), self.roll(2));
        for (index, value) in [(3, 1), (0, address), (1, 0), (2, data), (3, control)] {
            let register = layout::Register { offset: entry + 4 * index, write: Act::Write32 };
            self.write(slot, register, value);
        }
    }

    /// Any register of any function, also of those that do not exist.
    fn access_any_configuration(&mut self) {
        let function = match self.roll(4) {
            0 => self.roll(1 << 32) as u32,
            _ => layout::BUS_ENABLE | (self.roll(40) as u32) << 11,
        };
        let address = u64::from(function & !0xff) | self.roll(256);
        self.add(Act::Out32, layout::BUS_ADDRESS, address);
        let act = [Act::Out8, Act::Out16, Act::Out32, Act::In8, Act::In32][self.roll(5) as usize];
        let (port, value) = (layout::BUS_DATA + self.roll(4) as u32, self.roll(1 << 32));
        self.add(act, port, value);
    }

    /// What a driver does to all messages of a function.
    fn control_messages(&mut self) {
        let slot = self.roll(PRESENT + 2);
        let value = [0, layout::MESSAGES_MASKED, layout::MESSAGES_ENABLED, u64::MAX][self.roll(4) as usize];
        self.configure(slot, layout::MESSAGES, value);
    }

    /// Writes 16 bits of the configuration space of a device. The first one is in the second slot of the bus.
    fn configure(&mut self, slot: u64, register: u32, value: u64) {
        let address = layout::BUS_ENABLE | (slot as u32 + 1) << 11 | register & !3;
        self.add(Act::Out32, layout::BUS_ADDRESS, address.into());
        self.add(Act::Out16, layout::BUS_DATA + register % 4, value);
    }

    /// Makes the registers of a device accessible.
    fn enable(&mut self, slot: u64) {
        if self.transport == Transport::Pci {
            self.configure(slot, layout::COMMAND, layout::ALL_ENABLED);
        }
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
        let act = [Act::Out8, Act::Out16, Act::Out32, Act::In8, Act::In32][self.roll(5) as usize];
        self.add(act, port, value);
    }

    /// In memory, in a device's registers, or nowhere; linked to itself, or to what is none.
    fn describe_any_buffer(&mut self) {
        let table = RINGS + 0x1_0000 * self.roll(3) as u32;
        let place = table + 16 * self.roll(QUEUE_SIZE) as u32;
        let address = match self.roll(8) {
            0 => self.roll(u64::MAX) | 1 << 40,
            1 => u64::from(self.layout.devices) + self.roll(0x1_0000),
            _ => u64::from(RINGS) + self.roll(u64::from(CLEAN - RINGS)),
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
    fn start(&mut self, slot: u64, base: u32, queues: u32) {
        let layout = self.layout;
        self.enable(slot);
        for status in [0, 1, 3] {
            self.write(slot, layout.status, status);
        }
        // VIRTIO_F_VERSION_1 alone: bit 0 of the second word.
        for (register, value) in [(layout.features_select, 1), (layout.features, 1), (layout.status, 11)] {
            self.write(slot, register, value);
        }
        for queue in 0..queues {
            self.write(slot, layout.queue_select, queue.into());
            self.write(slot, layout.queue_size, QUEUE_SIZE);
            let rings = u64::from(base + 0x1_0000 * queue);
            for (register, offset) in layout.rings.into_iter().zip([0, 0x8000, 0xa000]) {
                self.write(slot, register, rings + offset);
            }
            if self.transport == Transport::Pci {
                self.write(slot, layout::QUEUE_VECTOR, queue.into());
            }
            self.write(slot, layout.queue_enable, 1);
        }
        self.write(slot, layout.status, 15);
    }

    /// Resets all devices, and has the first one, that for entropy, fill a buffer.
    fn behave(&mut self) {
        const LENGTH: u64 = 64;
        const DEVICE_WRITES: u64 = 2;
        for slot in 0..self.layout.slots {
            self.enable(slot);
            self.write(slot, self.layout.status, 0);
        }
        self.start(0, CLEAN, 1);
        if self.transport == Transport::Pci {
            self.configure(0, layout::MESSAGES, layout::MESSAGES_ENABLED | layout::MESSAGES_MASKED);
        }
        self.add(Act::Write64, CLEAN, u64::from(CLEAN) + 0x1000);
        self.add(Act::Write64, CLEAN + 8, LENGTH | DEVICE_WRITES << 32);
        // The index of the next entry is 1, and the first entry is 0.
        self.add(Act::Write32, CLEAN + 0x8004, 0);
        self.add(Act::Write32, CLEAN + 0x8000, 1 << 16);
        self.notify(0, 0);
        // The length in the first entry of the used ring.
        self.add(Act::Await, CLEAN + 0xa000 + 8, LENGTH);
        if self.transport == Transport::Pci {
            self.send_pending();
        }
    }

    /// Waits for the first message of the first device, which is masked, and then until it is sent.
    fn send_pending(&mut self) {
        let device = self.layout.device(0);
        self.add(Act::Await, device + layout::PENDING, 1);
        for (word, value) in [(3, 1), (0, 0xfee0_0000), (1, 0), (2, 0x31), (3, 0)] {
            self.add(Act::Write32, device + layout::TABLE + 4 * word, value);
        }
        self.configure(0, layout::MESSAGES, layout::MESSAGES_ENABLED);
        self.add(Act::Await, device + layout::PENDING, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_fits_below_its_rings_and_is_the_same_every_time() {
        for (transport, times) in [(Transport::Mmio, FEW_TIMES), (Transport::Pci, TIMES)] {
            let made = list(transport);
            assert_eq!(made.len() % 16, 0);
            assert!(0x40_0000 + player().len() + made.len() < RINGS as usize);
            assert!(made.len() > 16 * times / 2);
            assert!(made == list(transport));
        }
    }
}
