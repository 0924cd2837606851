//! Forwards connections to the loopback interface of the pod's network namespace on the host to the same port of the
//! loopback interface in the guest. Port-forward of the CRI makes such connections.

use std::{io, net::SocketAddr, time::Duration};

use bulkhead_agent_api::relay;
use tokio::{
    net::TcpStream,
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

use crate::{
    host::network::loopback::Loopback,
    process::running_guest::Guest,
    types::{
        error::chain,
        log_limit::{LogLimit, Logged},
    },
};

/// The connections at one time, as many as the agent takes. A test of load, or a pool of connections, has 100. Further
/// clients wait in the queue of the listener until a connection ends, for [`PATIENCE`].
const MAX_CONNECTIONS: usize = 128;

/// How long clients wait for the end of a connection. Then those that wait are reset: a client that is connected and
/// hears nothing would not know why.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long nothing is accepted after an error, for example if there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The pause until the next try to redirect the connections, which becomes longer. After the longest one there is no
/// other try: it is not for want of descriptors or threads that it fails, but of the kernel.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Lines in a window of the log. Whoever may connect brings them about.
const LOGGED: u32 = 10;
const LOG_WINDOW: Duration = Duration::from_secs(600);

/// Forwards until it is dropped.
#[derive(Debug)]
pub(super) struct PortForward(AbortHandle);

impl PortForward {
    /// `id` is a container that is in the pod's network namespace. Does not wait until the connections are redirected:
    /// no start of a pod needs that. Ends with the VM, and then keeps the namespace no longer.
    pub(super) fn start(guest: Guest, id: String) -> Self {
        let task = tokio::spawn(async move {
            let forwarded = async {
                let mut pause = FIRST_PAUSE;
                loop {
                    match Loopback::redirect(guest.vm.process()).await {
                        Ok(loopback) => {
                            let connect = |client, address| {
                                let (guest, id) = (guest.clone(), id.clone());
                                async move { serve(client, address, &guest, &id).await }
                            };
                            return forward(&id, || loopback.accept(), connect).await;
                        }
                        Err(error) => {
                            tracing::warn!(
                                container = id,
                                error = chain(&error),
                                "port-forward does not reach this pod"
                            );
                        }
                    }
                    if pause > LONGEST_PAUSE {
                        return;
                    }
                    sleep(pause).await;
                    pause *= 4;
                }
            };
            tokio::select! {
                () = forwarded => {}
                _ = guest.vm.exited() => {}
            }
        });
        Self(task.abort_handle())
    }
}

impl Drop for PortForward {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves the connections that come to the container `id`.
async fn forward<A, S>(id: &str, accept: impl Fn() -> A, serve: impl Fn(TcpStream, SocketAddr) -> S)
where
    A: Future<Output = io::Result<(TcpStream, SocketAddr)>>,
    S: Future<Output = ()> + Send + 'static,
{
    // They end with this function.
    let mut connections = JoinSet::new();
    let mut log = LogLimit::new(LOGGED, LOG_WINDOW);
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= MAX_CONNECTIONS {
            if timeout(PATIENCE, connections.join_next()).await.is_err() {
                reset_waiting(&accept).await;
            }
            continue;
        }
        let accepted = tokio::select! {
            accepted = accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((client, address)) => {
                connections.spawn(serve(client, address));
                if connections.len() == MAX_CONNECTIONS && log.count(Instant::now()) != Logged::No {
                    tracing::warn!(
                        container = id,
                        "there are {MAX_CONNECTIONS} connections to ports: others wait until one ends, or are reset"
                    );
                }
            }
            Err(error) => {
                if log.count(Instant::now()) != Logged::No {
                    tracing::warn!(
                        container = id,
                        error = chain(&error),
                        "cannot accept a connection to a port"
                    );
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Resets the clients that wait in the queue of the listener, at most as many as there are connections.
async fn reset_waiting<A>(accept: impl Fn() -> A)
where
    A: Future<Output = io::Result<(TcpStream, SocketAddr)>>,
{
    for _ in 0..MAX_CONNECTIONS {
        let Ok(Ok((client, _))) = timeout(Duration::ZERO, accept()).await else { return };
        reset(&client);
    }
}

async fn serve(client: TcpStream, address: SocketAddr, guest: &Guest, id: &str) {
    let vsock = guest.vm.vsock();
    let stream_id = vsock.stream_ids(1);
    let connected = async {
        let stream = vsock.connect_stream(stream_id, relay::BUFFER).await.map_err(io::Error::other)?;
        guest.agent.connect_loopback(id, address, stream_id).await.map_err(io::Error::other)?;
        // The sender has already decided how to split its data.
        client.set_nodelay(true)?;
        Ok::<_, io::Error>(stream)
    };
    match connected.await {
        // An error is that of one side, which has ended, and the other side sees its connection end.
        Ok(stream) => drop(relay::relay(client, stream).await),
        Err(error) => {
            tracing::debug!(container = id, %address, error = chain(&error), "a port of the guest is not reached");
            reset(&client);
        }
    }
}

/// The client has been told that it is connected. A reset is the nearest to a refusal that is left.
fn reset(client: &TcpStream) {
    // If this fails, the client sees the end of an empty stream.
    _ = client.set_zero_linger();
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::{io::AsyncReadExt, net::TcpListener, sync::Semaphore};

    use super::*;
    use crate::testing::Log;

    const WAIT: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn connections_beyond_the_limit_wait_and_are_served_when_others_end() {
        /// In the queue of the listener.
        const MORE: usize = 20;
        let log = Log::begin();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (begun, may_end) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let serve = |client: TcpStream, _| {
            let (begun, may_end) = (Arc::clone(&begun), Arc::clone(&may_end));
            async move {
                begun.add_permits(1);
                may_end.acquire().await.unwrap().forget();
                drop(client);
            }
        };
        let clients = async {
            let mut clients = Vec::new();
            for _ in 0..MAX_CONNECTIONS + MORE {
                clients.push(TcpStream::connect(address).await.unwrap());
            }
            begun.acquire_many(MAX_CONNECTIONS as u32).await.unwrap().forget();
            let too_many = timeout(Duration::from_millis(200), begun.acquire()).await;
            assert!(too_many.is_err());
            may_end.add_permits(MORE);
            begun.acquire_many(MORE as u32).await.unwrap().forget();
            may_end.add_permits(MAX_CONNECTIONS);
            for mut client in clients {
                // The end of the stream, and no reset.
                assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
            }
        };
        tokio::select! {
            () = forward("demo", || listener.accept(), serve) => panic!("it has ended"),
            served = timeout(WAIT, clients) => served.unwrap(),
        }
        let lines = log.lines();
        assert!(lines[0].contains("there are 128 connections to ports: others wait"), "{lines:?}");
    }

    #[tokio::test]
    async fn connections_that_have_waited_for_long_are_reset() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let never = |client: TcpStream, _| async move {
            std::future::pending::<()>().await;
            drop(client);
        };
        let clients = async {
            let mut clients = Vec::new();
            for _ in 0..MAX_CONNECTIONS + 2 {
                clients.push(TcpStream::connect(address).await.unwrap());
            }
            for mut client in clients.split_off(MAX_CONNECTIONS) {
                let error = client.read(&mut [0]).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            }
        };
        tokio::select! {
            () = forward("demo", || listener.accept(), never) => panic!("it has ended"),
            reset = timeout(2 * PATIENCE, clients) => reset.unwrap(),
        }
    }
}
