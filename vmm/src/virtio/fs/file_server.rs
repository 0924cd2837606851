//! The file server: handles FUSE requests.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    ffi::CStr,
    hash::{BuildHasher, RandomState},
    mem,
    ops::{Deref, DerefMut},
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, atomic::AtomicBool},
    time::Duration,
};

use nix::sys::resource::{Resource, getrlimit};
use rustix::{
    fs::{OFlags, Statx},
    io::Errno,
};

use super::{
    abi::{
        ATTR_FILE_SYSTEM_SHIFT, Args, Body, Header, MAJOR, MINOR, OLDEST_MINOR, OUT_HEADER, Result, WRITE_IN,
        encode_dev, feature, further_feature, opcode,
    },
    caller::Caller,
    counts::Counts,
    descriptors::Unused,
    file_stat::{FileStat, stat_at},
    file_system_kind::FileSystemKind,
    handles::{self, Handles},
    listings::{self, Listings},
    lock_owners::{self, Locks},
    nodes::{self, Nodes},
};
use crate::{
    lock,
    virtio::{
        chain::{Buffers, Chain},
        iovecs::Iovecs,
    },
};

/// The features that are offered to the driver. The writeback cache is not: the host would not see data that is still
/// in the page cache of the guest.
const FEATURES: u32 = feature::ASYNC_READ
    | feature::BIG_WRITES
    | feature::DONT_MASK
    | feature::DO_READDIRPLUS
    | feature::READDIRPLUS_AUTO
    | feature::ASYNC_DIO
    | feature::PARALLEL_DIROPS
    | feature::POSIX_ACL
    | feature::MAX_PAGES
    | feature::CACHE_SYMLINKS
    | feature::HANDLE_KILLPRIV_V2
    | feature::SETXATTR_EXT
    | feature::INIT_EXT;
/// The features that are offered besides, unless the share is exclusive. There the guest does not send OPEN, so it
/// truncates a file by SETATTR. And there nobody else writes, so the pages of a file that has another time are not out
/// of date: the guest itself has written to it.
const FEATURES_OF_SHARED: u32 = feature::ATOMIC_O_TRUNC | feature::AUTO_INVAL_DATA;
/// Those that came later. With ALLOW_IDMAP, the requests that create files name the user and the group whom the files
/// are to belong to, after the guest has mapped the ids of the mount. Other requests name the process's own. Linux
/// leaves these out, and a patch of our guest's kernel fills them in (`fuse-caller.patch`).
const FURTHER_FEATURES: u32 = further_feature::ALLOW_IDMAP;
/// The features of locks that hold outside of the guest. Only our guest kernel asks for POLLED_LOCKS. Without that it
/// would wait for a lock in a request, and not say when a lock ends.
const LOCKS: u32 = feature::POSIX_LOCKS | feature::FLOCK_LOCKS;
/// Pages of the data of a request (`max_pages`).
const MAX_PAGES: u16 = 256;
/// Bytes of the data of a request (`max_write`). A longer request is an error. Otherwise a guest, whose buffers may
/// overlap, could make one request take a long time and much memory of the host.
pub(super) const LONGEST_DATA: usize = MAX_PAGES as usize * 4096;
/// `max_background` and `congestion_threshold`: how many requests the driver sends without waiting for them.
const MAX_BACKGROUND: u16 = 64;
const CONGESTED: u16 = 48;
/// If more descriptors than these wait to be closed, threads close some before they handle further requests.
const MANY_UNUSED: usize = 1024;
/// The longest arguments are those of SETXATTR, which are 64 KiB and a name.
const LONGEST_ARGS: usize = 0x2_1000;

/// How much the tables may contain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) nodes: nodes::Limits,
    pub(super) handles: handles::Limits,
    pub(super) listings: listings::Limits,
    pub(super) locks: lock_owners::Limits,
}

