//! The guest's memory, its place in KVM, and its place in a file.

use std::{
    fs::File,
    io::{self, Write},
    ops::Range,
    os::fd::AsRawFd,
    ptr,
    sync::Arc,
};

use bulkhead_vmm_api::BLOCK_MIB;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemory as _, GuestMemoryRegion as _, MemoryRegionAddress, MmapRegion,
    VolatileSlice,
};

pub use self::{
    pool::Pool,
    regions::{GuestMemory, Region},
};
use crate::arch::layout;

#[cfg(feature = "fuzz")]
pub mod hook;
mod pool;
mod regions;

/// Of a huge page on x86_64. Addresses of the guest and of this process must be the same modulo this size, or
/// KVM maps huge pages in small ones.
const HUGE_PAGE: usize = 2 << 20;
/// The smallest page of x86_64: the unit in which memory is saved, mapped again and released.
const PAGE: usize = 4096;
/// To what is the guest's.
const ACCESS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
/// So many empty pages are saved along when what is on both sides of them is saved: each [`Extent`] is one more mapping.
const MAX_GAP: usize = 16;

/// Why there is no memory for the guest.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("memory_mib, max_memory_mib: cannot map {mib} MiB for the guest")]
    Map { mib: u64, source: io::Error },
    #[error("hugepages: the host's kernel has no pool of huge pages of 2 MiB")]
    NoPool(#[source] io::Error),
    #[error(
        "hugepages: the host's pool of huge pages lacks {} MiB; raise vm.nr_hugepages by {pages}, or have other VMs end",
        pages * 2
    )]
    Pool { pages: u64 },
    #[error(
        "hugepages: the host does not give the VM {mib} MiB of its huge pages; look at hugetlb.2MB.max of the pod's cgroup"
    )]
    PoolRefused { mib: u64, source: io::Error },
    #[error("cannot have the guest's memory grow by {mib} MiB in all")]
    Grow { mib: u64, source: io::Error },
    #[error("KVM does not take the guest's memory at {start:#x} ({size:#x} bytes)")]
    Slot { start: u64, size: u64, source: kvm_ioctls::Error },
    #[error("the saved memory has {found} bytes and not {expected}")]
    Size { found: u64, expected: u64 },
    #[error(
        "the saved memory has a piece of {len:#x} bytes for {start:#x}, which is no place of the guest's memory"
    )]
    Extent { start: u64, len: u64 },
    #[error("cannot map the saved memory")]
    MapSaved(#[source] io::Error),
}

/// A piece of saved memory. The pieces follow one another in the file, without a gap; all other memory was empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// Address of the guest, a multiple of 4096.
    pub start: u64,
    /// Bytes, a multiple of 4096.
    pub len: u64,
}

/// What a guest has from the start, and what it may come to have, MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub mib: u32,
    pub max_mib: u32,
}

impl Size {
    /// As the configuration has it.
    pub fn new(memory_mib: u32, max_memory_mib: Option<u32>) -> Self {
        Self { mib: memory_mib, max_mib: max_memory_mib.unwrap_or(memory_mib) }
    }
}

/// Maps a guest's memory: private, anonymous, not reserved, so that it costs nothing until the guest touches it; or in huge
/// pages of `pool`, which the guest has from the start, and what it grows by from then on. What does not fit below the device
/// hole lies above it, and what it may grow by above that.
pub fn allocate(size: Size, pool: Option<Pool>) -> Result<GuestMemory, MemoryError> {
    let bytes = u64::from(size.mib) << 20;
    let low = bytes.min(layout::MMIO_HOLE_START);
    let mut ranges = vec![(0, low)];
    if bytes > low {
        ranges.push((layout::MMIO_HOLE_END, bytes - low));
    }
    let growth = u64::from(size.max_mib.saturating_sub(size.mib)) << 20;
    lay_out_in(pool.map(Arc::new).as_ref(), &ranges, growth)
}

/// Maps memory at these places, as addresses of the guest and bytes, and room above them for `growth` bytes more.
pub fn lay_out(ranges: &[(u64, u64)], growth: u64) -> Result<GuestMemory, MemoryError> {
    lay_out_in(None, ranges, growth)
}

