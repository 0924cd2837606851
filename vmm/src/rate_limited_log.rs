//! A rate limit for lines on stderr that a guest causes, so that it cannot fill the disk of the host.

use std::{
    io::{self, Write},
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::lock;

/// The most lines of a log in one [`WINDOW`]. A guest that follows the specifications causes none.
const LINES: u32 = 5;
const WINDOW: Duration = Duration::from_secs(600);

/// The log of a device. It lives as long as the VM: if a reset of the device reset the limit, the guest could do that.
#[derive(Default)]
pub struct RateLimitedLog(Mutex<Budget>);

impl RateLimitedLog {
    /// Prints `line`, unless too many lines were printed recently. The next line is then preceded by the number of
    /// lines that were left out.
    pub fn say(&self, line: &str) {
        for line in lock(&self.0).spend(Instant::now(), line) {
            // `eprintln` would panic if stderr is closed.
            let _ = writeln!(io::stderr(), "{line}");
        }
    }
}

#[derive(Default)]
struct Budget {
    /// The start of the window.
    since: Option<Instant>,
    said: u32,
    left_out: u64,
}

impl Budget {
    /// The lines to print for `line` at the time `now`.
    fn spend(&mut self, now: Instant, line: &str) -> Vec<String> {
        let mut lines = Vec::new();
        if self.since.is_none_or(|since| now.duration_since(since) >= WINDOW) {
            if self.left_out > 0 {
                lines.push(format!("{} more lines like the last ones were left out", self.left_out));
            }
            *self = Self { since: Some(now), ..Self::default() };
        }
        if self.said < LINES {
            self.said += 1;
            lines.push(line.to_owned());
        } else {
            self.left_out += 1;
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_few_lines_and_a_number() {
        let start = Instant::now();
        let mut budget = Budget::default();
        let flood: Vec<_> = (0..1000).flat_map(|_| budget.spend(start, "broken")).collect();
        assert_eq!(flood, ["broken"; LINES as usize]);

        let almost = start + WINDOW - Duration::from_nanos(1);
        assert!(budget.spend(almost, "broken").is_empty());
        let next = budget.spend(start + WINDOW, "broken again");
        assert_eq!(next, ["996 more lines like the last ones were left out", "broken again"]);
    }

    #[test]
    fn lines_that_are_rare_are_all_said() {
        let start = Instant::now();
        let mut budget = Budget::default();
        for window in 0..100 {
            assert_eq!(budget.spend(start + WINDOW * window, "broken"), ["broken"]);
        }
    }
}
