//! Reads and writes the contents of files.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    io::IoSlice,
    os::fd::{IntoRawFd, OwnedFd},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::{
    fs::{
        FallocateFlags, FileType, OFlags, SeekFrom, Statx, copy_file_range, fallocate, fdatasync, fstatfs,
        fsync, ftruncate, seek,
    },
    io::{Errno, fcntl_dupfd_cloexec},
};

use super::{
    abi::{
        Body, FSYNC_DATA, OPEN_DIRECT_IO, OPEN_KEEP_CACHE, OPEN_KILL_SUIDGID, OPEN_NOFLUSH, OPEN_NONSEEKABLE,
        OPENED_FOR_IOCTL, Result, WRITE_KILL_SUIDGID,
    },
    attributes::ATTR_OUT,
    file_server::{Answer, LONGEST_DATA, Request, Server, done},
    file_stat::{FileStat, stat_at},
    file_system_kind::FileSystemKind,
    handles,
    identity::device_of,
    nodes::caching::Known,
    open_files::Opened,
};
use crate::jail::capabilities::without_set_id_bits;

/// Two changes of a file within this time may leave the same times, because those have the granularity of a kernel
/// tick.
const SETTLES: Duration = Duration::from_secs(1);
/// The most bytes that one COPY_FILE_RANGE request copies, so that it does not take long. The guest requests the rest.
const LONGEST_COPY: u64 = 64 << 20;

/// File systems that do nothing at close(2) (statfs(2)): ext4, XFS, Btrfs, tmpfs, and overlayfs on these.
const CLOSE_DOES_NOTHING: [i64; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, OVERLAYFS];
/// `OVERLAYFS_SUPER_MAGIC`.
pub(super) const OVERLAYFS: i64 = 0x794c_7630;

impl Server {
    /// `fuse_open_in`.
    pub(super) fn open(&mut self, mut request: Request) -> Result<Answer> {
        let (flags, open_flags) = (request.args.u32()?, request.args.u32()?);
        let node = request.header.node;
        if self.tables().nodes.kind(node)? == FileType::Directory {
            return Err(Errno::ISDIR);
        }
        self.tables().handles.make_room()?;
        let (file, stat) = self.open_file(node, flags, open_flags & OPEN_KILL_SUIDGID != 0)?;
        if self.is_made_by_kernel(&stat, &file) {
            // The page cache would end at the size, which is 0 or any other number, and keep what was read once.
            // Some of these files have no positions (debugfs).
            let seeks =
                if seek(&file, SeekFrom::Current(0)) == Err(Errno::SPIPE) { OPEN_NONSEEKABLE } else { 0 };
            let handle = self.add_handle(node, handles::kept(flags), file)?;
            return Ok(Body::default().u64(handle).u32(OPEN_NOFLUSH | OPEN_DIRECT_IO | seeks).u32(0).into());
        }
        if flags == OPENED_FOR_IOCTL {
            // What the guest has cached stays to be checked by the next open. A 32-bit process, which may read, gets
            // what the host has.
            let handle = self.add_handle(node, OFlags::RDONLY, file)?;
            let cached = match self.tables().nodes.knows(node, &stat, version(&stat)) {
                Known::SameVersion => OPEN_KEEP_CACHE,
                Known::OtherVersion => 0,
                Known::OtherSize => OPEN_DIRECT_IO,
            };
            return Ok(Body::default().u64(handle).u32(OPEN_NOFLUSH | cached).u32(0).into());
        }
        if flags & OFlags::TRUNC.bits() != 0 {
            self.tables().nodes.resized(node);
        } else if self.tables().nodes.forget_other_size(node, &stat) {
            // Linux looks the file up again, which tells it the size.
            return Err(Errno::STALE);
        }
        let mut keeps = flush_flags(flags, &file);
        if self.tables().nodes.remember_version(node, version(&stat))? {
            keeps |= OPEN_KEEP_CACHE;
        }
        let handle = self.add_handle(node, handles::kept(flags), file)?;
        Ok(Body::default().u64(handle).u32(keeps).u32(0).into())
    }

    /// Whether the host's kernel makes the contents of an open file when they are read.
    fn is_made_by_kernel(&self, stat: &FileStat, file: &OwnedFd) -> bool {
        self.shared.kind_of_file_system(device_of(stat), file) == FileSystemKind::MadeByKernel
    }

    /// The same of a node whose file was opened.
    fn is_known_as_made_by_kernel(&self, node: u64) -> bool {
        let device = self.tables().nodes.device(node);
        device.is_some_and(|device| self.shared.is_known_as(device, FileSystemKind::MadeByKernel))
    }

