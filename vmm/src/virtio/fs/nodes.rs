//! The files that the guest knows, by the numbers that it has for them.
//!
//! A node is a place, which is a directory's node and a name in it, and the identity of the file that was found there.
//! That takes no descriptor: what a request is about is reached from its place anew, or by one of the few descriptors
//! that are kept, and is looked at before it is used. What turns out to be another file by now is answered with ESTALE,
//! upon which the guest looks the name up again. Only a file that the guest has removed and may still use has a
//! descriptor of its own, its anchor.

use std::{
    collections::HashMap,
    ffi::CStr,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    rc::Rc,
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxFlags, fstatfs, openat, statx},
    io::Errno,
};

use super::{
    abi::{ROOT, Result},
    descriptors::Descriptors,
    table::Table,
};

/// Directories above a file. Linux has no limit, but paths of up to 4,096 bytes.
const MOST_ANCESTORS: usize = 4096;
/// Places that are looked at for a file to forget, before it may be a directory.
const PATIENCE: usize = 256;
/// File systems whose inode numbers are told apart.
const MOST_DEVICES: usize = 1 << 16;

/// Opens a descriptor for a file that takes no reading or writing, and does not follow a symbolic link.
const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// `PROC_SUPER_MAGIC` (statfs(2)).
const PROC_SUPER_MAGIC: i64 = 0x9fa0;
/// Files of procfs with the memory of a process, or with addresses in it. The kernel protects those of other processes
/// (ptrace(2), "Ptrace access mode checking"), but lets a process open its own. So a guest that has the host's /proc as a volume
/// could read and write the memory of the VMM.
const OWN_MEMORY: [&CStr; 11] = [
    c"mem",
    c"maps",
    c"smaps",
    c"smaps_rollup",
    c"numa_maps",
    c"pagemap",
    c"clear_refs",
    c"environ",
    c"auxv",
    c"stack",
    c"syscall",
];

/// How much the table may hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Nodes that no handle holds. Beyond, those go that were not used for long.
    pub(super) idle: usize,
    /// Descriptors by which nodes are reached.
    pub(super) paths: usize,
    /// Files that the guest removed and still uses.
    pub(super) anchors: usize,
}

/// What tells a file from all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Id {
    device: u64,
    inode: u64,
    /// The same file may be mounted at two places, with different files below.
    mount: u64,
}

impl Id {
    pub(super) fn of(stat: &Statx) -> Self {
        let device = u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor);
        Self { device, inode: stat.stx_ino, mount: stat.stx_mnt_id }
    }
}

pub(super) fn kind_of(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// What is known of the file at `name` in `dir`, or of `dir` itself if the name is empty. Links are not followed.
pub(super) fn stat_at(dir: impl AsFd, name: &CStr) -> Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH;
    statx(dir, name, flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)
}

