//! The guest's clock. The shim compares it with the host's, and says how to correct it.

use std::io;

use bulkhead_agent_api::synchronization::Synchronization;
use nix::time::{ClockId, clock_gettime};

use crate::syscall::{ClockAdjustment, adjust_clock};

/// The largest rate that the kernel takes, either way: 10 %.
const MAX_RATE_PPB: i64 = 100_000_000;

/// Microseconds that the kernel adds to its clock at each of 100 ticks per second.
const TICK_US: i64 = 10_000;
/// What one microsecond more for each tick makes of the rate.
const TICK_STEP_PPB: i64 = 100_000;
/// The kernel counts the rest in 2^-16 of 10^-6.
const FREQUENCY_UNITS: i64 = 1 << 16;

/// A correction.
#[derive(Debug, Clone, Copy)]
pub struct Correction {
    /// Nanoseconds that are added to the clock at once.
    pub step_ns: i64,
    /// How much faster the clock runs than its hardware says, in 10^-9.
    pub rate_ppb: i32,
    /// Seconds that CLOCK_TAI is ahead of the clock.
    pub tai_offset_s: i32,
    /// How good the clock is after the correction.
    pub synchronization: Synchronization,
}

/// Nanoseconds since 1970.
pub fn read() -> io::Result<i64> {
    let now = clock_gettime(ClockId::CLOCK_REALTIME)?;
    Ok(now.tv_sec().saturating_mul(1_000_000_000).saturating_add(now.tv_nsec()))
}

/// Corrects the clock.
pub fn adjust(correction: Correction) -> io::Result<()> {
    let Some((tick_us, frequency)) = rate(correction.rate_ppb.into()) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    adjust_clock(ClockAdjustment {
        step_us: correction.step_ns / 1000,
        tick_us,
        frequency,
        tai_offset_s: correction.tai_offset_s.into(),
        synchronization: correction.synchronization,
    })
}

/// A rate as the kernel takes it (adjtimex(2)): the length of a tick, and the frequency, which can be 500,000 at most.
fn rate(ppb: i64) -> Option<(i64, i64)> {
    if ppb.abs() > MAX_RATE_PPB {
        return None;
    }
    let ticks = (ppb + TICK_STEP_PPB / 2).div_euclid(TICK_STEP_PPB);
    let rest = ppb - ticks * TICK_STEP_PPB;
    Some((TICK_US + ticks, rest * FREQUENCY_UNITS / 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_ticks_and_a_frequency() {
        assert_eq!(rate(0), Some((10_000, 0)));
        assert_eq!(rate(20_000), Some((10_000, 20 << 16)));
        assert_eq!(rate(-20_000), Some((10_000, -(20 << 16))));
        assert_eq!(rate(60_000), Some((10_001, -(40 << 16))));
        assert_eq!(rate(-160_000), Some((9_998, 40 << 16)));
        assert_eq!(rate(MAX_RATE_PPB), Some((11_000, 0)));
        assert_eq!(rate(-MAX_RATE_PPB), Some((9_000, 0)));
        assert_eq!(rate(MAX_RATE_PPB + 1), None);
        for ppb in (-MAX_RATE_PPB..=MAX_RATE_PPB).step_by(9_973) {
            let (tick_us, frequency) = rate(ppb).unwrap();
            let sum = (tick_us - TICK_US) * TICK_STEP_PPB + frequency * 1000 / FREQUENCY_UNITS;
            assert!((sum - ppb).abs() <= 1, "{ppb} {sum}");
        }
    }

    #[test]
    fn what_the_kernel_would_not_take_is_refused() {
        let synchronization = Synchronization::NONE;
        let correction = Correction { step_ns: 0, rate_ppb: i32::MIN, tai_offset_s: 0, synchronization };
        let error = adjust(correction).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }
}
