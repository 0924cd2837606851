//! A thread that serves all devices of a kind.
//!
//! A device that is attached while the VM runs cannot have a thread of its own: the jail forbids starting one. So the
//! job of the thread is stopped and started again whenever a device is activated or stopped. Between two jobs the
//! requests wait in the queues.

use std::{
    error::Error,
    io, mem,
    sync::{Arc, Mutex},
};

use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::{
    Interrupt,
    device::conclude,
    device_threads::DeviceThreads,
    event_loop::{EventError, EventHandler, Events},
};
use crate::{
    jail::{ThreadError, ThreadRole},
    lock,
    rate_limited_log::RateLimitedLog,
};

/// A device that is active.
pub(super) trait ActiveDevice: Send + 'static {
    /// The name of such devices for the log.
    const NAME: &'static str;
    /// The role of their thread.
    const ROLE: ThreadRole;

    /// The device while it is being served.
    type Service<'d>: Service;

    /// Adds the sources of its events. `token` makes a token of the number of a source, which is below [`SOURCES`].
    fn watch(&self, events: &Events, token: impl Fn(u64) -> u64) -> Result<(), EventError>;

    /// Begins to serve the driver.
    fn begin(&mut self) -> Self::Service<'_>;

    /// How it notifies its driver, and its log.
    fn reporting(&self) -> (&Interrupt, &RateLimitedLog);
}

/// A device that is being served.
pub(super) trait Service {
    /// Why it is no longer served.
    type Error: Error + 'static;

    /// An event of the source with this number.
    fn on_event(&mut self, source: u64, events: EventSet);

    /// Serves the queues, but not for long: other devices wait. Returns true if there may be more work for which no
    /// event will arrive.
    fn serve_queues(&mut self) -> Result<bool, Self::Error>;

    /// How the device notifies its driver, and its log.
    fn reporting(&self) -> (&Interrupt, &RateLimitedLog);

    /// Leaves the queues as one that goes on later needs them.
    fn end(self);
}

/// The most sources of events of a device.
pub(super) const SOURCES: u64 = 3;

/// The thread. Clones are the same.
pub struct SharedThread<D>(Arc<Mutex<Shared<D>>>);

impl<D> Clone for SharedThread<D> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Shared<D> {
    threads: DeviceThreads,
    /// The job locks them as long as it runs.
    devices: Arc<Mutex<Vec<Active<D>>>>,
    /// The id of the next device.
    next: u32,
}

struct Active<D> {
    id: u32,
    device: D,
}

#[allow(private_bounds, reason = "the kinds of devices are known here, and nobody else adds one")]
impl<D: ActiveDevice> SharedThread<D> {
    /// Starts the thread, which waits for the first device in the jail of its role.
    pub fn start() -> Result<Self, ThreadError> {
        let threads = DeviceThreads::spawn(D::ROLE, 1)?;
        Ok(Self(Arc::new(Mutex::new(Shared { threads, devices: Arc::default(), next: 0 }))))
    }

    /// The id of a new device.
    pub(super) fn register(&self) -> u32 {
        let mut shared = lock(&self.0);
        shared.next += 1;
        shared.next
    }

    /// Serves a device from now on, in the place of what was active with this id.
    pub(super) fn activate(&self, id: u32, device: D) -> io::Result<()> {
        lock(&self.0).replace(id, Some(device))
    }

    /// Serves a device no longer. An error means that it is not known whether it is still served.
    pub(super) fn deactivate(&self, id: u32) -> io::Result<()> {
        lock(&self.0).replace(id, None)
    }
}

impl<D: ActiveDevice> Shared<D> {
    fn replace(&mut self, id: u32, device: Option<D>) -> io::Result<()> {
        self.threads.stop()?;
        let mut devices = lock(&self.devices);
        devices.retain(|active| active.id != id);
        devices.extend(device.map(|device| Active { id, device }));
        if devices.is_empty() {
            return Ok(());
        }
        drop(devices);
        let devices = self.devices.clone();
        self.threads.start(vec![Box::new(move |stop| serve(&mut lock(&devices), stop))])
    }
}

/// Serves the devices until `stop` is signalled. Those that have failed are not among them afterwards: their drivers
/// have to reset them.
fn serve<D: ActiveDevice>(devices: &mut Vec<Active<D>>, stop: &EventFd) {
    let failed = match serve_until(devices, stop) {
        Ok(failed) => failed,
        Err(error) => {
            let error = Arc::new(error);
            for Active { device, .. } in mem::take(devices) {
                let (interrupt, log) = device.reporting();
                conclude(D::NAME, Err(error.clone()), interrupt, log);
            }
            return;
        }
    };
    let mut failed = failed.into_iter();
    devices.retain(|_| !failed.next().unwrap_or_default());
}

/// Serves the devices until `stop` is signalled, and says which of them have failed.
fn serve_until<D: ActiveDevice>(devices: &mut [Active<D>], stop: &EventFd) -> Result<Vec<bool>, EventError> {
    let events = Events::new(stop)?;
    for (index, Active { device, .. }) in (0..).zip(devices.iter()) {
        device.watch(&events, |source| index * SOURCES + source)?;
    }
    let services = devices.iter_mut().map(|Active { device, .. }| Some(device.begin())).collect();
    let mut all = All { name: D::NAME, services };
    events.run(&mut all)?;
    Ok(all.services.into_iter().map(|service| service.map(Service::end).is_none()).collect())
}

/// The devices by their indices. None: it has failed.
struct All<S> {
    name: &'static str,
    services: Vec<Option<S>>,
}

impl<S: Service> EventHandler for All<S> {
    type Error = EventError;

    fn on_event(&mut self, token: u64, events: EventSet) -> Result<(), EventError> {
        if let Some(Some(service)) = self.services.get_mut((token / SOURCES) as usize) {
            service.on_event(token % SOURCES, events);
        }
        Ok(())
    }

    fn serve_queues(&mut self) -> Result<bool, EventError> {
        let mut busy = false;
        for place in &mut self.services {
            let Some(service) = place else { continue };
            match service.serve_queues() {
                Ok(more) => busy |= more,
                Err(error) => {
                    let (interrupt, log) = service.reporting();
                    conclude(self.name, Err(error), interrupt, log);
                    *place = None;
                }
            }
        }
        Ok(busy)
    }
}
