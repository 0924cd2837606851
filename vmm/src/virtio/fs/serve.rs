//! The worker of a virtio-fs device: FUSE requests from its queues to the server.

use std::{io, os::fd::AsRawFd};

use rustix::io::Errno;
use virtio_queue::QueueT;
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::server::Server;
use crate::{
    GuestMemory,
    virtio::{
        ActiveQueue, Interrupt,
        chain::{Chain, ChainError},
        queue::QueueError,
        worker::{Events, no_events},
    },
};

/// Requests of one queue before the other, and the stop event, have their turn.
const TURN: usize = 64;
const TOKEN_QUEUE: u64 = 0;

/// Why a virtio-fs device stopped serving its driver.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    #[error("a queue is broken")]
    Queue(#[from] QueueError),
    #[error("a request's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("the directory that is shared cannot be looked at")]
    Root(#[source] Errno),
    #[error("cannot wait for events")]
    Epoll(#[source] io::Error),
}

/// Serves requests one after the other. One that takes long keeps the others waiting: what is opened is regular files
/// and directories, so it takes as long as a file system of the host does.
pub(super) struct Service<'m> {
    pub(super) memory: &'m GuestMemory,
    pub(super) server: Server,
    pub(super) interrupt: &'m Interrupt,
}

impl<'m> Service<'m> {
    /// Serves `queues` until `stop` is readable, or the driver does something illegal.
    pub(super) fn run(&mut self, mut queues: Vec<ActiveQueue>, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop).map_err(ServeError::Epoll)?;
        for queue in &queues {
            // After any of them all queues are looked at, so one token does.
            events.watch(queue.kick.as_raw_fd(), EventSet::IN, TOKEN_QUEUE).map_err(ServeError::Epoll)?;
        }

        // The driver may have made requests before its kicks were looked at.
        let mut busy = true;
        let mut came = no_events();
        loop {
            if events.wait(busy, &mut came).map_err(ServeError::Epoll)?.is_none() {
                return Ok(());
            }
            busy = false;
            for queue in &mut queues {
                busy |= self.serve_queue(queue)?;
            }
        }
    }

    /// Serves what is in `queue`, for one turn. True: there may be more, for which no kick will come.
    fn serve_queue(&mut self, queue: &mut ActiveQueue) -> Result<bool, ServeError> {
        for _ in 0..TURN {
            let Some(chain) = queue.pop(self.memory)? else {
                return Ok(queue.rearm(self.memory)?);
            };
            let chain = Chain::walk(self.memory, chain, queue.queue.size())?;
            let head = chain.head;
            let written = self.server.serve(chain);
            queue.push(self.memory, head, written)?;
            queue.notify(self.memory, self.interrupt)?;
        }
        Ok(true)
    }
}
