//! Files that are replaced as a whole, and removed only if nobody has changed them.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use crate::error::CommandError;

/// An error of a new file.
pub(super) enum WriteError {
    Io(io::Error),
    Command(CommandError),
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl WriteError {
    pub(super) fn at(self, path: &Path) -> CommandError {
        match self {
            Self::Io(source) => CommandError::Write { path: path.into(), source },
            Self::Command(error) => error,
        }
    }
}

/// The text of a file. None: there is none.
pub(super) fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Replaces a file, or makes it and its directory. At any time there is the old file or the new one. A symbolic link
/// stays one. `check` is given the path of the new file, and can still refuse it.
pub(super) fn write<E: From<io::Error>>(
    path: &Path,
    text: &str,
    check: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let path = match fs::canonicalize(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => match fs::read_link(path) {
            // The link would be lost.
            Ok(to) => {
                let reason = format!("it is a symbolic link to {}, which is not there", to.display());
                return Err(io::Error::other(format!("{reason}; make that file, or remove the link")).into());
            }
            Err(_) => path.to_owned(),
        },
        other => other?,
    };
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    remove_unfinished(&path)?;
    let new = unfinished(&path);
    let written = fill(&new, &path, text).map_err(E::from).and_then(|()| check(&new));
    // A file that is mounted there cannot be replaced.
    let replaced = written.and_then(|()| fs::rename(&new, &path).map_err(E::from));
    if replaced.is_err() {
        // The error says what is wrong.
        let _ = fs::remove_file(&new);
        return replaced;
    }
    // What is written next must not be on the disk before this.
    Ok(File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()?)
}

/// The name of a new file until it is complete. There is one writer at a time.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".bulkhead-new");
    path.with_file_name(name)
}

/// Removes what a writer that was killed has left beside the file.
pub(super) fn remove_unfinished(path: &Path) -> io::Result<()> {
    // It is beside the file to which a symbolic link leads, as the writer has it.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.into());
    match fs::remove_file(unfinished(&path)) {
        Err(e) if !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Err(e),
        _ => Ok(()),
    }
}

/// Writes the new file with the owner and the mode of the old one. Whoever owns the directory can put a link in the
/// place of the new file, so that is not named again.
fn fill(new: &Path, old: &Path, text: &str) -> io::Result<()> {
    let mut file = make(new)?;
    let mode = match fs::metadata(old) {
        Ok(metadata) => {
            fchown(&file, Some(metadata.uid()), Some(metadata.gid()))?;
            metadata.mode() & 0o7777
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0o644,
        Err(error) => return Err(error),
    };
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    // So that a crash of the host leaves the old file or the new one.
    File::open(new.parent().unwrap_or(Path::new("/")))?.sync_all()
}

/// Makes the new file. Whoever opens it keeps it open, so nobody else may do that before it has its mode.
fn make(new: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)
}

/// What became of a file that was to be removed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Removal {
    /// There was none.
    Absent,
    Removed,
    /// It has another text than what was installed.
    Changed,
}

/// Removes the file if `is_own` returns true for its text.
pub(super) fn remove(path: &Path, is_own: impl FnOnce(&str) -> bool) -> io::Result<Removal> {
    match read(path)? {
        None => Ok(Removal::Absent),
        Some(found) if is_own(&found) => fs::remove_file(path).map(|()| Removal::Removed),
        Some(_) => Ok(Removal::Changed),
    }
}

/// Removes a directory of /run with what it has for each containerd and each namespace, as far as nothing is left
/// there. What the directories of pods have is not looked at, because guests can change some of it.
pub(super) fn remove_empty(root: &Path) {
    let below = |directory: &Path| {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let directories = entries.filter(|entry| entry.file_type().is_ok_and(|it| it.is_dir()));
        directories.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    // It fails if there is something. A shim that begins makes them again.
    let remove = |directory: &Path| drop(fs::remove_dir(directory));
    for of_containerd in below(root) {
        below(&of_containerd).iter().for_each(|of_namespace| remove(of_namespace));
        remove(&of_containerd);
    }
    remove(root);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn replace(path: &Path, text: &str) -> io::Result<()> {
        write(path, text, |_| Ok::<_, io::Error>(()))
    }

    #[test]
    fn a_file_keeps_its_mode_and_a_link_stays_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        replace(&at("new/deep/file"), "one").unwrap();
        fs::set_permissions(at("new/deep/file"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink(at("new/deep/file"), at("link")).unwrap();
        replace(&at("link"), "two").unwrap();
        assert_eq!(read(&at("new/deep/file")).unwrap().as_deref(), Some("two"));
        assert_eq!(fs::metadata(at("new/deep/file")).unwrap().mode() & 0o777, 0o600);
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
    }

    #[test]
    fn what_a_killed_one_has_left_keeps_nobody_and_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        replace(&at("file"), "old").unwrap();
        fs::write(at("other"), "not ours").unwrap();
        symlink(at("other"), at("file.bulkhead-new")).unwrap();
        replace(&at("file"), "new").unwrap();
        assert_eq!(fs::read_to_string(at("file")).unwrap(), "new");
        assert_eq!(fs::read_to_string(at("other")).unwrap(), "not ours");
        // One that nothing replaces is removed too, also beside the file of a link.
        symlink(at("file"), at("link")).unwrap();
        for name in ["file", "link"] {
            fs::write(at("file.bulkhead-new"), "a part").unwrap();
            remove_unfinished(&at(name)).unwrap();
            remove_unfinished(&at(name)).unwrap();
            assert!(!at("file.bulkhead-new").exists());
        }
    }

    #[test]
    fn nobody_else_can_open_a_new_file_before_it_has_the_mode_of_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert_eq!(make(&at("new")).unwrap().metadata().unwrap().mode() & 0o777, 0o600);
        replace(&at("file"), "text").unwrap();
        assert_eq!(fs::metadata(at("file")).unwrap().mode() & 0o777, 0o644);
        // Nobody knows the mode of what cannot be looked at.
        fill(&at("other"), &at("file/old"), "text").unwrap_err();
    }

    #[test]
    fn what_is_refused_leaves_the_old_file_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace(&path, "old").unwrap();
        let refused = write(&path, "new", |new| {
            assert_eq!(fs::read_to_string(new)?, "new");
            Err(io::Error::other("no"))
        });
        assert!(refused.is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(remove(&path, |text| text == "new").unwrap(), Removal::Changed);
        assert_eq!(remove(&path, |text| text == "old").unwrap(), Removal::Removed);
        assert_eq!(remove(&path, |text| text == "old").unwrap(), Removal::Absent);
    }

    #[test]
    fn directories_without_a_pod_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("bulkhead");
        fs::create_dir_all(root.join("one/empty")).unwrap();
        fs::create_dir_all(root.join("other/ns/pod/share")).unwrap();
        remove_empty(&root);
        assert!(!root.join("one").exists() && root.join("other/ns/pod/share").exists());
        fs::remove_dir_all(root.join("other/ns/pod")).unwrap();
        remove_empty(&root);
        assert!(!root.exists());
        remove_empty(&root);
    }
}