impl Limits {
    /// Limits for the file descriptors that this process may have, if it has this many shares. Half of the descriptors
    /// are left to the rest of the VMM.
    pub(super) fn of_this_process(shares: usize) -> Self {
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft as usize);
        let files = files / shares.max(1);
        // A file that the host renames or removes can be read as long as it has a descriptor.
        let opened = 4096.min(files / 8);
        Self {
            // The guest drops files that nobody uses when it knows 81,920 of a file system, or 114,688 of an exclusive
            // one (kernel-config/patches/fuse-many-inodes.patch). So these limits are for what is in use, and for
            // guests with another kernel.
            nodes: nodes::Limits {
                idle: 1 << 17,
                open: 1 << 16,
                paths: 512.min(files / 16),
                files: opened,
                anchors: (1 << 14).min(files / 4),
            },
            handles: handles::Limits { handles: 1 << 18, files: opened },
            // An exclusive share has no handles.
            listings: listings::Limits { listings: 1024.min(files / 8), bytes: 4 << 20 },
            // An exclusive share has no locks.
            locks: lock_owners::Limits { owners: 1024.min(files / 16), ranges: 1 << 13 },
        }
    }
}

/// What the threads of the server share: the tables of one directory for one driver.
pub(super) struct Shared {
    root: Arc<OwnedFd>,
    limits: Limits,
    pub(super) is_exclusive: bool,
    /// See `sync`.
    pub(super) is_syncing: AtomicBool,
    /// The generation of all nodes (`fuse_entry_out.generation`), a random number. overlayfs in the guest writes node
    /// IDs with their generation to its upper layer (`trusted.overlay.origin`). A later driver, which finds them in a
    /// volume, must not take its own nodes for those: node IDs begin at the same number for each.
    generation: u32,
    tables: Mutex<Tables>,
    /// Descriptors that were removed from the tables. See [`Shared::take_unused`].
    unused: Mutex<VecDeque<Unused>>,
    /// The kinds of file systems, by their device numbers. See [`Shared::kind_of_file_system`].
    pub(super) kinds: Mutex<HashMap<u64, FileSystemKind>>,
}

/// What the guest knows and has open.
pub(super) struct Tables {
    pub(super) nodes: Nodes,
    pub(super) handles: Handles,
    pub(super) listings: Listings,
    pub(super) locks: Locks,
}

/// The locked tables. Make no system call on a file while this exists: it would block the other threads if the file
/// system does not respond.
pub(super) struct LockedTables<'s> {
    tables: MutexGuard<'s, Tables>,
    unused: &'s Mutex<VecDeque<Unused>>,
}

/// One thread of the file server.
pub(super) struct Server {
    pub(super) shared: Arc<Shared>,
    counts: Arc<Counts>,
    pub(super) iovecs: Iovecs,
    /// The thread in the guest whose request is handled.
    pub(super) thread: u32,
    /// The process in the guest whose request is handled. None: its user is root, or is not known.
    pub(super) caller: Option<Caller>,
}

/// A request. All of it was copied from guest memory, except for the data of WRITE.
pub(super) struct Request<'a, 'm> {
    pub(super) header: Header,
    pub(super) args: Args<'a>,
    pub(super) data: Buffers<'m>,
    /// The buffers for the body of the answer.
    pub(super) room: Buffers<'m>,
}

/// The answer to a request.
pub(super) enum Answer {
    Body(Body),
    /// This many bytes were written to the buffers already.
    Filled(usize),
}

impl From<Body> for Answer {
    fn from(body: Body) -> Self {
        Self::Body(body)
    }
}

/// An answer without a body.
pub(super) fn done() -> Answer {
    Answer::Body(Body::default())
}

impl Shared {
    /// Serves the directory `root`, whose attributes are `stat`.
    pub(super) fn new(
        root: Arc<OwnedFd>,
        stat: &FileStat,
        limits: Limits,
        is_exclusive: bool,
    ) -> Result<Self> {
        let tables = Mutex::new(Tables::new(root.clone(), stat, limits, is_exclusive)?);
        // The root has 0, and Linux passes the number on as an `int`.
        let generation = (RandomState::new().hash_one(()) as u32 >> 1).max(1);
        let (is_syncing, unused, kinds) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        Ok(Self { root, limits, is_exclusive, is_syncing, generation, tables, unused, kinds })
    }

