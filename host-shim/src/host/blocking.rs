//! Runs work that can hang with the host's storage or network. Each piece has a thread of its own, so callers can give
//! up.

use std::{io, mem::ManuallyDrop, thread, time::Duration};

use tokio::{
    process::{Child, Command},
    runtime::Handle,
    sync::{Semaphore, SemaphorePermit, oneshot},
    time::timeout,
};

/// Threads that may hang at the same time. Each has a small stack and nothing else.
pub(crate) const MOST_THREADS: usize = 64;
/// How long work waits for a thread. Many short pieces at once do not hang.
const FREE: Duration = Duration::from_secs(5);
pub(crate) const STACK: usize = 256 << 10;

static THREADS: Semaphore = Semaphore::const_new(MOST_THREADS);
/// For work that undoes something. Creations that hang must not keep a healthy pod from being deleted.
static UNDO_THREADS: Semaphore = Semaphore::const_new(MOST_THREADS);
/// For values that are dropped elsewhere. A drop that hangs must not keep other work from being done.
static DROP_THREADS: Semaphore = Semaphore::const_new(MOST_THREADS);

/// Why work was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BlockingError {
    #[error("{MOST_THREADS} operations on the host hang, and no more are begun")]
    TooMany,
    #[error("cannot start a thread")]
    Start(#[from] io::Error),
    #[error("the thread ended with a panic")]
    Panic,
}

/// Waits for the right to have a thread.
async fn free(threads: &'static Semaphore) -> Result<SemaphorePermit<'static>, BlockingError> {
    match timeout(FREE, threads.acquire()).await {
        Ok(Ok(thread)) => Ok(thread),
        // It is never closed.
        Ok(Err(_)) | Err(_) => Err(BlockingError::TooMany),
    }
}

/// Does `work` on a thread. If the caller gives up waiting, the thread passes the result to `abandoned`, which undoes
/// it.
pub(crate) async fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
    abandoned: impl FnOnce(T) + Send + 'static,
) -> Result<T, BlockingError> {
    run_on(free(&THREADS).await?, work, abandoned).await
}

/// The same for work that undoes something.
pub(crate) async fn run_undo<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, BlockingError> {
    run_on(free(&UNDO_THREADS).await?, work, drop).await
}

async fn run_on<T: Send + 'static>(
    permit: SemaphorePermit<'static>,
    work: impl FnOnce() -> T + Send + 'static,
    abandoned: impl FnOnce(T) + Send + 'static,
) -> Result<T, BlockingError> {
    let (sender, result) = oneshot::channel();
    let span = tracing::Span::current();
    thread::Builder::new().stack_size(STACK).spawn(move || {
        let _permit = permit;
        let _entered = span.entered();
        if let Err(result) = sender.send(work()) {
            abandoned(result);
        }
    })?;
    result.await.map_err(|_| BlockingError::Panic)
}

/// Drops a value on a thread of its own: a close(2) can hang, for example that of a block device that does not respond.
/// If too many threads hang already, the value is kept until the shim ends. The receiver hears when the value is
/// dropped. Whoever does not want to wait drops the receiver.
pub(crate) fn drop_elsewhere<T: Send + 'static>(value: T) -> oneshot::Receiver<()> {
    // If no thread can be started, the closure is dropped here, but not the value in it.
    let value = ManuallyDrop::new(value);
    let (done, is_done) = oneshot::channel();
    let Ok(permit) = DROP_THREADS.try_acquire() else {
        tracing::error!(
            "{MOST_THREADS} files of the host hang while they are closed, and one more stays open"
        );
        return is_done;
    };
    let dropping = move || {
        let _permit = permit;
        drop(ManuallyDrop::into_inner(value));
        // Perhaps nobody waits.
        _ = done.send(());
    };
    if let Err(error) = thread::Builder::new().stack_size(STACK).spawn(dropping) {
        tracing::error!(%error, "a file of the host stays open: there is no thread to close it");
    }
    is_done
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
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_waits_for_a_thread_and_gives_up_only_if_all_hang() {
        static FEW: Semaphore = Semaphore::const_new(1);
        let first = free(&FEW).await.unwrap();
        assert!(matches!(free(&FEW).await, Err(BlockingError::TooMany)));
        let (second, ()) = tokio::join!(free(&FEW), async {
            tokio::time::sleep(FREE / 2).await;
            drop(first);
        });
        drop(second.unwrap());
    }

    #[tokio::test]
    async fn nobody_waits_for_what_is_dropped_elsewhere() {
        /// What hangs until it is told to go on.
        struct Hangs(mpsc::Receiver<()>, mpsc::Sender<()>);
        impl Drop for Hangs {
            fn drop(&mut self) {
                _ = self.0.recv();
                _ = self.1.send(());
            }
        }
        let (go_on, waits) = mpsc::channel();
        let (dropped, is_dropped) = mpsc::channel();
        let done = drop_elsewhere(Hangs(waits, dropped));
        assert!(is_dropped.try_recv().is_err());
        go_on.send(()).unwrap();
        timeout(Duration::from_secs(5), done).await.unwrap().unwrap();
        is_dropped.try_recv().unwrap();
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
