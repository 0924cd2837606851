//! `/run/bulkhead-run/ID`: everything of one run, but for what the shim has. The directory is locked while its run
//! lives. Another run, or `bulkhead gc`, removes one that nobody has locked.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
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

/// How many leftovers are removed at once. One may hang.
const AT_ONCE: usize = 8;

/// The directory of this run.
#[derive(Debug)]
pub(super) struct RunDirectory {
    directory: LockedDirectory,
    /// Whether a shim was started and has not ended in order.
    pub(super) has_shim: Arc<AtomicBool>,
}

impl RunDirectory {
    /// Makes and locks it.
    pub(super) fn create() -> Result<Self, RunError> {
        let root = Path::new(ROOT);
        let directory = LockedDirectory::create_in(root, "").map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied => RunError::Denied { path: root.into() },
            _ => RunError::Prepare { path: root.into(), source },
        })?;
        Ok(Self { directory, has_shim: Arc::default() })
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
        let (path, id) = (self.path(), self.id());
        let has_shim = self.has_shim.load(Ordering::Relaxed);
        remove(path, id, || if has_shim { shim::delete(id, path) } else { Ok(()) })
    }
}

/// Does as much as it can. Returns the first error. As long as something is left, the directory stays: it tells the
/// next run, or `bulkhead gc`, to try again.
fn remove(path: &Path, id: &str, delete: impl FnOnce() -> Result<(), RunError>) -> Result<(), RunError> {
    let deleted = delete();
    let disconnected = nat::disconnect(path, id);
    // It takes the most memory.
    let unmounted = unmount_layer(path);
    deleted.and(disconnected).and(unmounted)?;
    locked_directory::remove(path).map_err(|source| RunError::Remove { path: path.into(), source })
}

fn unmount_layer(path: &Path) -> Result<(), RunError> {
    let layer = path.join(LAYER);
    if !layer.exists() {
        return Ok(());
    }
    match unmount(&layer, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        // It is not mounted.
        Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
        Err(errno) => Err(RunError::Remove { path: path.into(), source: errno.into() }),
    }
}

/// The directories of runs that were killed.
pub(crate) fn leftovers() -> Vec<PathBuf> {
    locked_directory::leftovers(Path::new(ROOT)).map(|(path, _)| path).collect()
}

/// Removes what runs have left that were killed, and what their shims still have and run. Returns each directory when
/// that is done, and why it is still there.
pub(crate) fn remove_leftovers() -> impl Iterator<Item = (PathBuf, Result<(), RunError>)> {
    at_once(locked_directory::filled_leftovers(Path::new(ROOT)), |(path, _lock): (PathBuf, File)| {
        let id = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let removed = remove(&path, &id, || shim::delete(&id, &path));
        (path, removed)
    })
}

/// Works on [`AT_ONCE`] items at the same time, so that one that hangs delays no other. Returns each result as it
/// comes.
fn at_once<T: Send + 'static, R: Send + 'static>(
    items: impl Iterator<Item = T> + Send + 'static,
    work: fn(T) -> R,
) -> impl Iterator<Item = R> {
    let items = Arc::new(Mutex::new(items));
    let (sender, results) = mpsc::channel();
    for _ in 0..AT_ONCE {
        let (items, sender) = (Arc::clone(&items), sender.clone());
        let next = move || items.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(first) = next() else { break };
        thread::spawn(move || {
            let mut item = Some(first);
            while let Some(one) = item {
                // An error: nobody waits for it any more.
                _ = sender.send(work(one));
                item = next();
            }
        });
    }
    results.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_step_leaves_does_not_keep_the_next_one_and_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("id");
        fs::create_dir_all(path.join(LAYER)).unwrap();
        mount("bulkhead-run", path.join(LAYER), "tmpfs", MountFlags::empty(), None).unwrap();
        fs::write(path.join(LAYER).join("big"), "").unwrap();
        let refused = || Err(RunError::NoCommand);
        assert!(matches!(remove(&path, "id", refused), Err(RunError::NoCommand)));
        // The file in memory is gone, and the directory is not.
        assert!(path.join(LAYER).exists() && !path.join(LAYER).join("big").exists());
        remove(&path, "id", || Ok(())).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn one_that_hangs_delays_no_other() {
        let (release, hangs) = mpsc::channel::<()>();
        let (items, many) = (AT_ONCE * 3, AT_ONCE * 3 - 1);
        let mut hangs = Some(hangs);
        let items = (0..items).map(move |number| (number, if number == 0 { hangs.take() } else { None }));
        let work = |(number, hangs): (usize, Option<mpsc::Receiver<()>>)| {
            hangs.map(|hangs| hangs.recv());
            number
        };
        let mut results = at_once(items, work);
        let mut first: Vec<_> = results.by_ref().take(many).collect();
        first.sort_unstable();
        assert_eq!(first, (1..=many).collect::<Vec<_>>());
        drop(release);
        assert_eq!((results.next(), results.next()), (Some(0), None));
    }
}
