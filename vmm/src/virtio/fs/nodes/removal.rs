//! Nodes whose files lose their names.

use std::{ffi::CStr, os::fd::OwnedFd, sync::Arc};

use rustix::io::Errno;

use super::Nodes;
use crate::virtio::fs::{abi::Result, file_stat::FileStat, identity::is_socket_or_fifo};

/// A node whose name is about to be removed. See [`Nodes::hold`].
#[must_use]
pub(in crate::virtio::fs) struct Held(u64);

impl Nodes {
    /// Call this before the name of a file is removed, with a descriptor of the file. If the name is the place of the
    /// file's node, the descriptor becomes its anchor.
    ///
    /// A file of NFS that is not open gets no anchor, and loses the descriptor that it has: a name of a file to which a
    /// descriptor refers is not removed there, but becomes `.nfs` and a number until the descriptor is closed, so the
    /// directory would not be empty.
    pub(in crate::virtio::fs) fn hold(
        &mut self,
        parent: u64,
        name: &CStr,
        fd: &Arc<OwnedFd>,
        stat: &FileStat,
        is_nfs: bool,
    ) -> Result<Option<Held>> {
        let Some(number) = self.known(stat) else { return Ok(None) };
        let (is_full, is_exclusive) = (self.anchors >= self.limits.anchors, self.is_exclusive);
        let node = self.node(number)?;
        let is_last = is_socket_or_fifo(node.kind) && stat.stx_nlink <= 1;
        if !is_last && !node.place.as_ref().is_some_and(|place| place.is(parent, name)) {
            return Ok(None);
        }
        // In an exclusive share it is not known whether the guest has it open.
        if is_nfs && node.opens == 0 && !is_exclusive {
            node.is_losing_name = true;
            self.unused.extend(self.paths.remove(number));
        } else if node.anchor.is_none() && !is_full {
            node.anchor = Some(fd.clone());
            node.mount = stat.stx_mnt_id;
            self.anchors += 1;
        } else if is_full && (node.opens > 0 || is_exclusive) && !(is_exclusive && stat.stx_nlink > 1) {
            // Linux forgets a file at once that has lost its last name and is not open. So this one is open. Of a file
            // that has other names it may know the node for long.
            return Err(Errno::NFILE);
        }
        Ok(Some(Held(number)))
    }

    /// Counts a new handle of a node, which was opened as `fd`. If the file has lost its name meanwhile or is about to,
    /// the descriptor becomes its anchor.
    pub(in crate::virtio::fs) fn opened_as(&mut self, number: u64, fd: &Arc<OwnedFd>) -> Result<()> {
        self.opened(number)?;
        let is_full = self.anchors >= self.limits.anchors;
        let node = self.node(number)?;
        if (node.is_losing_name || node.place.is_none()) && node.anchor.is_none() && !is_full {
            node.anchor = Some(fd.clone());
            self.anchors += 1;
        }
        Ok(())
    }

    /// The name was removed.
    pub(in crate::virtio::fs) fn lost(&mut self, held: Option<Held>) {
        let Some(Held(number)) = held else { return };
        if let Some(node) = self.table.get_mut(number) {
            node.is_losing_name = false;
            let left = node.place.take();
            self.leave(left);
        }
    }

    /// The name was not removed.
    pub(in crate::virtio::fs) fn stays(&mut self, held: Option<Held>) {
        let Some(Held(number)) = held else { return };
        let Some(node) = self.table.get_mut(number) else { return };
        node.is_losing_name = false;
        // Another request may have removed the name meanwhile. Then the node needs its anchor.
        if node.place.is_some() {
            let (device, anchor) = (node.id.device, node.anchor.take());
            self.drop_anchor(device, anchor);
        }
    }
}
