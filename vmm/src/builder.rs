//! Builds a VM from its configuration.

use std::{
    io, iter,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    sync::Arc,
};

use bulkhead_vmm_api::{ATTACHABLE_DEVICES, NicConfig, Transport as Kind, VmConfig};
use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::{
    GuestMemory,
    arch::{
        boot::{self, BootError, Images},
        cmdline::{self, CmdlineError, Devices},
        cpuid::{self, CpuidError},
        mptable,
        registers::{self, RegisterError},
    },
    bus::{Bus, BusDevice},
    config,
    control_socket::{Abilities, ControlError, ControlServer},
    io_ports::{self, Console, LastWords, Log, ResetLine},
    jail::{self, JailError, ThreadError},
    kvm::{self, KvmError},
    layout,
    memory::{self, MemoryError, Pool, Size, Slots},
    plug::{self, DeviceSlots, Plug, PlugError},
    snapshot::{RestoreError, SaveError, Saved, Saver},
    vcpu::{ExitEvent, GuestIo},
    virtio::{
        VirtioDevice,
        balloon::{Balloon, BalloonControl},
        block::BlockThreads,
        fs::{Fs, FsError},
        mem::{Mem, MemControl},
        net::{Net, NetThreads, Tap},
        pci_bus::{self, PciBus},
        rng::Rng,
        slot::{Slot, Transport},
        vsock::{self, Vsock, VsockError},
    },
    vm::{MemorySize, Vm},
};

/// The guest's CID. All guests have the same, because no packet leaves the VMM.
const GUEST_CID: u64 = 3;

