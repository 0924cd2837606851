//! Taking chains from a queue and giving them back, as every device does it.

use std::io;

use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};

use super::{ActiveQueue, Interrupt};
use crate::GuestMemory;

/// What went wrong with a queue. All but [`QueueError::Interrupt`] are the driver's doing, and the device's
/// answer is [`Interrupt::needs_reset`].
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The rings are where the driver may not put them, or hold what they may not hold.
    #[error("the driver broke the queue")]
    Ring(#[from] virtio_queue::Error),
    /// The interrupt could not be raised.
    #[error("cannot raise the device's interrupt")]
    Interrupt(#[source] io::Error),
}

impl ActiveQueue {
    /// The next chain that the driver made available, None when there is none. Its iterator yields at most as
    /// many descriptors as the queue's size, whatever loops the driver made.
    pub fn pop<'m>(
        &mut self,
        memory: &'m GuestMemory,
    ) -> Result<Option<DescriptorChain<&'m GuestMemory>>, QueueError> {
        Ok(self.queue.iter(memory)?.next())
    }

    /// Gives the chain that starts at `head` back to the driver, with `len` bytes written into it.
    pub fn push(&mut self, memory: &GuestMemory, head: u16, len: u32) -> Result<(), QueueError> {
        Ok(self.queue.add_used(memory, head, len)?)
    }

    /// Interrupts the driver if it wants to know of what was pushed since the last call (virtio 1.3, 2.7.10).
    pub fn notify(&mut self, memory: &GuestMemory, interrupt: &Interrupt) -> Result<(), QueueError> {
        if self.queue.needs_notification(memory)? {
            interrupt.used().map_err(QueueError::Interrupt)?;
        }
        Ok(())
    }

    /// Asks the driver to kick again; true when it made more available meanwhile, so that the caller must
    /// look again before it sleeps.
    pub fn rearm(&mut self, memory: &GuestMemory) -> Result<bool, QueueError> {
        Ok(self.queue.enable_notification(memory)?)
    }
}

#[cfg(test)]
mod tests {
    use virtio_queue::{
        desc::{RawDescriptor, split::Descriptor},
        mock::MockSplitQueue,
    };
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;
    use crate::memory;

    fn memory() -> GuestMemory {
        memory::lay_out(&[(0, 0x10000)], 0).unwrap()
    }

    fn active(mock: &MockSplitQueue<GuestMemory>) -> ActiveQueue {
        ActiveQueue { queue: mock.create_queue().unwrap(), kick: EventFd::new(EFD_NONBLOCK).unwrap() }
    }

    #[test]
    fn a_chain_goes_round_and_the_driver_is_told() {
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, 16);
        let chain = [RawDescriptor::from(Descriptor::new(0x8000, 16, 2, 0))];
        mock.build_desc_chain(&chain).unwrap();
        let mut queue = active(&mock);
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let interrupt = Interrupt::new(line.try_clone().unwrap());

        let head = queue.pop(&memory).unwrap().unwrap().head_index();
        assert!(queue.pop(&memory).unwrap().is_none());
        queue.push(&memory, head, 16).unwrap();
        queue.notify(&memory, &interrupt).unwrap();

        assert_eq!(line.read().unwrap(), 1);
        assert_eq!(interrupt.status(), super::super::INTERRUPT_USED);
        assert_eq!(u16::from_le(mock.used().idx().load()), 1);
    }

    #[test]
    fn an_impossible_available_index_is_an_error() {
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, 16);
        mock.avail().idx().store(17u16.to_le());
        assert!(matches!(active(&mock).pop(&memory), Err(QueueError::Ring(_))));
    }

    #[test]
    fn giving_back_what_is_not_a_descriptor_is_an_error() {
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, 16);
        assert!(active(&mock).push(&memory, 16, 0).is_err());
    }
}
