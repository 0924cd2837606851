//! The threads that serve all devices of a kind, whose devices have several queues. Thread N serves queue N of each
//! device, or its pair N of queues. So a queue that is slow delays no other queue of its device.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

pub(super) use super::shared_thread::Waker;
use super::{
    device_threads::STOP_TIMEOUT,
    shared_thread::{ActiveDevice, SharedThread},
};
use crate::jail::ThreadError;

/// The threads. Clones are the same.
pub struct QueueThreads<D> {
    threads: Arc<[SharedThread<D>]>,
    /// How long a change of what they serve may take.
    timeout: Duration,
}

impl<D> Clone for QueueThreads<D> {
    fn clone(&self) -> Self {
        Self { threads: self.threads.clone(), timeout: self.timeout }
    }
}

#[allow(private_bounds, reason = "the kinds of devices are known here, and nobody else adds one")]
impl<D: ActiveDevice> QueueThreads<D> {
    /// Starts `count` threads, at least one. They wait for the first device in the jail of their role.
    pub fn start(count: usize) -> Result<Self, ThreadError> {
        Self::start_with(count, STOP_TIMEOUT)
    }

    fn start_with(count: usize, timeout: Duration) -> Result<Self, ThreadError> {
        let threads = (0..count.max(1)).map(|_| SharedThread::start());
        Ok(Self { threads: threads.collect::<Result<Vec<_>, _>>()?.into(), timeout })
    }

    /// How many there are, which is the most queues, or pairs of queues, that a device can have.
    pub fn count(&self) -> usize {
        self.threads.len()
    }

    /// Those of all threads but the first.
    pub(super) fn wakers(&self) -> Vec<Waker> {
        self.threads.iter().skip(1).map(SharedThread::waker).collect()
    }

    /// The id of a new device, which is its own in each thread.
    pub(super) fn register(&self) -> u32 {
        self.threads.first().map_or(0, SharedThread::register)
    }

    /// Serves a device from now on, in the place of what was active with this id. `parts` are its queues by the numbers
    /// of their threads. None: the driver does not use that queue. After an error none of them is served.
    pub(super) fn activate(&self, id: u32, parts: Vec<Option<D>>) -> io::Result<()> {
        let mut parts = parts.into_iter();
        let activated = self.change(id, || parts.next().flatten());
        if activated.is_err() {
            self.threads.iter().for_each(|thread| {
                thread.begin(id, None);
            });
        }
        activated
    }

    /// Serves a device no longer. `TimedOut` means that a thread is stuck in a request, perhaps of this device. It
    /// serves this device no longer when it goes on.
    pub(super) fn deactivate(&self, id: u32) -> io::Result<()> {
        self.change(id, || None)
    }

