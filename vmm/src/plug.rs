//! Connects virtio devices with KVM: those that a VM is built with, and those that are attached while it runs.

use std::{
    io,
    sync::{Arc, PoisonError, RwLock},
};

use bulkhead_vmm_api::BlockCounts;
use kvm_ioctls::{IoEventAddress, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    GuestMemory,
    arch::cmdline::MmioDevice,
    bus::BusDevice,
    virtio::{
        INTERRUPT_USED, VirtioDevice,
        block::{Block, BlockThread, Disk},
        mmio::{self, MmioTransport, TransportError},
        net::{Net, NetThread},
    },
};

/// Why a device could not be connected.
#[derive(Debug, thiserror::Error)]
pub enum PlugError {
    #[error("cannot create an event")]
    Event(#[source] io::Error),
    #[error("KVM {what}")]
    Kvm { what: &'static str, source: kvm_ioctls::Error },
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("the VM has no slot for another device")]
    Full,
    #[error("the VM has a block device with the serial number {0:?} already")]
    Taken(String),
    #[error("a request to the disk {0:?} has not ended: its file stays open until then")]
    Busy(String),
}

/// Creates an event that raises the interrupt `gsi` in the guest.
pub fn interrupt(vm: &VmFd, gsi: u32) -> Result<EventFd, PlugError> {
    let line = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(PlugError::Event)?;
    let failed = |source| PlugError::Kvm { what: "cannot create an interrupt", source };
    vm.register_irqfd(&line, gsi).map_err(failed)?;
    Ok(line)
}

/// Gives `device` the address and the interrupt of `slot`. Registers its interrupt, the acknowledgement of the
/// interrupt, and the notifications of its queues with KVM.
pub fn connect(
    vm: &VmFd,
    memory: &GuestMemory,
    slot: MmioDevice,
    device: Box<dyn VirtioDevice>,
) -> Result<Arc<MmioTransport>, PlugError> {
    let line = interrupt(vm, slot.gsi)?;
    let transport = MmioTransport::new(device, memory.clone(), line)?;
    let notify = IoEventAddress::Mmio(slot.address + mmio::NOTIFY_OFFSET);
    let failed = |source| PlugError::Kvm { what: "cannot create the notification of a queue", source };
    for (queue, kick) in (0u32..).zip(transport.kicks()) {
        vm.register_ioevent(kick, &notify, queue).map_err(failed)?;
    }
    let acknowledge = IoEventAddress::Mmio(slot.address + mmio::ACKNOWLEDGE_OFFSET);
    let failed =
        |source| PlugError::Kvm { what: "cannot create the acknowledgement of an interrupt", source };
    vm.register_ioevent(transport.acknowledged(), &acknowledge, INTERRUPT_USED).map_err(failed)?;
    Ok(Arc::new(transport))
}

/// Undoes [`connect`].
fn disconnect(vm: &VmFd, slot: MmioDevice, transport: &MmioTransport) -> Result<(), PlugError> {
    let notify = IoEventAddress::Mmio(slot.address + mmio::NOTIFY_OFFSET);
    let failed = |source| PlugError::Kvm { what: "cannot remove the notification of a queue", source };
    for (queue, kick) in (0u32..).zip(transport.kicks()) {
        vm.unregister_ioevent(kick, &notify, queue).map_err(failed)?;
    }
    let acknowledge = IoEventAddress::Mmio(slot.address + mmio::ACKNOWLEDGE_OFFSET);
    let failed =
        |source| PlugError::Kvm { what: "cannot remove the acknowledgement of an interrupt", source };
    vm.unregister_ioevent(transport.acknowledged(), &acknowledge, INTERRUPT_USED).map_err(failed)?;
    let failed = |source| PlugError::Kvm { what: "cannot remove an interrupt", source };
    vm.unregister_irqfd(transport.interrupt().line(), slot.gsi).map_err(failed)
}

/// A slot on the guest's bus for a device that comes, and may go, while the VM runs.
#[derive(Default)]
pub struct Placeholder(RwLock<Option<Arc<MmioTransport>>>);

impl Placeholder {
    /// The device that is there. Nobody waits for it with the lock held.
    fn device(&self) -> Option<Arc<MmioTransport>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, device: Option<Arc<MmioTransport>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = device;
    }
}

impl BusDevice for Placeholder {
    /// Without a device, the device ID is 0, and there are no other registers but those that all devices have. The
    /// driver ignores such a device (virtio 1.3, 4.2.2).
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.device() {
            Some(device) => device.read(offset, data),
            None => mmio::read_placeholder(offset, data),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(device) = self.device() {
            device.write(offset, data);
        }
    }
}

/// The slots for devices that are attached while the VM runs, and the threads that will serve them.
pub struct DeviceSlots {
    /// That of network devices.
    pub net: NetThread,
    /// That of block devices.
    pub block: BlockThread,
    /// The slots that are free. The last one is the next.
    free: Vec<(MmioDevice, Arc<Placeholder>)>,
    /// The block devices.
    disks: Vec<AttachedDisk>,
    /// What the guest has requested of those that were taken away.
    gone_counts: BlockCounts,
    /// The slots of devices that were taken away, until their drivers have reset them.
    gone: Vec<(MmioDevice, Arc<Placeholder>)>,
}

