//! Forwards connections to the loopback interface of the pod's network namespace on the host to the same port of the
//! loopback interface in the guest. Port-forward of the CRI makes such connections.

use std::{io, net::SocketAddr, time::Duration};

use bulkhead_agent_api::relay;
use tokio::{
    net::TcpStream,
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep},
};

use crate::{
    host::network::loopback::Loopback,
    process::running_guest::Guest,
    types::{
        error::chain,
        log_limit::{LogLimit, Logged},
    },
};

/// The connections at one time, as many as the agent takes. More are reset.
const MAX_CONNECTIONS: usize = 64;

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
                        Ok(loopback) => return forward(&loopback, &guest, &id).await,
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

async fn forward(loopback: &Loopback, guest: &Guest, id: &str) {
    // They end with this function.
    let mut connections = JoinSet::new();
    let mut log = LogLimit::new(LOGGED, LOG_WINDOW);
    loop {
        let accepted = tokio::select! {
            accepted = loopback.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((client, _)) if connections.len() >= MAX_CONNECTIONS => {
                if log.count(Instant::now()) != Logged::No {
                    tracing::warn!(
                        container = id,
                        "a connection to a port was reset: there are {MAX_CONNECTIONS}"
                    );
                }
                reset(&client);
            }
            Ok((client, address)) => {
                let (guest, id) = (guest.clone(), id.to_owned());
                connections.spawn(async move { serve(client, address, &guest, &id).await });
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
