//! Opens and closes the handles of the guest. All system calls are made without the lock on the tables, because they
//! may block.

use std::{os::fd::OwnedFd, sync::Arc};

use rustix::{fs::OFlags, io::Errno};

use super::{abi::Result, file_server::Server};

impl Server {
    /// Adds a handle of `node`, which was opened with `flags` as `fd`.
    pub(super) fn add_handle(&mut self, node: u64, flags: OFlags, fd: OwnedFd) -> Result<u64> {
        // If there is an error, the descriptor is closed without the lock.
        let fd = Arc::new(fd);
        let mut tables = self.tables();
        let device = tables.nodes.device(node).ok_or(Errno::STALE)?;
        tables.nodes.opened(node)?;
        let number = tables.handles.insert(node, device, flags, fd.clone());
        if number.is_err() {
            tables.nodes.released(node);
        }
        number
    }

    /// A descriptor of a handle.
    pub(super) fn file(&mut self, number: u64) -> Result<Arc<OwnedFd>> {
        let open = self.file_if_open(number)?;
        if let Some(fd) = open {
            return Ok(fd);
        }
        let (node, flags) = self.tables().handles.get(number)?;
        let (fd, _) = self.open_node(node, flags)?;
        let fd = Arc::new(fd);
        self.tables().keep_file(number, flags, &fd)?;
        Ok(fd)
    }

    /// A descriptor of a handle for a write with `flags`, and whether the write itself has to append. The guest may
    /// have set or cleared O_APPEND since it opened the file. The flag of a descriptor is never changed, because other
    /// threads may write with the descriptor at the same time.
    pub(super) fn file_to_write(&mut self, number: u64, flags: u32) -> Result<(Arc<OwnedFd>, bool)> {
        let appends = OFlags::from_bits_retain(flags).contains(OFlags::APPEND);
        let (node, opened) = self.tables().handles.get(number)?;
        if appends || !opened.contains(OFlags::APPEND) {
            return Ok((self.file(number)?, appends && !opened.contains(OFlags::APPEND)));
        }
        let opened = opened - OFlags::APPEND;
        let (fd, _) = self.open_node(node, opened)?;
        let fd = Arc::new(fd);
        self.tables().replace_file(number, opened, &fd)?;
        Ok((fd, false))
    }

    /// A descriptor of a handle, if there is one now.
    pub(super) fn file_if_open(&mut self, number: u64) -> Result<Option<Arc<OwnedFd>>> {
        self.tables().handles.kept(number)
    }

    /// Returns EXDEV if two handles are of files in different mounts.
    pub(super) fn check_same_mount(&self, one: u64, other: u64) -> Result<()> {
        let tables = self.tables();
        let ((one, _), (other, _)) = (tables.handles.get(one)?, tables.handles.get(other)?);
        tables.nodes.check_same_mount(one, other)
    }

    /// Closes a handle.
    pub(super) fn remove_handle(&mut self, number: u64) -> Result<()> {
        let mut tables = self.tables();
        let node = tables.handles.remove(number)?;
        tables.nodes.released(node);
        Ok(())
    }
}