/// A block device in its slot.
struct AttachedDisk {
    serial: String,
    disk: Arc<Disk>,
    slot: MmioDevice,
    placeholder: Arc<Placeholder>,
}

impl DeviceSlots {
    /// All `slots` are free.
    pub fn new(net: NetThread, block: BlockThread, mut slots: Vec<(MmioDevice, Arc<Placeholder>)>) -> Self {
        slots.reverse();
        Self {
            net,
            block,
            free: slots,
            disks: Vec::new(),
            gone_counts: BlockCounts::default(),
            gone: Vec::new(),
        }
    }

    /// What the guest has requested of all block devices that it has or had.
    pub fn block_counts(&self) -> BlockCounts {
        self.disks.iter().fold(self.gone_counts, |sum, disk| added(sum, disk.disk.counts()))
    }

    /// Puts a network device in the next slot.
    pub fn attach_nic(&mut self, vm: &VmFd, memory: &GuestMemory, device: Net) -> Result<(), PlugError> {
        self.attach(vm, memory, Box::new(device)).map(drop)
    }

    /// Puts a block device in the next slot.
    pub fn attach_block(
        &mut self,
        vm: &VmFd,
        memory: &GuestMemory,
        device: Block,
        serial: &str,
    ) -> Result<(), PlugError> {
        if self.disks.iter().any(|disk| disk.serial == serial) {
            return Err(PlugError::Taken(serial.to_owned()));
        }
        let disk = device.disk();
        let (slot, placeholder) = self.attach(vm, memory, Box::new(device))?;
        self.disks.push(AttachedDisk { serial: serial.to_owned(), disk, slot, placeholder });
        Ok(())
    }

    /// Takes a block device away, if there is one with this serial number, and closes its disk. A driver that still
    /// uses it gets an error for each request, so that it can let it go. When it has done so, the slot is free.
    pub fn detach_block(&mut self, serial: &str) -> Result<(), PlugError> {
        let Some(index) = self.disks.iter().position(|disk| disk.serial == serial) else { return Ok(()) };
        let AttachedDisk { disk, slot, placeholder, .. } = self.disks.swap_remove(index);
        if let Some(device) = placeholder.device() {
            device.hide();
        }
        self.gone.push((slot, placeholder));
        self.gone_counts = added(self.gone_counts, disk.counts());
        if disk.close() { Ok(()) } else { Err(PlugError::Busy(serial.to_owned())) }
    }

    /// Frees the slots of devices that were taken away, and that their drivers have let go.
    fn free_gone(&mut self, vm: &VmFd) {
        self.gone.retain(|(slot, placeholder)| {
            let Some(device) = placeholder.device().filter(|device| device.has_no_driver()) else {
                return true;
            };
            // A slot of which KVM still knows is not used again.
            if disconnect(vm, *slot, &device).is_ok() {
                placeholder.set(None);
                self.free.push((*slot, placeholder.clone()));
            }
            false
        });
    }

    fn attach(
        &mut self,
        vm: &VmFd,
        memory: &GuestMemory,
        device: Box<dyn VirtioDevice>,
    ) -> Result<(MmioDevice, Arc<Placeholder>), PlugError> {
        self.free_gone(vm);
        // If this fails, KVM may know of a part of it. So the slot is not used again.
        let (slot, placeholder) = self.free.pop().ok_or(PlugError::Full)?;
        placeholder.set(Some(connect(vm, memory, slot, device)?));
        Ok((slot, placeholder))
    }
}

fn added(one: BlockCounts, other: BlockCounts) -> BlockCounts {
    BlockCounts {
        requests: one.requests.saturating_add(other.requests),
        read_bytes: one.read_bytes.saturating_add(other.read_bytes),
        written_bytes: one.written_bytes.saturating_add(other.written_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_without_a_device_is_ignored_by_drivers() {
        let slot = Placeholder::default();
        let word = |offset| {
            let mut data = [0xff; 4];
            slot.read(offset, &mut data);
            u32::from_le_bytes(data)
        };
        slot.write(0x70, &1u32.to_le_bytes());
        assert_eq!([0, 4, 8, 0xc, 0x10, 0x34, 0x70].map(word), [0x7472_6976, 2, 0, 0, 0, 0, 0]);
        let mut byte = [0xff];
        slot.read(0x100, &mut byte);
        assert_eq!(byte, [0]);
    }

    #[test]
    fn a_slot_has_a_device_until_it_is_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(dir.path().join("disk"))
            .unwrap();
        file.set_len(4096).unwrap();
        let block = Block::open(file, "a", true, false, &BlockThread::start().unwrap()).unwrap();
        let memory = crate::memory::lay_out(&[(0, 0x10000)], 0).unwrap();
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let device = Arc::new(MmioTransport::new(Box::new(block), memory, line).unwrap());
        let slot = Placeholder::default();
        let device_id = || {
            let mut data = [0; 4];
            slot.read(8, &mut data);
            u32::from_le_bytes(data)
        };
        slot.set(Some(device));
        assert_eq!(device_id(), 2);
        slot.set(None);
        assert_eq!(device_id(), 0);
    }
}
