//! The open files of nodes in an exclusive share.
//!
//! The guest does not say which files it opens and closes there. So the server opens a file when the guest reads or
//! writes it, and keeps the descriptor as long as there is room. And it treats a node as open from then on until the
//! guest forgets it, because an open file cannot be looked up again.

use std::{mem, os::fd::OwnedFd, sync::Arc};

use bulkhead_vmm_api::SharedSocket;
use rustix::{fs::FileType, io::Errno};

use super::Nodes;
use crate::virtio::fs::{
    abi::{ROOT, Result},
    file_stat::FileStat,
    identity::{Id, kind_of},
};

/// The number of a descriptor in [`Nodes::files`]. A node has one to read and one to write.
fn number_of(node: u64, writes: bool) -> u64 {
    node << 1 | u64::from(writes)
}

impl Nodes {
    /// The guest reads or writes the file of a node. Returns a descriptor that is opened for that, if there is one now.
    ///
    /// The node counts as open from now on. Linux keeps fewer files in its caches than a table may have open nodes,
    /// unless the guest is very large or hostile. Then the file that was not used for the longest time does not count
    /// as open any more.
    pub(in crate::virtio::fs) fn use_contents(
        &mut self,
        number: u64,
        writes: bool,
    ) -> Result<Option<Arc<OwnedFd>>> {
        if !mem::replace(&mut self.node(number)?.has_used_contents, true) {
            self.opened(number)?;
            self.used += 1;
            while self.used > self.limits.open && self.close_one() {}
        }
        // What one descriptor has written the other one may not find: only the first to write makes an overlay copy
        // the file.
        let written = self.files.get(number_of(number, true));
        Ok(if writes { written } else { written.or_else(|| self.files.get(number_of(number, false))) })
    }

    /// Returns the node of a socket that the guest knows, and counts a lookup of it. The node counts as open until the
    /// guest forgets it, because a process listens there.
    pub(in crate::virtio::fs) fn listened(&mut self, socket: &SharedSocket) -> Result<u64> {
        let number = *self.by_id.get(&Id::of_socket(socket)).ok_or(Errno::NOENT)?;
        if self.node(number)?.kind != FileType::Socket {
            return Err(Errno::NOENT);
        }
        self.use_contents(number, false)?;
        self.node(number)?.lookups += 1;
        Ok(number)
    }

    /// Decides whether the guest may cache the name of a node that it is told now, and returns that. If there are many
    /// nodes already, it may not. If it may, the node is not evicted: the guest opens a file by a name that it has
    /// cached without a request, and so cannot know that the node is gone.
    pub(super) fn let_name_be_cached(&mut self, number: u64) -> bool {
        let is_cached = self.table.len() <= self.limits.idle / 2;
        if let Some(node) = self.table.get_mut(number) {
            node.has_cached_name = is_cached;
        }
        is_cached
    }

    /// Keeps the open file of a node, whose attributes are `stat`, as long as there is room. ESTALE: the node is that
    /// of another file now.
    pub(in crate::virtio::fs) fn keep_file(
        &mut self,
        number: u64,
        writes: bool,
        stat: &FileStat,
        fd: Arc<OwnedFd>,
    ) -> Result<()> {
        self.check(number, stat)?;
        let device = self.node(number)?.id.device;
        self.unused.extend(self.files.insert(number_of(number, writes), device, fd));
        Ok(())
    }

    /// The file of a node has become the file of `stat`: an overlay has copied it from a lower layer, because it is
    /// changed. The file had several names in the lower layer, else it would have kept its identity. ESTALE: another
    /// thread has looked the copy up meanwhile, so that it has a node.
    pub(in crate::virtio::fs) fn was_copied(&mut self, number: u64, stat: &FileStat) -> Result<()> {
        let id = Id::of(stat);
        let node = self.node(number)?;
        if number == ROOT || node.id == id || node.mount != stat.stx_mnt_id || node.kind != kind_of(stat) {
            return Ok(());
        }
        if self.by_id.contains_key(&id) {
            return Err(Errno::STALE);
        }
        let node = self.node(number)?;
        let (before, has_anchor) = (mem::replace(&mut node.id, id), node.anchor.is_some());
        if has_anchor {
            self.anchors.remove(before.device);
            self.anchors.add(id.device);
        }
        if self.by_id.get(&before) == Some(&number) {
            self.by_id.remove(&before);
        }
        self.by_id.insert(id, number);
        self.drop_descriptors(number);
        Ok(())
    }

    /// Removes the open files of a node.
    pub(super) fn drop_files(&mut self, number: u64) {
        for writes in [false, true] {
            self.unused.extend(self.files.remove(number_of(number, writes)));
        }
    }

    /// A node does not count as open any more because of its contents.
    pub(super) fn forget_contents(&mut self, number: u64) {
        let Some(node) = self.table.get_mut(number) else { return };
        if mem::take(&mut node.has_used_contents) {
            self.used -= 1;
            node.opens -= 1;
            if node.opens == 0 {
                self.open -= 1;
            }
        }
    }

    /// Takes a node for closed that was not used recently. Returns false if there is none.
    fn close_one(&mut self) -> bool {
        for _ in 0..2 * self.table.round() {
            let Some((number, node)) = self.table.next() else { continue };
            if node.has_used_contents && !mem::take(&mut node.is_used) {
                self.forget_contents(number);
                return true;
            }
        }
        false
    }
}