/// None: of the host's ordinary pages.
fn lay_out_in(
    pool: Option<&Arc<Pool>>,
    ranges: &[(u64, u64)],
    growth: u64,
) -> Result<GuestMemory, MemoryError> {
    const BLOCK: u64 = (BLOCK_MIB as u64) << 20;
    let mut regions = Vec::with_capacity(ranges.len() + 1);
    for (start, size) in ranges {
        let mapping = match pool {
            Some(pool) => map_huge(pool, *size)?,
            None => map(*size, ACCESS)?,
        };
        regions.push(Region::whole(mapping, GuestAddress(*start), pool.cloned()));
    }
    if growth > 0 {
        let end = ranges.iter().map(|(start, size)| start + size).max().unwrap_or(0);
        let start = end.max(layout::MMIO_HOLE_END).next_multiple_of(BLOCK);
        regions.push(Region::empty(map(growth, libc::PROT_NONE)?, GuestAddress(start), pool.cloned()));
    }
    Ok(GuestMemory::new(regions))
}

/// Maps `size` bytes of `pool`.
#[allow(unsafe_code)]
fn map_huge(pool: &Pool, size: u64) -> Result<Mapping, MemoryError> {
    let len = size as usize;
    let start = pool.map(len)?;
    let addresses = Addresses { start: start.addr(), len };
    // SAFETY: the range is mapped with this access, is unmapped when this region is dropped, and has no other user.
    let region = unsafe { MmapRegion::build_raw(start, len, ACCESS, Pool::FLAGS) };
    let failed = |error| MemoryError::Map { mib: size >> 20, source: io::Error::other(error) };
    Ok(Mapping { region: region.map_err(failed)?, _addresses: addresses })
}

/// Maps `size` bytes that start at a multiple of [`HUGE_PAGE`], in huge pages where the host has some. In the
/// rig a guest of 256 MiB started and ended in 1.35 s with them and 1.85 s without, and had touched 38 and 32
/// MiB. Linux aligns such mappings by itself only since 6.7. What is reserved on both sides for the sake of
/// the alignment stays there, without access, as a guard.
fn map(size: u64, access: libc::c_int) -> Result<Mapping, MemoryError> {
    map_aligned(size as usize, access).map_err(|source| MemoryError::Map { mib: size >> 20, source })
}

