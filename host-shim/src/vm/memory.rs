//! The size of a VM's memory. It follows from the limits of its containers, and is between the configured size and
//! the host's memory.

use bulkhead_vmm_api::BLOCK_MIB;

/// Memory that the guest's kernel and agent need beside what the containers may use, MiB.
const GUEST_MIB: u64 = 64;
/// The guest's kernel uses this fraction of the memory to describe it: 64 bytes for each page of 4096.
const DESCRIBED: u64 = 64;
/// The largest VM: a TiB, which is the VMM's limit.
const MOST_MIB: u64 = 1 << 20;

const MIB: u64 = 1 << 20;

/// MiB that a VM can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryRange {
    /// What it begins with.
    pub(crate) least: u32,
    /// What it can grow to.
    pub(crate) most: u32,
}

impl MemoryRange {
    /// Of this host, where VMs begin with `configured` MiB.
    pub(crate) fn of_host(configured: u32) -> Self {
        let info = rustix::system::sysinfo();
        Self::new(configured, u64::from(info.mem_unit).saturating_mul(info.totalram) / MIB)
    }

    fn new(least: u32, host: u64) -> Self {
        let growth =
            host.min(MOST_MIB).saturating_sub(least.into()) / u64::from(BLOCK_MIB) * u64::from(BLOCK_MIB);
        let most = u64::from(least).saturating_add(growth);
        Self { least, most: u32::try_from(most).unwrap_or(least) }
    }

    /// Of a VM whose containers may use `limits` bytes together.
    pub(crate) fn for_limits(self, limits: u64) -> u32 {
        let used = limits.div_ceil(MIB);
        let wanted = used.saturating_add(used / DESCRIBED).saturating_add(GUEST_MIB);
        u32::try_from(wanted).unwrap_or(u32::MAX).clamp(self.least, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_as_large_as_its_limits_ask_for_and_the_host_allows() {
        let range = MemoryRange::new(256, 8000);
        assert_eq!((range.least, range.most), (256, 256 + 60 * BLOCK_MIB));
        assert_eq!(range.for_limits(0), 256);
        assert_eq!(range.for_limits(128 * MIB), 256);
        assert_eq!(range.for_limits(1024 * MIB), 1024 + 16 + 64);
        assert_eq!(range.for_limits(u64::MAX), range.most);
    }

    #[test]
    fn a_host_that_is_too_small_or_too_large_for_growth_has_none_or_a_tib() {
        assert_eq!(MemoryRange::new(256, 300), MemoryRange { least: 256, most: 256 });
        assert_eq!(MemoryRange::new(512, 100), MemoryRange { least: 512, most: 512 });
        assert_eq!(u64::from(MemoryRange::new(256, 1 << 40).most), MOST_MIB);
    }
}
