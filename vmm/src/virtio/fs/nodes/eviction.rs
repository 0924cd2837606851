//! Which node goes if there are too many.

use rustix::{fs::FileType, io::Errno};

use super::Nodes;
use crate::virtio::fs::abi::Result;

/// How many places are searched for a node to evict before a directory may be evicted.
const MOST_STEPS_FOR_A_FILE: usize = 256;
/// How many places are searched before a node in the root of a container may be evicted, while there are many others.
const MOST_STEPS_FOR_A_VOLUME: usize = 1 << 14;

impl Nodes {
    /// Removes a node that the guest can look up again. Prefers files and symbolic links to directories, which may be
    /// the working directory of a process, and to sockets, at which a process may listen. Prefers nodes that were not
    /// used recently.
    ///
    /// The guest does not look a mounted file up again. And if it finds another node in the place of one that is
    /// covered by a mount, it removes that mount. Mounts cover files in the roots of containers above all
    /// (/etc/resolv.conf). So these nodes are the last choice as long as there are many others.
    pub(super) fn evict(&mut self) -> Result<()> {
        let (mut second_choice, mut last_choice) = (None, None);
        let spares_own = !self.is_exclusive && self.table.len() - self.own > self.limits.idle / 8;
        for step in 0..2 * self.table.round() {
            let choice = match step {
                ..MOST_STEPS_FOR_A_FILE => None,
                MOST_STEPS_FOR_A_FILE..MOST_STEPS_FOR_A_VOLUME => second_choice,
                _ => second_choice.or(last_choice),
            };
            if let Some(number) = choice {
                self.remove(number);
                return Ok(());
            }
            let Some((number, node)) = self.table.next() else { continue };
            if node.opens > 0 || node.children > 0 || node.anchor.is_some() {
                continue;
            }
            // The guest would use the name of the node, and get an error for the file.
            if self.is_exclusive && node.has_cached_name {
                continue;
            }
            if std::mem::take(&mut node.is_used) {
                continue;
            }
            let is_file = matches!(node.kind, FileType::RegularFile | FileType::Symlink);
            let is_spared = spares_own && node.is_own;
            if self.is_top_of_mount(number) {
                continue;
            }
            if is_spared {
                last_choice.get_or_insert(number);
            } else if is_file {
                self.remove(number);
                return Ok(());
            } else {
                second_choice.get_or_insert(number);
            }
        }
        self.remove(second_choice.or(last_choice).ok_or(Errno::NFILE)?);
        Ok(())
    }
}
