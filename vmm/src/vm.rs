//! A VM that is built: runs until its guest, an operator or a signal ends it, and then takes it apart.

use std::{
    io::{self, Write},
    sync::Arc,
};

use bulkhead_vmm_api::RUNNING;
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
    snapshot::{SaveError, Saver, Stopped},
    vcpu::{GuestExit, Machine, StartError, VcpuThreads},
    virtio::mmio::MmioTransport,
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

/// All that a VM consists of. The fields are dropped in this order: who uses comes before what is used.
pub struct Vm {
    /// In the order of their ids from 0, ready to run.
    pub vcpus: Vec<VcpuFd>,
    /// The devices; the last reference to them, once the vCPUs' threads are joined, so that dropping it ends
    /// their workers.
    pub machine: Machine,
    /// Those of the devices that are virtio's, in the order of their places.
    pub devices: Vec<Arc<MmioTransport>>,
    /// Where it can be saved.
    pub saver: Option<Saver>,
    /// The operator's socket.
    pub control: ControlServer,
    /// KVM's side of it.
    pub fd: VmFd,
    /// KVM maps it into the guest as long as `fd` and `vcpus` are open.
    pub memory: GuestMemory,
}

impl Vm {
    /// Runs the VM until it ends. Ok when the guest powered off, or was stopped, or saved.
    pub fn run(mut self, signals: &StopSignals) -> Result<(), VmError> {
        const GUEST: u32 = 0;
        const SIGNAL: u32 = 1;
        const CONTROL: u32 = 2;
        let poll = PollContext::new()?;
        poll.add(self.machine.exit.event(), GUEST)?;
        poll.add(&signals.0, SIGNAL)?;
        self.control.register(&poll, CONTROL)?;
        let vcpus = std::mem::take(&mut self.vcpus);
        let duty = if self.saver.is_some() { Duty::Saver } else { Duty::Control };
        let running = VcpuThreads::start(vcpus, &self.machine, duty)?;
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
                    CONTROL => self.control.accept(&poll),
                    client => match self.control.serve(client) {
                        Some(Command::Stop) => return Ok(()),
                        Some(Command::Save) => {
                            self.vcpus = running.stop();
                            return self.save();
                        }
                        None => {}
                    },
                }
            }
        }
    }

    /// Saves the VM, which has stopped, if it has a place to be saved to.
    fn save(self) -> Result<(), VmError> {
        let Some(saver) = self.saver else { return Ok(()) };
        let stopped =
            Stopped { vcpus: &self.vcpus, fd: &self.fd, memory: &self.memory, devices: &self.devices };
        Ok(saver.save(&stopped)?)
    }
}
