//! The guest's memory as the devices see it: a few regions, the last of which may grow while they work.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use vm_memory::{
    Address, GuestAddress, GuestMemoryError, GuestMemoryRegion, GuestMemoryRegionBytes, GuestMemoryResult,
    GuestUsize, MemoryRegionAddress, VolatileMemory, VolatileSlice, bitmap::BS,
};

use super::{Mapping, MemoryError};

/// Guest memory. Its regions are fixed when the VM is built; what the last one grows by is there for every clone at once,
/// and stays. Cheap to clone.
#[derive(Debug, Clone)]
pub struct GuestMemory {
    /// In the order of their addresses, apart from one another.
    regions: Arc<[Region]>,
}

/// One piece of it.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
    start: GuestAddress,
    /// Bytes that are the guest's, from the start on; there is no access to the rest of the mapping. Never fewer than
    /// before, so that what has been found to be memory is memory.
    len: AtomicU64,
    grows: bool,
}

impl GuestMemory {
    /// Of regions in the order of their addresses, which have no address in common, not even one that they may grow to.
    pub(super) fn new(regions: Vec<Region>) -> Self {
        Self { regions: regions.into() }
    }

    /// The region that may grow, if there is one.
    pub fn growing(&self) -> Option<&Region> {
        self.regions.iter().find(|region| region.grows)
    }
}

impl vm_memory::GuestMemory for GuestMemory {
    type R = Region;

    fn find_region(&self, address: GuestAddress) -> Option<&Region> {
        self.regions.iter().find(|region| region.to_region_addr(address).is_some())
    }

    /// Those that are not empty: of an empty one there is no last address.
    fn iter(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| region.len() > 0)
    }
}

impl Region {
    /// A mapping that is the guest's from its first byte to its last.
    pub(super) fn whole(mapping: Mapping, start: GuestAddress) -> Self {
        let len = AtomicU64::new(mapping.region.size() as u64);
        Self { mapping, start, len, grows: false }
    }

    /// A mapping without access, none of which is the guest's yet.
    pub(super) fn empty(mapping: Mapping, start: GuestAddress) -> Self {
        Self { mapping, start, len: AtomicU64::new(0), grows: true }
    }

    /// Bytes that it may grow to.
    pub fn capacity(&self) -> u64 {
        self.mapping.region.size() as u64
    }

    /// Its place in this process, of as many bytes as [`Region::capacity`] says.
    pub(super) fn host_address(&self) -> *mut u8 {
        self.mapping.region.as_ptr()
    }

    /// Makes its first `len` bytes the guest's, whole pages and more than before, as soon as `register` has made them memory
    /// to the vCPUs.
    pub fn grow(
        &self,
        len: u64,
        register: impl FnOnce() -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let mib = len >> 20;
        self.make_accessible(len).map_err(|source| MemoryError::Grow { mib, source })?;
        register()?;
        self.len.fetch_max(len, Ordering::AcqRel);
        Ok(())
    }

    #[allow(unsafe_code)]
    fn make_accessible(&self, len: u64) -> io::Result<()> {
        let present = self.len();
        if !(present..=self.capacity()).contains(&len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let added = self.host_address().wrapping_add(present as usize);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range lies within the mapping, behind what anybody has got at. There is no safe call for this.
        match unsafe { libc::mprotect(added.cast(), (len - present) as usize, access) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl GuestMemoryRegion for Region {
    type B = ();

    fn len(&self) -> GuestUsize {
        self.len.load(Ordering::Acquire)
    }

    fn start_addr(&self) -> GuestAddress {
        self.start
    }

    fn bitmap(&self) -> BS<'_, ()> {}

    fn get_host_address(&self, address: MemoryRegionAddress) -> GuestMemoryResult<*mut u8> {
        let address = self.check_address(address).ok_or(GuestMemoryError::InvalidBackendAddress)?;
        Ok(self.host_address().wrapping_add(address.raw_value() as usize))
    }

    fn get_slice(&self, offset: MemoryRegionAddress, count: usize) -> GuestMemoryResult<VolatileSlice<'_>> {
        let end = offset.raw_value().checked_add(count as u64);
        if end.is_none_or(|end| end > self.len()) {
            return Err(GuestMemoryError::InvalidBackendAddress);
        }
        Ok(self.mapping.region.get_slice(offset.raw_value() as usize, count)?)
    }
}

impl GuestMemoryRegionBytes for Region {}
