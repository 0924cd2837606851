//! `/run/bulkhead-run/ID`: everything of one run, but for what the shim has. The directory is locked while its run
//! lives. Another run, or `bulkhead gc`, removes one that nobody has locked.

use std::{
    cell::Cell,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::{
    process::locked_directory::{self, LockedDirectory},
    run::{error::RunError, nat, shim},
};

/// Where the directories of all runs are.
pub(crate) const ROOT: &str = "/run/bulkhead-run";

/// A file system in memory for what the program writes to its root.
const LAYER: &str = "layer";

/// How many bytes a file of the program has on average, at least.
const BYTES_OF_A_FILE: u64 = 4096;

/// How many files it may have, however few bytes.
const FEWEST_FILES: u64 = 4096;

/// The directory of this run.
#[derive(Debug)]
pub(super) struct RunDirectory {
    directory: LockedDirectory,
    /// Whether a shim was started and has not ended in order.
    pub(super) has_shim: Cell<bool>,
}

impl RunDirectory {
    /// Makes and locks it.
    pub(super) fn create() -> Result<Self, RunError> {
        let root = Path::new(ROOT);
        let directory = LockedDirectory::create_in(root, "").map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied => RunError::Denied { path: root.into() },
            _ => RunError::Prepare { path: root.into(), source },
        })?;
        Ok(Self { directory, has_shim: Cell::new(false) })
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The name of the directory, and of the container.
    pub(super) fn id(&self) -> &str {
        self.directory.name()
    }

    /// Mounts a file system in memory of this size, in which the upper layer of an overlay is to be made.
    pub(super) fn mount_layer(&self, bytes: u64) -> Result<PathBuf, RunError> {
        let path = self.path().join(LAYER);
        let failed = |source| RunError::Prepare { path: path.clone(), source };
        fs::create_dir(&path).map_err(failed)?;
        // Files without contents take memory too.
        let files = bytes / BYTES_OF_A_FILE + FEWEST_FILES;
        let options = format!("size={bytes},nr_inodes={files},mode=700");
        let options = std::ffi::CString::new(options).unwrap_or_default();
        // Nothing in it is for the host.
        let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
        mount("bulkhead-run", &path, "tmpfs", flags, options.as_c_str())
            .map_err(|errno| failed(errno.into()))?;
        Ok(path)
    }

    /// Removes it, and what its shim has left.
    pub(super) fn remove(&self) -> Result<(), RunError> {
        if self.has_shim.get() {
            shim::delete(self.id(), self.path())?;
        }
        nat::disconnect(self.path(), self.id())?;
        remove_files(self.path())
    }
}

fn remove_files(path: &Path) -> Result<(), RunError> {
    let failed = |source| RunError::Remove { path: path.into(), source };
    let layer = path.join(LAYER);
    if layer.exists() {
        match unmount(&layer, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // It is not mounted.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
    }
    locked_directory::remove(path).map_err(failed)
}

/// The directories of runs that were killed.
pub(crate) fn leftovers() -> Vec<PathBuf> {
    locked_directory::leftovers(Path::new(ROOT)).map(|(path, _)| path).collect()
}

/// Removes what runs have left that were killed, and what their shims still have and run. Returns the directories, and
/// why one is still there.
pub(crate) fn remove_leftovers() -> Vec<(PathBuf, Result<(), RunError>)> {
    let remove = |(path, _lock): (PathBuf, File)| {
        let id = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let removed = shim::delete(&id, &path)
            .and_then(|()| nat::disconnect(&path, &id))
            .and_then(|()| remove_files(&path));
        (path, removed)
    };
    locked_directory::filled_leftovers(Path::new(ROOT)).map(remove).collect()
}
