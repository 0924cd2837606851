//! Listings of directories that the guest reads without a handle. The table makes no system calls.
//!
//! In an exclusive share, the guest opens directories without a request too. A READDIR request then names a directory
//! and a position in it. A process that has begun to read a directory must get each entry once, even if files are
//! created and removed meanwhile (readdir(3)). The positions of the host's file system do not help: where overlayfs
//! merges directories, a position is the number of an entry, and each descriptor has other numbers.
//!
//! So the server reads a directory from its start to its end, with one descriptor, and keeps the entries. That is a
//! listing. The position of an entry is the number of its listing, and the number of the entry there. A process that
//! begins to read a directory gets a new listing, unless there is one that is complete, and the guest has not changed
//! the directory since.
//!
//! If there are too many listings, one that was read to its end is removed before one that a process may still be
//! reading. If the listing of a position was removed nevertheless, the directory is listed again, and read on from the
//! same number of entries. But if names were removed from the directory since the listing was begun, other entries may
//! have these numbers now. Then it is read from its start: a process may get an entry twice, but none is left out.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    ffi::CStr,
    mem::{self, MaybeUninit},
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
};

use rustix::{fs::RawDir, io::Errno};

use super::{abi::Result, descriptors::Unused};

/// How many bytes of entries are read at once.
const READ: usize = 0x8000;
/// So many entries are read ahead, so that the descriptor of a small directory is closed soon.
const ENOUGH: u64 = 256;
/// The most bytes of entries that a listing keeps. Of a longer one it keeps those that were read last.
const MOST_KEPT: usize = 1 << 19;
/// The most entries that are read and not returned by one request.
const MOST_SKIPPED: u64 = 1 << 20;

/// How much the table may contain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Listings. Each may have a descriptor.
    pub(super) listings: usize,
    /// Bytes of their entries.
    pub(super) bytes: usize,
}

/// The number of a listing. 0: of none.
pub(super) type Number = u32;

/// Linux keeps positions in signed numbers, so a number has 31 bits.
const LAST_NUMBER: Number = i32::MAX as Number;

/// A position in a directory. 0 is its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    listing: Number,
    /// The number of the next entry.
    pub(super) index: u64,
}

impl Position {
    pub(super) const START: Self = Self { listing: 0, index: 0 };

    pub(super) fn of_cookie(cookie: u64) -> Self {
        Self { listing: (cookie >> 32) as u32, index: cookie & u64::from(u32::MAX) }
    }

    pub(super) fn cookie(self) -> u64 {
        u64::from(self.listing) << 32 | self.index
    }

    fn is_start(self) -> bool {
        self == Self::START
    }

    /// Whether the listing is the one with this number, or an earlier one. Numbers come again, so only the half of them
    /// that is before a number counts as earlier.
    pub(super) fn is_of_or_before(self, number: Number) -> bool {
        number.wrapping_sub(self.listing) & LAST_NUMBER <= LAST_NUMBER / 2
    }

    /// ESTALE: the position is so far from the start that reading up to it would take long.
    pub(super) fn check_near(self) -> Result<()> {
        if self.index > MOST_SKIPPED { Err(Errno::STALE) } else { Ok(()) }
    }
}

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// The inode number on the host.
    pub(super) inode: u64,
    /// `DT_*`.
    pub(super) kind: u32,
    pub(super) name: Box<CStr>,
}

impl Entry {
    /// Bytes of memory.
    fn bytes(&self) -> usize {
        /// What an allocation takes besides.
        const ALLOCATION: usize = 16;
        mem::size_of::<Self>() + self.name.count_bytes() + ALLOCATION
    }
}

/// The entries of a directory that were read so far.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// The number of the first entry that is still kept.
    first: u64,
    entries: VecDeque<Entry>,
    bytes: usize,
    is_complete: bool,
}

impl Listing {
    /// Reads the directory up to the entry `index`, and some more entries. `directory` is its descriptor, which has not
    /// been read otherwise. Blocks.
    fn read(&mut self, index: u64, directory: impl AsFd) -> Result<()> {
        while !self.is_complete && self.end() < index.saturating_add(ENOUGH) {
            match self.read_some(&directory) {
                Err(_) if self.end() > index => return Ok(()),
                read => read?,
            }
            while self.bytes > MOST_KEPT && self.first < index {
                let Some(entry) = self.entries.pop_front() else { break };
                self.bytes -= entry.bytes();
                self.first += 1;
            }
        }
        Ok(())
    }

