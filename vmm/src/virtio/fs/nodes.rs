//! The files that the guest has looked up, by their node IDs. This is a table: it makes no system calls.
//!
//! A node stores the place at which a file was found, which is the node of a directory and a name in it, and the
//! identity of the file. It needs no file descriptor: each request reaches the file by its place and checks its
//! identity (`paths`). If another file is at that place now, the request fails with ESTALE, and Linux looks the name
//! up again. Only a file that the guest has removed and still uses has a descriptor of its own, which is called its
//! anchor.

use std::{collections::HashMap, ffi::CStr, iter, os::fd::OwnedFd, sync::Arc, time::Instant};

use rustix::{
    fs::{FileType, Statx},
    io::Errno,
};

use super::{
    abi::{ROOT, Result},
    descriptors::{Descriptors, Unused},
    file_stat::FileStat,
    identity::{Id, device_of, is_socket_or_fifo, kind_of},
    listings,
    table::Table,
};

mod anchors;
pub(super) mod caching;
mod contents;
mod eviction;
mod mounts;
mod names;
mod removal;
mod unmounted;

use anchors::Anchors;
pub(super) use removal::Held;

/// The most directories above a file. Linux has no such limit, but limits paths to 4,096 bytes.
pub(super) const MOST_ANCESTORS: usize = 4096;
/// The most file systems whose inode numbers are kept distinct.
pub(super) const MOST_DEVICES: usize = (1 << 16) - 2;
/// Inode numbers of the host that have so many bits at most are shown as numbers of 32 bits, if they are of the first
/// file systems that were seen. 32-bit programs may understand no larger ones (EOVERFLOW, stat(2)).
const SMALL_INODE_BITS: u32 = 26;
const SMALL_INODE_DEVICES: u64 = 1 << (32 - SMALL_INODE_BITS);

/// How much the table may contain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Nodes that are not open. If there are more, those that were not used recently are evicted.
    pub(super) idle: usize,
    /// Nodes that count as open because the guest has read or written their files. See [`Nodes::use_contents`].
    pub(super) open: usize,
    /// Descriptors by which nodes are reached.
    pub(super) paths: usize,
    /// Descriptors of files that were opened for nodes.
    pub(super) files: usize,
    /// Files that the guest has removed and still uses. One file system may have half of them.
    pub(super) anchors: usize,
}

struct Node {
    id: Id,
    kind: FileType,
    /// The mount in which its place or its anchor is.
    mount: u64,
    /// None for the root, and for a file without a name.
    place: Option<Place>,
    anchor: Option<Arc<OwnedFd>>,
    /// How often the guest has looked the file up, less what it has forgotten.
    lookups: u64,
    /// The number of its handles, and one more if the guest has used its contents without one.
    opens: u32,
    /// The server is about to remove the name that is its place, and there is no anchor. See [`Nodes::hold`].
    is_losing_name: bool,
    /// Its anchor is there only as long as it is open. See [`Nodes::moved_away`].
    has_moved_away: bool,
    /// See [`Nodes::use_contents`].
    has_used_contents: bool,
    /// See [`Nodes::let_name_be_cached`].
    has_cached_name: bool,
    /// The number of nodes whose place is in this directory.
    children: u32,
    /// Whether the node was used since it was last considered for eviction.
    is_used: bool,
    /// See [`Nodes::remember_version`].
    version: u64,
    /// See [`Nodes::is_own`].
    is_own: bool,
    /// See [`Nodes::told`].
    told: Option<Told>,
    /// See [`Nodes::named`].
    name_is_cached_until: Instant,
    /// The group to which the file belonged when the guest was told that last.
    group: u32,
    /// The file is in a mount that the host has unmounted. See [`Nodes::close_unmounted`].
    is_unmounted: bool,
    /// The thread of the guest that has looked up the place. See [`Nodes::found_by`].
    found_by: u32,
    /// The file was found by another name before.
    had_other_name: bool,
    /// See [`Nodes::lost_names`].
    lost_names_at: Option<listings::Number>,
    /// See [`Nodes::begins_again`].
    restarts: u16,
}

impl Node {
    /// The node of a file that was looked up once.
    fn found(stat: &FileStat, place: Option<Place>, anchor: Option<Arc<OwnedFd>>, is_own: bool) -> Self {
        Self {
            id: Id::of(stat),
            kind: kind_of(stat),
            mount: stat.stx_mnt_id,
            place,
            anchor,
            lookups: 1,
            opens: 0,
            is_losing_name: false,
            has_moved_away: false,
            has_used_contents: false,
            // Until it is decided, another thread must not evict it.
            has_cached_name: true,
            children: 0,
            is_used: true,
            version: 0,
            is_own,
            told: None,
            name_is_cached_until: Instant::now(),
            group: stat.stx_gid,
            is_unmounted: false,
            found_by: 0,
            had_other_name: false,
            lost_names_at: None,
            restarts: 0,
        }
    }
}

