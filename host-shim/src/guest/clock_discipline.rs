//! The clock discipline (NTP's term, RFC 5905): from measurements to corrections. Only arithmetic.
//!
//! The guest's answers are hostile. They only decide what the guest itself is told.

use std::time::Duration;

use crate::host::clock::Reading;

/// The clock is set if it is further off than this, as ntpd does. Less is corrected by its rate, because programs do
/// not expect that the time goes backwards.
const STEP_NS: f64 = 128e6;
/// If an offset is further than this from the expected one, it is measured more often; within half of it, less often.
const LARGE_NS: f64 = 200_000.0;
/// How far host and guest may be apart by the host's own change of rate before the offset is measured again.
const DIVERGED_NS: f64 = 200_000.0;

/// How fast an offset is corrected at most, and what a guest's clock may run wrong by itself, in 10^-9: as in Linux.
const SLEW_PPB: f64 = 500_000.0;
const DRIFT_PPB: f64 = 500_000.0;
/// The largest rate that Linux accepts.
pub(crate) const RATE_PPB: f64 = 100_000_000.0;

/// Which part of the drift that a measurement shows is believed.
const GAIN: f64 = 0.5;
/// The number of intervals after which an offset is corrected.
const SLEW_INTERVALS: f64 = 2.0;

const SHORTEST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(64);

/// The rate of the host's clock is measured over this time at least.
const RATE_WINDOW_NS: i64 = 3_000_000_000;
/// The same for the first time, while the guest starts.
const FIRST_RATE_WINDOW_NS: i64 = 100_000_000;

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

    /// How far the guest's clock may be from the host's after the correction, in nanoseconds.
    pub(crate) fn apart_ns(&self, correction: &Correction) -> u64 {
        let left = self.offset_ns.saturating_add(correction.step_ns);
        left.unsigned_abs().saturating_add(self.doubt_ns() as u64)
    }

    /// How far the measured offset may be wrong, either way.
    fn doubt_ns(&self) -> f64 {
        self.round_trip_ns as f64 / 2.0
    }

    /// How far the clock is off at least.
    fn certain_ns(&self) -> f64 {
        let offset = self.offset_ns as f64;
        if offset.abs() <= self.doubt_ns() { 0.0 } else { offset - self.doubt_ns().copysign(offset) }
    }

    /// The offset that is possible after this measurement and closest to the expected one.
    fn closest_ns(&self, expected_ns: f64) -> f64 {
        let offset = self.offset_ns as f64;
        expected_ns.clamp(offset - self.doubt_ns(), offset + self.doubt_ns())
    }
}

/// The rate of the host's wall clock against its hardware.
#[derive(Debug)]
struct HostRate {
    since: Reading,
    ppb: f64,
    window_ns: i64,
}

impl HostRate {
    /// The average since the host's boot would be no beginning: the clocks differ much at a boot.
    fn new(now: &Reading) -> Self {
        Self { since: *now, ppb: 0.0, window_ns: FIRST_RATE_WINDOW_NS }
    }

    fn observe(&mut self, now: &Reading) {
        let raw = now.raw_ns.saturating_sub(self.since.raw_ns);
        if raw >= self.window_ns {
            self.ppb = (gained(&self.since, now) / raw as f64 * 1e9).clamp(-RATE_PPB, RATE_PPB);
            self.since = *now;
            self.window_ns = RATE_WINDOW_NS;
        }
    }
}

/// How far the host's wall clock has come ahead of its hardware, in nanoseconds.
fn gained(since: &Reading, now: &Reading) -> f64 {
    let passed = |clock: fn(&Reading) -> i64| clock(now).saturating_sub(clock(since));
    passed(|reading| reading.monotonic_ns).saturating_sub(passed(|reading| reading.raw_ns)) as f64
}

/// The corrections of one guest's clock. It expects an offset from what it knows of both clocks. What a measurement
/// shows beside that is a drift that it did not know.
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
    /// The offset after it.
    offset_ns: f64,
    /// How fast the offset is corrected.
    slew_ppb: f64,
}

impl Last {
    /// How far the host's clock has come ahead of the rate that the guest was told.
    fn diverged_ns(&self, now: &Reading) -> f64 {
        let passed = now.raw_ns.saturating_sub(self.at.raw_ns) as f64;
        gained(&self.at, now) - passed * self.host_ppb / 1e9
    }

    /// The offset that is expected now.
    fn expected_ns(&self, now: &Reading) -> f64 {
        let passed = now.raw_ns.saturating_sub(self.at.raw_ns) as f64;
        self.offset_ns - self.slew_ppb * passed / 1e9 - self.diverged_ns(now)
    }
}

impl Discipline {
    /// `now`: best some time before the first correction, so that the host's rate is known then.
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
        let step = if certain.abs() > STEP_NS || certain != 0.0 && host_was_set {
            sample.offset_ns.saturating_neg()
        } else if is_late_at_first {
            -certain as i64
        } else {
            0
        };
        let offset_ns = if step == 0 {
            self.learn(sample, now)
        } else {
            self.interval = SHORTEST;
            0.0
        };
        let within = SLEW_INTERVALS * self.interval.as_secs_f64();
        let slew_ppb = (offset_ns / within).clamp(-SLEW_PPB, SLEW_PPB);
        self.last = Some(Last { at: *now, host_ppb: self.host.ppb, offset_ns, slew_ppb });
        let rate = self.host.ppb - self.drift_ppb - slew_ppb;
        Correction { step_ns: step, rate_ppb: rate.clamp(-RATE_PPB, RATE_PPB) as i32 }
    }

    /// Learns the guest's drift. Returns the offset.
    fn learn(&mut self, sample: &Sample, now: &Reading) -> f64 {
        let Some(last) = &self.last else { return sample.closest_ns(0.0) };
        let expected = last.expected_ns(now);
        let offset = sample.closest_ns(expected);
        let surprise = offset - expected;
        let passed_s = (now.raw_ns.saturating_sub(last.at.raw_ns) as f64 / 1e9).max(1.0);
        // More than that is no drift: somebody has set the clock.
        if surprise.abs() / passed_s <= DRIFT_PPB {
            self.drift_ppb = (self.drift_ppb + GAIN * surprise / passed_s).clamp(-DRIFT_PPB, DRIFT_PPB);
        }
        // There is no use in asking more often than the answers are exact.
        let large = LARGE_NS.max(sample.doubt_ns());
        if surprise.abs() > large {
            self.interval = (self.interval / 2).max(SHORTEST);
        } else if surprise.abs() < large / 2.0 {
            self.interval = (self.interval * 2).min(LONGEST);
        }
        offset
    }
}

#[cfg(test)]
mod tests;
