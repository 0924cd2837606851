//! Serves the requests of a queue of a block device (virtio 1.3, 5.2.6). Each queue has a thread of its own, and the
//! disk is common to all.

use std::{io, os::fd::AsRawFd, sync::Arc};

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vmm_sys_util::epoll::EventSet;

use super::{
    disk::Disk,
    limits::{MAX_DATA, MAX_DISCARD, MAX_WRITE_ZEROES, SECTOR},
};
use crate::{
    GuestMemory,
    jail::ThreadRole,
    rate_limited_log::RateLimitedLog,
    virtio::{
        ActiveQueue, Interrupt,
        chain::{Buffers, Chain, ChainError},
        event_loop::{EventError, Events},
        iovecs::Iovecs,
        queue::{Outcome, QueueError, Turn},
        shared_thread::{ActiveDevice, Service},
    },
};

/// A request may wait for the host's device, so few are handled before other devices and the stop event are looked at.
const TURN: Turn = Turn { chains: 4, batch: 4 };

/// Why a block device stops serving its driver.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error("the queue is broken")]
    Queue(#[from] QueueError),
    #[error("a request's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("a request has {len} bytes before its data, and its header has 16")]
    NoHeader { len: usize },
    #[error("a request has no room for its status")]
    NoStatus,
}

/// A queue of an active device.
pub struct ActiveQueueOfDisk {
    pub(super) memory: GuestMemory,
    pub(super) disk: Arc<Disk>,
    pub(super) serial: [u8; VIRTIO_BLK_ID_BYTES as usize],
    pub(super) queue: ActiveQueue,
    pub(super) interrupt: Arc<Interrupt>,
    pub(super) log: Arc<RateLimitedLog>,
    /// Whether the driver sends a flush when data is to be durable. If not, each write is (virtio 1.3, 5.2.6.2).
    pub(super) flushes: bool,
}

impl ActiveDevice for ActiveQueueOfDisk {
    const NAME: &'static str = "virtio-blk";
    const ROLE: ThreadRole = ThreadRole::Block;

    type Service<'d> = Serving<'d>;

    fn watch(&self, events: &Events, token: impl Fn(u64) -> u64) -> Result<(), EventError> {
        events.watch(self.queue.kick.as_raw_fd(), EventSet::IN, token(0))
    }

    fn begin(&mut self) -> Serving<'_> {
        let Self { memory, disk, serial, queue, interrupt, log, flushes } = self;
        let requests = Requests { disk, serial, flushes: *flushes, log, iovecs: Iovecs::default() };
        Serving { memory, queue, interrupt, pending: true, requests }
    }

    fn reporting(&self) -> (&Interrupt, &RateLimitedLog) {
        (&self.interrupt, &self.log)
    }
}

/// A queue that is being served.
pub(crate) struct Serving<'d> {
    memory: &'d GuestMemory,
    queue: &'d mut ActiveQueue,
    interrupt: &'d Interrupt,
    /// Set until the queue is empty: events are edge-triggered.
    pending: bool,
    requests: Requests<'d>,
}

impl Service for Serving<'_> {
    type Error = ServeError;

    fn on_event(&mut self, _source: u64, _events: EventSet) {
        self.pending = true;
    }

    fn serve_queues(&mut self) -> Result<bool, ServeError> {
        if self.pending {
            let handle = |chain: Chain| self.requests.handle(chain);
            self.pending = self.queue.serve(self.memory, self.interrupt, TURN, handle)?;
        }
        Ok(self.pending)
    }

    fn reporting(&self) -> (&Interrupt, &RateLimitedLog) {
        (self.interrupt, self.requests.log)
    }

    /// Each chain that was taken has been used.
    fn end(self) {}
}

/// Why a request fails.
#[derive(Debug)]
enum Failure {
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported,
    /// VIRTIO_BLK_S_IOERR: the request is illegal.
    Illegal,
    /// VIRTIO_BLK_S_IOERR: the host's device has failed.
    Host(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::Unsupported { Self::Unsupported } else { Self::Host(error) }
    }
}

struct Requests<'d> {
    disk: &'d Disk,
    serial: &'d [u8],
    flushes: bool,
    log: &'d RateLimitedLog,
    iovecs: Iovecs,
}

