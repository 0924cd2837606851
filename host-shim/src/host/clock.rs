//! The clocks of the host, and its wall clock being set.

use std::io;

use bulkhead_agent_api::synchronization::Synchronization;
use rustix::{
    io::Errno,
    time::{
        ClockId, DynamicClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec,
        clock_gettime, clock_gettime_dynamic, timerfd_create, timerfd_settime,
    },
};
use tokio::net::unix::pipe;

const NS_PER_S: i64 = 1_000_000_000;

/// How often the clocks are read again if the process was interrupted meanwhile.
const ATTEMPTS: u32 = 3;
/// Reading all clocks takes less than this without an interruption.
const UNINTERRUPTED_NS: i64 = 2_000;

/// The host's clocks at one moment, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// CLOCK_REALTIME: the time of day. It can be set.
    pub(crate) wall_ns: i64,
    /// CLOCK_MONOTONIC. It runs as fast as the wall clock, and is never set.
    pub(crate) monotonic_ns: i64,
    /// CLOCK_MONOTONIC_RAW: the same without what the host's NTP corrects. A guest's clock that nobody corrects counts
    /// like this one.
    pub(crate) raw_ns: i64,
}

impl Reading {
    pub(crate) fn now() -> Self {
        let mut best = None;
        for _ in 0..ATTEMPTS {
            let before = read(ClockId::Monotonic);
            let (wall_ns, raw_ns) = (read(ClockId::Realtime), read(ClockId::MonotonicRaw));
            let took = read(ClockId::Monotonic) - before;
            let reading = Self { wall_ns, raw_ns, monotonic_ns: before + took / 2 };
            if best.is_none_or(|(_, least)| took < least) {
                best = Some((reading, took));
            }
            if took < UNINTERRUPTED_NS {
                break;
            }
        }
        best.map(|(reading, _)| reading).unwrap_or_default()
    }
}

/// How many seconds International Atomic Time is ahead of the wall clock. 0: the host's NTP did not say.
pub(crate) fn tai_offset_s() -> i32 {
    let Ok(tai) = clock_gettime_dynamic(DynamicClockId::Tai) else { return 0 };
    let ahead_ns = nanoseconds(tai) - read(ClockId::Realtime);
    i32::try_from((ahead_ns + NS_PER_S / 2).div_euclid(NS_PER_S)).unwrap_or_default().max(0)
}

/// How good the host's clock is. If the kernel does not say it, nobody can rely on the clock.
pub(crate) fn synchronization() -> Synchronization {
    Synchronization::read().unwrap_or(Synchronization::NONE)
}

fn read(clock: ClockId) -> i64 {
    nanoseconds(clock_gettime(clock))
}

fn nanoseconds(time: Timespec) -> i64 {
    let Timespec { tv_sec, tv_nsec } = time;
    tv_sec.saturating_mul(NS_PER_S).saturating_add(tv_nsec)
}

/// Reports each time that the host's wall clock is set, even when the host resumes from suspend or has a leap second.
#[derive(Debug)]
pub(crate) struct Steps {
    timer: pipe::Receiver,
}

impl Steps {
    /// Watches from now on.
    pub(crate) fn watch() -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Realtime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        // Such a timer is cancelled when the clock is set. The time itself is never reached.
        let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
        let never = Timespec { tv_sec: i64::MAX / NS_PER_S, tv_nsec: 0 };
        timerfd_settime(&timer, flags, &Itimerspec { it_interval: Timespec::default(), it_value: never })?;
        // A timer is no pipe, but is waited for and read like one.
        Ok(Self { timer: pipe::Receiver::from_owned_fd_unchecked(timer)? })
    }

    /// Waits until the clock is set.
    pub(crate) async fn wait(&mut self) -> io::Result<()> {
        loop {
            self.timer.readable().await?;
            if self.take()? {
                return Ok(());
            }
        }
    }

    /// Whether the clock was set since the last call.
    pub(crate) fn take(&mut self) -> io::Result<bool> {
        match self.timer.try_read(&mut [0; size_of::<u64>()]) {
            Err(e) if e.raw_os_error() == Some(Errno::CANCELED.raw_os_error()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e),
            Ok(_) => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clocks_are_read_at_one_moment() {
        let (first, second) = (Reading::now(), Reading::now());
        let monotonic = second.monotonic_ns - first.monotonic_ns;
        assert!((0..NS_PER_S).contains(&monotonic), "{first:?} {second:?}");
        assert!((0..NS_PER_S).contains(&(second.raw_ns - first.raw_ns)), "{first:?} {second:?}");
        assert!((0..100).contains(&tai_offset_s()));
        assert!(synchronization().max_error_us <= Synchronization::NONE.max_error_us);
    }

    #[tokio::test]
    async fn a_clock_that_is_not_set_is_not_reported() {
        let mut steps = Steps::watch().unwrap();
        assert!(!steps.take().unwrap());
        let waited = tokio::time::timeout(std::time::Duration::from_millis(20), steps.wait()).await;
        assert!(waited.is_err(), "{waited:?}");
    }
}
