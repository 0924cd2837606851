//! Attributes of files.

use std::{os::fd::OwnedFd, sync::Arc};

use rustix::{
    fs::{
        AtFlags, CWD, Gid, Mode, OFlags, Statx, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
        chmodat, chownat, fstatfs, ftruncate, statx, utimensat,
    },
    io::Errno,
};

use super::{
    abi::{Body, GETATTR_FH, Result, set},
    file_server::{Answer, Request, Server},
    file_stat::{FileStat, path_of, stat_at},
    open_files::Opened,
};
use crate::jail::capabilities::without_set_id_bits;

/// `fuse_attr_out`, in bytes.
pub(super) const ATTR_OUT: usize = 104;
/// What SETATTR may change. The times of a change are those of the host.
const CHANGES: u32 = set::MODE | set::UID | set::GID | set::SIZE | set::ATIME | set::MTIME;

impl Server {
    /// `fuse_getattr_in`.
    pub(super) fn get_attributes(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let flags = args.u32()?;
        args.skip(4)?;
        let handle = args.u64()?;
        let opened =
            (flags & GETATTR_FH != 0).then(|| self.opened(request.header.node, handle)).transpose()?;
        let stat = self.stat(request.header.node, opened)?;
        Ok(self.attributes_out(Body::default(), request.header.node, &stat).into())
    }

    /// The attributes of a file. Uses the descriptor of its handle if there is one, because the file may have no name
    /// any more.
    fn stat(&mut self, node: u64, opened: Option<Opened>) -> Result<FileStat> {
        if let Some(opened) = opened
            && let Some(fd) = self.file_if_open(opened)?
        {
            return stat_at(&*fd, c"");
        }
        self.stat_node(node)
    }

    /// Adds `fuse_attr_out`.
    pub(super) fn attributes_out(&mut self, body: Body, node: u64, stat: &Statx) -> Body {
        let seconds = self.tables().nodes.cached_for(node).as_secs();
        self.attributes(body.u64(seconds).zeros(8), node, stat)
    }

    /// `fuse_statx_in`: answers STATX, which is GETATTR with the time of creation.
    pub(super) fn get_statx(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let flags = args.u32()?;
        args.skip(4)?;
        let handle = args.u64()?;
        let opened = self.opened(request.header.node, handle);
        let fd = match opened.and_then(|opened| self.file_if_open(opened)) {
            Ok(Some(fd)) if flags & GETATTR_FH != 0 => fd,
            _ => self.descriptor_to_stat(request.header.node)?,
        };
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID | StatxFlags::BTIME;
        let stat = statx(&*fd, c"", AtFlags::EMPTY_PATH, wanted)?;
        let mut tables = self.tables();
        tables.nodes.told(request.header.node, &stat);
        let (seconds, inode) =
            (tables.nodes.cached_for(request.header.node).as_secs(), tables.nodes.inode(&stat));
        drop(tables);
        // `fuse_statx_out` with `fuse_statx`.
        let known = stat.stx_mask & (StatxFlags::BASIC_STATS | StatxFlags::BTIME).bits();
        let mut body = Body::default()
            .u64(seconds)
            .zeros(24)
            .u32(known)
            .u32(stat.stx_blksize)
            .u64(stat.stx_attributes.bits())
            .u32(stat.stx_nlink)
            .u32(stat.stx_uid)
            .u32(stat.stx_gid)
            .u16(stat.stx_mode)
            .zeros(2)
            .u64(inode)
            .u64(stat.stx_size)
            .u64(stat.stx_blocks)
            .u64(stat.stx_attributes_mask.bits());
        for time in [&stat.stx_atime, &stat.stx_btime, &stat.stx_ctime, &stat.stx_mtime] {
            body = body.u64(time.tv_sec as u64).u32(time.tv_nsec).zeros(4);
        }
        Ok(body.u32(stat.stx_rdev_major).u32(stat.stx_rdev_minor).zeros(8 + 14 * 8).into())
    }

    /// `fuse_setattr_in`.
    pub(super) fn set_attributes(&mut self, request: Request) -> Result<Answer> {
        let node = request.header.node;
        match self.change_attributes(request) {
            Err(Errno::ROFS) if self.tables().nodes.leave_read_only(node) => Err(Errno::STALE),
            other => other,
        }
    }

