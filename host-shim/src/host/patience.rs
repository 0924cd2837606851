//! How long a process that was killed may take to end.
//!
//! It gives back its memory. For tens of GiB, or with little processor time, this takes longer than any wait that would
//! suit a process that hangs in the kernel. The two differ: a process that hangs uses no processor time.

use std::{
    iter,
    time::{Duration, Instant},
};

/// The time between two checks: more than a period of a quota of processor time, which is 100 ms (cgroup-v2, cpu.max).
const LOOK: Duration = Duration::from_millis(250);

/// How far a process is on its way to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The time of processors that all of its threads have used, in clock ticks.
    pub(crate) cpu_time: u64,
    /// The pages that are mapped in it.
    pub(crate) resident: u64,
}

/// How long processes that were killed may take to end. All of them have the same time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// How long one of them may go without progress.
    idle: Duration,
    /// When all have to have ended.
    until: Instant,
}

impl Patience {
    /// Begins now: for a process that makes progress `most`, for another one `idle`.
    pub(crate) fn new(idle: Duration, most: Duration) -> Self {
        let now = Instant::now();
        Self { idle, until: now.checked_add(most).unwrap_or(now) }
    }

    /// Begins to wait for one of the processes, of which `progress` tells. Returns how long to wait for its end each
    /// time, until the process is given up. The last look takes no time.
    pub(crate) fn waits(
        self,
        mut progress: impl FnMut() -> Option<Progress>,
    ) -> impl Iterator<Item = Duration> {
        let mut wait = Wait { patience: self, seen: None, since: None };
        let next = move || wait.next_at(Instant::now(), progress());
        iter::from_fn(next).chain(iter::once(Duration::ZERO))
    }
}

/// A wait for the end of one process.
#[derive(Debug)]
struct Wait {
    patience: Patience,
    seen: Option<Progress>,
    /// When progress was seen last, or the wait began.
    since: Option<Instant>,
}

impl Wait {
    /// How long to wait until the next look. None: the process does not end in time. `progress` is what is seen of it
    /// now, if anything.
    fn next_at(&mut self, now: Instant, progress: Option<Progress>) -> Option<Duration> {
        let advances = match (self.seen, progress) {
            (Some(before), Some(now)) => now.cpu_time > before.cpu_time || now.resident < before.resident,
            _ => false,
        };
        self.seen = progress.or(self.seen);
        let since = self.since.filter(|_| !advances).unwrap_or(now);
        self.since = Some(since);
        let idle = self.patience.idle.saturating_sub(now.saturating_duration_since(since));
        let left = idle.min(self.patience.until.saturating_duration_since(now));
        (!left.is_zero()).then(|| left.min(LOOK))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_secs(2);
    const MOST: Duration = Duration::from_secs(20);

    /// How long a process is waited for that never ends. `progress` tells of it at each look.
    fn waited_for(mut progress: impl FnMut(u64) -> Option<Progress>) -> Duration {
        let mut wait = Wait { patience: Patience::new(IDLE, MOST), seen: None, since: None };
        let begun = wait.patience.until - MOST;
        let mut now = begun;
        for look in 0.. {
            let Some(pause) = wait.next_at(now, progress(look)) else { break };
            now += pause;
        }
        now - begun
    }

    fn of(cpu_time: u64, resident: u64) -> Option<Progress> {
        Some(Progress { cpu_time, resident })
    }

    #[test]
    fn what_makes_no_progress_hangs() {
        assert_eq!(waited_for(|_| of(7, 100)), IDLE);
        assert_eq!(waited_for(|_| None), IDLE);
        // Neither is progress: that pages come, and what is not seen.
        assert_eq!(waited_for(|look| of(7, 100 + look)), IDLE);
        assert_eq!(waited_for(|look| of(7, 100).filter(|_| look % 2 == 0)), IDLE);
    }

    #[test]
    fn what_uses_processor_time_or_gives_memory_back_is_waited_for() {
        assert_eq!(waited_for(|look| of(look, 0)), MOST);
        assert_eq!(waited_for(|look| of(7, 1000 - look)), MOST);
        // One clock tick in more than a second, as with a quota of one per cent of a processor.
        assert_eq!(waited_for(|look| of(look / 5, 0)), MOST);
    }

    #[test]
    fn the_time_without_progress_begins_with_the_last_progress() {
        let ended = 10;
        assert_eq!(waited_for(|look| of(look.min(ended), 0)), LOOK * ended as u32 + IDLE);
    }

    #[test]
    fn all_processes_have_the_same_time() {
        let one_look = |idle, most| {
            let mut waits = Patience::new(idle, most).waits(|| of(1, 1));
            (waits.next(), waits.next()) == (Some(Duration::ZERO), None)
        };
        assert!(one_look(IDLE, Duration::ZERO) && one_look(Duration::ZERO, MOST));
    }
}
