//! Memory balloon device (virtio 1.3, 5.5). It returns memory of the guest to the host in two ways:
//!
//! - Free page reporting: memory that the guest has freed goes back without a request by the host. The guest may use it
//!   again at any time.
//! - The balloon: the VMM requests a number of pages, and the driver takes as many free pages away from its kernel. So
//!   the guest cannot use them until the VMM requests fewer.

use std::{
    io,
    ops::Range,
    os::fd::AsRawFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryError};
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    Activation, ActiveQueue, Interrupt, VirtioDevice,
    chain::{Buffers, Chain, ChainError},
    config_space::read_config,
    device,
    device_threads::Job,
    event_loop::{EventError, EventHandler, Events},
    queue::{Outcome, QueueError, Turn},
};
use crate::{GuestMemory, jail::ThreadRole, lock, memory};

/// VIRTIO_BALLOON_F_PAGE_REPORTING (virtio 1.3, 5.5.3).
const PAGE_REPORTING: u64 = 1 << 5;
/// inflateq, deflateq, reporting_vq. Linux does not use a reporting_vq with fewer entries than its longest report.
const QUEUE_SIZES: [u16; 3] = [16, 16, 32];
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
/// Index of reporting_vq. The specification reserves an index for each optional queue, and this one has 4 (virtio 1.3,
/// 5.5.2). Linux and other implementations count only the queues that exist.
const REPORTING: usize = 2;
/// Bytes of a page of the balloon, whatever the page size of the guest (virtio 1.3, 5.5.6).
pub const PAGE: u64 = 4096;
/// The longest list of pages that is accepted, in bytes. Each page takes 4 bytes, and Linux sends up to 256 pages.
const LONGEST_LIST: usize = 4096;
/// The VMM is told when the balloon is as requested, and each time when it has changed by this number of pages: 16 MiB.
const NEWS: u32 = 4096;
const TOKEN_REQUESTED: u64 = QUEUE_SIZES.len() as u64;
/// Of each queue.
const TURN: Turn = Turn { chains: 16, batch: 1 };

/// The device.
pub struct Balloon(Arc<Shared>);

/// The VMM's side of the device: requests pages, and sees how many the driver has given.
pub struct BalloonControl(Arc<Shared>);

struct Shared {
    plan: Mutex<Plan>,
    /// Tells the device's thread that the number of requested pages has changed.
    requested: EventFd,
    /// Tells the VMM that the driver has changed the balloon.
    progress: EventFd,
    /// Bytes that the driver has reported as free.
    reported: AtomicU64,
}

#[derive(Default)]
struct Plan {
    /// `num_pages` (virtio 1.3, 5.5.4).
    requested: u32,
    /// The pages in the balloon, as the driver says. A driver that lies gets no more memory by that: what it may use is
    /// limited by the pod's cgroup.
    inflated: u32,
    /// The configuration generation (virtio 1.3, 2.5).
    generation: u32,
}

impl Balloon {
    /// A device whose balloon is empty.
    pub fn new() -> io::Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let shared = Shared {
            plan: Mutex::default(),
            requested: event()?,
            progress: event()?,
            reported: AtomicU64::default(),
        };
        Ok(Self(Arc::new(shared)))
    }

    /// The VMM's side of the device.
    pub fn control(&self) -> BalloonControl {
        BalloonControl(self.0.clone())
    }
}

impl BalloonControl {
    /// Requests that the balloon has `bytes`, a multiple of [`PAGE`]. The driver changes it when it likes.
    pub fn request(&self, bytes: u64) -> io::Result<()> {
        let pages = u32::try_from(bytes / PAGE).unwrap_or(u32::MAX);
        let mut plan = lock(&self.0.plan);
        if plan.requested == pages {
            return Ok(());
        }
        plan.requested = pages;
        plan.generation = plan.generation.wrapping_add(1);
        drop(plan);
        self.0.requested.write(1)
    }

    /// Bytes in the balloon.
    pub fn inflated(&self) -> u64 {
        u64::from(lock(&self.0.plan).inflated) * PAGE
    }

    /// Bytes that the driver has reported as free since the VMM has started. A part of a page counts, and stays.
    pub fn reported(&self) -> u64 {
        self.0.reported.load(Ordering::Relaxed)
    }

    /// Readable when [`BalloonControl::inflated`] may have changed.
    pub fn progress(&self) -> &EventFd {
        &self.0.progress
    }
}

