//! Keeps the guest's clock equal to the host's while the guest runs.

use std::{io, time::Duration};

use bulkhead_agent_api::synchronization::Synchronization;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    guest::{
        agent::{Agent, AgentError},
        clock_discipline::{Correction, Discipline, Sample},
    },
    host::clock::{Reading, Steps, synchronization, tai_offset_s},
    types::{
        error::chain,
        log_limit::{LogLimit, Logged},
    },
};

/// How often the host's own clocks are looked at.
const LOOK: Duration = Duration::from_secs(4);

/// How often the guest is asked at most for one measurement. The answer of the least round trip counts.
const QUESTIONS: u32 = 5;
/// A round trip that is not worth another question.
const SHORT_NS: i64 = 300_000;

/// A step of more than this is logged, once. StartSandbox leaves less to correct.
const LOGGED_NS: u64 = 1_000_000_000;

/// A guest that has not answered for this long stands still.
const STANDSTILL: Duration = Duration::from_secs(1);

/// How often it is logged that the guest's clock does not follow, and for how long a limit of lines holds.
const LOG_AGAIN: Duration = Duration::from_secs(3600);
/// So many steps of the host's clock are logged in that time. Something may set it every second.
const LOGGED_STEPS: u32 = 10;

/// The time between two corrections at least, even if somebody sets the host's clock all the time.
const PAUSE: Duration = Duration::from_millis(100);

/// The host's clock, watched from before the guest's is set for the first time.
#[derive(Debug)]
pub(crate) struct HostClock {
    /// None: it cannot be watched. Then the guest learns of a step when it is asked next.
    steps: Option<Steps>,
    since: Reading,
    /// How good the host's clock is.
    synchronization: fn() -> Synchronization,
}

impl HostClock {
    pub(crate) fn watch() -> Self {
        let steps = Steps::watch();
        if let Err(error) = &steps {
            tracing::warn!(error = chain(error), "the guest will see late when the host's clock is set");
        }
        Self { steps: steps.ok(), since: Reading::now(), synchronization }
    }

    /// Has the guest's clock follow this one until the result is dropped or the guest ends.
    pub(crate) fn follow(self, agent: Agent) -> Followed {
        let span = tracing::Span::current();
        let follower = Follower {
            agent,
            steps: self.steps,
            discipline: Discipline::new(&self.since),
            synchronization: self.synchronization,
            told_synchronized: None,
            log: Log::default(),
        };
        Followed(tokio::spawn(tracing::Instrument::instrument(follower.run(), span)))
    }

    /// Waits until the host's clock is set.
    async fn wait(steps: &mut Option<Steps>) {
        match steps {
            Some(watched) => {
                if let Err(error) = watched.wait().await {
                    Self::lost(steps, &error);
                }
            }
            None => std::future::pending().await,
        }
    }

    /// Whether the host's clock was set since the last call or wait.
    fn take(steps: &mut Option<Steps>) -> bool {
        match steps.as_mut().map_or(Ok(false), Steps::take) {
            Ok(was_set) => was_set,
            Err(error) => {
                Self::lost(steps, &error);
                false
            }
        }
    }

    fn lost(steps: &mut Option<Steps>, error: &io::Error) {
        tracing::warn!(error = chain(error), "the guest will see late when the host's clock is set");
        *steps = None;
    }
}

/// Stops following when it is dropped.
#[derive(Debug)]
pub(crate) struct Followed(JoinHandle<()>);

impl Drop for Followed {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What was said already. A guest can bring about any number of steps and failures.
#[derive(Debug)]
struct Log {
    failures: LogLimit,
    step: bool,
    host_steps: LogLimit,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            failures: LogLimit::new(1, LOG_AGAIN),
            step: false,
            host_steps: LogLimit::new(LOGGED_STEPS, LOG_AGAIN),
        }
    }
}

