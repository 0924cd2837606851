//! How long the parts of a run took.

use std::fmt;
use std::time::{Duration, Instant};

/// The parts of a run, in their order.
#[derive(Default)]
pub(crate) struct Phases(Vec<(String, Duration)>);

impl Phases {
    /// Adds what this takes.
    pub(crate) fn time<T>(&mut self, what: &str, phase: impl FnOnce() -> T) -> T {
        let (result, took) = timed(phase);
        self.add(what, took);
        result
    }

    /// Adds a part.
    pub(crate) fn add(&mut self, what: &str, took: Duration) {
        self.0.push((what.to_owned(), took));
    }
}

/// What a part gives, and how long it took.
pub(crate) fn timed<T>(phase: impl FnOnce() -> T) -> (T, Duration) {
    let started = Instant::now();
    let result = phase();
    (result, started.elapsed())
}

impl fmt::Display for Phases {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "time:")?;
        self.0
            .iter()
            .try_for_each(|(what, took)| writeln!(formatter, "{:>8.1} s  {what}", took.as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_shown_in_their_order_also_those_that_failed() {
        let mut phases = Phases::default();
        phases.add("the guest kernel", Duration::from_millis(1_192_340));
        let failed: Result<(), &str> = phases.time("the programs", || Err("no compiler"));
        assert_eq!(failed, Err("no compiler"));
        let text = phases.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[..2], ["time:", "  1192.3 s  the guest kernel"]);
        assert!(lines.len() == 3 && lines[2].ends_with(" s  the programs"), "{text}");
    }
}
