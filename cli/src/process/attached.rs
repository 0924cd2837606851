//! A process that has the streams, the terminal and the signals of this command.

use std::{io, os::fd::AsFd, pin::pin, time::Duration};

use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep_until},
};

use crate::process::{
    client::Process,
    error::ProcessError,
    signals::{Came, Event, SIGKILL, Signals},
    streams::{self, Fifos, Outputs, Tail},
    terminal::{self, RawTerminal},
};

/// How long a program that was killed may take to end. Then nobody waits for it any more.
const KILL_WAIT: Duration = Duration::from_secs(30);

/// How long the end of the output may take to come after the end of the program.
const DRAIN: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 10_000 });

/// The most of a program's output that is in the pipes and buffers between it and this command when it has ended.
const BUFFERED: u64 = if cfg!(test) { 64 } else { 1 << 20 };

/// The signals of the first event that were passed on: the bit N is the signal N.
#[derive(Debug, Default)]
struct Passed(u64);

impl Passed {
    /// What the program gets of a signal. None: nothing, because it has just got the same one. A program may take that
    /// for the wish to end at once.
    fn pass(&mut self, came: Came) -> Option<i32> {
        if came.event == Event::Another {
            return Some(SIGKILL);
        }
        let bit = 1_u64 << came.signal;
        let is_new = self.0 & bit == 0;
        self.0 |= bit;
        is_new.then_some(came.signal)
    }
}

/// How a process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    /// None: it was killed, and its end does not come.
    pub(crate) status: Option<u8>,
    pub(crate) ending: Ending,
}

/// Whether something ends the program, and what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Nothing but itself, as far as is known.
    Running,
    /// A signal was passed on to it.
    Signalled,
    /// It was killed, because the time of --timeout is over.
    TimedOut,
}

impl Ending {
    fn after_signal(self) -> Self {
        match self {
            Self::Running | Self::Signalled => Self::Signalled,
            Self::TimedOut => Self::TimedOut,
        }
    }
}

/// Copies the streams of a process that has just been started, until it ends. It is killed at the `deadline`, and soon
/// after that nobody waits for the readers of its output any more. Fails if its output cannot be written, unless its
/// readers want no more of it.
pub(crate) async fn follow(
    process: &Process,
    fifos: Fifos,
    tail: &Tail,
    deadline: Option<Instant>,
    signals: &mut Signals,
) -> Result<Ended, ProcessError> {
    let has_terminal = fifos.stderr.is_none();
    let mut outputs = Outputs::new(tail.clone());
    outputs.copy(fifos.stdout, io::stdout().as_fd()).map_err(ProcessError::Begin)?;
    if let Some(stderr) = fifos.stderr {
        outputs.copy(stderr, io::stderr().as_fd()).map_err(ProcessError::Begin)?;
    }
    let mut resized = signal(SignalKind::window_change()).map_err(ProcessError::Begin)?;
    let _raw = if has_terminal && fifos.stdin.is_some() { Some(RawTerminal::enter()?) } else { None };
    if has_terminal {
        resize(process).await;
    }
    let mut stdin_is_open = fifos.stdin.is_some();
    let copied = fifos.stdin.map(streams::copy_input).transpose().map_err(ProcessError::Begin)?;
    let mut stdin = pin!(async {
        if let Some(copied) = copied {
            // An error: the thread has panicked.
            _ = copied.await;
        }
    });
    let (mut ending, mut give_up, mut written) = (Ending::Running, None, Ok(()));
    let mut passed = Passed::default();
    let mut exited = pin!(process.wait());
    let status = loop {
        tokio::select! {
            status = &mut exited => break Some(status?),
            came = signals.next() => {
                let is_killed = ending == Ending::TimedOut;
                let signal = if is_killed { Some(SIGKILL) } else { passed.pass(came) };
                ending = ending.after_signal();
                if let Some(signal) = signal {
                    give_up = kill(process, signal).await.or(give_up);
                }
            }
            () = at(deadline), if ending != Ending::TimedOut => {
                ending = Ending::TimedOut;
                give_up = kill(process, SIGKILL).await;
            }
            () = at(give_up) => break None,
            () = &mut stdin, if stdin_is_open => {
                stdin_is_open = false;
                // An error: the program has ended.
                _ = process.close_stdin().await;
            }
            ended = outputs.next(), if outputs.are_open() => if ended.is_err() {
                written = written.and(ended);
                give_up = kill(process, SIGKILL).await;
            },
            _ = resized.recv(), if has_terminal => resize(process).await,
        }
    };
    // A reader that takes no more does not keep what has an end.
    let until = deadline.map(|deadline| deadline.max(Instant::now() + DRAIN));
    let cancelled = async { while signals.next().await.event == Event::Same {} };
    let drained = outputs.drain(DRAIN, BUFFERED, cancelled, at(until)).await;
    match written.and(drained) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(ProcessError::Output(error)),
        _ => Ok(Ended { status, ending }),
    }
}

/// Sends the signal. Returns when to give up waiting for the end, if nothing can outlive the signal.
async fn kill(process: &Process, signal: i32) -> Option<Instant> {
    // An error: the program has ended, or its guest does not answer.
    _ = process.kill(signal).await;
    (signal == SIGKILL).then(|| Instant::now() + KILL_WAIT)
}

/// Waits until then. None: for ever.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

async fn resize(process: &Process) {
    if let Some(size) = terminal::size() {
        // The program may have ended.
        _ = process.resize(size).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGHUP: i32 = 1;
    const SIGTERM: i32 = 15;

    #[test]
    fn signals_of_one_event_are_not_a_second_one() {
        let mut passed = Passed::default();
        let mut pass = |signal, event| passed.pass(Came { signal, event });
        assert_eq!(pass(SIGTERM, Event::First), Some(SIGTERM));
        // The program gets each of them once, as those of a process on the host that are pending.
        assert_eq!(pass(SIGTERM, Event::Same), None);
        assert_eq!(pass(SIGHUP, Event::Same), Some(SIGHUP));
        for again in [SIGTERM, SIGHUP] {
            assert_eq!(pass(again, Event::Same), None);
        }
        for signal in [SIGTERM, SIGHUP] {
            assert_eq!(pass(signal, Event::Another), Some(SIGKILL));
        }
    }
}
