//! clock_adjtime(2).

use std::io;

use super::result::check;

/// What is changed of CLOCK_REALTIME.
#[derive(Debug, Clone, Copy)]
pub struct ClockAdjustment {
    /// Microseconds that are added at once.
    pub step_us: i64,
    /// Microseconds of a tick, from 9,000 to 11,000.
    pub tick_us: i64,
    /// In 2^-16 of 10^-6.
    pub frequency: i64,
    /// Seconds that CLOCK_TAI is ahead.
    pub tai_offset_s: i64,
}

/// Corrects CLOCK_REALTIME: all of it, or nothing and EINVAL.
pub fn adjust_clock(adjustment: ClockAdjustment) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid timex.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    timex.modes = libc::ADJ_TICK | libc::ADJ_FREQUENCY | libc::ADJ_TAI;
    timex.tick = adjustment.tick_us;
    timex.freq = adjustment.frequency;
    timex.constant = adjustment.tai_offset_s;
    if adjustment.step_us != 0 {
        timex.modes |= libc::ADJ_SETOFFSET;
        timex.time.tv_sec = adjustment.step_us.div_euclid(1_000_000);
        timex.time.tv_usec = adjustment.step_us.rem_euclid(1_000_000);
    }
    // SAFETY: `timex` lives through the call, which reads and writes it.
    let state = unsafe { libc::clock_adjtime(libc::CLOCK_REALTIME, &raw mut timex) };
    check(i64::from(state)).map(drop)
}
