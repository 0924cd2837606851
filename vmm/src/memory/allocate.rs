//! Allocates guest memory.

use std::sync::Arc;

use bulkhead_vmm_api::BLOCK_MIB;
use vm_memory::GuestAddress;

use super::{
    MemoryError,
    huge_pages::Pool,
    mapping::{map, map_huge},
    page::ACCESS,
    regions::{GuestMemory, Region},
};
use crate::layout;

/// How much memory a guest has initially, and how much it may have later, in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub mib: u32,
    pub max_mib: u32,
}

impl Size {
    /// Takes the fields of the configuration.
    pub fn new(memory_mib: u32, max_memory_mib: Option<u32>) -> Self {
        Self { mib: memory_mib, max_mib: max_memory_mib.unwrap_or(memory_mib) }
    }
}

/// Allocates guest memory. Without a pool the memory is private and anonymous, so it takes no memory of the host
/// until the guest touches it. With a pool it consists of huge pages, which are taken from the pool at once.
///
/// Memory that does not fit below the hole for devices is above the hole. The region that can grow is above that.
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

/// Allocates memory at these guest addresses with these sizes, and above them a region that can grow to `growth` bytes.
pub fn lay_out(ranges: &[(u64, u64)], growth: u64) -> Result<GuestMemory, MemoryError> {
    lay_out_in(None, ranges, growth)
}

/// Does the same with the huge pages of `pool`, or with ordinary pages if that is None.
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

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestMemoryBackend as _, GuestMemoryRegion as _};

    use super::*;
    use crate::memory::page::HUGE_PAGE;

    #[test]
    fn memory_goes_with_its_vm() {
        // In total this is more than the address space of a process (2^47).
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
        // The region is a single range, however often it has grown.
        assert_eq!(other.get_slice(start, 512 << 20).unwrap().len(), 512 << 20);
        assert_eq!(other.read_obj::<u64>(GuestAddress(start.0 + (128 << 20) - 8)).unwrap(), 128 << 20);
        let error = region.grow((1 << 30) + (1 << 20), || Ok(())).unwrap_err().to_string();
        assert_eq!(error, "cannot extend the guest's memory to 1025 MiB above its initial memory");
        // Memory that KVM rejects does not become accessible to devices.
        let refused = || Err(MemoryError::Pool { pages: 1 });
        assert!(region.grow(1 << 30, refused).is_err() && region.len() == 512 << 20);
    }

    /// The pool of this machine is unknown. The end-to-end tests cover a pool with enough pages.
    #[test]
    fn a_pool_that_is_too_small_is_told_and_left_as_it_is() {
        let Ok(pool) = Pool::open() else {
            // This is the error if the kernel has no huge pages.
            let error = Pool::open().unwrap_err().to_string();
            assert_eq!(error, "hugepages: the host's kernel has no pool of huge pages of 2 MiB");
            return;
        };
        // This is more than any machine has.
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
}
