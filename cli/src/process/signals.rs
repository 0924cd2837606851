//! The signals that a command passes on to its process.

use std::{fs, io, time::Duration};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc::{Receiver, Sender, channel},
    task::JoinSet,
    time::Instant,
};

use crate::process::error::ProcessError;

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
pub(crate) const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// What a shell adds to the number of the signal that has ended a program.
pub(crate) const SIGNALLED: u8 = 128;

/// The exit status of a program that was killed.
pub(crate) const KILLED: u8 = SIGNALLED | SIGKILL.to_le_bytes()[0];

/// Signals within this time after the first one come from the same event: timeout(1) signals its child and then the
/// group of it, and systemd can send SIGHUP right after SIGTERM. None of them is the second one that kills.
pub(crate) const TOGETHER: Duration = Duration::from_secs(1);

/// How many signals wait until they are asked for. The kernel keeps one more of each kind.
const WAITING: usize = 16;

/// The signals that are passed on to the program, but for those that this command was started to ignore (nohup).
pub(crate) struct Signals {
    came: Receiver<(i32, Instant)>,
    first: Option<Instant>,
    /// Notes when they come, also while this command waits for an answer.
    _watch: JoinSet<()>,
}

/// A signal that has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Came {
    pub(crate) signal: i32,
    pub(crate) event: Event,
}

/// What has sent a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// It is the first signal.
    First,
    /// The event of the first signal.
    Same,
    Another,
}

impl Signals {
    /// From now on, none of them ends this command.
    pub(crate) fn catch() -> Result<Self, ProcessError> {
        // Without this file they are all caught.
        Self::catch_but(ignored(&fs::read_to_string("/proc/self/status").unwrap_or_default()))
    }

    fn catch_but(ignored: u64) -> Result<Self, ProcessError> {
        let caught = Caught::all_but(ignored).map_err(ProcessError::Begin)?;
        let (sender, came) = channel(WAITING);
        let mut watch = JoinSet::new();
        watch.spawn(caught.note(sender));
        Ok(Self { came, first: None, _watch: watch })
    }

    /// The next of them.
    pub(crate) async fn next(&mut self) -> Came {
        let Some((signal, at)) = self.came.recv().await else {
            // Nobody notes them any more.
            return std::future::pending().await;
        };
        let event = match self.first {
            None => Event::First,
            Some(first) if at.saturating_duration_since(first) < TOGETHER => Event::Same,
            Some(_) => Event::Another,
        };
        self.first.get_or_insert(at);
        Came { signal, event }
    }

    /// Takes those that have come and nobody has asked for.
    pub(crate) fn take_waiting(&mut self) {
        while let Ok((_, at)) = self.came.try_recv() {
            self.first.get_or_insert(at);
        }
    }

    /// For tests: signals that a test sends, with the times at which they come.
    #[cfg(test)]
    pub(crate) fn of_test() -> (Sender<(i32, Instant)>, Self) {
        let (sender, came) = channel(WAITING);
        (sender, Self { came, first: None, _watch: JoinSet::new() })
    }
}

/// None: it is ignored.
struct Caught {
    hangup: Option<Signal>,
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
}

impl Caught {
    fn all_but(ignored: u64) -> io::Result<Self> {
        let catch = |number: i32| {
            let is_ignored = ignored >> (number - 1) & 1 == 1;
            (!is_ignored).then(|| signal(SignalKind::from_raw(number))).transpose()
        };
        Ok(Self { hangup: catch(SIGHUP)?, interrupt: catch(SIGINT)?, terminate: catch(SIGTERM)? })
    }

    /// Notes each signal when it comes, until nobody asks for them.
    async fn note(mut self, sender: Sender<(i32, Instant)>) {
        loop {
            let signal = tokio::select! {
                () = come(&mut self.hangup) => SIGHUP,
                () = come(&mut self.interrupt) => SIGINT,
                () = come(&mut self.terminate) => SIGTERM,
            };
            if sender.send((signal, Instant::now())).await.is_err() {
                break;
            }
        }
    }
}

async fn come(signal: &mut Option<Signal>) {
    let came = match signal {
        Some(signal) => signal.recv().await,
        None => None,
    };
    if came.is_none() {
        std::future::pending().await
    }
}

/// The signals that a process ignores, by its `status` (proc_pid_status(5)): the lowest bit is the signal 1.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}

/// The exit status after a signal, as of a shell.
pub(crate) fn status_of(signal: i32) -> u8 {
    SIGNALLED | signal.to_le_bytes()[0]
}

/// The signal came before the program ran.
pub(crate) fn interrupted(signal: i32) -> ProcessError {
    ProcessError::Interrupted { status: status_of(signal) }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    #[tokio::test]
    async fn a_signal_that_is_ignored_stays_so() {
        // As of a program of nohup, which also ignores SIGPIPE.
        let ignored = ignored("Name:\tbulkhead\nSigBlk:\t0000000000000004\nSigIgn:\t0000000000001001\n");
        assert_eq!(ignored, 0x1001);
        let caught = Caught::all_but(ignored).unwrap();
        assert!(caught.hangup.is_none() && caught.interrupt.is_some() && caught.terminate.is_some());
    }

    #[tokio::test]
    async fn a_signal_is_of_the_time_at_which_it_comes_and_not_at_which_it_is_read() {
        // All tests are one process, and only this one catches this signal.
        let raise = || nix::sys::signal::raise(nix::sys::signal::Signal::SIGHUP).unwrap();
        let mut signals = Signals::catch_but(!(1 << (SIGHUP - 1))).unwrap();
        raise();
        assert_eq!(signals.next().await, Came { signal: SIGHUP, event: Event::First });
        raise();
        // As if an answer took that long.
        sleep(TOGETHER).await;
        raise();
        assert_eq!(signals.next().await.event, Event::Same);
        assert_eq!(signals.next().await.event, Event::Another);
    }

    #[tokio::test]
    async fn only_the_signals_right_after_the_first_one_are_of_its_event() {
        let (sender, mut signals) = Signals::of_test();
        let begun = Instant::now();
        for (after, expected) in [
            (Duration::ZERO, Event::First),
            (Duration::ZERO, Event::Same),
            (TOGETHER - Duration::from_millis(1), Event::Same),
            (TOGETHER, Event::Another),
            (TOGETHER * 9, Event::Another),
        ] {
            sender.send((SIGTERM, begun + after)).await.unwrap();
            assert_eq!(signals.next().await, Came { signal: SIGTERM, event: expected });
        }
    }
}
