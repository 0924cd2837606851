//! System calls that several parts of the file server make.

use std::{
    ffi::CStr,
    hash::{DefaultHasher, Hash, Hasher},
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, readlinkat, statx};

use super::abi::Result;

/// The attributes of the file `name` in `dir`, or of `dir` itself if the name is empty. Symbolic links are not
/// followed. For a symbolic link, the seconds of `stx_btime` are a hash of its target (`identity`), and otherwise
/// `stx_btime` has no meaning.
pub(super) fn stat_at(dir: impl AsFd, name: &CStr) -> Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH;
    let mut stat = statx(&dir, name, flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)?;
    if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Symlink {
        // An error means that the link was replaced meanwhile, or that procfs does not say where it leads.
        let target = readlinkat(&dir, name, Vec::new()).unwrap_or_default();
        let mut hasher = DefaultHasher::new();
        target.hash(&mut hasher);
        stat.stx_btime.tv_sec = hasher.finish() as i64;
    }
    Ok(stat)
}

/// A path to the file of `fd`, for system calls that do not take an O_PATH descriptor.
pub(super) fn path_of(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}