/// The size of a file that the guest was told.
struct Told {
    size: u64,
    at: Instant,
}

/// Where a file was found.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// The node of the directory.
    pub(super) parent: u64,
    pub(super) name: Box<CStr>,
}

impl Place {
    fn is(&self, parent: u64, name: &CStr) -> bool {
        self.parent == parent && *self.name == *name
    }
}

/// The table.
pub(super) struct Nodes {
    limits: Limits,
    /// The guest does not say which files it opens and closes.
    is_exclusive: bool,
    table: Table<Node>,
    by_id: HashMap<Id, u64>,
    paths: Descriptors,
    /// The open files of nodes, in an exclusive share. See `contents`.
    files: Descriptors,
    /// The number of open nodes.
    open: usize,
    /// The number of nodes that are in the roots of containers.
    own: usize,
    /// The number of nodes that count as open because of their contents.
    used: usize,
    anchors: Anchors,
    /// The file systems, in the order in which they were seen.
    devices: HashMap<u64, u64>,
    /// Descriptors that the owner of the table has to close, without its lock.
    unused: Vec<Unused>,
}

impl Nodes {
    /// A table that contains the directory `root` only.
    pub(super) fn new(
        root: Arc<OwnedFd>,
        stat: &FileStat,
        limits: Limits,
        is_exclusive: bool,
    ) -> Result<Self> {
        let mut nodes = Self {
            limits,
            is_exclusive,
            table: Table::new(),
            by_id: HashMap::new(),
            paths: Descriptors::new(limits.paths),
            files: Descriptors::new(limits.files),
            open: 0,
            own: 0,
            used: 0,
            anchors: Anchors::new(limits.anchors),
            devices: HashMap::new(),
            unused: Vec::new(),
        };
        nodes.inode(stat);
        let number = nodes.table.insert(Node::found(stat, None, Some(root), false))?;
        debug_assert_eq!(number, ROOT);
        Ok(nodes)
    }

    /// Makes later numbers differ from all numbers of `other`, which this table replaces, except for that of the root.
    pub(super) fn continue_after(&mut self, other: &Self) {
        self.table.continue_after(&other.table);
    }

    /// Takes the descriptors that are not needed any more.
    pub(super) fn take_unused(&mut self) -> Vec<Unused> {
        std::mem::take(&mut self.unused)
    }

    /// All descriptors of the table.
    pub(super) fn into_unused(self) -> impl Iterator<Item = Unused> {
        let anchor = |node: Node| Some(Unused { device: node.id.device, _kept: node.anchor? });
        let descriptors = self.paths.into_unused().chain(self.files.into_unused());
        descriptors.chain(self.unused).chain(self.table.into_values().filter_map(anchor))
    }

    /// The inode number that the guest sees. It differs from that of the host, because the inode numbers of several
    /// file systems could be equal.
    pub(super) fn inode(&mut self, stat: &Statx) -> u64 {
        self.inode_on(device_of(stat), stat.stx_ino)
    }

    /// The inode number that the guest sees for the inode `inode` of the file system of a node.
    pub(super) fn inode_on_device_of(&mut self, number: u64, inode: u64) -> Result<u64> {
        let device = self.node(number)?.id.device;
        Ok(self.inode_on(device, inode))
    }

    /// The inode number that the guest sees, and the number of the file system that the file is on. The guest's kernel
    /// makes a device number (`st_dev`) of the second one. The file system of the share's root is 0, and so are all
    /// files of an exclusive share.
    pub(super) fn inode_and_file_system(&mut self, stat: &Statx) -> (u64, u32) {
        let number = self.number_of_device(device_of(stat));
        // At most MOST_DEVICES, which all further file systems share. So 16 bits are enough.
        let file_system = if self.is_exclusive { 0 } else { number as u32 };
        (inode_of(number, stat.stx_ino), file_system)
    }

    fn number_of_device(&mut self, device: u64) -> u64 {
        match self.devices.get(&device) {
            Some(number) => *number,
            None if self.devices.len() < MOST_DEVICES => {
                let number = self.free_number(device);
                *self.devices.entry(device).or_insert(number)
            }
            None => MOST_DEVICES as u64,
        }
    }

