//! The properties in which a saved VM and a VM that is restored from it must be equal.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{Transport, VmConfig};

/// The files, the kernel arguments, the sizes and the transport of one VM. Its clones have equal ones.
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
    /// As [`VmConfig::transport`].
    pub transport: Transport,
}

/// A file whose metadata cannot be read.
#[derive(Debug)]
pub struct PartError {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub source: io::Error,
}

impl Shape {
    /// The shape of a VM with this configuration. `vmm` is the program of the VMM.
    pub fn of(config: &VmConfig, vmm: &Path) -> Result<Self, PartError> {
        let parts = [vmm, &config.kernel, &config.initramfs]
            .map(|path| Part::of(path).map_err(|source| PartError { path: path.to_owned(), source }));
        Ok(Self {
            parts: parts.into_iter().collect::<Result<_, _>>()?,
            kernel_args: config.kernel_args.clone(),
            vcpus: config.vcpus,
            memory_mib: config.memory_mib,
            max_memory_mib: config.max_memory_mib,
            transport: config.transport,
        })
    }
}

/// A file and its current metadata. Two values for the same path are equal if the file was neither written to nor
/// replaced meanwhile. Comparing the contents would take longer than the start of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// The path of the file.
    pub path: PathBuf,
    device: u64,
    inode: u64,
    bytes: u64,
    /// The time of the last status change (st_ctime), in seconds and nanoseconds. A program cannot set it.
    changed: (i64, i64),
}

impl Part {
    /// Reads the metadata of the file at `path`. Follows symbolic links.
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

    /// Whether the file was neither written to nor replaced since.
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