impl Requests<'_> {
    /// Handles a request: a header of 16 bytes, data in one direction, and a byte for the status.
    fn handle(&mut self, chain: Chain) -> Result<Outcome, ServeError> {
        let Chain { mut readable, mut writable, .. } = chain;
        let len = readable.len();
        let header: [u8; 16] = readable.read_array().ok_or(ServeError::NoHeader { len })?;
        let room = writable.len().checked_sub(1).ok_or(ServeError::NoStatus)?;
        // The status remains.
        let input = writable.split_front(room);
        let (kind, sector) = parse(&header);
        self.disk.count_request();
        let (status, written) = match self.perform(kind, sector, readable, input) {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(Failure::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0),
            Err(Failure::Illegal) => (VIRTIO_BLK_S_IOERR, 0),
            Err(Failure::Host(error)) => {
                self.log
                    .say(&format!("virtio-blk: a request of type {kind} at sector {sector} fails: {error}"));
                (VIRTIO_BLK_S_IOERR, 0)
            }
        };
        writable.write(&[status as u8]);
        Ok(Outcome::Used(written.saturating_add(1)))
    }

    /// Returns how many bytes it has written to `input`.
    fn perform(&mut self, kind: u32, sector: u64, output: Buffers, input: Buffers) -> Result<u32, Failure> {
        match kind {
            VIRTIO_BLK_T_IN => self.read(sector, input),
            VIRTIO_BLK_T_OUT => self.write(sector, output),
            VIRTIO_BLK_T_FLUSH => self.disk.flush().map(|()| 0).map_err(Failure::from),
            VIRTIO_BLK_T_DISCARD if self.disk.discards => self.discard(output),
            VIRTIO_BLK_T_WRITE_ZEROES if !self.disk.read_only => self.write_zeroes(output),
            VIRTIO_BLK_T_GET_ID => Ok({ input }.write(self.serial) as u32),
            _ => Err(Failure::Unsupported),
        }
    }

    fn read(&mut self, sector: u64, mut data: Buffers) -> Result<u32, Failure> {
        let len = data.len();
        let mut offset = self.data_offset(sector, len)?;
        while !data.is_empty() {
            match self.disk.read(offset, data.slices(), &mut self.iovecs) {
                // The host's device has become smaller.
                Ok(0) => return Err(Failure::Host(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    data.split_front(count);
                    offset += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::Host(error)),
            }
        }
        Ok(len as u32)
    }

    fn write(&mut self, sector: u64, mut data: Buffers) -> Result<u32, Failure> {
        if self.disk.read_only {
            return Err(Failure::Illegal);
        }
        let mut offset = self.data_offset(sector, data.len())?;
        while !data.is_empty() {
            match self.disk.write(offset, data.slices(), &mut self.iovecs) {
                Ok(0) => return Err(Failure::Host(io::ErrorKind::WriteZero.into())),
                Ok(count) => {
                    data.split_front(count);
                    offset += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::Host(error)),
            }
        }
        self.wrote()
    }

    fn discard(&self, segment: Buffers) -> Result<u32, Failure> {
        let Segment { offset, len, flags } = self.segment(segment, MAX_DISCARD)?;
        // The one flag that exists is not for this (virtio 1.3, 5.2.6.2).
        if flags != 0 {
            return Err(Failure::Unsupported);
        }
        self.disk.discard(offset, len)?;
        self.wrote()
    }

    fn write_zeroes(&self, segment: Buffers) -> Result<u32, Failure> {
        let Segment { offset, len, flags } = self.segment(segment, MAX_WRITE_ZEROES)?;
        if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 {
            return Err(Failure::Unsupported);
        }
        self.disk.write_zeroes(offset, len, flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0)?;
        self.wrote()
    }

    /// After a change of the disk.
    fn wrote(&self) -> Result<u32, Failure> {
        if !self.flushes {
            self.disk.flush()?;
        }
        Ok(0)
    }

    /// The offset of data of a read or a write.
    fn data_offset(&self, sector: u64, len: usize) -> Result<u64, Failure> {
        let len = len as u64;
        if len > MAX_DATA || !len.is_multiple_of(SECTOR) {
            return Err(Failure::Illegal);
        }
        self.offset(sector, len / SECTOR)
    }

    /// The segment of a request that has only one, of at most this many sectors.
    fn segment(&self, mut data: Buffers, most: u32) -> Result<Segment, Failure> {
        let bytes: [u8; 16] = data.read_array().ok_or(Failure::Illegal)?;
        let (sectors, rest) = (u64_of(&bytes, 0), u64_of(&bytes, 8));
        let (count, flags) = (rest as u32, (rest >> 32) as u32);
        // Nothing to do is an error of the host's ioctl.
        if !data.is_empty() || count > most || count == 0 {
            return Err(Failure::Illegal);
        }
        let offset = self.offset(sectors, count.into())?;
        Ok(Segment { offset, len: u64::from(count) * SECTOR, flags })
    }

    /// The offset of `count` sectors, which are all on the disk.
    fn offset(&self, sector: u64, count: u64) -> Result<u64, Failure> {
        let end = sector.checked_add(count).filter(|end| *end <= self.disk.capacity);
        end.and_then(|_| sector.checked_mul(SECTOR)).ok_or(Failure::Illegal)
    }
}

/// `struct virtio_blk_discard_write_zeroes`, in bytes.
struct Segment {
    offset: u64,
    len: u64,
    flags: u32,
}

/// The type and the sector of a request: the first and the last field of its header.
fn parse(header: &[u8; 16]) -> (u32, u64) {
    (u64_of(header, 0) as u32, u64_of(header, 8))
}

fn u64_of(bytes: &[u8; 16], at: usize) -> u64 {
    bytes.iter().skip(at).take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
