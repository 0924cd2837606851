//! What the guest has open.
//!
//! A handle is a node and the way in which it was opened. That takes no descriptor: the handles that were used last have
//! one, and another is opened anew when it is used.

use std::{os::fd::OwnedFd, rc::Rc};

use rustix::{
    fs::{OFlags, fcntl_setfl},
    io::Errno,
};

use super::{abi::Result, descriptors::Descriptors, nodes::Nodes, table::Table};

/// How much the table may hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Handles.
    pub(super) handles: usize,
    /// Descriptors of them.
    pub(super) files: usize,
}

struct Handle {
    node: u64,
    flags: OFlags,
}

/// The table.
pub(super) struct Handles {
    limits: Limits,
    table: Table<Handle>,
    files: Descriptors,
}

/// Flags of open(2) that stay with what is open. O_DIRECT is not among them: it is about the guest's own cache, and the
/// guest's buffers are not aligned as the host's disk wants them.
const KEPT: OFlags = OFlags::ACCMODE
    .union(OFlags::APPEND)
    .union(OFlags::DSYNC)
    .union(OFlags::SYNC)
    .union(OFlags::NOATIME)
    .union(OFlags::DIRECTORY);

/// What stays of the flags with which the guest opens a file.
pub(super) fn kept(flags: u32) -> OFlags {
    OFlags::from_bits_retain(flags) & KEPT
}

impl Handles {
    /// Nothing is open.
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, table: Table::new(), files: Descriptors::new(limits.files) }
    }

    /// Whether the driver may be given another handle.
    pub(super) fn make_room(&self) -> Result<()> {
        if self.table.len() < self.limits.handles { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// Adds a handle of `node`, which `fd` is, opened with `flags`.
    pub(super) fn insert(&mut self, nodes: &mut Nodes, node: u64, flags: OFlags, fd: OwnedFd) -> Result<u64> {
        self.make_room()?;
        nodes.opened(node)?;
        let number = self.table.insert(Handle { node, flags });
        match number {
            Ok(number) => self.files.insert(number, Rc::new(fd)),
            Err(_) => nodes.released(node),
        }
        number
    }

    /// What a handle has open.
    pub(super) fn descriptor(&mut self, nodes: &mut Nodes, number: u64) -> Result<Rc<OwnedFd>> {
        let handle = self.table.get(number).ok_or(Errno::BADF)?;
        if let Some(fd) = self.files.get(number) {
            return Ok(fd);
        }
        let (fd, _) = nodes.open(handle.node, handle.flags)?;
        let fd = Rc::new(fd);
        self.files.insert(number, fd.clone());
        Ok(fd)
    }

    /// The same for a write with `flags`: the guest may have set or cleared O_APPEND since it opened the file.
    pub(super) fn for_write(&mut self, nodes: &mut Nodes, number: u64, flags: u32) -> Result<Rc<OwnedFd>> {
        let appends = OFlags::from_bits_retain(flags) & OFlags::APPEND;
        let fd = self.descriptor(nodes, number)?;
        let handle = self.table.get_mut(number).ok_or(Errno::BADF)?;
        if handle.flags & OFlags::APPEND != appends {
            let flags = (handle.flags - OFlags::APPEND) | appends;
            fcntl_setfl(&*fd, flags - OFlags::ACCMODE)?;
            handle.flags = flags;
        }
        Ok(fd)
    }

    /// The descriptor of a handle, if it has one now.
    pub(super) fn open_now(&mut self, number: u64) -> Result<Option<Rc<OwnedFd>>> {
        self.table.get(number).ok_or(Errno::BADF)?;
        Ok(self.files.get(number))
    }

    /// Closes a handle.
    pub(super) fn remove(&mut self, nodes: &mut Nodes, number: u64) -> Result<()> {
        let handle = self.table.remove(number).ok_or(Errno::BADF)?;
        self.files.remove(number);
        nodes.released(handle.node);
        Ok(())
    }
}
