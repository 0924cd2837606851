//! The mounts of the share.

use std::collections::HashSet;

use rustix::fs::FileType;

use super::Nodes;

/// A mount, and a node by whose file it is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::virtio::fs) struct Mounted {
    pub(in crate::virtio::fs) node: u64,
    pub(in crate::virtio::fs) mount: u64,
    /// The file system of the node. One mount may have several, such as the subvolumes of Btrfs.
    pub(in crate::virtio::fs) device: u64,
}

impl Nodes {
    /// The mounts in which the guest may have written to a file. A mount is listed by the node of its top directory, or
    /// of the file that is mounted. The guest has looked that up before everything below it, and it has a node as long
    /// as there is one below it. A mount in which the guest uses a file that it has removed is listed by this file too.
    /// A node may be out of date: then the mount may be listed once more, by the node that is not.
    pub(in crate::virtio::fs) fn mounts(&self) -> Vec<Mounted> {
        let (mut tops, mut removed, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        for (number, node) in self.table.iter() {
            // Other files are never opened, so nothing was written to them.
            if node.is_unmounted || !matches!(node.kind, FileType::RegularFile | FileType::Directory) {
                continue;
            }
            let mounted = Mounted { node: number, mount: node.mount, device: node.id.device };
            match &node.place {
                Some(_) if self.is_top_of_mount(number) => tops.push(mounted),
                None if node.anchor.is_some() && seen.insert((mounted.mount, mounted.device)) => {
                    removed.push(mounted);
                }
                _ => {}
            }
        }
        tops.extend(removed);
        tops
    }

    /// Whether the host has mounted the file or directory of a node where it is.
    pub(super) fn is_top_of_mount(&self, number: u64) -> bool {
        let Some(node) = self.table.get(number) else { return false };
        let parent = node.place.as_ref().and_then(|place| self.table.get(place.parent));
        !node.is_unmounted && parent.is_some_and(|parent| parent.mount != node.mount)
    }
}
