//! Forwards connections to the loopback interface of the pod's network namespace on the host to the same port of the
//! loopback interface in the guest. Port-forward of the CRI makes such connections.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split},
    net::TcpStream,
    sync::watch,
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
    vm::vsock::GuestStream,
};

/// The connections at one time, as many as the agent takes. More are reset.
const MAX_CONNECTIONS: usize = 64;

/// How long nothing is accepted after an error, for example if there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The buffer of a connection for each direction, bytes.
const BUFFER: usize = 8 << 10;

/// How long one side may send nothing after the other side has sent its last byte. Otherwise a guest could keep all
/// connections for ever.
const HALF_OPEN: Duration = Duration::from_secs(60);

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
                match Loopback::redirect(guest.vm.process()).await {
                    Ok(loopback) => forward(&loopback, &guest, &id).await,
                    Err(error) => {
                        tracing::info!(
                            container = id,
                            error = chain(&error),
                            "port-forward does not reach this pod"
                        );
                    }
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
        let stream = vsock.connect_stream(stream_id, BUFFER).await.map_err(io::Error::other)?;
        guest.agent.connect_loopback(id, address, stream_id).await.map_err(io::Error::other)?;
        Ok::<_, io::Error>(stream)
    };
    match connected.await {
        // An error is that of one side, which has ended, and the other side sees its connection end.
        Ok(stream) => drop(relay(client, stream).await),
        Err(error) => {
            tracing::debug!(container = id, %address, error = chain(&error), "a port of the guest is not reached");
            reset(&client);
        }
    }
}

/// Copies both ways until both have ended, one has failed, or only one has ended and the other is silent.
async fn relay(client: TcpStream, stream: GuestStream) -> io::Result<()> {
    // The sender has already decided how to split its data.
    client.set_nodelay(true)?;
    let (mut client, mut stream) = (split(client), split(stream));
    let (to_guest, to_host) = (watch::Sender::new(false), watch::Sender::new(false));
    tokio::try_join!(
        copy(&mut client.0, &mut stream.1, &to_guest, to_host.subscribe()),
        copy(&mut stream.0, &mut client.1, &to_host, to_guest.subscribe()),
    )?;
    Ok(())
}

/// Copies one way, and says so at the end. `other` is the other way.
async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    end: &watch::Sender<bool>,
    mut other: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        buffer.clear();
        let is_half_open = *other.borrow_and_update();
        let read = tokio::select! {
            read = from.read_buf(&mut buffer) => read?,
            Ok(()) = other.changed(), if !is_half_open => continue,
            () = sleep(HALF_OPEN), if is_half_open => return Err(io::ErrorKind::TimedOut.into()),
        };
        if read == 0 {
            end.send_replace(true);
            return to.shutdown().await;
        }
        to.write_all(&buffer).await?;
    }
}

/// The client has been told that it is connected. A reset is the nearest to a refusal that is left.
fn reset(client: &TcpStream) {
    // If this fails, the client sees the end of an empty stream.
    _ = client.set_zero_linger();
}
