//! The thread that serves an active device.

use std::{
    io,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::Duration,
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::jail::{self, ThreadError, ThreadRole};

/// Serves an active device until its argument, the stop event, is signalled. The event stays signalled.
pub type Job = Box<dyn FnOnce(&EventFd) + Send>;

/// How long [`DeviceThread::stop`] waits. A job checks its stop event between two requests, but a request may wait for a
/// file system of the host that does not respond.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A thread that serves a device while the device is active. It ends when this value is dropped.
///
/// The thread is started before the guest runs. Later it could not be: the driver activates its device on the thread of a
/// vCPU, whose jail forbids starting threads.
pub struct DeviceThread {
    stop: EventFd,
    /// Some until this is dropped.
    jobs: Option<Sender<Job>>,
    done: Receiver<()>,
    busy: bool,
    timeout: Duration,
    thread: Option<JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts the thread. It waits for its first job in the jail of its role.
    pub fn spawn(role: ThreadRole) -> Result<Self, ThreadError> {
        let name = role.name().to_owned();
        let start = |source| ThreadError::Start { name: name.clone(), source };
        let stop = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(start)?;
        let stop_of_jobs = stop.try_clone().map_err(start)?;
        let (jobs, queued) = channel::<Job>();
        let (finished, done) = channel();
        let body = move || {
            for job in queued {
                job(&stop_of_jobs);
                // An error means that the owner has dropped its end.
                if finished.send(()).is_err() {
                    return;
                }
            }
        };
        let thread = jail::spawn(name, role, body)?;
        let jobs = Some(jobs);
        Ok(Self { stop, jobs, done, busy: false, timeout: STOP_TIMEOUT, thread: Some(thread) })
    }

    /// Stops the current job, if there is one, and starts `job`.
    pub fn start(&mut self, job: Job) -> io::Result<()> {
        self.stop()?;
        let jobs = self.jobs.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        jobs.send(job).map_err(|_| io::ErrorKind::NotConnected)?;
        self.busy = true;
        Ok(())
    }

    /// Stops the current job, if there is one, and waits until it has ended. `TimedOut` means that the job is stuck in a
    /// request. It then ends after that request, if ever.
    pub fn stop(&mut self) -> io::Result<()> {
        if self.busy {
            // Fails only if the counter of the eventfd is full, and then the event is signalled already.
            let _ = self.stop.write(1);
            if self.done.recv_timeout(self.timeout) == Err(RecvTimeoutError::Timeout) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // A disconnected channel means that the job panicked, which has printed a message.
            let _ = self.stop.read();
            self.busy = false;
        }
        Ok(())
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        let stopped = self.stop();
        self.jobs = None;
        if let (Some(thread), Ok(())) = (self.thread.take(), stopped) {
            // An error means that a job panicked, which has printed a message.
            let _ = thread.join();
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
        let mut worker = DeviceThread::spawn(ThreadRole::Rng).unwrap();
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
        let mut worker = DeviceThread::spawn(ThreadRole::Rng).unwrap();
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
        let mut worker = DeviceThread::spawn(ThreadRole::Rng).unwrap();
        worker.timeout = Duration::from_millis(1);
        worker.start(Box::new(move |_| stuck.recv().unwrap())).unwrap();
        assert_eq!(worker.stop().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(worker.start(job(&ended)).unwrap_err().kind(), io::ErrorKind::TimedOut);
        go_on.send(()).unwrap();
        worker.timeout = STOP_TIMEOUT;
        worker.start(job(&ended)).unwrap();
        worker.stop().unwrap();
        assert_eq!(ended.load(Ordering::SeqCst), 1);
        // Dropping it does not wait longer either.
        let (go_on, stuck) = channel::<()>();
        worker.timeout = Duration::from_millis(1);
        worker.start(Box::new(move |_| assert!(stuck.recv().is_err()))).unwrap();
        drop(worker);
        drop(go_on);
    }
}
