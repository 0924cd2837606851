//! `/run/bulkhead-run/ID`: everything of one run, but for what the shim has. The directory is locked while its run
//! lives. Another run, or `bulkhead gc`, removes one that nobody has locked.

use std::{
    cell::Cell,
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::run::{error::RunError, nat, shim};

/// Where the directories of all runs are.
const ROOT: &str = "/run/bulkhead-run";

/// A file system in memory for what the program writes to its root.
const LAYER: &str = "layer";

/// How many bytes a file of the program has on average, at least.
const BYTES_OF_A_FILE: u64 = 4096;

/// How many files it may have, however few bytes.
const FEWEST_FILES: u64 = 4096;

/// How often another run may remove the empty [`ROOT`] before a directory is made in it.
const TRIES: u32 = 16;

/// The letters of an id. With fewer, two runs would have the same one day.
const ID: usize = 12;

/// The directory of this run.
#[derive(Debug)]
pub(super) struct RunDirectory {
    path: PathBuf,
    id: String,
    /// Whether a shim was started and has not ended in order.
    pub(super) has_shim: Cell<bool>,
    _lock: File,
}

impl RunDirectory {
    /// Makes and locks it.
    pub(super) fn create() -> Result<Self, RunError> {
        Self::create_in(Path::new(ROOT))
    }

    fn create_in(root: &Path) -> Result<Self, RunError> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for _ in 0..TRIES {
            let id = new_id().map_err(|source| RunError::Prepare { path: root.into(), source })?;
            let path = root.join(&id);
            match make_locked(&path) {
                Ok(Some(lock)) => return Ok(Self { path, id, has_shim: Cell::new(false), _lock: lock }),
                Ok(None) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => last = e,
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(RunError::Denied { path });
                }
                Err(source) => return Err(RunError::Prepare { path, source }),
            }
        }
        Err(RunError::Prepare { path: root.into(), source: last })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The name of the directory, and of the container.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Mounts a file system in memory of this size, in which the upper layer of an overlay is to be made.
    pub(super) fn mount_layer(&self, bytes: u64) -> Result<PathBuf, RunError> {
        let path = self.path.join(LAYER);
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
            shim::delete(&self.id, &self.path)?;
        }
        nat::disconnect(&self.path, &self.id)?;
        remove_files(&self.path)
    }
}

fn new_id() -> io::Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    Ok(text.chars().filter(char::is_ascii_hexdigit).take(ID).collect())
}

/// None: somebody has removed it before it was locked.
fn make_locked(path: &Path) -> io::Result<Option<File>> {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    if let Some(root) = path.parent() {
        match builder.create(root) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
    }
    builder.create(path)?;
    let lock = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    lock.lock()?;
    Ok(if is_at(path, &lock)? { Some(lock) } else { None })
}

/// Whether the open directory is the one with this path.
fn is_at(path: &Path, opened: &File) -> io::Result<bool> {
    let opened = opened.metadata()?;
    Ok(fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (opened.dev(), opened.ino())))
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
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    if let Some(root) = path.parent() {
        // Another run has its directory there.
        drop(fs::remove_dir(root));
    }
    Ok(())
}

/// The directories of runs that were killed.
pub(crate) fn leftovers() -> Vec<PathBuf> {
    locked_leftovers(Path::new(ROOT)).map(|(path, _)| path).collect()
}

/// Removes what runs have left that were killed, and what their shims still have and run. Returns the directories, and
/// why one is still there.
pub(crate) fn remove_leftovers() -> Vec<(PathBuf, Result<(), RunError>)> {
    let remove = |(path, _lock): (PathBuf, File)| {
        // One that is empty may be that of a run that begins, which then makes another.
        if fs::remove_dir(&path).is_ok() {
            return None;
        }
        let id = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let removed = shim::delete(&id, &path)
            .and_then(|()| nat::disconnect(&path, &id))
            .and_then(|()| remove_files(&path));
        Some((path, removed))
    };
    locked_leftovers(Path::new(ROOT)).filter_map(remove).collect()
}

/// What nobody else has locked is locked by the caller.
fn locked_leftovers(root: &Path) -> impl Iterator<Item = (PathBuf, File)> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter_map(|path| {
        let lock = File::open(&path).ok()?;
        lock.try_lock().ok()?;
        // Its run may have removed it in between.
        is_at(&path, &lock).ok()?.then_some((path, lock))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_belongs_to_its_run_while_that_lives() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        let (one, other) = (RunDirectory::create_in(&root).unwrap(), RunDirectory::create_in(&root).unwrap());
        assert_ne!(one.id(), other.id());
        assert_eq!((one.id().len(), fs::metadata(one.path()).unwrap().mode() & 0o777), (ID, 0o700));
        assert_eq!(locked_leftovers(&root).count(), 0);
        let path = one.path().to_owned();
        // As if it were killed.
        drop(one);
        let left: Vec<_> = locked_leftovers(&root).map(|(path, _)| path).collect();
        assert_eq!(left, std::slice::from_ref(&path));
        remove_files(&path).unwrap();
        other.remove().unwrap();
        assert!(!root.exists());
    }

    #[test]
    fn what_is_removed_under_a_run_that_begins_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/id");
        let lock = make_locked(&path).unwrap();
        assert!(lock.is_some());
        fs::remove_dir(&path).unwrap();
        assert!(make_locked(&path).unwrap().is_some());
        assert_eq!(make_locked(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
}
