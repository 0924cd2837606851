//! Runs a VM until its guest or a client of the control socket ends it.

use std::{
    io::{self, Write},
    mem::{self, ManuallyDrop},
    sync::Arc,
};

use bulkhead_vmm_api::{BLOCK_MIB, DeviceCounts, GUEST_SAYS, RUNNING, ShareCounts};
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::poll::PollContext;

use crate::{
    GuestMemory,
    control_socket::{Command, ControlError, ControlServer, DiskRequest},
    io_ports::LastWords,
    jail::ThreadRole,
    memory::{MemoryError, Slots},
    one_line,
    plug::{DeviceSlots, PlugError},
    snapshot::{SaveError, Saver, StoppedVm},
    vcpu::{GuestExit, GuestIo, StartError, VcpuThreads},
    virtio::{
        balloon::BalloonControl,
        block::Block,
        fs::ShareControl,
        mem::MemControl,
        net::{Net, Tap},
        pci_bus::PciBus,
        slot::Transport,
        vsock::VsockControl,
    },
};

/// Why a VM did not run, or ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    #[error("cannot wait for events of the VM")]
    Poll(#[from] vmm_sys_util::errno::Error),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Guest(GuestExit),
    #[error(transparent)]
    Save(#[from] SaveError),
}

/// What is needed to change the size of a VM's memory.
pub struct MemorySize {
    /// The initial memory in MiB.
    pub initial_mib: u32,
    /// Where the memory is registered with KVM.
    pub slots: Slots,
    /// The memory device of the guest. None if the VM cannot grow.
    pub device: Option<MemControl>,
    /// The balloon of the guest. None if its pages cannot be returned to the host.
    pub balloon: Option<BalloonControl>,
    /// The memory that was granted to the guest, in MiB: `initial_mib` and whole units of [`BLOCK_MIB`].
    pub granted_mib: u32,
    /// The memory that the guest was last requested to have, in MiB.
    pub requested_mib: u32,
}

impl MemorySize {
    /// The current memory of the guest in MiB.
    fn present_mib(&self) -> u32 {
        let plugged = self.device.as_ref().map_or(0, MemControl::plugged);
        let inflated = self.balloon.as_ref().map_or(0, BalloonControl::inflated);
        self.initial_mib.saturating_add((plugged >> 20) as u32).saturating_sub((inflated >> 20) as u32)
    }

    /// Requests that the guest has `memory_mib`: it plugs what is missing, and puts what is too much into its balloon.
    /// The guest does so when it likes. Without a balloon it is requested to have all that was granted.
    fn request(&mut self, vm: &VmFd, memory_mib: u32) -> Result<(), ResizeError> {
        if let Some(device) = &self.device {
            let blocks = memory_mib.saturating_sub(self.initial_mib).div_ceil(BLOCK_MIB);
            let bytes = u64::from(blocks) * (u64::from(BLOCK_MIB) << 20);
            self.slots.grow(vm, bytes)?;
            device.request(bytes).map_err(ResizeError::Notify)?;
            self.granted_mib = self.granted_mib.max(self.initial_mib + blocks * BLOCK_MIB);
        }
        self.requested_mib = self.granted_mib;
        if let Some(balloon) = &self.balloon {
            let spare_mib = self.granted_mib.saturating_sub(memory_mib);
            balloon.request(u64::from(spare_mib) << 20).map_err(ResizeError::Notify)?;
            self.requested_mib -= spare_mib;
        }
        Ok(())
    }
}

/// Why the size of a VM's memory cannot be changed.
#[derive(Debug, thiserror::Error)]
enum ResizeError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("cannot notify the guest")]
    Notify(#[source] io::Error),
}

