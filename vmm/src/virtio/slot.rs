//! A device behind one of the transports, and its place on the guest's bus.

use std::sync::{Arc, PoisonError, RwLock};

use super::{
    mmio::{self, MmioTransport},
    pci::PciTransport,
    transport::Core,
};
use crate::bus::BusDevice;

/// A device behind one of the transports.
pub enum Transport {
    /// Its registers are at a fixed address, and it has one interrupt line.
    Mmio(MmioTransport),
    /// It is a function of the PCI bus, and has an interrupt message for each queue.
    Pci(PciTransport),
}

impl Transport {
    /// The device.
    pub fn core(&self) -> &Core {
        match self {
            Self::Mmio(transport) => transport.core(),
            Self::Pci(transport) => transport.core(),
        }
    }

    /// The PCI function, if it is one.
    pub fn pci(&self) -> Option<&PciTransport> {
        match self {
            Self::Mmio(_) => None,
            Self::Pci(transport) => Some(transport),
        }
    }
}

/// The registers in memory.
impl BusDevice for Transport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self {
            Self::Mmio(transport) => transport.read(offset, data),
            Self::Pci(transport) => transport.read(offset, data),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        match self {
            Self::Mmio(transport) => transport.write(offset, data),
            Self::Pci(transport) => transport.write(offset, data),
        }
    }
}

/// A place on the bus for a device, which may come and go while the VM runs.
pub struct Slot {
    device: RwLock<Option<Arc<Transport>>>,
    nothing: Nothing,
}

/// What is read where there is no device.
#[derive(Debug, Clone, Copy)]
enum Nothing {
    /// The device ID is 0, and there are no other registers but those that all devices have. The driver ignores such a
    /// device (virtio 1.3, 4.2.2).
    Placeholder,
    /// All ones.
    Empty,
}

impl Slot {
    /// A slot for a device with the MMIO transport.
    pub fn mmio() -> Self {
        Self { device: RwLock::default(), nothing: Nothing::Placeholder }
    }

    /// A slot of the PCI bus.
    pub fn pci() -> Self {
        Self { device: RwLock::default(), nothing: Nothing::Empty }
    }

    /// The device that is there. Nobody waits for it with the lock held.
    pub fn device(&self) -> Option<Arc<Transport>> {
        self.device.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts a device in, or takes it out.
    pub fn set(&self, device: Option<Arc<Transport>>) {
        *self.device.write().unwrap_or_else(PoisonError::into_inner) = device;
    }
}

impl BusDevice for Slot {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match (self.device(), self.nothing) {
            (Some(device), _) => device.read(offset, data),
            (None, Nothing::Placeholder) => mmio::read_placeholder(offset, data),
            (None, Nothing::Empty) => {}
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(device) = self.device() {
            device.write(offset, data);
        }
    }
}
