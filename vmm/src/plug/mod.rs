//! Connects virtio devices with KVM: those that a VM is built with, and those that are attached while it runs.

use std::{io, sync::Arc};

use bulkhead_vmm_api::{BlockCounts, Transport as Kind};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use self::routes::KvmRoutes;
use crate::{
    GuestMemory,
    virtio::{
        VirtioDevice,
        block::{Block, BlockThreads, Disk},
        mmio::MmioTransport,
        net::{Net, NetThreads},
        pci::PciTransport,
        slot::{Slot, Transport},
        transport::{IoEventFd, TransportError},
    },
};

mod routes;

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
    vm.register_irqfd(&line, gsi).map_err(failed(NO_INTERRUPT))?;
    Ok(line)
}

/// Connects devices to a VM.
#[derive(Clone)]
pub struct Plug {
    vm: Arc<VmFd>,
    memory: GuestMemory,
    routes: Arc<KvmRoutes>,
}

impl Plug {
    /// Connects devices to this VM.
    pub fn new(vm: Arc<VmFd>, memory: GuestMemory) -> Self {
        Self { routes: Arc::new(KvmRoutes::new(vm.clone())), vm, memory }
    }

    /// Tells KVM of the interrupt messages of devices that were restored.
    pub fn route(&self, devices: &[Arc<dyn Transport>]) -> io::Result<()> {
        let functions = devices.iter().filter_map(|device| device.pci());
        self.routes.route_all(&functions.map(PciTransport::messages).collect::<Vec<_>>())
    }

    /// Puts `device` in a slot. Registers its interrupts and the notifications of its queues with KVM.
    pub fn connect(
        &self,
        slot: &Slot,
        device: Box<dyn VirtioDevice>,
    ) -> Result<Arc<dyn Transport>, PlugError> {
        let (memory, resources) = (self.memory.clone(), slot.resources());
        let device: Arc<dyn Transport> = match slot.kind() {
            Kind::Mmio => Arc::new(MmioTransport::new(device, memory, resources)?),
            Kind::Pci => Arc::new(PciTransport::new(device, memory, resources, self.routes.clone())?),
        };
        for (gsi, event) in device.irqfds() {
            self.vm.register_irqfd(event, gsi).map_err(failed(NO_INTERRUPT))?;
        }
        for IoEventFd { address, value, event } in device.ioeventfds() {
            let address = IoEventAddress::Mmio(address);
            let registered = match value {
                Some(value) => self.vm.register_ioevent(event, &address, value),
                None => self.vm.register_ioevent(event, &address, NoDatamatch),
            };
            registered.map_err(failed("cannot create the notification of a device"))?;
        }
        slot.set(Some(device.clone()));
        Ok(device)
    }

    /// Undoes [`Plug::connect`]. The messages of a function stay in KVM's table, where no irqfd sends them.
    fn disconnect(&self, slot: &Slot, device: &dyn Transport) -> Result<(), PlugError> {
        if let Some(function) = device.pci() {
            function.messages().disconnect();
        }
        for IoEventFd { address, value, event } in device.ioeventfds() {
            let address = IoEventAddress::Mmio(address);
            let removed = match value {
                Some(value) => self.vm.unregister_ioevent(event, &address, value),
                None => self.vm.unregister_ioevent(event, &address, NoDatamatch),
            };
            removed.map_err(failed("cannot remove the notification of a device"))?;
        }
        for (gsi, event) in device.irqfds() {
            self.vm.unregister_irqfd(event, gsi).map_err(failed("cannot remove an interrupt"))?;
        }
        slot.set(None);
        Ok(())
    }
}

const NO_INTERRUPT: &str = "cannot create an interrupt";

