//! Waits for all children of the agent: the processes of containers, and orphans, which process 1 inherits.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};

use crate::syscall;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// 0..=255, or 128 + the signal that killed it.
    pub status: u32,
    /// Guest's wall clock, nanoseconds since 1970.
    pub at_unix_ns: i64,
}

/// Becomes `Some` when the process has ended.
pub type ExitReceiver = watch::Receiver<Option<Exit>>;

/// Reaps children, and reports the ends of those that were asked for.
#[derive(Default)]
pub struct Reaper {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    watched: HashMap<i32, watch::Sender<Option<Exit>>>,
    /// Number of [`Expectation`]s that exist.
    expected: usize,
    /// Children that ended while there was an [`Expectation`]: one of them may be the child that is expected.
    early: HashMap<i32, Exit>,
}

impl Reaper {
    /// Call this before another process makes a child whose end is to be reported. The ends of all children are kept
    /// until [`Expectation::claim`] names it.
    pub fn expect(self: &Arc<Self>) -> Expectation {
        self.lock().expected += 1;
        Expectation { reaper: Arc::clone(self) }
    }

    /// Reaps for ever.
    pub async fn run(self: Arc<Self>) -> io::Result<Infallible> {
        let mut children: Signal = signal(SignalKind::child())?;
        loop {
            self.reap()?;
            // Signals merge: one may stand for many children.
            if children.recv().await.is_none() {
                return Err(io::Error::other("no more signals"));
            }
        }
    }

    /// Reaps all that have ended.
    fn reap(&self) -> io::Result<()> {
        while let Some((pid, status)) = syscall::reap_one()? {
            let exit = Exit { status, at_unix_ns: unix_ns() };
            let mut state = self.lock();
            match state.watched.remove(&pid) {
                // No receiver is left if the container was deleted meanwhile.
                Some(sender) => drop(sender.send(Some(exit))),
                None if state.expected > 0 => drop(state.early.insert(pid, exit)),
                None => {}
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// While this exists, the reaper keeps the ends of all children, since it is not known which one is expected.
pub struct Expectation {
    reaper: Arc<Reaper>,
}

impl Expectation {
    /// Kills a child that was made since [`Reaper::expect`], if it has not ended.
    pub fn kill(&self, pid: i32) {
        let state = self.reaper.lock();
        // Until the child is reaped no other process can have its id, and the ends of all children are kept.
        if !state.early.contains_key(&pid)
            && let Err(error) = syscall::kill(pid, libc::SIGKILL as u32)
        {
            eprintln!("bulkhead-agent: killing process {pid}: {error}");
        }
    }

    /// Names the child that was expected.
    pub fn claim(self, pid: i32) -> ExitReceiver {
        let (sender, receiver) = watch::channel(None);
        let mut state = self.reaper.lock();
        match state.early.remove(&pid) {
            Some(exit) => drop(sender.send(Some(exit))),
            None => drop(state.watched.insert(pid, sender)),
        }
        receiver
    }
}

impl Drop for Expectation {
    fn drop(&mut self) {
        let mut state = self.reaper.lock();
        state.expected -= 1;
        if state.expected == 0 {
            state.early.clear();
        }
    }
}

fn unix_ns() -> i64 {
    // Before StartSandbox has set the clock it may show any time.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(status: u32) -> Exit {
        Exit { status, at_unix_ns: 0 }
    }

    #[test]
    fn a_child_that_ends_before_its_claim_is_not_lost() {
        let reaper = Arc::new(Reaper::default());
        let expectation = reaper.expect();
        reaper.lock().early.insert(5, exit(3));
        let claimed = expectation.claim(5);
        assert_eq!(*claimed.borrow(), Some(exit(3)));
        assert_eq!(reaper.lock().expected, 0);
    }

    #[test]
    fn orphans_are_forgotten_when_nothing_is_expected_any_more() {
        let reaper = Arc::new(Reaper::default());
        let (first, second) = (reaper.expect(), reaper.expect());
        reaper.lock().early.insert(7, exit(0));
        drop(first);
        assert_eq!(reaper.lock().early.len(), 1);
        drop(second);
        assert!(reaper.lock().early.is_empty());
    }
}
