//! What a virtio device provides to its transport, and what it gets when its driver activates it.

use std::{error::Error, io, sync::Arc};

use vmm_sys_util::eventfd::EventFd;

use super::{device_threads::Job, interrupt::Interrupt, queue::ActiveQueue};
use crate::{GuestMemory, jail::ThreadRole, one_line, rate_limited_log::RateLimitedLog};

/// A virtio device.
pub trait VirtioDevice: Send {
    /// The role of the threads that serve the device.
    fn thread_role(&self) -> ThreadRole;

    /// How many threads serve the device. None: it shares one with others.
    fn threads(&self) -> usize {
        1
    }

    /// The device ID (virtio 1.3, section 5), for example 1 for a network device.
    fn device_type(&self) -> u32;

    /// The feature bits that the device offers. The transport adds VIRTIO_F_VERSION_1.
    fn features(&self) -> u64;

    /// The maximum size of each queue. Each is a power of two, and all calls return the same.
    fn queue_sizes(&self) -> &[u16];

    /// Reads the device configuration space at `offset`. `data` is filled with zeros; the device leaves bytes beyond
    /// the end of its configuration unchanged.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// The configuration generation (virtio 1.3, 2.5). It changes when the configuration does, unless the driver itself
    /// caused the change.
    fn config_generation(&self) -> u32 {
        0
    }

    /// Takes the queues and returns the jobs that serve them, at most one for each of [`VirtioDevice::threads`]. An
    /// error sets DEVICE_NEEDS_RESET.
    ///
    /// The thread of a vCPU calls this, so it must make no system call that the filter of that thread refuses. A job
    /// must end soon after its stop event is signalled, because a vCPU waits for that: it must not wait for the guest.
    /// After all jobs have ended, the device can be activated again.
    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>>;

    /// What the driver has set since it has activated the device, and not by registers, for
    /// [`VirtioDevice::set_driver_state`]. Queues in guest memory do not say it.
    fn driver_state(&self) -> u16 {
        0
    }

    /// Sets that of a saved device, before this one is activated in its place. An error: no driver can have set it.
    fn set_driver_state(&mut self, state: u16) -> io::Result<()> {
        if state == 0 { Ok(()) } else { Err(io::Error::other("it has no such state")) }
    }

    /// Stops what [`VirtioDevice::activate`] has started besides the jobs that it returned. It may be called before the
    /// device is activated. `TimedOut` means that the device is still served.
    fn deactivate(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a device gets when its driver has set DRIVER_OK.
pub struct Activation {
    /// The guest's memory.
    pub memory: GuestMemory,
    /// One for each of [`VirtioDevice::queue_sizes`]. A queue that the driver did not enable is not `ready()`.
    pub queues: Vec<ActiveQueue>,
    /// The feature bits that the driver accepted.
    pub features: u64,
    /// How the device notifies its driver.
    pub interrupt: Arc<Interrupt>,
    /// The log for illegal acts of the driver. A device has the same log after every reset.
    pub log: Arc<RateLimitedLog>,
}

/// Ends the job of `device`. If `served` is an error, logs it in one line and sets DEVICE_NEEDS_RESET.
pub(super) fn conclude(
    device: &str,
    served: Result<(), impl Error + 'static>,
    interrupt: &Interrupt,
    log: &RateLimitedLog,
) {
    let Err(error) = served else { return };
    log.say(&format!("{device}: stopped until its driver resets it: {}", one_line(&error)));
    // The eventfd belongs to the VMM. If the write fails, there is no other way to reach the driver.
    let _ = interrupt.needs_reset();
}

/// Makes the job that runs `serve`, which gets the interrupt and the stop event, and handles its error.
pub(super) fn job<E: Error + 'static>(
    device: &'static str,
    interrupt: Arc<Interrupt>,
    log: Arc<RateLimitedLog>,
    serve: impl FnOnce(&Interrupt, &EventFd) -> Result<(), E> + Send + 'static,
) -> Job {
    Box::new(move |stop| conclude(device, serve(&interrupt, stop), &interrupt, &log))
}
