//! Which updates of a container were made, so that one that was late can be undone.

use super::error::ContainerError;
use crate::cgroup::Replaced;

/// The updates of a container, in the order of their numbers.
#[derive(Debug, Default)]
pub(super) struct Updates {
    /// The one that was made last, unless it was undone.
    pub(super) last: Option<(u64, Made)>,
    /// The one that was to be undone last. It is not made any more, and neither is an earlier one.
    undone: u64,
}

/// What an update that was made has replaced.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) limits: Replaced,
    pub(super) huge_pages: u64,
}

impl Updates {
    /// An update of this number begins. What it replaces is undone with it only.
    pub(super) fn begin(&mut self, number: u64) -> Result<(), ContainerError> {
        if number <= self.undone {
            return Err(ContainerError::UpdateUndone(number));
        }
        self.last = None;
        Ok(())
    }

    /// What the update of this number has replaced, if it is to be undone. It is not made later either.
    pub(super) fn undo(&mut self, number: u64) -> Option<Made> {
        self.undone = self.undone.max(number);
        self.last.take_if(|(last, _)| *last == number).map(|(_, made)| made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_that_was_undone_is_not_made_and_undoes_no_other_one() {
        let mut updates = Updates::default();
        let made = || Made { limits: Replaced::default(), huge_pages: 7 };
        updates.begin(1).unwrap();
        updates.last = Some((1, made()));
        // The second one has not come yet, or waits.
        assert!(updates.undo(2).is_none() && updates.last.is_some());
        assert!(matches!(updates.begin(2), Err(ContainerError::UpdateUndone(2))));
        // The third one fails, and puts back itself what it has changed.
        updates.begin(3).unwrap();
        assert!(updates.undo(3).is_none() && updates.undo(1).is_none());
        updates.begin(4).unwrap();
        updates.last = Some((4, made()));
        assert_eq!(updates.undo(4).map(|made| made.huge_pages), Some(7));
        assert!(updates.undo(4).is_none());
    }
}
