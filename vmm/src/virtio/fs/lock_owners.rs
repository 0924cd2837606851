//! Who has locks of files, and of which ranges. The table makes no system calls.
//!
//! Whoever has locks of a file in the guest has an open file description of it here, and these are locks of that
//! description (F_OFD_SETLK in F_SETLK(2), and flock(2)). All of them end with the VMM. Linux charges the memory of
//! locks to nobody, so their number is limited.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
};

use nix::fcntl::{FcntlArg, fcntl};
use rangemap::RangeInclusiveMap;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use super::{
    abi::{Args, Body, LOCK_IS_FLOCK, Result},
    descriptors::Unused,
};

/// The last byte of a file that can be locked (OFFSET_MAX in linux/fs.h).
const LAST: u64 = i64::MAX as u64;

/// How much the table may contain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Owners of locks. Each has a descriptor.
    pub(super) owners: usize,
    /// Ranges of files that are locked.
    pub(super) ranges: usize,
}

/// Who has locks of a file: a process, or an open file description of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Owner {
    pub(super) node: u64,
    /// `fuse_lk_in.owner`.
    number: u64,
    /// Locks of flock(2) and of fcntl(2) do not conflict with each other.
    pub(super) is_flock: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
}

/// What an owner has locked. The mutex is held during system calls on the file: they are of one file, and change the
/// locks of one owner.
#[derive(Default)]
pub(super) struct Locked {
    pub(super) file: Option<OwnedFd>,
    pub(super) is_writable: bool,
    ranges: RangeInclusiveMap<u64, Kind>,
    /// It is not in the table any more.
    pub(super) is_removed: bool,
}

struct Entry {
    /// The file system of the node.
    device: u64,
    locked: Arc<Mutex<Locked>>,
    /// The number of ranges when the last request was done.
    ranges: usize,
}

/// The table.
pub(super) struct Locks {
    limits: Limits,
    owners: HashMap<Owner, Entry>,
    /// All ranges of the entries.
    ranges: usize,
    /// What the owner of the table has to close, without its lock.
    unused: Vec<Unused>,
}

impl Locks {
    /// An empty table.
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, owners: HashMap::new(), ranges: 0, unused: Vec::new() }
    }

    /// Takes the descriptors that are not needed any more.
    pub(super) fn take_unused(&mut self) -> Vec<Unused> {
        std::mem::take(&mut self.unused)
    }

    /// All descriptors of the table.
    pub(super) fn into_unused(self) -> impl Iterator<Item = Unused> {
        let entries = self.owners.into_values();
        entries.map(|Entry { device, locked, .. }| Unused { device, _kept: locked }).chain(self.unused)
    }

    /// Removes all locks of nodes of which `is_gone` says so.
    pub(super) fn close(&mut self, is_gone: impl Fn(u64) -> bool) {
        let owners: Vec<_> = self.owners.keys().filter(|owner| is_gone(owner.node)).copied().collect();
        owners.into_iter().for_each(|owner| self.remove(owner));
    }

    /// Whether there is room for this many more ranges.
    pub(super) fn has_room(&self, ranges: usize) -> bool {
        self.ranges + ranges <= self.limits.ranges
    }

    pub(super) fn get(&self, owner: Owner) -> Option<Arc<Mutex<Locked>>> {
        Some(self.owners.get(&owner)?.locked.clone())
    }

    /// The locks of an owner who wants another one, on the file system `device`. ENOLCK: there are too many.
    pub(super) fn add(&mut self, owner: Owner, device: u64) -> Result<Arc<Mutex<Locked>>> {
        // A lock in the middle of a range of the other kind makes three of one.
        if !self.has_room(2) {
            return Err(Errno::NOLCK);
        }
        if let Some(locked) = self.get(owner) {
            return Ok(locked);
        }
        if self.owners.len() >= self.limits.owners {
            return Err(Errno::NOLCK);
        }
        let locked = Arc::<Mutex<Locked>>::default();
        self.owners.insert(owner, Entry { device, locked: locked.clone(), ranges: 0 });
        Ok(locked)
    }

    /// Counts the ranges of an owner after a change, and forgets an owner without any.
    pub(super) fn changed(&mut self, owner: Owner, of: &Arc<Mutex<Locked>>, locked: &mut Locked) {
        let ranges = locked.ranges.len();
        let entry = self.owners.get_mut(&owner).filter(|entry| Arc::ptr_eq(&entry.locked, of));
        // The file was unmounted, or the driver was reset, meanwhile.
        let Some(entry) = entry else { return };
        self.ranges = self.ranges - entry.ranges + ranges;
        entry.ranges = ranges;
        if ranges == 0 {
            locked.is_removed = true;
            self.remove(owner);
        }
    }

    fn remove(&mut self, owner: Owner) {
        if let Some(Entry { device, locked, ranges }) = self.owners.remove(&owner) {
            self.ranges -= ranges;
            self.unused.push(Unused { device, _kept: locked });
        }
    }
}

