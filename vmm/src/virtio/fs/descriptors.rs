//! Descriptors that are kept open for later use, up to a limit.

use std::{any::Any, collections::HashMap, os::fd::OwnedFd, sync::Arc};

/// A limited number of descriptors, each with a number. If there are too many, one that was not used recently is
/// removed (clock algorithm). Removed descriptors are returned, so that the caller decides when they are closed.
pub(super) struct Descriptors {
    most: usize,
    kept: Vec<Kept>,
    /// The index in `kept` of each number.
    places: HashMap<u64, usize>,
    hand: usize,
}

/// A descriptor that is not needed any more. Closing it may wait for its file system.
pub(super) struct Unused {
    /// The device number of the file system.
    pub(super) device: u64,
    /// A descriptor, or what has one.
    pub(super) _kept: Arc<dyn Any + Send + Sync>,
}

struct Kept {
    number: u64,
    device: u64,
    fd: Arc<OwnedFd>,
    /// Whether the descriptor was used since the hand passed it.
    is_used: bool,
}

impl Descriptors {
    /// Keeps up to `most` descriptors, and at least one.
    pub(super) fn new(most: usize) -> Self {
        Self { most: most.max(1), kept: Vec::new(), places: HashMap::new(), hand: 0 }
    }

    pub(super) fn get(&mut self, number: u64) -> Option<Arc<OwnedFd>> {
        let kept = &mut self.kept[*self.places.get(&number)?];
        kept.is_used = true;
        Some(kept.fd.clone())
    }

    /// A descriptor with a number of which `is_wanted` is true, if there is one.
    pub(super) fn find(&self, is_wanted: impl Fn(u64) -> bool) -> Option<Arc<OwnedFd>> {
        self.kept.iter().find(|kept| is_wanted(kept.number)).map(|kept| kept.fd.clone())
    }

    /// Adds `fd`, of a file on the file system `device`, with `number`. Returns a descriptor that was removed for it.
    /// If there is one with this number already, that one stays: two threads may have opened the same file.
    pub(super) fn insert(&mut self, number: u64, device: u64, fd: Arc<OwnedFd>) -> Option<Unused> {
        if self.places.contains_key(&number) {
            return Some(Unused { device, _kept: fd });
        }
        let new = Kept { number, device, fd, is_used: false };
        if self.kept.len() < self.most {
            self.places.insert(number, self.kept.len());
            self.kept.push(new);
            return None;
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
        let Kept { device, fd, .. } = std::mem::replace(&mut self.kept[self.hand], new);
        Some(Unused { device, _kept: fd })
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Unused> {
        let place = self.places.remove(&number)?;
        let removed = self.kept.swap_remove(place);
        if let Some(moved) = self.kept.get(place) {
            self.places.insert(moved.number, place);
        }
        Some(Unused { device: removed.device, _kept: removed.fd })
    }

    /// All descriptors.
    pub(super) fn into_unused(self) -> impl Iterator<Item = Unused> {
        self.kept.into_iter().map(|Kept { device, fd, .. }| Unused { device, _kept: fd })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn what_was_used_is_kept_and_no_more_than_may_be() {
        let open = || Arc::new(OwnedFd::from(File::open("/").unwrap()));
        let mut descriptors = Descriptors::new(4);
        let first = open();
        descriptors.insert(1, 0, first.clone());
        for number in 2..100 {
            descriptors.insert(number, 0, open());
            assert!(descriptors.kept.len() <= 4 && descriptors.places.len() == descriptors.kept.len());
            assert!(Arc::ptr_eq(&descriptors.get(1).unwrap(), &first), "{number}");
        }
        descriptors.remove(1);
        descriptors.remove(1);
        assert_eq!(Arc::strong_count(&first), 1);
        let left: Vec<_> = (1..100).filter(|number| descriptors.get(*number).is_some()).collect();
        assert_eq!(left.len(), 3);
        for number in left {
            descriptors.remove(number);
        }
        assert!(descriptors.kept.is_empty() && descriptors.places.is_empty());
    }
}
