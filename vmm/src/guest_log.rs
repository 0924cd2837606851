//! Lines on stderr that a guest brings about, so few that it cannot fill the host's disk with them.

use std::{
    io::{self, Write},
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::lock;

/// Lines that one log has in one [`WINDOW`]. An honest guest brings about none.
const LINES: u32 = 5;
const WINDOW: Duration = Duration::from_secs(600);

/// The log of one device, as long as the VM lives: what is reset with the device could be reset by the guest.
#[derive(Default)]
pub struct GuestLog(Mutex<Budget>);

impl GuestLog {
    /// Prints `line`, unless there were too many of late; then the next one says how many were left out.
    pub fn say(&self, line: &str) {
        for line in lock(&self.0).spend(Instant::now(), line) {
            // Not `eprintln`, which panics where nobody listens any more.
            let _ = writeln!(io::stderr(), "{line}");
        }
    }
}

#[derive(Default)]
struct Budget {
    /// Start of the window.
    since: Option<Instant>,
    said: u32,
    left_out: u64,
}

impl Budget {
    /// What is printed when somebody has `line` to say at `now`.
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
