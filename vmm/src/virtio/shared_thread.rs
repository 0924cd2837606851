//! A thread that serves all devices of a kind.
//!
//! A device that is attached while the VM runs cannot have a thread of its own: the jail forbids starting one. So the
//! thread is told of each change: a device that it is to serve from now on, or no longer. Then it rebuilds its epoll
//! set for all devices. Meanwhile the requests wait in the queues.

use std::{
    error::Error,
    io, mem,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    Interrupt,
    device::conclude,
    device_threads::{DeviceThreads, STOP_TIMEOUT},
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
pub(super) const SOURCES: u64 = 3;

/// The thread. Clones are the same.
pub struct SharedThread<D>(Arc<Owner<D>>);

impl<D> Clone for SharedThread<D> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Ends the thread when it is dropped.
struct Owner<D> {
    /// Dropped first: waits for the thread, which [`Owner::drop`] has told to end.
    _threads: Mutex<DeviceThreads>,
    shared: Arc<Shared<D>>,
    timeout: Duration,
}

/// What the thread and those who tell it something have together.
struct Shared<D> {
    changes: Mutex<Changes<D>>,
    /// Signalled after a change was added.
    changed: EventFd,
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

#[allow(private_bounds, reason = "the kinds of devices are known here, and nobody else adds one")]
impl<D: ActiveDevice> SharedThread<D> {
    /// Starts the thread, which waits for the first device in the jail of its role.
    pub fn start() -> Result<Self, ThreadError> {
        Self::start_with(STOP_TIMEOUT)
    }

    fn start_with(timeout: Duration) -> Result<Self, ThreadError> {
        let failed = |source| ThreadError::Start { name: D::ROLE.name().to_owned(), source };
        let changed = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(failed)?;
        let changes =
            Changes { waiting: Vec::new(), known: Vec::new(), made: 0, done: 0, next: 0, is_ended: false };
        let shared = Arc::new(Shared { changes: Mutex::new(changes), changed, applied: Condvar::new() });
        let mut threads = DeviceThreads::spawn(D::ROLE, 1)?;
        let of_thread = shared.clone();
        threads.start(vec![Box::new(move |_| of_thread.serve())]).map_err(failed)?;
        Ok(Self(Arc::new(Owner { _threads: Mutex::new(threads), shared, timeout })))
    }

    /// The id of a new device.
    pub(super) fn register(&self) -> u32 {
        let mut changes = lock(&self.0.shared.changes);
        changes.next += 1;
        changes.next
    }

    /// Serves a device from now on, in the place of what was active with this id. After an error it is not served.
    pub(super) fn activate(&self, id: u32, device: D) -> io::Result<()> {
        let activated = self.0.change(id, Some(device));
        if activated.is_err() {
            self.0.shared.add(id, None);
        }
        activated
    }

    /// Serves a device no longer. `TimedOut` means that the thread is stuck in a request, perhaps of this device. It
    /// serves this device no longer when it goes on.
    pub(super) fn deactivate(&self, id: u32) -> io::Result<()> {
        if !lock(&self.0.shared.changes).known.contains(&id) {
            return Ok(());
        }
        self.0.change(id, None)
    }
}

impl<D> Owner<D> {
    /// Tells the thread of a change, and waits until it has applied it.
    fn change(&self, id: u32, device: Option<D>) -> io::Result<()> {
        let shared = &self.shared;
        let number = shared.add(id, device);
        let is_waiting = |changes: &mut Changes<D>| changes.done < number && !changes.is_ended;
        let waited = shared.applied.wait_timeout_while(lock(&shared.changes), self.timeout, is_waiting);
        let (changes, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match changes.done {
            done if done >= number => Ok(()),
            _ if changes.is_ended => Err(io::Error::other("the thread of the device has ended")),
            _ => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl<D> Drop for Owner<D> {
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

#[cfg(test)]
mod tests {
    use std::{
        os::fd::AsRawFd,
        sync::{
            atomic::{AtomicU32, Ordering},
            mpsc::{Receiver, Sender, channel},
        },
    };

    use super::*;

    /// A device that counts how often it was served, and is stuck then until its gate opens, if it has one.
    struct Fake {
        kick: EventFd,
        served: Arc<AtomicU32>,
        gate: Option<Receiver<()>>,
        interrupt: Interrupt,
        log: RateLimitedLog,
    }

    impl Fake {
        fn new(served: &Arc<AtomicU32>) -> Self {
            let event = || EventFd::new(EFD_NONBLOCK).unwrap();
            let (kick, interrupt) = (event(), Interrupt::new(event()));
            Self { kick, served: served.clone(), gate: None, interrupt, log: RateLimitedLog::default() }
        }

        /// One that is stuck when it is served, until something is sent.
        fn stuck(served: &Arc<AtomicU32>) -> (Self, Sender<()>) {
            let (open, gate) = channel();
            (Self { gate: Some(gate), ..Self::new(served) }, open)
        }
    }

    impl ActiveDevice for Fake {
        const NAME: &'static str = "fake";
        const ROLE: ThreadRole = ThreadRole::Rng;
        type Service<'d> = &'d mut Fake;

        fn watch(&self, events: &Events, token: impl Fn(u64) -> u64) -> Result<(), EventError> {
            events.watch(self.kick.as_raw_fd(), EventSet::IN, token(0))
        }

        fn begin(&mut self) -> &mut Fake {
            self
        }

        fn reporting(&self) -> (&Interrupt, &RateLimitedLog) {
            (&self.interrupt, &self.log)
        }
    }

    impl Service for &mut Fake {
        type Error = EventError;

        fn on_event(&mut self, _source: u64, _events: EventSet) {}

        fn serve_queues(&mut self) -> Result<bool, EventError> {
            self.served.fetch_add(1, Ordering::SeqCst);
            if let Some(gate) = &self.gate {
                let _ = gate.recv();
            }
            Ok(false)
        }

        fn reporting(&self) -> (&Interrupt, &RateLimitedLog) {
            (&self.interrupt, &self.log)
        }

        fn end(self) {}
    }

    fn wait_until(is_so: impl Fn() -> bool) {
        while !is_so() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_device_is_served_until_it_is_stopped() {
        let thread = SharedThread::start().unwrap();
        let counts = [0; 2].map(|_| Arc::new(AtomicU32::new(0)));
        let [first, second] = [0; 2].map(|_| thread.register());
        let fake = Fake::new(&counts[0]);
        let kick = fake.kick.try_clone().unwrap();
        thread.activate(first, fake).unwrap();
        wait_until(|| counts[0].load(Ordering::SeqCst) > 0);
        thread.activate(second, Fake::new(&counts[1])).unwrap();
        wait_until(|| counts[1].load(Ordering::SeqCst) > 0);
        thread.deactivate(first).unwrap();
        let before = counts[0].load(Ordering::SeqCst);
        kick.write(1).unwrap();
        thread.deactivate(second).unwrap();
        assert_eq!(counts[0].load(Ordering::SeqCst), before);
        thread.deactivate(first).unwrap();
    }

    #[test]
    fn a_device_that_is_stuck_for_long_does_not_stop_the_others_for_ever() {
        let thread = SharedThread::start_with(Duration::from_millis(20)).unwrap();
        let counts = [0; 3].map(|_| Arc::new(AtomicU32::new(0)));
        let [stuck, second, third] = [0; 3].map(|_| thread.register());
        let (fake, open) = Fake::stuck(&counts[0]);
        thread.activate(stuck, fake).unwrap();
        wait_until(|| counts[0].load(Ordering::SeqCst) > 0);
        // The driver of the second one gives up, and that of the third one tries again.
        let timed_out = |done: io::Result<()>| done.unwrap_err().kind() == io::ErrorKind::TimedOut;
        assert!(timed_out(thread.activate(second, Fake::new(&counts[1]))));
        assert!(timed_out(thread.activate(third, Fake::new(&counts[2]))));
        // One that was never active is not waited for.
        thread.deactivate(thread.register()).unwrap();
        drop(open);
        thread.activate(third, Fake::new(&counts[2])).unwrap();
        wait_until(|| counts[2].load(Ordering::SeqCst) > 0);
        assert_eq!(counts[1].load(Ordering::SeqCst), 0, "its driver was told that it is not active");
    }

    #[test]
    fn one_that_was_to_stop_while_it_was_stuck_is_served_no_longer() {
        let thread = SharedThread::start_with(Duration::from_millis(20)).unwrap();
        let count = Arc::new(AtomicU32::new(0));
        let (fake, open) = Fake::stuck(&count);
        let kick = fake.kick.try_clone().unwrap();
        let id = thread.register();
        thread.activate(id, fake).unwrap();
        wait_until(|| count.load(Ordering::SeqCst) > 0);
        assert_eq!(thread.deactivate(id).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(open);
        // This waits until the change was applied.
        thread.activate(thread.register(), Fake::new(&Arc::default())).unwrap();
        let before = count.load(Ordering::SeqCst);
        kick.write(1).unwrap();
        thread.activate(thread.register(), Fake::new(&Arc::default())).unwrap();
        assert_eq!(count.load(Ordering::SeqCst), before);
    }
}
