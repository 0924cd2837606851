//! The connections to the shim's socket.

use std::{
    future::Future,
    io,
    os::fd::OwnedFd,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{
    FutureExt,
    stream::{self, Stream},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use crate::types::{
    error::chain,
    log_limit::{LogLimit, Logged},
};

/// How long after a failed accept(2) the next one follows.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a client waits for a shim without free descriptors before it is refused. A shortage may be over soon. A
/// containerd that was restarted waits for 5 s for an answer, and then ends the shim.
const REFUSED_AFTER: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 2000 });

/// How many connections there are at the same time at most. containerd has one for each container of the pod. Each
/// `bulkhead exec` has one; at most 32 of them run in a pod (`cli/src/exec/directory.rs`).
const MOST_CONNECTIONS: usize = 1024;

/// How often it is logged that a client was refused.
const LOGGED: u32 = 10;
const LOG_WINDOW: Duration = Duration::from_secs(3600);

/// The connections that `accept` returns, a limited number at the same time.
///
/// While the process has all the descriptors that it may have, accept(2) fails at once and the connection stays in the
/// queue. ttrpc's server would try again without a pause, which takes a whole processor, and the client would wait
/// without end. A client that waits too long is refused: its connection gets the descriptor `spare`, and is closed.
pub(super) fn connections<S, A: Future<Output = io::Result<S>>>(
    spare: Spare,
    accept: impl FnMut() -> A,
) -> impl Stream<Item = io::Result<Connection<S>>> {
    let acceptor = Acceptor {
        accept,
        spare,
        free: Arc::new(Semaphore::new(MOST_CONNECTIONS)),
        log: LogLimit::new(LOGGED, LOG_WINDOW),
    };
    stream::unfold(acceptor, |mut acceptor| async move { Some((Ok(acceptor.next().await), acceptor)) })
}

struct Acceptor<F> {
    accept: F,
    spare: Spare,
    /// A permit for each connection that there may be in addition.
    free: Arc<Semaphore>,
    log: LogLimit,
}

