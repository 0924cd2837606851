//! Opens and reads directories. An exclusive share has listings instead of handles: see `listings`.

use std::{
    mem::{self, MaybeUninit},
    os::fd::OwnedFd,
    sync::Arc,
};

use rustix::{
    fs::{FileType, OFlags, RawDir, SeekFrom, seek},
    io::Errno,
};

use super::{
    abi::{Body, DIRENT, Dirent, OPEN_CACHE_DIR, OPEN_KEEP_CACHE, OPENED_FOR_IOCTL, Result},
    file_server::{Answer, ENTRY_OUT, LONGEST_DATA, Request, Server},
    file_stat::stat_at,
    identity::kind_of,
    listings::{Position, Used},
    nodes::caching::Known,
    open_files::Opened,
    read_write::version,
};

/// How many bytes of entries are read at once.
const READ: std::ops::RangeInclusive<usize> = 0x400..=0x8000;
/// How a directory is opened.
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

/// The entries of an answer.
struct Entries {
    body: Body,
    /// The most bytes.
    room: usize,
    /// The directory, if each entry has its attributes and counts as a lookup (READDIRPLUS).
    looked_up_in: Option<Arc<OwnedFd>>,
}

impl Entries {
    fn new(room: usize, looked_up_in: Option<Arc<OwnedFd>>) -> Self {
        Self { body: Body::default(), room, looked_up_in }
    }

    /// The bytes of an entry, except for its name.
    fn fixed(&self) -> usize {
        DIRENT + if self.looked_up_in.is_some() { ENTRY_OUT } else { 0 }
    }

    /// Takes the body with another entry, or the one without it that had no room.
    fn add(&mut self, added: std::result::Result<Body, Body>) -> bool {
        let is_added = added.is_ok();
        self.body = added.unwrap_or_else(|full| full);
        is_added
    }
}

impl Server {
    /// `fuse_open_in`.
    pub(super) fn open_directory(&mut self, mut request: Request) -> Result<Answer> {
        let (flags, node) = (request.args.u32()?, request.header.node);
        if self.tables().nodes.kind(node)? != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        self.tables().handles.make_room()?;
        let (directory, stat) = self.open_node(node, DIRECTORY)?;
        let mut keeps = 0;
        if self.tables().nodes.is_own(node) {
            keeps |= OPEN_CACHE_DIR;
        }
        let version = version(&stat);
        let is_known = match flags {
            OPENED_FOR_IOCTL => self.tables().nodes.knows(node, &stat, version) == Known::SameVersion,
            _ => self.tables().nodes.remember_version(node, version)?,
        };
        if is_known {
            keeps |= OPEN_KEEP_CACHE;
        }
        let handle = self.add_handle(node, DIRECTORY, directory)?;
        Ok(Body::default().u64(handle).u32(keeps).u32(0).into())
    }

    /// `fuse_read_in`: returns as many entries of the directory as fit. With `plus` it returns the attributes of each
    /// entry too.
    pub(super) fn read_directory(&mut self, mut request: Request, plus: bool) -> Result<Answer> {
        let args = &mut request.args;
        let (handle, offset, size) = (args.u64()?, args.u64()?, args.u32()? as usize);
        let room = size.min(LONGEST_DATA).min(request.room.len());
        let node = request.header.node;
        let entries = match self.opened(node, handle)? {
            Opened::Handle(handle) => self.read_opened(node, handle, offset, room, plus)?,
            Opened::Node(node) => self.read_listing(node, Position::of_cookie(offset), room, plus)?,
        };
        Ok(entries.body.into())
    }

