//! How many descriptors keep files that have no name.

use std::collections::HashMap;

use super::Limits;

/// The numbers of anchors.
#[derive(Default)]
pub(super) struct Anchors {
    all: usize,
    by_device: HashMap<u64, usize>,
}

impl Anchors {
    /// Whether the file system with this device number may have no further one. It may have half of all at most: one
    /// container that removes files and keeps them open must not keep the others of its pod from removing theirs.
    pub(super) fn are_full(&self, device: u64, limits: Limits) -> bool {
        let of_device = self.by_device.get(&device).copied().unwrap_or_default();
        self.all >= limits.anchors || of_device >= limits.anchors.div_ceil(2)
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
        let limits = Limits { idle: 1, open: 1, paths: 1, files: 1, anchors: 4 };
        let mut anchors = Anchors::default();
        anchors.add(1);
        assert!(!anchors.are_full(1, limits));
        anchors.add(1);
        assert!(anchors.are_full(1, limits) && !anchors.are_full(2, limits));
        anchors.add(2);
        anchors.add(2);
        assert!(anchors.are_full(3, limits));
        anchors.remove(1);
        assert!(!anchors.are_full(3, limits) && anchors.are_full(2, limits));
    }
}
