//! Guest memory in a file.

use std::{
    fs::File,
    io::{self, Write},
    os::{fd::AsRawFd, unix::fs::FileExt},
};

use serde::{Deserialize, Serialize};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _, MemoryRegionAddress,
};

use crate::{
    GuestMemory,
    memory::{
        MemoryError, Region, Size, allocate,
        page::{ACCESS, PAGE},
        use_small_pages,
    },
};

/// If two used pages have at most this many empty pages between them, these are saved too. Each [`Extent`] takes a
/// mapping of its own when the memory is restored.
const MAX_GAP: usize = 16;

/// The largest block that Linux allocates at once, bytes (MAX_PAGE_ORDER).
const LARGEST_BLOCK: u64 = 4 << 20;

/// Why saved memory could not be restored.
#[derive(Debug, thiserror::Error)]
pub enum SavedMemoryError {
    #[error(transparent)]
    Allocate(#[from] MemoryError),
    #[error("the file of the saved memory has {found} bytes instead of {expected}")]
    Size { found: u64, expected: u64 },
    #[error("an extent of {len:#x} bytes at {start:#x} is not in the guest's memory")]
    Extent { start: u64, len: u64 },
    #[error("cannot map the saved memory")]
    Map(#[source] io::Error),
}

/// A range of saved memory. The extents follow one another in the file without gaps. All other memory was empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// Guest address, a multiple of 4096.
    pub start: u64,
    /// Bytes, a multiple of 4096.
    pub len: u64,
}

/// Writes all pages of `memory` that are not empty to `file`, which must be empty. No vCPU and no device may run
/// meanwhile. `page_map` is that of [`open_page_map`].
pub fn save_memory(
    memory: &GuestMemory,
    file: &mut File,
    page_map: Option<&File>,
) -> io::Result<Vec<Extent>> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut page = [0; PAGE];
    for region in memory.iter() {
        let start = region.start_addr().raw_value();
        for (index, _) in touched(region, page_map)?.into_iter().enumerate().filter(|(_, touched)| *touched) {
            let offset = (index * PAGE) as u64;
            let address = start + offset;
            region.read_slice(&mut page, MemoryRegionAddress(offset)).map_err(io::Error::other)?;
            if page.iter().all(|byte| *byte == 0) {
                continue;
            }
            match extents.last_mut() {
                Some(last)
                    if address - (last.start + last.len) <= (MAX_GAP * PAGE) as u64
                        && last.start >= start =>
                {
                    let gap = address - (last.start + last.len);
                    io::copy(&mut io::Read::take(io::repeat(0), gap), file)?;
                    last.len += gap + PAGE as u64;
                }
                _ => extents.push(Extent { start: address, len: PAGE as u64 }),
            }
            file.write_all(&page)?;
        }
    }
    Ok(extents)
}

/// Allocates memory and maps the extents of `file` into it. All VMs that were restored from a file share its pages,
/// until they write to them.
pub fn restore_memory(size: Size, file: &File, extents: &[Extent]) -> Result<GuestMemory, SavedMemoryError> {
    let expected = extents.iter().fold(0u64, |sum, extent| sum.saturating_add(extent.len));
    let found = file.metadata().map_err(SavedMemoryError::Map)?.len();
    // An access to a page that is mapped beyond the end of its file kills the process by SIGBUS.
    if found != expected {
        return Err(SavedMemoryError::Size { found, expected });
    }
    let memory = allocate(size, None)?;
    for (start, len) in used_blocks(extents) {
        // `get_slice` fails if memory ends within the block, which then may have huge pages, and for an extent outside
        // of memory, which `map_extent` refuses.
        if let Ok(block) = memory.get_slice(GuestAddress(start), len) {
            use_small_pages(&block);
        }
    }
    let mut offset = 0;
    for extent in extents {
        map_extent(&memory, file, offset, *extent)?;
        offset += extent.len;
    }
    Ok(memory)
}