    /// Opens a regular file, and truncates it if `flags` has O_TRUNC. It is truncated only after its identity was
    /// checked.
    pub(super) fn open_file(&mut self, node: u64, flags: u32, kills: bool) -> Result<(OwnedFd, FileStat)> {
        let (file, stat) = self.open_node(node, handles::kept(flags))?;
        let reads = flags & OFlags::ACCMODE.bits() == OFlags::RDONLY.bits();
        if !reads {
            self.check_name(node, &stat)?;
        }
        if flags & OFlags::TRUNC.bits() == 0 {
            return Ok((file, stat));
        }
        if reads {
            let (writable, stat) = self.open_node(node, OFlags::WRONLY)?;
            self.check_name(node, &stat)?;
            without_set_id_bits(kills, || ftruncate(writable, 0))??;
        } else {
            without_set_id_bits(kills, || ftruncate(&file, 0))??;
        }
        let stat = stat_at(&file, c"")?;
        Ok((file, stat))
    }

    /// `fuse_release_in`.
    pub(super) fn release(&mut self, mut request: Request) -> Result<Answer> {
        let handle = request.args.u64()?;
        // A descriptor of NFS is closed here, and the request counts for the file system of its node.
        self.opened(request.header.node, handle)?;
        self.remove_handle(handle)?;
        Ok(done())
    }

    /// `fuse_flush_in`: a descriptor of the guest was closed. Closing a duplicate of the server's descriptor makes
    /// the file system of the host do what it does at close(2), and returns its error.
    pub(super) fn flush(&mut self, mut request: Request) -> Result<Answer> {
        let handle = request.args.u64()?;
        let opened = self.opened(request.header.node, handle)?;
        let Some(fd) = self.file_if_open(opened)? else { return Ok(done()) };
        let copy = fcntl_dupfd_cloexec(&*fd, 0)?;
        nix::unistd::close(copy.into_raw_fd()).map_err(|error| Errno::from_raw_os_error(error as i32))?;
        Ok(done())
    }

    /// `fuse_fsync_in`.
    pub(super) fn sync(&mut self, mut request: Request) -> Result<Answer> {
        let (handle, flags) = (request.args.u64()?, request.args.u32()?);
        let fd = self.file(self.opened(request.header.node, handle)?)?;
        if flags & FSYNC_DATA != 0 {
            fdatasync(&*fd)?
        } else {
            fsync(&*fd)?
        }
        Ok(done())
    }

