//! Memory device (virtio 1.3, 5.15): memory that the guest gets while it runs.
//!
//! The device has a region of the guest's addresses. The VMM makes a part of it, from its start on, usable, and asks the
//! driver to plug so much of it; the driver does so in its own time, and may unplug it again. What is usable is all that is
//! memory to the vCPUs and to the devices ([`crate::memory::Slots::grow`]), plugged or not: a guest that uses what it has not
//! plugged uses what was granted to it, and what it has unplugged goes back to the host.

use std::{
    io,
    os::fd::AsRawFd,
    sync::{Arc, Mutex},
};

use virtio_bindings::virtio_ids::VIRTIO_ID_MEM;
use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestMemory as _, GuestMemoryError, GuestMemoryRegion as _};
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use self::blocks::{Blocks, State};
use super::{
    Activation, ActiveQueue, Interrupt, VirtioDevice,
    chain::{Chain, ChainError},
    common,
    queue::QueueError,
    worker::{Events, Job, no_events},
};
use crate::{
    GuestMemory,
    jail::Duty,
    lock,
    memory::{self, Region},
};

mod blocks;

/// VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE (virtio 1.3, 5.15.3).
const UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;
/// Of the one queue, for requests. Linux has one request at a time.
const QUEUE_SIZES: [u16; 1] = [16];
/// What is plugged and unplugged: a huge page of the host.
pub const BLOCK: u64 = 2 << 20;
/// Of `struct virtio_mem_config` (5.15.4).
const CONFIG_LEN: usize = 56;
/// Of `struct virtio_mem_req` (5.15.6).
const REQUEST_LEN: usize = 24;
/// Of `struct virtio_mem_resp`, with and without the state (5.15.6).
const RESPONSE_LEN: usize = 10;
const TOKEN_QUEUE: u64 = 0;
const TOKEN_WANTED: u64 = 1;
/// Requests before the stop event has its turn.
const TURN: usize = 16;

/// The device.
pub struct Mem(Arc<Shared>);

/// Its other side, by which the VMM says what is wanted and learns what came of it.
pub struct MemControl(Arc<Shared>);

struct Shared {
    /// First address and bytes of the device's region.
    start: u64,
    len: u64,
    plan: Mutex<Plan>,
    /// For the worker: something else is wanted.
    wanted: EventFd,
    /// For the VMM: the driver has plugged or unplugged.
    progress: EventFd,
}

/// What changes.
#[derive(Default)]
struct Plan {
    /// Those that are usable: the driver is asked to plug all of them, and never fewer than before.
    blocks: Blocks,
    /// Tells the driver that it has read two halves of different sizes (virtio 1.3, 2.5).
    generation: u32,
}

impl Mem {
    /// For a region of which nothing is the guest's yet.
    pub fn new(region: &Region) -> io::Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC);
        Ok(Self(Arc::new(Shared {
            start: region.start_addr().0,
            len: region.capacity(),
            plan: Mutex::default(),
            wanted: event()?,
            progress: event()?,
        })))
    }

    /// The other side.
    pub fn control(&self) -> MemControl {
        MemControl(self.0.clone())
    }
}

impl MemControl {
    /// Asks the driver to plug `bytes`, a multiple of [`BLOCK`], if fewer were asked for before: as many from the region's
    /// start on must be memory.
    pub fn request(&self, bytes: u64) -> io::Result<()> {
        let mut plan = lock(&self.0.plan);
        if bytes <= plan.blocks.count() * BLOCK {
            return Ok(());
        }
        plan.blocks.set_count(bytes / BLOCK);
        plan.generation = plan.generation.wrapping_add(1);
        drop(plan);
        self.0.wanted.write(1)
    }

    /// Bytes that are plugged.
    pub fn plugged(&self) -> u64 {
        lock(&self.0.plan).blocks.plugged() * BLOCK
    }

    /// Readable when [`MemControl::plugged`] may have changed.
    pub fn progress(&self) -> &EventFd {
        &self.0.progress
    }
}

impl VirtioDevice for Mem {
    fn duty(&self) -> Duty {
        Duty::Mem
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_MEM
    }

    /// It is not insisted on: a driver that does not take it may read what is unplugged (5.15.5), and can.
    fn features(&self) -> u64 {
        UNPLUGGED_INACCESSIBLE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        common::read_config(&self.0.config(), offset, data);
    }

    fn config_generation(&self) -> u32 {
        lock(&self.0.plan).generation
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Job> {
        let Activation { memory, queues, interrupt, log, .. } = activation;
        let requests = queues.into_iter().next().filter(|queue| queue.queue.ready());
        let requests = requests.ok_or_else(|| io::Error::other("the driver did not set up its queue"))?;
        let shared = self.0.clone();
        Ok(Box::new(move |stop| {
            let mut service = Service { memory: &memory, requests, interrupt: &interrupt, shared: &shared };
            common::conclude("virtio-mem", service.run(stop), &interrupt, &log);
        }))
    }
}

impl Shared {
    /// `struct virtio_mem_config`: there is no node, since the guest has but one.
    fn config(&self) -> [u8; CONFIG_LEN] {
        let plan = lock(&self.plan);
        let [usable, plugged] = [plan.blocks.count(), plan.blocks.plugged()].map(|blocks| blocks * BLOCK);
        let requested = usable;
        let fields = [BLOCK, 0, self.start, self.len, usable, plugged, requested];
        let mut config = [0; CONFIG_LEN];
        for (place, field) in config.chunks_exact_mut(size_of::<u64>()).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        config
    }

