//! The one directory in which everything that takes long to make is kept between runs.
//!
//! An entry is named by what it is and by the digest of what it is made from, so a changed input makes a new
//! entry. It is made under a temporary name and renamed when it is whole, so an interrupted run leaves no half
//! entry, and under a lock, so two runs do not make the same thing at the same time.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::progress;

/// Entries of one name that are kept: those of the last few sets of inputs, such as two branches in turn.
const KEPT_PER_NAME: usize = 3;

/// Age at which a log is removed.
const LOG_LIFETIME: Duration = Duration::from_secs(7 * 24 * 3600);

/// A cache directory that exists.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// Opens `$BULKHEAD_CACHE`, else `$XDG_CACHE_HOME/bulkhead`, else `~/.cache/bulkhead`, and makes it if need be.
    pub(crate) fn open() -> Result<Cache> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let dir = set("BULKHEAD_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("bulkhead")))
            .or_else(|| set("HOME").map(|dir| dir.join(".cache/bulkhead")))
            .context("no place for the cache: set BULKHEAD_CACHE or HOME")?;
        Cache::at(&dir)
    }

    /// Opens the cache in `dir`, and makes it if need be.
    pub(crate) fn at(dir: &Path) -> Result<Cache> {
        let log = dir.join("log");
        fs::create_dir_all(&log).with_context(|| format!("cannot make the cache {}", dir.display()))?;
        for entry in fs::read_dir(&log).context("cannot list the logs")?.flatten() {
            let modified = entry.metadata().and_then(|data| data.modified());
            let age = modified.ok().and_then(|time| time.elapsed().ok());
            if age.is_some_and(|age| age > LOG_LIFETIME) {
                // If another run removes it at the same time, it is gone, which is all that is wanted.
                let _ = fs::remove_file(entry.path());
            }
        }
        let dir =
            dir.canonicalize().with_context(|| format!("cannot resolve the cache {}", dir.display()))?;
        Ok(Cache { dir })
    }

    /// The directory itself, absolute.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where the output of the step `name` is logged.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.dir.join("log").join(format!("{name}.log"))
    }

    /// Returns the path of the entry `name` made from the inputs of `key`. If there is none, `make` is given a path
    /// at which nothing exists and makes a file or a directory there.
    pub(crate) fn entry(
        &self,
        name: &str,
        key: &Key,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.path(name, key);
        // Before the lock, which a run that makes another entry of this name may hold for a quarter of an hour.
        if mark_used(&path)? {
            return Ok(path);
        }
        let _lock = self.lock(name)?;
        // Another run may have made it meanwhile.
        if mark_used(&path)? {
            return Ok(path);
        }
        let partial = self.dir.join(format!("{name}.partial"));
        remove(&partial)?;
        if let Err(error) = make(&partial) {
            remove(&partial)?;
            return Err(error);
        }
        fs::rename(&partial, &path)
            .with_context(|| format!("cannot name the finished {} {}", partial.display(), path.display()))?;
        self.prune(name, &path)?;
        Ok(path)
    }

    /// Returns the path of the entry `name` made from the inputs of `key`, if it is there.
    pub(crate) fn existing(&self, name: &str, key: &Key) -> Result<Option<PathBuf>> {
        let path = self.path(name, key);
        Ok(mark_used(&path)?.then_some(path))
    }

    /// Removes an entry that turned out to be unusable, for all users of the cache. The reason is kept in the logs.
    ///
    /// Processes that have its files open keep them. Another run may be about to open them, and must not get some old
    /// and some new files. So the replacement must be an entry with another key.
    pub(crate) fn discard(&self, name: &str, key: &Key, reason: &str) -> Result<()> {
        let log = self.discarded(name, key);
        fs::write(&log, reason).with_context(|| format!("cannot write {}", log.display()))?;
        let _lock = self.lock(name)?;
        remove(&self.path(name, key))
    }

    /// Whether an entry was discarded during the last week.
    pub(crate) fn is_discarded(&self, name: &str, key: &Key) -> bool {
        self.discarded(name, key).exists()
    }

    /// Where the reason is why an entry was discarded.
    pub(crate) fn discarded(&self, name: &str, key: &Key) -> PathBuf {
        self.log(&format!("{name}-{}-discarded", key.short()))
    }

    fn path(&self, name: &str, key: &Key) -> PathBuf {
        self.dir.join(format!("{name}-{}", key.short()))
    }

    fn lock(&self, name: &str) -> Result<File> {
        lock(&self.dir.join(format!("{name}.lock")), name)
    }

    /// Removes the entries of `name` that were used longest ago, but never `newest`.
    fn prune(&self, name: &str, newest: &Path) -> Result<()> {
        let mut others = Vec::new();
        for entry in fs::read_dir(&self.dir).context("cannot list the cache")? {
            let entry = entry.context("cannot list the cache")?;
            let file_name = entry.file_name();
            let is_entry = file_name
                .to_str()
                .and_then(|file_name| file_name.strip_prefix(name)?.strip_prefix('-'))
                .is_some_and(Key::is_short);
            if is_entry && entry.path() != newest {
                let used =
                    entry.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
                others.push((used, entry.path()));
            }
        }
        others.sort();
        others.reverse();
        others.iter().skip(KEPT_PER_NAME - 1).try_for_each(|(_, path)| remove(path))
    }
}

/// Returns whether the entry is there. The time of last use decides which entries are kept.
fn mark_used(path: &Path) -> Result<bool> {
    match File::open(path).and_then(|file| file.set_modified(SystemTime::now())) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot mark {} as used", path.display())),
    }
}

