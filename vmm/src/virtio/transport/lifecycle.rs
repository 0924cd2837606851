//! The lifecycle of a device behind a transport: it is activated, stopped and activated again.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use virtio_queue::QueueT;
use vmm_sys_util::eventfd::EventFd;

use super::registers::{Registers, VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1};
use crate::{
    GuestMemory,
    jail::ThreadError,
    rate_limited_log::RateLimitedLog,
    virtio::{Activation, ActiveQueue, Interrupt, VirtioDevice, device_threads::DeviceThreads},
};

/// The position in its queues at which a device starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueuePosition {
    /// The beginning: the driver has just set the queues up.
    Start,
    /// After the last used chain, as the used ring in guest memory says.
    AfterUsed,
}

/// A device and the threads that serve it.
pub(super) struct Lifecycle {
    /// Dropped before the device that it serves.
    threads: DeviceThreads,
    pub(super) device: Box<dyn VirtioDevice>,
    pub(super) memory: GuestMemory,
    interrupt: Arc<Interrupt>,
    log: Arc<RateLimitedLog>,
}

impl Lifecycle {
    /// Starts the threads of `device`.
    pub(super) fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        interrupt: Arc<Interrupt>,
    ) -> Result<Self, ThreadError> {
        let threads = DeviceThreads::spawn(device.thread_role(), device.threads())?;
        Ok(Self { threads, device, memory, interrupt, log: Arc::default() })
    }

    /// The features that the device offers.
    pub(super) fn features(&self) -> u64 {
        self.device.features() | VIRTIO_F_VERSION_1
    }

    /// Activates the device with the queues that the driver has configured in `registers`.
    pub(super) fn activate(
        &mut self,
        registers: &Registers,
        kicks: &[EventFd],
        position: QueuePosition,
    ) -> io::Result<()> {
        let activation = self.activation(registers, kicks, position)?;
        let jobs = self.device.activate(activation)?;
        self.threads.start(jobs)
    }

    fn activation(
        &self,
        registers: &Registers,
        kicks: &[EventFd],
        position: QueuePosition,
    ) -> io::Result<Activation> {
        let features = registers.driver_features();
        let mut queues = Vec::with_capacity(registers.queues().len());
        for (index, (registers, kick)) in registers.queues().iter().zip(kicks).enumerate() {
            let mut queue = registers.queue(&self.memory).map_err(io::Error::other)?;
            queue.set_event_idx(features & VIRTIO_F_EVENT_IDX != 0);
            if position == QueuePosition::AfterUsed && queue.ready() {
                // A device with one thread uses chains in the order in which the driver made them available. So the
                // chains that it had taken but not used when it was stopped come next again. For others see
                // `check_idle`.
                let used = queue.used_idx(&self.memory, Ordering::Acquire).map_err(io::Error::other)?.0;
                queue.set_next_avail(used);
                queue.set_next_used(used);
            }
            queues.push(ActiveQueue { queue, kick: kick.try_clone()?, index });
        }
        Ok(Activation {
            memory: self.memory.clone(),
            queues,
            features,
            interrupt: self.interrupt.clone(),
            log: self.log.clone(),
        })
    }

    /// Stops the device. See [`DeviceThreads::stop`] for the error.
    pub(super) fn stop(&mut self) -> io::Result<()> {
        self.device.deactivate()?;
        self.threads.stop()
    }

    /// Returns an error if the device, which has stopped, cannot continue after the last used chain: several threads
    /// use chains in any order, and there are chains that were not used.
    pub(super) fn check_idle(&self, registers: &Registers) -> io::Result<()> {
        if self.device.threads() <= 1 {
            return Ok(());
        }
        for registers in registers.queues() {
            let queue = registers.queue(&self.memory).map_err(io::Error::other)?;
            if !queue.ready() {
                continue;
            }
            let available = queue.avail_idx(&self.memory, Ordering::Acquire).map_err(io::Error::other)?;
            let used = queue.used_idx(&self.memory, Ordering::Acquire).map_err(io::Error::other)?;
            if available != used {
                return Err(io::Error::other("a request was not handled yet"));
            }
        }
        Ok(())
    }
}