fn failed(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> PlugError {
    move |source| PlugError::Kvm { what, source }
}

/// The slots for devices that are attached while the VM runs, and the threads that will serve them.
pub struct DeviceSlots {
    plug: Plug,
    /// Those of network devices.
    pub net: NetThreads,
    /// Those of block devices.
    pub block: BlockThreads,
    /// The slots that are free. The last one is the next.
    free: Vec<Arc<Slot>>,
    /// The block devices.
    disks: Vec<AttachedDisk>,
    /// What the guest has requested of those that were taken away.
    gone_counts: BlockCounts,
    /// The slots of devices that were taken away, until their drivers have reset them.
    gone: Vec<Arc<Slot>>,
}

/// A block device in its slot.
struct AttachedDisk {
    serial: String,
    disk: Arc<Disk>,
    slot: Arc<Slot>,
}

impl DeviceSlots {
    /// All `slots` are free.
    pub fn new(plug: Plug, net: NetThreads, block: BlockThreads, mut slots: Vec<Arc<Slot>>) -> Self {
        slots.reverse();
        Self {
            plug,
            net,
            block,
            free: slots,
            disks: Vec::new(),
            gone_counts: BlockCounts::default(),
            gone: Vec::new(),
        }
    }

    /// How many pairs of queues a network device has.
    pub fn queues(&self) -> usize {
        self.net.count()
    }

    /// What the guest has requested of all block devices that it has or had.
    pub fn block_counts(&self) -> BlockCounts {
        self.disks.iter().fold(self.gone_counts, |sum, disk| added(sum, disk.disk.counts()))
    }

    /// Puts a network device in the next slot.
    pub fn attach_nic(&mut self, device: Net) -> Result<(), PlugError> {
        self.attach(Box::new(device)).map(drop)
    }

    /// Puts a block device in the next slot.
    pub fn attach_block(&mut self, device: Block, serial: &str) -> Result<(), PlugError> {
        if self.disks.iter().any(|disk| disk.serial == serial) {
            return Err(PlugError::Taken(serial.to_owned()));
        }
        let disk = device.disk();
        let slot = self.attach(Box::new(device))?;
        self.disks.push(AttachedDisk { serial: serial.to_owned(), disk, slot });
        Ok(())
    }

    /// Takes a block device away, if there is one with this serial number, and closes its disk. A driver that still
    /// uses it gets an error for each request, so that it can let it go. When it has done so, the slot is free.
    pub fn detach_block(&mut self, serial: &str) -> Result<(), PlugError> {
        let Some(index) = self.disks.iter().position(|disk| disk.serial == serial) else { return Ok(()) };
        let AttachedDisk { disk, slot, .. } = self.disks.swap_remove(index);
        if let Some(device) = slot.device() {
            device.core().hide();
        }
        self.gone.push(slot);
        self.gone_counts = added(self.gone_counts, disk.counts());
        if disk.close() { Ok(()) } else { Err(PlugError::Busy(serial.to_owned())) }
    }

    /// Frees the slots of devices that were taken away, and that their drivers have let go.
    fn free_gone(&mut self) {
        self.gone.retain(|slot| {
            let Some(device) = slot.device().filter(|device| device.is_let_go()) else {
                return true;
            };
            // A slot of which KVM still knows is not used again.
            if self.plug.disconnect(slot, &*device).is_ok() {
                self.free.push(slot.clone());
            }
            false
        });
    }

    fn attach(&mut self, device: Box<dyn VirtioDevice>) -> Result<Arc<Slot>, PlugError> {
        self.free_gone();
        // If this fails, KVM may know of a part of it. So the slot is not used again.
        let slot = self.free.pop().ok_or(PlugError::Full)?;
        self.plug.connect(&slot, device)?;
        Ok(slot)
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
    use crate::{bus::BusDevice, layout::Resources};

    const RESOURCES: Resources = Resources { address: 0xd000_0000, gsi: 5 };

    #[test]
    fn a_slot_without_a_device_is_ignored_by_drivers() {
        let slot = Slot::new(Kind::Mmio, RESOURCES);
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
        let block = Block::open(file, "a", true, false, &BlockThreads::start(1).unwrap()).unwrap();
        let memory = crate::memory::lay_out(&[(0, 0x10000)], 0).unwrap();
        let device = MmioTransport::new(Box::new(block), memory, RESOURCES).unwrap();
        let slot = Slot::new(Kind::Mmio, RESOURCES);
        let device_id = || {
            let mut data = [0; 4];
            slot.read(8, &mut data);
            u32::from_le_bytes(data)
        };
        slot.set(Some(Arc::new(device)));
        assert_eq!(device_id(), 2);
        slot.set(None);
        assert_eq!(device_id(), 0);
    }
}
