//! Entropy device (virtio 1.3, 5.4): gives random bytes of the host to the guest.

use std::{fs::File, io, os::fd::AsRawFd};

use vm_memory::{ReadVolatile, VolatileMemoryError};
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::{
    Activation, ActiveQueue, Interrupt, VirtioDevice,
    chain::{Chain, ChainError},
    device,
    device_threads::Job,
    event_loop::{EventError, EventHandler, Events},
    queue::{Outcome, QueueError, Turn},
};
use crate::{GuestMemory, jail::ThreadRole};

const DEVICE_TYPE: u32 = 4;
const QUEUE_SIZES: &[u16] = &[16];
/// The device may return fewer bytes than requested. No driver needs more than this at once.
const MAX_BYTES_PER_CHAIN: usize = 4096;
const TURN: Turn = Turn { chains: 64, batch: 1 };
const TOKEN_QUEUE: u64 = 0;

/// The device. Its only state is the open source of random bytes.
pub struct Rng {
    source: File,
}

impl Rng {
    /// Opens the random number generator of the host.
    pub fn new() -> io::Result<Self> {
        Ok(Self { source: File::open("/dev/urandom")? })
    }
}

impl VirtioDevice for Rng {
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Rng
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

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, queues, interrupt, log, .. } = activation;
        let requests = queues.into_iter().next().ok_or(io::ErrorKind::InvalidInput)?;
        let source = self.source.try_clone()?;
        Ok(vec![device::job("virtio-rng", interrupt, log, move |interrupt, stop| {
            Service { source, memory: &memory, requests, interrupt }.run(stop)
        })])
    }
}

/// The active device.
struct Service<'m> {
    source: File,
    memory: &'m GuestMemory,
    requests: ActiveQueue,
    interrupt: &'m Interrupt,
}

impl Service<'_> {
    fn run(&mut self, stop: &EventFd) -> Result<(), ServeError> {
        let events = Events::new(stop)?;
        events.watch(self.requests.kick.as_raw_fd(), EventSet::IN, TOKEN_QUEUE)?;
        events.run(self)
    }
}

impl EventHandler for Service<'_> {
    type Error = ServeError;

    fn serve_queues(&mut self) -> Result<bool, ServeError> {
        let source = &mut self.source;
        self.requests.serve(self.memory, self.interrupt, TURN, |mut chain: Chain| {
            let buffers = chain.writable.split_front(MAX_BYTES_PER_CHAIN);
            for slice in buffers.slices() {
                source.read_exact_volatile(&mut slice.clone()).map_err(ServeError::Source)?;
            }
            Ok(Outcome::Used(buffers.len() as u32))
        })
    }
}

/// Why the device stops serving its driver.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("the queue is broken")]
    Queue(#[from] QueueError),
    #[error("a request's chain is illegal")]
    Chain(#[from] ChainError),
    #[error("cannot read random bytes from the host")]
    Source(#[source] VolatileMemoryError),
    #[error(transparent)]
    Events(#[from] EventError),
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
    use crate::{memory, virtio::device_threads::DeviceThreads};

    const NEXT: u16 = 1;
    const WRITABLE: u16 = 2;

    /// Makes a device serve one chain of `descriptor`. Returns the interrupt, the used length and the memory.
    fn serve(descriptor: Descriptor) -> (Arc<Interrupt>, u32, GuestMemory) {
        let memory = memory::lay_out(&[(0, 0x10000)], 0).unwrap();
        let mock = MockSplitQueue::new(&memory, 16);
        mock.desc_table().store(0, RawDescriptor::from(descriptor)).unwrap();
        mock.avail().idx().store(1);
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let line = EventFd::new(0).unwrap();
        let interrupt = Arc::new(Interrupt::new(line.try_clone().unwrap()));
        let mut rng = Rng::new().unwrap();
        let queue =
            ActiveQueue { queue: mock.create_queue().unwrap(), kick: kick.try_clone().unwrap(), index: 0 };
        let activation = Activation {
            memory: memory.clone(),
            queues: vec![queue],
            features: 0,
            interrupt: interrupt.clone(),
            log: Arc::default(),
        };
        let mut worker = DeviceThreads::spawn(rng.thread_role(), 1).unwrap();
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
