//! Connects virtio devices with KVM: those that a VM is built with, and those that are attached while it runs.

use std::{io, sync::Arc};

use bulkhead_vmm_api::BlockCounts;
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    GuestMemory,
    arch::cmdline::MmioDevice,
    virtio::{
        INTERRUPT_USED, VirtioDevice,
        block::{Block, BlockThread, Disk},
        mmio::{self, MmioTransport},
        msix::Irqfd,
        net::{Net, NetThread},
        pci::{self, PciTransport},
        slot::{Slot, Transport},
        transport::TransportError,
    },
};

pub use routes::KvmRoutes;

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
    #[error("a device is not where it was connected")]
    Misplaced,
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
    vm.register_irqfd(&line, gsi).map_err(failed("cannot create an interrupt"))?;
    Ok(line)
}

/// Where a device is on the guest's bus.
#[derive(Debug, Clone, Copy)]
pub enum Place {
    /// A page of registers and an interrupt.
    Mmio(MmioDevice),
    /// A slot of the PCI bus.
    Pci {
        /// The address of the function's memory.
        address: u32,
        /// Its first interrupt. The others follow.
        gsi: u32,
    },
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
    pub fn route(&self, devices: &[Arc<Transport>]) -> io::Result<()> {
        let functions = devices.iter().filter_map(|device| device.pci());
        self.routes.route_all(&functions.map(PciTransport::messages).collect::<Vec<_>>())
    }

    /// Connects `device` with the transport of its `place`. Registers its interrupts and the notifications of its
    /// queues with KVM.
    pub fn connect(&self, place: Place, device: Box<dyn VirtioDevice>) -> Result<Arc<Transport>, PlugError> {
        let transport = match place {
            Place::Mmio(slot) => Transport::Mmio(self.connect_mmio(slot, device)?),
            Place::Pci { address, gsi } => Transport::Pci(self.connect_pci(address, gsi, device)?),
        };
        Ok(Arc::new(transport))
    }

    /// The acknowledgement of the interrupt is registered with KVM too.
    fn connect_mmio(
        &self,
        slot: MmioDevice,
        device: Box<dyn VirtioDevice>,
    ) -> Result<MmioTransport, PlugError> {
        let line = interrupt(&self.vm, slot.gsi)?;
        let transport = MmioTransport::new(device, self.memory.clone(), line)?;
        let notify = IoEventAddress::Mmio(slot.address + mmio::NOTIFY_OFFSET);
        for (queue, kick) in (0u32..).zip(transport.core().kicks()) {
            self.vm.register_ioevent(kick, &notify, queue).map_err(failed(NO_NOTIFICATION))?;
        }
        let acknowledge = IoEventAddress::Mmio(slot.address + mmio::ACKNOWLEDGE_OFFSET);
        self.vm
            .register_ioevent(transport.acknowledged(), &acknowledge, INTERRUPT_USED)
            .map_err(failed("cannot create the acknowledgement of an interrupt"))?;
        Ok(transport)
    }

    fn connect_pci(
        &self,
        address: u32,
        gsi: u32,
        device: Box<dyn VirtioDevice>,
    ) -> Result<PciTransport, PlugError> {
        let vectors = PciTransport::vectors(&*device)?;
        let irqfd = |gsi| Ok(Irqfd { gsi, event: interrupt(&self.vm, gsi)? });
        let irqfds = (gsi..).take(vectors).map(irqfd).collect::<Result<Vec<_>, PlugError>>()?;
        let transport = PciTransport::new(device, self.memory.clone(), address, irqfds, self.routes.clone())?;
        for (queue, kick) in (0u64..).zip(transport.core().kicks()) {
            self.vm
                .register_ioevent(kick, &pci_notification(address, queue), NoDatamatch)
                .map_err(failed(NO_NOTIFICATION))?;
        }
        Ok(transport)
    }

    /// Undoes [`Plug::connect`]. The messages of a function stay in KVM's table, where no irqfd sends them.
    fn disconnect(&self, place: Place, transport: &Transport) -> Result<(), PlugError> {
        const NOTIFICATION: &str = "cannot remove the notification of a queue";
        const INTERRUPT: &str = "cannot remove an interrupt";
        match (place, transport) {
            (Place::Mmio(slot), Transport::Mmio(transport)) => {
                let notify = IoEventAddress::Mmio(slot.address + mmio::NOTIFY_OFFSET);
                for (queue, kick) in (0u32..).zip(transport.core().kicks()) {
                    self.vm.unregister_ioevent(kick, &notify, queue).map_err(failed(NOTIFICATION))?;
                }
                let acknowledge = IoEventAddress::Mmio(slot.address + mmio::ACKNOWLEDGE_OFFSET);
                self.vm
                    .unregister_ioevent(transport.acknowledged(), &acknowledge, INTERRUPT_USED)
                    .map_err(failed("cannot remove the acknowledgement of an interrupt"))?;
                let line = transport.core().interrupt().line().ok_or(PlugError::Misplaced)?;
                self.vm.unregister_irqfd(line, slot.gsi).map_err(failed(INTERRUPT))
            }
            (Place::Pci { address, .. }, Transport::Pci(transport)) => {
                for (queue, kick) in (0u64..).zip(transport.core().kicks()) {
                    self.vm
                        .unregister_ioevent(kick, &pci_notification(address, queue), NoDatamatch)
                        .map_err(failed(NOTIFICATION))?;
                }
                transport.messages().disconnect();
                transport.messages().irqfds().try_for_each(|irqfd| {
                    self.vm.unregister_irqfd(&irqfd.event, irqfd.gsi).map_err(failed(INTERRUPT))
                })
            }
            (Place::Mmio(_), Transport::Pci(_)) | (Place::Pci { .. }, Transport::Mmio(_)) => {
                Err(PlugError::Misplaced)
            }
        }
    }
}

