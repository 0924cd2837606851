//! The state of a virtio device behind its transport.

use std::io;

use serde::{Deserialize, Serialize};

use crate::virtio::{InterruptState, pci::PciState, slot::Transport, transport::registers::Registers};

/// The state of a device. The rest is in its queues in guest memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    device_type: u32,
    /// The features that the device offered.
    features: u64,
    interrupt: InterruptState,
    registers: Registers,
    /// What the driver has set otherwise, see [`crate::virtio::VirtioDevice::driver_state`].
    driver_state: u16,
    /// What a PCI function has besides.
    pci: Option<PciState>,
}

impl DeviceState {
    /// Stops the device and returns its state. Its connections and open files are lost.
    pub fn save(transport: &dyn Transport) -> io::Result<Self> {
        let core = transport.core();
        let (registers, driver_state) = core.stop()?;
        let (device_type, features) = core.identity();
        let pci = transport.pci().map(|function| function.save());
        Ok(Self { device_type, features, interrupt: core.interrupt().save(), registers, driver_state, pci })
    }

    /// Restores what is to be known of a new device of the same type before one of them is activated: the interrupt
    /// messages.
    pub fn prepare(&self, transport: &dyn Transport) -> io::Result<()> {
        let core = transport.core();
        let sizes: Vec<u16> = self.registers.queue_sizes().collect();
        if core.identity() != (self.device_type, self.features) || core.queue_sizes() != sizes {
            return Err(io::Error::other("it is of another type, or has other features or queues"));
        }
        match (transport.pci(), &self.pci) {
            (Some(function), Some(saved)) => function.restore(saved),
            (None, None) => Ok(()),
            (Some(_), None) | (None, Some(_)) => Err(io::Error::other("it has another transport")),
        }
    }

    /// Restores the rest of the state, and activates the device if the saved one was active. Guest memory and KVM's
    /// interrupt controllers must have been restored before.
    pub fn restore(&self, transport: &dyn Transport) -> io::Result<()> {
        let core = transport.core();
        core.resume(&self.registers, self.driver_state)?;
        core.interrupt().restore(self.interrupt)
    }
}
