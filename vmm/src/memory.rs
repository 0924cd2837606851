//! The guest's memory, and its place in KVM.

use std::{io, ptr};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{Address, GuestAddress, GuestMemory as _, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use crate::{GuestMemory, arch::layout};

/// Of a huge page on x86_64. Addresses of the guest and of this process must be the same modulo this size, or
/// KVM maps huge pages in small ones.
const HUGE_PAGE: usize = 2 << 20;

/// Why there is no memory for the guest.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("memory_mib: cannot map {mib} MiB for the guest")]
    Map { mib: u32, source: io::Error },
    #[error("memory_mib: cannot lay {mib} MiB out for the guest")]
    Layout { mib: u32, source: vm_memory::GuestRegionCollectionError },
    #[error("KVM does not take the guest's memory at {start:#x} ({size:#x} bytes)")]
    Slot { start: u64, size: u64, source: kvm_ioctls::Error },
}

/// Maps `mib` MiB: private, anonymous, not reserved, so that it costs nothing until the guest touches it.
/// What does not fit below the device hole lies above it.
pub fn allocate(mib: u32) -> Result<GuestMemory, MemoryError> {
    let size = u64::from(mib) << 20;
    let low = size.min(layout::MMIO_HOLE_START);
    let mut ranges = vec![(0, low)];
    if size > low {
        ranges.push((layout::MMIO_HOLE_END, size - low));
    }
    let mut regions = Vec::with_capacity(ranges.len());
    for (start, size) in ranges {
        let mapping = map(size as usize).map_err(|source| MemoryError::Map { mib, source })?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(start))
            .ok_or_else(|| MemoryError::Map { mib, source: io::ErrorKind::InvalidInput.into() })?;
        regions.push(region);
    }
    GuestMemory::from_regions(regions).map_err(|source| MemoryError::Layout { mib, source })
}

/// Maps `size` bytes that start at a multiple of [`HUGE_PAGE`], in huge pages where the host has some. In the
/// rig a guest of 256 MiB started and ended in 1.35 s with them and 1.85 s without, and had touched 38 and 32
/// MiB. Linux aligns such mappings by itself only since 6.7. What is reserved on both sides for the sake of
/// the alignment stays there, without access, as a guard.
///
/// The mapping stays until the process ends, which is when its one VM ends.
#[allow(unsafe_code)]
fn map(size: usize) -> io::Result<MmapRegion> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let reserved = size.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: a mapping at an address of the kernel's choice replaces nothing. vm-memory's own mapping cannot
    // be aligned.
    let start = unsafe { libc::mmap(ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let aligned = start.wrapping_byte_add(start.align_offset(HUGE_PAGE));
    // SAFETY: `aligned..aligned + size` lies within the reservation just made, which nothing else knows of.
    let mapped = unsafe { libc::mmap(aligned, size, access, flags | libc::MAP_FIXED, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // A host without huge pages says EINVAL, and its guests do without.
    // SAFETY: the advice is for the mapping just made, and does not change what it holds.
    unsafe { libc::madvise(mapped, size, libc::MADV_HUGEPAGE) };
    // SAFETY: the range is mapped readable and writable, is unmapped by nobody, and has no other user than
    // this region.
    unsafe { MmapRegion::build_raw(mapped.cast(), size, access, flags) }.map_err(io::Error::other)
}

/// Makes `memory` the guest's, a slot for each region.
#[allow(unsafe_code)]
pub fn register(vm: &VmFd, memory: &GuestMemory) -> Result<(), MemoryError> {
    for (slot, region) in memory.iter().enumerate() {
        let start = region.start_addr().raw_value();
        let size = region.len();
        let slot = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: start,
            memory_size: size,
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the range is a mapping of `size` bytes that nothing in this process refers to but through
        // `memory`'s volatile accessors. The caller keeps `memory` for as long as it runs vCPUs of `vm` (`Vm`
        // owns both). KVM has no safe call for this.
        unsafe { vm.set_user_memory_region(slot) }.map_err(|source| MemoryError::Slot {
            start,
            size,
            source,
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    #[test]
    fn all_of_it_can_be_used_and_huge_pages_fit() {
        let memory = allocate(3 * 1024 + 64).unwrap();
        let regions: Vec<_> = memory.iter().map(|region| (region.start_addr().0, region.len())).collect();
        assert_eq!(regions, [(0, 3 << 30), (4 << 30, 64 << 20)]);
        for region in memory.iter() {
            assert_eq!(region.as_ptr() as usize % HUGE_PAGE, 0);
        }
        for address in [0, (3 << 30) - 8, 4 << 30, (4 << 30) + (64 << 20) - 8] {
            memory.write_obj(address, GuestAddress(address)).unwrap();
            assert_eq!(memory.read_obj::<u64>(GuestAddress(address)).unwrap(), address);
        }
        assert!(memory.write_obj(0u64, GuestAddress(3 << 30)).is_err());
    }
}
