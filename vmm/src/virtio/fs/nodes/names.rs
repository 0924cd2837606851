//! Files of an overlay with several names.
//!
//! A file of a lower layer with several names has one identity, and so one node, until it is changed. Then the host's
//! kernel copies it, for the name by which it is changed, and the copy is another file. The place of the node is the
//! name that was looked up last. Two threads may look up two names at the same time, and a request does not say by
//! which name the guest's kernel has found the node. So a change by one thread could reach the copy for the name of the
//! other. The server records which thread has looked up the place. Before another thread changes the file, it checks
//! whether there is such a copy. The threads of one process count as different, because they can do such things at the
//! same time. Requests have the number of the thread (Linux, fs/fuse/dev.c, fuse_get_req: `task_pid(current)`),
//! although FUSE calls it a pid.

use super::Nodes;

impl Nodes {
    /// A thread of the guest has looked up the place of a node.
    pub(in crate::virtio::fs) fn found_by(&mut self, number: u64, thread: u32) {
        if let Some(node) = self.table.get_mut(number) {
            node.found_by = thread;
        }
    }

    /// Whether a thread may have found the node by another name than that of its place.
    pub(in crate::virtio::fs) fn has_other_name_for(&self, number: u64, thread: u32) -> bool {
        self.table.get(number).is_some_and(|node| node.had_other_name && node.found_by != thread)
    }

    /// Lets the names of a file have a new node when they are looked up again: the place of this one is a copy now.
    pub(in crate::virtio::fs) fn separate(&mut self, number: u64) {
        if let Some(node) = self.table.get(number)
            && self.by_id.get(&node.id) == Some(&number)
        {
            self.by_id.remove(&node.id);
        }
    }
}
