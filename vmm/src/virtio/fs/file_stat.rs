//! System calls that several parts of the file server make.

use std::{
    ffi::CStr,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use rustix::fs::{AtFlags, Statx, StatxFlags, statx};

use super::abi::Result;

/// The attributes of the file `name` in `dir`, or of `dir` itself if the name is empty. Symbolic links are not
/// followed.
pub(super) fn stat_at(dir: impl AsFd, name: &CStr) -> Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH;
    statx(dir, name, flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)
}

/// A path to the file of `fd`, for system calls that do not take an O_PATH descriptor.
pub(super) fn path_of(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}
