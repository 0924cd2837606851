//! The MMIO transport (virtio 1.3, 4.2): the registers are in a page of memory, and the interrupt is a line.

use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::{
    INTERRUPT_USED, Interrupt, VirtioDevice,
    transport::{
        Core, IoEventFd, TransportError, event,
        registers::{self, reg},
    },
};
use crate::{GuestMemory, bus::BusDevice, layout::Resources};

/// A device and its registers.
pub struct MmioTransport {
    core: Core,
    resources: Resources,
    /// The event of the acknowledgement of an interrupt that was about used buffers only. With it, the vCPU need not
    /// leave KVM for that. Nobody waits for the event: the bit stays set in InterruptStatus, and the driver finds no
    /// used buffers if there are none.
    acknowledged: EventFd,
}

impl MmioTransport {
    /// Connects `device` to a guest with `memory`.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        resources: Resources,
    ) -> Result<Self, TransportError> {
        let (line, acknowledged) = (event()?, event()?);
        let core = Core::new(device, memory, Arc::new(Interrupt::new(line)))?;
        Ok(Self { core, resources, acknowledged })
    }

    /// The device.
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// The notifications of the queues, and the acknowledgement of an interrupt.
    pub fn ioeventfds(&self) -> Vec<IoEventFd<'_>> {
        let registered = |register, value, event| IoEventFd {
            address: self.resources.address + register,
            value: Some(value),
            event,
        };
        let queues = (0..).zip(self.core.kicks());
        let mut all: Vec<_> =
            queues.map(|(queue, kick)| registered(reg::QUEUE_NOTIFY, queue, kick)).collect();
        all.push(registered(reg::INTERRUPT_ACK, INTERRUPT_USED, &self.acknowledged));
        all
    }

    /// Its interrupt, with the number (GSI).
    pub fn irqfds(&self) -> Vec<(u32, &EventFd)> {
        self.core.interrupt().line().map(|line| (self.resources.gsi, line)).into_iter().collect()
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

    /// Writes to the device configuration space are ignored: no driver writes to a field that a device reads.
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
