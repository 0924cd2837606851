//! Guest memory as the devices see it: a few regions, of which the last may grow while the devices are active.

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

use super::{MemoryError, huge_pages::Pool, mapping::Mapping, page::ACCESS};

/// Guest memory. The regions are fixed when the VM is built. When the last region grows, all clones of this value see
/// the new memory at once. Memory is never removed. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct GuestMemory {
    /// Sorted by address. They do not overlap.
    regions: Arc<[Region]>,
}

/// A range of guest memory.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
    start: GuestAddress,
    /// How many bytes from the start on belong to the guest. The rest of the mapping is not accessible. The length
    /// never decreases, so a range that was valid once stays valid.
    len: AtomicU64,
    grows: bool,
    /// The pool of its pages, if they are huge pages.
    pool: Option<Arc<Pool>>,
}

impl GuestMemory {
    /// `regions` are sorted by address. They do not overlap, even after they have grown.
    pub(super) fn new(regions: Vec<Region>) -> Self {
        Self { regions: regions.into() }
    }

    /// The region that can grow, if there is one.
    pub fn growing(&self) -> Option<&Region> {
        self.regions.iter().find(|region| region.grows)
    }

    /// Whether [`super::release`] may return unused pages to the host. Huge pages of a pool are kept, because the
    /// pool might have none left when the guest touches them again.
    pub fn can_be_released(&self) -> bool {
        self.regions.iter().all(|region| region.pool.is_none())
    }
}

impl vm_memory::GuestMemoryBackend for GuestMemory {
    type R = Region;

    fn find_region(&self, address: GuestAddress) -> Option<&Region> {
        #[cfg(feature = "fuzz")]
        super::fuzz_hook::call(Some(address));
        self.regions.iter().find(|region| region.to_region_addr(address).is_some())
    }

    /// The regions that are not empty. An empty region has no last address.
    fn iter(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| region.len() > 0)
    }
}

impl Region {
    /// A region that consists of the whole mapping.
    pub(super) fn whole(mapping: Mapping, start: GuestAddress, pool: Option<Arc<Pool>>) -> Self {
        let len = AtomicU64::new(mapping.region.size() as u64);
        Self { mapping, start, len, grows: false, pool }
    }

    /// An empty region that can grow. `mapping` is not accessible. If there is a pool, the region grows by pages of it.
    pub(super) fn empty(mapping: Mapping, start: GuestAddress, pool: Option<Arc<Pool>>) -> Self {
        Self { mapping, start, len: AtomicU64::new(0), grows: true, pool }
    }

    /// How many bytes the region may grow to.
    pub fn capacity(&self) -> u64 {
        self.mapping.region.size() as u64
    }

    /// Its address in this process. [`Region::capacity`] bytes are mapped there.
    pub(crate) fn host_address(&self) -> *mut u8 {
        self.mapping.region.as_ptr()
    }

    /// Extends the region to `len` bytes, a multiple of the page size. The devices can access the new memory only after
    /// `register` has given the vCPUs access to it.
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
            Some(pool) => move_mapping(pool.map(size)?, added, size).map_err(failed)?,
            None => make_accessible(added, size).map_err(failed)?,
        }
        register()?;
        self.len.fetch_max(len, Ordering::AcqRel);
        Ok(())
    }
}

/// Makes the `size` bytes at `added` accessible. They are in the mapping of a region and were not accessible before.
#[allow(unsafe_code)]
fn make_accessible(added: *mut u8, size: usize) -> io::Result<()> {
    // SAFETY: the range was not accessible before, so nothing uses it. No safe function does this.
    match unsafe { libc::mprotect(added.cast(), size, ACCESS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Moves the new mapping at `from` to `added`, as above. It is made elsewhere first, because a failure to make it at
/// `added` would leave a hole there.
#[allow(unsafe_code)]
fn move_mapping(from: *mut u8, added: *mut u8, size: usize) -> io::Result<()> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the target range was not accessible before, so nothing uses it. The new mapping stays as long as the
    // old one would have. No safe function does this.
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