/// Why a VM could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error(transparent)]
    Jail(#[from] JailError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("KVM cannot create {what}")]
    Create { what: &'static str, source: kvm_ioctls::Error },
    #[error("cannot create {what}")]
    Io { what: &'static str, source: io::Error },
    #[error("console: cannot open {path}")]
    Console { path: PathBuf, source: io::Error },
    #[error("shares and nics: a VM has at most {most} virtio devices")]
    TooManyDevices { most: u32 },
    #[error("vsock: cannot create the device")]
    Vsock(#[from] VsockError),
    #[error("shares[{index}]: cannot serve {dir}")]
    Share { index: usize, dir: PathBuf, source: FsError },
    #[error("nics[{index}].mac: {mac:?} is not a MAC address")]
    Mac { index: usize, mac: String },
    #[error(
        "nics[{index}].tap: cannot create {tap}: a tap device needs /dev/net/tun and an unused name; a network \
         namespace has room for one microVM"
    )]
    Nic { index: usize, tap: String, source: io::Error },
    #[error(transparent)]
    Thread(#[from] ThreadError),
    #[error(transparent)]
    Plug(#[from] PlugError),
    #[error(transparent)]
    Cmdline(#[from] CmdlineError),
    #[error(transparent)]
    Boot(#[from] BootError),
    #[error("cannot write the MP table to the guest's memory")]
    MpTable(#[source] vm_memory::GuestMemoryError),
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    #[error(transparent)]
    Registers(#[from] RegisterError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Restore(#[from] RestoreError),
}

/// Builds a VM that boots, or that continues from a saved VM.
pub fn build(config: &VmConfig) -> Result<Vm, BuildError> {
    let mut host = Host::open(config)?;
    // Before this call no thread was started. After it, only files in the shares can be opened.
    let shares: Vec<_> = config.shares.iter().map(|share| share.dir.as_path()).collect();
    let root = jail::enter(&shares, &config.vsock)?;
    let exit = Arc::new(ExitEvent::new().map_err(io("an event"))?);

    let fd = Arc::new(host.kvm.create_vm().map_err(create("a VM"))?);
    kvm::disable_counters(&host.kvm, &fd).map_err(create("a VM without performance counters"))?;
    let memory = match &host.origin {
        Origin::Images(_) => memory::allocate(size(config), host.pool.take())?,
        Origin::Saved(saved) => saved.memory()?,
    };
    // This comes before the interrupt controllers: once they exist, setting a slot waits for an RCU grace period,
    // which takes milliseconds.
    let memory_slots = Slots::register(&fd, &memory)?;
    fd.set_tss_address(layout::KVM_TSS_ADDRESS).map_err(create("the task state segment"))?;
    // There is no PIT: the guest uses kvm-clock and the TSC deadline timer of the local APIC.
    fd.create_irq_chip().map_err(create("interrupt controllers"))?;
    let vcpus = vcpus(&mut host, &fd, config.vcpus)?;

    let mut ports = Bus::default();
    ports.insert(io_ports::KEYBOARD_PORT, io_ports::KEYBOARD_PORTS, Arc::new(ResetLine::new(exit.clone())));
    let last_words = Arc::new(LastWords::new());
    let serial: Arc<dyn BusDevice> = match host.console {
        Some(log) => Arc::new(Console::new(log, plug::interrupt(&fd, layout::SERIAL_GSI)?)),
        None => last_words.clone(),
    };
    ports.insert(layout::SERIAL_PORT, io_ports::SERIAL_PORTS, serial);

    let plug = Plug::new(fd.clone(), memory.clone());
    let mut slots = VirtioSlots::new(plug.clone(), config.transport);
    slots.plug(Box::new(host.rng))?;
    let vsock = Vsock::new(host.vsock, root.vsock, GUEST_CID)?;
    let sockets = vsock.control();
    slots.plug(Box::new(vsock))?;
    let mut shares = Vec::new();
    for (index, (share, dir)) in config.shares.iter().zip(root.shares).enumerate() {
        let source = |source| BuildError::Share { index, dir: share.dir.clone(), source };
        let share = Fs::new(share, &dir, config.shares.len()).map_err(source)?;
        shares.push(share.control());
        slots.plug(Box::new(share))?;
    }
    let queues = bulkhead_vmm_api::queues(config.vcpus);
    let net = NetThreads::start(queues)?;
    for (tap, mac) in host.cards {
        slots.plug(Box::new(Net::new(tap, mac, &net)))?;
    }
    let balloon = if memory.can_be_released() { Some(slots.plug_balloon()?) } else { None };
    let device = slots.plug_memory(&memory)?;
    let memory_mib = config.memory_mib;
    let size = MemorySize {
        initial_mib: memory_mib,
        slots: memory_slots,
        device,
        balloon,
        granted_mib: memory_mib,
        requested_mib: memory_mib,
    };
    // They come last, so that the other devices have the same addresses with and without them.
    let reserved = slots.reserve(ATTACHABLE_DEVICES);
    let VirtioSlots { bus: mmio, slots: all, devices, .. } = slots;
    let resources: Vec<_> = all.iter().map(|slot| slot.resources()).collect();
    let pci = (config.transport == Kind::Pci).then(|| Arc::new(PciBus::new(all)));
    if let Some(pci) = &pci {
        ports.insert(pci_bus::PORT, pci_bus::PORTS, pci.clone());
    }
    let slots = DeviceSlots::new(plug.clone(), net, BlockThreads::start(queues)?, reserved);

    match host.origin {
        Origin::Images(images) => {
            let devices = if pci.is_some() { Devices::Pci } else { Devices::Mmio(&resources) };
            let cmdline = cmdline::build(config.console.is_some(), devices, &config.kernel_args)?;
            let entry = boot::load(&memory, images, &cmdline)?;
            mptable::write(&memory, config.vcpus).map_err(BuildError::MpTable)?;
            registers::set_boot(&vcpus[0], &memory, entry)?;
        }
        Origin::Saved(saved) => {
            saved.restore_vm(&fd)?;
            saved.prepare_devices(&devices, pci.as_deref())?;
            plug.route(&devices).map_err(RestoreError::Messages)?;
            saved.restore_devices(&devices)?;
            saved.map_working_set(&memory, &vcpus[0]);
        }
    }

    let io = GuestIo { mmio: Arc::new(mmio), ports: Arc::new(ports), exit };
    let Host { saver, control, .. } = host;
    Ok(Vm { vcpus, io, last_words, devices, pci, size, shares, sockets, slots, saver, control, fd, memory })
}

fn size(config: &VmConfig) -> Size {
    Size::new(config.memory_mib, config.max_memory_mib)
}

/// How a VM starts.
enum Origin {
    /// It boots a kernel and its initramfs.
    Images(Images),
    /// It continues from a saved VM.
    Saved(Box<Saved>),
}

/// What a VM needs from its host. All of it is open.
struct Host {
    kvm: Kvm,
    /// What KVM supports of CPUID.
    cpuid: Vec<kvm_cpuid_entry2>,
    control: ControlServer,
    origin: Origin,
    saver: Option<Saver>,
    /// None if the guest's memory consists of ordinary pages.
    pool: Option<Pool>,
    console: Option<Log>,
    rng: Rng,
    vsock: UnixListener,
    /// With the addresses of the guest.
    cards: Vec<(Tap, [u8; 6])>,
}

impl Host {
    fn open(config: &VmConfig) -> Result<Self, BuildError> {
        let kvm = kvm::open()?;
        let cpuid = cpuid::supported(&kvm)?;
        let origin = match &config.restore_from {
            Some(dir) => Origin::Saved(Box::new(Saved::open(dir, config)?)),
            None => Origin::Images(Images::open(&config.kernel, &config.initramfs)?),
        };
        let saver = config.save_to.as_deref().map(|dir| Saver::new(dir, config, &kvm)).transpose()?;
        let pool = config.hugepages.then(Pool::open).transpose()?;
        let abilities = Abilities { can_save: saver.is_some(), max_memory_mib: size(config).max_mib };
        let control = ControlServer::bind(&config.control, abilities)?;
        let console = config.console.as_deref().map(console).transpose()?;
        let rng = Rng::new().map_err(io("the entropy device"))?;
        let vsock = vsock::listen(&config.vsock)?;
        let cards = config.nics.iter().enumerate().map(|(index, nic)| net(index, nic, config.vcpus));
        let cards = cards.collect::<Result<_, _>>()?;
        Ok(Self { kvm, cpuid, control, origin, saver, pool, console, rng, vsock, cards })
    }
}

/// Creates the vCPUs. If the VM boots, the entry point of the first one is set later.
fn vcpus(host: &mut Host, vm: &VmFd, count: u8) -> Result<Vec<VcpuFd>, BuildError> {
    // All vCPUs are created before the state of the first is restored. KVM synchronizes the time stamp counters of
    // vCPUs that are set to about the same value one after another. Creating a vCPU in between would set another
    // value.
    let vcpus = (0..count).map(|id| vm.create_vcpu(id.into()).map_err(create("a vCPU")));
    let vcpus = vcpus.collect::<Result<Vec<_>, _>>()?;
    for (id, vcpu) in (0..count).zip(&vcpus) {
        let cpuid = cpuid::for_vcpu(&host.cpuid, id, count)?;
        match &host.origin {
            Origin::Images(_) => {
                vcpu.set_cpuid2(&cpuid).map_err(create("the guest's CPUID table"))?;
                registers::set_common(vcpu)?;
            }
            Origin::Saved(saved) => saved.restore_vcpu(id, vcpu, cpuid.as_slice())?,
        }
        if let Some(saver) = &mut host.saver {
            saver.add_cpuid(cpuid.as_slice());
        }
    }
    Ok(vcpus)
}

fn console(path: &Path) -> Result<Log, BuildError> {
    Log::open(path).map_err(|source| BuildError::Console { path: path.to_owned(), source })
}

fn net(index: usize, nic: &NicConfig, vcpus: u8) -> Result<(Tap, [u8; 6]), BuildError> {
    let mac = config::parse_mac(&nic.mac).ok_or_else(|| BuildError::Mac { index, mac: nic.mac.clone() })?;
    let failed = |source| BuildError::Nic { index, tap: nic.tap.clone(), source };
    let tap = Tap::create(&nic.tap, bulkhead_vmm_api::queues(vcpus));
    Ok((tap.map_err(failed)?, mac))
}

/// Assigns slots to the virtio devices.
struct VirtioSlots {
    plug: Plug,
    transport: Kind,
    bus: Bus,
    slots: Vec<Arc<Slot>>,
    devices: Vec<Arc<dyn Transport>>,
}

impl VirtioSlots {
    fn new(plug: Plug, transport: Kind) -> Self {
        Self { plug, transport, bus: Bus::default(), slots: Vec::new(), devices: Vec::new() }
    }

    fn plug_balloon(&mut self) -> Result<BalloonControl, BuildError> {
        let balloon = Balloon::new().map_err(io("the balloon device"))?;
        let control = balloon.control();
        self.plug(Box::new(balloon))?;
        Ok(control)
    }

    /// Adds the memory device if the guest may have more than its initial memory.
    fn plug_memory(&mut self, memory: &GuestMemory) -> Result<Option<MemControl>, BuildError> {
        let Some(region) = memory.growing() else { return Ok(None) };
        let mem = Mem::new(region).map_err(io("the memory device"))?;
        let control = mem.control();
        self.plug(Box::new(mem))?;
        Ok(Some(control))
    }

    /// Connects `device` to the next slot.
    fn plug(&mut self, device: Box<dyn VirtioDevice>) -> Result<(), BuildError> {
        let most = match self.transport {
            Kind::Mmio => layout::VIRTIO_SLOTS,
            Kind::Pci => layout::PCI_FUNCTIONS,
        };
        let slot = self.next().ok_or(BuildError::TooManyDevices { most })?;
        self.devices.push(self.plug.connect(&slot, device)?);
        Ok(())
    }

    /// Reserves up to `count` slots for devices that may be attached later.
    fn reserve(&mut self, count: usize) -> Vec<Arc<Slot>> {
        iter::from_fn(|| self.next()).take(count).collect()
    }

    /// The next slot. None: there is no more.
    fn next(&mut self) -> Option<Arc<Slot>> {
        let number = self.slots.len() as u32;
        let (resources, size) = match self.transport {
            Kind::Mmio => (layout::mmio_slot(number)?, layout::VIRTIO_MMIO_SIZE),
            Kind::Pci => (layout::pci_function(number)?, layout::PCI_SIZE),
        };
        let slot = Arc::new(Slot::new(self.transport, resources));
        self.bus.insert(resources.address, size, slot.clone());
        self.slots.push(slot.clone());
        Some(slot)
    }
}

fn create(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> BuildError {
    move |source| BuildError::Create { what, source }
}

fn io(what: &'static str) -> impl Fn(io::Error) -> BuildError {
    move |source| BuildError::Io { what, source }
}