impl VirtioDevice for Balloon {
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Balloon
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        PAGE_REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// `num_pages` and `actual` (virtio 1.3, 5.5.4). `actual` is the driver's to write. The device counts instead.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let plan = lock(&self.0.plan);
        let mut config = [0; 8];
        config[..4].copy_from_slice(&plan.requested.to_le_bytes());
        config[4..].copy_from_slice(&plan.inflated.to_le_bytes());
        drop(plan);
        read_config(&config, offset, data);
    }

    fn config_generation(&self) -> u32 {
        lock(&self.0.plan).generation
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, mut queues, features, interrupt, log } = activation;
        if features & PAGE_REPORTING == 0 {
            queues.truncate(REPORTING);
        }
        if !queues.iter().all(|queue| queue.queue.ready()) {
            return Err(io::Error::other("the driver did not set up the queues of virtio-balloon"));
        }
        // A driver that begins has an empty balloon.
        lock(&self.0.plan).inflated = 0;
        let shared = self.0.clone();
        Ok(vec![device::job("virtio-balloon", interrupt, log, move |interrupt, stop| {
            let service = Service { memory: &memory, interrupt, shared: &shared };
            service.run(queues, stop)
        })])
    }
}

/// The active device.
struct Service<'m> {
    memory: &'m GuestMemory,
    interrupt: &'m Interrupt,
    shared: &'m Shared,
}

/// The active device and its queues.
struct Handler<'s, 'm> {
    service: &'s Service<'m>,
    queues: Vec<ActiveQueue>,
}

