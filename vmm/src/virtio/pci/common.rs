//! The common configuration of a function (virtio 1.3, 4.1.4.3): the registers of the device, at the places of this
//! transport.

use crate::virtio::{
    msix::{Messages, Source},
    transport::{Core, registers::reg},
};

/// A field. An access has its offset and its width, and 64-bit fields are two of 32 bits (virtio 1.3, 4.1.3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    /// The driver's own value of a register.
    Written(u64),
    /// A register that the driver only reads.
    Fixed(u64),
    Status,
    Enable,
    ConfigVector,
    QueueCount,
    QueueVector,
    NotifyOffset,
}

/// The field at an offset, with its width in bytes. None: the driver must not access it so.
fn field(offset: u64, len: usize) -> Option<Field> {
    Some(match (offset, len) {
        (0x00, 4) => Field::Written(reg::DEVICE_FEATURES_SEL),
        (0x04, 4) => Field::Fixed(reg::DEVICE_FEATURES),
        (0x08, 4) => Field::Written(reg::DRIVER_FEATURES_SEL),
        (0x0c, 4) => Field::Written(reg::DRIVER_FEATURES),
        (0x10, 2) => Field::ConfigVector,
        (0x12, 2) => Field::QueueCount,
        (0x14, 1) => Field::Status,
        (0x15, 1) => Field::Fixed(reg::CONFIG_GENERATION),
        (0x16, 2) => Field::Written(reg::QUEUE_SEL),
        (0x18, 2) => Field::Written(reg::QUEUE_SIZE),
        (0x1a, 2) => Field::QueueVector,
        (0x1c, 2) => Field::Enable,
        (0x1e, 2) => Field::NotifyOffset,
        (0x20, 4) => Field::Written(reg::QUEUE_DESC_LOW),
        (0x24, 4) => Field::Written(reg::QUEUE_DESC_HIGH),
        (0x28, 4) => Field::Written(reg::QUEUE_DRIVER_LOW),
        (0x2c, 4) => Field::Written(reg::QUEUE_DRIVER_HIGH),
        (0x30, 4) => Field::Written(reg::QUEUE_DEVICE_LOW),
        (0x34, 4) => Field::Written(reg::QUEUE_DEVICE_HIGH),
        _ => return None,
    })
}

/// Reads a field. An access that is not one to a field reads zeros.
pub(super) fn read(core: &Core, messages: &Messages, offset: u64, data: &mut [u8]) {
    data.fill(0);
    let Some(field) = field(offset, data.len()) else { return };
    let value = match field {
        Field::Written(register) => core.registers(|registers| registers.written(register)),
        Field::Fixed(register) => core.read_register(register),
        Field::Status => core.read_register(reg::STATUS),
        Field::Enable => core.read_register(reg::QUEUE_READY),
        Field::ConfigVector => messages.vector(Source::Config).into(),
        Field::QueueCount => core.kicks().len() as u32,
        Field::QueueVector => messages.vector(selected(core)).into(),
        // A queue has its own index as the place of its notification.
        Field::NotifyOffset => core.registers(|registers| registers.written(reg::QUEUE_SEL)),
    };
    data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
}

/// Writes a field. A write that is not one to a field is ignored.
pub(super) fn write(core: &Core, messages: &Messages, offset: u64, data: &[u8]) {
    let Some(field) = field(offset, data.len()) else { return };
    let value = data.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte));
    match field {
        Field::Written(register) => core.write_register(register, value),
        Field::Status => core.write_register(reg::STATUS, value),
        // A driver disables a queue by a reset of the device only (virtio 1.3, 4.1.4.3.2).
        Field::Enable if value == 0 => core.refuse(),
        Field::Enable => core.write_register(reg::QUEUE_READY, value),
        Field::ConfigVector => messages.set_vector(Source::Config, value as u16),
        Field::QueueVector => messages.set_vector(selected(core), value as u16),
        Field::Fixed(_) | Field::QueueCount | Field::NotifyOffset => {}
    }
}

fn selected(core: &Core) -> Source {
    Source::Queue(core.registers(|registers| registers.written(reg::QUEUE_SEL)) as usize)
}