    fn read_some(&mut self, directory: impl AsFd) -> Result<()> {
        let mut buffer = vec![MaybeUninit::uninit(); READ];
        let mut raw = RawDir::new(directory, &mut buffer);
        loop {
            let Some(entry) = raw.next() else {
                self.is_complete = true;
                return Ok(());
            };
            let entry = entry?;
            let kind = entry.file_type().as_raw_mode() >> 12;
            let entry = Entry { inode: entry.ino(), kind, name: entry.file_name().into() };
            self.bytes += entry.bytes();
            self.entries.push_back(entry);
            // A position has 32 bits for the number.
            self.is_complete |= self.end() >= u64::from(u32::MAX);
            if raw.is_buffer_empty() || self.is_complete {
                return Ok(());
            }
        }
    }

    /// The number of the next entry that would be read.
    fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Entries from `index` on, enough to fill `room` bytes if each takes this many and its name.
    fn from(&self, index: u64, room: usize, fixed: usize) -> Vec<Entry> {
        let Some(skipped) = index.checked_sub(self.first) else { return Vec::new() };
        let mut len = 0;
        let fits = |entry: &&Entry| {
            let before = len;
            len += fixed + entry.name.count_bytes();
            before < room
        };
        self.entries.iter().skip(skipped as usize).take_while(fits).cloned().collect()
    }
}

/// A listing that a request uses.
pub(super) struct Used {
    number: Number,
    listing: Arc<Mutex<Listing>>,
    /// None: the listing is complete.
    directory: Option<Arc<OwnedFd>>,
}

impl Used {
    /// The position of an entry.
    pub(super) fn position(&self, index: u64) -> Position {
        Position { listing: self.number, index }
    }

    /// Returns entries from `index` on, enough to fill `room` bytes if each takes `fixed` bytes and its name. Returns
    /// none at the end. Reads the entries if they were not read yet. Blocks, even while another thread reads the same
    /// directory: that thread counts for the same file system.
    pub(super) fn read(&self, index: u64, room: usize, fixed: usize) -> Result<(Vec<Entry>, State)> {
        let mut listing = crate::lock(&self.listing);
        if index < listing.first {
            return Err(Errno::STALE);
        }
        if let Some(directory) = &self.directory {
            listing.read(index, directory)?;
        }
        let Listing { first, bytes, is_complete, .. } = *listing;
        let is_at_end = is_complete && index >= listing.end();
        Ok((listing.from(index, room, fixed), State { first, bytes, is_complete, is_at_end }))
    }
}

/// What a request has made of a listing.
pub(super) struct State {
    /// The number of the first entry that is still kept.
    first: u64,
    bytes: usize,
    is_complete: bool,
    /// The answer has no entries. Only this shows that a reader has come to the end: of an earlier answer, Linux may
    /// have used a part only, and may ask again.
    pub(super) is_at_end: bool,
}

struct Kept {
    node: u64,
    /// The file system of the node.
    device: u64,
    listing: Arc<Mutex<Listing>>,
    /// None: the listing is complete.
    directory: Option<Arc<OwnedFd>>,
    /// See [`State`].
    first: u64,
    bytes: usize,
    /// How many have begun to read it and have not come to its end. Some may have given up.
    readers: usize,
    /// When it was used last, on [`Listings::clock`].
    used_at: u64,
}

/// The table.
pub(super) struct Listings {
    limits: Limits,
    kept: HashMap<Number, Kept>,
    /// The last listing of each directory that was not changed since it was begun.
    current: HashMap<u64, Number>,
    last: Number,
    clock: u64,
    bytes: usize,
    /// Descriptors that the owner of the table has to close, without its lock.
    unused: Vec<Unused>,
}

