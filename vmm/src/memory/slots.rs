//! The memory slots by which KVM knows guest memory.

use std::ops::Range;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{Address, GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::{GuestMemory, MemoryError, Region};

/// The memory slots of a VM.
pub struct Slots {
    memory: GuestMemory,
    /// The number of the next slot.
    next: u32,
}

impl Slots {
    /// Registers `memory` with `vm`, one slot for each region.
    pub fn register(vm: &VmFd, memory: &GuestMemory) -> Result<Self, MemoryError> {
        let mut slots = Self { memory: memory.clone(), next: 0 };
        for region in memory.iter() {
            slots.next = set_slot(vm, slots.next, region, 0..region.len())?;
        }
        Ok(slots)
    }

    /// Extends the region that can grow to `len` bytes, a multiple of the page size, if it is shorter. The vCPUs and
    /// the devices can access the new memory only after this call.
    pub fn grow(&mut self, vm: &VmFd, len: u64) -> Result<(), MemoryError> {
        let Some(region) = self.memory.growing().filter(|region| region.len() < len) else { return Ok(()) };
        let added = region.len()..len;
        // The new memory gets a slot of its own. KVM can resize a slot only by deleting it first, and meanwhile the
        // guest could access it.
        region.grow(len, || {
            self.next = set_slot(vm, self.next, region, added)?;
            Ok(())
        })
    }
}

/// Registers a part of `region` as this slot of `vm`, and returns the number of the next slot.
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
    // SAFETY: the range is a mapping of `size` bytes, which this process accesses only through the volatile accessors
    // of `GuestMemory`. The caller keeps the memory as long as vCPUs of `vm` run: `Vm` owns both. KVM has no safe
    // call for this.
    match unsafe { vm.set_user_memory_region(memory) } {
        Ok(()) => Ok(slot + 1),
        Err(source) => Err(MemoryError::Slot { start, size, source }),
    }
}
