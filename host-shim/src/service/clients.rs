//! The connections to the shim. A shim without a pod and without a client is of no use: its containerd ended before it
//! wrote down where the shim is, so nobody will ever tell it to end.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::stream;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    time::sleep,
};
use ttrpc::r#async::transport::Listener;

use crate::pod::pod::Pod;

/// How long a shim waits for a client or a pod. containerd connects at once, also after it was restarted.
const LONELY: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 120 });

/// How often the shim looks.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 10_000 });

/// The connections to the shim. Each of them has a reference to this value's.
#[derive(Debug, Default)]
pub(crate) struct Clients(Arc<()>);

/// A connection that is counted.
struct Connection {
    stream: UnixStream,
    _counted: Option<Arc<()>>,
}

impl Clients {
    /// Accepts the connections that come to `listener`, and counts them.
    pub(crate) fn accept(&self, listener: std::os::unix::net::UnixListener) -> io::Result<Listener> {
        listener.set_nonblocking(true)?;
        let state = (UnixListener::from_std(listener)?, Arc::downgrade(&self.0));
        Ok(Listener::new(stream::unfold(state, async |(listener, clients)| {
            let accepted = listener.accept().await;
            let counted = |(stream, _)| Connection { stream, _counted: clients.upgrade() };
            Some((accepted.map(counted), (listener, clients)))
        })))
    }

    fn is_none(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Waits until there has been neither a client nor a container for a while.
    pub(crate) async fn lonely(&self, pod: &Pod) {
        let mut since = Duration::ZERO;
        while since < LONELY {
            sleep(LOOK).await;
            since = if self.is_none() && pod.is_empty() { since + LOOK } else { Duration::ZERO };
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
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
    use std::os::unix::net;

    use tokio::time::timeout;
    use ttrpc::r#async::Server;

    use super::*;
    use crate::{io::events::Publisher, pod::pod_vm::Settings};

    const WAIT: Duration = Duration::from_secs(5);

    fn pod() -> Pod {
        let settings = Settings {
            containerd: "/c".into(),
            namespace: "default".into(),
            id: "demo".into(),
            state_root: "/nonexistent".into(),
            config: "/nonexistent".into(),
            shim: "/nonexistent".into(),
            socket: None,
        };
        Pod::new(settings, Publisher::start(None, "default"))
    }

    #[tokio::test]
    async fn a_shim_without_a_pod_ends_when_no_client_comes_or_the_last_one_is_gone() {
        let (clients, pod) = (Clients::default(), pod());
        timeout(WAIT, clients.lonely(&pod)).await.unwrap();

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = clients.accept(net::UnixListener::bind(&path).unwrap()).unwrap();
        let mut server = Server::new().add_listener(listener);
        server.start().await.unwrap();
        let client = UnixStream::connect(&path).await.unwrap();
        assert!(timeout(2 * LONELY, clients.lonely(&pod)).await.is_err(), "there is a client");
        drop(client);
        timeout(WAIT, clients.lonely(&pod)).await.unwrap();
    }
}
