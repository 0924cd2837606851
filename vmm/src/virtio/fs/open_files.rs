//! Opens and closes the files of the guest. In an exclusive share (see the parent module) the guest opens a file
//! without a request, and the server opens it when it is read or written. All system calls are made without the lock on
//! the tables, because they may block.

use std::{os::fd::OwnedFd, sync::Arc};

use rustix::{fs::OFlags, io::Errno};

use super::{
    abi::Result,
    file_server::{LockedTables, Server},
    file_stat::FileStat,
    file_system_kind::FileSystemKind,
};

/// The handle that a request has if the guest opened the file without a request.
pub(super) const NO_HANDLE: u64 = 0;

/// The open file that a request is about.
#[derive(Debug, Clone, Copy)]
pub(super) enum Opened {
    /// It has a handle.
    Handle(u64),
    /// It has none, because the share is exclusive. All processes that have opened the file of this node share
    /// what the server opens for it.
    Node(u64),
}

impl Opened {
    /// The node of the file.
    fn node(self, tables: &LockedTables) -> Result<u64> {
        match self {
            Self::Handle(number) => Ok(tables.handles.get(number)?.0),
            Self::Node(number) => Ok(number),
        }
    }
}

impl Server {
    /// The open file of a request that names `node` and `handle`. EBADF: the handle is not of this node. Whether the
    /// request may wait for a file system, and where the names are that it finds, goes by the node.
    pub(super) fn opened(&self, node: u64, handle: u64) -> Result<Opened> {
        if handle == NO_HANDLE && self.shared.is_exclusive {
            return Ok(Opened::Node(node));
        }
        let (opened, _) = self.tables().handles.get(handle)?;
        if opened == node { Ok(Opened::Handle(handle)) } else { Err(Errno::BADF) }
    }

    /// Adds a handle of `node`, which was opened with `flags` as `fd`.
    pub(super) fn add_handle(&mut self, node: u64, flags: OFlags, fd: OwnedFd) -> Result<u64> {
        // If there is an error, the descriptor is closed without the lock.
        let (fd, opener) = (Arc::new(fd), self.caller);
        let device = self.tables().nodes.device(node).ok_or(Errno::STALE)?;
        // Here the file system responds. Where the handle is removed it may not.
        self.shared.kind_of_file_system(device, &fd);
        let mut tables = self.tables();
        tables.nodes.opened_as(node, &fd)?;
        let number = tables.handles.insert(node, device, flags, opener, fd.clone());
        if number.is_err() {
            tables.nodes.released(node);
        }
        number
    }

    /// Keeps a file of an exclusive share that was opened for reading and writing.
    pub(super) fn add_file(&mut self, node: u64, stat: &FileStat, fd: OwnedFd) -> Result<()> {
        // If there is an error, the descriptor is closed without the lock.
        let fd = Arc::new(fd);
        let mut tables = self.tables();
        tables.nodes.use_contents(node, true)?;
        tables.nodes.keep_file(node, true, stat, fd.clone())
    }

    /// A descriptor of an open file, to read.
    pub(super) fn file(&mut self, opened: Opened) -> Result<Arc<OwnedFd>> {
        let number = match opened {
            Opened::Handle(number) => number,
            Opened::Node(number) => return self.file_of_node(number, false),
        };
        let open = self.file_if_open(opened)?;
        if let Some(fd) = open {
            return Ok(fd);
        }
        let (node, flags) = self.tables().handles.get(number)?;
        let fd = self.open_again(number, node, flags)?;
        self.tables().keep_file(number, flags, &fd)?;
        Ok(fd)
    }

    /// Opens the node of a handle again, as root or as who has opened it.
    fn open_again(&mut self, number: u64, node: u64, flags: OFlags) -> Result<Arc<OwnedFd>> {
        let opener = self.tables().handles.opener(number)?;
        let (fd, _) = self.as_root_or(opener, &[node], |server| server.open_node(node, flags))?;
        Ok(Arc::new(fd))
    }

    /// A descriptor of an open file, to change its contents or its size.
    pub(super) fn writable_file(&mut self, opened: Opened) -> Result<Arc<OwnedFd>> {
        match opened {
            // The flags of the handle say what it is for.
            Opened::Handle(_) => self.file(opened),
            Opened::Node(number) => self.file_of_node(number, true),
        }
    }

    /// A descriptor of an open file for a write with `flags`, and whether the write itself has to append. The guest may
    /// have set or cleared O_APPEND since it opened the file. The flag of a descriptor is never changed, because other
    /// threads may write with the descriptor at the same time.
    pub(super) fn file_to_write(&mut self, opened: Opened, flags: u32) -> Result<(Arc<OwnedFd>, bool)> {
        let appends = OFlags::from_bits_retain(flags).contains(OFlags::APPEND);
        let number = match opened {
            Opened::Handle(number) => number,
            Opened::Node(number) => return Ok((self.file_of_node(number, true)?, appends)),
        };
        let (node, handle_flags) = self.tables().handles.get(number)?;
        if appends || !handle_flags.contains(OFlags::APPEND) {
            return Ok((self.file(opened)?, appends && !handle_flags.contains(OFlags::APPEND)));
        }
        let handle_flags = handle_flags - OFlags::APPEND;
        let fd = self.open_again(number, node, handle_flags)?;
        self.tables().replace_file(number, handle_flags, &fd)?;
        Ok((fd, false))
    }

    /// A descriptor of a node's file, opened for reading and, if `writes`, for writing.
    fn file_of_node(&mut self, number: u64, writes: bool) -> Result<Arc<OwnedFd>> {
        let kept = self.tables().nodes.use_contents(number, writes)?;
        if let Some(fd) = kept {
            return Ok(fd);
        }
        let place = self.tables().nodes.place(number).ok();
        let (fd, stat) = self.open_node(number, if writes { OFlags::RDWR } else { OFlags::RDONLY })?;
        let fd = Arc::new(fd);
        if writes {
            // Nothing is written to the copy for a name that the caller may not mean. See `nodes/names.rs`.
            self.check_name(number, &stat)?;
        }
        let mut tables = self.tables();
        if writes {
            if tables.nodes.place(number).ok() != place {
                return Err(Errno::STALE);
            }
            tables.nodes.was_copied(number, &stat)?;
        }
        tables.nodes.keep_file(number, writes, &stat, fd.clone())?;
        Ok(fd)
    }

    /// A descriptor of a handle, if there is one now.
    pub(super) fn file_if_open(&mut self, opened: Opened) -> Result<Option<Arc<OwnedFd>>> {
        match opened {
            Opened::Handle(number) => self.tables().handles.kept(number),
            // A node is reached without its open file.
            Opened::Node(_) => Ok(None),
        }
    }

    /// Returns EXDEV if two open files are in different mounts.
    pub(super) fn check_same_mount(&self, one: Opened, other: Opened) -> Result<()> {
        let tables = self.tables();
        tables.nodes.check_same_mount(one.node(&tables)?, other.node(&tables)?)
    }

    /// Closes a handle.
    pub(super) fn remove_handle(&mut self, number: u64) -> Result<()> {
        let mut tables = self.tables();
        let (node, unused) = tables.handles.remove(number)?;
        tables.nodes.released(node);
        drop(tables);
        match unused {
            // The guest may remove the file when it has the answer. See `hold`.
            Some(unused) if self.shared.is_known_as(unused.device, FileSystemKind::Nfs) => drop(unused),
            unused => self.shared.add_unused(unused),
        }
        Ok(())
    }
}
