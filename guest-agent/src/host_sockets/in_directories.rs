//! Sockets of the host's services in directories that containers mount. The agent listens at the inode by which the
//! guest's kernel knows the socket, see [`bulkhead_vmm_api::SharedSocket`]. So the containers find it by its name, with
//! the mode and the owner that it has on the host.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use bulkhead_agent_api::{MAX_DIRECTORY_SOCKETS, SHARE_DIR};
use bulkhead_vmm_api::SharedSocket;
use tokio::sync::watch;

use super::{Client, Listener, Peer};
use crate::machine::Machine;

/// How long to look for a socket. The guest may have cached for a second that there is none, or an older one.
const LOOK: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A socket to listen at.
#[derive(Debug, Clone)]
pub struct DirectorySocket {
    /// The shim's number for it.
    pub index: u32,
    /// Where it is in the share.
    pub path: PathBuf,
    /// The host's socket.
    pub socket: SharedSocket,
    /// Of the type SOCK_DGRAM, and not SOCK_STREAM.
    pub datagrams: bool,
}

impl DirectorySocket {
    /// Listens there. Blocks. `NotFound`: there is no such socket.
    pub fn listen(&self, machine: &dyn Machine) -> io::Result<Listener> {
        let (path, began) = (Path::new(SHARE_DIR).join(&self.path), Instant::now());
        loop {
            let name = machine.name_to_bind(&path, &self.socket);
            match name.and_then(|name| Listener::bind(&name, self.datagrams)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && began.elapsed() < LOOK => {
                    thread::sleep(LOOK_AGAIN);
                }
                other => return other,
            }
        }
    }
}

/// The sockets at which the agent listens, by the shim's numbers. None: it is about to listen.
#[derive(Default)]
pub struct DirectorySockets(Mutex<HashMap<u32, Option<Arc<Listening>>>>);

struct Listening {
    listener: Listener,
    closed: watch::Sender<bool>,
}

impl DirectorySockets {
    /// Takes a number, for a socket that is [added](Self::add) or closed later.
    pub fn begin(&self, index: u32) -> io::Result<()> {
        let mut sockets = self.lock();
        if sockets.len() >= MAX_DIRECTORY_SOCKETS || sockets.contains_key(&index) {
            return Err(io::Error::other(format!("there are too many, or there is a number {index}")));
        }
        sockets.insert(index, None);
        Ok(())
    }

    /// Adds the socket of a number, unless that was closed meanwhile.
    pub fn add(&self, index: u32, listener: Listener) -> io::Result<()> {
        match self.lock().get_mut(&index) {
            Some(place @ None) => {
                *place = Some(Arc::new(Listening { listener, closed: watch::Sender::new(false) }));
                Ok(())
            }
            _ => Err(io::Error::other(format!("the socket with the number {index} is not wanted any more"))),
        }
    }

    /// Listens there no more.
    pub fn close(&self, index: u32) {
        if let Some(Some(listening)) = self.lock().remove(&index) {
            listening.closed.send_replace(true);
        }
    }

    /// Waits for the next connection to a socket. None: nobody listens there.
    pub async fn accept(&self, index: u32) -> Option<(Client, Peer)> {
        let listening = self.lock().get(&index).cloned()??;
        let mut closed = listening.closed.subscribe();
        tokio::select! {
            accepted = listening.listener.accept() => {
                let (client, peer) = accepted?;
                Some((client.until(listening.closed.subscribe()), peer))
            }
            _ = closed.wait_for(|is_closed| *is_closed) => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Option<Arc<Listening>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn listener(directory: &Path, name: &str) -> Listener {
        Listener::bind(&directory.join(name), false).unwrap()
    }

    #[tokio::test]
    async fn closing_a_socket_ends_a_waiting_accept() {
        let directory = tempfile::tempdir().unwrap();
        let sockets = DirectorySockets::default();
        sockets.begin(7).unwrap();
        sockets.add(7, listener(directory.path(), "7")).unwrap();
        let _connected = UnixStream::connect(directory.path().join("7")).unwrap();
        assert!(sockets.accept(7).await.is_some());
        let close = async { sockets.close(7) };
        assert!(tokio::join!(sockets.accept(7), close).0.is_none());
        assert!(sockets.accept(7).await.is_none());
        let refused = UnixStream::connect(directory.path().join("7")).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test]
    async fn numbers_are_unique_and_limited() {
        let directory = tempfile::tempdir().unwrap();
        let sockets = DirectorySockets::default();
        for index in 0..MAX_DIRECTORY_SOCKETS as u32 {
            sockets.begin(index).unwrap();
            sockets.begin(index).unwrap_err();
            sockets.add(index, listener(directory.path(), &index.to_string())).unwrap();
            sockets.add(index, listener(directory.path(), &format!("{index}-again"))).unwrap_err();
        }
        sockets.begin(1000).unwrap_err();
        sockets.add(1000, listener(directory.path(), "1000")).unwrap_err();
    }

    #[tokio::test]
    async fn a_socket_that_was_closed_before_it_was_made_is_not_kept() {
        let directory = tempfile::tempdir().unwrap();
        let sockets = DirectorySockets::default();
        sockets.begin(7).unwrap();
        sockets.close(7);
        sockets.add(7, listener(directory.path(), "7")).unwrap_err();
        assert!(sockets.accept(7).await.is_none());
        assert!(sockets.lock().is_empty());
    }
}
