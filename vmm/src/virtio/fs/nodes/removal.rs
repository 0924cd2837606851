//! Nodes whose files lose their names.

use std::{ffi::CStr, os::fd::OwnedFd, sync::Arc, time::Instant};

use rustix::{fs::FileType, io::Errno};

use super::Nodes;
use crate::virtio::fs::{
    abi::Result,
    file_stat::FileStat,
    identity::{device_of, is_socket_or_fifo},
    listings::{Number, Position},
};

/// A node whose name is about to be removed. See [`Nodes::hold`].
#[must_use]
pub(in crate::virtio::fs) struct Held(u64);

/// How often a directory is read from its start again before somebody has come to its end.
const MOST_RESTARTS: u16 = 1000;

impl Nodes {
    /// Names in a directory were removed or changed, when `last` was the last listing.
    pub(in crate::virtio::fs) fn lost_names(&mut self, directory: u64, last: Number) {
        if let Some(node) = self.table.get_mut(directory) {
            node.lost_names_at = Some(last);
        }
    }

    /// Whether a directory is to be read from its start again, because its listing is gone and names were removed or
    /// changed since that was begun. Not endlessly: others may remove names while one that removes none reads.
    pub(in crate::virtio::fs) fn begins_again(&mut self, directory: u64, position: Position) -> bool {
        let Some(node) = self.table.get_mut(directory) else { return false };
        let has_lost_names = node.lost_names_at.is_some_and(|last| position.is_of_or_before(last));
        let begins = has_lost_names && node.restarts < MOST_RESTARTS;
        node.restarts += u16::from(begins);
        begins
    }

    /// A directory was read to its end.
    pub(in crate::virtio::fs) fn was_read_to_its_end(&mut self, directory: u64) {
        if let Some(node) = self.table.get_mut(directory) {
            node.restarts = 0;
        }
    }

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
        let device = device_of(stat);
        let (is_full, is_exclusive) = (self.anchors.are_full(device), self.is_exclusive);
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
            self.anchors.add(device);
        } else if is_full && node.opens > 0 && !(is_exclusive && stat.stx_nlink > 1) {
            // In an exclusive share the guest has read or written it, and may have it open. If it has other names,
            // Linux may know the node for long after the file was closed.
            return Err(Errno::NFILE);
        }
        Ok(Some(Held(number)))
    }

    /// Counts a new handle of a node, which was opened as `fd`. If the file has lost its name meanwhile or is about to,
    /// the descriptor becomes its anchor.
    pub(in crate::virtio::fs) fn opened_as(&mut self, number: u64, fd: &Arc<OwnedFd>) -> Result<()> {
        self.opened(number)?;
        let node = self.node(number)?;
        let device = node.id.device;
        let is_full = self.anchors.are_full(device);
        let node = self.node(number)?;
        if (node.is_losing_name || node.place.is_none()) && node.anchor.is_none() && !is_full {
            node.anchor = Some(fd.clone());
            self.anchors.add(device);
        }
        Ok(())
    }

    /// Whether a descriptor of a handle is one of the file that the guest means, if the file of this node is not at its
    /// place any more. Of a file with several names in the root of a container it may be that of another name.
    pub(in crate::virtio::fs) fn is_known_by_handles(&mut self, number: u64) -> Result<bool> {
        let node = self.node(number)?;
        Ok(node.kind == FileType::RegularFile && !(node.is_own && node.had_other_name))
    }

    /// The file of a node is not at its place any more: somebody else has renamed or removed it. The guest has it open
    /// by `fd`, which becomes its anchor for as long as it is open. Returns false if that cannot be.
    ///
    /// Linux names the node, and no handle, in requests of fstat(2), fchmod(2) and the like, and when a process opens
    /// `/proc/self/fd/N`. But chmod(2) of a name that the guest has cached names the node too, and must not change a
    /// file that has another name now. So this is done only after the guest has to look the name up anew.
    pub(in crate::virtio::fs) fn moved_away(
        &mut self,
        number: u64,
        fd: &Arc<OwnedFd>,
        mount: u64,
    ) -> Result<bool> {
        let node = self.node(number)?;
        let device = node.id.device;
        if node.opens == 0 || node.anchor.is_some() || Instant::now() < node.name_is_cached_until {
            return Ok(false);
        }
        if self.anchors.are_full(device) {
            return Ok(false);
        }
        let node = self.node(number)?;
        (node.anchor, node.has_moved_away) = (Some(fd.clone()), true);
        node.mount = mount;
        let left = node.place.take();
        self.anchors.add(device);
        self.leave(left);
        Ok(true)
    }

    /// The file of a node is not open any more. If others have moved it away, the guest may know the node for long, and
    /// the file would take room on the host.
    pub(super) fn let_moved_go(&mut self, number: u64) {
        let Some(node) = self.table.get_mut(number).filter(|node| node.has_moved_away) else { return };
        node.has_moved_away = false;
        let (device, anchor) = (node.id.device, node.anchor.take());
        self.drop_anchor(device, anchor);
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
