//! Passes the FUSE requests in the queues of a virtio-fs device to the file server.

use std::os::fd::AsRawFd;

use rustix::io::Errno;
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::file_server::Server;
use crate::{
    GuestMemory,
    virtio::{
        ActiveQueue, Interrupt,
        chain::{Chain, ChainError},
        event_loop::{EventError, EventHandler, Events},
        queue::{Outcome, QueueError, Turn},
    },
};

/// Of each queue.
const TURN: Turn = Turn { chains: 64, batch: 1 };
const TOKEN_QUEUE: u64 = 0;

/// Why a virtio-fs device stops serving its driver.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    #[error("a queue is broken")]
    Queue(#[from] QueueError),
    #[error("a request's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("cannot read the attributes of the shared directory")]
    Root(#[source] Errno),
    #[error(transparent)]
    Events(#[from] EventError),
}

/// The active device. It serves one request after the other, so a slow request delays the others. The server opens only
/// regular files and directories, so a request takes as long as the file systems of the host do.
pub(super) struct Service<'m> {
    pub(super) memory: &'m GuestMemory,
    pub(super) server: Server,
    pub(super) interrupt: &'m Interrupt,
    pub(super) queues: Vec<ActiveQueue>,
}

impl Service<'_> {
    /// Serves until `stop` is signalled, or the driver does something illegal.
    pub(super) fn run(&mut self, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop)?;
        for queue in &self.queues {
            // After each event all queues are served, so one token is enough.
            events.watch(queue.kick.as_raw_fd(), EventSet::IN, TOKEN_QUEUE)?;
        }
        events.run(self)
    }
}

impl EventHandler for Service<'_> {
    type Error = ServeError;

    fn serve_queues(&mut self) -> Result<bool, ServeError> {
        let (server, mut pending) = (&mut self.server, false);
        for queue in &mut self.queues {
            pending |= queue.serve(self.memory, self.interrupt, TURN, |chain: Chain| {
                Ok::<_, ServeError>(Outcome::Used(server.serve(chain)))
            })?;
        }
        Ok(pending)
    }
}
