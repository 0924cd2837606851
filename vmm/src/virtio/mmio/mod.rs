//! The MMIO transport (virtio 1.3, 4.2): the registers are in a page of memory, and the interrupt is a line.

use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::{
    Interrupt, VirtioDevice,
    transport::{
        Core, TransportError, event,
        registers::{self, reg},
    },
};
use crate::{GuestMemory, bus::BusDevice};

/// The offset of the register that the ioeventfds of a device's queues listen to.
pub const NOTIFY_OFFSET: u64 = reg::QUEUE_NOTIFY;
/// The offset of the register by which the driver acknowledges interrupts. See [`MmioTransport::acknowledged`].
pub const ACKNOWLEDGE_OFFSET: u64 = reg::INTERRUPT_ACK;

/// A device and its registers. Each of its [`Core::kicks`] is registered as an ioeventfd at [`NOTIFY_OFFSET`] for the
/// value that is its index.
pub struct MmioTransport {
    core: Core,
    acknowledged: EventFd,
}

impl MmioTransport {
    /// Connects `device` to a guest with `memory`. `line` is registered with KVM as an irqfd.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        line: EventFd,
    ) -> Result<Self, TransportError> {
        let acknowledged = event()?;
        let core = Core::new(device, memory, Arc::new(Interrupt::new(line)))?;
        Ok(Self { core, acknowledged })
    }

    /// The device.
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// The event of the acknowledgement of an interrupt that was about used buffers only. It is registered as an
    /// ioeventfd at [`ACKNOWLEDGE_OFFSET`] for the value [`INTERRUPT_USED`], so that the vCPU need not leave KVM for
    /// it. Nobody waits for the event: the bit stays set in InterruptStatus, and the driver finds no used buffers if
    /// there are none.
    ///
    /// [`INTERRUPT_USED`]: super::INTERRUPT_USED
    pub fn acknowledged(&self) -> &EventFd {
        &self.acknowledged
    }
}

impl BusDevice for MmioTransport {
    /// Registers are read as 32-bit words (virtio 1.3, 4.2.2.2), the device configuration space in any width.
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset >= reg::CONFIG {
            self.core.read_config(offset - reg::CONFIG, data);
        } else if let Ok(word) = <&mut [u8; 4]>::try_from(data) {
            *word = self.core.read_register(offset).to_le_bytes();
        }
    }

    /// Writes to the device configuration space are ignored: no device has a writable field.
    fn write(&self, offset: u64, data: &[u8]) {
        if let (true, Ok(word)) = (offset < reg::CONFIG, <[u8; 4]>::try_from(data)) {
            self.core.write_register(offset, u32::from_le_bytes(word));
        }
    }
}

/// Reads a register of a place without a device: its device ID is 0, so that drivers ignore it (virtio 1.3, 4.2.2).
pub fn read_placeholder(offset: u64, data: &mut [u8]) {
    data.fill(0);
    if let (Some(value), Ok(word)) = (registers::read_of_any(offset), <&mut [u8; 4]>::try_from(data)) {
        *word = value.to_le_bytes();
    }
}

#[cfg(test)]
mod tests;