impl Service<'_> {
    fn run(&self, queues: Vec<ActiveQueue>, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop)?;
        for (token, queue) in (0..).zip(&queues) {
            events.watch(queue.kick.as_raw_fd(), EventSet::IN, token)?;
        }
        events.watch(self.shared.requested.as_raw_fd(), EventSet::IN, TOKEN_REQUESTED)?;
        events.run(&mut Handler { service: self, queues })
    }

    /// Handles a chain of the queue with this index.
    fn handle(&self, queue: usize, chain: Chain<'_>) -> Result<(), ServeError> {
        match queue {
            INFLATE => {
                let pages = read_list(&chain.readable)?;
                for run in runs(&pages) {
                    self.release(run)?;
                }
                self.count(|inflated| inflated.saturating_add(pages.len() as u32))
            }
            // Nothing has to be done for the pages themselves: they stay mapped.
            DEFLATE => {
                let pages = read_list(&chain.readable)?;
                self.count(|inflated| inflated.saturating_sub(pages.len() as u32))
            }
            // A reported page is the device's until its chain is used (5.5.6.7).
            _ => {
                chain.writable.slices().try_for_each(memory::release).map_err(ServeError::Release)?;
                self.shared.reported.fetch_add(chain.writable.len() as u64, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Returns pages with these numbers to the host.
    fn release(&self, pages: Range<u64>) -> Result<(), ServeError> {
        let (start, len) = (GuestAddress(pages.start * PAGE), (pages.end - pages.start) * PAGE);
        for piece in self.memory.get_slices(start, len as usize) {
            memory::release(&piece.map_err(ServeError::Memory)?).map_err(ServeError::Release)?;
        }
        Ok(())
    }

    fn count(&self, change: impl FnOnce(u32) -> u32) -> Result<(), ServeError> {
        let mut plan = lock(&self.shared.plan);
        let before = plan.inflated;
        plan.inflated = change(before);
        let is_news = plan.inflated == plan.requested || plan.inflated / NEWS != before / NEWS;
        drop(plan);
        if is_news { self.shared.progress.write(1).map_err(ServeError::Progress) } else { Ok(()) }
    }
}

/// Reads the page numbers of an inflateq's or deflateq's chain.
fn read_list(readable: &Buffers<'_>) -> Result<Vec<u32>, ServeError> {
    if readable.len() > LONGEST_LIST || !readable.len().is_multiple_of(size_of::<u32>()) {
        return Err(ServeError::Length(readable.len()));
    }
    let bytes = readable.to_vec();
    Ok(bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
}

/// Joins consecutive page numbers, which are in ascending or descending order.
fn runs(pages: &[u32]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for page in pages.iter().map(|page| u64::from(*page)) {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            Some(run) if run.start == page + 1 => run.start = page,
            _ => runs.push(page..page + 1),
        }
    }
    runs
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
        let mut pending = false;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            pending |= queue.serve(memory, interrupt, TURN, |chain| {
                self.service.handle(index, chain)?;
                // The contents of reported pages are undefined now. No byte counts as written.
                Ok::<_, ServeError>(Outcome::Used(0))
            })?;
        }
        Ok(pending)
    }
}

/// Why the device stops serving its driver.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("a queue is broken")]
    Queue(#[from] QueueError),
    #[error("a request's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("a list of pages has {0} bytes")]
    Length(usize),
    #[error("a page of the balloon is not in guest memory")]
    Memory(#[source] GuestMemoryError),
    #[error("cannot return memory to the host")]
    Release(#[source] io::Error),
    #[error("cannot interrupt the driver")]
    Interrupt(#[source] io::Error),
    #[error("cannot notify the VMM of pages in the balloon")]
    Progress(#[source] io::Error),
    #[error(transparent)]
    Events(#[from] EventError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::{BUFFERS, Driver, NEXT, WRITE};

    /// A guest that has written to the first ten pages of its buffers.
    fn guest(features: u64) -> Driver {
        guest_of(&mut Balloon::new().unwrap(), features)
    }

    fn guest_of(device: &mut Balloon, features: u64) -> Driver {
        let driver = Driver::new(device, features);
        driver.write(BUFFERS, &[7; 10 * PAGE as usize]);
        driver
    }

    /// Whether the pages of the buffers are as they were written.
    fn kept(driver: &Driver) -> Vec<bool> {
        let bytes = driver.read(BUFFERS, 10 * PAGE as usize);
        bytes.chunks(PAGE as usize).map(|page| page.iter().all(|byte| *byte == 7)).collect()
    }

    #[test]
    fn what_is_reported_goes_back_to_the_host() {
        let mut device = Balloon::new().unwrap();
        let mut driver = guest_of(&mut device, PAGE_REPORTING);
        let report = [(BUFFERS, 2 * PAGE as u32, WRITE), (BUFFERS + 5 * PAGE, PAGE as u32, WRITE)];
        driver.offer(REPORTING, 3, &report);
        assert_eq!(driver.wait_used(REPORTING), (3, 0));
        assert_eq!((device.control().reported(), device.control().inflated()), (3 * PAGE, 0));
        let expected = [false, false, true, true, true, false, true, true, true, true];
        assert_eq!(kept(&driver), expected);
        assert_eq!(driver.read(BUFFERS, PAGE as usize), [0; PAGE as usize]);

        driver.write(BUFFERS, &[8; 16]);
        assert_eq!(driver.read(BUFFERS, 16), [8; 16]);
    }

    #[test]
    fn parts_of_pages_and_what_is_only_to_be_read_stay() {
        let mut driver = guest(PAGE_REPORTING);
        driver.offer(REPORTING, 0, &[(BUFFERS + 1, 3 * PAGE as u32 - 2, WRITE)]);
        driver.offer(REPORTING, 1, &[(BUFFERS + 5 * PAGE + 8, 16, WRITE)]);
        driver.offer(REPORTING, 2, &[(BUFFERS + 6 * PAGE, PAGE as u32, 0), (BUFFERS + 7 * PAGE, 0, WRITE)]);
        for head in 0..3 {
            assert_eq!(driver.wait_used(REPORTING), (head, 0));
        }
        let expected = [true, false, true, true, true, true, true, true, true, true];
        assert_eq!(kept(&driver), expected);
    }

    /// Sends a list of the pages with these numbers, which begins in the last page of the buffers.
    fn send(driver: &mut Driver, queue: usize, pages: &[u64]) {
        let list = BUFFERS + 9 * PAGE;
        let bytes: Vec<u8> = pages.iter().flat_map(|page| (*page as u32).to_le_bytes()).collect();
        driver.write(list, &bytes);
        driver.offer(queue, 0, &[(list, bytes.len() as u32, 0)]);
        assert_eq!(driver.wait_used(queue), (0, 0));
    }

    fn config(device: &Balloon) -> [u32; 2] {
        let mut config = [0; 8];
        device.read_config(0, &mut config);
        [0, 4].map(|at| u32::from_le_bytes(config[at..at + 4].try_into().unwrap()))
    }

    #[test]
    fn the_driver_is_told_how_many_pages_are_wanted_and_the_vmm_how_many_there_are() {
        let mut device = Balloon::new().unwrap();
        let (mut driver, control) = (guest_of(&mut device, PAGE_REPORTING), device.control());
        assert_eq!((config(&device), device.config_generation()), ([0, 0], 0));
        control.request(5 * PAGE).unwrap();
        driver.wait_config_changed();
        assert_eq!((config(&device), device.config_generation()), ([5, 0], 1));
        control.request(5 * PAGE).unwrap();
        assert_eq!(device.config_generation(), 1, "nothing has changed");

        let first = BUFFERS / PAGE;
        send(&mut driver, INFLATE, &[first + 1, first + 2, first + 6, first + 5, first + 4]);
        assert_eq!((control.inflated(), control.progress().read().unwrap()), (5 * PAGE, 1));
        let expected = [true, false, false, true, false, false, false, true, true, false];
        assert_eq!(kept(&driver), expected, "the last page has the list");

        send(&mut driver, DEFLATE, &[first + 5, first + 1]);
        assert_eq!(control.inflated(), 3 * PAGE);
        send(&mut driver, DEFLATE, &[first; 7]);
        assert_eq!(control.inflated(), 0);
    }

    #[test]
    fn the_balloon_of_a_driver_that_begins_anew_is_empty() {
        let mut device = Balloon::new().unwrap();
        let mut driver = guest_of(&mut device, PAGE_REPORTING);
        send(&mut driver, INFLATE, &[BUFFERS / PAGE]);
        driver.reset();
        assert_eq!(device.control().inflated(), PAGE);
        drop(guest_of(&mut device, PAGE_REPORTING));
        assert_eq!(device.control().inflated(), 0);
    }

    #[test]
    fn a_list_that_is_too_long_or_names_no_memory_breaks_the_device() {
        for len in [LONGEST_LIST as u32 + 4, 6] {
            let mut driver = guest(PAGE_REPORTING);
            driver.offer(INFLATE, 0, &[(BUFFERS, len, 0)]);
            driver.wait_needs_reset();
            assert!(kept(&driver)[0]);
        }
        let mut driver = guest(PAGE_REPORTING);
        driver.write(BUFFERS, &u32::MAX.to_le_bytes());
        driver.offer(INFLATE, 0, &[(BUFFERS, 4, 0)]);
        driver.wait_needs_reset();
    }

    #[test]
    fn pages_next_to_one_another_are_released_together() {
        assert_eq!(runs(&[7, 8, 9, 3, 2, 5, 5]), [7..10, 2..4, 5..6, 5..6]);
        assert_eq!(runs(&[0, u32::MAX]), [0..1, u64::from(u32::MAX)..1 << 32]);
        assert!(runs(&[]).is_empty());
    }

    #[test]
    fn a_driver_that_does_not_report_has_a_balloon() {
        let mut driver = guest(0);
        driver.offer(DEFLATE, 5, &[(BUFFERS, 4, 0)]);
        assert_eq!(driver.wait_used(DEFLATE), (5, 0));
    }

    #[test]
    fn more_than_a_turn_of_reports_is_served() {
        let mut driver = guest(PAGE_REPORTING);
        for round in 0..3 * TURN.chains as u16 {
            driver.offer(REPORTING, round % 32, &[(BUFFERS, PAGE as u32, WRITE)]);
            if round % 32 == 31 {
                (0..32).for_each(|head| assert_eq!(driver.wait_used(REPORTING), (head, 0)));
            }
        }
        (0..TURN.chains as u16).for_each(|head| assert_eq!(driver.wait_used(REPORTING), (head, 0)));
    }

    #[test]
    fn memory_that_is_not_there_breaks_the_device() {
        let mut driver = guest(PAGE_REPORTING);
        driver.offer(REPORTING, 0, &[(BUFFERS, PAGE as u32, WRITE), (0xffff_0000, PAGE as u32, WRITE)]);
        driver.wait_needs_reset();
        assert!(driver.used(REPORTING).is_none());
        assert!(kept(&driver)[0], "a report that is illegal in part was served in part");
    }

    #[test]
    fn a_broken_queue_breaks_the_device() {
        for queue in [INFLATE, DEFLATE, REPORTING] {
            let mut driver = guest(PAGE_REPORTING);
            driver.break_avail_index(queue);
            driver.wait_needs_reset();
        }
    }

    #[test]
    fn a_chain_without_an_end_breaks_the_device() {
        let mut driver = guest(PAGE_REPORTING);
        driver.describe(
            REPORTING,
            0,
            virtio_queue::desc::split::Descriptor::new(BUFFERS, 16, WRITE | NEXT, 0),
        );
        driver.publish(REPORTING, 0);
        driver.wait_needs_reset();
    }
}
