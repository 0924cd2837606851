//! The guest's memory, and its place in KVM.

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{Address, GuestAddress, GuestMemory as _, GuestMemoryRegion};

use crate::{GuestMemory, arch::layout};

/// Why there is no memory for the guest.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("memory_mib: cannot map {mib} MiB for the guest")]
    Map { mib: u32, source: vm_memory::mmap::FromRangesError },
    #[error("KVM does not take the guest's memory at {start:#x} ({size:#x} bytes)")]
    Slot { start: u64, size: u64, source: kvm_ioctls::Error },
}

/// Maps `mib` MiB: private, anonymous, not reserved, so that it costs nothing until the guest touches it. What does not
/// fit below the device hole lies above it.
pub fn allocate(mib: u32) -> Result<GuestMemory, MemoryError> {
    let size = u64::from(mib) << 20;
    let low = size.min(layout::MMIO_HOLE_START);
    let mut ranges = vec![(GuestAddress(0), low as usize)];
    if size > low {
        ranges.push((GuestAddress(layout::MMIO_HOLE_END), (size - low) as usize));
    }
    GuestMemory::from_ranges(&ranges).map_err(|source| MemoryError::Map { mib, source })
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
        // SAFETY: the range is a mapping of `size` bytes that nothing in this process refers to but through `memory`'s
        // volatile accessors. The caller keeps `memory` for as long as it runs vCPUs of `vm` (`Vm` owns both). KVM has no
        // safe call for this.
        unsafe { vm.set_user_memory_region(slot) }.map_err(|source| MemoryError::Slot {
            start,
            size,
            source,
        })?;
    }
    Ok(())
}
