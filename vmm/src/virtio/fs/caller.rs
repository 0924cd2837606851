//! In whose name a file is made.

use nix::sys::stat::{Mode, umask};
use rustix::{
    fs::{Gid, Uid},
    io::Errno,
    thread::{set_thread_res_gid, set_thread_res_uid},
};

use super::abi::{Header, Result};

/// Who asks. What is made belongs to them; that they may make it, their kernel has seen to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller {
    user: Uid,
    group: Gid,
}

impl Caller {
    /// Of a request. No user and no group has the number -1.
    pub(super) fn of(header: &Header) -> Result<Self> {
        if header.uid == u32::MAX || header.gid == u32::MAX {
            return Err(Errno::INVAL);
        }
        Ok(Self { user: Uid::from_raw(header.uid), group: Gid::from_raw(header.gid) })
    }

    /// Makes something whose mode lacks the bits of `mask`, unless its directory says by a default ACL who may use what
    /// is made there.
    pub(super) fn makes<T>(self, mask: u32, make: impl FnOnce() -> Result<T>) -> Result<T> {
        // Of this thread alone, which has said so when it entered its jail.
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

/// Makes the thread root's again when it is dropped.
struct RootAgain;

impl Drop for RootAgain {
    fn drop(&mut self) {
        // Neither can fail: the thread's real user is root, and it has kept the capabilities.
        let _ = set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT);
        let _ = set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT);
    }
}
