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

use super::{ACCESS, Mapping, MemoryError, Pool};

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
    /// Where its pages are from, if they are not ordinary ones.
    pool: Option<Arc<Pool>>,
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

    /// Whether pages that the guest has no use for can be the host's until it has ([`super::release`]). Those of a pool were
    /// set aside for guests, and taken for this one: it keeps them, so that it cannot come to lack them.
    pub fn goes_back(&self) -> bool {
        self.regions.iter().all(|region| region.pool.is_none())
    }
}

impl vm_memory::GuestMemory for GuestMemory {
    type R = Region;

    fn find_region(&self, address: GuestAddress) -> Option<&Region> {
        #[cfg(feature = "fuzz")]
        super::hook::call(Some(address));
        self.regions.iter().find(|region| region.to_region_addr(address).is_some())
    }

    /// Those that are not empty: of an empty one there is no last address.
    fn iter(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| region.len() > 0)
    }
}

impl Region {
    /// A mapping that is the guest's from its first byte to its last.
    pub(super) fn whole(mapping: Mapping, start: GuestAddress, pool: Option<Arc<Pool>>) -> Self {
        let len = AtomicU64::new(mapping.region.size() as u64);
        Self { mapping, start, len, grows: false, pool }
    }

    /// A mapping without access, none of which is the guest's yet. What it grows by is of `pool`, if there is one.
    pub(super) fn empty(mapping: Mapping, start: GuestAddress, pool: Option<Arc<Pool>>) -> Self {
        Self { mapping, start, len: AtomicU64::new(0), grows: true, pool }
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
        let present = self.len();
        let failed = |source| MemoryError::Grow { mib, source };
        if !(present..=self.capacity()).contains(&len) {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        let added = self.host_address().wrapping_add(present as usize);
        let size = (len - present) as usize;
        match &self.pool {
            Some(pool) => put(pool.map(size)?, added, size).map_err(failed)?,
            None => make_accessible(added, size).map_err(failed)?,
        }
        register()?;
        self.len.fetch_max(len, Ordering::AcqRel);
        Ok(())
    }
}

/// `added` lies within a region's mapping, with `size` bytes behind it that nobody has got at yet.
#[allow(unsafe_code)]
fn make_accessible(added: *mut u8, size: usize) -> io::Result<()> {
    // SAFETY: what is there is accessible by nobody, and so used by nobody. There is no safe call for this.
    match unsafe { libc::mprotect(added.cast(), size, ACCESS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Moves the mapping at `from`, which nobody knows of, to `added`, as above. It is made elsewhere first because one that could
/// not be made in this place would leave a hole there.
#[allow(unsafe_code)]
fn put(from: *mut u8, added: *mut u8, size: usize) -> io::Result<()> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: what is there is accessible by nobody, and so used by nobody; what takes its place stays as long. There is no
    // safe call for this.
    match unsafe { libc::mremap(from.cast(), size, size, flags, added) } {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        _ => Ok(()),
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
