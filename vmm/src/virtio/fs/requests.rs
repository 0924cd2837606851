//! The threads of a virtio-fs device pass the FUSE requests in its queues to the file server.
//!
//! One thread at a time is the leader: it waits for requests and takes one from a queue. Then another thread becomes
//! the leader, while this one handles the request. So a request that waits for a file system of the host does not
//! stop the others.
//!
//! Requests for one file system may use only some of the threads. When they use all that they may, further requests for
//! it are parked: they stay unused in guest memory. So a file system that does not respond, with any number of
//! requests, leaves threads for the others. Requests that write to the disk, such as FSYNC, may not use all of these
//! threads: a disk may take seconds for each, and the other requests for the file system are served meanwhile.

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::AsRawFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::{fs::OFlags, io::Errno};
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    abi::{Args, Header, IN_HEADER, ROOT, WRITE_FLAGS, WRITE_IN, opcode},
    file_server::{Server, Shared},
};
use crate::{
    GuestMemory, lock,
    virtio::{
        ActiveQueue, Interrupt,
        chain::{Buffers, Chain, ChainError},
        event_loop::{EventError, Events},
        queue::QueueError,
    },
};

/// How many threads requests for one file system may use.
const THREADS_OF_FILE_SYSTEM: usize = 4;
/// How many of them requests of one kind may use.
const THREADS_OF_KIND: usize = 3;
/// Requests about all file systems, any of which may not respond. One thread handles them, so that the others are left
/// for requests about those that do. No device has this number.
const ALL: FileSystem = Some(u64::MAX);
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
    #[error("there are more unused requests than the queues have entries")]
    TooMany,
    #[error("a request was changed after it was taken")]
    Changed,
    #[error(transparent)]
    Events(#[from] EventError),
}

/// The host has unmounted directories of the share. The event wakes the leader.
pub(super) struct Unmounted {
    event: EventFd,
    is_set: AtomicBool,
}

impl Unmounted {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { event: EventFd::new(EFD_NONBLOCK)?, is_set: AtomicBool::new(false) })
    }

    pub(super) fn set(&self) {
        self.is_set.store(true, Ordering::Release);
        self.wake();
    }

    /// Wakes the leader.
    fn wake(&self) {
        // Fails only if the counter is full, and then the event is signalled already.
        let _ = self.event.write(1);
    }

    fn take(&self) -> bool {
        self.is_set.swap(false, Ordering::AcqRel)
    }
}

/// The queues of the active device, which its threads share.
pub(super) struct RequestQueues {
    memory: Arc<GuestMemory>,
    queues: Vec<Mutex<ActiveQueue>>,
    /// How many threads there are.
    threads: usize,
    /// The sum of the sizes of the queues.
    most_parked: usize,
    /// Locked by the leader. The first leader makes the events.
    leader: Mutex<Option<Events>>,
    load: Mutex<Load>,
    /// A thread has found an illegal chain or queue. The device needs a reset.
    is_broken: AtomicBool,
    unmounted: Arc<Unmounted>,
}

/// What the threads are doing.
#[derive(Default)]
struct Load {
    /// Threads that handle a request.
    busy: usize,
    /// Threads that handle a request, by its file system. A file system without such a thread is not in the map.
    busy_of: HashMap<FileSystem, Busy>,
    /// Requests that wait for a thread, in the order in which they were taken. A legal driver has no more of them than
    /// the queues have entries.
    parked: VecDeque<Parked>,
}

/// The device number of the file system that a request is about. None if the request names no node, or an unknown one.
type FileSystem = Option<u64>;

/// What decides whether a thread may handle a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Demand {
    file_system: FileSystem,
    /// Whether the function [`writes_to_disk`] says so of it.
    writes_to_disk: bool,
}

/// Threads that handle requests for one file system.
#[derive(Debug, Clone, Copy, Default)]
struct Busy {
    writing_to_disk: usize,
    others: usize,
}

/// A request that was not handled yet. Its chain is walked again when it is handled, so all of it is read and
/// validated again. Its demand relies on the first reading, so what the demand was found by must not have changed.
struct Parked {
    queue: usize,
    chain: DescriptorChain<Arc<GuestMemory>>,
    subject: Subject,
    demand: Demand,
}

/// The operation and the node of a request. None: it has no header.
type Subject = Option<(u32, u64)>;