/// `fuse_lk_in`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) owner: Owner,
    first: u64,
    last: u64,
    /// None: what is locked there is unlocked.
    pub(super) kind: Option<Kind>,
}

impl Wanted {
    pub(super) fn parse(node: u64, args: &mut Args) -> Result<Self> {
        // A handle. The open file does not matter, only who has it.
        args.skip(8)?;
        let (number, first, last, kind) = (args.u64()?, args.u64()?, args.u64()?, args.u32()?);
        args.skip(4)?;
        let is_flock = args.u32()? & LOCK_IS_FLOCK != 0;
        if first > last || last > LAST {
            return Err(Errno::INVAL);
        }
        let kind = match kind as i32 {
            libc::F_RDLCK => Some(Kind::Read),
            libc::F_WRLCK => Some(Kind::Write),
            libc::F_UNLCK => None,
            _ => return Err(Errno::INVAL),
        };
        let (first, last) = if is_flock { (0, LAST) } else { (first, last) };
        Ok(Self { owner: Owner { node, number, is_flock }, first, last, kind })
    }

    /// The lock for F_OFD_SETLK and F_OFD_GETLK.
    fn flock(&self) -> libc::flock {
        let l_type = match self.kind {
            Some(Kind::Read) => libc::F_RDLCK,
            Some(Kind::Write) => libc::F_WRLCK,
            None => libc::F_UNLCK,
        };
        // The length 0 means to the end, however long the file becomes.
        let l_len = if self.last == LAST { 0 } else { (self.last - self.first + 1) as i64 };
        libc::flock {
            l_type: l_type as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: self.first as i64,
            l_len,
            l_pid: 0,
        }
    }

    /// Makes this the lock of an open file description. EAGAIN: another one has a lock that excludes it.
    fn set(&self, file: impl AsFd) -> Result<()> {
        if self.owner.is_flock {
            let operation = match self.kind {
                Some(Kind::Read) => FlockOperation::NonBlockingLockShared,
                Some(Kind::Write) => FlockOperation::NonBlockingLockExclusive,
                None => FlockOperation::NonBlockingUnlock,
            };
            return flock(file, operation);
        }
        match fcntl(file, FcntlArg::F_OFD_SETLK(&self.flock())).map_err(errno) {
            Ok(_) => Ok(()),
            Err(Errno::ACCESS) => Err(Errno::AGAIN),
            Err(error) => Err(error),
        }
    }

    /// Adds `fuse_file_lock` of a lock that another open file description than this one has, and that excludes this
    /// lock. Without one it is an unlocked range.
    pub(super) fn excluded_by(&self, file: impl AsFd, body: Body) -> Result<Body> {
        let mut found = self.flock();
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut found)).map_err(errno)?;
        let first = found.l_start as u64;
        let last = if found.l_len == 0 { LAST } else { first.saturating_add(found.l_len as u64 - 1) };
        // The guest does not learn the pids of the host.
        Ok(body.u64(first).u64(last).u32(found.l_type as u32).u32(0))
    }
}

impl Locked {
    /// Whether the end of a lock makes two ranges of one.
    pub(super) fn is_split_by(&self, wanted: &Wanted) -> bool {
        let around = self.ranges.get_key_value(&wanted.first);
        wanted.kind.is_none()
            && around.is_some_and(|(range, _)| *range.start() < wanted.first && *range.end() > wanted.last)
    }

    /// Sets a lock of the file, which is open.
    pub(super) fn set(&mut self, wanted: &Wanted) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let set = wanted.set(file);
        if wanted.owner.is_flock && set.is_err() {
            // What it had is lost, as in flock(2).
            self.ranges.clear();
        }
        if set.is_err() && wanted.kind.is_none() && (wanted.first, wanted.last) == (0, LAST) {
            // The end of the file is the end of its locks, whatever its file system answers.
            (self.file, self.ranges) = (None, RangeInclusiveMap::new());
            return Ok(());
        }
        set?;
        match wanted.kind {
            Some(kind) => self.ranges.insert(wanted.first..=wanted.last, kind),
            None => self.ranges.remove(wanted.first..=wanted.last),
        }
        Ok(())
    }

    /// Replaces the file by the same one, which was opened again. What is locked stays locked all the time: only a
    /// file that is open to be read is replaced, and others may have its locks too.
    pub(super) fn replace(&mut self, owner: Owner, file: OwnedFd, is_writable: bool) -> Result<()> {
        for (range, kind) in self.ranges.iter() {
            Wanted { owner, first: *range.start(), last: *range.end(), kind: Some(*kind) }.set(&file)?;
        }
        (self.file, self.is_writable) = (Some(file), is_writable);
        Ok(())
    }
}

fn errno(error: nix::Error) -> Errno {
    Errno::from_raw_os_error(error as i32)
}