    /// Locks the tables.
    pub(super) fn tables(&self) -> LockedTables<'_> {
        LockedTables { tables: lock(&self.tables), unused: &self.unused }
    }

    /// Removes the descriptors of all files in mounts that are not reached from the root any more. The guest keeps its
    /// nodes and handles, which are of no use. So a guest cannot keep a file system of the host busy.
    pub(super) fn close_unmounted(&self) {
        let gone = self.gone();
        self.tables().close_unmounted(&gone);
        // Another file system may get a number of one that is gone.
        lock(&self.kinds).clear();
    }

    /// The nodes in the root that are not there any more. A node that the guest looks up meanwhile is none of them.
    pub(super) fn gone(&self) -> HashSet<u64> {
        let tops = self.tables().nodes.tops();
        let is_gone = |(number, name): &(u64, Box<CStr>)| {
            // The root is on a file system in memory, which answers at once.
            !stat_at(&*self.root, name).is_ok_and(|stat| self.tables().nodes.check(*number, &stat).is_ok())
        };
        tops.into_iter().filter(is_gone).map(|(number, _)| number).collect()
    }

    /// Adds descriptors that have to be closed.
    pub(super) fn add_unused(&self, unused: impl IntoIterator<Item = Unused>) {
        lock(&self.unused).extend(unused);
    }

    /// Takes a descriptor that has to be closed, of a file system that `admits` accepts. Closing may wait for the file
    /// system, so it is work like a request.
    ///
    /// The descriptors of a file system that does not respond wait here. Their number is limited: they were opened when
    /// it still responded, and the tables have limits.
    pub(super) fn take_unused(&self, admits: impl Fn(u64) -> bool) -> Option<Unused> {
        let mut unused = lock(&self.unused);
        let index = unused.iter().position(|unused| admits(unused.device))?;
        unused.remove(index)
    }

    /// Whether there is a descriptor that [`Shared::take_unused`] would take.
    pub(super) fn has_unused(&self, admits: impl Fn(u64) -> bool) -> bool {
        lock(&self.unused).iter().any(|unused| admits(unused.device))
    }

    /// Whether descriptors have to be closed before more are opened.
    pub(super) fn has_many_unused(&self) -> bool {
        lock(&self.unused).len() > MANY_UNUSED
    }
}

impl Tables {
    fn new(root: Arc<OwnedFd>, stat: &FileStat, limits: Limits, is_exclusive: bool) -> Result<Self> {
        let nodes = Nodes::new(root, stat, limits.nodes, is_exclusive)?;
        let (handles, listings) = (Handles::new(limits.handles), Listings::new(limits.listings));
        Ok(Self { nodes, handles, listings, locks: Locks::new(limits.locks) })
    }

    /// All descriptors of the tables.
    fn into_unused(self) -> impl Iterator<Item = Unused> {
        let handles = self.handles.into_unused().chain(self.listings.into_unused());
        self.nodes.into_unused().chain(handles).chain(self.locks.into_unused())
    }

    /// Removes all descriptors of files in mounts that are reached by nodes of `gone` only, which are in the root.
    pub(super) fn close_unmounted(&mut self, gone: &HashSet<u64>) {
        let closed = self.nodes.close_unmounted(gone);
        self.handles.close(&closed);
        self.listings.close(&closed);
        // A hostile guest may have forgotten a node that it has locked.
        let nodes = &self.nodes;
        self.locks.close(|number| closed.contains(&number) || nodes.device(number).is_none());
    }

    /// The guest has added names to a directory or, if `removes`, has removed or replaced some.
    pub(super) fn changed_names(&mut self, directory: u64, removes: bool) {
        self.listings.changed(directory);
        if removes {
            self.nodes.lost_names(directory, self.listings.last());
        }
    }

    fn forget(&mut self, node: u64, lookups: u64) {
        if self.nodes.forget(node, lookups) {
            self.listings.forget(node);
        }
    }

    /// Keeps the descriptor of a handle that was opened with `flags`. ESTALE: the file was unmounted meanwhile.
    pub(super) fn keep_file(&mut self, number: u64, flags: OFlags, fd: &Arc<OwnedFd>) -> Result<()> {
        self.check_mounted(number)?;
        self.handles.keep(number, flags, fd.clone());
        Ok(())
    }