/// The file of this process that says which pages it has (Documentation/admin-guide/mm/pagemap.rst). None on a kernel
/// without it (CONFIG_PROC_PAGE_MONITOR).
pub fn open_page_map() -> io::Result<Option<File>> {
    match File::open("/proc/self/pagemap") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// For each page of `region`, whether it was touched. Reading a page that was not touched would take time, and a page
/// table. If there is no page map, all of them may have been.
///
/// mincore(2) does not tell a page that the host has swapped out from one that was never touched.
fn touched(region: &Region, page_map: Option<&File>) -> io::Result<Vec<bool>> {
    const ENTRY: usize = size_of::<u64>();
    /// Bits 62 and 63: the page is swapped out, or in memory.
    const HAS_CONTENT: u64 = 3 << 62;
    let pages = (region.len() as usize).div_ceil(PAGE);
    let Some(page_map) = page_map else { return Ok(vec![true; pages]) };
    let mut entries = vec![0; pages * ENTRY];
    page_map.read_exact_at(&mut entries, (region.host_address().addr() / PAGE * ENTRY) as u64)?;
    let entries = entries.as_chunks::<ENTRY>().0.iter();
    Ok(entries.map(|entry| u64::from_ne_bytes(*entry) & HAS_CONTENT != 0).collect())
}

/// The blocks of [`LARGEST_BLOCK`] bytes that the template has used a part of: start and length of each run of them.
///
/// The guest's kernel allocates from the smallest free block that is large enough, so it takes the rest of these blocks
/// before it divides another. With huge pages, the first page that an idle guest writes to there would cost 2 MiB.
fn used_blocks(extents: &[Extent]) -> Vec<(u64, usize)> {
    let mut runs: Vec<(u64, usize)> = Vec::new();
    for Extent { start, len } in extents {
        let first = start / LARGEST_BLOCK * LARGEST_BLOCK;
        let end = start.saturating_add(*len).div_ceil(LARGEST_BLOCK).saturating_mul(LARGEST_BLOCK);
        match runs.last_mut() {
            Some((run, len)) if *run <= first && first <= run.saturating_add(*len as u64) => {
                *len = (*len).max((end - *run) as usize);
            }
            _ => runs.push((first, (end - first) as usize)),
        }
    }
    runs
}

/// Maps the bytes of `file` from `offset` on to the guest addresses of `extent`.
#[allow(unsafe_code)]
fn map_extent(
    memory: &GuestMemory,
    file: &File,
    offset: u64,
    extent: Extent,
) -> Result<(), SavedMemoryError> {
    let Extent { start, len } = extent;
    let misplaced = || SavedMemoryError::Extent { start, len };
    let aligned = start % PAGE as u64 == 0 && len % PAGE as u64 == 0 && len > 0;
    let size = usize::try_from(len).ok().filter(|_| aligned).ok_or_else(misplaced)?;
    // The extent must be inside a single region.
    let target = memory.get_slice(GuestAddress(start), size).map_err(|_| misplaced())?.ptr_guard_mut();
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range consists of whole pages of a mapping that `memory` owns and nothing uses yet. The new mapping
    // has the same access and stays as long. vm-memory can map a whole region of a file, but not parts of it.
    let mapped = unsafe {
        libc::mmap(target.as_ptr().cast(), size, ACCESS, flags, file.as_raw_fd(), offset as libc::off_t)
    };
    if mapped == libc::MAP_FAILED { Err(SavedMemoryError::Map(io::Error::last_os_error())) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(memory: &GuestMemory, addresses: &[u64]) {
        for address in addresses {
            memory.write_obj(*address, GuestAddress(*address)).unwrap();
        }
    }

    fn save(memory: &GuestMemory, file: &mut File) -> io::Result<Vec<Extent>> {
        save_memory(memory, file, open_page_map().unwrap().as_ref())
    }

    /// This host may have no swap. Then the page stays in memory.
    #[test]
    #[allow(unsafe_code)]
    fn a_page_that_the_host_has_swapped_out_is_saved() {
        let memory = allocate(Size::new(64, None), None).unwrap();
        filled(&memory, &[0x20_1008]);
        let page = memory.get_slice(GuestAddress(0x20_1000), PAGE).unwrap().ptr_guard_mut();
        // SAFETY: the page is mapped, and its content stays.
        assert_eq!(unsafe { libc::madvise(page.as_ptr().cast(), PAGE, libc::MADV_PAGEOUT) }, 0);
        let mut file = tempfile::tempfile().unwrap();
        let extents = save(&memory, &mut file).unwrap();
        let again = restore_memory(Size::new(64, None), &file, &extents).unwrap();
        assert_eq!(again.read_obj::<u64>(GuestAddress(0x20_1008)).unwrap(), 0x20_1008);
    }

    #[test]
    fn what_is_saved_is_found_again_and_nothing_else_is_in_the_file() {
        let mib = 3 * 1024 + 64;
        let memory = allocate(Size::new(mib, None), None).unwrap();
        // Two pages that are near each other, one at a distance, the last word below the hole, and the first word
        // above it.
        let addresses = [0x5008, 0x9000, 64 << 20, (3 << 30) - 8, 4 << 30];
        filled(&memory, &addresses);
        // This page was touched and is empty.
        memory.write_obj(0u64, GuestAddress(128 << 20)).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let extents = save(&memory, &mut file).unwrap();
        let places: Vec<_> = extents.iter().map(|extent| (extent.start, extent.len)).collect();
        let page = PAGE as u64;
        assert_eq!(places, [(0x5000, 5 * page), (64 << 20, page), ((3 << 30) - page, page), (4 << 30, page)]);
        assert_eq!(file.metadata().unwrap().len(), 8 * page);

        let again = restore_memory(Size::new(mib, None), &file, &extents).unwrap();
        for address in addresses {
            assert_eq!(again.read_obj::<u64>(GuestAddress(address)).unwrap(), address);
        }
        assert_eq!(again.read_obj::<u64>(GuestAddress(128 << 20)).unwrap(), 0);
    }

    #[test]
    fn partly_used_blocks_have_small_pages() {
        let block = LARGEST_BLOCK;
        let extents =
            [(0x5000, 0x1000), (block - 0x1000, 0x2000), (3 * block, block), (5 * block + 0x1000, 0x1000)];
        let extents = extents.map(|(start, len)| Extent { start, len });
        let size = block as usize;
        assert_eq!(used_blocks(&extents), [(0, 2 * size), (3 * block, size), (5 * block, size)]);

        let memory = allocate(Size::new(64, None), None).unwrap();
        filled(&memory, &[0x1000, 9 * block]);
        let mut file = tempfile::tempfile().unwrap();
        let extents = save(&memory, &mut file).unwrap();
        let clone = restore_memory(Size::new(64, None), &file, &extents).unwrap();
        let has_small_pages = |address: u64| {
            let address = clone.get_host_address(GuestAddress(address)).unwrap().addr();
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut is_inside = false;
            let flags = smaps.lines().find_map(|line| {
                if let Some(flags) = line.strip_prefix("VmFlags:") {
                    return is_inside.then_some(flags);
                }
                let range = line.split(' ').next().and_then(|range| range.split_once('-'));
                if let Some((start, end)) = range {
                    let parsed = |hex| usize::from_str_radix(hex, 16).unwrap();
                    is_inside = (parsed(start)..parsed(end)).contains(&address);
                }
                None
            });
            flags.unwrap().split(' ').any(|flag| flag == "nh")
        };
        let pages = [0x10_0000, block, 9 * block + 0x10_0000, 10 * block].map(has_small_pages);
        assert_eq!(pages, [true, false, true, false]);
    }

    #[test]
    fn what_one_clone_writes_no_other_reads() {
        let memory = allocate(Size::new(64, None), None).unwrap();
        filled(&memory, &[0x1000]);
        let mut file = tempfile::tempfile().unwrap();
        let extents = save(&memory, &mut file).unwrap();
        let [one, other] = [(); 2].map(|()| restore_memory(Size::new(64, None), &file, &extents).unwrap());
        one.write_obj(7u64, GuestAddress(0x1000)).unwrap();
        assert_eq!(one.read_obj::<u64>(GuestAddress(0x1000)).unwrap(), 7);
        assert_eq!(other.read_obj::<u64>(GuestAddress(0x1000)).unwrap(), 0x1000);
    }

    #[test]
    fn a_file_that_was_cut_is_refused() {
        let memory = allocate(Size::new(64, None), None).unwrap();
        filled(&memory, &[0x1000, 0x2000]);
        let mut file = tempfile::tempfile().unwrap();
        let extents = save(&memory, &mut file).unwrap();
        file.set_len(PAGE as u64).unwrap();
        let error = restore_memory(Size::new(64, None), &file, &extents).unwrap_err().to_string();
        assert_eq!(error, "the file of the saved memory has 4096 bytes instead of 8192");
    }

    #[test]
    fn a_piece_that_has_no_place_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let end = 64 << 20;
        for start in [end, end - 4096, 0x800, u64::MAX - 4095] {
            let error =
                restore_memory(Size::new(64, None), &file, &[Extent { start, len: 8192 }]).unwrap_err();
            assert!(matches!(error, SavedMemoryError::Extent { .. }), "{start:#x}: {error}");
        }
    }
}
