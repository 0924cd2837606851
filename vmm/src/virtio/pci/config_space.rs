//! The configuration space of a function (PCI Local Bus Specification 3.0, 6.1), and its capabilities (virtio 1.3,
//! 4.1.4).
//!
//! The place of the function's memory is fixed: the base address registers are hardwired to zero, and the Enhanced
//! Allocation capability (PCI Express Base Specification 5.0, 7.8.5) says where the memory is. So nobody has to find
//! out its size, a driver cannot move it, and Linux does not give another place to a device that comes later.

use std::io;

use serde::{Deserialize, Serialize};

use super::layout;
use crate::layout::PCI_SIZE;

/// The bytes of the configuration space.
pub(super) const SIZE: usize = 256;

const VENDOR: u16 = 0x1af4;
/// The device ID of a function is this and the virtio device ID (virtio 1.3, 4.1.2).
const FIRST_DEVICE: u16 = 0x1040;
/// The subsystem of a device that is not transitional has an ID from this on (virtio 1.3, 4.1.2.1).
const FIRST_SUBSYSTEM: u16 = 0x40;

const COMMAND: usize = 0x04;
pub(super) const STATUS: usize = 0x06;
const CAPABILITIES: usize = 0x34;

/// Bits of the command register.
pub(super) const MEMORY_SPACE: u16 = 1 << 1;
pub(super) const BUS_MASTER: u16 = 1 << 2;
const INTX_DISABLE: u16 = 1 << 10;
/// Bits of the status register. The function has an interrupt that was not acknowledged; it has a list of
/// capabilities.
pub(super) const INTERRUPT_STATUS: u8 = 1 << 3;
const HAS_CAPABILITIES: u16 = 1 << 4;

/// Bits of the control word of MSI-X.
pub(super) const MSIX_ENABLE: u16 = 1 << 15;
pub(super) const MSIX_MASK: u16 = 1 << 14;

/// Where the capabilities are.
const MSIX: usize = 0x40;
const ALLOCATION: usize = 0x4c;
const COMMON: usize = 0x5c;
const NOTIFY: usize = 0x6c;
const ISR: usize = 0x80;
const DEVICE: usize = 0x90;
const ACCESS: usize = 0xa0;

/// The first word of an entry of Enhanced Allocation: it is enabled, its memory is not prefetchable and has no other
/// use, and two words follow.
const ALLOCATION_ENABLED: u32 = 1 << 31;
const ALLOCATION_NO_OTHER_USE: u32 = 0xff << 16;
const ALLOCATION_WORDS: u32 = 2;

/// IDs of capabilities.
const ID_MSIX: u8 = 0x11;
const ID_ALLOCATION: u8 = 0x14;
const ID_VENDOR: u8 = 0x09;

/// Types of the capabilities of virtio (virtio 1.3, 4.1.4).
const TYPE_COMMON: u8 = 1;
const TYPE_NOTIFY: u8 = 2;
const TYPE_ISR: u8 = 3;
const TYPE_DEVICE: u8 = 4;
const TYPE_ACCESS: u8 = 5;

/// The fields of the access capability (virtio 1.3, 4.1.4.9).
const ACCESS_BAR: usize = ACCESS + 4;
const ACCESS_OFFSET: usize = ACCESS + 8;
const ACCESS_LENGTH: usize = ACCESS + 12;
const ACCESS_DATA: usize = ACCESS + 16;

/// What a function is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Identity {
    /// The virtio device ID.
    pub(super) device: u32,
    /// The number of entries of the MSI-X table.
    pub(super) vectors: usize,
    /// The address of the function's memory.
    pub(super) address: u32,
}

/// The configuration space of a function.
pub(in crate::virtio) struct ConfigSpace {
    bytes: [u8; SIZE],
    /// Which bits the driver may change.
    writable: [u8; SIZE],
}

/// What the driver has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedConfig {
    command: u16,
    msix: u16,
    access_bar: u8,
    access_offset: u32,
    access_length: u32,
}

