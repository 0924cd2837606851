//! Which blocks of a memory device are plugged.

use std::ops::Range;

/// Of some blocks together (virtio 1.3, 5.15.6). The numbers are those that the driver gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Plugged = 0,
    Unplugged = 1,
    Mixed = 2,
}

/// The blocks that are usable, by their numbers from 0.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    is_plugged: Vec<bool>,
    plugged: u64,
}

impl Blocks {
    /// Has `count` blocks be usable, at least as many as before. Those that are added are unplugged.
    pub(super) fn set_count(&mut self, count: u64) {
        self.is_plugged.resize(count as usize, false);
    }

    /// How many there are.
    pub(super) fn count(&self) -> u64 {
        self.is_plugged.len() as u64
    }

    /// How many are plugged.
    pub(super) fn plugged(&self) -> u64 {
        self.plugged
    }

    /// Of `blocks`, one or more, all of which are usable.
    pub(super) fn state(&self, blocks: Range<u64>) -> State {
        let blocks = &self.is_plugged[indices(blocks)];
        match blocks.iter().filter(|is_plugged| **is_plugged).count() {
            0 => State::Unplugged,
            count if count == blocks.len() => State::Plugged,
            _ => State::Mixed,
        }
    }

    /// Makes all of `blocks`, which are usable, plugged or unplugged.
    pub(super) fn set(&mut self, blocks: Range<u64>, plugged: bool) {
        for is_plugged in &mut self.is_plugged[indices(blocks)] {
            match (*is_plugged, plugged) {
                (false, true) => self.plugged += 1,
                (true, false) => self.plugged -= 1,
                (true, true) | (false, false) => {}
            }
            *is_plugged = plugged;
        }
    }
}

fn indices(blocks: Range<u64>) -> Range<usize> {
    blocks.start as usize..blocks.end as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_counted_once_and_stay_when_there_are_more() {
        let mut blocks = Blocks::default();
        blocks.set_count(8);
        blocks.set(2..5, true);
        blocks.set(4..6, true);
        assert_eq!(
            (blocks.plugged(), blocks.state(2..6), blocks.state(0..2)),
            (4, State::Plugged, State::Unplugged)
        );
        blocks.set_count(16);
        assert_eq!((blocks.state(5..7), blocks.state(6..16)), (State::Mixed, State::Unplugged));
        blocks.set(0..4, false);
        assert_eq!((blocks.plugged(), blocks.state(0..16)), (2, State::Mixed));
    }
}
