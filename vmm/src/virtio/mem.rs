//! Memory device (virtio 1.3, 5.15): memory that is added to the guest while it runs.
//!
//! The device has a region of guest addresses. The VMM makes the beginning of the region usable, and requests that
//! the driver plugs all usable memory. The driver does so when it likes, and may unplug memory again. vCPUs and
//! devices can access all usable memory ([`crate::memory::Slots::grow`]), whether it is plugged or not. So a guest
//! that accesses memory which it has not plugged accesses memory that it was granted. Memory that the guest unplugs
//! goes back to the host.

use std::{
    io,
    os::fd::AsRawFd,
    sync::{Arc, Mutex},
};

use virtio_bindings::virtio_ids::VIRTIO_ID_MEM;
use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryError, GuestMemoryRegion as _};
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use self::blocks::{BlockState, Blocks};
use super::{
    Activation, ActiveQueue, Interrupt, VirtioDevice,
    chain::{Chain, ChainError},
    config_space::read_config,
    device,
    device_threads::Job,
    event_loop::{EventError, EventHandler, Events},
    queue::{Outcome, QueueError, Turn},
};
use crate::{
    GuestMemory,
    jail::ThreadRole,
    lock,
    memory::{self, Region},
};

mod blocks;

/// VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE (virtio 1.3, 5.15.3).
const UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;
/// The request queue. Linux sends one request at a time.
const QUEUE_SIZES: [u16; 1] = [16];
/// Bytes of a block, the unit of plugging and unplugging: a huge page of the host.
pub const BLOCK: u64 = 2 << 20;
/// Bytes of `struct virtio_mem_config` (5.15.4).
const CONFIG_LEN: usize = 56;
/// Bytes of `struct virtio_mem_req` (5.15.6).
const REQUEST_LEN: usize = 24;
/// Bytes of `struct virtio_mem_resp` (5.15.6).
const RESPONSE_LEN: usize = 10;
const TOKEN_QUEUE: u64 = 0;
const TOKEN_REQUESTED: u64 = 1;
const TURN: Turn = Turn { chains: 16, batch: 1 };

/// The device.
pub struct Mem(Arc<Shared>);

/// The VMM's side of the device: requests memory for the guest, and sees how much the driver has plugged.
pub struct MemControl(Arc<Shared>);

struct Shared {
    /// First address and length of the device's region.
    start: u64,
    len: u64,
    plan: Mutex<Plan>,
    /// Tells the device's thread that more memory is requested.
    requested: EventFd,
    /// Tells the VMM that the driver has plugged or unplugged memory.
    progress: EventFd,
}

/// The part of the device's configuration that changes.
#[derive(Default)]
struct Plan {
    /// The usable blocks. The driver is requested to plug all of them. Their number never decreases.
    blocks: Blocks,
    /// The configuration generation (virtio 1.3, 2.5), by which the driver detects a change between two reads.
    generation: u32,
}

impl Mem {
    /// A device for `region`, no part of which is usable yet.
    pub fn new(region: &Region) -> io::Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC);
        Ok(Self(Arc::new(Shared {
            start: region.start_addr().0,
            len: region.capacity(),
            plan: Mutex::default(),
            requested: event()?,
            progress: event()?,
        })))
    }

    /// The VMM's side of the device.
    pub fn control(&self) -> MemControl {
        MemControl(self.0.clone())
    }
}

impl MemControl {
    /// Requests that the driver plugs `bytes`, a multiple of [`BLOCK`]. Does nothing if as many were requested
    /// before. That many bytes from the start of the region on must be usable.
    pub fn request(&self, bytes: u64) -> io::Result<()> {
        let mut plan = lock(&self.0.plan);
        if bytes <= plan.blocks.count() * BLOCK {
            return Ok(());
        }
        plan.blocks.set_count(bytes / BLOCK);
        plan.generation = plan.generation.wrapping_add(1);
        drop(plan);
        self.0.requested.write(1)
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
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Mem
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_MEM
    }

    /// The driver need not accept the feature. Without it a driver may read unplugged memory (5.15.5), which works.
    fn features(&self) -> u64 {
        UNPLUGGED_INACCESSIBLE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config(&self.0.config(), offset, data);
    }

    fn config_generation(&self) -> u32 {
        lock(&self.0.plan).generation
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, queues, interrupt, log, .. } = activation;
        let requests = queues.into_iter().next().filter(|queue| queue.queue.ready());
        let requests =
            requests.ok_or_else(|| io::Error::other("the driver did not set up the queue of virtio-mem"))?;
        let shared = self.0.clone();
        Ok(vec![device::job("virtio-mem", interrupt, log, move |interrupt, stop| {
            Service { memory: &memory, interrupt, shared: &shared }.run(requests, stop)
        })])
    }
}

impl Shared {
    /// `struct virtio_mem_config`. `node_id` is 0, because the guest has a single NUMA node.
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

    /// The indices of the blocks that a request names. None if not all of them are usable.
    fn blocks(&self, request: &[u8; REQUEST_LEN]) -> Option<std::ops::Range<u64>> {
        let [_, _, _, _, _, _, _, _, address @ .., c0, c1, _, _, _, _, _, _] = *request;
        let (address, count) = (u64::from_le_bytes(address), u64::from(u16::from_le_bytes([c0, c1])));
        let offset = address.checked_sub(self.start).filter(|offset| offset % BLOCK == 0)?;
        let first = offset / BLOCK;
        let usable = lock(&self.plan).blocks.count();
        (count > 0 && first + count <= usable).then(|| first..first + count)
    }
}

