//! Entropy device (virtio 1.3, 5.4): the host's random bytes for the guest's generator.

use std::{fs::File, io, os::fd::AsRawFd};

use virtio_queue::QueueT;
use vm_memory::{ReadVolatile, VolatileMemoryError};
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::{
    Activation, ActiveQueue, Interrupt, VirtioDevice,
    chain::{Chain, ChainError},
    common,
    queue::QueueError,
    worker::{Events, Job, no_events},
};
use crate::{GuestMemory, jail::Duty};

const DEVICE_TYPE: u32 = 4;
const QUEUE_SIZES: &[u16] = &[16];
/// The device may give less than it is asked for; this much at a time is more than any driver wants.
const MAX_BYTES_PER_CHAIN: usize = 4096;
/// Chains before the stop event has its turn.
const TURN: usize = 64;
const TOKEN_QUEUE: u64 = 0;

/// The device; it has no state but its source.
pub struct Rng {
    source: File,
}

impl Rng {
    /// Opens the host's generator.
    pub fn new() -> io::Result<Self> {
        Ok(Self { source: File::open("/dev/urandom")? })
    }
}

impl VirtioDevice for Rng {
    fn duty(&self) -> Duty {
        Duty::Rng
    }

    fn device_type(&self) -> u32 {
        DEVICE_TYPE
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn activate(&mut self, activation: Activation) -> io::Result<Job> {
        let Activation { memory, queues, interrupt, log, .. } = activation;
        let requests = queues.into_iter().next().ok_or(io::ErrorKind::InvalidInput)?;
        let source = self.source.try_clone()?;
        Ok(Box::new(move |stop| {
            let mut server = Server { source, memory: &memory, requests, interrupt: &interrupt };
            common::conclude("virtio-rng", server.run(stop), &interrupt, &log);
        }))
    }
}

/// The device at work.
struct Server<'m> {
    source: File,
    memory: &'m GuestMemory,
    requests: ActiveQueue,
    interrupt: &'m Interrupt,
}

impl Server<'_> {
    /// Serves until `stop` is readable, or the driver does something illegal.
    fn run(&mut self, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop).map_err(ServeError::Epoll)?;
        let kick = self.requests.kick.as_raw_fd();
        events.watch(kick, EventSet::IN, TOKEN_QUEUE).map_err(ServeError::Epoll)?;
        // The driver may have made requests before its kicks were looked at.
        let mut busy = true;
        let mut came = no_events();
        while events.wait(busy, &mut came).map_err(ServeError::Epoll)?.is_some() {
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
            let Chain { head, mut writable, .. } =
                Chain::walk(self.memory, chain, self.requests.queue.size())?;
            let place = writable.split_front(MAX_BYTES_PER_CHAIN);
            for slice in place.slices() {
                self.source.read_exact_volatile(&mut slice.clone()).map_err(ServeError::Source)?;
            }
            self.requests.push(self.memory, head, place.len() as u32)?;
            self.requests.notify(self.memory, self.interrupt)?;
        }
        Ok(true)
    }
}

/// Why the worker ends before it is told to.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("the queue is broken")]
    Queue(#[from] QueueError),
    #[error("a request's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("the host's generator gives nothing")]
    Source(#[source] VolatileMemoryError),
    #[error("cannot wait for events")]
    Epoll(#[source] io::Error),
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use virtio_queue::{
        desc::{RawDescriptor, split::Descriptor},
        mock::MockSplitQueue,
    };
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;
    use crate::{memory, virtio::worker::Worker};

    const NEXT: u16 = 1;
    const WRITABLE: u16 = 2;

    /// Has a device serve one chain of `descriptor`; answers the interrupt's status and the used length.
    fn serve(descriptor: Descriptor) -> (Arc<Interrupt>, u32, GuestMemory) {
        let memory = memory::lay_out(&[(0, 0x10000)], 0).unwrap();
        let mock = MockSplitQueue::new(&memory, 16);
        mock.desc_table().store(0, RawDescriptor::from(descriptor)).unwrap();
        mock.avail().idx().store(1);
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let line = EventFd::new(0).unwrap();
        let interrupt = Arc::new(Interrupt::new(line.try_clone().unwrap()));
        let mut rng = Rng::new().unwrap();
        let queue = ActiveQueue { queue: mock.create_queue().unwrap(), kick: kick.try_clone().unwrap() };
        let activation = Activation {
            memory: memory.clone(),
            queues: vec![queue],
            features: 0,
            interrupt: interrupt.clone(),
            log: Arc::default(),
        };
        let mut worker = Worker::spawn(rng.duty()).unwrap();
        worker.start(rng.activate(activation).unwrap()).unwrap();
        kick.write(1).unwrap();
        line.read().unwrap();
        worker.stop().unwrap();
        let used = mock.used().ring().ref_at(0).unwrap().load().len();
        (interrupt, used, memory.clone())
    }

    #[test]
    fn a_buffer_is_filled_with_random_bytes() {
        let (interrupt, used, memory) = serve(Descriptor::new(0x8000, 64, WRITABLE, 0));
        assert_eq!((interrupt.status(), used), (super::super::INTERRUPT_USED, 64));
        let mut bytes = [0; 64];
        memory.read_slice(&mut bytes, GuestAddress(0x8000)).unwrap();
        assert_ne!(bytes, [0; 64]);
    }

    #[test]
    fn a_huge_buffer_is_filled_in_part() {
        let (_, used, _) = serve(Descriptor::new(0x8000, 0x8000, WRITABLE, 0));
        assert_eq!(used as usize, MAX_BYTES_PER_CHAIN);
    }

    #[test]
    fn a_chain_without_an_end_breaks_the_device() {
        let (interrupt, _, _) = serve(Descriptor::new(0x8000, 64, WRITABLE | NEXT, 0));
        assert!(interrupt.is_reset_needed());
    }

    #[test]
    fn a_buffer_outside_of_memory_breaks_the_device() {
        let (interrupt, _, _) = serve(Descriptor::new(0xffff_0000, 64, WRITABLE, 0));
        assert!(interrupt.is_reset_needed());
    }
}
