//! Sockets of the host's services that a container mounts, and those in directories that it mounts
//! ([`in_directories`]). virtio-fs carries no connections, so each is a socket of the guest, with the mode and the
//! owner of the host's. The shim connects to the service.

pub mod datagrams;
pub mod in_directories;

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bulkhead_agent_api::{HOST_SOCKETS_DIR, MAX_HOST_CONNECTIONS, MAX_HOST_SOCKETS, relay};
use nix::mount::{MsFlags, mount};
use tokio::{
    io::AsyncReadExt,
    net::{UnixListener, UnixStream},
    sync::{Semaphore, SemaphorePermit, watch},
    time::{sleep, timeout},
};

use self::datagrams::Datagrams;
use crate::streams::Connection;

/// How long the shim may take to connect to the service.
const CONNECT: Duration = Duration::from_secs(30);

/// How long nothing is accepted after an error, for example if there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The name of a socket before it has its mode and its owner. The names of containers begin with no dot.
const NEW: &str = ".new";

/// The connections of all containers. Each has two buffers of 8 KiB.
static CONNECTIONS: Semaphore = Semaphore::const_new(MAX_HOST_CONNECTIONS);

/// A socket to be made.
#[derive(Debug, Clone)]
pub struct HostSocket {
    /// The index of its mount in the spec.
    pub index: u32,
    /// Its permissions.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// It is of the type SOCK_DGRAM, and not SOCK_STREAM.
    pub datagrams: bool,
}

/// Who has connected: the effective ids of the process.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// A socket of the guest in place of the host's.
pub enum Listener {
    /// Of streams.
    Streams(UnixListener),
    /// Of datagrams. None: somebody receives them already.
    Datagrams(Mutex<Option<Datagrams>>),
}

/// What comes from inside a container.
pub enum Client {
    /// A connection.
    Stream {
        /// The agent's end of it.
        stream: UnixStream,
        /// Returned when it ends.
        permit: SemaphorePermit<'static>,
    },
    /// All datagrams of a socket.
    Datagrams {
        /// The socket.
        socket: Datagrams,
        /// True when nothing shall be received any more. None: that does not happen.
        closed: Option<watch::Receiver<bool>>,
    },
}

/// The sockets of a container, by the indexes of their mounts. Their names are removed when this is dropped.
#[derive(Default)]
pub struct HostSockets {
    /// None: there are no names.
    directory: Mutex<Option<PathBuf>>,
    listeners: BTreeMap<u32, Listener>,
}

impl HostSockets {
    /// Makes the sockets of the container with this id, which is a plain name.
    pub fn make(id: &str, sockets: &[HostSocket]) -> io::Result<Self> {
        if sockets.is_empty() {
            return Ok(Self::default());
        }
        if sockets.len() > MAX_HOST_SOCKETS {
            let reason = format!("a container mounts {MAX_HOST_SOCKETS} sockets of the host at most");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let all = Path::new(HOST_SOCKETS_DIR);
        mount_directory(all)?;
        let directory = all.join(id);
        fs::create_dir(&directory)?;
        // Dropped after an error, it removes what was made.
        let mut made = Self { directory: Mutex::new(Some(directory.clone())), listeners: BTreeMap::new() };
        for HostSocket { index, mode, uid, gid, datagrams } in sockets {
            // The address of a socket is shorter than the id of a container can be. It keeps its other names.
            let new = all.join(NEW);
            let listener = Listener::bind(&new, *datagrams)?;
            let place = directory.join(index.to_string());
            let finished = chown(&new, Some(*uid), Some(*gid))
                .and_then(|()| fs::set_permissions(&new, Permissions::from_mode(mode & 0o7777)))
                .and_then(|()| fs::rename(&new, &place));
            if let Err(error) = finished {
                fs::remove_file(&new)?;
                return Err(error);
            }
            made.listeners.insert(*index, listener);
        }
        Ok(made)
    }

    /// Waits for the next connection to the socket of this index, see [`Listener::accept`].
    pub async fn accept(&self, index: u32) -> Option<(Client, Peer)> {
        self.listeners.get(&index)?.accept().await
    }

    /// Removes the names, so that another container of this id can have them.
    pub fn remove_names(&self) {
        let directory = self.directory.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(directory) = directory
            && let Err(error) = fs::remove_dir_all(&directory)
        {
            eprintln!("bulkhead-agent: {} stays: {error}", directory.display());
        }
    }
}

impl Drop for HostSockets {
    fn drop(&mut self) {
        self.remove_names();
    }
}

impl Listener {
    /// Binds a socket of this type, and listens.
    pub fn bind(path: &Path, datagrams: bool) -> io::Result<Self> {
        Ok(match datagrams {
            true => Self::Datagrams(Mutex::new(Some(Datagrams::bind(path)?))),
            false => Self::Streams(UnixListener::bind(path)?),
        })
    }

