//! Limits how often something is done. What a guest brings about again and again must not keep the shim busy, which is
//! not in the pod's cgroup.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// A number of turns in each window. Whoever wants more waits: nobody is refused.
#[derive(Debug)]
pub(crate) struct Pace {
    most: u32,
    window: Duration,
    /// When the window began, and how many turns were taken since.
    since: Instant,
    taken: u32,
}

impl Pace {
    /// At most `most` turns in each `window`.
    pub(crate) fn new(most: u32, window: Duration) -> Self {
        Self { most, window, since: Instant::now(), taken: 0 }
    }

    /// Waits for a turn, and takes it. If this is dropped before its end, none is taken.
    pub(crate) async fn turn(&mut self) {
        if self.taken >= self.most {
            sleep_until(self.since + self.window).await;
        }
        if self.since.elapsed() >= self.window {
            (self.since, self.taken) = (Instant::now(), 0);
        }
        self.taken = self.taken.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u32 = 3;
    const WINDOW: Duration = Duration::from_millis(100);

    #[tokio::test(start_paused = true)]
    async fn who_wants_more_waits_for_the_next_window() {
        let (mut pace, begun) = (Pace::new(MOST, WINDOW), Instant::now());
        for number in 0..5 * MOST {
            pace.turn().await;
            assert_eq!(begun.elapsed().as_millis() / WINDOW.as_millis(), u128::from(number / MOST));
        }
        // A pause gives back the turns of one window only.
        tokio::time::sleep(WINDOW * 10).await;
        let begun = Instant::now();
        for _ in 0..2 * MOST {
            pace.turn().await;
        }
        assert!(begun.elapsed() >= WINDOW, "{:?}", begun.elapsed());
    }
}
