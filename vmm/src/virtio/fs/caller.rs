//! The user and group to which a new file belongs.

use nix::sys::stat::{Mode, umask};
use rustix::{
    fs::{Gid, Uid},
    io::Errno,
    thread::{set_thread_res_gid, set_thread_res_uid},
};

use super::abi::{Header, Result};

/// The process that caused a request. New files belong to its user and group. The guest's kernel has checked that it
/// may create them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller {
    user: Uid,
    group: Gid,
}

impl Caller {
    /// The caller of a request. -1 is not a valid user or group.
    pub(super) fn of(header: &Header) -> Result<Self> {
        if header.uid == u32::MAX || header.gid == u32::MAX {
            return Err(Errno::INVAL);
        }
        Ok(Self { user: Uid::from_raw(header.uid), group: Gid::from_raw(header.gid) })
    }

    /// Runs `make`, which creates a file. `mask` is the umask of the caller, which the kernel ignores if the
    /// directory has a default access control list.
    pub(super) fn makes<T>(self, mask: u32, make: impl FnOnce() -> Result<T>) -> Result<T> {
        // The umask belongs to this thread only: it has called unshare(CLONE_FS) when it entered its jail.
        umask(Mode::from_bits_truncate(mask));
        if self.user == Uid::ROOT && self.group == Gid::ROOT {
            return make();
        }
        let root_again = RootAgain;
        set_thread_res_gid(Gid::ROOT, self.group, Gid::ROOT)?;
        set_thread_res_uid(Uid::ROOT, self.user, Uid::ROOT)?;
        let made = make();
        drop(root_again);
        made
    }
}

/// Changes the user and group of the thread back to root when it is dropped.
struct RootAgain;

impl Drop for RootAgain {
    fn drop(&mut self) {
        // Neither can fail, because the real user of the thread is root and it has kept its capabilities.
        let _ = set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT);
        let _ = set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT);
    }
}
