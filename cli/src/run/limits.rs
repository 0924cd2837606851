//! What ends a run before its program runs: a signal, or the deadline of --timeout.

use std::{
    os::fd::OwnedFd,
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::{Instant, sleep_until, timeout};

use crate::{
    process::signals::{Signals, interrupted},
    run::error::RunError,
};

/// How long a program of the host may take to end by itself, and once more after it was killed.
const SETTLE: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 5000 });

/// When the time of --timeout is over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    pub(super) at: Instant,
    pub(super) after: Duration,
}

impl Deadline {
    /// Counts from the beginning of this command. None: so far away that it does not come.
    pub(super) fn new(begun: std::time::Instant, after: Duration) -> Option<Self> {
        Some(Self { at: Instant::from_std(begun.checked_add(after)?), after })
    }
}

/// Each wait before the program runs is one of these.
pub(super) struct Limits {
    pub(super) signals: Signals,
    pub(super) deadline: Option<Deadline>,
}

impl Limits {
    /// Waits for the work, a signal or the deadline. The work is dropped if it is not the first.
    pub(super) async fn wait<T>(&mut self, work: impl Future<Output = T>) -> Result<T, RunError> {
        tokio::select! {
            biased;
            came = self.signals.next() => Err(interrupted(came.signal).into()),
            error = late(self.deadline) => Err(error),
            done = work => Ok(done),
        }
    }

    /// [`wait`](Self::wait) for work in a thread, which starts the `helper`, a program of the host. What it has done is
    /// undone afterwards. So it is not dropped while the program runs: that gets some time, and is then killed. The
    /// error comes with the result of the work, if there is one.
    pub(super) async fn wait_for<T>(
        &mut self,
        helper: &Helper,
        work: impl Future<Output = T>,
    ) -> Result<T, (RunError, Option<T>)> {
        let mut work = pin!(work);
        let error = match self.wait(&mut work).await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        if let Ok(done) = timeout(SETTLE, &mut work).await {
            return Err((error, Some(done)));
        }
        helper.kill();
        Err((error, timeout(SETTLE, work).await.ok()))
    }
}

async fn late(deadline: Option<Deadline>) -> RunError {
    match deadline {
        Some(Deadline { at, after }) => {
            sleep_until(at).await;
            RunError::Late { after }
        }
        None => std::future::pending().await,
    }
}

/// A program of the host that a thread starts and waits for.
#[derive(Debug, Clone, Default)]
pub(super) struct Helper(Arc<HelperState>);

#[derive(Debug, Default)]
struct HelperState {
    process: OnceLock<OwnedFd>,
    /// It may not have been started yet.
    is_killed: AtomicBool,
}

impl Helper {
    /// It has been started, and nobody has waited for it yet.
    pub(super) fn begin(&self, pid: u32) {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        // Without a descriptor it ends at its own limit.
        if let Some(process) = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) {
            _ = self.0.process.set(process);
        }
        if self.0.is_killed.load(Ordering::SeqCst) {
            self.signal();
        }
    }

    fn kill(&self) {
        self.0.is_killed.store(true, Ordering::SeqCst);
        self.signal();
    }

    fn signal(&self) {
        if let Some(process) = self.0.process.get() {
            // An error: it has ended.
            _ = pidfd_send_signal(process, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::command_output;

    fn limits(after: Duration) -> Limits {
        let deadline = Deadline::new(std::time::Instant::now(), after);
        Limits { signals: Signals::of_test().1, deadline }
    }

    #[tokio::test]
    async fn what_takes_longer_than_the_time_that_is_left_is_late() {
        let mut limits = limits(Duration::from_millis(20));
        assert_eq!(limits.wait(async { 7 }).await.unwrap(), 7);
        let error = limits.wait(std::future::pending::<()>()).await.unwrap_err();
        assert_eq!((error.status(), error.to_string().contains("20ms")), (124, true), "{error}");
        // Nothing begins after that.
        assert!(limits.wait(async { 7 }).await.is_err());
    }

    #[tokio::test]
    async fn a_program_of_the_host_that_does_not_end_is_killed() {
        let mut limits = limits(Duration::from_millis(20));
        let run = |seconds: &'static str| {
            let helper = Helper::default();
            let its = helper.clone();
            let mut command = Command::new("sleep");
            command.arg(seconds);
            let limit = Duration::from_secs(600);
            let work = move || {
                command_output::answer_and_tell(command, &[], limit, move |pid| its.begin(pid))
                    .map_err(|error| error.to_string())
            };
            (helper, tokio::task::spawn_blocking(work))
        };
        let (helper, work) = run("600");
        let (error, done) = limits.wait_for(&helper, work).await.unwrap_err();
        assert_eq!(error.status(), 124);
        // The kill was its end.
        let killed = done.unwrap().unwrap().unwrap_err();
        assert!(killed.contains("signal: 9"), "{killed}");
        // One that begins after that is killed too.
        let (helper, late) = (Helper::default(), Command::new("sleep").arg("600").spawn());
        helper.kill();
        let mut late = late.unwrap();
        helper.begin(late.id());
        assert!(!late.wait().unwrap().success());
        // One that ends soon is not killed.
        let (helper, work) = run("0.02");
        let (_, done) = limits.wait_for(&helper, work).await.unwrap_err();
        assert_eq!(done.unwrap().unwrap(), Ok(String::new()));
    }
}
