//! The worker of a virtio-fs device: FUSE requests from its queues to the server.

use std::{io, os::fd::AsRawFd, sync::Arc};

use fuse_backend_rs::{
    abi::fuse_abi::OutHeader,
    api::{Vfs, server::Server},
    transport::{self, Reader, VirtioFsWriter, Writer},
};
use virtio_queue::{DescriptorChain, QueueT};
use vm_memory::ByteValued;
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::known::Known;
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
    #[error("a request's buffers cannot be used")]
    Buffers(#[source] transport::Error),
    #[error("cannot wait for events")]
    Epoll(#[source] io::Error),
}

/// Serves requests one after the other. One that takes long keeps the others waiting: what is opened is regular files
/// and directories, so it takes as long as a file system of the host does.
pub(super) struct Service<'m> {
    pub(super) memory: &'m GuestMemory,
    pub(super) server: Server<Arc<Vfs>>,
    pub(super) known: Known,
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
            let head = chain.head_index();
            let written = self.serve_request(chain, queue.queue.size())?;
            queue.push(self.memory, head, written)?;
            queue.notify(self.memory, self.interrupt)?;
        }
        Ok(true)
    }

    /// Serves one request and returns the length of its answer.
    fn serve_request(
        &mut self,
        chain: DescriptorChain<&'m GuestMemory>,
        size: u16,
    ) -> Result<u32, ServeError> {
        let checked = Chain::walk(self.memory, chain.clone(), size)?;
        // These read the descriptors again, and check for themselves whatever they are by now.
        let reader =
            Reader::from_descriptor_chain(self.memory, chain.clone()).map_err(ServeError::Buffers)?;
        let writer = VirtioFsWriter::new(self.memory, chain).map_err(ServeError::Buffers)?;
        match self.server.handle_message(reader, Writer::VirtioFs(writer), None, None) {
            // The server never writes more than 4 GiB.
            Ok(written) => Ok(self.known.complete(checked, written as u32)),
            Err(_) => Ok(refuse(checked)),
        }
    }
}

/// Answers what is not a FUSE request with EIO, if it wants an answer, and returns the answer's length.
fn refuse(mut chain: Chain) -> u32 {
    // fuse_in_header starts with len, opcode (4 bytes each) and unique.
    let Some(start) = chain.readable.read_array::<16>() else { return 0 };
    let [.., a, b, c, d, e, f, g, h] = start;
    let answer = OutHeader {
        len: size_of::<OutHeader>() as u32,
        error: -libc::EIO,
        unique: u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
    };
    if chain.writable.len() < size_of::<OutHeader>() {
        return 0;
    }
    chain.writable.write(answer.as_slice());
    answer.len
}