    /// A number for a new file system, by its device number on the host, so that log shippers and incremental backups
    /// find a file again in the next pod. The order matters only if two have the same place.
    fn free_number(&self, device: u64) -> u64 {
        let seen = self.devices.len() as u64; // That of the share's root is the first one.
        if seen == 0 || seen >= SMALL_INODE_DEVICES {
            return seen;
        }
        let (major, minor) = (device >> 32, device & u64::from(u32::MAX));
        // Those without a disk, of major 0, have other numbers each time that they are mounted. They get places of
        // their own, so that they take none of a disk.
        let half = SMALL_INODE_DEVICES / 2;
        let (own, others) = match major {
            0 => (half..SMALL_INODE_DEVICES, 1..half),
            _ => (1..half, half..SMALL_INODE_DEVICES),
        };
        let count = own.end - own.start;
        let from_there_on = (0..count).map(|step| own.start + (7 * major + minor + step) % count);
        let mut all = from_there_on.chain(others);
        all.find(|number| !self.devices.values().any(|taken| taken == number)).unwrap_or(seen)
    }

    fn inode_on(&mut self, device: u64, inode: u64) -> u64 {
        inode_of(self.number_of_device(device), inode)
    }

    /// Returns the node of the file that was found at `name` in `parent`, and counts a lookup of it.
    ///
    /// Returns EAGAIN if that would change the place of the node, unless `is_new` is set. Another thread may have
    /// renamed or removed the file after `stat` was read. The node would lose the place where the file is, or its
    /// anchor. The caller reads `stat` again, and sets `is_new`.
    pub(super) fn found(&mut self, parent: u64, name: &CStr, stat: &FileStat, is_new: bool) -> Result<u64> {
        if let Some(number) = self.known(stat) {
            if number != ROOT {
                let place = &self.node(number)?.place;
                if !is_new && !place.as_ref().is_some_and(|place| place.is(parent, name)) {
                    return Err(Errno::AGAIN);
                }
                self.move_to(number, parent, name)?;
                self.node(number)?.mount = stat.stx_mnt_id;
            }
            self.node(number)?.lookups += 1;
            return Ok(number);
        }
        // A directory with children is not evicted to make room for the new node.
        self.node(parent)?.children += 1;
        let is_own = self.is_own_at(parent, name, stat);
        let inserted = self.insert(stat, Some(Place { parent, name: name.into() }), None, is_own);
        if inserted.is_err() {
            self.node(parent)?.children -= 1;
        }
        inserted
    }

    /// Returns a new node for a file without a name, which `anchor` refers to and which was made in the directory
    /// `parent`. Counts a lookup of it.
    pub(super) fn found_nameless(&mut self, parent: u64, stat: &FileStat, anchor: OwnedFd) -> Result<u64> {
        let anchor = Arc::new(anchor);
        // If there is an error, the descriptor is closed without the lock.
        self.unused.push(Unused { device: device_of(stat), _kept: anchor.clone() });
        self.node(parent)?;
        let device = device_of(stat);
        if self.anchors.are_full(device) {
            return Err(Errno::NFILE);
        }
        let is_own = self.is_own(parent);
        let number = self.insert(stat, None, Some(anchor), is_own)?;
        self.anchors.add(device);
        Ok(number)
    }

    /// Makes room for another node. A file is created only after this has succeeded.
    pub(super) fn make_room(&mut self) -> Result<()> {
        while self.table.len() - self.open >= self.limits.idle {
            self.evict()?;
        }
        Ok(())
    }

    fn insert(
        &mut self,
        stat: &FileStat,
        place: Option<Place>,
        anchor: Option<Arc<OwnedFd>>,
        is_own: bool,
    ) -> Result<u64> {
        self.make_room()?;
        let number = self.table.insert(Node::found(stat, place, anchor, is_own))?;
        self.own += usize::from(is_own);
        self.by_id.insert(Id::of(stat), number);
        Ok(number)
    }

    /// The node of the file that `stat` is about, if there is one.
    fn known(&self, stat: &FileStat) -> Option<u64> {
        let number = *self.by_id.get(&Id::of(stat))?;
        (self.table.get(number)?.kind == kind_of(stat)).then_some(number)
    }

    /// A node that can be used. One whose file was unmounted cannot: a request may have opened the file before, and
    /// must not keep it open now.
    fn node(&mut self, number: u64) -> Result<&mut Node> {
        let node = self.table.get_mut(number).filter(|node| !node.is_unmounted).ok_or(Errno::STALE)?;
        node.is_used = true;
        Ok(node)
    }