    /// Sets the flags of a handle, and the descriptor that was opened with them. ESTALE: the file was unmounted
    /// meanwhile.
    pub(super) fn replace_file(&mut self, number: u64, flags: OFlags, fd: &Arc<OwnedFd>) -> Result<()> {
        self.check_mounted(number)?;
        self.handles.replace(number, flags, fd.clone())
    }

    /// ESTALE: the file of a handle was unmounted.
    fn check_mounted(&mut self, number: u64) -> Result<()> {
        let (node, _) = self.handles.get(number)?;
        self.nodes.kind(node).map(drop)
    }
}

impl Deref for LockedTables<'_> {
    type Target = Tables;

    fn deref(&self) -> &Tables {
        &self.tables
    }
}

impl DerefMut for LockedTables<'_> {
    fn deref_mut(&mut self) -> &mut Tables {
        &mut self.tables
    }
}

impl Drop for LockedTables<'_> {
    fn drop(&mut self) {
        let mut unused = self.tables.nodes.take_unused();
        unused.extend(self.tables.handles.take_unused());
        unused.extend(self.tables.listings.take_unused());
        unused.extend(self.tables.locks.take_unused());
        if !unused.is_empty() {
            lock(self.unused).extend(unused);
        }
    }
}

impl Server {
    /// A thread of the server.
    pub(super) fn new(shared: Arc<Shared>, counts: Arc<Counts>) -> Self {
        Self { shared, counts, iovecs: Iovecs::default(), thread: 0, caller: None }
    }

