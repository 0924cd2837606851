//! Entropy device (virtio 1.3, 5.4): the host's random bytes for the guest's generator.

use std::{fs::File, io, sync::Arc};

use vm_memory::Bytes;
use vmm_sys_util::{eventfd::EventFd, poll::PollContext};

use super::{Activation, ActiveQueue, Interrupt, VirtioDevice, queue::QueueError, worker::Worker};
use crate::GuestMemory;

const DEVICE_TYPE: u32 = 4;
const QUEUE_SIZES: &[u16] = &[16];
/// The device may give less than it is asked for; this much at a time is more than any driver wants.
const MAX_BYTES_PER_CHAIN: u32 = 4096;

/// The device; it has no state but its source.
pub struct Rng {
    source: File,
    worker: Option<Worker>,
}

impl Rng {
    /// Opens the host's generator.
    pub fn new() -> io::Result<Self> {
        Ok(Self { source: File::open("/dev/urandom")?, worker: None })
    }
}

impl VirtioDevice for Rng {
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

    fn activate(&mut self, activation: Activation) -> io::Result<()> {
        let Activation { memory, queues, interrupt, .. } = activation;
        let requests = queues.into_iter().next().ok_or(io::ErrorKind::InvalidInput)?;
        let mut server = Server { source: self.source.try_clone()?, memory, requests, interrupt };
        self.worker = Some(Worker::spawn("virtio-rng", move |stop| server.run(&stop))?);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
    }
}

/// What the worker owns.
struct Server {
    source: File,
    memory: GuestMemory,
    requests: ActiveQueue,
    interrupt: Arc<Interrupt>,
}

impl Server {
    fn run(&mut self, stop: &EventFd) {
        if self.wait_and_serve(stop).is_err() {
            // Nothing else can be done about a driver that cannot be interrupted.
            let _ = self.interrupt.needs_reset();
        }
    }

    fn wait_and_serve(&mut self, stop: &EventFd) -> Result<(), ServeError> {
        const STOP: u32 = 0;
        const KICK: u32 = 1;
        let poll = PollContext::<u32>::new()?;
        poll.add(stop, STOP)?;
        poll.add(&self.requests.kick, KICK)?;
        loop {
            let events = poll.wait()?;
            if events.iter_readable().any(|event| event.token() == STOP) {
                return Ok(());
            }
            // It says that a kick came, which the poll has said already.
            let _ = self.requests.kick.read();
            self.serve()?;
        }
    }

    fn serve(&mut self) -> Result<(), ServeError> {
        while let Some(chain) = self.requests.pop(&self.memory)? {
            let head = chain.head_index();
            let mut filled = 0;
            for descriptor in chain.writable() {
                let length = descriptor.len().min(MAX_BYTES_PER_CHAIN - filled);
                self.memory
                    .read_exact_volatile_from(descriptor.addr(), &mut self.source, length as usize)
                    .map_err(ServeError::Memory)?;
                filled += length;
            }
            self.requests.push(&self.memory, head, filled)?;
        }
        Ok(self.requests.notify(&self.memory, &self.interrupt)?)
    }
}

/// Why the worker ends before it is told to.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("cannot wait for the driver")]
    Wait(#[from] vmm_sys_util::errno::Error),
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error("the driver's buffer is outside of its memory")]
    Memory(#[source] vm_memory::GuestMemoryError),
}

#[cfg(test)]
mod tests {
    use virtio_queue::{
        desc::{RawDescriptor, split::Descriptor},
        mock::MockSplitQueue,
    };
    use vm_memory::GuestAddress;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    const WRITABLE: u16 = 2;

    /// Has a device serve one chain of `descriptor`; answers the interrupt's status and the used length.
    fn serve(descriptor: Descriptor) -> (Arc<Interrupt>, u32, GuestMemory) {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        let mock = MockSplitQueue::new(&memory, 16);
        mock.build_desc_chain(&[RawDescriptor::from(descriptor)]).unwrap();
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let line = EventFd::new(0).unwrap();
        let interrupt = Arc::new(Interrupt::new(line.try_clone().unwrap()));
        let mut rng = Rng::new().unwrap();
        let queue = ActiveQueue { queue: mock.create_queue().unwrap(), kick: kick.try_clone().unwrap() };
        rng.activate(Activation {
            memory: memory.clone(),
            queues: vec![queue],
            features: 0,
            interrupt: interrupt.clone(),
        })
        .unwrap();
        kick.write(1).unwrap();
        line.read().unwrap();
        rng.reset();
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
        assert_eq!(used, MAX_BYTES_PER_CHAIN);
    }

    #[test]
    fn a_buffer_outside_of_memory_breaks_the_device() {
        let (interrupt, _, _) = serve(Descriptor::new(0xffff_0000, 64, WRITABLE, 0));
        assert!(interrupt.is_reset_needed());
    }
}