    /// Waits for the next connection. Of a socket of datagrams, all are one, which is there at once, and belongs to
    /// nobody. None: somebody has it.
    pub async fn accept(&self) -> Option<(Client, Peer)> {
        match self {
            Self::Streams(listener) => accept(listener).await,
            Self::Datagrams(socket) => {
                let socket = socket.lock().unwrap_or_else(PoisonError::into_inner).take()?;
                Some((Client::Datagrams { socket, closed: None }, Peer { uid: 0, gid: 0 }))
            }
        }
    }
}

async fn accept(listener: &UnixListener) -> Option<(Client, Peer)> {
    loop {
        let accepted = listener.accept().await.and_then(|(stream, _)| Ok((stream.peer_cred()?, stream)));
        match accepted {
            Ok((cred, stream)) => {
                let peer = Peer { uid: cred.uid(), gid: cred.gid() };
                // It is never closed.
                let permit = CONNECTIONS.acquire().await.ok()?;
                return Some((Client::Stream { stream, permit }, peer));
            }
            Err(error) => {
                eprintln!("bulkhead-agent: accepting a connection to a service of the host: {error}");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

impl Client {
    /// The same, but datagrams are received only until this is true. Connections go on.
    #[must_use]
    pub fn until(self, closed: watch::Receiver<bool>) -> Self {
        match self {
            Self::Datagrams { socket, .. } => Self::Datagrams { socket, closed: Some(closed) },
            Self::Stream { .. } => self,
        }
    }

    /// Copies between the connection and the shim's stream, when the service has accepted it.
    pub async fn forward(self, stream: Box<dyn Connection>) -> io::Result<()> {
        match self {
            Self::Stream { stream: client, permit } => {
                let copied = copy(client, stream).await;
                drop(permit);
                copied
            }
            Self::Datagrams { socket, closed: None } => socket.forward(stream).await,
            Self::Datagrams { socket, closed: Some(mut closed) } => tokio::select! {
                forwarded = socket.forward(stream) => forwarded,
                _ = closed.wait_for(|is_closed| *is_closed) => Ok(()),
            },
        }
    }
}

async fn copy(client: UnixStream, mut stream: Box<dyn Connection>) -> io::Result<()> {
    if timeout(CONNECT, stream.read_u8()).await?? != relay::CONNECTED {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let watched = std::os::fd::AsFd::as_fd(&client).try_clone_to_owned()?;
    relay::relay_while(client, stream, || !relay::is_closed(&watched)).await
}

/// Mounts a file system for the sockets, unless it is there. It holds names only, which take no blocks. Everybody can
/// pass through it: the root of a user namespace binds a socket from there. No container sees it.
fn mount_directory(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)?;
    let parent = path.parent().unwrap_or(Path::new("/"));
    if fs::metadata(path)?.dev() != fs::metadata(parent)?.dev() {
        return Ok(());
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    Ok(mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some("size=4k,mode=0711"))?)
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncWriteExt, DuplexStream, duplex},
        task::JoinHandle,
    };

    use super::*;

    /// A process of a container that has connected, the shim's end of the stream, and what forwards between them.
    async fn connected() -> (UnixStream, DuplexStream, JoinHandle<io::Result<()>>) {
        let (client, stream) = UnixStream::pair().unwrap();
        let (shim, agent) = duplex(64);
        let permit = CONNECTIONS.acquire().await.unwrap();
        let forwarded = tokio::spawn(Client::Stream { stream, permit }.forward(Box::new(agent)));
        (client, shim, forwarded)
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_asked_may_wait_for_hours_until_it_is_gone() {
        let (mut client, mut shim, forwarded) = connected().await;
        shim.write_u8(relay::CONNECTED).await.unwrap();
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let mut text = String::new();
        shim.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "question");
        sleep(100 * relay::HALF_OPEN).await;
        assert!(!forwarded.is_finished());
        shim.write_all(b"answer").await.unwrap();
        let mut answer = [0; 6];
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"answer");
        drop(client);
        assert_eq!(forwarded.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn the_connection_to_a_service_that_is_not_there_ends() {
        let (mut client, shim, forwarded) = connected().await;
        drop(shim);
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        assert!(client.write_all(b"question").await.is_err());
        assert_eq!(forwarded.await.unwrap().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
