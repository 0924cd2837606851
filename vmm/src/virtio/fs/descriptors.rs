//! Descriptors that are kept open because they may be needed again, and closed when there are too many.

use std::{collections::HashMap, os::fd::OwnedFd, rc::Rc};

/// A bounded number of descriptors, each under a number. When there are too many, one goes that was not used for long
/// (the clock algorithm).
pub(super) struct Descriptors {
    most: usize,
    kept: Vec<Kept>,
    /// Where each number is in `kept`.
    places: HashMap<u64, usize>,
    hand: usize,
}

struct Kept {
    number: u64,
    fd: Rc<OwnedFd>,
    /// Since the hand was here last.
    is_used: bool,
}

impl Descriptors {
    /// Keeps up to `most`, and at least one.
    pub(super) fn new(most: usize) -> Self {
        Self { most: most.max(1), kept: Vec::new(), places: HashMap::new(), hand: 0 }
    }

    pub(super) fn get(&mut self, number: u64) -> Option<Rc<OwnedFd>> {
        let kept = &mut self.kept[*self.places.get(&number)?];
        kept.is_used = true;
        Some(kept.fd.clone())
    }

    /// Keeps `fd` under a `number` that has none.
    pub(super) fn insert(&mut self, number: u64, fd: Rc<OwnedFd>) {
        let new = Kept { number, fd, is_used: false };
        if self.kept.len() < self.most {
            self.places.insert(number, self.kept.len());
            self.kept.push(new);
            return;
        }
        loop {
            self.hand = (self.hand + 1) % self.kept.len();
            let kept = &mut self.kept[self.hand];
            if !std::mem::take(&mut kept.is_used) {
                break;
            }
        }
        self.places.remove(&self.kept[self.hand].number);
        self.places.insert(number, self.hand);
        self.kept[self.hand] = new;
    }

    pub(super) fn remove(&mut self, number: u64) {
        let Some(place) = self.places.remove(&number) else { return };
        self.kept.swap_remove(place);
        if let Some(moved) = self.kept.get(place) {
            self.places.insert(moved.number, place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn what_was_used_is_kept_and_no_more_than_may_be() {
        let open = || Rc::new(OwnedFd::from(File::open("/").unwrap()));
        let mut descriptors = Descriptors::new(4);
        let first = open();
        descriptors.insert(1, first.clone());
        for number in 2..100 {
            descriptors.insert(number, open());
            assert!(descriptors.kept.len() <= 4 && descriptors.places.len() == descriptors.kept.len());
            assert!(Rc::ptr_eq(&descriptors.get(1).unwrap(), &first), "{number}");
        }
        descriptors.remove(1);
        descriptors.remove(1);
        assert_eq!(Rc::strong_count(&first), 1);
        let left: Vec<_> = (1..100).filter(|number| descriptors.get(*number).is_some()).collect();
        assert_eq!(left.len(), 3);
        for number in left {
            descriptors.remove(number);
        }
        assert!(descriptors.kept.is_empty() && descriptors.places.is_empty());
    }
}
