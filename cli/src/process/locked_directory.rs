//! A directory of one command, locked while the command lives. Another command removes one that nobody has locked.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

/// How often another command may remove the empty root before a directory is made in it.
const TRIES: u32 = 16;

/// The letters of an id. With fewer, two commands would have the same one day.
pub(crate) const ID: usize = 12;

/// A directory that only its user, root, can look into.
#[derive(Debug)]
pub(crate) struct LockedDirectory {
    path: PathBuf,
    name: String,
    _lock: File,
}

impl LockedDirectory {
    /// Makes and locks a directory in `root`, which is made too. Its name is `prefix` and an id.
    pub(crate) fn create_in(root: &Path, prefix: &str) -> io::Result<Self> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for _ in 0..TRIES {
            let name = format!("{prefix}{}", new_id()?);
            let path = root.join(&name);
            match make_locked(&path) {
                Ok(Some(lock)) => return Ok(Self { path, name, _lock: lock }),
                Ok(None) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => last = e,
                Err(e) => return Err(e),
            }
        }
        Err(last)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
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

/// Removes a directory and what is in it, and the directory of all if it is empty.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    if let Some(root) = path.parent() {
        // Another command has its directory there.
        drop(fs::remove_dir(root));
    }
    Ok(())
}

/// What nobody else has locked is locked by the caller.
pub(crate) fn leftovers(root: &Path) -> impl Iterator<Item = (PathBuf, File)> {
    directories(root).filter_map(|path| {
        let lock = File::open(&path).ok()?;
        lock.try_lock().ok()?;
        // Its command may have removed it in between.
        is_at(&path, &lock).ok()?.then_some((path, lock))
    })
}

/// The leftovers that are to be removed. One that is empty is removed at once: it may be that of a command that begins,
/// which then makes another.
pub(crate) fn filled_leftovers(root: &Path) -> impl Iterator<Item = (PathBuf, File)> {
    leftovers(root).filter(|(path, _)| fs::remove_dir(path).is_err())
}

/// How many commands live whose directories have this prefix.
pub(crate) fn count_living(root: &Path, prefix: &str) -> usize {
    let has_prefix = |path: &Path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(prefix))
    };
    let is_locked = |path: &PathBuf| {
        has_prefix(path) && File::open(path).is_ok_and(|directory| directory.try_lock_shared().is_err())
    };
    directories(root).filter(is_locked).count()
}

fn directories(root: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_belongs_to_its_command_while_that_lives() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        let create = |prefix| LockedDirectory::create_in(&root, prefix).unwrap();
        let (one, other) = (create("7-"), create("77-"));
        assert_ne!(one.name(), other.name());
        let mode = fs::metadata(one.path()).unwrap().mode() & 0o777;
        assert_eq!((one.name().len(), mode), (2 + ID, 0o700));
        assert_eq!(leftovers(&root).count(), 0);
        assert_eq!((count_living(&root, "7-"), count_living(&root, "8-")), (1, 0));
        let path = one.path().to_owned();
        // As if it were killed.
        drop(one);
        assert_eq!(count_living(&root, "7-"), 0);
        let left: Vec<_> = leftovers(&root).map(|(path, _)| path).collect();
        assert_eq!(left, std::slice::from_ref(&path));
        fs::write(path.join("file"), "").unwrap();
        assert_eq!(filled_leftovers(&root).count(), 1);
        fs::remove_file(path.join("file")).unwrap();
        assert_eq!((filled_leftovers(&root).count(), path.exists()), (0, false));
        remove(&path).unwrap();
        remove(other.path()).unwrap();
        assert!(!root.exists());
    }

    #[test]
    fn what_is_removed_under_a_command_that_begins_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/id");
        let lock = make_locked(&path).unwrap();
        assert!(lock.is_some());
        fs::remove_dir(&path).unwrap();
        assert!(make_locked(&path).unwrap().is_some());
        assert_eq!(make_locked(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
}
