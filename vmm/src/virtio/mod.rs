//! Virtio devices over MMIO (virtio 1.3, section 4.2).
//!
//! A device is a value that the transport owns, with a worker, a thread in a jail of its own. Once the driver sets
//! DRIVER_OK the transport hands the device its queues in an [`Activation`]; the device makes a job of them, which the
//! worker does until the driver resets the device, or it is dropped. Guest memory is hostile: copy a structure once,
//! validate the copy, never panic; an illegal act of the driver ends in [`Interrupt::needs_reset`].

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use serde::{Deserialize, Serialize};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use self::worker::Job;
use crate::{GuestMemory, guest_log::GuestLog, jail::Duty};

pub mod balloon;
pub mod chain;
mod common;
pub mod fs;
#[allow(unsafe_code)]
mod iovecs;
pub mod mem;
pub mod mmio;
pub mod net;
pub mod queue;
pub mod rng;
#[cfg(test)]
mod testing;
pub mod vsock;
pub mod worker;

/// A device behind the MMIO transport.
pub trait VirtioDevice: Send {
    /// What its worker does, and what it needs to.
    fn duty(&self) -> Duty;

    /// Device type (virtio 1.3, section 5), e.g. 1 for a network card.
    fn device_type(&self) -> u32;

    /// Feature bits offered, without VIRTIO_F_VERSION_1, which the transport adds.
    fn features(&self) -> u64;

    /// The largest size of each queue, powers of two, the same at every call.
    fn queue_sizes(&self) -> &[u16];

    /// Reads device configuration space at `offset`; bytes beyond its end are left as they are, which is
    /// zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Changes with what [`VirtioDevice::read_config`] reads, unless the driver itself has changed it (virtio 1.3, 2.5).
    fn config_generation(&self) -> u32 {
        0
    }

    /// Takes the queues, and says how they are served. An error sets DEVICE_NEEDS_RESET. Called by the thread of a vCPU:
    /// whatever asks for more than memory is the job's. The job must end soon when it is told to, since a vCPU waits for
    /// it: it must not wait for the guest. When it has ended, the device can be activated again.
    fn activate(&mut self, activation: Activation) -> io::Result<Job>;
}

/// What a device gets when its driver is ready.
pub struct Activation {
    /// The guest's memory.
    pub memory: GuestMemory,
    /// One for each of [`VirtioDevice::queue_sizes`]; a queue that the driver left out is not `ready()`.
    pub queues: Vec<ActiveQueue>,
    /// Feature bits that the driver accepted.
    pub features: u64,
    /// How the device speaks to its driver.
    pub interrupt: Arc<Interrupt>,
    /// Where the device says what its driver did wrong; the same one after every reset.
    pub log: Arc<GuestLog>,
}

/// A queue and the event that its driver kicks. Its methods (see [`queue`]) take and return chains.
pub struct ActiveQueue {
    /// The queue, as the driver configured it; validated by the transport, which has also turned on
    /// VIRTIO_F_RING_EVENT_IDX in it when that was negotiated.
    pub queue: Queue,
    /// Signalled (ioeventfd) when the driver made buffers available.
    pub kick: EventFd,
}

/// Bit 0 of InterruptStatus: used buffers (virtio 1.3, 4.2.2).
pub const INTERRUPT_USED: u32 = 1;
/// Bit 1 of InterruptStatus: configuration or status changed.
pub const INTERRUPT_CONFIG: u32 = 2;

/// The device's interrupt line, shared between the transport and the device's worker.
pub struct Interrupt {
    line: EventFd,
    status: AtomicU32,
    needs_reset: AtomicBool,
}

/// What the driver was told and has not acknowledged.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InterruptState {
    status: u32,
    needs_reset: bool,
}

impl Interrupt {
    /// `line` is registered with KVM as an irqfd.
    pub fn new(line: EventFd) -> Self {
        Self { line, status: AtomicU32::new(0), needs_reset: AtomicBool::new(false) }
    }

    /// Tells the driver that buffers were used.
    pub fn used(&self) -> io::Result<()> {
        self.raise(INTERRUPT_USED)
    }

    /// Tells the driver that the device's configuration is another.
    pub fn config_changed(&self) -> io::Result<()> {
        self.raise(INTERRUPT_CONFIG)
    }

    /// Declares the device broken by its driver: DEVICE_NEEDS_RESET and a configuration interrupt (virtio
    /// 1.3, 2.1.2).
    pub fn needs_reset(&self) -> io::Result<()> {
        self.mark_broken();
        self.raise(INTERRUPT_CONFIG)
    }

    /// Sets DEVICE_NEEDS_RESET without telling, for a driver that may not be interrupted yet.
    fn mark_broken(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
    }

    /// Whether DEVICE_NEEDS_RESET is set.
    pub fn is_reset_needed(&self) -> bool {
        self.needs_reset.load(Ordering::SeqCst)
    }

    /// Value of the InterruptStatus register.
    pub fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }

    /// Write to the InterruptACK register.
    pub fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::SeqCst);
    }

    /// Forgets all, when the driver resets the device.
    pub fn clear(&self) {
        self.status.store(0, Ordering::SeqCst);
        self.needs_reset.store(false, Ordering::SeqCst);
    }

    /// What [`Interrupt::restore`] takes.
    fn save(&self) -> InterruptState {
        InterruptState { status: self.status(), needs_reset: self.is_reset_needed() }
    }

    /// Makes it what it was, and interrupts the driver once more if it had not acknowledged all: whether the last interrupt
    /// had arrived when it was saved is not known, and one too many does no harm.
    fn restore(&self, saved: InterruptState) -> io::Result<()> {
        let InterruptState { status, needs_reset } = saved;
        self.status.store(status, Ordering::SeqCst);
        self.needs_reset.store(needs_reset, Ordering::SeqCst);
        if status == 0 { Ok(()) } else { self.line.write(1) }
    }

    fn raise(&self, bit: u32) -> io::Result<()> {
        self.status.fetch_or(bit, Ordering::SeqCst);
        self.line.write(1)
    }
}
