//! Mappings of guest memory in this process.

use std::{io, ptr};

use vm_memory::{MmapRegion, VolatileSlice};

use super::{
    MemoryError,
    huge_pages::Pool,
    page::{ACCESS, HUGE_PAGE, PAGE},
};

/// A mapping, and the addresses that are reserved around it.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) region: MmapRegion,
    _addresses: Addresses,
}

/// Addresses of this process, which are unmapped when this is dropped. KVM must not use them then.
#[derive(Debug)]
struct Addresses {
    start: usize,
    len: usize,
}

impl Drop for Addresses {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value. It contains only the region of the same `Mapping`, which is
        // dropped with it, and all borrows of that region have ended. munmap(2) cannot fail for a range that was
        // mapped. vm-memory unmaps its regions in the same way.
        unsafe { libc::munmap(ptr::without_provenance_mut(self.start), self.len) };
    }
}

/// Maps `size` bytes of `pool`.
#[allow(unsafe_code)]
pub(super) fn map_huge(pool: &Pool, size: u64) -> Result<Mapping, MemoryError> {
    let len = size as usize;
    let start = pool.map(len)?;
    let addresses = Addresses { start: start.addr(), len };
    // SAFETY: the range is mapped with this access, `addresses` unmaps it after the region, and nothing else uses it.
    let region = unsafe { MmapRegion::build_raw(start, len, ACCESS, Pool::FLAGS) };
    let failed = |error| MemoryError::Map { mib: size >> 20, source: io::Error::other(error) };
    Ok(Mapping { region: region.map_err(failed)?, _addresses: addresses })
}

/// Maps `size` bytes of private anonymous memory, without reserving swap space. The address is a multiple of
/// [`HUGE_PAGE`], so that the kernel can use transparent huge pages. In the rig a guest of 256 MiB started and ended
/// in 1.35 s with huge pages and in 1.85 s without; it had touched 38 and 32 MiB. Linux aligns such mappings by
/// itself only since 6.7.
///
/// The addresses that are reserved for the alignment stay reserved without access, as guard pages.
pub(super) fn map(size: u64, access: libc::c_int) -> Result<Mapping, MemoryError> {
    map_aligned(size as usize, access).map_err(|source| MemoryError::Map { mib: size >> 20, source })
}

#[allow(unsafe_code)]
fn map_aligned(size: usize, access: libc::c_int) -> io::Result<Mapping> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let reserved = size.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: the kernel chooses the address, so the mapping replaces nothing. vm-memory cannot align a mapping.
    let start = unsafe { libc::mmap(ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let addresses = Addresses { start: start.addr(), len: reserved };
    let aligned = start.wrapping_byte_add(start.align_offset(HUGE_PAGE));
    // SAFETY: `aligned..aligned + size` is inside the new reservation, which nothing else uses.
    let mapped = unsafe { libc::mmap(aligned, size, access, flags | libc::MAP_FIXED, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // Fails with EINVAL on a host without transparent huge pages. The guest works without them.
    // SAFETY: the range is the new mapping. The advice does not change its contents.
    unsafe { libc::madvise(mapped, size, libc::MADV_HUGEPAGE) };
    // SAFETY: the range is mapped with this access, `addresses` unmaps it after the region, and nothing else uses it.
    // If it is not accessible, `Region` does not give access to it.
    let region = unsafe { MmapRegion::build_raw(mapped.cast(), size, access, flags) };
    Ok(Mapping { region: region.map_err(io::Error::other)?, _addresses: addresses })
}

/// Tells the host to use no transparent huge pages for `piece`. Its start and end are multiples of [`PAGE`].
pub fn use_small_pages(piece: &VolatileSlice<'_>) {
    // Fails with EINVAL on a host without transparent huge pages, which is what is wanted.
    let _ = advise(piece, libc::MADV_NOHUGEPAGE);
}

/// Gives this process pages of its own in `piece`, as if it had written to each (MADV_POPULATE_WRITE). The contents
/// stay the same. Fails on hosts before Linux 5.14.
pub fn populate_for_writing(piece: &VolatileSlice<'_>) -> io::Result<()> {
    advise(piece, libc::MADV_POPULATE_WRITE)
}

/// Returns the whole pages of `piece` to the host. The memory must not belong to a [`Pool`].
///
/// The pages take no memory until the guest touches them again. Then they contain zeros, or the contents of the file
/// if the mapping is a private mapping of a file. Both are right, because the contents of the pages are undefined.
/// MADV_FREE would leave the pages in the process until the host is short of memory. MADV_REMOVE would punch holes
/// into the file.
pub fn release(piece: &VolatileSlice<'_>) -> io::Result<()> {
    let before = piece.ptr_guard().as_ptr().align_offset(PAGE);
    let whole = piece.len().saturating_sub(before) / PAGE * PAGE;
    if whole == 0 {
        return Ok(());
    }
    advise(&piece.subslice(before, whole).map_err(io::Error::other)?, libc::MADV_DONTNEED)
}

/// Gives the kernel advice about `piece`, which consists of whole pages. It must be one of the advices above.
#[allow(unsafe_code)]
fn advise(piece: &VolatileSlice<'_>, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: the range is inside `piece`, so it is mapped for writing, and it stays mapped. Of these advices only
    // MADV_DONTNEED changes its contents, which the owner of `piece` may change. No safe function does this.
    match unsafe { libc::madvise(piece.ptr_guard_mut().as_ptr().cast(), piece.len(), advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
