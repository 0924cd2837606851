//! The host's pool of huge pages (Linux, Documentation/admin-guide/mm/hugetlbpage.rst), which the operator reserves.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path, ptr};

use super::{
    MemoryError,
    page::{ACCESS, HUGE_PAGE},
};

/// The directory of sysfs with the numbers of the pool of 2 MiB pages.
const STATE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// The pool. The VM takes pages from it before the guest may touch them, and keeps them until the process ends. So
/// the guest never touches a page that the host lacks.
#[derive(Debug)]
pub struct Pool {
    /// The number of free pages.
    free: File,
    /// The number of free pages that are reserved for existing mappings.
    reserved: File,
}

impl Pool {
    /// Opens the files with the numbers of the pool. Later no file of the host can be opened.
    pub fn open() -> Result<Self, MemoryError> {
        let open = |name| File::open(Path::new(STATE).join(name)).map_err(MemoryError::NoPool);
        Ok(Self { free: open("free_hugepages")?, reserved: open("resv_hugepages")? })
    }

    /// Maps `size` bytes, a multiple of [`HUGE_PAGE`]. The address is a multiple of it too.
    #[allow(unsafe_code)]
    pub(super) fn map(&self, size: usize) -> Result<*mut u8, MemoryError> {
        let mib = size as u64 >> 20;
        // SAFETY: the kernel chooses the address, so the mapping replaces nothing. No safe function does this.
        let start = unsafe { libc::mmap(ptr::null_mut(), size, ACCESS, Self::FLAGS, -1, 0) };
        if start == libc::MAP_FAILED {
            let source = io::Error::last_os_error();
            return Err(match self.missing(size) {
                Ok(pages @ 1..) => MemoryError::Pool { pages },
                // There was another reason, or pages have become free meanwhile.
                Ok(0) | Err(_) => MemoryError::Map { mib, source },
            });
        }
        // The mapping has reserved its pages, but a cgroup may still refuse a page when it is touched, which kills
        // the process by SIGBUS. If all pages are touched here, that is an error instead (madvise(2)). SAFETY: the
        // range is the new mapping. The advice does not change its contents.
        if unsafe { libc::madvise(start, size, libc::MADV_POPULATE_WRITE) } != 0 {
            let source = io::Error::last_os_error();
            // SAFETY: nothing uses the new mapping yet.
            unsafe { libc::munmap(start, size) };
            return Err(MemoryError::PoolRefused { mib, source });
        }
        Ok(start.cast())
    }

    /// The flags of mmap(2).
    pub(super) const FLAGS: libc::c_int =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;

    /// How many pages the pool lacks for `size` bytes.
    pub(super) fn missing(&self, size: usize) -> io::Result<u64> {
        let available = read_number(&self.free)?.saturating_sub(read_number(&self.reserved)?);
        Ok((size.div_ceil(HUGE_PAGE) as u64).saturating_sub(available))
    }
}

/// Reads the current number from a file of sysfs.
fn read_number(file: &File) -> io::Result<u64> {
    let mut text = [0; 24];
    let len = file.read_at(&mut text, 0)?;
    let number = std::str::from_utf8(&text[..len]).ok().and_then(|text| text.trim().parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}