/// Takes the lock at `path`, held until the file is dropped. If it has to wait, says so, naming `what` is locked.
pub(crate) fn lock(path: &Path, what: &str) -> Result<File> {
    let context = || format!("cannot lock {}", path.display());
    let file = File::options().create(true).append(true).open(path).with_context(context)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress::say(&format!("    waiting for another run that makes the {what}"));
            file.lock().with_context(context)?;
        }
        Err(TryLockError::Error(error)) => return Err(error).with_context(context),
    }
    Ok(file)
}

/// Removes a file or a tree, if it is there.
///
/// A mount below it is refused: behind it may be the devices of this machine.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let context = || format!("cannot remove {}", path.display());
    let data = match path.symlink_metadata() {
        Ok(data) => data,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(context),
    };
    if !data.is_dir() {
        return fs::remove_file(path).with_context(context);
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read /proc/self/mountinfo")?;
    // proc_pid_mountinfo(5): the fifth field is the mount point.
    let mounted =
        mounts.lines().filter_map(|line| line.split(' ').nth(4)).find(|at| Path::new(at).starts_with(path));
    if let Some(at) = mounted {
        bail!("will not remove {}: {at} is mounted, unmount it first", path.display());
    }
    fs::remove_dir_all(path).with_context(context)
}

/// The digest of what an entry is made from. Each part is length-prefixed, so that parts cannot run together.
#[derive(Debug, Clone, Default)]
pub(crate) struct Key(Sha256);

impl Key {
    /// Digits of the digest in an entry's name.
    const DIGITS: usize = 16;

    /// A key of no input.
    pub(crate) fn new() -> Key {
        Key::default()
    }

    /// Adds bytes.
    pub(crate) fn bytes(mut self, part: impl AsRef<[u8]>) -> Key {
        let part = part.as_ref();
        self.0.update((part.len() as u64).to_le_bytes());
        self.0.update(part);
        self
    }

    /// Adds the contents of a file.
    pub(crate) fn file(self, path: &Path) -> Result<Key> {
        let part = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(self.bytes(part))
    }

    /// Adds another key.
    pub(crate) fn key(self, other: &Key) -> Key {
        self.bytes(other.0.clone().finalize())
    }

    /// The digest, in hexadecimal.
    pub(crate) fn hex(&self) -> String {
        self.0.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn short(&self) -> String {
        self.hex().split_at(Key::DIGITS).0.to_owned()
    }

    fn is_short(text: &str) -> bool {
        text.len() == Key::DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        (dir, cache)
    }

    fn write(text: &str) -> impl FnOnce(&Path) -> Result<()> {
        move |path| Ok(fs::write(path, text)?)
    }

    #[test]
    fn an_entry_is_made_once_for_the_same_inputs() {
        let (_dir, cache) = cache();
        let first = cache.entry("thing", &Key::new().bytes("a"), write("1")).unwrap();
        let again = cache.entry("thing", &Key::new().bytes("a"), |_| bail!("made twice")).unwrap();
        assert_eq!(first, again);
        let other = cache.entry("thing", &Key::new().bytes("b"), write("2")).unwrap();
        assert_eq!(fs::read_to_string(first).unwrap(), "1");
        assert_eq!(fs::read_to_string(other).unwrap(), "2");
    }

    #[test]
    fn an_entry_that_fails_or_is_interrupted_is_not_there() {
        let (_dir, cache) = cache();
        fs::create_dir_all(cache.dir().join("thing.partial/left")).unwrap();
        let key = Key::new();
        let half = |path: &Path| -> Result<()> {
            assert!(!path.exists());
            fs::create_dir(path)?;
            bail!("half way")
        };
        assert_eq!(cache.entry("thing", &key, half).unwrap_err().to_string(), "half way");
        assert!(!cache.dir().join("thing.partial").exists());
        cache.entry("thing", &key, write("whole")).unwrap();
    }

    #[test]
    fn a_discarded_entry_is_gone_and_its_reason_is_kept() {
        let (_dir, cache) = cache();
        let (bad, good) = (Key::new().bytes("bad"), Key::new().bytes("good"));
        let path = cache.entry("thing", &bad, write("bad")).unwrap();
        let kept = cache.entry("thing", &good, write("good")).unwrap();
        for reason in ["first", "again"] {
            cache.discard("thing", &bad, reason).unwrap();
            assert!(cache.is_discarded("thing", &bad) && !path.exists());
            assert_eq!(fs::read_to_string(cache.discarded("thing", &bad)).unwrap(), reason);
        }
        assert!(!cache.is_discarded("thing", &good) && kept.exists());
    }

    #[test]
    fn old_entries_go_and_those_of_other_names_stay() {
        let (_dir, cache) = cache();
        let other = cache.entry("thing-b", &Key::new(), write("b")).unwrap();
        let paths: Vec<PathBuf> = (0..5u8)
            .map(|n| {
                std::thread::sleep(std::time::Duration::from_millis(5));
                cache.entry("thing", &Key::new().bytes([n]), write("a")).unwrap()
            })
            .collect();
        assert!(other.exists());
        let left: Vec<bool> = paths.iter().map(|path| path.exists()).collect();
        assert_eq!(left, [false, false, true, true, true]);
    }

    #[test]
    fn parts_of_a_key_do_not_run_together() {
        let split = |parts: &[&str]| parts.iter().fold(Key::new(), |key, part| key.bytes(part)).short();
        assert_ne!(split(&["ab", "c"]), split(&["a", "bc"]));
        assert!(Key::is_short(&split(&[])));
    }
}
