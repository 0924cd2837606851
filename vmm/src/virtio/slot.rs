//! A device behind one of the transports, and its slot on the guest's bus.

use std::sync::{Arc, PoisonError, RwLock};

use bulkhead_vmm_api::Transport as Kind;
use vmm_sys_util::eventfd::EventFd;

use super::{
    mmio::{self, MmioTransport},
    pci::PciTransport,
    transport::{Core, IoEventFd},
};
use crate::{bus::BusDevice, layout::Resources};

/// A device behind one of the transports: its registers in memory, and the rest.
pub trait Transport: BusDevice {
    /// The device.
    fn core(&self) -> &Core;

    /// What KVM signals when the driver writes to a register.
    fn ioeventfds(&self) -> Vec<IoEventFd<'_>>;

    /// The events by which the device interrupts the guest, with their numbers (GSI).
    fn irqfds(&self) -> Vec<(u32, &EventFd)>;

    /// Whether no driver uses the device, nor is about to let it go. Waits for nobody.
    fn is_let_go(&self) -> bool {
        self.core().has_no_driver()
    }

    /// The PCI function, if it is one.
    fn pci(&self) -> Option<&PciTransport> {
        None
    }
}

impl Transport for MmioTransport {
    fn core(&self) -> &Core {
        self.core()
    }

    fn ioeventfds(&self) -> Vec<IoEventFd<'_>> {
        self.ioeventfds()
    }

    fn irqfds(&self) -> Vec<(u32, &EventFd)> {
        self.irqfds()
    }
}

impl Transport for PciTransport {
    fn core(&self) -> &Core {
        self.core()
    }

    fn ioeventfds(&self) -> Vec<IoEventFd<'_>> {
        self.ioeventfds()
    }

    fn irqfds(&self) -> Vec<(u32, &EventFd)> {
        self.irqfds()
    }

    fn is_let_go(&self) -> bool {
        self.is_let_go()
    }

    fn pci(&self) -> Option<&PciTransport> {
        Some(self)
    }
}

/// A slot of the bus, for a device that may come and go while the VM runs.
pub struct Slot {
    kind: Kind,
    resources: Resources,
    device: RwLock<Option<Arc<dyn Transport>>>,
}

impl Slot {
    /// A slot without a device.
    pub fn new(kind: Kind, resources: Resources) -> Self {
        Self { kind, resources, device: RwLock::default() }
    }

    /// The transport of its devices.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What its device has.
    pub fn resources(&self) -> Resources {
        self.resources
    }

    /// The device that is there. Nobody waits for it with the lock held.
    pub fn device(&self) -> Option<Arc<dyn Transport>> {
        self.device.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts a device in, or takes it out.
    pub fn set(&self, device: Option<Arc<dyn Transport>>) {
        *self.device.write().unwrap_or_else(PoisonError::into_inner) = device;
    }
}

impl BusDevice for Slot {
    /// Without a device, a driver of the MMIO transport reads the device ID 0, and ignores it (virtio 1.3, 4.2.2). The
    /// memory of a PCI function that does not exist reads all ones.
    fn read(&self, offset: u64, data: &mut [u8]) {
        match (self.device(), self.kind) {
            (Some(device), _) => device.read(offset, data),
            (None, Kind::Mmio) => mmio::read_placeholder(offset, data),
            (None, Kind::Pci) => {}
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(device) = self.device() {
            device.write(offset, data);
        }
    }
}