/// A request that was read from guest memory.
struct Work<'m> {
    queue: usize,
    demand: Demand,
    chain: Chain<'m>,
    /// Its readable bytes, including those of the header.
    len: usize,
    /// None if the request is too short.
    header: Option<Header>,
}

impl Work<'_> {
    fn subject(&self) -> Subject {
        self.header.map(|header| (header.opcode, header.node))
    }
}

impl Demand {
    /// Of a request that reads from the file system, or that changes it as its page cache does.
    fn of(file_system: FileSystem) -> Self {
        Self { file_system, writes_to_disk: false }
    }
}

impl Busy {
    fn all(self) -> usize {
        self.writing_to_disk + self.others
    }

    fn of_kind(&mut self, writes_to_disk: bool) -> &mut usize {
        if writes_to_disk { &mut self.writing_to_disk } else { &mut self.others }
    }
}

impl Load {
    /// Whether a thread may start to handle a request of this demand. One thread must stay to be the leader. The more
    /// threads wait for other file systems, the more must be left for further ones, so a file system gets a half of
    /// what the others leave.
    fn admits(&self, demand: Demand, threads: usize) -> bool {
        let mut of_it = self.busy_of.get(&demand.file_system).copied().unwrap_or_default();
        let left = threads.saturating_sub(self.busy.saturating_sub(of_it.all()));
        let share = (left / 2).min(if demand.file_system == ALL { 1 } else { THREADS_OF_FILE_SYSTEM });
        let of_kind = match demand.writes_to_disk {
            // One thread is left to the other requests, unless the file system has only one.
            true => share.saturating_sub(1).max(1),
            false => share,
        };
        threads == 1
            || of_it.all() < share && *of_it.of_kind(demand.writes_to_disk) < of_kind.min(THREADS_OF_KIND)
    }

    fn begin(&mut self, demand: Demand) {
        self.busy += 1;
        *self.busy_of.entry(demand.file_system).or_default().of_kind(demand.writes_to_disk) += 1;
    }

    fn end(&mut self, demand: Demand) {
        self.busy = self.busy.saturating_sub(1);
        if let Some(busy) = self.busy_of.get_mut(&demand.file_system) {
            let of_kind = busy.of_kind(demand.writes_to_disk);
            *of_kind = of_kind.saturating_sub(1);
            if busy.all() == 0 {
                self.busy_of.remove(&demand.file_system);
            }
        }
    }

    /// The index of the first parked request that may be handled now.
    fn admitted(&self, threads: usize) -> Option<usize> {
        self.parked.iter().position(|parked| self.admits(parked.demand, threads))
    }

    /// Takes the first parked request that may be handled now.
    fn unpark(&mut self, threads: usize) -> Option<Parked> {
        let index = self.admitted(threads)?;
        self.parked.remove(index)
    }
}

impl RequestQueues {
    pub(super) fn new(
        memory: GuestMemory,
        queues: Vec<ActiveQueue>,
        threads: usize,
        unmounted: Arc<Unmounted>,
    ) -> Self {
        Self {
            most_parked: queues.iter().map(|queue| usize::from(queue.queue.size())).sum(),
            memory: Arc::new(memory),
            queues: queues.into_iter().map(Mutex::new).collect(),
            threads,
            leader: Mutex::default(),
            load: Mutex::default(),
            is_broken: AtomicBool::new(false),
            unmounted,
        }
    }

    /// Runs one of the threads, until `stop` is signalled or the driver does something illegal.
    pub(super) fn run(
        &self,
        shared: &Shared,
        server: &mut Server,
        interrupt: &Interrupt,
        stop: &EventFd,
    ) -> Result<(), ServeError> {
        let served = self.run_until_it_fails(shared, server, interrupt, stop);
        if served.is_err() {
            self.is_broken.store(true, Ordering::Release);
        }
        served
    }

    fn run_until_it_fails(
        &self,
        shared: &Shared,
        server: &mut Server,
        interrupt: &Interrupt,
        stop: &EventFd,
    ) -> Result<(), ServeError> {
        loop {
            let mut next = match self.lead(shared, stop)? {
                Led::Request(work) => Some(work),
                Led::CloseFiles => None,
                Led::Stop => return Ok(()),
            };
            loop {
                if let Some(work) = next.take() {
                    self.handle(server, interrupt, work)?;
                }
                if shared.has_many_unused() && self.close_one(shared) {
                    continue;
                }
                next = self.next_parked()?;
                if next.is_none() && !self.close_one(shared) {
                    break;
                }
            }
        }
    }

