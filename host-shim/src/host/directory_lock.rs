//! Locks on directories, by which shims of several pods take turns.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

/// How often it is tried.
const PAUSE: Duration = Duration::from_millis(5);

/// A lock, until this is dropped.
#[derive(Debug)]
pub(super) struct DirectoryLock(File);

impl DirectoryLock {
    /// Waits until nobody else has the lock on a directory. The kernel ends the lock of a process that ends. Blocks.
    pub(super) fn take(directory: &Path, within: Duration) -> io::Result<Self> {
        Self::take_opened(File::open(directory)?, within)
    }

    /// The same with an open directory, which nobody else may have open by the same file description.
    pub(super) fn take_opened(file: File, within: Duration) -> io::Result<Self> {
        let begun = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(file)),
                Err(Errno::WOULDBLOCK) if begun.elapsed() < within => thread::sleep(PAUSE),
                Err(Errno::WOULDBLOCK) => return Err(io::ErrorKind::TimedOut.into()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Whether the directory is still the one at `path`. Whoever had the lock before may have removed or replaced it.
    pub(super) fn is_still_at(&self, path: &Path) -> io::Result<bool> {
        is_still_at(path, &self.0)
    }
}

/// Whether the open directory is the one at `path`.
pub(super) fn is_still_at(path: &Path, directory: &File) -> io::Result<bool> {
    let opened = directory.metadata()?;
    match fs::metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (opened.dev(), opened.ino())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_the_lock_and_another_gives_up() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DirectoryLock::take(dir.path(), PAUSE).unwrap();
        let late = DirectoryLock::take(dir.path(), 4 * PAUSE).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        drop(lock);
        DirectoryLock::take(dir.path(), PAUSE).unwrap();
    }
}