    /// The blocks that a request names, by their numbers, if all of them are usable.
    fn blocks(&self, request: &[u8; REQUEST_LEN]) -> Option<std::ops::Range<u64>> {
        let [_, _, _, _, _, _, _, _, address @ .., c0, c1, _, _, _, _, _, _] = *request;
        let (address, count) = (u64::from_le_bytes(address), u64::from(u16::from_le_bytes([c0, c1])));
        let offset = address.checked_sub(self.start).filter(|offset| offset % BLOCK == 0)?;
        let first = offset / BLOCK;
        let usable = lock(&self.plan).blocks.count();
        (count > 0 && first + count <= usable).then(|| first..first + count)
    }
}

/// What a driver asks for (5.15.6).
mod request {
    pub(super) const PLUG: u16 = 0;
    pub(super) const UNPLUG: u16 = 1;
    pub(super) const UNPLUG_ALL: u16 = 2;
    pub(super) const STATE: u16 = 3;
}

/// What it is told. Nothing here is ever busy, and all that is usable is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Response {
    Ack,
    Error,
    State(State),
}

impl Response {
    /// `struct virtio_mem_resp`.
    fn to_bytes(self) -> [u8; RESPONSE_LEN] {
        let (kind, state) = match self {
            Self::Ack => (0, 0),
            Self::Error => (3, 0),
            Self::State(state) => (0, state as u8),
        };
        [kind, 0, 0, 0, 0, 0, 0, 0, state, 0]
    }
}

/// The device at work.
struct Service<'m> {
    memory: &'m GuestMemory,
    requests: ActiveQueue,
    interrupt: &'m Interrupt,
    shared: &'m Shared,
}

impl Service<'_> {
    /// Serves until `stop` is readable, or the driver does something illegal.
    fn run(&mut self, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop).map_err(ServeError::Epoll)?;
        for (fd, token) in
            [(self.requests.kick.as_raw_fd(), TOKEN_QUEUE), (self.shared.wanted.as_raw_fd(), TOKEN_WANTED)]
        {
            events.watch(fd, EventSet::IN, token).map_err(ServeError::Epoll)?;
        }
        // The driver may have filled the queue before its kicks were looked at.
        let mut busy = true;
        let mut came = no_events();
        while let Some(mut came) = events.wait(busy, &mut came).map_err(ServeError::Epoll)? {
            if came.any(|(token, _)| token == TOKEN_WANTED) {
                self.interrupt.config_changed().map_err(ServeError::Interrupt)?;
            }
            busy = self.serve()?;
        }
        Ok(())
    }

    /// Serves what is in the queue, for one turn. True: there may be more, for which no kick will come.
    fn serve(&mut self) -> Result<bool, ServeError> {
        for _ in 0..TURN {
            let Some(chain) = self.requests.pop(self.memory)? else {
                return Ok(self.requests.rearm(self.memory)?);
            };
            let Chain { head, mut readable, mut writable } =
                Chain::walk(self.memory, chain, self.requests.queue.size())?;
            let (read, write) = (readable.len(), writable.len());
            let request = readable.read_array().filter(|_| write >= RESPONSE_LEN);
            let request = request.ok_or(ServeError::Length { read, write })?;
            let written = writable.write(&self.answer(&request)?.to_bytes());
            self.requests.push(self.memory, head, written as u32)?;
            self.requests.notify(self.memory, self.interrupt)?;
        }
        Ok(true)
    }

    fn answer(&self, request: &[u8; REQUEST_LEN]) -> Result<Response, ServeError> {
        let kind = u16::from_le_bytes([request[0], request[1]]);
        if kind == request::UNPLUG_ALL {
            return self.unplug_all();
        }
        let Some(named) = self.shared.blocks(request) else { return Ok(Response::Error) };
        let mut plan = lock(&self.shared.plan);
        let state = plan.blocks.state(named.clone());
        match (kind, state) {
            (request::STATE, state) => return Ok(Response::State(state)),
            (request::PLUG, State::Unplugged) => {
                plan.blocks.set(named, true);
                drop(plan);
            }
            (request::UNPLUG, State::Plugged) => {
                plan.blocks.set(named.clone(), false);
                drop(plan);
                self.release(named)?;
            }
            _ => return Ok(Response::Error),
        }
        self.progressed()
    }

    fn unplug_all(&self) -> Result<Response, ServeError> {
        let mut plan = lock(&self.shared.plan);
        let all = 0..plan.blocks.count();
        plan.blocks.set(all.clone(), false);
        drop(plan);
        self.release(all)?;
        self.progressed()
    }

    /// Gives blocks back to the host, if there is a use for them.
    fn release(&self, blocks: std::ops::Range<u64>) -> Result<(), ServeError> {
        if !self.memory.goes_back() {
            return Ok(());
        }
        let start = GuestAddress(self.shared.start + blocks.start * BLOCK);
        let len = (blocks.end - blocks.start) * BLOCK;
        for piece in self.memory.get_slices(start, len as usize) {
            memory::release(&piece.map_err(ServeError::Memory)?).map_err(ServeError::Release)?;
        }
        Ok(())
    }

    fn progressed(&self) -> Result<Response, ServeError> {
        self.shared.progress.write(1).map_err(ServeError::Progress)?;
        Ok(Response::Ack)
    }
}

/// Why the worker ends before it is told to.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("a queue is broken")]
    Queue(#[from] QueueError),
    #[error("a request's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("a chain with {read} bytes to read and {write} to write is too short for a request")]
    Length { read: usize, write: usize },
    #[error("what is usable of the device's region is no memory")]
    Memory(#[source] GuestMemoryError),
    #[error("the host does not take memory back")]
    Release(#[source] io::Error),
    #[error("cannot interrupt the driver")]
    Interrupt(#[source] io::Error),
    #[error("cannot tell the VMM of what is plugged")]
    Progress(#[source] io::Error),
    #[error("cannot wait for events")]
    Epoll(#[source] io::Error),
}

#[cfg(test)]
mod tests;
