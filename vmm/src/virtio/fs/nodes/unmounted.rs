//! Files in mounts that the host has unmounted.

use std::{
    collections::{HashMap, HashSet},
    ffi::CStr,
};

use super::{MOST_ANCESTORS, Node, Nodes};
use crate::virtio::fs::{abi::ROOT, identity::is_socket_or_fifo};

impl Nodes {
    /// The nodes in the root, and their names.
    pub(in crate::virtio::fs) fn tops(&self) -> Vec<(u64, Box<CStr>)> {
        let top = |(number, node): (u64, &Node)| {
            let place = node.place.as_ref().filter(|place| place.parent == ROOT)?;
            Some((number, place.name.clone()))
        };
        self.table.iter().filter_map(top).collect()
    }

    /// Removes the descriptors of all nodes whose mounts have a node only below `gone`, which are the nodes in the root
    /// that the host has removed. Returns these nodes. They get no descriptor again, not even one that a request has
    /// opened before. A guest that uses a mount has a node for its root.
    pub(in crate::virtio::fs) fn close_unmounted(&mut self, gone: &HashSet<u64>) -> HashSet<u64> {
        let mounts = self.mounts_except_below(gone);
        let is_closed = |(_, node): &(u64, &Node)| !mounts.contains(&node.mount);
        let closed: HashSet<u64> = self.table.iter().filter(is_closed).map(|(number, _)| number).collect();
        for number in &closed {
            let Some(node) = self.table.get_mut(*number) else { continue };
            if is_socket_or_fifo(node.kind) {
                // Others may know it by a mount that stays.
                let (device, anchor, left) = (node.id.device, node.anchor.take(), node.place.take());
                self.drop_anchor(device, anchor);
                self.leave(left);
                continue;
            }
            node.is_unmounted = true;
            let (id, anchor) = (node.id, node.anchor.take());
            // The kernel may give the number of the mount to a new one, in which the same file gets a new node.
            self.let_go(*number, id, anchor);
        }
        closed
    }

    /// The mounts of the root and of all nodes that are reached from it by other nodes than `gone`.
    fn mounts_except_below(&self, gone: &HashSet<u64>) -> HashSet<u64> {
        let mut mounts: HashSet<u64> = self.table.get(ROOT).map(|root| root.mount).into_iter().collect();
        let mut are_below: HashMap<u64, bool> = HashMap::new();
        for (number, node) in self.table.iter() {
            let (mut at, mut way) = (number, Vec::new());
            let is_below = loop {
                if let Some(known) = are_below.get(&at) {
                    break *known;
                }
                let place = self.table.get(at).and_then(|node| node.place.as_ref());
                let Some(place) = place.filter(|_| way.len() < MOST_ANCESTORS) else { break false };
                way.push(at);
                if place.parent == ROOT {
                    break !gone.contains(&at);
                }
                at = place.parent;
            };
            are_below.extend(way.into_iter().map(|number| (number, is_below)));
            if is_below {
                mounts.insert(node.mount);
            }
        }
        mounts
    }
}
