//! What the guest may cache of a node, and for how long.
//!
//! Only the guest changes the root of a container, except when somebody on the host writes into it (`docker cp`). So
//! the guest may cache more of such files than of those in volumes, which the host may change at any time.

use std::{
    ffi::CStr,
    time::{Duration, Instant},
};

use bulkhead_vmm_api::ROOTFS;
use rustix::fs::{FileType, Statx};

use super::{Nodes, Told};
use crate::virtio::fs::abi::{ROOT, Result};

/// How long the guest may cache a name, including one that does not exist, and the attributes of a file. The host
/// changes shared files while the guest runs (it binds a mount, or replaces a configuration), and cannot notify the
/// guest. The guest sees such a change after this time at the latest. It checks the contents of a file whenever it
/// opens the file or reads its attributes.
pub(in crate::virtio::fs) const CACHED_FOR: Duration = Duration::from_secs(1);
/// How long the guest may cache names and attributes of files that exist in the root of a container, if its share is
/// not exclusive.
pub(in crate::virtio::fs) const OWN_CACHED_FOR: Duration = Duration::from_secs(60);
/// How long the guest may cache names and attributes in the root of a container in an exclusive share: for ever.
pub(in crate::virtio::fs) const EXCLUSIVE_CACHED_FOR: Duration = Duration::from_hours(24 * 365);
/// How long the guest may cache that a name does not exist in the root of a container, if its share is not exclusive.
/// A process in the container may wait for a file that somebody on the host copies into it.
pub(in crate::virtio::fs) const OWN_ABSENCE_CACHED_FOR: Duration = Duration::from_secs(10);

/// How long it takes at most, in general, until the guest has an answer.
const UNTIL_ANSWERED: Duration = Duration::from_secs(1);

/// What the guest may have cached of a file, compared with what it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::virtio::fs) enum Known {
    /// It may have all of it.
    SameVersion,
    /// Its pages are not valid, or nobody knows.
    OtherVersion,
    /// The guest may know another size, and would not read beyond it.
    OtherSize,
}

impl Told {
    /// A file that changes all the time has another size already. The guest must come to open it, too.
    fn is_other_size(&self, stat: &Statx) -> bool {
        self.size != stat.stx_size && self.at.elapsed() >= CACHED_FOR
    }
}

impl Nodes {
    /// Whether the file that was found at `name` in `parent` is in the root of a container. The share has a directory
    /// for each container, which the guest cannot change.
    pub(super) fn is_own_at(&self, parent: u64, name: &CStr, stat: &Statx) -> bool {
        let Some(directory) = self.table.get(parent) else { return false };
        let is_of_container = directory.place.as_ref().is_some_and(|place| place.parent == ROOT);
        is_of_container && name.to_bytes() == ROOTFS.as_bytes()
            || directory.is_own && directory.mount == stat.stx_mnt_id
    }

    /// Whether a node is in the root of a container.
    pub(in crate::virtio::fs) fn is_own(&self, number: u64) -> bool {
        self.table.get(number).is_some_and(|node| node.is_own)
    }

    /// How long the guest may cache the attributes of a node.
    pub(in crate::virtio::fs) fn cached_for(&self, number: u64) -> Duration {
        self.duration(number, OWN_CACHED_FOR)
    }

    /// How long the guest may cache that a name does not exist in a directory. Not at all at the top of the share:
    /// there the shim adds what the guest's agent looks for next.
    pub(in crate::virtio::fs) fn absence_cached_for(&self, directory: u64) -> Duration {
        if directory == ROOT {
            return Duration::ZERO;
        }
        self.duration(directory, OWN_ABSENCE_CACHED_FOR)
    }

    fn duration(&self, number: u64, own: Duration) -> Duration {
        match self.is_own(number) {
            true if self.is_exclusive => EXCLUSIVE_CACHED_FOR,
            true => own,
            false => CACHED_FOR,
        }
    }

    /// How long the guest may cache the name of a node with these attributes.
    ///
    /// Three kinds of names are not cached:
    ///
    /// - That of a node which may be evicted from the table of an exclusive share.
    /// - That of a symbolic link in a volume. The guest caches the target of a link as long as its node, and a link
    ///   that the host replaces must lead to its new target at once.
    /// - That of a file with several names in the root of a container. If the file is in a lower layer of an overlay,
    ///   the host's kernel copies it when it is changed, and only the name by which it is changed leads to the copy. So
    ///   the server must know which name the guest uses.
    pub(in crate::virtio::fs) fn name_cached_for(&mut self, number: u64, stat: &Statx) -> Duration {
        if self.is_exclusive && !self.let_name_be_cached(number) {
            return Duration::ZERO;
        }
        match self.table.get(number) {
            Some(node) if node.kind == FileType::Symlink && !node.is_own => Duration::ZERO,
            Some(node) if node.kind != FileType::Directory && node.is_own && stat.stx_nlink > 1 => {
                Duration::ZERO
            }
            _ => self.cached_for(number),
        }
    }

    /// The guest is told the name of a node, which it may cache for this long from now on. It takes some time until it
    /// has the answer.
    pub(in crate::virtio::fs) fn named(&mut self, number: u64, cached_for: Duration) {
        if let Some(node) = self.table.get_mut(number) {
            // By another name of the file it may be cached for longer.
            let until = Instant::now() + cached_for + UNTIL_ANSWERED;
            node.name_is_cached_until = node.name_is_cached_until.max(until);
        }
    }

    /// The guest is told the attributes of a file.
    pub(in crate::virtio::fs) fn told(&mut self, number: u64, stat: &Statx) {
        let Some(node) = self.table.get_mut(number) else { return };
        node.group = stat.stx_gid;
        if node.is_own {
            node.told = Some(Told { size: stat.stx_size, at: Instant::now() });
        }
    }

    /// The guest changes the size of a file itself.
    pub(in crate::virtio::fs) fn resized(&mut self, number: u64) {
        if let Some(node) = self.table.get_mut(number) {
            node.told = None;
        }
    }

    /// Returns true if the guest may know another size of a file than that of `stat`, because the host has changed the
    /// file. The next call then returns false. The guest never reads beyond the size that it knows.
    pub(in crate::virtio::fs) fn forget_other_size(&mut self, number: u64, stat: &Statx) -> bool {
        let Some(node) = self.table.get_mut(number) else { return false };
        node.told.take_if(|told| told.is_other_size(stat)).is_some()
    }

    /// What the guest knows of a file or a directory that has this version now. Nothing is remembered.
    pub(in crate::virtio::fs) fn knows(&self, number: u64, stat: &Statx, version: u64) -> Known {
        match self.table.get(number) {
            Some(node) if node.told.as_ref().is_some_and(|told| told.is_other_size(stat)) => Known::OtherSize,
            Some(node) if node.version == version && version != 0 => Known::SameVersion,
            _ => Known::OtherVersion,
        }
    }

    /// Stores the version of the contents of a file. Returns true if the same version was stored before. Version 0
    /// never counts as the same.
    pub(in crate::virtio::fs) fn remember_version(&mut self, number: u64, version: u64) -> Result<bool> {
        let known = &mut self.node(number)?.version;
        Ok(std::mem::replace(known, version) == version && version != 0)
    }
}