    /// Locks the tables.
    pub(super) fn tables(&self) -> LockedTables<'_> {
        self.shared.tables()
    }

    /// Handles a request, and returns the number of bytes that were written for it. `header` was read from the front
    /// of `chain`, which had `len` readable bytes. A request that needs an answer but has no room for one is ignored.
    pub(super) fn serve(&mut self, header: Header, len: usize, chain: Chain) -> u32 {
        self.counts.add(header.opcode);
        self.thread = header.thread;
        self.caller = Caller::of(&header).ok().filter(|caller| !caller.is_root());
        let Chain { mut readable, mut writable, .. } = chain;
        let mut args = Vec::new();
        let copied = if header.len as usize == len {
            let count = if header.opcode == opcode::WRITE { WRITE_IN } else { LONGEST_ARGS };
            args = readable.split_front(count).to_vec();
            header.opcode == opcode::WRITE || readable.is_empty()
        } else {
            false
        };
        match header.opcode {
            opcode::FORGET | opcode::BATCH_FORGET if copied => {
                // These requests have no answer, not even an error.
                let _ = self.forget(&header, Args::new(&args));
                return 0;
            }
            // A request cannot be interrupted. The driver waits for its answer (fuse_interrupt_in in linux/fuse.h).
            opcode::INTERRUPT => return 0,
            _ => {}
        }
        if writable.len() < OUT_HEADER {
            return 0;
        }
        let mut front = writable.split_front(OUT_HEADER);
        let (unique, space) = (header.unique, writable.len());
        let answer = if copied {
            let room = writable.clone();
            self.answer(Request { header, args: Args::new(&args), data: readable, room })
        } else {
            Err(Errno::IO)
        };
        let (error, body) = match answer {
            Ok(Answer::Body(body)) if body.len() <= space => (0, writable.write(body.as_bytes())),
            Ok(Answer::Body(_)) => (Errno::IO.raw_os_error(), 0),
            Ok(Answer::Filled(count)) => (0, count),
            Err(error) => (error.raw_os_error(), 0),
        };
        // No answer is longer than LONGEST_DATA and a page.
        let len = (OUT_HEADER + body) as u32;
        front.write(Body::default().u32(len).u32(-error as u32).u64(unique).as_bytes());
        len
    }

    /// Does what the guest requests.
    pub(super) fn answer_once(&mut self, request: Request) -> Result<Answer> {
        match request.header.opcode {
            opcode::INIT => init(request.args, self.shared.is_exclusive),
            opcode::DESTROY => self.destroy(),
            opcode::LOOKUP => self.look_up(request),
            opcode::GETATTR => self.get_attributes(request),
            opcode::SETATTR => self.set_attributes(request),
            opcode::STATX => self.get_statx(request),
            opcode::STATFS => self.stat_file_system(request),
            opcode::SETXATTR => self.set_xattr(request),
            opcode::GETXATTR => self.get_xattr(request),
            opcode::LISTXATTR => self.list_xattrs(request),
            opcode::REMOVEXATTR => self.remove_xattr(request),
            opcode::READLINK => self.read_link(request),
            opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::LINK
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::RENAME
            | opcode::RENAME2
            | opcode::CREATE => {
                let (directory, opcode) = (request.header.node, request.header.opcode);
                let answer = self.change_directory(request);
                // Linux lets what it has cached of the directory stand after an error.
                let removes = answer.is_ok()
                    && matches!(opcode, opcode::UNLINK | opcode::RMDIR | opcode::RENAME | opcode::RENAME2);
                // The guest must see the change after it has the answer.
                self.tables().changed_names(directory, removes);
                answer
            }
            opcode::TMPFILE => self.make_nameless(request),
            // Linux does not send these requests any more after this answer.
            opcode::OPEN | opcode::OPENDIR | opcode::FLUSH if self.shared.is_exclusive => Err(Errno::NOSYS),
            opcode::OPEN => self.open(request),
            opcode::OPENDIR => self.open_directory(request),
            opcode::READ => self.read(request),
            opcode::WRITE => self.write(request),
            opcode::READDIR => self.read_directory(request, false),
            opcode::READDIRPLUS => self.read_directory(request, true),
            opcode::FLUSH => self.flush(request),
            opcode::FSYNC | opcode::FSYNCDIR => self.sync(request),
            opcode::SYNCFS => self.sync_file_systems(),
            opcode::RELEASE | opcode::RELEASEDIR => self.release(request),
            opcode::FALLOCATE => self.allocate(request),
            opcode::LSEEK => self.seek(request),
            opcode::COPY_FILE_RANGE => self.copy_range(request),
            opcode::IOCTL => self.control_inode(request),
            opcode::GETLK if !self.shared.is_exclusive => self.get_lock(request),
            opcode::SETLK if !self.shared.is_exclusive => self.set_lock(request),
            // The driver handles access(2) itself, and locks in an exclusive share.
            _ => Err(Errno::NOSYS),
        }
    }

    /// Handles a request that changes the names in a directory.
    fn change_directory(&mut self, request: Request) -> Result<Answer> {
        match request.header.opcode {
            opcode::SYMLINK => self.make_symlink(request),
            opcode::MKNOD => self.make_node(request),
            opcode::MKDIR => self.make_directory(request),
            opcode::LINK => self.make_link(request),
            opcode::UNLINK => self.remove_name(request, false),
            opcode::RMDIR => self.remove_name(request, true),
            opcode::RENAME => self.rename(request, false),
            opcode::RENAME2 => self.rename(request, true),
            opcode::CREATE => self.create(request),
            _ => Err(Errno::NOSYS),
        }
    }

    /// The end of the session: the driver has forgotten all nodes and handles. EBUSY: an earlier session has left too
    /// many descriptors that cannot be closed now.
    pub(super) fn destroy(&mut self) -> Result<Answer> {
        if self.shared.has_many_unused() {
            return Err(Errno::BUSY);
        }
        let Shared { root, limits, is_exclusive, .. } = &*self.shared;
        let stat = stat_at(root, c"")?;
        let mut new = Tables::new(root.clone(), &stat, *limits, *is_exclusive)?;
        let mut tables = self.tables();
        // Requests that are handled meanwhile must not take a new file for theirs.
        new.nodes.continue_after(&tables.nodes);
        new.handles.continue_after(&tables.handles);
        new.listings.continue_after(&tables.listings);
        let old = mem::replace(&mut *tables, new);
        drop(tables);
        // Closing may wait for their file systems. Threads close them as admitted for each file system.
        self.shared.add_unused(old.into_unused());
        Ok(done())
    }

    fn forget(&mut self, header: &Header, mut args: Args) -> Result<()> {
        if header.opcode == opcode::FORGET {
            self.tables().forget(header.node, args.u64()?);
            return Ok(());
        }
        let count = args.u32()?;
        args.skip(4)?;
        for _ in 0..count {
            let (node, lookups) = (args.u64()?, args.u64()?);
            self.tables().forget(node, lookups);
        }
        Ok(())
    }

    /// If the name does not exist, the answer has node 0, and the guest may cache that.
    fn look_up(&mut self, mut request: Request) -> Result<Answer> {
        let name = request.args.name()?;
        match self.find(request.header.node, name) {
            Ok((node, stat)) => Ok(self.entry(node, &stat).into()),
            Err(Errno::NOENT) => {
                let seconds = self.tables().nodes.absence_cached_for(request.header.node).as_secs();
                Ok(Body::default().zeros(16).u64(seconds).zeros(ENTRY_OUT - 24).into())
            }
            Err(error) => Err(error),
        }
    }

    /// `fuse_entry_out` of the file that was created at `name` in `parent`.
    pub(super) fn made(&mut self, parent: u64, name: &CStr) -> Result<Answer> {
        let (node, stat) = self.find(parent, name)?;
        Ok(self.entry(node, &stat).into())
    }

    /// `fuse_entry_out` of a node.
    pub(super) fn entry(&mut self, node: u64, stat: &Statx) -> Body {
        let name = self.tables().nodes.name_cached_for(node, stat);
        self.entry_cached(node, stat, name)
    }

    /// `fuse_entry_out` of a node, whose name the guest may cache for this long.
    pub(super) fn entry_cached(&mut self, node: u64, stat: &Statx, name: Duration) -> Body {
        // All nodes have the same generation, because a node ID is never used again.
        let mut tables = self.tables();
        tables.nodes.named(node, name);
        let attributes = tables.nodes.cached_for(node);
        drop(tables);
        let generation = self.shared.generation.into();
        let body = Body::default().u64(node).u64(generation).u64(name.as_secs()).u64(attributes.as_secs());
        self.attributes(body.zeros(8), node, stat)
    }

    /// Adds `fuse_attr` of a node.
    pub(super) fn attributes(&mut self, body: Body, node: u64, stat: &Statx) -> Body {
        let mut tables = self.tables();
        tables.nodes.told(node, stat);
        let (inode, file_system) = tables.nodes.inode_and_file_system(stat);
        drop(tables);
        let times = [&stat.stx_atime, &stat.stx_mtime, &stat.stx_ctime];
        let mut body = body.u64(inode).u64(stat.stx_size).u64(stat.stx_blocks);
        for time in times {
            body = body.u64(time.tv_sec as u64);
        }
        for time in times {
            body = body.u32(time.tv_nsec);
        }
        body.u32(stat.stx_mode.into())
            .u32(stat.stx_nlink)
            .u32(stat.stx_uid)
            .u32(stat.stx_gid)
            .u32(encode_dev(stat.stx_rdev_major, stat.stx_rdev_minor))
            .u32(stat.stx_blksize)
            .u32(file_system << ATTR_FILE_SYSTEM_SHIFT)
    }
}

