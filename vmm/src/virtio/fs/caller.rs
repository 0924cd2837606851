//! The user and the groups of the process that caused a request.

use nix::sys::stat::{Mode, umask};
use rustix::{
    fs::{Gid, Uid},
    io::Errno,
    process::{getegid, geteuid},
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
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

    pub(super) fn is_root(self) -> bool {
        self.user == Uid::ROOT
    }

    /// Runs `make`, which creates a file. `mask` is the umask of the caller, which the kernel ignores if the
    /// directory has a default access control list.
    pub(super) fn create_as<T>(self, mask: u32, make: impl FnOnce() -> Result<T>) -> Result<T> {
        // The umask belongs to this thread only: it has called unshare(CLONE_FS) when it entered its jail.
        umask(Mode::from_bits_truncate(mask));
        if self.user == Uid::ROOT && self.group == Gid::ROOT {
            return make();
        }
        self.run_as(make)
    }

    /// Does the same as [`Self::run_as`], with these groups. No request says of which groups the caller is a member.
    /// But the guest's kernel has allowed what it asks for, perhaps because of one of these.
    pub(super) fn with_groups<T>(self, groups: &[Gid], work: impl FnOnce() -> Result<T>) -> Result<T> {
        let _clear = ClearGroups;
        set_thread_groups(groups)?;
        self.run_as(work)
    }

    /// Runs `work` as the user and the group of the caller. The thread keeps its capabilities.
    fn run_as<T>(self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let _restore = RestoreIds { user: geteuid(), group: getegid() };
        set_thread_res_gid(Gid::ROOT, self.group, Gid::ROOT)?;
        set_thread_res_uid(Uid::ROOT, self.user, Uid::ROOT)?;
        work()
    }
}

/// Changes the user and group of the thread back when it is dropped.
struct RestoreIds {
    user: Uid,
    group: Gid,
}

impl Drop for RestoreIds {
    fn drop(&mut self) {
        // Neither can fail, because the real user of the thread is root and it has kept its capabilities.
        let _ = set_thread_res_uid(Uid::ROOT, self.user, Uid::ROOT);
        let _ = set_thread_res_gid(Gid::ROOT, self.group, Gid::ROOT);
    }
}

/// Removes the groups of the thread when it is dropped.
struct ClearGroups;

impl Drop for ClearGroups {
    fn drop(&mut self) {
        // As above.
        let _ = set_thread_groups(&[]);
    }
}