/// A VM that was built. The fields of a VM that does not run are dropped in this order, in which each field precedes
/// those that it uses.
pub struct Vm {
    /// They have the ids from 0 on, and are ready to run.
    pub vcpus: Vec<VcpuFd>,
    /// All devices, and the event of the guest's end.
    pub io: GuestIo,
    /// What the guest says when it ends. Nothing if it has a console.
    pub last_words: Arc<LastWords>,
    /// The virtio devices, in the order of their addresses.
    pub devices: Vec<Arc<dyn Transport>>,
    /// The PCI bus. None: the devices are not on one.
    pub pci: Option<Arc<PciBus>>,
    /// Changes the size of the guest's memory.
    pub size: MemorySize,
    /// The shares.
    pub shares: Vec<ShareControl>,
    /// The socket device.
    pub sockets: VsockControl,
    /// The slots for devices that are attached later.
    pub slots: DeviceSlots,
    /// The files to which the VM can be saved.
    pub saver: Option<Saver>,
    /// The control socket.
    pub control: ControlServer,
    /// The VM in KVM.
    pub fd: Arc<VmFd>,
    /// KVM maps it into the guest as long as `fd` and `vcpus` are open, so it is dropped last.
    pub memory: GuestMemory,
}

impl Vm {
    /// Runs the VM until it ends. Returns Ok if the guest reset, was stopped, or was saved.
    ///
    /// This does not wait for the other threads, and keeps the memory mapped. The process must exit now, which ends
    /// its threads. The thread of a device may be waiting for a file system of the host that does not respond, and a
    /// vCPU for that thread. Data that they have written is in the kernel already.
    ///
    /// No signal is handled. A VMM of the shim is the first process of a pid namespace, so only SIGKILL ends it
    /// (pid_namespaces(7)): a host that shuts down sends SIGTERM to shim and VMM, and the shim first ends the programs.
    pub fn run(self) -> Result<(), VmError> {
        ManuallyDrop::new(self).run_until_it_ends()
    }

    fn run_until_it_ends(&mut self) -> Result<(), VmError> {
        const GUEST: u32 = 0;
        const MEMORY: u32 = 1;
        const BALLOON: u32 = 2;
        const CONTROL: u32 = 3;
        let poll = PollContext::new()?;
        poll.add(self.io.exit.event(), GUEST)?;
        if let Some(device) = &self.size.device {
            poll.add(device.progress(), MEMORY)?;
        }
        if let Some(balloon) = &self.size.balloon {
            poll.add(balloon.progress(), BALLOON)?;
        }
        self.control.register(&poll, CONTROL)?;
        let vcpus = mem::take(&mut self.vcpus);
        let role = if self.saver.is_some() { ThreadRole::Saver } else { ThreadRole::Control };
        let vcpu = if self.pci.is_some() { ThreadRole::PciVcpu } else { ThreadRole::Vcpu };
        let running = ManuallyDrop::new(VcpuThreads::start(vcpus, &self.io, vcpu, role)?);
        // The reader may have closed its end.
        let _ = writeln!(io::stdout(), "{RUNNING}");
        loop {
            let tokens: Vec<u32> = poll.wait()?.iter().map(|event| event.token()).collect();
            for token in tokens {
                match token {
                    GUEST => {
                        if let Some(exit) = self.io.exit.take() {
                            return self.guest_ended(exit);
                        }
                    }
                    MEMORY | BALLOON => self.report_memory(),
                    CONTROL => self.control.accept(&poll),
                    client => self.control.receive(client),
                }
            }
            while let Some(command) = self.control.next_command() {
                match command {
                    Command::Stop => return Ok(()),
                    Command::Save => {
                        self.vcpus = ManuallyDrop::into_inner(running).stop();
                        return self.save();
                    }
                    Command::Resize { client, memory_mib } => self.resize(client, memory_mib),
                    Command::Counts { client } => self.count(client),
                    Command::DeviceCounts { client } => {
                        let counts = self.device_counts();
                        self.control.device_counts(client, counts);
                    }
                    Command::AttachNic { client, mac } => self.attach_nic(client, mac),
                    Command::AttachBlock { client, disk } => self.attach_block(client, &disk),
                    Command::DetachBlock { client, serial } => {
                        let detached = self.slots.detach_block(&serial);
                        self.answer(client, detached);
                    }
                    Command::CloseUnmounted => self.shares.iter().for_each(|share| share.close_unmounted()),
                }
            }
        }
    }