    /// Reads a directory that has a handle, from a position of the host's file system on.
    fn read_opened(
        &mut self,
        node: u64,
        handle: u64,
        offset: u64,
        room: usize,
        plus: bool,
    ) -> Result<Entries> {
        let directory = self.file(Opened::Handle(handle))?;
        seek(&*directory, SeekFrom::Start(offset))?;
        let mut entries = Entries::new(room, plus.then(|| directory.clone()));
        // Entries that do not fit are read again by the next request. With its attributes an entry takes 128 more
        // bytes.
        let read = if plus { room / 4 } else { room };
        let mut buffer = vec![MaybeUninit::uninit(); read.clamp(*READ.start(), *READ.end())];
        let mut raw = RawDir::new(&*directory, &mut buffer);
        while let Some(entry) = raw.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) if entries.body.len() == 0 => return Err(error),
                Err(_) => break,
            };
            let dirent = Dirent {
                ino: entry.ino(),
                next: entry.next_entry_cookie(),
                kind: entry.file_type().as_raw_mode() >> 12,
                name: entry.file_name(),
            };
            if !self.add_entry(node, dirent, &mut entries)? {
                break;
            }
        }
        Ok(entries)
    }

    /// Reads a directory that has no handle.
    fn read_listing(&mut self, node: u64, position: Position, room: usize, plus: bool) -> Result<Entries> {
        let (position, found) = self.find_listing(node, position);
        let used = match found {
            Some(used) => used,
            None => self.begin_listing(node, position)?,
        };
        let mut entries = Entries::new(room, if plus { Some(self.path(node)?) } else { None });
        let (listed, state) = used.read(position.index, room, entries.fixed())?;
        let mut tables = self.tables();
        tables.listings.was_read(&used, &state);
        if state.is_at_end {
            tables.nodes.was_read_to_its_end(node);
        }
        drop(tables);
        for (entry, index) in listed.iter().zip(position.index + 1..) {
            let next = used.position(index).cookie();
            let dirent = Dirent { ino: entry.inode, next, kind: entry.kind, name: &entry.name };
            if !self.add_entry(node, dirent, &mut entries)? {
                break;
            }
        }
        Ok(entries)
    }

    /// The listing of a directory to read from a position on, if there is one, and the position. It is the start if the
    /// listing was removed and entries could be left out from there on.
    fn find_listing(&self, node: u64, position: Position) -> (Position, Option<Used>) {
        let mut tables = self.tables();
        let found = tables.listings.find(node, position);
        if found.is_some() || !tables.nodes.begins_again(node, position) {
            return (position, found);
        }
        (Position::START, tables.listings.find(node, Position::START))
    }

    /// Opens a directory for a new listing, which will be read from a position on.
    fn begin_listing(&mut self, node: u64, position: Position) -> Result<Used> {
        position.check_near()?;
        if self.tables().nodes.kind(node)? != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        let (directory, _) = self.open_node(node, DIRECTORY)?;
        // If there is an error, the descriptor is closed without the lock.
        let directory = Arc::new(directory);
        let mut tables = self.tables();
        tables.nodes.use_contents(node, false)?;
        let device = tables.nodes.device(node).ok_or(Errno::STALE)?;
        // The host changes other directories.
        let is_shared = tables.nodes.is_own(node);
        Ok(tables.listings.insert(node, device, directory.clone(), is_shared))
    }

    /// Adds an entry of the directory `node`, whose `ino` is that of the host. Returns false if it does not fit.
    fn add_entry(&mut self, node: u64, mut dirent: Dirent, entries: &mut Entries) -> Result<bool> {
        let before = entries.body.len();
        let body = mem::take(&mut entries.body);
        let Some(directory) = &entries.looked_up_in else {
            dirent.ino = self.tables().nodes.inode_on_device_of(node, dirent.ino)?;
            return Ok(entries.add(body.dirent(entries.room, &dirent)));
        };
        if before + ENTRY_OUT > entries.room {
            entries.body = body;
            return Ok(false);
        }
        let is_self_or_parent = matches!(dirent.name.to_bytes(), b"." | b"..");
        let known = if is_self_or_parent { None } else { stat_at(&**directory, dirent.name).ok() };
        // An entry without a node is a name that the guest can look up.
        let found = known.and_then(|stat| {
            let found = self.tables().nodes.found(node, dirent.name, &stat, false).ok()?;
            Some((found, stat))
        });
        let fixed = match &found {
            Some((found, stat)) => {
                dirent.ino = self.tables().nodes.inode(stat);
                dirent.kind = kind_of(stat).as_raw_mode() >> 12;
                self.entry(*found, stat)
            }
            None => {
                dirent.ino = self.tables().nodes.inode_on_device_of(node, dirent.ino)?;
                Body::default().zeros(ENTRY_OUT)
            }
        };
        let added = body.bytes(fixed.as_bytes()).dirent(entries.room, &dirent);
        let is_added = entries.add(added.map_err(|full| full.cut(before)));
        if let Some((found, _)) = found.filter(|_| !is_added) {
            self.tables().nodes.forget(found, 1);
        }
        Ok(is_added)
    }
}
