//! The block device or file of the host behind a block device.
//!
//! Reads and writes go through the host's page cache. [`Disk::flush`] makes what was written durable.
//!
//! This is unsafe because no safe functions exist for the ioctls of block devices.

use std::{
    ffi::{c_int, c_uint},
    fs::File,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use bulkhead_vmm_api::BlockCounts;
use rustix::{
    fs::{FallocateFlags, FileType, OFlags, fallocate, fcntl_getfl, fstat},
    io::Errno,
};
use vm_memory::VolatileSlice;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};

use super::limits::SECTOR;
use crate::{lock, virtio::iovecs::Iovecs};

// Requests of ioctl(2) that libc lacks (linux/fs.h). The jail allows them.
const BLKDISCARD: u32 = 0x1277;
const BLKGETSIZE64: u32 = 0x8008_1272;

/// The sizes of blocks that Linux accepts of a block device in the guest.
const BLOCK_SIZES: [u32; 4] = [512, 1024, 2048, 4096];

/// Why a file cannot be a block device of the guest.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("the file descriptor is neither of a block device nor of a file")]
    Kind,
    #[error("the file descriptor cannot be read from")]
    WriteOnly,
    #[error("the device has blocks of {size} bytes, and a guest can use blocks of at most 4096")]
    BlockSize { size: u32 },
    #[error("the serial number has more than 20 bytes")]
    Serial,
    #[error("cannot ask the host's kernel about the device")]
    Io(#[from] io::Error),
}

/// How the host's device is best used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Bytes of a logical block, one of [`BLOCK_SIZES`].
    pub(super) block: u32,
    /// Bytes of a physical block, of the least and of the best request. Zero: unknown.
    pub(super) physical: u32,
    pub(super) least: u32,
    pub(super) best: u32,
}

/// One block device or file of the host, which a block device of the guest reads and writes.
#[derive(Debug)]
pub struct Disk {
    /// None: the disk was taken away. Requests that are under way still have it.
    file: Mutex<Option<Arc<File>>>,
    is_device: bool,
    /// In sectors of 512 bytes.
    pub(super) capacity: u64,
    pub(super) geometry: Geometry,
    pub(super) read_only: bool,
    /// Whether blocks can be discarded.
    pub(super) discards: bool,
    requests: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl Disk {
    /// Asks about `file`. It cannot be written if it was opened read-only, or if `read_only` is set. `discards` says
    /// whether the host's device has a discard command; a file always has.
    pub fn new(file: File, read_only: bool, discards: bool) -> Result<Self, DiskError> {
        let stat = fstat(&file).map_err(io::Error::from)?;
        let is_device = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => true,
            FileType::RegularFile => false,
            _ => return Err(DiskError::Kind),
        };
        let access = fcntl_getfl(&file).map_err(io::Error::from)? & OFlags::RWMODE;
        if access == OFlags::WRONLY {
            return Err(DiskError::WriteOnly);
        }
        let read_only = read_only || access == OFlags::RDONLY;
        let (bytes, geometry) = if is_device {
            (get(&file, BLKGETSIZE64)?, Geometry::of(&file)?)
        } else {
            (stat.st_size.try_into().unwrap_or(0), Geometry { block: 512, physical: 4096, least: 0, best: 0 })
        };
        if !BLOCK_SIZES.contains(&geometry.block) {
            return Err(DiskError::BlockSize { size: geometry.block });
        }
        let discards = !read_only && (discards || !is_device);
        let file = Mutex::new(Some(Arc::new(file)));
        let [requests, read_bytes, written_bytes] = [(); 3].map(|()| AtomicU64::default());
        let capacity = bytes / SECTOR;
        Ok(Self {
            file,
            is_device,
            capacity,
            geometry,
            read_only,
            discards,
            requests,
            read_bytes,
            written_bytes,
        })
    }

    /// What the guest has requested of it.
    pub fn counts(&self) -> BlockCounts {
        let [requests, read_bytes, written_bytes] =
            [&self.requests, &self.read_bytes, &self.written_bytes].map(|it| it.load(Ordering::Relaxed));
        BlockCounts { requests, read_bytes, written_bytes }
    }

    /// Counts a request.
    pub(super) fn count_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Closes the file. Each request fails from now on. Returns false if one is under way that still has the file.
    pub fn close(&self) -> bool {
        lock(&self.file).take().is_none_or(|file| Arc::into_inner(file).is_some())
    }

    fn file(&self) -> io::Result<Arc<File>> {
        lock(&self.file).clone().ok_or_else(|| Errno::IO.into())
    }

    /// Reads to some or all of `slices`. Returns the number of bytes.
    pub(super) fn read<'a, 'm: 'a>(
        &self,
        offset: u64,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        iovecs: &mut Iovecs,
    ) -> io::Result<usize> {
        let count = iovecs.read_at(&*self.file()?, slices, offset)?;
        self.read_bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    /// Writes some or all of `slices`. Returns the number of bytes.
    pub(super) fn write<'a, 'm: 'a>(
        &self,
        offset: u64,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        iovecs: &mut Iovecs,
    ) -> io::Result<usize> {
        let count = iovecs.write_at(&*self.file()?, slices, offset)?;
        self.written_bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    /// Makes all that was written durable.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.file()?.sync_data()
    }

    /// Tells the host that these bytes are no longer needed. Nobody knows what is read there afterwards.
    pub(super) fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.is_device {
            return self.punch(offset, len);
        }
        let (file, range) = (self.file()?, [offset, len]);
        // SAFETY: BLKDISCARD reads two u64.
        check(unsafe { ioctl_with_ref(&*file, BLKDISCARD.into(), &range) })
    }

    /// Makes these bytes zeros. With `unmap` the host need not keep space for them.
    pub(super) fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        // Not each device or file system can do the first, and the kernel does the second for each device.
        if unmap && self.punch(offset, len).is_ok() {
            return Ok(());
        }
        Ok(fallocate(&*self.file()?, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, offset, len)?)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        Ok(fallocate(&*self.file()?, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)?)
    }
}

impl Geometry {
    fn of(device: &File) -> io::Result<Self> {
        let size = |request: libc::Ioctl| get::<c_uint>(device, request as u32);
        Ok(Self {
            block: size(libc::BLKSSZGET)?,
            physical: size(libc::BLKPBSZGET)?,
            least: size(libc::BLKIOMIN)?,
            best: size(libc::BLKIOOPT)?,
        })
    }
}

/// A number that an ioctl of block devices writes: u64 for [`BLKGETSIZE64`], else an int.
fn get<T: Number>(device: &File, request: u32) -> io::Result<T> {
    let mut number = T::default();
    // SAFETY: the request writes a number of this size.
    check(unsafe { ioctl_with_mut_ref(device, request.into(), &mut number) })?;
    Ok(number)
}

trait Number: Default {}
impl Number for u64 {}
impl Number for c_uint {}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