impl Listings {
    /// An empty table.
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            kept: HashMap::new(),
            current: HashMap::new(),
            last: 0,
            clock: 0,
            bytes: 0,
            unused: Vec::new(),
        }
    }

    /// Makes the next numbers differ from those of `other`, which this table replaces.
    pub(super) fn continue_after(&mut self, other: &Self) {
        self.last = other.last;
    }

    /// Takes the descriptors that are not needed any more.
    pub(super) fn take_unused(&mut self) -> Vec<Unused> {
        mem::take(&mut self.unused)
    }

    /// All descriptors of the table.
    pub(super) fn into_unused(self) -> impl Iterator<Item = Unused> {
        let directory = |kept: Kept| Some(Unused { device: kept.device, _kept: kept.directory? });
        self.unused.into_iter().chain(self.kept.into_values().filter_map(directory))
    }

    /// The listing of a directory to read from a position on. None: it has to be begun.
    pub(super) fn find(&mut self, node: u64, position: Position) -> Option<Used> {
        let is_start = position.is_start();
        let number = if is_start { *self.current.get(&node)? } else { position.listing };
        let now = self.tick();
        let kept = self.kept.get_mut(&number)?;
        // Of a listing that is not complete, entries may be removed for the process that reads it.
        let is_shared = kept.directory.is_none();
        if kept.node != node || position.index < kept.first || is_start && !is_shared {
            return None;
        }
        kept.used_at = now;
        kept.readers += usize::from(is_start);
        Some(Used { number, listing: kept.listing.clone(), directory: kept.directory.clone() })
    }

    /// Adds a listing of a directory, which was just opened as `directory`. Others may get it if `is_shared`.
    pub(super) fn insert(
        &mut self,
        node: u64,
        device: u64,
        directory: Arc<OwnedFd>,
        is_shared: bool,
    ) -> Used {
        while self.kept.len() >= self.limits.listings.max(1) && self.evict(0) {}
        let number = self.next_number();
        let listing = Arc::new(Mutex::new(Listing::default()));
        let used = Used { number, listing: listing.clone(), directory: Some(directory.clone()) };
        let used_at = self.tick();
        let directory = Some(directory);
        let (first, bytes, readers) = (0, 0, 1);
        self.kept.insert(number, Kept { node, device, listing, directory, first, bytes, readers, used_at });
        if is_shared {
            self.current.insert(node, number);
        }
        used
    }

    /// A request has read a listing.
    pub(super) fn was_read(&mut self, used: &Used, state: &State) {
        let number = used.number;
        let Some(kept) = self.kept.get_mut(&number) else { return };
        self.bytes = self.bytes - kept.bytes + state.bytes;
        (kept.first, kept.bytes) = (state.first, state.bytes);
        kept.readers = kept.readers.saturating_sub(usize::from(state.is_at_end));
        let device = kept.device;
        if state.is_complete
            && let Some(directory) = kept.directory.take()
        {
            self.unused.push(Unused { device, _kept: directory });
        }
        while self.bytes > self.limits.bytes && self.evict(number) {}
    }

    /// The guest has changed a directory.
    pub(super) fn changed(&mut self, node: u64) {
        self.current.remove(&node);
    }

    /// The guest does not know a directory any more, so nobody reads it.
    pub(super) fn forget(&mut self, node: u64) {
        self.close(&HashSet::from([node]));
    }

    /// The number of the listing that was begun last.
    pub(super) fn last(&self) -> Number {
        self.last
    }

    /// Removes the listings of these nodes.
    pub(super) fn close(&mut self, nodes: &HashSet<u64>) {
        let of_nodes = self.kept.iter().filter(|(_, kept)| nodes.contains(&kept.node));
        let numbers: Vec<Number> = of_nodes.map(|(number, _)| *number).collect();
        numbers.into_iter().for_each(|number| self.remove(number));
    }

    /// Removes the listing that was not used for the longest time. Those that nobody is reading go first. `but` is
    /// kept. Returns false if there is no other.
    fn evict(&mut self, but: Number) -> bool {
        let others = self.kept.iter().filter(|(number, _)| **number != but);
        let oldest =
            others.min_by_key(|(_, kept)| (kept.readers > 0, kept.used_at)).map(|(number, _)| *number);
        oldest.inspect(|number| self.remove(*number)).is_some()
    }

    fn remove(&mut self, number: Number) {
        let Some(Kept { node, device, directory, bytes, .. }) = self.kept.remove(&number) else { return };
        self.bytes -= bytes;
        self.unused.extend(directory.map(|fd| Unused { device, _kept: fd }));
        if self.current.get(&node) == Some(&number) {
            self.current.remove(&node);
        }
    }

    /// A number that no listing has.
    fn next_number(&mut self) -> Number {
        loop {
            self.last = if self.last >= LAST_NUMBER { 1 } else { self.last + 1 };
            if !self.kept.contains_key(&self.last) {
                return self.last;
            }
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}
