//! The thread that serves an active device.

use std::{io, thread};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

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

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };

    use vmm_sys_util::poll::PollContext;

    use super::*;

    #[test]
    fn dropping_a_worker_stops_and_joins_it() {
        let ended = Arc::new(AtomicBool::new(false));
        let seen = ended.clone();
        let worker = Worker::spawn("test", move |stop| {
            let poll = PollContext::<u32>::new().unwrap();
            poll.add(&stop, 0).unwrap();
            poll.wait().unwrap();
            seen.store(true, Ordering::SeqCst);
        })
        .unwrap();
        drop(worker);
        assert!(ended.load(Ordering::SeqCst));
    }
}
