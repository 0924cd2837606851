//! clock_adjtime(2).

use std::io;

use bulkhead_agent_api::synchronization::Synchronization;

use super::result::check;

/// The fields of timex(2) that say how good the clock is.
const QUALITY: u32 = libc::ADJ_STATUS | libc::ADJ_MAXERROR | libc::ADJ_ESTERROR;

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
    /// What the kernel tells the programs of its clock.
    pub synchronization: Synchronization,
}

/// Corrects CLOCK_REALTIME: all of it, or nothing and EINVAL.
pub fn adjust_clock(adjustment: ClockAdjustment) -> io::Result<()> {
    let mut timex = timex(adjustment);
    // SAFETY: `timex` lives through the call, which reads and writes it.
    let state = unsafe { libc::clock_adjtime(libc::CLOCK_REALTIME, &raw mut timex) };
    check(i64::from(state)).map(drop)
}

fn timex(adjustment: ClockAdjustment) -> libc::timex {
    // SAFETY: all-zero bytes are a valid timex.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // Linux makes the step before it sets the rest. The step by itself makes the clock one that is not synchronized.
    timex.modes = libc::ADJ_TICK | libc::ADJ_FREQUENCY | libc::ADJ_TAI | QUALITY;
    timex.tick = adjustment.tick_us;
    timex.freq = adjustment.frequency;
    timex.constant = adjustment.tai_offset_s;
    // No other bit: the shim disciplines the clock, and not the kernel (STA_PLL, STA_FLL and what belongs to them). A
    // leap second of the host is a step for the guest, which must not make it once more (STA_INS, STA_DEL).
    timex.status = if adjustment.synchronization.is_synchronized { 0 } else { libc::STA_UNSYNC };
    timex.maxerror = adjustment.synchronization.max_error_us.into();
    timex.esterror = adjustment.synchronization.estimated_error_us.into();
    if adjustment.step_us != 0 {
        timex.modes |= libc::ADJ_SETOFFSET;
        timex.time.tv_sec = adjustment.step_us.div_euclid(1_000_000);
        timex.time.tv_usec = adjustment.step_us.rem_euclid(1_000_000);
    }
    timex
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADJUSTMENT: ClockAdjustment = ClockAdjustment {
        step_us: 0,
        tick_us: 10_000,
        frequency: 0,
        tai_offset_s: 37,
        synchronization: Synchronization::NONE,
    };

    #[test]
    fn programs_are_told_how_good_the_clock_is() {
        let quality = libc::ADJ_STATUS | libc::ADJ_MAXERROR | libc::ADJ_ESTERROR;
        let good = Synchronization { is_synchronized: true, max_error_us: 2000, estimated_error_us: 30 };
        let told = timex(ClockAdjustment { synchronization: good, ..ADJUSTMENT });
        assert_eq!(told.modes & quality, quality);
        assert_eq!((told.status, told.maxerror, told.esterror), (0, 2000, 30));
        let told = timex(ADJUSTMENT);
        assert_eq!(told.modes & quality, quality);
        assert_eq!((told.status, told.maxerror, told.esterror), (libc::STA_UNSYNC, 16_000_000, 16_000_000));
    }

    #[test]
    fn a_step_back_is_a_whole_number_of_seconds_and_a_rest_forward() {
        assert_eq!(timex(ADJUSTMENT).modes & libc::ADJ_SETOFFSET, 0);
        let back = timex(ClockAdjustment { step_us: -1_500_000, ..ADJUSTMENT });
        assert_eq!(back.modes & libc::ADJ_SETOFFSET, libc::ADJ_SETOFFSET);
        assert_eq!((back.time.tv_sec, back.time.tv_usec), (-2, 500_000));
    }
}
