//! Runs work that can hang with the host's storage or network. Each piece has a thread of its own, so callers can give
//! up.

use std::{
    io,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use tokio::{
    process::{Child, Command},
    runtime::Handle,
    sync::oneshot,
};

/// Threads that may hang at the same time. Each has a small stack and nothing else.
pub(crate) const MOST: usize = 64;
/// The same, for work that undoes something. Creations that hang must not keep a healthy pod from being deleted.
const MOST_WITH_UNDO: usize = 2 * MOST;
pub(crate) const STACK: usize = 256 << 10;

static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Why work was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BlockingError {
    #[error("{most} operations on the host hang, and no more are begun")]
    TooMany { most: usize },
    #[error("cannot start a thread")]
    Start(#[from] io::Error),
    #[error("the thread ended with a panic")]
    Panic,
}

/// Counts a thread while it lives.
struct Counted(&'static AtomicUsize);

impl Counted {
    fn new(running: &'static AtomicUsize, most: usize) -> Result<Self, BlockingError> {
        let more = |count| (count < most).then_some(count + 1);
        match running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Self(running)),
            Err(_) => Err(BlockingError::TooMany { most }),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Does `work` on a thread. If the caller gives up waiting, the thread passes the result to `abandoned`, which undoes
/// it.
pub(crate) async fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
    abandoned: impl FnOnce(T) + Send + 'static,
) -> Result<T, BlockingError> {
    run_counted(Counted::new(&RUNNING, MOST)?, work, abandoned).await
}

/// The same for work that undoes something.
pub(crate) async fn run_undo<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, BlockingError> {
    run_counted(Counted::new(&RUNNING, MOST_WITH_UNDO)?, work, drop).await
}

async fn run_counted<T: Send + 'static>(
    counted: Counted,
    work: impl FnOnce() -> T + Send + 'static,
    abandoned: impl FnOnce(T) + Send + 'static,
) -> Result<T, BlockingError> {
    let (sender, result) = oneshot::channel();
    let span = tracing::Span::current();
    thread::Builder::new().stack_size(STACK).spawn(move || {
        let _counted = counted;
        let _entered = span.entered();
        if let Err(result) = sender.send(work()) {
            abandoned(result);
        }
    })?;
    result.await.map_err(|_| BlockingError::Panic)
}

/// Starts a program on a thread of its own, because starting waits for the execve, which can hang with the storage. If
/// the caller gives up waiting, the program is killed as soon as it runs.
pub(crate) async fn spawn(command: Command) -> io::Result<Child> {
    spawn_after(|| Ok(()), command).await
}

/// The same, on a thread that `prepare` changes first.
pub(crate) async fn spawn_after(
    prepare: impl FnOnce() -> io::Result<()> + Send + 'static,
    mut command: Command,
) -> io::Result<Child> {
    let runtime = Handle::current();
    let spawn = move || {
        prepare()?;
        let _entered = runtime.enter();
        command.spawn()
    };
    let abandoned = |spawned: io::Result<Child>| {
        if let Ok(mut child) = spawned {
            // An error: it has ended already.
            _ = child.start_kill();
        }
    };
    run(spawn, abandoned).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[test]
    fn creations_that_hang_leave_room_for_what_undoes() {
        static HUNG: AtomicUsize = AtomicUsize::new(0);
        let hung: Vec<_> = std::iter::from_fn(|| Counted::new(&HUNG, MOST).ok()).collect();
        assert_eq!(hung.len(), MOST);
        drop(Counted::new(&HUNG, MOST_WITH_UNDO).unwrap());
    }

    #[tokio::test]
    async fn who_gives_up_leaves_the_result_to_be_undone() {
        assert_eq!(run(|| 7, |_| ()).await.unwrap(), 7);
        let (go_on, waits) = mpsc::channel::<()>();
        let (undo, undone) = mpsc::channel();
        let hangs = run(move || waits.recv().is_ok(), move |result| undo.send(result).unwrap());
        assert!(tokio::time::timeout(Duration::from_millis(10), hangs).await.is_err());
        go_on.send(()).unwrap();
        assert!(undone.recv_timeout(Duration::from_secs(5)).unwrap());
    }
}
