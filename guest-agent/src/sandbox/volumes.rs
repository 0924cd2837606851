//! Volumes in memory, which the containers of the pod share. They exist until the guest ends.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use bulkhead_agent_api::VOLUMES_DIR;
use nix::mount::{MsFlags, mount};

/// A volume to be made.
#[derive(Debug, Clone)]
pub struct Volume {
    /// A plain name.
    pub name: String,
    /// The most that fits in.
    pub bytes: u64,
    /// Of its topmost directory.
    pub mode: u32,
    /// Of its topmost directory.
    pub uid: u32,
    /// Of its topmost directory.
    pub gid: u32,
}

impl Volume {
    /// Where containers find it. None: the name would lead elsewhere.
    fn path(&self) -> Option<PathBuf> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        let is_name = !self.name.is_empty() && self.name.bytes().all(is_plain);
        is_name.then(|| Path::new(VOLUMES_DIR).join(&self.name))
    }

    /// Makes the volume, unless there is one of this name.
    pub(super) fn make(&self) -> io::Result<()> {
        let path =
            self.path().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a plain name"))?;
        fs::create_dir_all(&path)?;
        if fs::metadata(&path)?.dev() != fs::metadata(VOLUMES_DIR)?.dev() {
            return Ok(());
        }
        let Self { bytes, mode, uid, gid, .. } = self;
        // The size 0 would be no limit. Inodes need none: the container that makes a file is charged for it.
        let options = format!("size={},nr_inodes=0,mode={mode:o},uid={uid},gid={gid}", (*bytes).max(1));
        mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_nowhere_else() {
        let path =
            |name: &str| Volume { name: name.to_owned(), bytes: 1, mode: 0o777, uid: 0, gid: 0 }.path();
        assert_eq!(path("0-52"), Some(Path::new(VOLUMES_DIR).join("0-52")));
        assert!(["", ".", "..", "a/b", "a\0"].iter().all(|name| path(name).is_none()));
    }
}
