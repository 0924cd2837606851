//! Which blocks of a memory device are plugged.

use std::ops::Range;

/// The state of several blocks together, with the numbers of virtio 1.3, 5.15.6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockState {
    Plugged = 0,
    Unplugged = 1,
    Mixed = 2,
}

/// The usable blocks.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    is_plugged: Vec<bool>,
    plugged: u64,
}

impl Blocks {
    /// Increases the number of usable blocks to `count`. The new blocks are unplugged.
    pub(super) fn set_count(&mut self, count: u64) {
        self.is_plugged.resize(count as usize, false);
    }

    /// The number of usable blocks.
    pub(super) fn count(&self) -> u64 {
        self.is_plugged.len() as u64
    }

    /// The number of plugged blocks.
    pub(super) fn plugged(&self) -> u64 {
        self.plugged
    }

    /// The state of `blocks`, a range of usable blocks that is not empty.
    pub(super) fn state(&self, blocks: Range<u64>) -> BlockState {
        let blocks = &self.is_plugged[indices(blocks)];
        match blocks.iter().filter(|is_plugged| **is_plugged).count() {
            0 => BlockState::Unplugged,
            count if count == blocks.len() => BlockState::Plugged,
            _ => BlockState::Mixed,
        }
    }

    /// Marks `blocks`, a range of usable blocks, as plugged or unplugged.
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
            (4, BlockState::Plugged, BlockState::Unplugged)
        );
        blocks.set_count(16);
        assert_eq!((blocks.state(5..7), blocks.state(6..16)), (BlockState::Mixed, BlockState::Unplugged));
        blocks.set(0..4, false);
        assert_eq!((blocks.plugged(), blocks.state(0..16)), (2, BlockState::Mixed));
    }
}