    fn change_attributes(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let valid = args.u32()?;
        args.skip(4)?;
        let (handle, size) = (args.u64()?, args.u64()?);
        args.skip(8)?;
        let (atime, mtime, _ctime) = (args.u64()?, args.u64()?, args.u64()?);
        let (atime_nsec, mtime_nsec, _ctime_nsec) = (args.u32()?, args.u32()?, args.u32()?);
        let mode = args.u32()?;
        args.skip(4)?;
        let (user, group) = (args.u32()?, args.u32()?);

        let node = request.header.node;
        let opened = (valid & set::FH != 0).then(|| self.opened(node, handle)).transpose()?;
        let is_set = |bits: u32| valid & bits != 0;
        // A change of a file in a lower layer of an overlay makes a copy, with another identity than the node's.
        let mut changed = None;
        // Linux also asks for no change at all: chown(2) has named neither a user nor a group, or fallocate(2) or
        // copy_file_range(2) has to remove the set-user-ID and set-group-ID bits of the file. Such a chown(2) here does
        // both.
        let is_bare = !is_set(CHANGES);
        if is_bare || is_set(CHANGES & !set::SIZE) {
            let fd = self.descriptor(node, opened)?;
            if opened.is_none() {
                self.check_name_before_change(node, &fd)?;
            }
            let path = path_of(&fd);
            if is_set(set::MODE) {
                chmodat(CWD, &*path, Mode::from_raw_mode(mode), AtFlags::empty())?;
            }
            if is_bare || is_set(set::UID | set::GID) {
                let id = |bit: u32, id: u32| (is_set(bit) && id != u32::MAX).then_some(id);
                let (user, group) = (id(set::UID, user), id(set::GID, group));
                chownat(CWD, &*path, user.map(Uid::from_raw), group.map(Gid::from_raw), AtFlags::empty())?;
            }
            if is_set(set::ATIME | set::MTIME) {
                let time = |set: u32, now: u32, seconds: u64, nanoseconds: u32| Timespec {
                    tv_sec: seconds as i64,
                    tv_nsec: match () {
                        () if !is_set(set) => UTIME_OMIT,
                        () if is_set(now) => UTIME_NOW,
                        () => nanoseconds.into(),
                    },
                };
                let times = Timestamps {
                    last_access: time(set::ATIME, set::ATIME_NOW, atime, atime_nsec),
                    last_modification: time(set::MTIME, set::MTIME_NOW, mtime, mtime_nsec),
                };
                utimensat(CWD, &*path, &times, AtFlags::empty())?;
            }
            changed = Some(fd);
        }
        if is_set(set::SIZE) {
            let file = match opened {
                Some(opened) => self.writable_file(opened)?,
                None => {
                    let (file, stat) = self.open_node(node, OFlags::WRONLY)?;
                    self.check_name(node, &stat)?;
                    file.into()
                }
            };
            without_set_id_bits(is_set(set::KILL_SUIDGID), || ftruncate(&*file, size))??;
            changed = Some(file);
        }
        let stat = match changed {
            Some(file) => stat_at(&*file, c"")?,
            None => self.stat(node, opened)?,
        };
        if self.shared.is_exclusive {
            self.tables().nodes.was_copied(node, &stat)?;
        }
        Ok(self.attributes_out(Body::default(), node, &stat).into())
    }

    /// Call this after a change of a node's file that may have made an overlay copy it. Files of an exclusive share
    /// that are open must still be found then.
    pub(super) fn follow_copy(&self, node: u64, fd: &OwnedFd) -> Result<()> {
        if self.shared.is_exclusive {
            let stat = stat_at(fd, c"")?;
            // If the copy has a node already, this one is out of date. The change was made nevertheless.
            let _ = self.tables().nodes.was_copied(node, &stat);
        }
        Ok(())
    }

    /// A descriptor of an open file if there is one, and otherwise an O_PATH descriptor of the node.
    fn descriptor(&mut self, node: u64, opened: Option<Opened>) -> Result<Arc<OwnedFd>> {
        match opened.map(|opened| self.file_if_open(opened)).transpose()?.flatten() {
            Some(fd) => Ok(fd),
            None => self.path(node),
        }
    }

    /// `fuse_statfs_out`.
    pub(super) fn stat_file_system(&mut self, request: Request) -> Result<Answer> {
        let stat = fstatfs(&*self.path(request.header.node)?)?;
        let body = Body::default().u64(stat.f_blocks).u64(stat.f_bfree).u64(stat.f_bavail).u64(stat.f_files);
        let body = body.u64(stat.f_ffree).u32(stat.f_bsize as u32).u32(stat.f_namelen as u32);
        Ok(body.u32(stat.f_frsize as u32).zeros(28).into())
    }
}
