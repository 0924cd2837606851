//! How often pods and containers of this host could not be created or started, by cause. The numbers are in a file
//! beside the directory of all state directories, because what has failed leaves no state directory. They are lost when
//! the host restarts, as /run is.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions, TryLockError},
    io::{self, Read},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::{
    host::blocking,
    types::{error::chain, failure::Cause},
};

/// What the name of the file adds to that of the directory.
const SUFFIX: &str = "-failures.json";

/// The most that is read of the file, bytes. With all causes it is shorter.
const MOST_BYTES: u64 = 4096;

/// How long to wait for another shim that counts, and the pause between two tries.
const LOCK: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

/// The file that belongs to `root`, the directory of all state directories.
pub(crate) fn path(root: &Path) -> PathBuf {
    let mut path = root.as_os_str().to_owned();
    path.push(SUFFIX);
    path.into()
}

/// Counts a failure, while the caller goes on. If that fails, it is logged, and nothing else happens.
pub(crate) fn count(root: &Path, cause: Cause) {
    let root = root.to_owned();
    tokio::spawn(async move {
        match blocking::run(move || add(&root, cause), drop).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(error = chain(&error), "a failure is not counted"),
            Err(error) => tracing::warn!(error = chain(&error), "a failure is not counted"),
        }
    });
}

/// Counts a failure. Blocks.
fn add(root: &Path, cause: Cause) -> io::Result<()> {
    let path = path(root);
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    lock(&file)?;
    let mut counts = read(&file)?;
    let count = counts.entry(cause.name().to_owned()).or_default();
    *count = count.saturating_add(1);
    let text = serde_json::to_vec(&counts)?;
    file.write_all_at(&text, 0)?;
    file.set_len(text.len() as u64)
}

/// The numbers of all causes. Blocks.
pub(crate) fn counts(root: &Path) -> io::Result<Vec<(Cause, u64)>> {
    let counts = match File::open(path(root)) {
        Ok(file) => {
            lock(&file)?;
            read(&file)?
        }
        // Nothing has failed yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
        Err(error) => return Err(error),
    };
    let count = |cause: Cause| counts.get(cause.name()).copied().unwrap_or(0);
    Ok(Cause::ALL.map(|cause| (cause, count(cause))).into())
}

/// Takes the lock of the file until it is closed.
fn lock(file: &File) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if begun.elapsed() < LOCK => thread::sleep(PAUSE),
            Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::TimedOut.into()),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

/// The numbers in the file, by the names of their causes. If it is damaged, because a shim was killed, all numbers
/// start from 0.
fn read(file: &File) -> io::Result<BTreeMap<String, u64>> {
    let mut text = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut text)?;
    let mut counts: BTreeMap<String, u64> = serde_json::from_slice(&text).unwrap_or_default();
    counts.retain(|name, _| Cause::ALL.iter().any(|cause| cause.name() == name));
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn count(root: &Path, cause: Cause) -> u64 {
        counts(root).unwrap().into_iter().find(|(found, _)| *found == cause).unwrap().1
    }

    #[test]
    fn each_failure_counts_once_whoever_counts_at_the_same_time() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        assert!(counts(&root).unwrap().iter().all(|(_, count)| *count == 0));
        thread::scope(|scope| {
            for cause in [Cause::Network, Cause::Rootfs, Cause::Network] {
                let root = &root;
                scope.spawn(move || (0..20).for_each(|_| add(root, cause).unwrap()));
            }
        });
        let numbers = [Cause::Network, Cause::Rootfs, Cause::Other].map(|cause| count(&root, cause));
        assert_eq!(numbers, [40, 20, 0]);
        assert!(!root.exists());
    }

    #[test]
    fn a_damaged_file_begins_anew_and_stays_small() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        for text in ["{\"guest\": 1", "{\"of_a_later_version\": 7}", &"x".repeat(10_000)] {
            fs::write(path(&root), text).unwrap();
            add(&root, Cause::Guest).unwrap();
            assert_eq!((count(&root, Cause::Guest), count(&root, Cause::Other)), (1, 0), "{text}");
            assert!(fs::metadata(path(&root)).unwrap().len() < 100);
        }
    }
}
