//! The ioctls of the host by which a file has inode flags (linux/fs.h). The jail allows these and no others.
//!
//! This is unsafe because no safe functions exist for most of these ioctls.

use std::os::fd::AsRawFd;

use rustix::io::Errno;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};

use super::abi::Result;

pub(super) const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
pub(super) const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
pub(super) const FS_IOC_GETVERSION: u32 = 0x8008_7601;
pub(super) const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
pub(super) const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;

/// Bytes of `struct fsxattr`.
pub(super) const FSXATTR: usize = 28;

/// `struct fsxattr`: the flags that XFS has introduced, and what belongs to them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Fsxattr {
    pub(super) xflags: u32,
    /// The bytes that the file system allocates at a time.
    pub(super) extent_size: u32,
    pub(super) extents: u32,
    pub(super) project: u32,
    /// As `extent_size`, for a file that shares blocks.
    pub(super) copied_extent_size: u32,
    pub(super) padding: [u8; 8],
}

const _: () = assert!(size_of::<Fsxattr>() == FSXATTR);

/// The flags of an open file (FS_IOC_GETFLAGS).
pub(super) fn flags(file: &impl AsRawFd) -> Result<u32> {
    get_number(file, FS_IOC_GETFLAGS)
}

/// Sets the flags of an open file, which need not be open to be written (FS_IOC_SETFLAGS).
pub(super) fn set_flags(file: &impl AsRawFd, flags: u32) -> Result<()> {
    // The number of the request says that it is a long. All file systems take an int.
    let number: libc::c_long = flags.into();
    // SAFETY: FS_IOC_SETFLAGS reads a number of at most this size.
    check(unsafe { ioctl_with_ref(file, FS_IOC_SETFLAGS.into(), &number) })
}

/// The generation of an open file (FS_IOC_GETVERSION).
pub(super) fn generation(file: &impl AsRawFd) -> Result<u32> {
    get_number(file, FS_IOC_GETVERSION)
}

/// `struct fsxattr` of an open file (FS_IOC_FSGETXATTR).
pub(super) fn fsxattr(file: &impl AsRawFd) -> Result<Fsxattr> {
    let mut found = Fsxattr::default();
    // SAFETY: FS_IOC_FSGETXATTR writes a `struct fsxattr`, which may have any bytes.
    check(unsafe { ioctl_with_mut_ref(file, FS_IOC_FSGETXATTR.into(), &mut found) })?;
    Ok(found)
}

/// Sets `struct fsxattr` of an open file, which need not be open to be written (FS_IOC_FSSETXATTR).
pub(super) fn set_fsxattr(file: &impl AsRawFd, new: Fsxattr) -> Result<()> {
    // SAFETY: FS_IOC_FSSETXATTR reads a `struct fsxattr`.
    check(unsafe { ioctl_with_ref(file, FS_IOC_FSSETXATTR.into(), &new) })
}

fn get_number(file: &impl AsRawFd, request: u32) -> Result<u32> {
    // The number of the request says that it is a long. File systems write an int.
    let mut number: libc::c_long = 0;
    // SAFETY: FS_IOC_GETFLAGS and FS_IOC_GETVERSION write a number of at most this size.
    check(unsafe { ioctl_with_mut_ref(file, request.into(), &mut number) })?;
    Ok(number as u32)
}

fn check(result: libc::c_int) -> Result<()> {
    if result < 0 { Err(last_error()) } else { Ok(()) }
}

fn last_error() -> Errno {
    let error = std::io::Error::last_os_error();
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