#[allow(unsafe_code)]
fn map_aligned(size: usize, access: libc::c_int) -> io::Result<Mapping> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let reserved = size.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: a mapping at an address of the kernel's choice replaces nothing. vm-memory's own mapping cannot
    // be aligned.
    let start = unsafe { libc::mmap(ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let addresses = Addresses { start: start.addr(), len: reserved };
    let aligned = start.wrapping_byte_add(start.align_offset(HUGE_PAGE));
    // SAFETY: `aligned..aligned + size` lies within the reservation just made, which nothing else knows of.
    let mapped = unsafe { libc::mmap(aligned, size, access, flags | libc::MAP_FIXED, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // A host without huge pages says EINVAL, and its guests do without.
    // SAFETY: the advice is for the mapping just made, and does not change what it holds.
    unsafe { libc::madvise(mapped, size, libc::MADV_HUGEPAGE) };
    // SAFETY: the range is mapped with this access, is unmapped when this region is dropped, and has no other user; what
    // cannot be accessed yet, `Region` gives nobody.
    let region = unsafe { MmapRegion::build_raw(mapped.cast(), size, access, flags) };
    Ok(Mapping { region: region.map_err(io::Error::other)?, _addresses: addresses })
}

/// Mapped memory, and what is reserved around it.
#[derive(Debug)]
struct Mapping {
    region: MmapRegion,
    _addresses: Addresses,
}

/// Addresses of this process that nobody else gets, until this is dropped: KVM must not know them any more then.
#[derive(Debug)]
struct Addresses {
    start: usize,
    len: usize,
}

impl Drop for Addresses {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value, all that is in it is the region beside it, and what was borrowed of that
        // has been given back. It cannot fail for a range that was mapped. vm-memory's own regions do the same.
        unsafe { libc::munmap(ptr::without_provenance_mut(self.start), self.len) };
    }
}

/// Writes what is not empty of `memory` to `file`, which is. No vCPU runs and no device works meanwhile.
pub fn save(memory: &GuestMemory, file: &mut File) -> io::Result<Vec<Extent>> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut page = [0; PAGE];
    for region in memory.iter() {
        let start = region.start_addr().raw_value();
        for (index, _) in resident(region)?.into_iter().enumerate().filter(|(_, resident)| *resident) {
            let address = start + (index * PAGE) as u64;
            region
                .read_slice(&mut page, MemoryRegionAddress((index * PAGE) as u64))
                .map_err(io::Error::other)?;
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

/// Memory as [`allocate`] makes it, in which the pieces of `file` are at their places. It shares their pages with all others
/// that were made of the file, until it writes to them.
pub fn restore(size: Size, file: &File, extents: &[Extent]) -> Result<GuestMemory, MemoryError> {
    let expected = extents.iter().fold(0u64, |sum, extent| sum.saturating_add(extent.len));
    let found = file.metadata().map_err(MemoryError::MapSaved)?.len();
    // Memory that is mapped beyond the end of its file is death to whoever touches it.
    if found != expected {
        return Err(MemoryError::Size { found, expected });
    }
    let memory = allocate(size, None)?;
    let mut offset = 0;
    for extent in extents {
        map_extent(&memory, file, offset, *extent)?;
        offset += extent.len;
    }
    Ok(memory)
}

/// Which pages of `region` somebody has touched (mincore(2)). Looking at one that nobody has would touch it.
#[allow(unsafe_code)]
fn resident(region: &Region) -> io::Result<Vec<bool>> {
    let len = region.len() as usize;
    let mut pages = vec![0u8; len.div_ceil(PAGE)];
    // SAFETY: the range is a mapping that `region` owns; the kernel writes a byte for each of its pages, for which there is
    // room. Nothing safe says what is resident.
    match unsafe { libc::mincore(region.host_address().cast(), len, pages.as_mut_ptr()) } {
        0 => Ok(pages.iter().map(|page| page & 1 != 0).collect()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts the bytes of `file` from `offset` on in the place of `extent`.
#[allow(unsafe_code)]
fn map_extent(memory: &GuestMemory, file: &File, offset: u64, extent: Extent) -> Result<(), MemoryError> {
    let Extent { start, len } = extent;
    let misplaced = || MemoryError::Extent { start, len };
    let aligned = start % PAGE as u64 == 0 && len % PAGE as u64 == 0 && len > 0;
    let size = usize::try_from(len).ok().filter(|_| aligned).ok_or_else(misplaced)?;
    // In one region from its first byte to its last, or it is refused.
    let place = memory.get_slice(GuestAddress(start), size).map_err(|_| misplaced())?.ptr_guard_mut();
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range, of whole pages, lies in a mapping that `memory` owns and nobody has used yet; what replaces it there
    // can be read and written as well, and stays as long. vm-memory maps a region of one file, not pieces of it.
    let mapped = unsafe {
        libc::mmap(place.as_ptr().cast(), size, access, flags, file.as_raw_fd(), offset as libc::off_t)
    };
    if mapped == libc::MAP_FAILED { Err(MemoryError::MapSaved(io::Error::last_os_error())) } else { Ok(()) }
}

/// KVM's side of the guest's memory.
pub struct Slots {
    memory: GuestMemory,
    /// Number of the next one.
    next: u32,
}

impl Slots {
    /// Makes `memory` the guest's of `vm`, a slot for each region.
    pub fn register(vm: &VmFd, memory: &GuestMemory) -> Result<Self, MemoryError> {
        let mut slots = Self { memory: memory.clone(), next: 0 };
        for region in memory.iter() {
            slots.next = set_slot(vm, slots.next, region, 0..region.len())?;
        }
        Ok(slots)
    }

    /// Has the region that may grow be of `len` bytes, whole pages, if it is shorter. The devices and the vCPUs get at what
    /// is beyond only now.
    pub fn grow(&mut self, vm: &VmFd, len: u64) -> Result<(), MemoryError> {
        let Some(region) = self.memory.growing().filter(|region| region.len() < len) else { return Ok(()) };
        let added = region.len()..len;
        // One more slot, since one that is to be longer has to be taken away for a moment, in which the guest may need it.
        region.grow(len, || {
            self.next = set_slot(vm, self.next, region, added)?;
            Ok(())
        })
    }
}

/// Makes a part of `region` the guest's of `vm`, as this slot, and answers the number of the next one.
#[allow(unsafe_code)]
fn set_slot(vm: &VmFd, slot: u32, region: &Region, part: Range<u64>) -> Result<u32, MemoryError> {
    let (start, size) = (region.start_addr().raw_value() + part.start, part.end - part.start);
    let memory = kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: start,
        memory_size: size,
        userspace_addr: region.host_address() as u64 + part.start,
    };
    // SAFETY: the range is a mapping of `size` bytes that nothing in this process refers to but through
    // `memory`'s volatile accessors. The caller keeps `memory` for as long as it runs vCPUs of `vm` (`Vm`
    // owns both). KVM has no safe call for this.
    match unsafe { vm.set_user_memory_region(memory) } {
        Ok(()) => Ok(slot + 1),
        Err(source) => Err(MemoryError::Slot { start, size, source }),
    }
}

/// Gives the whole pages in `piece`, of guest memory that is none of a [`Pool`]'s, back to the host. They cost nothing
/// until the guest touches them again, and what they hold by then is anything but what they held: zeros, or, where the
/// mapping is a private one of a file, what the file has there. Either is right for pages of which nobody expects
/// anything. MADV_FREE would leave them with the process until the host is short of memory, and MADV_REMOVE would make
/// holes in such a file.
#[allow(unsafe_code)]
pub fn release(piece: &VolatileSlice<'_>) -> io::Result<()> {
    let start = piece.ptr_guard_mut().as_ptr();
    let before = start.align_offset(PAGE);
    let whole = piece.len().saturating_sub(before) / PAGE * PAGE;
    if whole == 0 {
        return Ok(());
    }
    // SAFETY: the pages lie within `piece`, so that they are mapped, and whoever has such a piece may write whatever he
    // likes to it. They stay mapped. There is no safe call for this.
    match unsafe { libc::madvise(start.wrapping_add(before).cast(), whole, libc::MADV_DONTNEED) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_goes_with_its_vm() {
        // More in all than a process has addresses (2^47).
        for _ in 0..3000 {
            lay_out(&[(0, 0x1000)], 64 << 30).unwrap();
        }
    }

    #[test]
    fn what_is_beyond_what_it_has_grown_to_is_no_memory() {
        let memory = allocate(Size::new(64, Some(64 + 1024)), None).unwrap();
        let region = memory.growing().unwrap();
        let start = region.start_addr();
        assert_eq!((start.0, region.capacity(), region.len()), (4 << 30, 1 << 30, 0));
        let other = memory.clone();
        assert!(other.read_obj::<u8>(start).is_err() && !other.address_in_range(start));
        assert_eq!(other.iter().count(), 1);

        for end in [128 << 20, 512 << 20] {
            let last = GuestAddress(start.0 + end - 8);
            let register = || {
                assert!(other.read_obj::<u64>(last).is_err(), "the devices get at it before the vCPUs");
                Ok(())
            };
            region.grow(end, register).unwrap();
            other.write_obj(end, last).unwrap();
            assert!(other.read_obj::<u64>(GuestAddress(start.0 + end - 4)).is_err());
            assert!(other.get_slice(start, end as usize + 1).is_err());
        }
        // One piece, wherever it has grown.
        assert_eq!(other.get_slice(start, 512 << 20).unwrap().len(), 512 << 20);
        assert_eq!(other.read_obj::<u64>(GuestAddress(start.0 + (128 << 20) - 8)).unwrap(), 128 << 20);
        let error = region.grow((1 << 30) + (1 << 20), || Ok(())).unwrap_err().to_string();
        assert_eq!(error, "cannot have the guest's memory grow by 1025 MiB in all");
        // What KVM does not take is nobody's.
        let refused = || Err(MemoryError::Extent { start: 0, len: 0 });
        assert!(region.grow(1 << 30, refused).is_err() && region.len() == 512 << 20);
    }

    /// What is on a machine whose pool has enough is tested end to end; here nobody can know what it has.
    #[test]
    fn a_pool_that_is_too_small_is_told_and_left_as_it_is() {
        let Ok(pool) = Pool::open() else {
            // Without huge pages in the kernel that is what an operator hears.
            let error = Pool::open().unwrap_err().to_string();
            assert_eq!(error, "hugepages: the host's kernel has no pool of huge pages of 2 MiB");
            return;
        };
        // More than any machine has.
        let size = 1 << 45;
        let lacks = 2 * pool.missing(size).unwrap();
        let error = lay_out_in(Some(&Arc::new(pool)), &[(0, size as u64)], 0).unwrap_err().to_string();
        let expected =
            format!("hugepages: the host's pool of huge pages lacks {lacks} MiB; raise vm.nr_hugepages");
        assert!(error.starts_with(&expected), "{error}");
    }

    #[test]
    fn it_grows_above_all_else() {
        let start = |mib| {
            let memory = allocate(Size::new(mib, Some(mib + 128)), None).unwrap();
            memory.growing().unwrap().start_addr().0
        };
        assert_eq!(start(256), 4 << 30);
        assert_eq!(start(3 * 1024 + 1), (4 << 30) + (128 << 20));
        assert!(allocate(Size::new(64, None), None).unwrap().growing().is_none());
    }

    #[test]
    fn all_of_it_can_be_used_and_huge_pages_fit() {
        let memory = allocate(Size::new(3 * 1024 + 64, None), None).unwrap();
        let regions: Vec<_> = memory.iter().map(|region| (region.start_addr().0, region.len())).collect();
        assert_eq!(regions, [(0, 3 << 30), (4 << 30, 64 << 20)]);
        for region in memory.iter() {
            assert_eq!(region.host_address() as usize % HUGE_PAGE, 0);
        }
        for address in [0, (3 << 30) - 8, 4 << 30, (4 << 30) + (64 << 20) - 8] {
            memory.write_obj(address, GuestAddress(address)).unwrap();
            assert_eq!(memory.read_obj::<u64>(GuestAddress(address)).unwrap(), address);
        }
        assert!(memory.write_obj(0u64, GuestAddress(3 << 30)).is_err());
    }

    fn filled(memory: &GuestMemory, addresses: &[u64]) {
        for address in addresses {
            memory.write_obj(*address, GuestAddress(*address)).unwrap();
        }
    }

    #[test]
    fn what_is_saved_is_found_again_and_nothing_else_is_in_the_file() {
        let mib = 3 * 1024 + 64;
        let memory = allocate(Size::new(mib, None), None).unwrap();
        // Two near one another, one far, the last word below the hole and the first above.
        let addresses = [0x5008, 0x9000, 64 << 20, (3 << 30) - 8, 4 << 30];
        filled(&memory, &addresses);
        // Touched, and empty.
        memory.write_obj(0u64, GuestAddress(128 << 20)).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let extents = save(&memory, &mut file).unwrap();
        let places: Vec<_> = extents.iter().map(|extent| (extent.start, extent.len)).collect();
        let page = PAGE as u64;
        assert_eq!(places, [(0x5000, 5 * page), (64 << 20, page), ((3 << 30) - page, page), (4 << 30, page)]);
        assert_eq!(file.metadata().unwrap().len(), 8 * page);

        let again = restore(Size::new(mib, None), &file, &extents).unwrap();
        for address in addresses {
            assert_eq!(again.read_obj::<u64>(GuestAddress(address)).unwrap(), address);
        }
        assert_eq!(again.read_obj::<u64>(GuestAddress(128 << 20)).unwrap(), 0);
    }

    #[test]
    fn what_one_clone_writes_no_other_reads() {
        let memory = allocate(Size::new(64, None), None).unwrap();
        filled(&memory, &[0x1000]);
        let mut file = tempfile::tempfile().unwrap();
        let extents = save(&memory, &mut file).unwrap();
        let [one, other] = [(); 2].map(|()| restore(Size::new(64, None), &file, &extents).unwrap());
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
        let error = restore(Size::new(64, None), &file, &extents).unwrap_err().to_string();
        assert_eq!(error, "the saved memory has 4096 bytes and not 8192");
    }

    #[test]
    fn a_piece_that_has_no_place_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let end = 64 << 20;
        for start in [end, end - 4096, 0x800, u64::MAX - 4095] {
            let error = restore(Size::new(64, None), &file, &[Extent { start, len: 8192 }]).unwrap_err();
            assert!(matches!(error, MemoryError::Extent { .. }), "{start:#x}: {error}");
        }
    }
}
