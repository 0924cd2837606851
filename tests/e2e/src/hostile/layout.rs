//! Where the VMM has its virtio devices, and their registers, with each transport.

use super::Act;

/// What all devices of a transport have in common.
pub(super) struct Layout {
    /// The address of the first device.
    pub(super) devices: u32,
    /// How far it is to the next one.
    pub(super) device_size: u32,
    /// How many there can be, and one more.
    pub(super) slots: u64,
    pub(super) status: Register,
    /// Which word of the features the next register is.
    pub(super) features_select: Register,
    pub(super) features: Register,
    pub(super) queue_select: Register,
    pub(super) queue_size: Register,
    /// The addresses of a queue's descriptors, available ring and used ring. Their high halves follow.
    pub(super) rings: [Register; 3],
    pub(super) queue_enable: Register,
    /// The notifications, and how far it is from a queue's to the next one's.
    pub(super) notify: Register,
    pub(super) notify_step: u32,
    /// Some more of which a driver writes.
    pub(super) others: &'static [Register],
}

/// A register of a device, and how it is written.
#[derive(Clone, Copy)]
pub(super) struct Register {
    pub(super) offset: u32,
    pub(super) write: Act,
}

const fn word(offset: u32) -> Register {
    Register { offset, write: Act::Write32 }
}

const fn half(offset: u32) -> Register {
    Register { offset, write: Act::Write16 }
}

/// Virtio 1.3, 4.2.2.
pub(super) const MMIO: Layout = Layout {
    devices: 0xd000_0000,
    device_size: 0x1000,
    slots: 19,
    status: word(0x70),
    features_select: word(0x24),
    features: word(0x20),
    queue_select: word(0x30),
    queue_size: word(0x38),
    rings: [word(0x80), word(0x90), word(0xa0)],
    queue_enable: word(0x44),
    notify: word(0x50),
    notify_step: 0,
    // The word of the device's features, and what acknowledges an interrupt.
    others: &[word(0x14), word(0x64)],
};

/// Virtio 1.3, 4.1.4, in the memory of a function.
pub(super) const PCI: Layout = Layout {
    devices: 0xd100_0000,
    device_size: 0x4000,
    slots: 32,
    status: Register { offset: 0x14, write: Act::Write8 },
    features_select: word(0x08),
    features: word(0x0c),
    queue_select: half(0x16),
    queue_size: half(0x18),
    rings: [word(0x20), word(0x28), word(0x30)],
    queue_enable: half(0x1c),
    notify: half(0x2000),
    notify_step: 4,
    // The word of the device's features, and the messages of the configuration and of a queue.
    others: &[word(0x00), half(0x10), QUEUE_VECTOR],
};

/// Of a PCI function: which message a queue has, the table of messages, and the bits of those that are pending.
pub(super) const QUEUE_VECTOR: Register = half(0x1a);
pub(super) const TABLE: u32 = 0x3000;
pub(super) const PENDING: u32 = 0x3800;

/// The ports of the PCI bus: the address of a register of a function, and the register.
pub(super) const BUS_ADDRESS: u32 = 0xcf8;
pub(super) const BUS_DATA: u32 = 0xcfc;
pub(super) const BUS_ENABLE: u32 = 1 << 31;

/// Registers in a function's configuration space. The function has memory and sends messages with 6 as its command.
pub(super) const COMMAND: u32 = 4;
pub(super) const ALL_ENABLED: u64 = 6;
/// The control word of the messages: they are enabled, and all of them are masked.
pub(super) const MESSAGES: u32 = 0x42;
pub(super) const MESSAGES_ENABLED: u64 = 1 << 15;
pub(super) const MESSAGES_MASKED: u64 = 1 << 14;

impl Layout {
    /// A device.
    pub(super) fn device(&self, slot: u64) -> u32 {
        self.devices + self.device_size * slot as u32
    }

    /// Whether a register is a part of the address of a ring.
    pub(super) fn is_ring(&self, offset: u32) -> bool {
        let [first, .., last] = self.rings;
        (first.offset - 4..last.offset + 8).contains(&offset)
    }

    /// What a driver writes to.
    pub(super) fn registers(&self) -> Vec<Register> {
        let high = |register: Register| Register { offset: register.offset + 4, ..register };
        let mut registers = vec![
            self.status,
            self.features_select,
            self.features,
            self.queue_select,
            self.queue_size,
            self.queue_enable,
            self.notify,
        ];
        registers.extend(self.rings.into_iter().flat_map(|low| [low, high(low)]));
        registers.extend(self.others);
        registers
    }
}
