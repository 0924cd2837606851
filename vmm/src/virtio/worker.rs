//! The thread that serves an active device, and what it waits for.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    thread,
};

use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

/// A thread that ends when its owner drops it.
pub struct Worker {
    stop: EventFd,
    thread: Option<thread::JoinHandle<()>>,
}

impl Worker {
    /// Starts `body` in a thread called `name` (at most 15 bytes are shown by the kernel). `body` gets an
    /// event that becomes readable, and stays so, when it has to return; it waits for it along with its
    /// queues' kicks.
    pub fn spawn(name: &str, body: impl FnOnce(EventFd) + Send + 'static) -> io::Result<Self> {
        let stop = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        let seen = stop.try_clone()?;
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || body(seen))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The counter of an eventfd that is written once cannot be full, so this cannot fail.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // A worker that panicked has said so on stderr already.
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
        atomic::{AtomicBool, Ordering},
    };

    use super::*;

    #[test]
    fn dropping_a_worker_stops_and_joins_it() {
        let ended = Arc::new(AtomicBool::new(false));
        let seen = ended.clone();
        let worker = Worker::spawn("test", move |stop| {
            let mut came = no_events();
            assert!(Events::new(&stop).unwrap().wait(false, &mut came).unwrap().is_none());
            seen.store(true, Ordering::SeqCst);
        })
        .unwrap();
        drop(worker);
        assert!(ended.load(Ordering::SeqCst));
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
