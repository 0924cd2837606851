//! What a VM is made of, as far as another must be the same to go on from where it was saved.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::VmConfig;

/// What is the same in a VM that was saved and in those that are restored of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// VMM, kernel and initramfs.
    pub parts: Vec<Part>,
    /// As [`VmConfig::kernel_args`].
    pub kernel_args: Vec<String>,
    /// As [`VmConfig::vcpus`].
    pub vcpus: u8,
    /// As [`VmConfig::memory_mib`].
    pub memory_mib: u32,
    /// As [`VmConfig::max_memory_mib`].
    pub max_memory_mib: Option<u32>,
}

/// A part that cannot be looked at.
#[derive(Debug)]
pub struct PartError {
    /// Which.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

impl Shape {
    /// Of a VM of this configuration, run by the VMM whose program is at `vmm`.
    pub fn of(config: &VmConfig, vmm: &Path) -> Result<Self, PartError> {
        let parts = [vmm, &config.kernel, &config.initramfs]
            .map(|path| Part::of(path).map_err(|source| PartError { path: path.to_owned(), source }));
        Ok(Self {
            parts: parts.into_iter().collect::<Result<_, _>>()?,
            kernel_args: config.kernel_args.clone(),
            vcpus: config.vcpus,
            memory_mib: config.memory_mib,
            max_memory_mib: config.max_memory_mib,
        })
    }
}

/// A file as it is now: two of the same path are equal as long as nobody wrote to it or put another in its place. That
/// is told without reading it, which would take longer than the VM's start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Where it is.
    pub path: PathBuf,
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds of its last change: no program can set this one back.
    changed: (i64, i64),
}

impl Part {
    /// The file at `path`, through links.
    pub fn of(path: &Path) -> io::Result<Self> {
        let file = fs::metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            device: file.dev(),
            inode: file.ino(),
            bytes: file.size(),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }

    /// Whether the file is still that one.
    pub fn is_unchanged(&self) -> bool {
        Self::of(&self.path).is_ok_and(|now| now == *self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_to_or_replaced_is_another() {
        let dir = std::env::temp_dir().join(format!("bulkhead-part-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = dir.join("part");
        fs::write(&path, "one").unwrap();
        let part = Part::of(&path).unwrap();
        assert!(part.is_unchanged());
        assert_eq!(serde_json::from_str::<Part>(&serde_json::to_string(&part).unwrap()).unwrap(), part);
        fs::write(&path, "longer").unwrap();
        assert!(!part.is_unchanged());
        let part = Part::of(&path).unwrap();
        fs::write(dir.join("other"), "longer").unwrap();
        fs::rename(dir.join("other"), &path).unwrap();
        assert!(!part.is_unchanged());
        fs::remove_dir_all(&dir).unwrap();
        assert!(!part.is_unchanged());
    }
}
