//! The lock of `bulkhead install` and `bulkhead uninstall`. Two of them at once, such as that of a package and that of
//! a DaemonSet, would each undo a part of the other's work.

use std::{
    env,
    fs::{self, DirBuilder, File},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use bulkhead_host_shim::operator::{is_bare, one_line};
use rustix::{
    fs::{AtFlags, FlockOperation, Mode, OFlags, flock, open, openat, statat, unlinkat},
    io::Errno,
    process::geteuid,
};

use crate::{error::CommandError, progress::during};

/// The directory of the lock, below the root directory. Only root can look into it, so nobody else can hold the lock.
pub(crate) const DIRECTORY: &str = "run/bulkhead-install";
const FILE: &str = "lock";

/// How long the removal of a package waits: dpkg waits for it. Whoever installs can wait for a restart of containerd.
pub(super) const OF_INSTALL: Duration = Duration::from_secs(90);
pub(super) const OF_UNINSTALL: Duration = Duration::from_secs(20);

/// How often it is tried.
const PAUSE: Duration = Duration::from_millis(20);

/// The most that is said of the command which holds the lock.
const LONGEST: usize = 300;

/// The lock, until this is dropped. The kernel ends the lock of a process that is killed. Its file is left.
#[derive(Debug)]
pub(super) struct Lock {
    /// The directory, and its path.
    directory: File,
    path: PathBuf,
    /// The locked file.
    _file: File,
    /// The directory above, if it was made for this.
    made: Option<PathBuf>,
}

impl Lock {
    /// Takes the lock of the host whose root directory is `root`. Fails if another process holds it for longer than
    /// `within`.
    pub(super) fn take(root: &Path, within: Duration) -> Result<Self, CommandError> {
        let path = root.join(DIRECTORY);
        let begun = Instant::now();
        during("waiting for another installation or removal", false, |_| {
            loop {
                match Self::try_take(&path) {
                    Ok(Some(lock)) => return Ok(lock),
                    Ok(None) if begun.elapsed() < within => thread::sleep(PAUSE),
                    Ok(None) => {
                        let holder = holder(&path);
                        return Err(CommandError::Locked { path, holder, seconds: within.as_secs() });
                    }
                    Err(source) => return Err(CommandError::Lock { path, source }),
                }
            }
        })
    }

    /// None: another process has it, or has just removed its file.
    fn try_take(path: &Path) -> io::Result<Option<Self>> {
        let parent = path.parent().filter(|parent| !parent.exists());
        if let Some(parent) = parent {
            fs::create_dir_all(parent)?;
        }
        match DirBuilder::new().mode(0o700).create(path) {
            // Whoever had the lock before has removed the directory above.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = match open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            opened => File::from(opened?),
        };
        let metadata = directory.metadata()?;
        if metadata.uid() != geteuid().as_raw() || metadata.mode() & 0o077 != 0 {
            return Err(io::Error::other("others can use this directory; remove it"));
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = match openat(&directory, FILE, flags, Mode::from(0o600)) {
            Err(Errno::NOENT) => return Ok(None),
            opened => File::from(opened?),
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Ok(None),
            locked => locked?,
        }
        // Whoever had the lock before removes the file, and then the directory.
        let opened = file.metadata()?;
        let is_there = statat(&directory, FILE, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|found| (found.st_dev, found.st_ino) == (opened.dev(), opened.ino()));
        if !is_there {
            return Ok(None);
        }
        // On a full disk the lock counts all the same, and others cannot say whose it is.
        _ = file.set_len(0).and_then(|()| writeln!(file, "{}", this_process()));
        let made = parent.map(Path::to_owned);
        Ok(Some(Self { directory, path: path.into(), _file: file, made }))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Others may wait for it, and find a new file. What cannot be removed is found unlocked by the next one.
        _ = unlinkat(&self.directory, FILE, AtFlags::empty());
        for directory in [Some(&self.path), self.made.as_ref()].into_iter().flatten() {
            _ = fs::remove_dir(directory);
        }
    }
}

/// The pid and the command of this process.
fn this_process() -> String {
    let words: Vec<_> = env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    format!("{} {}", std::process::id(), one_line(&words.join(" ")))
}

/// Who has the lock in the directory.
fn holder(directory: &Path) -> String {
    let mut text = String::new();
    let read = File::open(directory.join(FILE))
        .and_then(|file| file.take(LONGEST as u64 * 4).read_to_string(&mut text));
    let first = read.ok().and_then(|_| text.lines().next()).and_then(|line| line.split_once(' '));
    match first {
        Some((pid, command)) => {
            let command: String = one_line(command).chars().take(LONGEST).collect();
            format!("the process {} (`{command}`)", one_line(pid))
        }
        None => "another `bulkhead install` or `bulkhead uninstall`".into(),
    }
}

/// What a killed command has left of the lock below the root directory. `None`: nothing, or a living one has it.
pub(crate) fn leftover(root: &Path) -> Option<PathBuf> {
    let path = root.join(DIRECTORY);
    let is_free = match File::open(path.join(FILE)) {
        Ok(file) => file.try_lock_shared().is_ok(),
        // A command that has just made the directory makes the file next.
        Err(error) => error.kind() == io::ErrorKind::NotFound && is_bare(&path),
    };
    is_free.then_some(path)
}

/// Removes it, unless a command has begun meanwhile.
pub(crate) fn remove_leftover(root: &Path) -> Option<(PathBuf, Result<(), CommandError>)> {
    let path = leftover(root)?;
    let removed = match Lock::try_take(&path) {
        Ok(lock) => {
            drop(lock?);
            Ok(())
        }
        Err(source) => Err(CommandError::Lock { path: path.clone(), source }),
    };
    Some((path, removed))
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, sync::mpsc, time::SystemTime};

    use super::*;

    const SHORT: Duration = Duration::from_millis(100);

    #[test]
    fn one_has_the_lock_and_the_other_is_told_who() {
        let root = tempfile::tempdir().unwrap();
        let lock = Lock::take(root.path(), SHORT).unwrap();
        let error = Lock::take(root.path(), SHORT).unwrap_err().to_string();
        let holder = format!("the process {} (`", std::process::id());
        assert!(error.contains(&holder) && error.contains("run this again"), "{error}");
        assert_eq!(leftover(root.path()), None);
        drop(lock);
        assert!(!root.path().join("run").exists(), "something is left");
        drop(Lock::take(root.path(), SHORT).unwrap());
    }

    #[test]
    fn what_a_killed_one_has_left_keeps_nobody() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join(DIRECTORY);
        fs::create_dir_all(root.path().join("run")).unwrap();
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        assert_eq!(leftover(root.path()), None, "its command may have just begun");
        let old = SystemTime::now() - Duration::from_secs(120);
        File::open(&path).unwrap().set_modified(old).unwrap();
        assert_eq!(leftover(root.path()).as_deref(), Some(&*path));
        fs::write(path.join(FILE), "1 bulkhead install\n").unwrap();
        let lock = Lock::take(root.path(), SHORT).unwrap();
        assert!(remove_leftover(root.path()).is_none());
        assert!(path.join(FILE).exists());
        drop(lock);
        assert!(!path.exists());
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        fs::write(path.join(FILE), "").unwrap();
        remove_leftover(root.path()).unwrap().1.unwrap();
        assert!(!path.exists() && root.path().join("run").exists());
    }

    #[test]
    fn what_somebody_else_has_put_there_is_refused() {
        let (root, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = root.path().join(DIRECTORY);
        fs::create_dir_all(root.path().join("run")).unwrap();
        symlink(elsewhere.path(), &path).unwrap();
        Lock::take(root.path(), SHORT).unwrap_err();
        fs::remove_file(&path).unwrap();
        DirBuilder::new().mode(0o755).create(&path).unwrap();
        Lock::take(root.path(), SHORT).unwrap_err();
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    }

    #[test]
    fn only_one_of_many_has_it() {
        let root = tempfile::tempdir().unwrap();
        let (sender, held) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..8 {
                let (sender, root) = (sender.clone(), root.path());
                scope.spawn(move || {
                    for _ in 0..20 {
                        let lock = Lock::take(root, Duration::from_secs(60)).unwrap();
                        let only = root.join("only");
                        sender.send(fs::create_dir(&only).and_then(|()| fs::remove_dir(&only))).unwrap();
                        drop(lock);
                    }
                });
            }
        });
        drop(sender);
        assert!(held.iter().all(|held| held.is_ok()));
    }
}
