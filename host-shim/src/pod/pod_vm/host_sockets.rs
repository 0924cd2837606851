//! Connects containers with services of the host whose sockets they mount. The agent has a socket of its own for each
//! (`guest-agent/src/host_sockets.rs`). The guest names a socket by the index of a mount, never by a path.

use std::{
    future::pending,
    io::{self, ErrorKind},
    os::fd::AsFd,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use bulkhead_agent_api::{MAX_HOST_CONNECTIONS, relay};
use tokio::{
    io::AsyncWriteExt,
    sync::{Mutex, Notify, OwnedSemaphorePermit, Semaphore},
    task::{AbortHandle, JoinError, JoinSet},
    time::sleep,
};
use ttrpc::Code;

use super::{datagrams::Senders, socket_directories::Confinements};
use crate::{
    guest::agent::{AgentError, Peer},
    host::host_socket::{Confinement, HostSocket},
    process::running_guest::Guest,
    types::{error::chain, log_limit::SharedLogLimit, pace::Pace},
    vm::vsock::GuestStream,
};

/// How long nothing is accepted after an error of the guest.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The most connections of a pod in each of these times. Each takes a thread of the shim for a moment.
const MOST_BEGUN: u32 = 64;
const BEGUN_WINDOW: Duration = Duration::from_millis(100);

/// Lines in a window of the log. Whoever may connect brings them about.
const LOGGED: u32 = 10;
const LOG_WINDOW: Duration = Duration::from_secs(600);

/// The limit of lines about connections that have failed.
pub(super) fn new_log() -> SharedLogLimit {
    SharedLogLimit::new(LOGGED, LOG_WINDOW)
}

/// Bytes of datagrams of a pod in the shim at one time: ten of the longest. Each socket has one at most. The next one
/// waits.
const MOST_DATAGRAM_BYTES: usize = 2 << 20;

/// The most datagrams of a pod in each of these times, with those that are refused. Each costs the shim a system call,
/// and its sender less. A long one counts as several, because the shim also reads it.
pub(super) const MOST_DATAGRAMS: u32 = 2048;
pub(super) const BYTES_OF_ONE: usize = 16 << 10;
pub(super) const DATAGRAMS_WINDOW: Duration = Duration::from_millis(100);

/// The right to have connections and datagrams, which the containers of a pod share.
#[derive(Debug, Clone)]
pub(crate) struct Connections {
    open: Arc<Semaphore>,
    begun: Arc<Mutex<Pace>>,
    datagram_bytes: Arc<Semaphore>,
    datagrams: Arc<Mutex<Pace>>,
}

impl Default for Connections {
    fn default() -> Self {
        Self {
            open: Arc::new(Semaphore::new(MAX_HOST_CONNECTIONS)),
            begun: Arc::new(Mutex::new(Pace::new(MOST_BEGUN, BEGUN_WINDOW))),
            datagram_bytes: Arc::new(Semaphore::new(MOST_DATAGRAM_BYTES)),
            datagrams: Arc::new(Mutex::new(Pace::new(MOST_DATAGRAMS, DATAGRAMS_WINDOW))),
        }
    }
}

impl Connections {
    /// Waits until another connection may begin. None is ever refused.
    async fn begin(&self) -> Option<OwnedSemaphorePermit> {
        self.pace().await;
        // It is never closed.
        Arc::clone(&self.open).acquire_owned().await.ok()
    }

    /// Waits until another datagram may pass, and until there is room for it, of this many bytes.
    pub(super) async fn datagram(&self, bytes: usize) -> io::Result<OwnedSemaphorePermit> {
        for _ in 0..=bytes / BYTES_OF_ONE {
            self.datagrams.lock().await.turn().await;
        }
        // It is never closed.
        Arc::clone(&self.datagram_bytes).acquire_many_owned(bytes as u32).await.map_err(io::Error::other)
    }

    /// Waits until another connection may be begun.
    pub(super) async fn pace(&self) {
        self.begun.lock().await.turn().await;
    }
}

/// Serves the sockets that a container mounts until it is dropped.
#[derive(Debug)]
pub(crate) struct HostSockets(Vec<AbortHandle>);

impl HostSockets {
    /// `id` is the container. Ends with the VM too.
    pub(crate) fn serve(
        guest: &Guest,
        id: &str,
        confinement: &Confinement,
        sockets: &[Arc<HostSocket>],
        connections: &Connections,
    ) -> Self {
        let confinement = Arc::new(confinement.clone());
        let serve = |socket: &Arc<HostSocket>| {
            let service = Service {
                guest: guest.clone(),
                clients: Clients::Container { id: id.into(), confinement: Arc::clone(&confinement) },
                socket: Arc::clone(socket),
                connections: connections.clone(),
                log: new_log(),
            };
            tokio::spawn(async move { service.run(pending()).await }).abort_handle()
        };
        Self(sockets.iter().map(serve).collect())
    }
}

impl Drop for HostSockets {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// A service of the host.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) guest: Guest,
    pub(super) clients: Clients,
    pub(super) socket: Arc<HostSocket>,
    pub(super) connections: Connections,
    pub(super) log: SharedLogLimit,
}

/// Who reaches a service.
#[derive(Debug, Clone)]
pub(super) enum Clients {
    /// The container of this id, which mounts its socket.
    Container { id: String, confinement: Arc<Confinement> },
    /// All containers of the pod that mount the directory with its socket.
    OfDirectory {
        confinements: Arc<Confinements>,
        /// Notified when a connection has failed.
        failed: Arc<Notify>,
    },
}

impl Clients {
    /// None: several containers.
    fn container(&self) -> Option<&str> {
        match self {
            Self::Container { id, .. } => Some(id),
            Self::OfDirectory { .. } => None,
        }
    }

    /// That of a container in which a process may have this user and this group, if there is one.
    pub(super) fn confinement(&self, uid: u32, gid: u32) -> io::Result<Arc<Confinement>> {
        match self {
            Self::Container { confinement, .. } => Ok(Arc::clone(confinement)),
            Self::OfDirectory { confinements, .. } => confinements.of(uid, gid),
        }
    }
}

/// A connection of a container that the agent has accepted.
struct Accepted {
    stream: GuestStream,
    peer: Peer,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Service {
    /// Accepts nothing more after `closed`.
    pub(super) async fn run(&self, closed: impl Future<Output = ()>) {
        tokio::select! {
            () = self.serve(closed) => {}
            _ = self.guest.vm.exited() => {}
        }
    }

    async fn serve(&self, closed: impl Future<Output = ()>) {
        // They end with this function.
        let mut connections = JoinSet::new();
        // A guest that never answers keeps nothing here.
        match self.socket.datagrams {
            true => unless(closed, self.pass_datagrams()).await,
            false => unless(closed, self.accept(&mut connections)).await,
        }
        while let Some(ended) = connections.join_next().await {
            self.ended(ended);
        }
    }

    /// Accepts until the guest has no such container or socket any more. Those that are connected go on.
    async fn accept(&self, connections: &mut JoinSet<io::Result<()>>) {
        // It is not given up when a connection ends: the agent may have accepted one already.
        let mut accepting = pin!(self.accept_after(Duration::ZERO));
        loop {
            let accepted = tokio::select! {
                accepted = &mut accepting => accepted,
                Some(ended) = connections.join_next() => {
                    self.ended(ended);
                    continue;
                }
            };
            match accepted {
                Ok(accepted) => {
                    let connected = forward(Arc::clone(&self.socket), self.clients.clone(), accepted);
                    connections.spawn(connected);
                    accepting.set(self.accept_after(Duration::ZERO));
                }
                Err(AgentError::Refused { code: Code::NOT_FOUND, .. } | AgentError::Disconnected { .. }) => {
                    return;
                }
                Err(error) => {
                    self.log(&chain(&error));
                    accepting.set(self.accept_after(ACCEPT_PAUSE));
                }
            }
        }
    }

    fn ended(&self, connection: Result<io::Result<()>, JoinError>) {
        if let Ok(Err(error)) = connection {
            self.failed(&error);
        }
    }

    fn failed(&self, error: &io::Error) {
        self.log(&chain(error));
        if let Clients::OfDirectory { failed, .. } = &self.clients {
            failed.notify_one();
        }
    }

    /// Passes on what the agent receives at a socket of datagrams.
    async fn pass_datagrams(&self) {
        let mut pause = Duration::ZERO;
        let stream = loop {
            match self.stream_after(pause).await {
                Ok((stream, _)) => break stream,
                Err(AgentError::Refused { code: Code::NOT_FOUND, .. } | AgentError::Disconnected { .. }) => {
                    return;
                }
                Err(error) => self.log(&chain(&error)),
            }
            pause = ACCEPT_PAUSE;
        };
        let senders = Senders::new(&self.socket, &self.clients, &self.connections, self.guest.vm.pid());
        match senders.pass_all(stream, |error| self.log(&chain(error))).await {
            // The agent receives nothing more.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {}
            Err(error) => self.failed(&error),
        }
    }

    /// Accepts one connection, after a pause.
    async fn accept_after(&self, pause: Duration) -> Result<Accepted, AgentError> {
        let (stream, peer) = self.stream_after(pause).await?;
        let permit = self.connections.begin().await;
        Ok(Accepted { stream, peer, _permit: permit })
    }

    async fn stream_after(&self, pause: Duration) -> Result<(GuestStream, Peer), AgentError> {
        sleep(pause).await;
        let vsock = self.guest.vm.vsock();
        let stream_id = vsock.stream_ids(1);
        let stream = vsock.connect_stream(stream_id, relay::BUFFER).await?;
        let id = self.clients.container().unwrap_or_default();
        let peer = self.guest.agent.accept_host_socket(id, self.socket.index, stream_id).await?;
        Ok((stream, peer))
    }

    fn log(&self, error: &str) {
        if self.log.allows() {
            tracing::warn!(
                container = self.clients.container(),
                socket = %self.socket.path.display(),
                error,
                "a container does not reach a service of the host"
            );
        }
    }
}

/// Waits for the end of `work`, or of `closed`. Both are dropped then.
pub(super) async fn unless(closed: impl Future<Output = ()>, work: impl Future<Output = ()>) {
    tokio::select! {
        () = closed => {}
        () = work => {}
    }
}

/// Connects to the service and copies both ways until they have ended. An error is that of the connecting. The end of
/// the stream tells the agent.
async fn forward(socket: Arc<HostSocket>, clients: Clients, accepted: Accepted) -> io::Result<()> {
    let Accepted { mut stream, peer, _permit } = accepted;
    let confinement = clients.confinement(peer.uid, peer.gid)?;
    let service = socket.connect(peer.uid, peer.gid, &confinement).await?;
    drop((socket, clients));
    let ends = [stream.get_ref().as_fd(), service.as_fd()].map(|end| end.try_clone_to_owned());
    let [guest, host] = ends;
    let (guest, host) = (guest?, host?);
    stream.write_u8(relay::CONNECTED).await?;
    let are_there = || !relay::is_closed(&guest) && !relay::is_closed(&host);
    // If one side breaks, the other one sees the end of its connection. Nobody else needs to know.
    _ = relay::relay_while(stream, service, are_there).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn connections_of_a_pod_begin_at_a_bounded_rate() {
        let (connections, begun) = (Connections::default(), Instant::now());
        for _ in 0..5 * MOST_BEGUN {
            // Each ends at once.
            drop(connections.clone().begin().await.unwrap());
        }
        assert_eq!(begun.elapsed().as_millis() / BEGUN_WINDOW.as_millis(), 4);
    }
}
