//! A VM that is built: runs until its guest, an operator or a signal ends it.

use std::{
    io::{self, Write},
    mem::{self, ManuallyDrop},
    sync::Arc,
};

use bulkhead_vmm_api::{BLOCK_MIB, RUNNING};
use kvm_ioctls::{VcpuFd, VmFd};
use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use vmm_sys_util::poll::PollContext;

use crate::{
    GuestMemory,
    control::{Command, ControlError, ControlServer},
    jail::Duty,
    memory::{MemoryError, Slots},
    one_line,
    snapshot::{SaveError, Saver, Stopped},
    vcpu::{GuestExit, Machine, StartError, VcpuThreads},
    virtio::{mem::MemControl, mmio::MmioTransport},
};

/// Why a VM did not run, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    #[error("cannot wait for signals")]
    Signals(#[source] nix::Error),
    #[error("cannot wait for the VM's end")]
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

/// SIGTERM and SIGINT, which end the VM as [`bulkhead_vmm_api::ControlRequest::Stop`] does.
pub struct StopSignals(SignalFd);

impl StopSignals {
    /// Blocks the signals in this thread, and in those that it starts from now on: to be called before there
    /// are any.
    pub fn take_over() -> Result<Self, VmError> {
        let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
        signals.thread_block().map_err(VmError::Signals)?;
        SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
            .map(Self)
            .map_err(VmError::Signals)
    }
}

/// How a VM's memory grows, if it can.
pub struct Growth {
    /// MiB that it was built with.
    pub memory_mib: u32,
    /// KVM's side.
    pub slots: Slots,
    /// The guest's side. None: it has the most that it can have.
    pub device: Option<MemControl>,
}

impl Growth {
    /// MiB that the guest has.
    fn present_mib(&self) -> u32 {
        let plugged = self.device.as_ref().map_or(0, MemControl::plugged);
        self.memory_mib.saturating_add((plugged >> 20) as u32)
    }

    /// Has the guest have `memory_mib` at least, in its own time.
    fn begin(&mut self, vm: &VmFd, memory_mib: u32) -> Result<(), GrowError> {
        let Some(device) = &self.device else { return Ok(()) };
        let blocks = memory_mib.saturating_sub(self.memory_mib).div_ceil(BLOCK_MIB);
        let bytes = u64::from(blocks) * (u64::from(BLOCK_MIB) << 20);
        self.slots.grow(vm, bytes)?;
        device.request(bytes).map_err(GrowError::Tell)
    }
}

/// Why a VM's memory cannot grow.
#[derive(Debug, thiserror::Error)]
enum GrowError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("cannot tell the guest")]
    Tell(#[source] io::Error),
}

/// All that a VM consists of. The fields of one that does not run are dropped in this order: who uses comes before what is
/// used.
pub struct Vm {
    /// In the order of their ids from 0, ready to run.
    pub vcpus: Vec<VcpuFd>,
    /// The devices.
    pub machine: Machine,
    /// Those of the devices that are virtio's, in the order of their places.
    pub devices: Vec<Arc<MmioTransport>>,
    /// How it gets more memory.
    pub growth: Growth,
    /// Where it can be saved.
    pub saver: Option<Saver>,
    /// The operator's socket.
    pub control: ControlServer,
    /// KVM's side of it.
    pub fd: VmFd,
    /// KVM maps it into the guest as long as `fd` and `vcpus` are open: it is the last that goes.
    pub memory: GuestMemory,
}

impl Vm {
    /// Runs the VM until it ends. Ok when the guest powered off, or was stopped, or saved.
    ///
    /// Its threads run on, and its memory stays: the process is to end now, and they end with it. A device's thread may wait
    /// for a file system of the host that does not answer, and a vCPU's for that thread, so that nothing here waits for
    /// either. What they have written is with the kernel already, and nobody else holds what they have not.
    pub fn run(self, signals: &StopSignals) -> Result<(), VmError> {
        ManuallyDrop::new(self).run_until_it_ends(signals)
    }

    fn run_until_it_ends(&mut self, signals: &StopSignals) -> Result<(), VmError> {
        const GUEST: u32 = 0;
        const SIGNAL: u32 = 1;
        const MEMORY: u32 = 2;
        const CONTROL: u32 = 3;
        let poll = PollContext::new()?;
        poll.add(self.machine.exit.event(), GUEST)?;
        poll.add(&signals.0, SIGNAL)?;
        if let Some(device) = &self.growth.device {
            poll.add(device.progress(), MEMORY)?;
        }
        self.control.register(&poll, CONTROL)?;
        let vcpus = mem::take(&mut self.vcpus);
        let duty = if self.saver.is_some() { Duty::Saver } else { Duty::Control };
        let running = ManuallyDrop::new(VcpuThreads::start(vcpus, &self.machine, duty)?);
        // Nobody may be there to hear it.
        let _ = writeln!(io::stdout(), "{RUNNING}");
        loop {
            let tokens: Vec<u32> = poll.wait()?.iter().map(|event| event.token()).collect();
            for token in tokens {
                match token {
                    GUEST => match self.machine.exit.take() {
                        Some(GuestExit::PowerOff) => return Ok(()),
                        Some(exit) => return Err(VmError::Guest(exit)),
                        None => {}
                    },
                    SIGNAL => return Ok(()),
                    MEMORY => self.tell_of_memory(),
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
                    Command::Grow { client, memory_mib } => self.grow(client, memory_mib),
                }
            }
        }
    }

    fn grow(&mut self, client: u32, memory_mib: u32) {
        match self.growth.begin(&self.fd, memory_mib) {
            Ok(()) => self.control.memory_is(self.growth.present_mib()),
            Err(error) => self.control.refuse(client, one_line(&error)),
        }
    }

    fn tell_of_memory(&mut self) {
        if let Some(device) = &self.growth.device {
            // To have it readable again is all that the counter is for.
            let _ = device.progress().read();
        }
        self.control.memory_is(self.growth.present_mib());
    }

    /// Saves the VM, which has stopped, if it has a place to be saved to.
    fn save(&mut self) -> Result<(), VmError> {
        let Some(saver) = self.saver.take() else { return Ok(()) };
        let stopped =
            Stopped { vcpus: &self.vcpus, fd: &self.fd, memory: &self.memory, devices: &self.devices };
        Ok(saver.save(&stopped)?)
    }
}