impl ConfigSpace {
    pub(super) fn new(identity: Identity) -> Self {
        let mut space = Self { bytes: [0; SIZE], writable: [0; SIZE] };
        let Identity { device, vectors, address } = identity;
        space.put16(0, VENDOR);
        space.put16(0x02, FIRST_DEVICE.wrapping_add(device as u16));
        space.put16(STATUS, HAS_CAPABILITIES);
        // The revision of a device that is not transitional, and a class without meaning, or that of the device.
        let class: u32 = match device {
            1 => 0x02_0000,
            2 => 0x01_8000,
            _ => 0xff_0000,
        };
        space.put32(0x08, class << 8 | 1);
        space.put16(0x2c, VENDOR);
        space.put16(0x2e, FIRST_SUBSYSTEM.wrapping_add(device as u16));
        space.put(CAPABILITIES, &[MSIX as u8]);
        space.allow(COMMAND, MEMORY_SPACE | BUS_MASTER | INTX_DISABLE);

        space.put(MSIX, &[ID_MSIX, ALLOCATION as u8]);
        space.put16(MSIX + 2, (vectors as u16).wrapping_sub(1));
        space.allow(MSIX + 2, MSIX_ENABLE | MSIX_MASK);
        space.put32(MSIX + 4, layout::TABLE as u32);
        space.put32(MSIX + 8, layout::PENDING as u32);

        // One entry, in the place of the first BAR.
        space.put(ALLOCATION, &[ID_ALLOCATION, COMMON as u8, 1]);
        space.put32(ALLOCATION + 4, ALLOCATION_ENABLED | ALLOCATION_NO_OTHER_USE | ALLOCATION_WORDS);
        space.put32(ALLOCATION + 8, address);
        space.put32(ALLOCATION + 12, PCI_SIZE as u32 - 4);

        space.put_virtio(COMMON, NOTIFY, TYPE_COMMON, (layout::COMMON, layout::COMMON_LEN));
        let queues = vectors.saturating_sub(1) as u64;
        space.put_virtio(NOTIFY, ISR, TYPE_NOTIFY, (layout::NOTIFY, queues * layout::NOTIFY_STEP));
        space.put(NOTIFY + 2, &[20]);
        space.put32(NOTIFY + 16, layout::NOTIFY_STEP as u32);
        space.put_virtio(ISR, DEVICE, TYPE_ISR, (layout::ISR, 1));
        space.put_virtio(DEVICE, ACCESS, TYPE_DEVICE, (layout::DEVICE, layout::DEVICE_LEN));
        space.put_virtio(ACCESS, 0, TYPE_ACCESS, (0, 0));
        space.put(ACCESS + 2, &[20]);
        space.writable[ACCESS_BAR] = 0xff;
        space.writable[ACCESS_OFFSET..ACCESS_DATA].fill(0xff);
        space
    }

    /// A bridge to the host, without which Linux rejects mechanism 1.
    pub(in crate::virtio) fn host_bridge() -> Self {
        let mut space = Self { bytes: [0; SIZE], writable: [0; SIZE] };
        // A generic host bridge of Red Hat's, for which no driver has a workaround.
        space.put16(0, 0x1b36);
        space.put16(2, 0x0008);
        space.put32(0x08, 0x06_0000 << 8);
        space
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.put(at, &value.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_le_bytes());
    }

    /// A capability of virtio (virtio 1.3, 4.1.4), which is about `(offset, length)` of the function's memory.
    fn put_virtio(&mut self, at: usize, next: usize, kind: u8, (offset, length): (u64, u64)) {
        self.put(at, &[ID_VENDOR, next as u8, 16, kind]);
        self.put32(at + 8, offset as u32);
        self.put32(at + 12, length as u32);
    }

    fn allow(&mut self, at: usize, bits: u16) {
        self.writable[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }

    fn word(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    fn dword(&self, at: usize) -> u32 {
        u32::from(self.word(at)) | u32::from(self.word(at + 2)) << 16
    }

    /// Reads bytes. There is nothing beyond the end.
    pub(in crate::virtio) fn read(&self, at: usize, data: &mut [u8]) {
        for (byte, value) in data.iter_mut().zip(self.bytes.iter().skip(at)) {
            *byte = *value;
        }
    }

    /// Writes bytes. Bits that are fixed stay as they are.
    pub(super) fn write(&mut self, at: usize, data: &[u8]) {
        let bytes = self.bytes.iter_mut().zip(&self.writable).skip(at);
        for ((byte, writable), value) in bytes.zip(data) {
            *byte = *byte & !writable | value & writable;
        }
    }

    pub(super) fn command(&self) -> u16 {
        self.word(COMMAND)
    }

    /// The control word of MSI-X.
    pub(super) fn msix(&self) -> u16 {
        self.word(MSIX + 2)
    }

    /// If an access to the bytes from `at` on is one to the memory of the function (virtio 1.3, 4.1.4.9): the offset
    /// there, and the bytes of the access. Also None if they are not legal.
    pub(super) fn window(&self, at: usize, len: usize) -> Option<(u64, usize)> {
        let (offset, length) = (self.dword(ACCESS_OFFSET), self.dword(ACCESS_LENGTH));
        let is_legal = at == ACCESS_DATA
            && self.bytes[ACCESS_BAR] == 0
            && matches!(length, 1 | 2 | 4)
            && length as usize <= len
            && offset.is_multiple_of(length)
            && u64::from(offset) < PCI_SIZE;
        is_legal.then_some((offset.into(), length as usize))
    }

    pub(super) fn save(&self) -> SavedConfig {
        SavedConfig {
            command: self.command(),
            msix: self.msix(),
            access_bar: self.bytes[ACCESS_BAR],
            access_offset: self.dword(ACCESS_OFFSET),
            access_length: self.dword(ACCESS_LENGTH),
        }
    }

    /// Writes what the driver had written. Returns an error if a driver cannot have written that.
    pub(super) fn restore(&mut self, saved: SavedConfig) -> io::Result<()> {
        self.write(COMMAND, &saved.command.to_le_bytes());
        self.write(MSIX + 2, &saved.msix.to_le_bytes());
        self.write(ACCESS_BAR, &[saved.access_bar]);
        self.write(ACCESS_OFFSET, &saved.access_offset.to_le_bytes());
        self.write(ACCESS_LENGTH, &saved.access_length.to_le_bytes());
        if self.save() == saved {
            Ok(())
        } else {
            Err(io::Error::other("it has another configuration space"))
        }
    }
}
