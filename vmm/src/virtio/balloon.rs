//! Memory balloon device (virtio 1.3, 5.5) for free page reporting: memory that the guest has freed goes back to the
//! host without a request by the host.
//!
//! The balloon itself stays empty, because the device never requests a page (`num_pages` is 0).

use std::{io, os::fd::AsRawFd};

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use virtio_queue::QueueT;
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::{
    Activation, ActiveQueue, Interrupt, VirtioDevice,
    chain::{Chain, ChainError},
    config_space::read_config,
    device,
    device_threads::Job,
    event_loop::{EventError, EventHandler, Events},
    queue::{Outcome, QueueError, Turn},
};
use crate::{GuestMemory, jail::ThreadRole, memory};

/// VIRTIO_BALLOON_F_PAGE_REPORTING (virtio 1.3, 5.5.3).
const PAGE_REPORTING: u64 = 1 << 5;
/// inflateq, deflateq, reporting_vq. Linux does not use a reporting_vq with fewer entries than its longest report.
const QUEUE_SIZES: [u16; 3] = [16, 16, 32];
/// Index of reporting_vq. The specification reserves an index for each optional queue, and this one has 4 (virtio 1.3,
/// 5.5.2). Linux and other implementations count only the queues that exist.
const REPORTING: usize = 2;
/// `num_pages` and `actual` (virtio 1.3, 5.5.4).
const CONFIG: [u8; 8] = [0; 8];
/// Of each queue.
const TURN: Turn = Turn { chains: 16, batch: 1 };

/// The device. It has no state.
pub struct Balloon;

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

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config(&CONFIG, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, mut queues, features, interrupt, log } = activation;
        if features & PAGE_REPORTING == 0 {
            queues.truncate(REPORTING);
        }
        if !queues.iter().all(|queue| queue.queue.ready()) {
            return Err(io::Error::other("the driver did not set up the queues of virtio-balloon"));
        }
        Ok(vec![device::job("virtio-balloon", interrupt, log, move |interrupt, stop| {
            Service { memory: &memory, queues, interrupt }.run(stop)
        })])
    }
}

/// The active device.
struct Service<'m> {
    memory: &'m GuestMemory,
    queues: Vec<ActiveQueue>,
    interrupt: &'m Interrupt,
}

impl Service<'_> {
    fn run(&mut self, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop)?;
        for (token, queue) in (0..).zip(&self.queues) {
            events.watch(queue.kick.as_raw_fd(), EventSet::IN, token)?;
        }
        events.run(self)
    }
}

impl EventHandler for Service<'_> {
    type Error = ServeError;

    fn serve_queues(&mut self) -> Result<bool, ServeError> {
        let mut pending = false;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            pending |= queue.serve(self.memory, self.interrupt, TURN, |chain: Chain| {
                // The device requests no pages. If a driver inflates or deflates the balloon all the same, the device
                // acknowledges that (virtio 1.3, 5.5.6). It does not read the list of pages, because the pages may stay
                // mapped. Only reported pages belong to the device until then (5.5.6.7).
                if index == REPORTING {
                    for piece in chain.writable.slices() {
                        memory::release(piece).map_err(ServeError::Release)?;
                    }
                }
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
    #[error("cannot return memory to the host")]
    Release(#[source] io::Error),
    #[error(transparent)]
    Events(#[from] EventError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::{BUFFERS, Driver, NEXT, WRITE};

    const INFLATE: usize = 0;
    const DEFLATE: usize = 1;
    const PAGE: u64 = 4096;

    /// A guest that has written to the first ten pages of its buffers.
    fn guest(features: u64) -> Driver {
        let driver = Driver::new(&mut Balloon, features);
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
        let mut driver = guest(PAGE_REPORTING);
        let report = [(BUFFERS, 2 * PAGE as u32, WRITE), (BUFFERS + 5 * PAGE, PAGE as u32, WRITE)];
        driver.offer(REPORTING, 3, &report);
        assert_eq!(driver.wait_used(REPORTING), (3, 0));
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

    #[test]
    fn pages_in_the_balloon_stay_as_they_are() {
        let mut driver = guest(PAGE_REPORTING);
        let list = BUFFERS + 9 * PAGE;
        let page = (BUFFERS / PAGE) as u32;
        driver.write(list, &page.to_le_bytes());
        for queue in [INFLATE, DEFLATE] {
            driver.offer(queue, 0, &[(list, 4, 0)]);
            assert_eq!(driver.wait_used(queue), (0, 0));
        }
        assert!(kept(&driver)[0]);
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
