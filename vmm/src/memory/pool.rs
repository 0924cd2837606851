//! The host's pool of huge pages (Linux, Documentation/admin-guide/mm/hugetlbpage.rst), which an operator sets aside.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path, ptr};

use super::{ACCESS, HUGE_PAGE, MemoryError};

/// What Linux tells of the pool of 2 MiB pages.
const STATE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// The pool. What is taken of it is there from then on until the process ends: nothing that the guest does later can find
/// the host without a page for it.
#[derive(Debug)]
pub struct Pool {
    /// Pages that nobody has.
    free: File,
    /// Those of them that somebody is promised.
    reserved: File,
}

impl Pool {
    /// Opens what tells of it, since nothing of the host can be opened later.
    pub fn open() -> Result<Self, MemoryError> {
        let open = |name| File::open(Path::new(STATE).join(name)).map_err(MemoryError::NoPool);
        Ok(Self { free: open("free_hugepages")?, reserved: open("resv_hugepages")? })
    }

    /// Maps `size` bytes of it, a multiple of [`HUGE_PAGE`], at an address that is one too.
    #[allow(unsafe_code)]
    pub(super) fn map(&self, size: usize) -> Result<*mut u8, MemoryError> {
        let mib = size as u64 >> 20;
        // SAFETY: a mapping at an address of the kernel's choice replaces nothing. There is no safe call for this.
        let start = unsafe { libc::mmap(ptr::null_mut(), size, ACCESS, Self::FLAGS, -1, 0) };
        if start == libc::MAP_FAILED {
            let source = io::Error::last_os_error();
            return Err(match self.missing(size) {
                Ok(pages @ 1..) => MemoryError::Pool { pages },
                // It was not for want of pages, or there are enough by now.
                Ok(0) | Err(_) => MemoryError::Map { mib, source },
            });
        }
        // What the mapping has been promised a cgroup may still refuse when a page is touched, which kills. So all are
        // touched here, where that is an error (madvise(2)).
        // SAFETY: the range is the mapping just made; what it holds does not change.
        if unsafe { libc::madvise(start, size, libc::MADV_POPULATE_WRITE) } != 0 {
            let source = io::Error::last_os_error();
            // SAFETY: nobody has got at the mapping just made.
            unsafe { libc::munmap(start, size) };
            return Err(MemoryError::PoolRefused { mib, source });
        }
        Ok(start.cast())
    }

    /// As mmap(2) takes them.
    pub(super) const FLAGS: libc::c_int =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;

    /// How many pages more there would have to be for `size` bytes.
    pub(super) fn missing(&self, size: usize) -> io::Result<u64> {
        let available = read(&self.free)?.saturating_sub(read(&self.reserved)?);
        Ok((size.div_ceil(HUGE_PAGE) as u64).saturating_sub(available))
    }
}

/// The number in a file of sysfs, as it is now.
fn read(file: &File) -> io::Result<u64> {
    let mut text = [0; 24];
    let len = file.read_at(&mut text, 0)?;
    let number = std::str::from_utf8(&text[..len]).ok().and_then(|text| text.trim().parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}