    /// `fuse_read_in`: reads from the file to guest memory.
    pub(super) fn read(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let (handle, offset, size) = (args.u64()?, args.u64()?, args.u32()? as usize);
        if size > LONGEST_DATA || size > request.room.len() {
            return Err(Errno::INVAL);
        }
        let fd = self.file(self.opened(request.header.node, handle)?)?;
        let mut room = request.room.split_front(size);
        let mut filled = 0;
        // The guest takes a short read for the end of the file, so the server must not return one for another reason.
        while !room.is_empty() {
            let at = offset.checked_add(filled as u64).ok_or(Errno::INVAL)?;
            match self.iovecs.read_at(&*fd, room.slices(), at).map_err(errno) {
                Ok(0) => break,
                Ok(count) => {
                    room.split_front(count);
                    filled += count;
                }
                Err(Errno::INTR) => {}
                // Some files that the kernel makes have no positions (debugfs). What such a read takes may be gone, so
                // there is no second one.
                Err(Errno::SPIPE) if filled == 0 => {
                    filled = self.iovecs.read(&*fd, room.slices()).map_err(errno)?;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Answer::Filled(filled))
    }

    /// `fuse_write_in`: writes from guest memory to the file.
    pub(super) fn write(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let (handle, offset, size, write_flags) =
            (args.u64()?, args.u64()?, args.u32()? as usize, args.u32()?);
        args.skip(8)?;
        let flags = args.u32()?;
        if size > LONGEST_DATA || size > request.data.len() {
            return Err(Errno::INVAL);
        }
        let opened = self.opened(request.header.node, handle)?;
        self.tables().nodes.resized(request.header.node);
        let (fd, appends) = self.file_to_write(opened, flags)?;
        // Handles are opened with the flag, nodes are not.
        let is_synchronous =
            matches!(opened, Opened::Node(_)) && OFlags::from_bits_retain(flags).intersects(OFlags::DSYNC);
        let data = request.data.split_front(size);
        // Of a file that the kernel makes, one write of a program has to stay one: the kernel takes each part of the
        // data for a write of its own.
        let whole = if data.slices().nth(1).is_some() && self.is_known_as_made_by_kernel(request.header.node)
        {
            Some(data.to_vec())
        } else {
            None
        };
        let iovecs = &mut self.iovecs;
        let mut write = || {
            let written = match (&whole, appends) {
                (Some(whole), _) => rustix::io::pwritev(&*fd, &[IoSlice::new(whole)], offset),
                (None, true) => iovecs.append(&*fd, data.slices()).map_err(errno),
                (None, false) => iovecs.write_at(&*fd, data.slices(), offset).map_err(errno),
            };
            match written {
                // Some of these files take what is written, whatever the position (/proc/PID/comm).
                Err(Errno::SPIPE) => rustix::io::write(&*fd, &data.to_vec()),
                written => written,
            }
        };
        let written = without_set_id_bits(write_flags & WRITE_KILL_SUIDGID != 0, || {
            loop {
                match write() {
                    Err(Errno::INTR) => {}
                    written => break written,
                }
            }
        })??;
        if is_synchronous {
            fdatasync(&*fd)?;
        }
        let body = written_out(written);
        // Our guest kernel leaves room for the attributes in an exclusive device (`fuse-written-attributes.patch`). If
        // it does not get them, it asks for them when they are needed.
        let wants_attributes =
            self.shared.is_exclusive && request.room.len() >= body.as_bytes().len() + ATTR_OUT;
        match wants_attributes.then(|| stat_at(&*fd, c"")) {
            Some(Ok(stat)) => Ok(self.attributes_out(body, request.header.node, &stat).into()),
            Some(Err(_)) | None => Ok(body.into()),
        }
    }

    /// `fuse_fallocate_in`.
    pub(super) fn allocate(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let (handle, offset, length, mode) = (args.u64()?, args.u64()?, args.u64()?, args.u32()?);
        let opened = self.opened(request.header.node, handle)?;
        self.tables().nodes.resized(request.header.node);
        let fd = self.writable_file(opened)?;
        fallocate(&*fd, FallocateFlags::from_bits_retain(mode), offset, length)?;
        Ok(done())
    }

    /// `fuse_lseek_in`: finds data or a hole. The guest handles other seeks itself.
    pub(super) fn seek(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let (handle, offset, whence) = (args.u64()?, args.u64()?, args.u32()?);
        let to = match whence as i32 {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL),
        };
        let fd = self.file(self.opened(request.header.node, handle)?)?;
        Ok(Body::default().u64(seek(&*fd, to)?).into())
    }

    /// `fuse_copy_file_range_in`.
    pub(super) fn copy_range(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let (from, mut from_offset) = (args.u64()?, args.u64()?);
        let to_node = args.u64()?;
        let (to, mut to_offset, length, flags) = (args.u64()?, args.u64()?, args.u64()?, args.u64()?);
        if flags != 0 {
            return Err(Errno::INVAL);
        }
        let (from, to) = (self.opened(request.header.node, from)?, self.opened(to_node, to)?);
        // Linux then copies by READ and WRITE.
        self.check_same_mount(from, to)?;
        self.tables().nodes.resized(to_node);
        let from = self.file(from)?;
        let to = self.writable_file(to)?;
        let length = length.min(LONGEST_COPY) as usize;
        let copied = copy_file_range(&*from, Some(&mut from_offset), &*to, Some(&mut to_offset), length)?;
        Ok(written_out(copied).into())
    }
}

/// `FOPEN_NOFLUSH` if the guest need not send FLUSH when a file is closed that was opened with `flags`.
///
/// The server has nothing to do at FLUSH if the file cannot be written. It has nothing to do either if close(2) does
/// nothing in the host's file system, unlike that of NFS, which writes data and may fail. But if the file can be
/// mapped, the guest's kernel writes changed pages before it sends FLUSH, so that the host sees them then.
pub(super) fn flush_flags(flags: u32, file: &OwnedFd) -> u32 {
    let access = flags & OFlags::ACCMODE.bits();
    let is_needless = access == OFlags::RDONLY.bits()
        || access == OFlags::WRONLY.bits()
            && fstatfs(file).is_ok_and(|stat| CLOSE_DOES_NOTHING.contains(&stat.f_type));
    if is_needless { OPEN_NOFLUSH } else { 0 }
}

/// `fuse_write_out`.
fn written_out(count: usize) -> Body {
    Body::default().u32(count as u32).u32(0)
}

/// A version number of the contents of a file, which changes when the contents change. Returns 0 if the next change
/// might not change it.
pub(super) fn version(stat: &Statx) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let settled = now.saturating_sub(SETTLES).as_secs();
    if !u64::try_from(stat.stx_ctime.tv_sec).is_ok_and(|changed| settled > changed) {
        return 0;
    }
    let mut hasher = DefaultHasher::new();
    for time in [&stat.stx_mtime, &stat.stx_ctime] {
        (time.tv_sec, time.tv_nsec).hash(&mut hasher);
    }
    (stat.stx_size, hasher.finish()).hash(&mut hasher);
    hasher.finish()
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