    /// Closes a descriptor that is not needed any more. Returns false if there is none that may be closed now. If there
    /// is another one, wakes the leader for it: this thread may wait for the file system of the first.
    fn close_one(&self, shared: &Shared) -> bool {
        let mut load = lock(&self.load);
        let Some(unused) = shared.take_unused(|device| load.admits(Demand::of(Some(device)), self.threads))
        else {
            return false;
        };
        let demand = Demand::of(Some(unused.device));
        load.begin(demand);
        if shared.has_unused(|device| load.admits(Demand::of(Some(device)), self.threads)) {
            self.unmounted.wake();
        }
        drop(load);
        drop(unused);
        lock(&self.load).end(demand);
        true
    }

    /// Becomes the leader, and returns what this thread does next.
    fn lead(&self, shared: &Shared, stop: &EventFd) -> Result<Led<'_>, ServeError> {
        let mut leader = lock(&self.leader);
        let events = match &mut *leader {
            Some(events) => events,
            none => none.insert(self.watch(stop)?),
        };
        // The last leader may have left requests for which no event will arrive.
        let mut busy = true;
        loop {
            if !events.wait_for_any(busy)? || self.is_broken.load(Ordering::Acquire) {
                return Ok(Led::Stop);
            }
            busy = false;
            if self.unmounted.take() {
                shared.close_unmounted();
                return Ok(self.next_parked()?.map_or(Led::CloseFiles, Led::Request));
            }
            if let Some(work) = self.next_parked()? {
                return Ok(Led::Request(work));
            }
            for index in 0..self.queues.len() {
                match self.take(index, shared)? {
                    Taken::Work(work) => return Ok(Led::Request(work)),
                    Taken::Parked => busy = true,
                    Taken::Nothing => {}
                }
            }
            let load = lock(&self.load);
            if shared.has_unused(|device| load.admits(Demand::of(Some(device)), self.threads)) {
                return Ok(Led::CloseFiles);
            }
        }
    }

    /// The events of the queues, and the stop event, which all threads share.
    fn watch(&self, stop: &EventFd) -> Result<Events, EventError> {
        let events = Events::new(stop)?;
        for queue in &self.queues {
            // After each event all queues are looked at, so one token is enough.
            events.watch(lock(queue).kick.as_raw_fd(), EventSet::IN, TOKEN_QUEUE)?;
        }
        events.watch(self.unmounted.event.as_raw_fd(), EventSet::IN, TOKEN_QUEUE)?;
        Ok(events)
    }

    /// Takes a request from a queue.
    fn take(&self, index: usize, shared: &Shared) -> Result<Taken<'_>, ServeError> {
        let mut queue = lock(&self.queues[index]);
        let parked = loop {
            match queue.queue.iter(self.memory.clone()).map_err(QueueError::Ring)?.next() {
                Some(chain) => break chain,
                None if queue.rearm(&self.memory)? => {}
                None => return Ok(Taken::Nothing),
            }
        };
        let size = queue.queue.size();
        drop(queue);
        let mut work = self.read(index, parked.clone(), size)?;
        work.demand.file_system = work.header.and_then(|header| match header.opcode {
            opcode::SYNCFS => ALL,
            // The second name of a socket (`SharedSocket`) leads to any file system.
            opcode::MKNOD if header.node == ROOT => ALL,
            _ => shared.tables().nodes.device(header.node),
        });
        let mut load = lock(&self.load);
        if load.admits(work.demand, self.threads) {
            load.begin(work.demand);
            return Ok(Taken::Work(work));
        }
        if load.parked.len() >= self.most_parked {
            return Err(ServeError::TooMany);
        }
        let (subject, demand) = (work.subject(), work.demand);
        load.parked.push_back(Parked { queue: index, chain: parked, subject, demand });
        Ok(Taken::Parked)
    }

    /// Walks the chain of a request, and reads the header of the request. The file system is not looked up.
    fn read(
        &self,
        queue: usize,
        chain: DescriptorChain<Arc<GuestMemory>>,
        size: u16,
    ) -> Result<Work<'_>, ChainError> {
        let mut chain = Chain::walk(&self.memory, chain, size)?;
        let len = chain.readable.len();
        let header = chain.readable.read_array::<IN_HEADER>();
        let header = header.and_then(|header| Header::parse(&header).ok());
        let writes_to_disk = header.is_some_and(|header| writes_to_disk(&header, &chain.readable));
        Ok(Work { queue, demand: Demand { file_system: None, writes_to_disk }, chain, len, header })
    }

    /// Handles a request.
    fn handle(&self, server: &mut Server, interrupt: &Interrupt, work: Work<'_>) -> Result<(), ServeError> {
        let Work { queue: index, demand, chain, len, header } = work;
        let head = chain.head;
        let written = header.map_or(0, |header| server.serve(header, len, chain));
        let mut queue = lock(&self.queues[index]);
        queue.push(&self.memory, head, written)?;
        queue.notify(&self.memory, interrupt)?;
        drop(queue);
        lock(&self.load).end(demand);
        Ok(())
    }

    /// Takes a parked request that can be handled now. If there is another one, wakes the leader for it.
    fn next_parked(&self) -> Result<Option<Work<'_>>, ServeError> {
        let mut load = lock(&self.load);
        if self.is_broken.load(Ordering::Acquire) {
            return Ok(None);
        }
        let Some(parked) = load.unpark(self.threads) else { return Ok(None) };
        load.begin(parked.demand);
        let is_last = load.admitted(self.threads).is_none();
        drop(load);
        let queue = lock(&self.queues[parked.queue]);
        if !is_last {
            // Fails only if the counter is full, and then the event is signalled already.
            let _ = queue.kick.write(1);
        }
        let size = queue.queue.size();
        drop(queue);
        let work = self.read(parked.queue, parked.chain, size)?;
        if work.subject() != parked.subject {
            return Err(ServeError::Changed);
        }
        Ok(Some(Work { demand: parked.demand, ..work }))
    }
}