    /// Prints what the guest has said before it ended.
    fn guest_ended(&self, exit: GuestExit) -> Result<(), VmError> {
        for line in self.last_words.lines() {
            // If stderr is closed, nobody reads it.
            let _ = writeln!(io::stderr(), "{GUEST_SAYS}{line}");
        }
        match exit {
            GuestExit::Reset => Ok(()),
            exit => Err(VmError::Guest(exit)),
        }
    }

    fn resize(&mut self, client: u32, memory_mib: u32) {
        match self.size.request(&self.fd, memory_mib) {
            Ok(()) => self.control.memory_is(self.size.present_mib(), self.size.requested_mib),
            Err(error) => self.control.refuse(client, one_line(&error)),
        }
    }

    /// Tells a client what the guest has requested of the shares.
    fn count(&mut self, client: u32) {
        let counts =
            |share: &ShareControl| ShareCounts { tag: share.tag().to_owned(), requests: share.requests() };
        let shares = self.shares.iter().map(counts).collect();
        self.control.counts(client, shares);
    }

    fn device_counts(&self) -> DeviceCounts {
        let MemorySize { balloon, device, .. } = &self.size;
        DeviceCounts {
            balloon_bytes: balloon.as_ref().map(BalloonControl::inflated),
            reported_bytes: balloon.as_ref().map(BalloonControl::reported),
            plugged_bytes: device.as_ref().map(MemControl::plugged),
            block: Some(self.slots.block_counts()),
            vsock_received_bytes: Some(self.sockets.received()),
            vsock_sent_bytes: Some(self.sockets.sent()),
        }
    }

    fn attach_nic(&mut self, client: u32, mac: [u8; 6]) {
        let Some(queues) = self.control.take_files(client) else { return };
        let (came, wanted) = (queues.len(), self.slots.queues());
        if came != wanted {
            let message =
                format!("a network device of this VM has {wanted} queues of a tap, and {came} came");
            return self.control.refuse(client, message);
        }
        match Tap::new(queues) {
            Ok(tap) => {
                let device = Net::new(tap, mac, &self.slots.net);
                let attached = self.slots.attach_nic(device);
                self.answer(client, attached);
            }
            Err(error) => self.control.refuse(client, format!("the network device has no tap: {error}")),
        }
    }

    fn attach_block(&mut self, client: u32, disk: &DiskRequest) {
        let Some(file) = self.control.take_files(client).and_then(|mut files| files.pop()) else { return };
        let DiskRequest { serial, read_only, discards } = disk;
        match Block::open(file, serial, *read_only, *discards, &self.slots.block) {
            Ok(device) => {
                let attached = self.slots.attach_block(device, serial);
                self.answer(client, attached);
            }
            Err(error) => self.control.refuse(client, one_line(&error)),
        }
    }

    fn answer(&mut self, client: u32, done: Result<(), PlugError>) {
        match done {
            Ok(()) => self.control.done(client),
            Err(error) => self.control.refuse(client, one_line(&error)),
        }
    }

    /// Tells the clients that wait for memory how much the guest has now.
    fn report_memory(&mut self) {
        // This clears the events. Their counters have no meaning.
        if let Some(device) = &self.size.device {
            let _ = device.progress().read();
        }
        if let Some(balloon) = &self.size.balloon {
            let _ = balloon.progress().read();
        }
        self.control.memory_is(self.size.present_mib(), self.size.requested_mib);
    }

    /// Saves the VM, whose vCPUs have stopped. The control socket accepts this command only if there is a saver.
    fn save(&mut self) -> Result<(), VmError> {
        let Some(saver) = self.saver.take() else { return Ok(()) };
        let stopped = StoppedVm {
            vcpus: &self.vcpus,
            fd: &self.fd,
            memory: &self.memory,
            devices: &self.devices,
            pci: self.pci.as_deref(),
        };
        Ok(saver.save(&stopped)?)
    }
}
