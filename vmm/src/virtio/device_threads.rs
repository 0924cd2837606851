//! The threads that serve an active device. Most devices have one.

use std::{
    io,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::jail::{self, StartedThread, ThreadError, ThreadRole};

/// Serves an active device until its argument, the stop event, is signalled. The event stays signalled.
pub type Job = Box<dyn FnOnce(&EventFd) + Send>;

/// How long [`DeviceThreads::stop`] waits. A job checks its stop event between two requests, but a request may wait
/// for a file system of the host that does not respond.
pub(super) const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Threads that serve a device while the device is active. They end when this value is dropped.
///
/// The threads are started before the guest runs. Later they could not be: the driver activates its device on the
/// thread of a vCPU, whose jail forbids starting threads.
pub struct DeviceThreads {
    stop: EventFd,
    threads: Vec<DeviceThread>,
    done: Receiver<()>,
    /// Jobs that have not ended.
    running: usize,
    timeout: Duration,
}

struct DeviceThread {
    jobs: Sender<Job>,
    handle: JoinHandle<()>,
}

impl DeviceThreads {
    /// Starts `count` threads. They wait for their first jobs in the jail of their role.
    pub fn spawn(role: ThreadRole, count: usize) -> Result<Self, ThreadError> {
        let name = role.name().to_owned();
        let failed = |source| ThreadError::Start { name: name.clone(), source };
        let stop = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(failed)?;
        let (finished, done) = channel();
        let mut started = Vec::with_capacity(count);
        for _ in 0..count {
            let (stop, finished) = (stop.try_clone().map_err(failed)?, finished.clone());
            let (jobs, queued) = channel::<Job>();
            let body = move || {
                for job in queued {
                    job(&stop);
                    // An error means that the owner has dropped its end.
                    if finished.send(()).is_err() {
                        return;
                    }
                }
            };
            started.push((jobs, jail::start(name.clone(), role, body)?));
        }
        let wait = |(jobs, thread): (_, StartedThread)| Ok(DeviceThread { jobs, handle: thread.wait()? });
        let threads = started.into_iter().map(wait).collect::<Result<_, ThreadError>>()?;
        Ok(Self { stop, threads, done, running: 0, timeout: STOP_TIMEOUT })
    }

    /// Stops the current jobs, if there are any, and starts `jobs`, one in each thread.
    pub fn start(&mut self, jobs: Vec<Job>) -> io::Result<()> {
        self.stop()?;
        if jobs.len() > self.threads.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (thread, job) in self.threads.iter().zip(jobs) {
            thread.jobs.send(job).map_err(|_| io::ErrorKind::NotConnected)?;
            self.running += 1;
        }
        Ok(())
    }

    /// Stops the current jobs, if there are any, and waits until they have ended. `TimedOut` means that a job is
    /// stuck in a request. It then ends after that request, if ever.
    pub fn stop(&mut self) -> io::Result<()> {
        if self.running == 0 {
            return Ok(());
        }
        // Fails only if the counter of the eventfd is full, and then the event is signalled already.
        let _ = self.stop.write(1);
        let deadline = Instant::now() + self.timeout;
        while self.running > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.done.recv_timeout(left) {
                Ok(()) => self.running -= 1,
                Err(RecvTimeoutError::Timeout) => return Err(io::ErrorKind::TimedOut.into()),
                // All threads have panicked, which has printed messages.
                Err(RecvTimeoutError::Disconnected) => self.running = 0,
            }
        }
        let _ = self.stop.read();
        Ok(())
    }
}

impl Drop for DeviceThreads {
    fn drop(&mut self) {
        let stopped = self.stop();
        for DeviceThread { jobs, handle } in self.threads.drain(..) {
            drop(jobs);
            if stopped.is_ok() {
                // An error means that a job panicked, which has printed a message.
                let _ = handle.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
        thread,
    };

    use super::*;

    /// A job that counts up `ended` when it ends.
    fn job(ended: &Arc<AtomicU32>) -> Job {
        let ended = ended.clone();
        Box::new(move |stop| {
            while stop.read().is_err() {
                thread::yield_now();
            }
            // Like the real jobs, it leaves the event signalled.
            stop.write(1).unwrap();
            ended.fetch_add(1, Ordering::SeqCst);
        })
    }

    #[test]
    fn a_job_ends_when_it_is_stopped_and_another_can_be_done() {
        let ended = Arc::new(AtomicU32::new(0));
        let mut worker = DeviceThreads::spawn(ThreadRole::Rng, 1).unwrap();
        worker.stop().unwrap();
        for count in 1..=2 {
            worker.start(vec![job(&ended)]).unwrap();
            worker.stop().unwrap();
            assert_eq!(ended.load(Ordering::SeqCst), count);
        }
        worker.start(vec![job(&ended)]).unwrap();
        drop(worker);
        assert_eq!(ended.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_job_that_ended_by_itself_does_not_stop_the_next() {
        let ended = Arc::new(AtomicU32::new(0));
        let mut worker = DeviceThreads::spawn(ThreadRole::Rng, 1).unwrap();
        worker.start(vec![Box::new(|_| {})]).unwrap();
        worker.start(vec![job(&ended)]).unwrap();
        assert_eq!(ended.load(Ordering::SeqCst), 0);
        worker.stop().unwrap();
        assert_eq!(ended.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn nobody_waits_for_long_for_a_job_that_is_stuck() {
        let (go_on, stuck) = channel::<()>();
        let ended = Arc::new(AtomicU32::new(0));
        let mut worker = DeviceThreads::spawn(ThreadRole::Rng, 1).unwrap();
        worker.timeout = Duration::from_millis(1);
        worker.start(vec![Box::new(move |_| stuck.recv().unwrap())]).unwrap();
        assert_eq!(worker.stop().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(worker.start(vec![job(&ended)]).unwrap_err().kind(), io::ErrorKind::TimedOut);
        go_on.send(()).unwrap();
        worker.timeout = STOP_TIMEOUT;
        worker.start(vec![job(&ended)]).unwrap();
        worker.stop().unwrap();
        assert_eq!(ended.load(Ordering::SeqCst), 1);
        // Dropping it does not wait longer either.
        let (go_on, stuck) = channel::<()>();
        worker.timeout = Duration::from_millis(1);
        worker.start(vec![Box::new(move |_| assert!(stuck.recv().is_err()))]).unwrap();
        drop(worker);
        drop(go_on);
    }

    #[test]
    fn all_threads_are_stopped_together() {
        let ended = Arc::new(AtomicU32::new(0));
        let mut threads = DeviceThreads::spawn(ThreadRole::Fs, 3).unwrap();
        for count in 1..=2 {
            threads.start((0..3).map(|_| job(&ended)).collect()).unwrap();
            threads.stop().unwrap();
            assert_eq!(ended.load(Ordering::SeqCst), 3 * count);
        }
        // A job that is stuck does not prevent the others from ending. The next jobs wait for it.
        let (go_on, stuck) = channel::<()>();
        threads.timeout = Duration::from_millis(100);
        let stuck: Job = Box::new(move |_| stuck.recv().unwrap());
        threads.start(vec![job(&ended), stuck, job(&ended)]).unwrap();
        assert_eq!(threads.stop().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(ended.load(Ordering::SeqCst), 8);
        assert_eq!(threads.start(vec![job(&ended)]).unwrap_err().kind(), io::ErrorKind::TimedOut);
        go_on.send(()).unwrap();
        threads.timeout = Duration::from_secs(10);
        threads.start(vec![job(&ended)]).unwrap();
        threads.stop().unwrap();
        assert_eq!(ended.load(Ordering::SeqCst), 9);
    }
}