/// Whether a request is answered only when the disk has what was written, or may copy or allocate much at once.
/// `args` are what follows its header. A SYNCFS is no such request: it is about all file systems.
fn writes_to_disk(header: &Header, args: &Buffers) -> bool {
    match header.opcode {
        opcode::FSYNC | opcode::FSYNCDIR | opcode::FALLOCATE | opcode::COPY_FILE_RANGE => true,
        // It closes a descriptor, and NFS then writes to its server what was written to the file.
        opcode::FLUSH => true,
        // NFS does that before it unlocks a file.
        opcode::SETLK => true,
        // The file is open with O_SYNC or O_DSYNC, or the write itself has RWF_DSYNC.
        opcode::WRITE => args.peek_array::<WRITE_IN>().is_some_and(|args| {
            let mut args = Args::new(&args);
            let flags = args.skip(WRITE_FLAGS).and_then(|()| args.u32()).unwrap_or(0);
            OFlags::from_bits_retain(flags).intersects(OFlags::DSYNC)
        }),
        _ => false,
    }
}

/// What a thread does when it has been the leader.
enum Led<'m> {
    /// Handles a request.
    Request(Work<'m>),
    /// Closes descriptors that are not needed any more.
    CloseFiles,
    /// Ends.
    Stop,
}

/// What the leader has found in a queue.
enum Taken<'m> {
    Work(Work<'m>),
    /// A request was parked. There may be more requests.
    Parked,
    Nothing,
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode, openat};
    use virtio_queue::{
        Queue,
        desc::{RawDescriptor, split::Descriptor},
        mock::MockSplitQueue,
    };

    use vm_memory::{Bytes, GuestAddress};

    use std::io::Read;

    use super::{
        super::{descriptors::Unused, file_server::Limits, file_stat::stat_at},
        *,
    };

    fn unmounted() -> Arc<Unmounted> {
        Arc::new(Unmounted::new().unwrap())
    }

    fn shared() -> Shared {
        let root = Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
        let stat = stat_at(&root, c"").unwrap();
        Shared::new(root, &stat, Limits::of_this_process(1), false).unwrap()
    }

    /// Begins requests for `file_system` as long as they are admitted, and returns their number.
    fn fill(load: &mut Load, file_system: u64, threads: usize) -> usize {
        fill_with(load, Demand::of(Some(file_system)), threads)
    }

    fn fill_with(load: &mut Load, demand: Demand, threads: usize) -> usize {
        let mut begun = 0;
        while load.admits(demand, threads) {
            load.begin(demand);
            begun += 1;
        }
        begun
    }

    fn sync_of(file_system: u64) -> Demand {
        Demand { file_system: Some(file_system), writes_to_disk: true }
    }

    #[test]
    fn file_systems_that_hang_leave_threads_to_others() {
        let mut load = Load::default();
        let begun: Vec<_> = (0..5).map(|file_system| fill(&mut load, file_system, 8)).collect();
        assert_eq!(begun, [3, 2, 1, 1, 0], "three may hang, and another is served");
        assert_eq!(load.busy, 7, "a thread stays to be the leader");
        load.end(Demand::of(Some(0)));
        assert!(load.admits(Demand::of(Some(4)), 8) && !load.admits(Demand::of(Some(0)), 8));
        // A single thread handles one request after the other.
        assert!(Load::default().admits(Demand::of(None), 1));
    }

    #[test]
    fn syncs_leave_threads_for_reads_of_their_file_system() {
        for (threads, syncs, reads) in [(8, 3, 1), (6, 2, 1)] {
            let mut load = Load::default();
            assert_eq!(fill_with(&mut load, sync_of(1), threads), syncs, "of {threads} threads");
            assert_eq!(fill(&mut load, 1, threads), reads, "of {threads} threads");
            // A sync that ends leaves its thread to the next sync, or to a read.
            load.end(sync_of(1));
            assert!(load.admits(sync_of(1), threads) && load.admits(Demand::of(Some(1)), threads));
        }
        // Reads leave no more to syncs than to each other.
        let mut load = Load::default();
        assert_eq!((fill(&mut load, 1, 8), fill_with(&mut load, sync_of(1), 8)), (3, 1));
    }

    #[test]
    fn file_systems_on_which_syncs_hang_leave_threads_to_others() {
        let mut load = Load::default();
        let begun: Vec<_> =
            (0..4).map(|it| fill_with(&mut load, sync_of(it), 8) + fill(&mut load, it, 8)).collect();
        assert_eq!(begun, [4, 2, 1, 0], "two may hang, and another is served");
        assert_eq!(load.busy, 7, "a thread stays to be the leader");
        // One that has a single thread is synced by that.
        load.end(sync_of(2));
        assert!(load.admits(sync_of(3), 8));
    }

    /// The demand of a request that a guest makes.
    fn demand(opcode: u32, node: u64, flags: i32) -> Demand {
        let memory = crate::memory::lay_out(&[(0, 0x1_0000)], 0).unwrap();
        let mut bytes = vec![0; IN_HEADER + WRITE_IN];
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[16..24].copy_from_slice(&node.to_ne_bytes());
        bytes[IN_HEADER + 32..IN_HEADER + 36].copy_from_slice(&flags.to_ne_bytes());
        memory.write_slice(&bytes, GuestAddress(0x8000)).unwrap();
        let mock = MockSplitQueue::new(&memory, 16);
        let chain = [RawDescriptor::from(Descriptor::new(0x8000, bytes.len() as u32, 0, 0))];
        mock.build_desc_chain(&chain).unwrap();
        let queue =
            ActiveQueue { queue: mock.create_queue().unwrap(), kick: EventFd::new(0).unwrap(), index: 0 };
        let queues = RequestQueues::new(memory.clone(), vec![queue], 8, unmounted());
        let shared = shared();
        let Taken::Work(work) = queues.take(0, &shared).unwrap() else { panic!("it is parked") };
        work.demand
    }

    #[test]
    fn a_request_that_waits_for_the_disk_is_known_by_its_header_and_its_flags() {
        let writes = |opcode: u32, flags: i32| demand(opcode, 0, flags).writes_to_disk;
        let syncs = [opcode::FSYNC, opcode::FSYNCDIR, opcode::FLUSH];
        assert!(syncs.into_iter().all(|opcode| writes(opcode, 0)));
        let to_disk = [opcode::FALLOCATE, opcode::COPY_FILE_RANGE];
        assert!(to_disk.into_iter().all(|opcode| writes(opcode, 0)));
        assert!(writes(opcode::WRITE, libc::O_SYNC) && writes(opcode::WRITE, libc::O_WRONLY | libc::O_DSYNC));
        assert!(!writes(opcode::WRITE, libc::O_WRONLY | libc::O_APPEND));
        assert!(!writes(opcode::READ, libc::O_SYNC) && !writes(opcode::SYNCFS, 0));
    }

    #[test]
    fn the_second_name_of_a_socket_is_a_request_to_any_file_system() {
        assert_eq!(demand(opcode::MKNOD, ROOT, 0).file_system, ALL);
        assert_ne!(demand(opcode::MKNOD, ROOT + 1, 0).file_system, ALL);
        assert_ne!(demand(opcode::MKDIR, ROOT, 0).file_system, ALL);
    }

    #[test]
    fn one_thread_syncs_all_file_systems_and_others_are_served_meanwhile() {
        let (mut load, all) = (Load::default(), Demand::of(ALL));
        assert!(load.admits(all, 8));
        load.begin(all);
        assert!(!load.admits(all, 8));
        let begun: Vec<_> = (0..4).map(|file_system| fill(&mut load, file_system, 8)).collect();
        assert_eq!(begun, [3, 2, 1, 0], "two more may hang, and another is served");
        load.end(all);
        assert!(load.admits(all, 8));
    }

    #[test]
    fn a_parked_request_waits_for_its_file_system_only() {
        let mut load = Load::default();
        fill(&mut load, 1, 8);
        let memory = Arc::new(crate::memory::lay_out(&[(0, 0x1_0000)], 0).unwrap());
        let mock = MockSplitQueue::new(&*memory, 16);
        (0..3).for_each(|slot| mock.avail().ring().ref_at(slot).unwrap().store(slot as u16));
        mock.avail().idx().store(3);
        let mut queue: Queue = mock.create_queue().unwrap();
        let chains: Vec<_> = queue.iter(memory.clone()).unwrap().collect();
        for (chain, file_system) in chains.into_iter().zip([1, 1, 2]) {
            load.parked.push_back(Parked {
                queue: 1,
                chain,
                subject: None,
                demand: Demand::of(Some(file_system)),
            });
        }
        assert_eq!(load.unpark(8).unwrap().chain.head_index(), 2);
        assert!(load.unpark(8).is_none());
        load.end(Demand::of(Some(1)));
        assert_eq!(load.unpark(8).unwrap().chain.head_index(), 0);
    }

    #[test]
    fn a_request_that_is_parked_is_not_parked_again_without_end() {
        const SIZE: u16 = 16;
        let memory = crate::memory::lay_out(&[(0, 0x1_0000)], 0).unwrap();
        let mock = MockSplitQueue::new(&memory, SIZE);
        let chain = [RawDescriptor::from(Descriptor::new(0x8000, IN_HEADER as u32, 0, 0))];
        mock.build_desc_chain(&chain).unwrap();
        let queue =
            ActiveQueue { queue: mock.create_queue().unwrap(), kick: EventFd::new(0).unwrap(), index: 0 };
        let queues = RequestQueues::new(memory.clone(), vec![queue], 8, unmounted());
        fill_with(&mut lock(&queues.load), Demand::of(None), 8);
        let shared = shared();
        // The driver makes the same descriptor available again and again.
        let mut offered = 0;
        let refused = loop {
            mock.avail().ring().ref_at(usize::from(offered % SIZE)).unwrap().store(0);
            offered += 1;
            mock.avail().idx().store(offered);
            match queues.take(0, &shared) {
                Ok(taken) => assert!(matches!(taken, Taken::Parked)),
                Err(error) => break error,
            }
            assert!(offered < 4 * SIZE, "{} requests are parked", lock(&queues.load).parked.len());
        };
        assert!(matches!(refused, ServeError::TooMany), "{refused}");
        assert_eq!((offered, lock(&queues.load).parked.len()), (SIZE + 1, usize::from(SIZE)));
    }

    #[test]
    fn a_descriptor_is_closed_by_a_thread_of_its_file_system() {
        let shared = shared();
        let memory = crate::memory::lay_out(&[(0, 0x1_0000)], 0).unwrap();
        let queues = RequestQueues::new(memory, Vec::new(), 8, unmounted());
        let (hung, other) = (1, 2);
        let unused = |device| {
            let (reader, writer) = std::io::pipe().unwrap();
            shared.add_unused([Unused { device, _kept: Arc::new(writer) }]);
            reader
        };
        // All that the file system may have wait for it.
        fill(&mut lock(&queues.load), hung, 8);
        let (mut waits, mut closed) = (unused(hung), unused(other));
        assert!(queues.close_one(&shared) && !queues.close_one(&shared));
        assert_eq!(closed.read(&mut [0]).unwrap(), 0);
        assert_eq!(lock(&queues.load).busy, 3);
        lock(&queues.load).end(Demand::of(Some(hung)));
        assert!(queues.close_one(&shared) && !queues.close_one(&shared));
        assert_eq!(waits.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_file_system_that_hangs_takes_no_more_threads_however_many_descriptors_wait_for_it() {
        let root = Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
        let stat = stat_at(&root, c"").unwrap();
        let shared = Shared::new(root.clone(), &stat, Limits::of_this_process(1), false).unwrap();
        let memory = crate::memory::lay_out(&[(0, 0x1_0000)], 0).unwrap();
        let queues = RequestQueues::new(memory, Vec::new(), 8, unmounted());
        let (hung, other) = (1, 2);
        fill(&mut lock(&queues.load), hung, 8);
        let unused = |device| Unused { device, _kept: root.clone() };
        shared.add_unused((0..5000).map(|_| unused(hung)));
        assert!(!queues.close_one(&shared));
        // The leader leaves what can be closed to the thread that it has been, and another thread leads.
        shared.add_unused([other, other].map(unused));
        let stop = EventFd::new(EFD_NONBLOCK).unwrap();
        assert!(matches!(queues.lead(&shared, &stop).unwrap(), Led::CloseFiles));
        assert!(queues.close_one(&shared));
        assert!(queues.unmounted.event.read().is_ok(), "another thread may close the second");
        assert!(queues.close_one(&shared) && !queues.close_one(&shared));
        assert!(queues.unmounted.event.read().is_err());
    }

    #[test]
    fn a_request_that_the_guest_has_changed_since_it_was_taken_is_not_handled() {
        let memory = crate::memory::lay_out(&[(0, 0x1_0000)], 0).unwrap();
        let mock = MockSplitQueue::new(&memory, 16);
        mock.add_desc_chains(&[RawDescriptor::from(Descriptor::new(0x8000, IN_HEADER as u32, 0, 0))], 0)
            .unwrap();
        let mut queue: Queue = mock.create_queue().unwrap();
        let chain = queue.iter(Arc::new(memory.clone())).unwrap().next().unwrap();
        let kick = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap();
        let queues =
            RequestQueues::new(memory.clone(), vec![ActiveQueue { queue, kick, index: 0 }], 8, unmounted());
        let subject = queues.read(0, chain.clone(), 16).unwrap().subject();
        lock(&queues.load).parked.push_back(Parked { queue: 0, chain, subject, demand: Demand::of(Some(1)) });
        // `nodeid` of `fuse_in_header`.
        memory.write_obj(7_u64, GuestAddress(0x8010)).unwrap();
        assert!(matches!(queues.next_parked(), Err(ServeError::Changed)));
    }

    #[test]
    fn the_leader_is_woken_for_a_second_request_that_need_not_wait_any_more() {
        let memory = crate::memory::lay_out(&[(0, 0x1_0000)], 0).unwrap();
        let mock = MockSplitQueue::new(&memory, 16);
        let chains = [0, 1].map(|_| RawDescriptor::from(Descriptor::new(0x8000, IN_HEADER as u32, 0, 0)));
        mock.add_desc_chains(&chains, 0).unwrap();
        let mut queue: Queue = mock.create_queue().unwrap();
        let memory = Arc::new(memory.clone());
        let chains: Vec<_> = queue.iter(memory.clone()).unwrap().collect();
        let kick = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap();
        let active = ActiveQueue { queue, kick: kick.try_clone().unwrap(), index: 0 };
        let queues = RequestQueues::new((*memory).clone(), vec![active], 8, unmounted());
        let [ended, slow, third, fourth] = [1, 2, 3, 4].map(|it| Demand::of(Some(it)));
        let mut load = lock(&queues.load);
        for demand in [ended, slow, third, third, third, fourth] {
            load.begin(demand);
        }
        for (chain, demand) in chains.into_iter().zip([slow, ended]) {
            assert!(!load.admits(demand, 8));
            let subject = queues.read(0, chain.clone(), 16).unwrap().subject();
            load.parked.push_back(Parked { queue: 0, chain, subject, demand });
        }
        load.end(ended);
        drop(load);
        assert_eq!(queues.next_parked().unwrap().unwrap().demand, slow);
        assert!(kick.read().is_ok());
        assert_eq!(queues.next_parked().unwrap().unwrap().demand, ended);
        assert!(kick.read().is_err() && queues.next_parked().unwrap().is_none());
    }
}
