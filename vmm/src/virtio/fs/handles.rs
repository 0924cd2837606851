//! The files that the guest has open. The table makes no system calls.
//!
//! A handle stores a node and the flags with which it was opened. It needs no file descriptor: the handles that were
//! used recently have one, and for another one the file is opened again when the handle is used.

use std::{collections::HashSet, os::fd::OwnedFd, sync::Arc};

use rustix::{fs::OFlags, io::Errno};

use super::{
    abi::Result,
    caller::Caller,
    descriptors::{Descriptors, Unused},
    table::Table,
};

/// How much the table may contain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Handles.
    pub(super) handles: usize,
    /// Descriptors of handles.
    pub(super) files: usize,
}

struct Handle {
    node: u64,
    /// The file system of the node.
    device: u64,
    flags: OFlags,
    /// Who has opened it. None: root, or it is not known.
    opener: Option<Caller>,
}

/// The table.
pub(super) struct Handles {
    limits: Limits,
    table: Table<Handle>,
    files: Descriptors,
    /// Descriptors that the owner of the table has to close, without its lock.
    unused: Vec<Unused>,
}

/// Flags of open(2) that a handle keeps. O_DIRECT is not kept: it is about the page cache of the guest, and the
/// guest's buffers do not have the alignment that the host's disk needs.
const KEPT: OFlags = OFlags::ACCMODE
    .union(OFlags::APPEND)
    .union(OFlags::DSYNC)
    .union(OFlags::SYNC)
    .union(OFlags::NOATIME)
    .union(OFlags::DIRECTORY);

/// The flags that a handle keeps of those with which the guest opens a file.
pub(super) fn kept(flags: u32) -> OFlags {
    OFlags::from_bits_retain(flags) & KEPT
}

impl Handles {
    /// An empty table.
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, table: Table::new(), files: Descriptors::new(limits.files), unused: Vec::new() }
    }

    /// Makes later numbers differ from all numbers of `other`, which this table replaces.
    pub(super) fn continue_after(&mut self, other: &Self) {
        self.table.continue_after(&other.table);
    }

    /// Takes the descriptors that are not needed any more.
    pub(super) fn take_unused(&mut self) -> Vec<Unused> {
        std::mem::take(&mut self.unused)
    }

    /// All descriptors of the table.
    pub(super) fn into_unused(self) -> impl Iterator<Item = Unused> {
        self.files.into_unused().chain(self.unused)
    }

    /// Returns an error if there is no room for another handle.
    pub(super) fn make_room(&self) -> Result<()> {
        if self.table.len() < self.limits.handles { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// Adds a handle of `node`, which is on the file system `device`, that was opened with `flags` as `fd`.
    pub(super) fn insert(
        &mut self,
        node: u64,
        device: u64,
        flags: OFlags,
        opener: Option<Caller>,
        fd: Arc<OwnedFd>,
    ) -> Result<u64> {
        self.make_room()?;
        let number = self.table.insert(Handle { node, device, flags, opener })?;
        self.unused.extend(self.files.insert(number, device, fd));
        Ok(number)
    }

    /// The node and the flags of a handle.
    pub(super) fn get(&self, number: u64) -> Result<(u64, OFlags)> {
        self.table.get(number).map(|handle| (handle.node, handle.flags)).ok_or(Errno::BADF)
    }

    /// Who has opened a handle.
    pub(super) fn opener(&self, number: u64) -> Result<Option<Caller>> {
        self.table.get(number).map(|handle| handle.opener).ok_or(Errno::BADF)
    }

    /// The descriptor of a handle, if there is one now.
    pub(super) fn kept(&mut self, number: u64) -> Result<Option<Arc<OwnedFd>>> {
        self.get(number)?;
        Ok(self.files.get(number))
    }

    /// The descriptor of a handle of this node, if one has a descriptor now.
    pub(super) fn kept_of_node(&self, node: u64) -> Option<Arc<OwnedFd>> {
        self.files.find(|number| self.table.get(number).is_some_and(|handle| handle.node == node))
    }

    /// Sets the flags of a handle, and the descriptor that was opened with them.
    pub(super) fn replace(&mut self, number: u64, flags: OFlags, fd: Arc<OwnedFd>) -> Result<()> {
        let handle = self.table.get_mut(number).ok_or(Errno::BADF)?;
        handle.flags = flags;
        self.unused.extend(self.files.remove(number));
        self.unused.extend(self.files.insert(number, handle.device, fd));
        Ok(())
    }

    /// Keeps a descriptor of a handle that was opened with `flags`, as long as there is room.
    pub(super) fn keep(&mut self, number: u64, flags: OFlags, fd: Arc<OwnedFd>) {
        if let Some(handle) = self.table.get(number).filter(|handle| handle.flags == flags) {
            self.unused.extend(self.files.insert(number, handle.device, fd));
        }
    }

    /// Removes the descriptors of all handles of these nodes.
    pub(super) fn close(&mut self, nodes: &HashSet<u64>) {
        let handles = self.table.iter().filter(|(_, handle)| nodes.contains(&handle.node));
        for (number, _) in handles {
            self.unused.extend(self.files.remove(number));
        }
    }

    /// Removes a handle. Returns its node, and its descriptor, if there is one now.
    pub(super) fn remove(&mut self, number: u64) -> Result<(u64, Option<Unused>)> {
        let handle = self.table.remove(number).ok_or(Errno::BADF)?;
        Ok((handle.node, self.files.remove(number)))
    }
}