/// The types of requests (5.15.6).
mod request {
    pub(super) const PLUG: u16 = 0;
    pub(super) const UNPLUG: u16 = 1;
    pub(super) const UNPLUG_ALL: u16 = 2;
    pub(super) const STATE: u16 = 3;
}

/// A response (5.15.6). The device never responds VIRTIO_MEM_RESP_BUSY. It never responds VIRTIO_MEM_RESP_NACK,
/// because all usable memory is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Response {
    Ack,
    Error,
    State(BlockState),
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

/// The active device.
struct Service<'m> {
    memory: &'m GuestMemory,
    interrupt: &'m Interrupt,
    shared: &'m Shared,
}

/// The active device and its queue.
struct Handler<'s, 'm> {
    service: &'s Service<'m>,
    requests: ActiveQueue,
}

impl Service<'_> {
    fn run(&self, requests: ActiveQueue, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop)?;
        events.watch(requests.kick.as_raw_fd(), EventSet::IN, TOKEN_QUEUE)?;
        events.watch(self.shared.requested.as_raw_fd(), EventSet::IN, TOKEN_REQUESTED)?;
        events.run(&mut Handler { service: self, requests })
    }

    /// Handles a request, and returns the number of bytes written for it.
    fn handle(&self, mut chain: Chain) -> Result<Outcome, ServeError> {
        let (read, write) = (chain.readable.len(), chain.writable.len());
        let request = chain.readable.read_array().filter(|_| write >= RESPONSE_LEN);
        let request = request.ok_or(ServeError::Length { read, write })?;
        let response = self.respond(&request)?.to_bytes();
        Ok(Outcome::Used(chain.writable.write(&response) as u32))
    }

    fn respond(&self, request: &[u8; REQUEST_LEN]) -> Result<Response, ServeError> {
        let kind = u16::from_le_bytes([request[0], request[1]]);
        if kind == request::UNPLUG_ALL {
            return self.unplug_all();
        }
        let Some(named) = self.shared.blocks(request) else { return Ok(Response::Error) };
        let mut plan = lock(&self.shared.plan);
        let state = plan.blocks.state(named.clone());
        match (kind, state) {
            (request::STATE, state) => return Ok(Response::State(state)),
            (request::PLUG, BlockState::Unplugged) => {
                plan.blocks.set(named, true);
                drop(plan);
            }
            (request::UNPLUG, BlockState::Plugged) => {
                plan.blocks.set(named.clone(), false);
                drop(plan);
                self.release(named)?;
            }
            _ => return Ok(Response::Error),
        }
        self.acknowledge()
    }

    fn unplug_all(&self) -> Result<Response, ServeError> {
        let mut plan = lock(&self.shared.plan);
        let all = 0..plan.blocks.count();
        plan.blocks.set(all.clone(), false);
        drop(plan);
        self.release(all)?;
        self.acknowledge()
    }

    /// Returns blocks to the host, unless they belong to the pool of huge pages.
    fn release(&self, blocks: std::ops::Range<u64>) -> Result<(), ServeError> {
        if !self.memory.can_be_released() {
            return Ok(());
        }
        let start = GuestAddress(self.shared.start + blocks.start * BLOCK);
        let len = (blocks.end - blocks.start) * BLOCK;
        for piece in self.memory.get_slices(start, len as usize) {
            memory::release(&piece.map_err(ServeError::Memory)?).map_err(ServeError::Release)?;
        }
        Ok(())
    }

    fn acknowledge(&self) -> Result<Response, ServeError> {
        self.shared.progress.write(1).map_err(ServeError::Progress)?;
        Ok(Response::Ack)
    }
}

impl EventHandler for Handler<'_, '_> {
    type Error = ServeError;

    fn on_event(&mut self, token: u64, _events: EventSet) -> Result<(), ServeError> {
        if token == TOKEN_REQUESTED {
            self.service.interrupt.config_changed().map_err(ServeError::Interrupt)?;
        }
        Ok(())
    }

    fn serve_queues(&mut self) -> Result<bool, ServeError> {
        let Service { memory, interrupt, .. } = self.service;
        self.requests.serve(memory, interrupt, TURN, |chain| self.service.handle(chain))
    }
}

/// Why the device stops serving its driver.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("a queue is broken")]
    Queue(#[from] QueueError),
    #[error("a request's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("a chain with {read} readable and {write} writable bytes is too short for a request")]
    Length { read: usize, write: usize },
    #[error("a usable block of the device's region is not in guest memory")]
    Memory(#[source] GuestMemoryError),
    #[error("cannot return memory to the host")]
    Release(#[source] io::Error),
    #[error("cannot interrupt the driver")]
    Interrupt(#[source] io::Error),
    #[error("cannot notify the VMM of plugged memory")]
    Progress(#[source] io::Error),
    #[error(transparent)]
    Events(#[from] EventError),
}

#[cfg(test)]
mod tests;