/// `fuse_entry_out`, in bytes.
pub(super) const ENTRY_OUT: usize = 128;

/// Negotiates the version and the features.
fn init(mut args: Args, is_exclusive: bool) -> Result<Answer> {
    let (major, minor, max_readahead, wanted) = (args.u32()?, args.u32()?, args.u32()?, args.u32()?);
    let body = Body::default().u32(MAJOR).u32(MINOR);
    if major > MAJOR {
        // The driver sends INIT again with this version.
        return Ok(body.zeros(56).into());
    }
    if major < MAJOR || minor < OLDEST_MINOR {
        return Err(Errno::PROTO);
    }
    let further = if wanted & feature::INIT_EXT != 0 { args.u32()? } else { 0 };
    let (mut offered, mut offered_further) = (FEATURES, FURTHER_FEATURES);
    if !is_exclusive {
        offered |= FEATURES_OF_SHARED;
        if further & further_feature::POLLED_LOCKS != 0 {
            (offered, offered_further) = (offered | LOCKS, offered_further | further_feature::POLLED_LOCKS);
        }
    }
    let body = body.u32(max_readahead).u32(offered & wanted).u16(MAX_BACKGROUND).u16(CONGESTED);
    // `time_gran` is 1 nanosecond.
    let body = body.u32(LONGEST_DATA as u32).u32(1).u16(MAX_PAGES).zeros(2);
    Ok(body.u32(offered_further & further).zeros(28).into())
}
