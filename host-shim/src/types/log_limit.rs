//! Limits how often something is logged. What a guest or a broken host brings about again and again must not fill the
//! host's disk.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::Instant;

use crate::types::lock::lock;

/// Lines of one kind.
#[derive(Debug)]
pub(crate) struct LogLimit {
    /// How many are logged in one window.
    most: u32,
    window: Duration,
    /// When the window began. None: no line was logged yet.
    since: Option<Instant>,
    logged: u32,
}

/// Whether a line is to be logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logged {
    Yes,
    /// Yes, and no more in this window.
    Last,
    No,
}

impl LogLimit {
    /// At most `most` lines in each `window`, which begins with a line.
    pub(crate) const fn new(most: u32, window: Duration) -> Self {
        Self { most, window, since: None, logged: 0 }
    }

    /// How long one window is.
    pub(crate) fn window(&self) -> Duration {
        self.window
    }

    /// Counts a line, and returns whether to log it.
    pub(crate) fn count(&mut self, now: Instant) -> Logged {
        if self.since.is_none_or(|since| now.duration_since(since) >= self.window) {
            self.since = Some(now);
            self.logged = 0;
        }
        if self.logged >= self.most {
            return Logged::No;
        }
        self.logged += 1;
        if self.logged == self.most { Logged::Last } else { Logged::Yes }
    }
}

/// Lines of one kind that several tasks log. Clones are the same limit.
#[derive(Debug, Clone)]
pub(crate) struct SharedLogLimit(Arc<Mutex<LogLimit>>);

impl SharedLogLimit {
    /// At most `most` lines in each `window`, see [`LogLimit::new`].
    pub(crate) fn new(most: u32, window: Duration) -> Self {
        Self(Arc::new(Mutex::new(LogLimit::new(most, window))))
    }

    /// Counts a line, and returns whether to log it.
    pub(crate) fn allows(&self) -> bool {
        lock(&self.0).count(Instant::now()) != Logged::No
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_logged_in_part() {
        const MOST: u32 = 3;
        const WINDOW: Duration = Duration::from_secs(600);
        let since = Instant::now();
        let mut limit = LogLimit::new(MOST, WINDOW);
        let first: Vec<_> = (0..5).map(|_| limit.count(since)).collect();
        assert_eq!(first, [Logged::Yes, Logged::Yes, Logged::Last, Logged::No, Logged::No]);
        assert_eq!(limit.count(since + WINDOW - Duration::from_nanos(1)), Logged::No);
        assert_eq!(limit.count(since + WINDOW), Logged::Yes);
    }
}