const NO_NOTIFICATION: &str = "cannot create the notification of a queue";

fn failed(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> PlugError {
    move |source| PlugError::Kvm { what, source }
}

/// The address of the notification of a queue. Nobody else writes to it, so KVM need not look at the value.
fn pci_notification(address: u32, queue: u64) -> IoEventAddress {
    IoEventAddress::Mmio(u64::from(address) + pci::layout::NOTIFY + queue * pci::layout::NOTIFY_STEP)
}

/// The slots for devices that are attached while the VM runs, and the threads that will serve them.
pub struct DeviceSlots {
    plug: Plug,
    /// That of network devices.
    pub net: NetThread,
    /// That of block devices.
    pub block: BlockThread,
    /// The slots that are free. The last one is the next.
    free: Vec<(Place, Arc<Slot>)>,
    /// The block devices.
    disks: Vec<AttachedDisk>,
    /// What the guest has requested of those that were taken away.
    gone_counts: BlockCounts,
    /// The slots of devices that were taken away, until their drivers have reset them.
    gone: Vec<(Place, Arc<Slot>)>,
}

/// A block device in its slot.
struct AttachedDisk {
    serial: String,
    disk: Arc<Disk>,
    place: Place,
    slot: Arc<Slot>,
}

impl DeviceSlots {
    /// All `slots` are free.
    pub fn new(plug: Plug, net: NetThread, block: BlockThread, mut slots: Vec<(Place, Arc<Slot>)>) -> Self {
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
        let (place, slot) = self.attach(Box::new(device))?;
        self.disks.push(AttachedDisk { serial: serial.to_owned(), disk, place, slot });
        Ok(())
    }

    /// Takes a block device away, if there is one with this serial number, and closes its disk. A driver that still
    /// uses it gets an error for each request, so that it can let it go. When it has done so, the slot is free.
    pub fn detach_block(&mut self, serial: &str) -> Result<(), PlugError> {
        let Some(index) = self.disks.iter().position(|disk| disk.serial == serial) else { return Ok(()) };
        let AttachedDisk { disk, place, slot, .. } = self.disks.swap_remove(index);
        if let Some(device) = slot.device() {
            device.core().hide();
        }
        self.gone.push((place, slot));
        self.gone_counts = added(self.gone_counts, disk.counts());
        if disk.close() { Ok(()) } else { Err(PlugError::Busy(serial.to_owned())) }
    }

    /// Frees the slots of devices that were taken away, and that their drivers have let go.
    fn free_gone(&mut self) {
        self.gone.retain(|(place, slot)| {
            let Some(device) = slot.device().filter(|device| device.core().has_no_driver()) else {
                return true;
            };
            // A slot of which KVM still knows is not used again.
            if self.plug.disconnect(*place, &device).is_ok() {
                slot.set(None);
                self.free.push((*place, slot.clone()));
            }
            false
        });
    }

    fn attach(&mut self, device: Box<dyn VirtioDevice>) -> Result<(Place, Arc<Slot>), PlugError> {
        self.free_gone();
        // If this fails, KVM may know of a part of it. So the slot is not used again.
        let (place, slot) = self.free.pop().ok_or(PlugError::Full)?;
        slot.set(Some(self.plug.connect(place, device)?));
        Ok((place, slot))
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
    use crate::bus::BusDevice;

    #[test]
    fn a_slot_without_a_device_is_ignored_by_drivers() {
        let slot = Slot::mmio();
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
        let device = MmioTransport::new(Box::new(block), memory, line).unwrap();
        let slot = Slot::mmio();
        let device_id = || {
            let mut data = [0; 4];
            slot.read(8, &mut data);
            u32::from_le_bytes(data)
        };
        slot.set(Some(Arc::new(Transport::Mmio(device))));
        assert_eq!(device_id(), 2);
        slot.set(None);
        assert_eq!(device_id(), 0);
    }
}
