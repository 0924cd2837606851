//! A thread that serves all devices of a kind, or one of their queues each ([`super::queue_threads`]).
//!
//! A device that is attached while the VM runs cannot have a thread of its own: the jail forbids starting one. So the
//! thread is told of each change: a device that it is to serve from now on, or no longer. Then it rebuilds its epoll
//! set for all devices. Meanwhile the requests wait in the queues.

use std::{
    error::Error,
    io, mem,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Instant,
};

use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

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

    /// Leaves the queues in a state from which a later service can continue.
    fn end(self);
}

/// The most sources of events of a device.
pub(super) const SOURCES: u64 = 4;

/// The thread. It ends when this is dropped.
pub(super) struct SharedThread<D> {
    /// Dropped first: waits for the thread, which [`SharedThread::drop`] has told to end.
    _threads: Mutex<DeviceThreads>,
    shared: Arc<Shared<D>>,
}

/// What the thread and those who tell it something have together.
struct Shared<D> {
    changes: Mutex<Changes<D>>,
    /// Signalled after a change was added, or if the thread is to begin anew.
    changed: Arc<EventFd>,
    /// Notified when the thread has applied changes.
    applied: Condvar,
}

struct Changes<D> {
    /// That the thread has not applied yet, in their order, at most one for each device. None: serve it no longer.
    waiting: Vec<(u32, Option<D>)>,
    /// The ids of the devices that the thread serves, or may serve until it has applied what waits.
    known: Vec<u32>,
    /// How many changes were made, and up to which the thread has applied them.
    made: u64,
    done: u64,
    /// The id of the next device.
    next: u32,
    is_ended: bool,
}

struct Active<D> {
    id: u32,
    device: D,
}

impl<D: ActiveDevice> SharedThread<D> {
    /// Starts the thread, which waits for the first device in the jail of its role.
    pub(super) fn start() -> Result<Self, ThreadError> {
        let failed = |source| ThreadError::Start { name: D::ROLE.name().to_owned(), source };
        let changed = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(failed)?;
        let changes =
            Changes { waiting: Vec::new(), known: Vec::new(), made: 0, done: 0, next: 0, is_ended: false };
        let shared = Arc::new(Shared {
            changes: Mutex::new(changes),
            changed: Arc::new(changed),
            applied: Condvar::new(),
        });
        let mut threads = DeviceThreads::spawn(D::ROLE, 1)?;
        let of_thread = shared.clone();
        threads.start(vec![Box::new(move |_| of_thread.serve())]).map_err(failed)?;
        Ok(Self { _threads: Mutex::new(threads), shared })
    }

    /// The id of a new device.
    pub(super) fn register(&self) -> u32 {
        let mut changes = lock(&self.shared.changes);
        changes.next += 1;
        changes.next
    }

    /// Tells the thread to serve a device from now on, in the place of what was active with this id, or with None to
    /// serve it no longer. Returns the number of the change, for [`SharedThread::wait`]. None: there is nothing to do.
    pub(super) fn begin(&self, id: u32, device: Option<D>) -> Option<u64> {
        let shared = &self.shared;
        if device.is_none() && !lock(&shared.changes).known.contains(&id) {
            return None;
        }
        Some(shared.add(id, device))
    }

    /// Waits until the thread has applied a change, at most until the deadline. `TimedOut` means that the thread is
    /// stuck in a request, perhaps of this device. It applies the change when it goes on.
    pub(super) fn wait(&self, change: Option<u64>, deadline: Instant) -> io::Result<()> {
        let (Some(number), shared) = (change, &self.shared) else { return Ok(()) };
        let is_waiting = |changes: &mut Changes<D>| changes.done < number && !changes.is_ended;
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = shared.applied.wait_timeout_while(lock(&shared.changes), left, is_waiting);
        let (changes, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match changes.done {
            done if done >= number => Ok(()),
            _ if changes.is_ended => Err(io::Error::other("the thread of the device has ended")),
            _ => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Wakes the thread from elsewhere.
    pub(super) fn waker(&self) -> Waker {
        Waker(self.shared.changed.clone())
    }
}

/// Has a thread begin to serve its devices anew, and so look at all of their queues and files.
#[derive(Clone)]
pub(super) struct Waker(Arc<EventFd>);

impl Waker {
    pub(super) fn wake(&self) {
        // Fails only if the counter is full, and then the event is signalled already.
        let _ = self.0.write(1);
    }
}

impl<D> Drop for SharedThread<D> {
    fn drop(&mut self) {
        lock(&self.shared.changes).is_ended = true;
        self.shared.signal();
    }
}

impl<D> Shared<D> {
    /// Adds a change in the place of an earlier one of the same device. Returns its number.
    fn add(&self, id: u32, device: Option<D>) -> u64 {
        let mut changes = lock(&self.changes);
        if device.is_some() && !changes.known.contains(&id) {
            changes.known.push(id);
        }
        changes.waiting.retain(|(other, _)| *other != id);
        changes.waiting.push((id, device));
        changes.made += 1;
        let number = changes.made;
        drop(changes);
        self.signal();
        number
    }

    fn signal(&self) {
        // Fails only if the counter is full, and then the event is signalled already.
        let _ = self.changed.write(1);
    }
}

impl<D: ActiveDevice> Shared<D> {
    /// Serves the devices until there is no owner any more.
    fn serve(&self) {
        let mut devices = Vec::new();
        while self.apply(&mut devices) {
            let failed = match serve_until(&mut devices, &self.changed) {
                Ok(failed) => failed,
                Err(error) => {
                    let error = Arc::new(error);
                    for Active { device, .. } in mem::take(&mut devices) {
                        let (interrupt, log) = device.reporting();
                        conclude(D::NAME, Err(error.clone()), interrupt, log);
                    }
                    // Without events it can serve none that come later either.
                    lock(&self.changes).is_ended = true;
                    self.applied.notify_all();
                    return;
                }
            };
            let mut failed = failed.into_iter();
            // The drivers of those that have failed have to reset them.
            devices.retain(|_| !failed.next().unwrap_or_default());
        }
    }

    /// Applies the changes that were made. Returns false if there is no owner any more.
    fn apply(&self, devices: &mut Vec<Active<D>>) -> bool {
        // A change that is made from here on signals the event again.
        let _ = self.changed.read();
        let mut changes = lock(&self.changes);
        for (id, device) in mem::take(&mut changes.waiting) {
            devices.retain(|active| active.id != id);
            if device.is_none() {
                changes.known.retain(|known| *known != id);
            }
            devices.extend(device.map(|device| Active { id, device }));
        }
        changes.done = changes.made;
        self.applied.notify_all();
        !changes.is_ended
    }
}

/// Serves the devices until `changed` is signalled, and says which of them have failed.
fn serve_until<D: ActiveDevice>(
    devices: &mut [Active<D>],
    changed: &EventFd,
) -> Result<Vec<bool>, EventError> {
    let events = Events::new(changed)?;
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