/// A path to what `fd` is, for calls that take no descriptor of this kind.
pub(super) fn path_of(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

struct Node {
    id: Id,
    kind: FileType,
    /// None of the root, and of what has no name any more.
    place: Option<Place>,
    anchor: Option<Rc<OwnedFd>>,
    /// How often the guest was told of it, less what it has forgotten.
    lookups: u64,
    /// Handles of it.
    opens: u32,
    /// Nodes whose place is in it.
    children: u32,
    /// Since it was considered for being forgotten.
    is_used: bool,
    /// See [`Nodes::is_unchanged`].
    version: u64,
}

impl Node {
    /// Whether `stat` is about the file of this node. The kind is compared too, because a file system may use the inode number of
    /// a removed file for a new file of another kind.
    fn is(&self, stat: &Statx) -> bool {
        self.id == Id::of(stat) && self.kind == kind_of(stat)
    }
}

#[derive(Clone)]
struct Place {
    parent: u64,
    name: Box<CStr>,
}

impl Place {
    fn is(&self, parent: u64, name: &CStr) -> bool {
        self.parent == parent && *self.name == *name
    }
}

/// The table.
pub(super) struct Nodes {
    limits: Limits,
    table: Table<Node>,
    by_id: HashMap<Id, u64>,
    paths: Descriptors,
    /// Nodes with handles.
    held: usize,
    anchors: usize,
    /// File systems, in the order in which they were seen.
    devices: HashMap<u64, u64>,
}

/// A name that is about to go, by [`Nodes::hold`].
#[must_use]
pub(super) struct Held(u64);

impl Nodes {
    /// Knows the directory `root`, and nothing else.
    pub(super) fn new(root: Rc<OwnedFd>, limits: Limits) -> Result<Self> {
        let stat = stat_at(&*root, c"")?;
        let mut nodes = Self {
            limits,
            table: Table::new(),
            by_id: HashMap::new(),
            paths: Descriptors::new(limits.paths),
            held: 0,
            anchors: 0,
            devices: HashMap::new(),
        };
        nodes.inode(&stat);
        let number = nodes.table.insert(Node {
            id: Id::of(&stat),
            kind: FileType::Directory,
            place: None,
            anchor: Some(root),
            lookups: 1,
            opens: 0,
            children: 0,
            is_used: true,
            version: 0,
        })?;
        debug_assert_eq!(number, ROOT);
        Ok(nodes)
    }

    /// The inode number that the guest sees: those of different file systems would collide.
    pub(super) fn inode(&mut self, stat: &Statx) -> u64 {
        self.inode_beside(stat, stat.stx_ino)
    }

    /// That of the inode `inode` in the file system of `stat`.
    pub(super) fn inode_beside(&mut self, stat: &Statx, inode: u64) -> u64 {
        let device = Id::of(stat).device;
        let next = self.devices.len() as u64;
        let index = match self.devices.get(&device) {
            Some(index) => *index,
            None if self.devices.len() < MOST_DEVICES => *self.devices.entry(device).or_insert(next),
            None => next,
        };
        inode ^ index << 48
    }

    /// Looks a name up, which counts as one lookup of what is found.
    pub(super) fn look_up(&mut self, parent: u64, name: &CStr) -> Result<(u64, Statx)> {
        let stat = stat_at(&*self.descriptor(parent)?, name)?;
        Ok((self.found(parent, name, &stat)?, stat))
    }

    /// Returns the node of what was found at `name` in `parent`, and counts one lookup of it.
    pub(super) fn found(&mut self, parent: u64, name: &CStr, stat: &Statx) -> Result<u64> {
        if let Some(number) = self.known(stat) {
            if number != ROOT {
                self.move_to(number, parent, name)?;
            }
            self.node(number)?.lookups += 1;
            return Ok(number);
        }
        // Which keeps the directory, whatever is forgotten for what is new.
        self.node(parent)?.children += 1;
        let inserted = self.insert(stat, Some(Place { parent, name: name.into() }), None);
        if inserted.is_err() {
            self.node(parent)?.children -= 1;
        }
        inserted
    }

    /// Returns the node, new and looked up once, of a file without a name, which `anchor` is.
    pub(super) fn found_nameless(&mut self, stat: &Statx, anchor: OwnedFd) -> Result<u64> {
        if self.anchors >= self.limits.anchors {
            return Err(Errno::NFILE);
        }
        let number = self.insert(stat, None, Some(Rc::new(anchor)))?;
        self.anchors += 1;
        Ok(number)
    }

    /// Whether the driver may be given another node. Only then is anything made for it.
    pub(super) fn make_room(&mut self) -> Result<()> {
        while self.table.len() - self.held >= self.limits.idle {
            self.evict()?;
        }
        Ok(())
    }

    fn insert(&mut self, stat: &Statx, place: Option<Place>, anchor: Option<Rc<OwnedFd>>) -> Result<u64> {
        self.make_room()?;
        let (id, kind) = (Id::of(stat), kind_of(stat));
        let node =
            Node { id, kind, place, anchor, lookups: 1, opens: 0, children: 0, is_used: true, version: 0 };
        let number = self.table.insert(node)?;
        self.by_id.insert(id, number);
        Ok(number)
    }

    /// The node of the file that `stat` tells of. A file of another kind under the same number is another.
    fn known(&self, stat: &Statx) -> Option<u64> {
        let number = *self.by_id.get(&Id::of(stat))?;
        (self.table.get(number)?.kind == kind_of(stat)).then_some(number)
    }

    fn node(&mut self, number: u64) -> Result<&mut Node> {
        let node = self.table.get_mut(number).ok_or(Errno::STALE)?;
        node.is_used = true;
        Ok(node)
    }

    pub(super) fn kind(&mut self, number: u64) -> Result<FileType> {
        Ok(self.node(number)?.kind)
    }

    /// A file was found at a place: that is its name now, whether or not the one from before is still there.
    fn move_to(&mut self, number: u64, parent: u64, name: &CStr) -> Result<()> {
        let node = self.node(number)?;
        if node.place.as_ref().is_some_and(|place| place.is(parent, name)) {
            return Ok(());
        }
        if node.kind == FileType::Directory && self.is_at_or_below(parent, number)? {
            // The host has turned two directories around, of which the guest has seen one.
            return Err(Errno::STALE);
        }
        self.node(parent)?.children += 1;
        let node = self.node(number)?;
        let left = node.place.replace(Place { parent, name: name.into() });
        if node.anchor.take().is_some() {
            self.anchors -= 1;
        }
        self.leave(left);
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

    /// The guest forgets `count` of the lookups of a node.
    pub(super) fn forget(&mut self, number: u64, count: u64) {
        if let Some(node) = self.table.get_mut(number) {
            node.lookups = node.lookups.saturating_sub(count);
            self.collect(number);
        }
    }

    /// Counts a handle of a node.
    pub(super) fn opened(&mut self, number: u64) -> Result<()> {
        let node = self.node(number)?;
        node.opens += 1;
        if node.opens == 1 {
            self.held += 1;
        }
        Ok(())
    }

    /// A handle of a node is gone.
    pub(super) fn released(&mut self, number: u64) {
        // A node with handles is never forgotten.
        let Some(node) = self.table.get_mut(number) else { return };
        node.opens -= 1;
        if node.opens == 0 {
            self.held -= 1;
            self.collect(number);
        }
    }

    /// Removes a node that nobody needs any more, and then the directories that were there for it alone.
    fn collect(&mut self, number: u64) {
        let Some(node) = self.table.get(number) else { return };
        if number != ROOT && node.lookups == 0 && node.opens == 0 && node.children == 0 {
            self.remove(number);
        }
    }

    fn remove(&mut self, number: u64) {
        let Some(node) = self.table.remove(number) else { return };
        if self.by_id.get(&node.id) == Some(&number) {
            self.by_id.remove(&node.id);
        }
        self.paths.remove(number);
        if node.anchor.is_some() {
            self.anchors -= 1;
        }
        self.leave(node.place);
    }

    /// Nothing is at `place` any more.
    fn leave(&mut self, place: Option<Place>) {
        let Some(place) = place else { return };
        if let Some(parent) = self.table.get_mut(place.parent) {
            parent.children -= 1;
            self.collect(place.parent);
        }
    }

    /// Forgets a node that can be looked up again: rather a file or a link than what may be somebody's working directory,
    /// or a socket that somebody listens at, and rather one that was not used for long.
    fn evict(&mut self) -> Result<()> {
        let mut second_choice = None;
        for step in 0..2 * self.table.round() {
            if let (Some(number), PATIENCE..) = (second_choice, step) {
                self.remove(number);
                return Ok(());
            }
            let Some((number, node)) = self.table.next() else { continue };
            if node.opens > 0 || node.children > 0 || node.anchor.is_some() {
                continue;
            }
            if std::mem::take(&mut node.is_used) {
                continue;
            }
            if matches!(node.kind, FileType::RegularFile | FileType::Symlink) {
                self.remove(number);
                return Ok(());
            }
            second_choice.get_or_insert(number);
        }
        match second_choice {
            Some(number) => {
                self.remove(number);
                Ok(())
            }
            None => Err(Errno::NFILE),
        }
    }

    /// What a node is, by a descriptor that takes no reading or writing (O_PATH).
    pub(super) fn descriptor(&mut self, number: u64) -> Result<Rc<OwnedFd>> {
        let mut below = Vec::new();
        let mut at = number;
        let mut fd = loop {
            if let Some(fd) = self.kept(at)? {
                break fd;
            }
            if below.len() >= MOST_ANCESTORS {
                return Err(Errno::LOOP);
            }
            let parent = self.place(at)?.parent;
            below.push(at);
            at = parent;
        };
        for number in below.into_iter().rev() {
            let place = self.place(number)?;
            fd = Rc::new(self.open_at(number, &fd, &place.name, PATH_FLAGS)?);
            self.paths.insert(number, fd.clone());
        }
        Ok(fd)
    }

    /// What is known of a node's file.
    pub(super) fn stat(&mut self, number: u64) -> Result<Statx> {
        if let Some(fd) = self.kept(number)? {
            return stat_at(&*fd, c"");
        }
        let place = self.place(number)?;
        let stat = stat_at(&*self.descriptor(place.parent)?, &place.name).map_err(gone)?;
        if self.node(number)?.is(&stat) { Ok(stat) } else { Err(Errno::STALE) }
    }

    /// Opens a node, and returns what is known of its file then. Only regular files and directories are opened: what the
    /// guest makes of another kind is its own kernel's to open.
    pub(super) fn open(&mut self, number: u64, flags: OFlags) -> Result<(OwnedFd, Statx)> {
        match self.node(number)?.kind {
            FileType::RegularFile | FileType::Directory => {}
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::NXIO),
        }
        // O_PATH does not open a device or a pipe that has replaced the file. `open_at` checks that the file is the same, and only
        // then the file is opened.
        let fd = match self.kept(number)? {
            Some(fd) => fd,
            None => {
                let place = self.place(number)?;
                let parent = self.descriptor(place.parent)?;
                Rc::new(self.open_at(number, &parent, &place.name, PATH_FLAGS)?)
            }
        };
        if let Some(place) = &self.node(number)?.place
            && OWN_MEMORY.contains(&&*place.name)
            && fstatfs(&*fd)?.f_type == PROC_SUPER_MAGIC
        {
            return Err(Errno::ACCESS);
        }
        let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = openat(CWD, path_of(&fd), flags, Mode::empty())?;
        let stat = stat_at(&opened, c"")?;
        Ok((opened, stat))
    }

    /// Opens `name` in `parent`, and checks that it is the file of a node.
    fn open_at(&mut self, number: u64, parent: &OwnedFd, name: &CStr, flags: OFlags) -> Result<OwnedFd> {
        let fd = openat(parent, name, flags, Mode::empty()).map_err(gone)?;
        let stat = stat_at(&fd, c"")?;
        if self.node(number)?.is(&stat) { Ok(fd) } else { Err(Errno::STALE) }
    }

    fn kept(&mut self, number: u64) -> Result<Option<Rc<OwnedFd>>> {
        let anchor = self.node(number)?.anchor.clone();
        Ok(anchor.or_else(|| self.paths.get(number)))
    }

    fn place(&mut self, number: u64) -> Result<Place> {
        self.node(number)?.place.clone().ok_or(Errno::STALE)
    }

    /// To be called before the name of a file goes: if it is the place of a node, the node is held by an anchor.
    pub(super) fn hold(&mut self, parent: u64, name: &CStr) -> Result<Option<Held>> {
        let dir = self.descriptor(parent)?;
        let fd = openat(&*dir, name, PATH_FLAGS, Mode::empty())?;
        let Some(number) = self.known(&stat_at(&fd, c"")?) else { return Ok(None) };
        let is_full = self.anchors >= self.limits.anchors;
        let node = self.node(number)?;
        if !node.place.as_ref().is_some_and(|place| place.is(parent, name)) {
            return Ok(None);
        }
        if node.anchor.is_none() && !is_full {
            node.anchor = Some(Rc::new(fd));
            self.anchors += 1;
        } else if is_full && node.opens > 0 {
            return Err(Errno::NFILE);
        }
        Ok(Some(Held(number)))
    }

    /// The name is gone.
    pub(super) fn lost(&mut self, held: Option<Held>) {
        let Some(Held(number)) = held else { return };
        if let Some(node) = self.table.get_mut(number) {
            let left = node.place.take();
            self.leave(left);
        }
    }

    /// The name is still there.
    pub(super) fn stays(&mut self, held: Option<Held>) {
        let Some(Held(number)) = held else { return };
        if let Some(node) = self.table.get_mut(number)
            && node.anchor.take().is_some()
        {
            self.anchors -= 1;
        }
    }

    /// The file of `stat` has gone from one name to another.
    pub(super) fn renamed(&mut self, stat: &Statx, from: (u64, &CStr), to: (u64, &CStr)) {
        let Some(number) = self.known(stat) else { return };
        let Some(node) = self.table.get_mut(number) else { return };
        if !node.place.as_ref().is_some_and(|place| place.is(from.0, from.1)) {
            return;
        }
        if self.move_to(number, to.0, to.1).is_err()
            && let Some(node) = self.table.get_mut(number)
        {
            // What is known of its new directory is out of date: the guest looks it up again.
            let left = node.place.take();
            self.leave(left);
        }
    }

    /// Remembers the version of a node's contents. True: it is the one that was remembered. 0 is none.
    pub(super) fn is_unchanged(&mut self, number: u64, version: u64) -> Result<bool> {
        let known = &mut self.node(number)?.version;
        Ok(std::mem::replace(known, version) == version && version != 0)
    }
}

/// A name from before leads nowhere.
fn gone(error: Errno) -> Errno {
    match error {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Errno::STALE,
        other => other,
    }
}
