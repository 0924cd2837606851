//! Volumes in memory, which the containers of the pod share. They exist until the guest ends.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
};

use bulkhead_agent_api::{HUGE_PAGE, VOLUMES_DIR};
use nix::{
    mount::{MsFlags, mount},
    sys::statvfs::statvfs,
};

use super::volume_files::{self, Entry};
use crate::mount_places::{is_mounted, place_in};

/// A volume to be made.
#[derive(Debug, Clone)]
pub struct Volume {
    /// A plain name.
    pub name: String,
    /// The most that fits in. 0 for huge pages: as much as there are pages.
    pub bytes: u64,
    /// Of its topmost directory.
    pub mode: u32,
    /// Of its topmost directory.
    pub uid: u32,
    /// Of its topmost directory.
    pub gid: u32,
    /// Whether its files are huge pages.
    pub huge_pages: bool,
}

/// Brings the files of the volume of this name to these.
pub(super) fn write(name: &str, entries: &[Entry]) -> io::Result<()> {
    volume_files::write(&place_of(name)?, entries)
}

/// How many bytes of memory the volume of this name takes: also for files that were removed, as long as a process has
/// them open.
pub(super) fn size(name: &str) -> io::Result<u64> {
    let size = statvfs(&place_of(name)?)?;
    Ok(size.blocks().saturating_sub(size.blocks_free()).saturating_mul(size.fragment_size()))
}

/// Where the volume of this name is mounted.
fn place_of(name: &str) -> io::Result<PathBuf> {
    let path = place_in(VOLUMES_DIR, name)?;
    if !is_mounted(VOLUMES_DIR, &path)? {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(path)
}

impl Volume {
    /// Makes the volume, unless there is one of this name.
    pub(super) fn make(&self) -> io::Result<()> {
        let path = place_in(VOLUMES_DIR, &self.name)?;
        fs::create_dir_all(&path)?;
        if is_mounted(VOLUMES_DIR, &path)? {
            return Ok(());
        }
        let (kind, options) = self.file_system();
        mount(Some(kind), &path, Some(kind), MsFlags::empty(), Some(options.as_str()))?;
        // hugetlbfs ignores the set-group-ID bit of its option, which kubelet sets for fsGroup.
        fs::set_permissions(&path, Permissions::from_mode(self.mode))
    }

    /// Its type, and the options of its mount.
    fn file_system(&self) -> (&'static str, String) {
        let Self { bytes, mode, uid, gid, .. } = self;
        let owner = format!("mode={mode:o},uid={uid},gid={gid}");
        match (self.huge_pages, bytes) {
            // The size 0 would be no limit. Inodes need none: the container that makes a file is charged for it.
            (false, _) => ("tmpfs", format!("size={},nr_inodes=0,{owner}", (*bytes).max(1))),
            (true, 0) => ("hugetlbfs", format!("pagesize={HUGE_PAGE},{owner}")),
            (true, _) => ("hugetlbfs", format!("pagesize={HUGE_PAGE},size={bytes},{owner}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_volume_is_a_tmpfs_or_has_huge_pages() {
        let of = |bytes, huge_pages| {
            let (mode, uid, gid) = (0o1777, 5, 6);
            Volume { name: "0-1".into(), bytes, mode, uid, gid, huge_pages }.file_system()
        };
        let owner = "mode=1777,uid=5,gid=6";
        assert_eq!(of(0, false), ("tmpfs", format!("size=1,nr_inodes=0,{owner}")));
        assert_eq!(of(4 << 20, true), ("hugetlbfs", format!("pagesize=2097152,size=4194304,{owner}")));
        // The size 0 would leave it without a page.
        assert_eq!(of(0, true), ("hugetlbfs", format!("pagesize=2097152,{owner}")));
    }

    #[test]
    fn a_name_leads_nowhere_else() {
        assert_eq!(place_in(VOLUMES_DIR, "0-52").unwrap(), Path::new(VOLUMES_DIR).join("0-52"));
        assert!(["", ".", "..", "a/b", "a\0"].iter().all(|name| place_in(VOLUMES_DIR, name).is_err()));
    }
}