    /// Tells all threads first, and then waits for them together.
    fn change(&self, id: u32, mut part: impl FnMut() -> Option<D>) -> io::Result<()> {
        let deadline = Instant::now() + self.timeout;
        let begun: Vec<_> = self.threads.iter().map(|thread| (thread, thread.begin(id, part()))).collect();
        let waited = begun.into_iter().map(|(thread, change)| thread.wait(change, deadline));
        // All are waited for, even after an error.
        let waited: Vec<io::Result<()>> = waited.collect();
        waited.into_iter().collect()
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

    use vmm_sys_util::{
        epoll::EventSet,
        eventfd::{EFD_NONBLOCK, EventFd},
    };

    use super::{super::shared_thread::Service, *};
    use crate::{
        jail::ThreadRole,
        rate_limited_log::RateLimitedLog,
        virtio::{
            Interrupt,
            event_loop::{EventError, Events},
        },
    };

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
        let thread = QueueThreads::start(1).unwrap();
        let counts = [0; 2].map(|_| Arc::new(AtomicU32::new(0)));
        let [first, second] = [0; 2].map(|_| thread.register());
        let fake = Fake::new(&counts[0]);
        let kick = fake.kick.try_clone().unwrap();
        thread.activate(first, vec![Some(fake)]).unwrap();
        wait_until(|| counts[0].load(Ordering::SeqCst) > 0);
        thread.activate(second, vec![Some(Fake::new(&counts[1]))]).unwrap();
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
        let thread = QueueThreads::start_with(1, Duration::from_millis(20)).unwrap();
        let counts = [0; 3].map(|_| Arc::new(AtomicU32::new(0)));
        let [stuck, second, third] = [0; 3].map(|_| thread.register());
        let (fake, open) = Fake::stuck(&counts[0]);
        thread.activate(stuck, vec![Some(fake)]).unwrap();
        wait_until(|| counts[0].load(Ordering::SeqCst) > 0);
        // The driver of the second one gives up, and that of the third one tries again.
        let timed_out = |done: io::Result<()>| done.unwrap_err().kind() == io::ErrorKind::TimedOut;
        assert!(timed_out(thread.activate(second, vec![Some(Fake::new(&counts[1]))])));
        assert!(timed_out(thread.activate(third, vec![Some(Fake::new(&counts[2]))])));
        // One that was never active is not waited for.
        thread.deactivate(thread.register()).unwrap();
        drop(open);
        thread.activate(third, vec![Some(Fake::new(&counts[2]))]).unwrap();
        wait_until(|| counts[2].load(Ordering::SeqCst) > 0);
        assert_eq!(counts[1].load(Ordering::SeqCst), 0, "its driver was told that it is not active");
    }

    #[test]
    fn one_that_was_to_stop_while_it_was_stuck_is_served_no_longer() {
        let thread = QueueThreads::start_with(1, Duration::from_millis(20)).unwrap();
        let count = Arc::new(AtomicU32::new(0));
        let (fake, open) = Fake::stuck(&count);
        let kick = fake.kick.try_clone().unwrap();
        let id = thread.register();
        thread.activate(id, vec![Some(fake)]).unwrap();
        wait_until(|| count.load(Ordering::SeqCst) > 0);
        assert_eq!(thread.deactivate(id).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(open);
        // This waits until the change was applied.
        thread.activate(thread.register(), vec![Some(Fake::new(&Arc::default()))]).unwrap();
        let before = count.load(Ordering::SeqCst);
        kick.write(1).unwrap();
        thread.activate(thread.register(), vec![Some(Fake::new(&Arc::default()))]).unwrap();
        assert_eq!(count.load(Ordering::SeqCst), before);
    }

    #[test]
    fn a_queue_that_is_stuck_stops_neither_its_device_nor_another_one() {
        let threads = QueueThreads::start_with(3, Duration::from_millis(200)).unwrap();
        let counts = [0; 3].map(|_| Arc::new(AtomicU32::new(0)));
        let (fake, open) = Fake::stuck(&counts[0]);
        let (second, third) = (Fake::new(&counts[1]), Fake::new(&counts[2]));
        let kick = third.kick.try_clone().unwrap();
        let device = threads.register();
        // The driver does not use the last queue of its device.
        threads.activate(device, vec![Some(fake), Some(second), None]).unwrap();
        wait_until(|| counts.iter().take(2).all(|count| count.load(Ordering::SeqCst) > 0));
        let other = threads.register();
        assert_eq!(
            threads.activate(other, vec![None, None, Some(third)]).map_err(|error| error.kind()),
            Ok(()),
            "nothing of it is in the thread that is stuck"
        );
        wait_until(|| counts[2].load(Ordering::SeqCst) > 0);
        let before = counts[2].load(Ordering::SeqCst);
        kick.write(1).unwrap();
        wait_until(|| counts[2].load(Ordering::SeqCst) > before);
        // The queue that is not stuck stops, although the device as a whole does not.
        assert_eq!(threads.deactivate(device).unwrap_err().kind(), io::ErrorKind::TimedOut);
        threads.deactivate(other).unwrap();
        let [_, second, third] = counts.each_ref().map(Arc::strong_count);
        assert_eq!((second, third), (1, 1), "they are gone");
        drop(open);
        threads.deactivate(device).unwrap();
    }
}