    pub(super) fn kind(&mut self, number: u64) -> Result<FileType> {
        Ok(self.node(number)?.kind)
    }

    /// The file system of a node.
    pub(super) fn device(&self, number: u64) -> Option<u64> {
        self.table.get(number).map(|node| node.id.device)
    }

    /// Returns EXDEV if two nodes are in different mounts. The kernel would return the same, but only after it has
    /// reached both. A request counts for the file system of one node, so it must not wait for another file system.
    pub(super) fn check_same_mount(&self, one: u64, other: u64) -> Result<()> {
        let mount = |number| self.table.get(number).map(|node| node.mount).ok_or(Errno::STALE);
        if mount(one)? == mount(other)? { Ok(()) } else { Err(Errno::XDEV) }
    }

    /// The place of a node. A file without a name has none.
    pub(super) fn place(&mut self, number: u64) -> Result<Place> {
        self.node(number)?.place.clone().ok_or(Errno::STALE)
    }

    /// A node and the directories above it that are in the same mount, and the groups to which they belong.
    pub(super) fn way_in_mount(&self, number: u64) -> Vec<(u64, u32)> {
        let mount = self.table.get(number).map(|node| node.mount);
        let parent = |number: &u64| Some(self.table.get(*number)?.place.as_ref()?.parent);
        let way = iter::successors(Some(number), parent).take(MOST_ANCESTORS);
        let known = way.map_while(|number| Some((number, self.table.get(number)?)));
        let same_mount = known.take_while(|(_, node)| Some(node.mount) == mount);
        same_mount.map(|(number, node)| (number, node.group)).collect()
    }

    /// A descriptor of a node, if there is one now.
    pub(super) fn kept(&mut self, number: u64) -> Result<Option<Arc<OwnedFd>>> {
        let anchor = self.node(number)?.anchor.clone();
        Ok(anchor.or_else(|| self.paths.get(number)))
    }

    /// Keeps a descriptor of a node as long as there is room.
    pub(super) fn keep(&mut self, number: u64, fd: Arc<OwnedFd>) -> Result<()> {
        let node = self.node(number)?;
        let device = node.id.device;
        // The mount in which a socket or a FIFO was found may no longer be in use. Then the host may want to detach it.
        if is_socket_or_fifo(node.kind) {
            self.unused.push(Unused { device, _kept: fd });
        } else {
            self.unused.extend(self.paths.insert(number, device, fd));
        }
        Ok(())
    }

    /// A change of a socket or a FIFO has failed, because its place is in a mount that is read-only. Returns whether it
    /// may have another one. The guest finds it by looking its name up again.
    pub(super) fn leave_read_only(&mut self, number: u64) -> bool {
        let Some(node) = self.table.get_mut(number) else { return false };
        if !is_socket_or_fifo(node.kind) || !node.had_other_name {
            return false;
        }
        let left = node.place.take();
        let has_left = left.is_some();
        self.leave(left);
        has_left
    }

    /// Returns ESTALE unless `stat` is about the file of a node. The kind is compared too, because a file system may
    /// use the inode number of a removed file for a new file of another kind.
    pub(super) fn check(&mut self, number: u64, stat: &FileStat) -> Result<()> {
        let node = self.node(number)?;
        if node.id == Id::of(stat) && node.kind == kind_of(stat) { Ok(()) } else { Err(Errno::STALE) }
    }

    /// Sets the place of a node, because its file was found there. Its old place may or may not exist still.
    fn move_to(&mut self, number: u64, parent: u64, name: &CStr) -> Result<()> {
        let node = self.node(number)?;
        if node.place.as_ref().is_some_and(|place| place.is(parent, name)) {
            return Ok(());
        }
        if node.kind == FileType::Directory && self.is_at_or_below(parent, number)? {
            // The host has moved a directory into one that was below it. The guest has seen only a part of that.
            return Err(Errno::STALE);
        }
        self.node(parent)?.children += 1;
        let node = self.node(number)?;
        let left = node.place.replace(Place { parent, name: name.into() });
        node.had_other_name |= left.is_some();
        node.has_moved_away = false;
        let (device, anchor, kind) = (node.id.device, node.anchor.take(), node.kind);
        self.drop_anchor(device, anchor);
        self.leave(left);
        if kind != FileType::Directory {
            // It was opened by the other name. In an overlay that may be another file once one of them is changed.
            self.drop_descriptors(number);
        }
        Ok(())
    }

