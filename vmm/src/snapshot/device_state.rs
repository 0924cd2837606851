//! The state of a virtio device behind the MMIO transport.

use std::io;

use serde::{Deserialize, Serialize};

use crate::virtio::{
    InterruptState,
    mmio::{MmioTransport, registers::Registers},
};

/// The registers of a device. The rest of its state is in its queues in guest memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    device_type: u32,
    /// The features that the device offered.
    features: u64,
    interrupt: InterruptState,
    registers: Registers,
}

impl DeviceState {
    /// Stops the device and returns its state. Its connections and open files are lost.
    pub fn save(transport: &MmioTransport) -> io::Result<Self> {
        let registers = transport.stop()?;
        let (device_type, features) = transport.identity();
        Ok(Self { device_type, features, interrupt: transport.interrupt().save(), registers })
    }

    /// Restores the state to a new device of the same type, and activates the device if the saved one was active.
    /// Guest memory and KVM's interrupt controllers must have been restored before.
    pub fn restore(&self, transport: &MmioTransport) -> io::Result<()> {
        let sizes: Vec<u16> = self.registers.queue_sizes().collect();
        if transport.identity() != (self.device_type, self.features) || transport.queue_sizes() != sizes {
            return Err(io::Error::other("it is of another type, or has other features or queues"));
        }
        transport.resume(&self.registers)?;
        transport.interrupt().restore(self.interrupt)
    }
}