impl<S, A: Future<Output = io::Result<S>>, F: FnMut() -> A> Acceptor<F> {
    /// Waits for the next connection.
    async fn next(&mut self) -> Connection<S> {
        // Since when a client may be waiting for a descriptor.
        let mut short_since = None;
        loop {
            match (self.accept)().await {
                Ok(stream) => {
                    short_since = None;
                    match Arc::clone(&self.free).try_acquire_owned() {
                        Ok(permit) => return Connection { stream, _permit: permit },
                        // Dropped, and so closed.
                        Err(_) => self.log_refusal("there are too many connections"),
                    }
                }
                Err(error) => {
                    let since = *short_since.get_or_insert_with(Instant::now);
                    if is_shortage(&error) && since.elapsed() >= REFUSED_AFTER && !self.refuse(&error) {
                        short_since = None;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    /// Refuses a client that waits. False if there is none: accept(2) also fails if nobody waits.
    fn refuse(&mut self, error: &io::Error) -> bool {
        self.spare.release();
        // Pending: nobody waits. An error: another thread has taken the descriptor.
        let waited = match (self.accept)().now_or_never() {
            Some(Ok(stream)) => {
                drop(stream);
                self.log_refusal(&chain(error));
                true
            }
            Some(Err(_)) => true,
            None => false,
        };
        self.spare.refill();
        waited
    }

    fn log_refusal(&mut self, reason: &str) {
        if self.log.count(Instant::now()) != Logged::No {
            tracing::error!(reason, "a client of the shim is refused");
        }
    }
}

fn is_shortage(error: &io::Error) -> bool {
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// A descriptor that is kept for a connection that is to be refused.
pub(super) struct Spare(Option<OwnedFd>);

impl Spare {
    /// Call this before anything takes a descriptor that the process could also do without. A process that fails
    /// instead closes its socket, and so refuses its clients too.
    pub(super) fn reserve() -> io::Result<Self> {
        Ok(Self(Some(Self::any()?)))
    }

    fn any() -> io::Result<OwnedFd> {
        Ok(eventfd(0, EventfdFlags::CLOEXEC)?)
    }

    fn release(&mut self) {
        self.0 = None;
    }

    /// Fails as long as somebody else has the descriptor. Then the next call tries again.
    fn refill(&mut self) {
        if self.0.is_none() {
            self.0 = Self::any().ok();
        }
    }
}

/// A connection, which counts while it exists.
#[derive(Debug)]
pub(super) struct Connection<S> {
    stream: S,
    _permit: OwnedSemaphorePermit,
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::{env, fs::File, io::Read, os::unix::net::UnixStream, path::Path, process::Command};

    use futures::StreamExt;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use tokio::{net::UnixListener, time::timeout};

    use super::*;

    /// Longer than anything takes on a machine that has much else to do.
    const WAIT: Duration = Duration::from_secs(15);

    #[tokio::test(start_paused = true)]
    async fn a_shim_without_descriptors_does_not_spin() {
        let begun = Instant::now();
        let mut calls = 0;
        let accepted = connections(Spare(None), || {
            calls += 1;
            let result = if calls % 5 == 0 { Ok(()) } else { Err(io::Error::from(Errno::MFILE)) };
            std::future::ready(result)
        });
        let accepted: Vec<_> = accepted.take(2).collect().await;
        assert!(accepted.iter().all(Result::is_ok));
        // No pause after the ones that succeeded.
        assert_eq!(begun.elapsed(), 8 * PAUSE);
    }

    #[tokio::test(start_paused = true)]
    async fn there_are_no_more_connections_than_a_limit() {
        let counted = Arc::new(());
        let mut calls = 0;
        let accepted = connections(Spare(None), || {
            calls += 1;
            // Then nobody comes any more.
            let stream = (calls <= MOST_CONNECTIONS + 3).then(|| Arc::clone(&counted));
            async move {
                match stream {
                    Some(stream) => Ok(stream),
                    None => std::future::pending().await,
                }
            }
        });
        let mut accepted = std::pin::pin!(accepted);
        let mut held = Vec::new();
        for _ in 0..MOST_CONNECTIONS {
            held.push(accepted.next().await);
        }
        drop(held.pop());
        held.push(accepted.next().await);
        assert!(timeout(WAIT, accepted.next()).await.is_err(), "there is one too many");
        assert_eq!(Arc::strong_count(&counted), 1 + MOST_CONNECTIONS, "the others are closed");
    }

    /// What this process has to say when it is executed again for a test that uses up its descriptors.
    const AGAIN: &str = "BULKHEAD_TEST_WITHOUT_DESCRIPTORS";

    #[test]
    fn a_client_of_a_shim_without_descriptors_is_refused_and_the_next_one_is_served() {
        if env::var_os(AGAIN).is_some() {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            return runtime.block_on(refuse_and_serve());
        }
        let name = "service::connections::tests::\
            a_client_of_a_shim_without_descriptors_is_refused_and_the_next_one_is_served";
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(AGAIN, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
    }

    /// In a process of its own.
    async fn refuse_and_serve() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let limit = getrlimit(Resource::Nofile);
        let limit_to = |most| setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit }).unwrap();
        limit_to(0);
        assert!(Spare::reserve().is_err());
        limit_to(100);
        let accepted = connections(Spare::reserve().unwrap(), || async { Ok(listener.accept().await?.0) });
        let mut accepted = std::pin::pin!(accepted);
        // One that was served before, so that accept(2) is called again at once.
        let served = UnixStream::connect(&path).unwrap();
        let connection = timeout(WAIT, accepted.next()).await.unwrap().unwrap().unwrap();
        let clients = connect_and_fill(&path);
        assert!(timeout(8 * REFUSED_AFTER, accepted.next()).await.is_err(), "there is no descriptor");
        for mut client in clients.waiting {
            client.set_nonblocking(true).unwrap();
            assert_eq!(client.read(&mut [0]).unwrap(), 0, "it is refused");
        }
        // The next one comes while nobody else waits.
        drop(clients.filling);
        let last = UnixStream::connect(&path).unwrap();
        let other = timeout(WAIT, accepted.next()).await.unwrap().unwrap().unwrap();
        drop((served, connection, last, other));
    }

    struct Clients {
        waiting: Vec<UnixStream>,
        filling: Vec<File>,
    }

    /// Connects two clients, and opens all the files that the process may have.
    fn connect_and_fill(path: &Path) -> Clients {
        let waiting = (0..2).map(|_| UnixStream::connect(path).unwrap()).collect();
        let filling = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        Clients { waiting, filling }
    }
}
