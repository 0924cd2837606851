//! The thread that serves an active device, and what it waits for.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::Duration,
};

use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

use crate::jail::{self, Duty, ThreadError};

/// What serves an active device, until the event that it is given becomes readable, which stays so. It waits for it
/// along with its queues' kicks.
pub type Job = Box<dyn FnOnce(&EventFd) + Send>;

/// How long whoever stops a device waits for it. A job looks at its stop event between any two requests, but the request
/// that it is at may be to a file system of the host that answers nothing.
const PATIENCE: Duration = Duration::from_secs(5);

/// A thread that serves a device whenever it is active, and ends when its owner drops it. There before the guest runs,
/// because the thread of a vCPU, on which a driver activates its device, may start none, and has nothing to give to one.
pub struct Worker {
    stop: EventFd,
    /// Some until the worker is dropped.
    jobs: Option<Sender<Job>>,
    done: Receiver<()>,
    busy: bool,
    patience: Duration,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread; it waits for its first job in the jail of its duty.
    pub fn spawn(duty: Duty) -> Result<Self, ThreadError> {
        let name = duty.name().to_owned();
        let start = |source| ThreadError::Start { name: name.clone(), source };
        let stop = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(start)?;
        let seen = stop.try_clone().map_err(start)?;
        let (jobs, to_do) = channel::<Job>();
        let (finished, done) = channel();
        let body = move || {
            for job in to_do {
                job(&seen);
                // Its owner waits for this word, or has gone.
                if finished.send(()).is_err() {
                    return;
                }
            }
        };
        let thread = jail::spawn(name, duty, body)?;
        Ok(Self { stop, jobs: Some(jobs), done, busy: false, patience: PATIENCE, thread: Some(thread) })
    }

    /// Has the thread do `job`, after the one that it does, if any, has ended.
    pub fn start(&mut self, job: Job) -> io::Result<()> {
        self.stop()?;
        let jobs = self.jobs.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        jobs.send(job).map_err(|_| io::ErrorKind::NotConnected)?;
        self.busy = true;
        Ok(())
    }

    /// Ends the job and waits until it has ended. Does nothing without one. `TimedOut`: it is stuck in a request, and
    /// ends after that, if ever.
    pub fn stop(&mut self) -> io::Result<()> {
        if self.busy {
            // The counter of an eventfd that is written a few times cannot be full, so this cannot fail.
            let _ = self.stop.write(1);
            if self.done.recv_timeout(self.patience) == Err(RecvTimeoutError::Timeout) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // If it did not say so, it panicked, and has said that on stderr already.
            let _ = self.stop.read();
            self.busy = false;
        }
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let stopped = self.stop();
        self.jobs = None;
        if let (Some(thread), Ok(())) = (self.thread.take(), stopped) {
            // As above.
            let _ = thread.join();
        }
    }
}

/// Token of the stop event; the others are the device's own.
const TOKEN_STOP: u64 = u64::MAX;
/// Place for the events that are taken at once.
pub type Came = [EpollEvent; 64];

/// An empty place.
pub fn no_events() -> Came {
    [EpollEvent::default(); 64]
}

/// What a worker waits for: its stop event, and descriptors under tokens of the device.
pub struct Events(Epoll);

impl Events {
    /// Waits for `stop` alone.
    pub fn new(stop: &EventFd) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        epoll.ctl(ControlOperation::Add, stop.as_raw_fd(), EpollEvent::new(EventSet::IN, TOKEN_STOP))?;
        Ok(Self(epoll))
    }

    /// Waits for `events` of `fd` too, until it is closed. Edge-triggered: an event comes once, and a kick need not be
    /// taken for that.
    pub fn watch(&self, fd: RawFd, events: EventSet, token: u64) -> io::Result<()> {
        let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, token);
        self.0.ctl(ControlOperation::Add, fd, event)
    }

    /// Waits, unless `busy`, and returns what came, by token; None when the worker has to return.
    pub fn wait<'c>(
        &self,
        busy: bool,
        came: &'c mut Came,
    ) -> io::Result<Option<impl Iterator<Item = (u64, EventSet)> + use<'c>>> {
        let count = loop {
            match self.0.wait(if busy { 0 } else { -1 }, came) {
                Ok(count) => break count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        };
        let came = &came[..count];
        if came.iter().any(|event| event.data() == TOKEN_STOP) {
            return Ok(None);
        }
        Ok(Some(came.iter().map(|event| (event.data(), EventSet::from_bits_truncate(event.events())))))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    use super::*;

    /// A job that says when it has ended.
    fn job(ended: &Arc<AtomicU32>) -> Job {
        let ended = ended.clone();
        Box::new(move |stop| {
            let mut came = no_events();
            assert!(Events::new(stop).unwrap().wait(false, &mut came).unwrap().is_none());
            ended.fetch_add(1, Ordering::SeqCst);
        })
    }

    #[test]
    fn a_job_ends_when_it_is_stopped_and_another_can_be_done() {
        let ended = Arc::new(AtomicU32::new(0));
        let mut worker = Worker::spawn(Duty::Rng).unwrap();
        worker.stop().unwrap();
        for count in 1..=2 {
            worker.start(job(&ended)).unwrap();
            worker.stop().unwrap();
            assert_eq!(ended.load(Ordering::SeqCst), count);
        }
        worker.start(job(&ended)).unwrap();
        drop(worker);
        assert_eq!(ended.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_job_that_ended_by_itself_does_not_stop_the_next() {
        let ended = Arc::new(AtomicU32::new(0));
        let mut worker = Worker::spawn(Duty::Rng).unwrap();
        worker.start(Box::new(|_| {})).unwrap();
        worker.start(job(&ended)).unwrap();
        assert_eq!(ended.load(Ordering::SeqCst), 0);
        worker.stop().unwrap();
        assert_eq!(ended.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn nobody_waits_for_long_for_a_job_that_is_stuck() {
        let (go_on, stuck) = channel::<()>();
        let ended = Arc::new(AtomicU32::new(0));
        let mut worker = Worker::spawn(Duty::Rng).unwrap();
        worker.patience = Duration::from_millis(1);
        worker.start(Box::new(move |_| stuck.recv().unwrap())).unwrap();
        assert_eq!(worker.stop().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(worker.start(job(&ended)).unwrap_err().kind(), io::ErrorKind::TimedOut);
        go_on.send(()).unwrap();
        worker.patience = PATIENCE;
        worker.start(job(&ended)).unwrap();
        worker.stop().unwrap();
        assert_eq!(ended.load(Ordering::SeqCst), 1);
        // Nor does whoever drops it.
        let (go_on, stuck) = channel::<()>();
        worker.patience = Duration::from_millis(1);
        worker.start(Box::new(move |_| assert!(stuck.recv().is_err()))).unwrap();
        drop(worker);
        drop(go_on);
    }

    #[test]
    fn an_event_comes_once() {
        let stop = EventFd::new(EFD_NONBLOCK).unwrap();
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let events = Events::new(&stop).unwrap();
        let mut buffer = no_events();
        events.watch(kick.as_raw_fd(), EventSet::IN, 7).unwrap();
        kick.write(1).unwrap();
        let came: Vec<_> = events.wait(false, &mut buffer).unwrap().unwrap().collect();
        assert_eq!(came, [(7, EventSet::IN)]);
        assert_eq!(events.wait(true, &mut buffer).unwrap().unwrap().count(), 0);
    }
}
