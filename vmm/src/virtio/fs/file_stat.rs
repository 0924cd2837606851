//! System calls that several parts of the file server make.

use std::{
    ffi::CStr,
    hash::{DefaultHasher, Hash, Hasher},
    ops::{Deref, DerefMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, readlinkat, statx};

use super::abi::Result;

/// The attributes of a file, and what else tells it from other files.
#[derive(Clone, Copy)]
pub(super) struct FileStat {
    pub(super) stat: Statx,
    /// A hash of the target of a symbolic link. 0 for other files.
    pub(super) target_hash: u64,
}

impl Deref for FileStat {
    type Target = Statx;

    fn deref(&self) -> &Statx {
        &self.stat
    }
}

impl DerefMut for FileStat {
    fn deref_mut(&mut self) -> &mut Statx {
        &mut self.stat
    }
}

/// The attributes of the file `name` in `dir`, or of `dir` itself if the name is empty. Symbolic links are not
/// followed.
pub(super) fn stat_at(dir: impl AsFd, name: &CStr) -> Result<FileStat> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH;
    let stat = statx(&dir, name, flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)?;
    let mut target_hash = 0;
    if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Symlink {
        // An error means that the link was replaced meanwhile, or that procfs does not say where it leads.
        let target = readlinkat(&dir, name, Vec::new()).unwrap_or_default();
        let mut hasher = DefaultHasher::new();
        target.hash(&mut hasher);
        target_hash = hasher.finish();
    }
    Ok(FileStat { stat, target_hash })
}

/// A path to the file of a descriptor. It borrows the descriptor: once that is closed, the path leads nowhere, or to
/// the file of another descriptor with the same number.
pub(super) struct DescriptorPath<'fd> {
    path: String,
    _fd: BorrowedFd<'fd>,
}

impl Deref for DescriptorPath<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.path
    }
}

/// A path to the file of `fd`, for system calls that do not take an O_PATH descriptor.
pub(super) fn path_of(fd: &OwnedFd) -> DescriptorPath<'_> {
    DescriptorPath { path: format!("/proc/self/fd/{}", fd.as_raw_fd()), _fd: fd.as_fd() }
}
