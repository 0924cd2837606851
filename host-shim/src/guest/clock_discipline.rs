//! The clock discipline (NTP's term, RFC 5905): from measurements to corrections. Only arithmetic.
//!
//! The guest's answers are hostile. They only decide what the guest itself is told.

use std::time::Duration;

use crate::host::clock::Reading;

/// The clock is set if it is further off than this, as ntpd does. Less is corrected by its rate, because programs do
/// not expect that the time goes backwards.
const STEP_NS: f64 = 128e6;
/// An offset beyond this is measured again sooner. Half of it is measured less often.
const LARGE_NS: f64 = 200_000.0;
/// How far host and guest may be apart by the host's own change of rate before the offset is measured again.
const DIVERGED_NS: f64 = 200_000.0;

/// How fast an offset is corrected at most, and what a guest's clock may run wrong by itself, in 10^-9: as in Linux.
const SLEW_PPB: f64 = 500_000.0;
const DRIFT_PPB: f64 = 500_000.0;
/// The largest rate that Linux accepts.
pub(crate) const RATE_PPB: f64 = 100_000_000.0;

/// Which part of the drift that a measurement shows is believed.
const GAIN: f64 = 0.25;
/// An offset would be gone after so many intervals.
const SLEW_INTERVALS: f64 = 2.0;

const SHORTEST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(64);

/// The rate of the host's clock is measured over this time at least.
const RATE_WINDOW_NS: i64 = 3_000_000_000;

/// The guest's clock, compared with the host's by one question and its answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    /// How far the guest's clock is ahead of the host's, if the answer took as long as the question.
    pub(crate) offset_ns: i64,
    /// The offset is uncertain by half of this.
    pub(crate) round_trip_ns: i64,
}

/// What the guest is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Correction {
    /// Is added to its clock.
    pub(crate) step_ns: i64,
    /// How much faster than by itself its clock runs from now on, in 10^-9.
    pub(crate) rate_ppb: i32,
}

impl Sample {
    /// The clocks of the host before the question and after the answer, and the clock of the guest in the answer.
    pub(crate) fn new(asked: &Reading, guest_ns: i64, answered: &Reading) -> Self {
        let round_trip_ns = answered.monotonic_ns.saturating_sub(asked.monotonic_ns).max(0);
        // The wall clock may have been set since the question.
        let middle_ns = answered.wall_ns.saturating_sub(round_trip_ns / 2);
        Self { offset_ns: guest_ns.saturating_sub(middle_ns), round_trip_ns }
    }

    /// How far the clock is off at least.
    fn certain_ns(&self) -> f64 {
        self.certain(self.offset_ns as f64)
    }

    /// What is certain of an offset that was measured like this.
    fn certain(&self, offset_ns: f64) -> f64 {
        let doubt = self.round_trip_ns as f64 / 2.0;
        if offset_ns.abs() <= doubt { 0.0 } else { offset_ns - doubt.copysign(offset_ns) }
    }
}

/// The rate of the host's wall clock against its hardware.
#[derive(Debug)]
struct HostRate {
    since: Reading,
    ppb: f64,
}

impl HostRate {
    /// Begins with the average since the host's boot, when both clocks were 0.
    fn new(now: &Reading) -> Self {
        let mut rate = Self { since: Reading::default(), ppb: 0.0 };
        rate.observe(now);
        rate
    }

    fn observe(&mut self, now: &Reading) {
        let raw = now.raw_ns.saturating_sub(self.since.raw_ns);
        if raw >= RATE_WINDOW_NS {
            self.ppb = (gained(&self.since, now) / raw as f64 * 1e9).clamp(-RATE_PPB, RATE_PPB);
            self.since = *now;
        }
    }
}

/// How far the host's wall clock has come ahead of its hardware, in nanoseconds.
fn gained(since: &Reading, now: &Reading) -> f64 {
    let passed = |clock: fn(&Reading) -> i64| clock(now).saturating_sub(clock(since));
    passed(|reading| reading.monotonic_ns).saturating_sub(passed(|reading| reading.raw_ns)) as f64
}

