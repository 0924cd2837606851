//! Limits how many VMs start at the same time to the number of processors. More would only make each of them slow, and
//! the shim gives up a guest that is too slow.

use std::{
    fs::{self, File, TryLockError},
    io,
    num::NonZero,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use tokio::time::sleep;

/// How often a turn is tried.
const PAUSE: Duration = Duration::from_millis(20);

/// How long a start waits at most. One that hangs only delays the others.
const LONGEST: Duration = Duration::from_secs(300);

/// The file, in the directory of a run that is starting.
const STARTING: &str = "starting";

/// One of the starts that happen now, until it is dropped: a file in the directory of the run. It does not count if the
/// run is killed, since the directory is then locked no more.
#[derive(Debug)]
pub(super) struct Turn {
    file: Option<PathBuf>,
}

impl Turn {
    /// Waits for a turn. `run` is the directory of this run, which is locked.
    pub(super) async fn take(run: &Path) -> Self {
        let most = thread::available_parallelism().map_or(1, NonZero::get);
        Self::take_of(run, most, LONGEST).await
    }

    async fn take_of(run: &Path, most: usize, longest: Duration) -> Self {
        let begun = Instant::now();
        loop {
            match begin(run, most) {
                Ok(None) if begun.elapsed() <= longest => sleep(PAUSE).await,
                // An error: it cannot be said who else is starting, and nothing has to wait.
                other => return Self { file: other.unwrap_or(None) },
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // The directory may have been removed.
            _ = fs::remove_file(file);
        }
    }
}

/// Marks the run as starting, unless so many others are. Returns the mark.
fn begin(run: &Path, most: usize) -> io::Result<Option<PathBuf>> {
    let root = run.parent().unwrap_or(run);
    // Who counts keeps others from that. Only root can open the directory.
    let lock = File::open(root)?;
    match lock.try_lock() {
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(error),
        Ok(()) => {}
    }
    let others = fs::read_dir(root)?.flatten().filter(|entry| is_starting(&entry.path())).count();
    if others >= most {
        return Ok(None);
    }
    let mark = run.join(STARTING);
    File::create_new(&mark)?;
    Ok(Some(mark))
}

fn is_starting(run: &Path) -> bool {
    run.join(STARTING).exists()
        && File::open(run).is_ok_and(|run| matches!(run.try_lock(), Err(TryLockError::WouldBlock)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_start_waits_until_another_has_ended() {
        let root = tempfile::tempdir().unwrap();
        let runs = ["one", "two", "three"].map(|name| root.path().join(name));
        let locks = runs.each_ref().map(|run| {
            fs::create_dir(run).unwrap();
            let lock = File::open(run).unwrap();
            lock.lock().unwrap();
            lock
        });
        let [one, two, three] = &runs;
        let take = async |run, longest| Turn::take_of(run, 2, Duration::from_millis(longest)).await;
        let (first, second) = (take(one, 0).await, take(two, 0).await);
        assert!(first.file.is_some() && second.file.is_some());
        // It does not wait for ever.
        assert!(take(three, 1).await.file.is_none());
        let freed = async {
            sleep(Duration::from_millis(30)).await;
            drop(first);
        };
        let (third, ()) = tokio::join!(take(three, 10_000), freed);
        assert!(third.file.is_some());
        // One that was killed while it started does not count.
        let [_, killed, _] = locks;
        std::mem::forget(second);
        drop(killed);
        assert!(take(one, 0).await.file.is_some());
    }
}
