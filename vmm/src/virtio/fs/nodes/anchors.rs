//! How many descriptors keep files that have no name.

use std::collections::HashMap;

/// The numbers of anchors.
pub(super) struct Anchors {
    most: usize,
    all: usize,
    by_device: HashMap<u64, usize>,
}

impl Anchors {
    /// There may be `most`.
    pub(super) fn new(most: usize) -> Self {
        Self { most, all: 0, by_device: HashMap::new() }
    }

    /// Whether the file system with this device number may have no further one. It may have half of all at most: one
    /// container that removes files and keeps them open must not keep the others of its pod from removing theirs.
    pub(super) fn are_full(&self, device: u64) -> bool {
        let of_device = self.by_device.get(&device).copied().unwrap_or_default();
        self.all >= self.most || of_device >= self.most.div_ceil(2)
    }

    pub(super) fn add(&mut self, device: u64) {
        self.all += 1;
        *self.by_device.entry(device).or_default() += 1;
    }

    pub(super) fn remove(&mut self, device: u64) {
        self.all -= 1;
        if let Some(count) = self.by_device.get_mut(&device) {
            *count -= 1;
            if *count == 0 {
                self.by_device.remove(&device);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_system_leaves_half_to_the_others() {
        let mut anchors = Anchors::new(4);
        anchors.add(1);
        assert!(!anchors.are_full(1));
        anchors.add(1);
        assert!(anchors.are_full(1) && !anchors.are_full(2));
        anchors.add(2);
        anchors.add(2);
        assert!(anchors.are_full(3));
        anchors.remove(1);
        assert!(!anchors.are_full(3) && anchors.are_full(2));
    }
}
