//! A queue of an active device: taking descriptor chains from it and giving them back (virtio 1.3, 2.7).

use std::{
    io, mem,
    sync::atomic::{Ordering, fence},
};

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::{
    chain::{Chain, ChainError},
    interrupt::Interrupt,
};
use crate::GuestMemory;

/// What is wrong with a queue. Except for [`QueueError::Interrupt`] the driver has caused it, and the device answers
/// with [`Interrupt::needs_reset`].
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// A ring is not in guest memory, or its contents are illegal.
    #[error("the driver broke the queue")]
    Ring(#[from] virtio_queue::Error),
    #[error("cannot raise the device's interrupt")]
    Interrupt(#[source] io::Error),
}

/// A queue, and the event by which its driver notifies the device.
pub struct ActiveQueue {
    /// The queue as the driver configured it. The transport has validated it, and has enabled VIRTIO_F_EVENT_IDX in
    /// it if that was negotiated.
    pub queue: Queue,
    /// The driver's available buffer notification (virtio 1.3, 2.7.13), an ioeventfd.
    pub kick: EventFd,
    /// The index of the queue, by which it has its interrupt.
    pub index: usize,
}

/// How many chains [`ActiveQueue::serve`] handles.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    /// The most in one call, so that the thread soon looks at other queues and at its stop event.
    pub chains: usize,
    /// The driver is notified after this number of used chains, so that it handles these while the device continues.
    pub batch: usize,
}

/// What a device did with a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It has used the chain and written this many bytes to it.
    Used(u32),
    /// It cannot handle the chain now. The chain stays available, and is handled later.
    Postponed,
}

impl ActiveQueue {
    /// Takes chains from the queue, passes each to `handle`, and gives it back to the driver. Stops when `turn` is
    /// over, the queue is empty, or `handle` postpones a chain.
    ///
    /// Returns true if the queue may contain more chains for which the driver will not notify the device.
    pub fn serve<'m, E: From<QueueError> + From<ChainError>>(
        &mut self,
        memory: &'m GuestMemory,
        interrupt: &Interrupt,
        turn: Turn,
        mut handle: impl FnMut(Chain<'m>) -> Result<Outcome, E>,
    ) -> Result<bool, E> {
        let mut unannounced = 0;
        let mut pending = true;
        for _ in 0..turn.chains {
            let Some(chain) = self.pop(memory)? else {
                pending = self.rearm(memory)?;
                if pending {
                    continue;
                }
                break;
            };
            let chain = Chain::walk(memory, chain, self.queue.size())?;
            let head = chain.head;
            let Outcome::Used(len) = handle(chain)? else {
                self.queue.go_to_previous_position();
                break;
            };
            self.push(memory, head, len)?;
            unannounced += 1;
            if unannounced == turn.batch {
                self.notify(memory, interrupt)?;
                unannounced = 0;
            }
        }
        if unannounced > 0 {
            self.notify(memory, interrupt)?;
        }
        Ok(pending)
    }

    /// Takes the next available chain. Returns None if there is none. The chain's iterator yields at most as many
    /// descriptors as the queue has entries, even if the driver made a loop.
    pub fn pop<'m>(
        &mut self,
        memory: &'m GuestMemory,
    ) -> Result<Option<DescriptorChain<&'m GuestMemory>>, QueueError> {
        Ok(self.queue.iter(memory)?.next())
    }

    /// Gives the chain that starts at descriptor `head` back to the driver. The device has written `len` bytes to it.
    pub fn push(&mut self, memory: &GuestMemory, head: u16, len: u32) -> Result<(), QueueError> {
        Ok(self.queue.add_used(memory, head, len)?)
    }

    /// Interrupts the driver, unless the driver has suppressed that (virtio 1.3, 2.7.7 and 2.7.10).
    pub fn notify(&mut self, memory: &GuestMemory, interrupt: &Interrupt) -> Result<(), QueueError> {
        if self.queue.needs_notification(memory)? {
            interrupt.used(self.index).map_err(QueueError::Interrupt)?;
        }
        Ok(())
    }

    /// Interrupts the driver after chains were used that [`ActiveQueue::push`] does not know of. `announced` is the
    /// index in the used ring at the last call; before the first call, that at which the device has started.
    pub fn notify_since(
        &mut self,
        memory: &GuestMemory,
        interrupt: &Interrupt,
        announced: &mut u16,
    ) -> Result<(), QueueError> {
        let used = self.queue.next_used();
        let before = mem::replace(announced, used);
        if used == before {
            return Ok(());
        }
        if self.queue.event_idx_enabled() {
            // The used ring is written before the event is read (virtio 1.3, 2.7.10).
            fence(Ordering::SeqCst);
            // `used_event` follows the ring of available chains.
            let size = u64::from(self.queue.size());
            let address = GuestAddress(self.queue.avail_ring() + 4 + 2 * size);
            let event =
                memory.load::<u16>(address, Ordering::Relaxed).map_err(virtio_queue::Error::GuestMemory)?;
            let event = u16::from_le(event);
            if used.wrapping_sub(event).wrapping_sub(1) >= used.wrapping_sub(before) {
                return Ok(());
            }
        }
        interrupt.used(self.index).map_err(QueueError::Interrupt)
    }

    /// Enables notifications by the driver. Returns true if the driver has made more chains available meanwhile, for
    /// which it will not notify the device.
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
        ActiveQueue {
            queue: mock.create_queue().unwrap(),
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            index: 0,
        }
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
    fn chains_that_are_used_together_interrupt_a_driver_that_waits_for_one_of_them() {
        const SIZE: u16 = 16;
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, SIZE);
        let mut queue = active(&mock);
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let interrupt = Interrupt::new(line.try_clone().unwrap());
        let event = GuestAddress(queue.queue.avail_ring() + 4 + 2 * u64::from(SIZE));
        let mut interrupts = |has_event_idx, before, waits_for: u16, used| {
            queue.queue.set_event_idx(has_event_idx);
            memory.write_obj(waits_for.to_le(), event).unwrap();
            queue.queue.set_next_used(used);
            let mut announced = before;
            queue.notify_since(&memory, &interrupt, &mut announced).unwrap();
            assert_eq!(announced, used);
            line.read().is_ok()
        };
        // `used_event` is the index of the chain for which the driver waits.
        for (before, used, waits_for, is_interrupted) in [
            (0, 3, 0, true),
            (0, 3, 2, true),
            (0, 3, 3, false),
            (3, 6, 2, false),
            (3, 3, 3, false),
            (65534, 2, 65535, true),
            (65534, 2, 1, true),
            (65534, 2, 2, false),
        ] {
            assert_eq!(
                interrupts(true, before, waits_for, used),
                is_interrupted,
                "{before} {used} {waits_for}"
            );
        }
        assert!(interrupts(false, 0, 100, 3) && !interrupts(false, 3, 100, 3));
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