    fn is_at_or_below(&self, mut number: u64, directory: u64) -> Result<bool> {
        for _ in 0..MOST_ANCESTORS {
            if number == directory {
                return Ok(true);
            }
            match &self.table.get(number).ok_or(Errno::STALE)?.place {
                Some(place) => number = place.parent,
                None => return Ok(false),
            }
        }
        Err(Errno::LOOP)
    }

    /// The guest forgets `count` lookups of a node. Returns true if it is a directory that the guest does not know now.
    pub(super) fn forget(&mut self, number: u64, count: u64) -> bool {
        let Some(node) = self.table.get_mut(number) else { return false };
        node.lookups = node.lookups.saturating_sub(count);
        let (is_forgotten, is_directory) = (node.lookups == 0, node.kind == FileType::Directory);
        if is_forgotten {
            // A file that a process has open is not forgotten.
            self.forget_contents(number);
        }
        self.collect(number);
        is_forgotten && is_directory
    }

    /// Counts a new handle of a node.
    pub(super) fn opened(&mut self, number: u64) -> Result<()> {
        let node = self.node(number)?;
        node.opens += 1;
        if node.opens == 1 {
            self.open += 1;
        }
        Ok(())
    }

    /// A handle of a node was closed.
    pub(super) fn released(&mut self, number: u64) {
        // A node with handles is never removed.
        let Some(node) = self.table.get_mut(number) else { return };
        node.opens -= 1;
        if node.opens == 0 {
            self.open -= 1;
            self.let_moved_go(number);
            self.collect(number);
        }
    }

    /// Removes a node that is not needed any more, and then the directories that are not needed without it. This is a
    /// loop, because a guest can nest more directories than the stack has room for calls.
    fn collect(&mut self, number: u64) {
        let mut next = Some(number);
        while let Some(number) = next
            && let Some(node) = self.table.get(number)
            && number != ROOT
            && node.lookups == 0
            && node.opens == 0
            && node.children == 0
        {
            next = self.take_out(number);
        }
    }

    fn remove(&mut self, number: u64) {
        if let Some(parent) = self.take_out(number) {
            self.collect(parent);
        }
    }

    /// Removes a node, and returns the directory of its place.
    fn take_out(&mut self, number: u64) -> Option<u64> {
        let node = self.table.remove(number)?;
        self.own -= usize::from(node.is_own);
        self.let_go(number, node.id, node.anchor);
        self.lose_child(node.place)
    }

    /// Removes the descriptors of a node. Its file gets a new node when it is looked up.
    fn let_go(&mut self, number: u64, id: Id, anchor: Option<Arc<OwnedFd>>) {
        if self.by_id.get(&id) == Some(&number) {
            self.by_id.remove(&id);
        }
        self.drop_descriptors(number);
        self.drop_anchor(id.device, anchor);
    }

    /// Removes the descriptors of a node, except for its anchor.
    fn drop_descriptors(&mut self, number: u64) {
        self.unused.extend(self.paths.remove(number));
        self.drop_files(number);
    }

    fn drop_anchor(&mut self, device: u64, anchor: Option<Arc<OwnedFd>>) {
        if anchor.is_some() {
            self.anchors.remove(device);
        }
        self.unused.extend(anchor.map(|fd| Unused { device, _kept: fd }));
    }

    /// A node has left `place`.
    fn leave(&mut self, place: Option<Place>) {
        if let Some(parent) = self.lose_child(place) {
            self.collect(parent);
        }
    }

    /// The directory of `place` has a child less. Returns the directory.
    fn lose_child(&mut self, place: Option<Place>) -> Option<u64> {
        let parent = place?.parent;
        self.table.get_mut(parent)?.children -= 1;
        Some(parent)
    }

    /// The file of `stat` was renamed.
    pub(super) fn renamed(&mut self, stat: &FileStat, from: (u64, &CStr), to: (u64, &CStr)) {
        let Some(number) = self.known(stat) else { return };
        let Some(node) = self.table.get_mut(number) else { return };
        if !node.place.as_ref().is_some_and(|place| place.is(from.0, from.1)) {
            return;
        }
        if self.move_to(number, to.0, to.1).is_err()
            && let Some(node) = self.table.get_mut(number)
        {
            // The node of the new directory is out of date. The guest looks the file up again.
            let left = node.place.take();
            self.leave(left);
        }
    }
}

/// The inode number that the guest sees for this inode of the file system with this number.
fn inode_of(file_system: u64, inode: u64) -> u64 {
    if file_system < SMALL_INODE_DEVICES && inode < 1 << SMALL_INODE_BITS {
        return file_system << SMALL_INODE_BITS | inode;
    }
    inode ^ (file_system + 1) << 48
}

#[cfg(test)]
mod tests;