impl Log {
    fn step(&mut self, sample: &Sample, correction: &Correction, host_was_set: bool) {
        let off_ms = sample.offset_ns / 1_000_000;
        if host_was_set {
            match self.host_steps.count(Instant::now()) {
                Logged::Yes => tracing::info!(off_ms, "the host's clock was set, and so the guest's"),
                Logged::Last => {
                    let seconds = LOG_AGAIN.as_secs();
                    tracing::info!(
                        off_ms,
                        seconds,
                        "the host's clock was set, and so the guest's; for a time this is not logged again"
                    );
                }
                Logged::No => {}
            }
        } else if correction.step_ns.unsigned_abs() > LOGGED_NS && !self.step {
            self.step = true;
            tracing::info!(off_ms, "the guest's clock is set");
        }
    }
}

struct Follower {
    agent: Agent,
    steps: Option<Steps>,
    discipline: Discipline,
    synchronization: fn() -> Synchronization,
    /// Whether the guest was told that the host's clock is synchronized. None: it was told nothing yet.
    told_synchronized: Option<bool>,
    log: Log,
}

impl Follower {
    async fn run(mut self) {
        let mut host_was_set = false;
        loop {
            host_was_set |= HostClock::take(&mut self.steps);
            let begun = Instant::now();
            match self.correct(host_was_set).await {
                Ok(()) => host_was_set = false,
                // The guest has ended.
                Err(AgentError::Disconnected { .. }) => return,
                Err(error) => {
                    self.log_failure(&error);
                    // A VM that stands still has the wrong time as soon as it goes on. One that only says so has to
                    // wait.
                    let stood_still =
                        matches!(error, AgentError::Timeout { .. }) && begun.elapsed() >= STANDSTILL;
                    if stood_still && self.agent.wait_for_answer().await.is_ok() {
                        sleep(PAUSE).await;
                        continue;
                    }
                    self.discipline.failed();
                }
            }
            sleep(PAUSE).await;
            host_was_set |= self.wait().await;
        }
    }

    /// Waits until the guest is to be asked. Returns whether that is because the host's clock was set.
    async fn wait(&mut self) -> bool {
        let due = Instant::now() + self.discipline.interval();
        loop {
            let look = due.min(Instant::now() + LOOK);
            tokio::select! {
                biased;
                () = HostClock::wait(&mut self.steps) => return true,
                () = sleep_until(look) => {}
            }
            let diverged = self.discipline.observe(&Reading::now());
            if diverged || self.has_other_quality() || Instant::now() >= due {
                return false;
            }
        }
    }

    /// Whether the host's NTP daemon has begun or given up to keep the clock right since the guest was told.
    fn has_other_quality(&self) -> bool {
        self.told_synchronized.is_some_and(|told| told != (self.synchronization)().is_synchronized)
    }

    async fn correct(&mut self, mut host_was_set: bool) -> Result<(), AgentError> {
        let mut sample = self.measure().await?;
        if HostClock::take(&mut self.steps) {
            host_was_set = true;
            // The one above may be from before that.
            sample = self.measure().await?;
        }
        let correction = self.discipline.correct(&sample, host_was_set, &Reading::now());
        tracing::debug!(?sample, ?correction, "the guest's clock");
        let host = (self.synchronization)();
        // Also if the guest refuses it: then it is told at the next comparison, and not before.
        self.told_synchronized = Some(host.is_synchronized);
        let apart_us = u32::try_from(sample.apart_ns(&correction).div_ceil(1000)).unwrap_or(u32::MAX);
        self.agent.adjust_clock(&correction, tai_offset_s(), host.worse_by(apart_us)).await?;
        self.log.step(&sample, &correction, host_was_set);
        Ok(())
    }

    fn log_failure(&mut self, error: &AgentError) {
        if self.log.failures.count(Instant::now()) != Logged::No {
            tracing::warn!(error = chain(error), "the guest's clock does not follow the host's");
        }
    }

    async fn measure(&self) -> Result<Sample, AgentError> {
        let mut best = self.ask().await?;
        for _ in 1..QUESTIONS {
            if best.round_trip_ns < SHORT_NS {
                break;
            }
            let sample = self.ask().await?;
            if sample.round_trip_ns < best.round_trip_ns {
                best = sample;
            }
        }
        Ok(best)
    }

    async fn ask(&self) -> Result<Sample, AgentError> {
        let asked = Reading::now();
        let guest_ns = self.agent.read_clock().await?;
        Ok(Sample::new(&asked, guest_ns, &Reading::now()))
    }
}

#[cfg(test)]
mod tests;
