//! Connects virtio devices with KVM: those that a VM is built with, and those that are attached while it runs.

use std::{
    io,
    sync::{Arc, OnceLock},
};

use kvm_ioctls::{IoEventAddress, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    GuestMemory,
    arch::cmdline::MmioDevice,
    bus::BusDevice,
    virtio::{
        VirtioDevice,
        block::BlockThread,
        mmio::{self, MmioTransport, TransportError},
        net::NetThread,
    },
};

/// Why a device could not be connected.
#[derive(Debug, thiserror::Error)]
pub enum PlugError {
    #[error("cannot create an event")]
    Event(#[source] io::Error),
    #[error("KVM cannot create {what}")]
    Kvm { what: &'static str, source: kvm_ioctls::Error },
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("the VM has no place for another device")]
    Full,
}

/// Creates an event that raises the interrupt `gsi` in the guest.
pub fn interrupt(vm: &VmFd, gsi: u32) -> Result<EventFd, PlugError> {
    let line = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(PlugError::Event)?;
    let failed = |source| PlugError::Kvm { what: "an interrupt", source };
    vm.register_irqfd(&line, gsi).map_err(failed)?;
    Ok(line)
}

/// Gives `device` the address and the interrupt of `place`, and registers its interrupt and the notifications of its
/// queues with KVM.
pub fn connect(
    vm: &VmFd,
    memory: &GuestMemory,
    place: MmioDevice,
    device: Box<dyn VirtioDevice>,
) -> Result<Arc<MmioTransport>, PlugError> {
    let line = interrupt(vm, place.gsi)?;
    let transport = MmioTransport::new(device, memory.clone(), line)?;
    let notify = IoEventAddress::Mmio(place.address + mmio::NOTIFY_OFFSET);
    let failed = |source| PlugError::Kvm { what: "the notification of a queue", source };
    for (queue, kick) in (0u32..).zip(transport.kicks()) {
        vm.register_ioevent(kick, &notify, queue).map_err(failed)?;
    }
    Ok(Arc::new(transport))
}

/// A place on the guest's bus for a device that may be attached later.
#[derive(Default)]
pub struct Placeholder(OnceLock<Arc<MmioTransport>>);

impl BusDevice for Placeholder {
    /// Without a device, the device ID is 0, and there are no other registers but those that all devices have. The
    /// driver ignores such a device (virtio 1.3, 4.2.2).
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.0.get() {
            Some(device) => device.read(offset, data),
            None => mmio::read_placeholder(offset, data),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(device) = self.0.get() {
            device.write(offset, data);
        }
    }
}

/// The places for devices that are attached while the VM runs, and the threads that will serve them.
pub struct Places {
    /// That of network devices.
    pub net: NetThread,
    /// That of block devices.
    pub block: BlockThread,
    /// The places that are free.
    free: std::vec::IntoIter<(MmioDevice, Arc<Placeholder>)>,
}

impl Places {
    /// All `places` are free.
    pub fn new(net: NetThread, block: BlockThread, places: Vec<(MmioDevice, Arc<Placeholder>)>) -> Self {
        Self { net, block, free: places.into_iter() }
    }

    /// Puts a device in the next place.
    pub fn attach(
        &mut self,
        vm: &VmFd,
        memory: &GuestMemory,
        device: Box<dyn VirtioDevice>,
    ) -> Result<(), PlugError> {
        // If this fails, KVM may know of a part of it. So the place is not used again.
        let (place, placeholder) = self.free.next().ok_or(PlugError::Full)?;
        let transport = connect(vm, memory, place, device)?;
        placeholder.0.set(transport).map_err(|_| PlugError::Full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_without_a_device_is_ignored_by_drivers() {
        let place = Placeholder::default();
        let word = |offset| {
            let mut data = [0xff; 4];
            place.read(offset, &mut data);
            u32::from_le_bytes(data)
        };
        place.write(0x70, &1u32.to_le_bytes());
        assert_eq!([0, 4, 8, 0xc, 0x10, 0x34, 0x70].map(word), [0x7472_6976, 2, 0, 0, 0, 0, 0]);
        let mut byte = [0xff];
        place.read(0x100, &mut byte);
        assert_eq!(byte, [0]);
    }
}