/// The corrections of one guest's clock: a controller with a proportional part (the slew) and an integral part (the
/// drift).
#[derive(Debug)]
pub(crate) struct Discipline {
    host: HostRate,
    last: Option<Last>,
    /// How much faster than the host's hardware the guest's clock counts, in 10^-9.
    drift_ppb: f64,
    interval: Duration,
}

/// The last correction.
#[derive(Debug)]
struct Last {
    at: Reading,
    /// The rate of the host that the guest was told.
    host_ppb: f64,
}

impl Last {
    /// How far the host's clock has come ahead of the rate that the guest was told.
    fn diverged_ns(&self, now: &Reading) -> f64 {
        let passed = now.raw_ns.saturating_sub(self.at.raw_ns) as f64;
        gained(&self.at, now) - passed * self.host_ppb / 1e9
    }
}

impl Discipline {
    pub(crate) fn new(now: &Reading) -> Self {
        Self { host: HostRate::new(now), last: None, drift_ppb: 0.0, interval: SHORTEST }
    }

    /// How long after a correction the offset is measured again.
    pub(crate) fn interval(&self) -> Duration {
        self.interval
    }

    /// Looks at the host's clocks. Returns whether the host has changed its rate so much that the guest should be told.
    pub(crate) fn observe(&mut self, now: &Reading) -> bool {
        self.host.observe(now);
        self.last.as_ref().is_none_or(|last| last.diverged_ns(now).abs() > DIVERGED_NS)
    }

    /// The guest refuses to be asked or told. It is asked less often.
    pub(crate) fn failed(&mut self) {
        self.interval = (self.interval * 2).min(LONGEST);
    }

    /// The correction for a measured offset. `host_was_set`: the host's clock was set since the last one, so the
    /// guest's is set as well.
    pub(crate) fn correct(&mut self, sample: &Sample, host_was_set: bool, now: &Reading) -> Correction {
        self.host.observe(now);
        let certain = sample.certain_ns();
        // StartSandbox has set it a little too late. The first program has not started, or has just done so.
        let is_late_at_first = self.last.is_none() && certain < 0.0;
        let is_step = certain.abs() > STEP_NS || certain != 0.0 && (host_was_set || is_late_at_first);
        if is_step {
            self.interval = SHORTEST;
        } else {
            self.learn_drift(sample, now);
            self.choose_interval(certain);
        }
        let slew = if is_step {
            0.0
        } else {
            let within = SLEW_INTERVALS * self.interval.as_secs_f64();
            (certain / within).clamp(-SLEW_PPB, SLEW_PPB)
        };
        self.last = Some(Last { at: *now, host_ppb: self.host.ppb });
        let rate = self.host.ppb - self.drift_ppb - slew;
        Correction {
            step_ns: if is_step { sample.offset_ns.saturating_neg() } else { 0 },
            rate_ppb: rate.clamp(-RATE_PPB, RATE_PPB) as i32,
        }
    }

    /// What the host's own change of rate does not explain is the guest's drift.
    fn learn_drift(&mut self, sample: &Sample, now: &Reading) {
        let Some(last) = &self.last else { return };
        let certain_ns = sample.certain(sample.offset_ns as f64 + last.diverged_ns(now));
        let passed_s = (now.raw_ns.saturating_sub(last.at.raw_ns) as f64 / 1e9).max(SHORTEST.as_secs_f64());
        let shown = (certain_ns / passed_s).clamp(-DRIFT_PPB, DRIFT_PPB);
        self.drift_ppb = (self.drift_ppb + GAIN * shown).clamp(-DRIFT_PPB, DRIFT_PPB);
    }

    fn choose_interval(&mut self, certain_ns: f64) {
        let off = certain_ns.abs();
        if off > LARGE_NS {
            self.interval = (self.interval / 2).max(SHORTEST);
        } else if off < LARGE_NS / 2.0 {
            self.interval = (self.interval * 2).min(LONGEST);
        }
    }
}

#[cfg(test)]
mod tests;
