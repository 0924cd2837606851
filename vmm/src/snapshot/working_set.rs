//! Gives a clone the pages that it will touch first, before it runs.
//!
//! Otherwise the guest exits for each of them, and twice for most of those that it writes. That was nine of ten exits
//! until the first container ran.

use std::{io, path::Path};

use bulkhead_vmm_api::{LONGEST_WORKING_SET, Run, WORKING_SET_FILE, WorkingSet};
use kvm_ioctls::VcpuFd;
use vm_memory::{GuestAddress, GuestMemoryBackend as _};

use super::{memory_file::Extent, text_file::read_text};
use crate::{
    GuestMemory, kvm,
    memory::{page::PAGE, populate_for_writing},
};

/// Pieces of guest memory: address and bytes of each.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Pieces {
    read: Vec<(u64, usize)>,
    written: Vec<(u64, usize)>,
}

impl Pieces {
    /// Reads the working set of the template in `dir`, whose memory has these extents. There may be none.
    pub(super) fn read(dir: &Path, extents: &[Extent]) -> io::Result<Self> {
        let text = match read_text(&dir.join(WORKING_SET_FILE), LONGEST_WORKING_SET) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            text => text?,
        };
        let WorkingSet { read, written } = serde_json::from_str(&text)?;
        Ok(Self { read: places(&read, extents)?, written: places(&written, extents)? })
    }

    /// Maps the pages, and copies those that will be written. It is no error if the host cannot: then the guest exits
    /// for them.
    pub(super) fn map(&self, memory: &GuestMemory, vcpu: &VcpuFd) {
        for (address, len) in &self.written {
            let piece = memory.get_slice(GuestAddress(*address), *len);
            if piece.is_ok_and(|piece| populate_for_writing(&piece).is_err()) {
                return;
            }
        }
        for (address, len) in self.read.iter().chain(&self.written) {
            if kvm::map_pages(vcpu, *address, *len as u64).is_err() {
                return;
            }
        }
    }
}

/// Where pages of the memory's file are in the guest's memory.
fn places(runs: &[Run], extents: &[Extent]) -> io::Result<Vec<(u64, usize)>> {
    let mut places = Vec::with_capacity(runs.len());
    for (first, count) in runs {
        let page = PAGE as u64;
        let (mut start, end) = (u64::from(*first) * page, (u64::from(*first) + u64::from(*count)) * page);
        let mut offset = 0;
        for extent in extents {
            let next = offset + extent.len;
            if start < end && (offset..next).contains(&start) {
                let len = end.min(next) - start;
                places.push((extent.start + (start - offset), len as usize));
                start += len;
            }
            offset = next;
        }
        if start < end {
            let message = format!("{count} pages from {first} on are not in the template");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENTS: [Extent; 2] =
        [Extent { start: 0x1_0000, len: 0x3000 }, Extent { start: 0x80_0000, len: 0x2000 }];

    #[test]
    fn a_run_may_go_from_one_extent_to_the_next() {
        let found = places(&[(1, 3), (4, 1), (0, 0)], &EXTENTS).unwrap();
        assert_eq!(found, [(0x1_1000, 0x2000), (0x80_0000, 0x1000), (0x80_1000, 0x1000)]);
    }

    #[test]
    fn pages_that_the_template_does_not_have_are_an_error() {
        for run in [(5, 1), (4, 2), (u32::MAX, u32::MAX)] {
            let error = places(&[run], &EXTENTS).unwrap_err().to_string();
            assert_eq!(error, format!("{} pages from {} on are not in the template", run.1, run.0));
        }
    }

    #[test]
    fn a_template_may_have_no_working_set_and_a_damaged_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Pieces::read(dir.path(), &EXTENTS).unwrap(), Pieces::default());
        let file = dir.path().join(WORKING_SET_FILE);
        std::fs::write(&file, "{\"read\":[[0,1]],\"written\":[[3,1]]}").unwrap();
        let expected = Pieces { read: vec![(0x1_0000, PAGE)], written: vec![(0x80_0000, PAGE)] };
        assert_eq!(Pieces::read(dir.path(), &EXTENTS).unwrap(), expected);
        for damaged in ["", "{}", "{\"read\":[[0,-1]],\"written\":[]}", &" ".repeat(1 << 19)] {
            std::fs::write(&file, damaged).unwrap();
            assert!(Pieces::read(dir.path(), &EXTENTS).is_err(), "{damaged}");
        }
    }
}
