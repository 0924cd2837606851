//! Descriptor chains (virtio 1.3, 2.7.5). Each descriptor is read once and then checked.

use std::{collections::VecDeque, ops::Deref};

use virtio_queue::DescriptorChain;
use vm_memory::{GuestMemoryBackend as _, GuestMemoryError, VolatileSlice};

use crate::GuestMemory;

/// Why a chain is illegal. The device answers with [`super::Interrupt::needs_reset`].
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// It refers to a descriptor that does not exist, contains a loop, or has an invalid indirect table.
    #[error("the chain that starts at descriptor {head} has no end")]
    Endless { head: u16 },
    /// A chain must not be longer than the queue size (virtio 1.3, 2.7.5.3.1).
    #[error("the chain that starts at descriptor {head} is longer than its queue of {size}")]
    TooLong { head: u16, size: u16 },
    /// Device-readable descriptors must precede device-writable ones (virtio 1.3, 2.7.4.2).
    #[error("the chain that starts at descriptor {head} has a readable descriptor after a writable one")]
    Order { head: u16 },
    /// A buffer is not in guest memory.
    #[error("the chain that starts at descriptor {head} has a buffer outside guest memory")]
    Memory {
        head: u16,
        #[source]
        source: GuestMemoryError,
    },
}

/// A chain. All of its descriptors have been checked.
pub struct Chain<'m> {
    /// The index of its first descriptor, by which it is given back to the driver.
    pub head: u16,
    /// The device-readable part.
    pub readable: Buffers<'m>,
    /// The device-writable part.
    pub writable: Buffers<'m>,
}

impl<'m> Chain<'m> {
    /// Reads and checks the descriptors of `chain`, which was taken from a queue of this size.
    pub fn walk(
        memory: &'m GuestMemory,
        chain: DescriptorChain<impl Deref<Target = GuestMemory>>,
        size: u16,
    ) -> Result<Self, ChainError> {
        let head = chain.head_index();
        let mut walked = Self { head, readable: Buffers::default(), writable: Buffers::default() };
        let mut ended = false;
        for (count, descriptor) in chain.enumerate() {
            if count >= usize::from(size) {
                return Err(ChainError::TooLong { head, size });
            }
            let buffers = if descriptor.is_write_only() {
                &mut walked.writable
            } else if walked.writable.slices.is_empty() {
                &mut walked.readable
            } else {
                return Err(ChainError::Order { head });
            };
            for slice in memory.get_slices(descriptor.addr(), descriptor.len() as usize) {
                buffers.push(slice.map_err(|source| ChainError::Memory { head, source })?);
            }
            ended = !descriptor.has_next();
        }
        // The iterator ends without an error at a descriptor that it cannot read. Then the last descriptor has the
        // NEXT flag.
        if ended { Ok(walked) } else { Err(ChainError::Endless { head }) }
    }
}

/// A sequence of ranges of guest memory, which is consumed from its front. The guest may change the bytes at any time.
#[derive(Default, Clone)]
pub struct Buffers<'m> {
    slices: VecDeque<VolatileSlice<'m>>,
    len: usize,
}

impl<'m> Buffers<'m> {
    fn push(&mut self, slice: VolatileSlice<'m>) {
        self.len += slice.len();
        self.slices.push_back(slice);
    }

    /// The number of bytes that are left.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no bytes are left.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ranges that are left.
    pub fn slices(&self) -> impl ExactSizeIterator<Item = &VolatileSlice<'m>> {
        #[cfg(feature = "fuzz")]
        crate::memory::fuzz_hook::call(None);
        self.slices.iter()
    }

    /// Takes up to `count` bytes from the front.
    pub fn split_front(&mut self, count: usize) -> Buffers<'m> {
        let mut front = Buffers::default();
        while front.len < count {
            let Some(slice) = self.slices.pop_front() else { break };
            self.len -= slice.len();
            match slice.split_at(count - front.len) {
                Ok((taken, rest)) => {
                    front.push(taken);
                    if !rest.is_empty() {
                        self.len += rest.len();
                        self.slices.push_front(rest);
                    }
                }
                // The whole range is needed.
                Err(_) => front.push(slice),
            }
        }
        front
    }

    /// Takes `N` bytes from the front and copies them, so that the guest cannot change them any more. Returns None if
    /// there are fewer.
    pub fn read_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        (self.len >= N).then(|| self.split_front(N))?.copy_to(&mut bytes);
        Some(bytes)
    }

    /// Copies the first `N` bytes, which stay. Returns None if there are fewer.
    pub fn peek_array<const N: usize>(&self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        (self.len >= N).then(|| self.copy_to(&mut bytes))?;
        Some(bytes)
    }

    /// Copies all bytes, so that the guest cannot change them any more.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&mut bytes);
        bytes
    }

    fn copy_to(&self, mut bytes: &mut [u8]) {
        for slice in self.slices() {
            let copied = slice.copy_to(bytes);
            bytes = bytes.split_at_mut(copied).1;
        }
    }

    /// Writes as many of `bytes` as fit to the front, takes these from it, and returns their number.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let front = self.split_front(bytes.len());
        let mut rest = bytes;
        for slice in front.slices() {
            let count = slice.len().min(rest.len());
            let (now, later) = rest.split_at(count);
            slice.copy_from(now);
            rest = later;
        }
        front.len
    }
}

#[cfg(test)]
mod tests {
    use virtio_queue::{
        Queue, QueueOwnedT,
        desc::{RawDescriptor, split::Descriptor},
        mock::MockSplitQueue,
    };
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::memory;

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;

    fn memory() -> GuestMemory {
        // Two adjacent regions, so that a buffer can be in both.
        memory::lay_out(&[(0, 0x8000), (0x8000, 0x8000)], 0).unwrap()
    }

    fn walk<'m>(
        memory: &'m GuestMemory,
        descriptors: &[(u64, u32, u16, u16)],
    ) -> Result<Chain<'m>, ChainError> {
        let mock = MockSplitQueue::new(memory, 16);
        for (index, (addr, len, flags, next)) in descriptors.iter().enumerate() {
            let descriptor = RawDescriptor::from(Descriptor::new(*addr, *len, *flags, *next));
            mock.desc_table().store(index as u16, descriptor).unwrap();
        }
        mock.avail().idx().store(1);
        let mut queue: Queue = mock.create_queue().unwrap();
        let chain = queue.iter(memory).unwrap().next().unwrap();
        Chain::walk(memory, chain, 16)
    }

    #[test]
    fn buffers_are_read_and_written_across_pieces_and_regions() {
        let memory = memory();
        memory.write_slice(b"abcdef", GuestAddress(0x7ffd)).unwrap();
        let chain = [(0x7ffd, 6, NEXT, 1), (0x1000, 3, NEXT | WRITE, 2), (0x2000, 5, WRITE, 0)];
        let mut chain = walk(&memory, &chain).unwrap();

        assert_eq!((chain.readable.len(), chain.writable.len()), (6, 8));
        assert_eq!(chain.readable.peek_array(), Some(*b"abcd"));
        assert_eq!(chain.readable.peek_array::<7>(), None);
        assert_eq!(chain.readable.read_array(), Some(*b"ab"));
        assert_eq!(chain.readable.read_array(), Some(*b"cde"));
        assert_eq!(chain.readable.read_array::<2>(), None);
        assert_eq!(chain.writable.write(b"123456"), 6);
        assert_eq!(chain.writable.write(b"789"), 2);
        let mut written = [0; 5];
        memory.read_slice(&mut written, GuestAddress(0x2000)).unwrap();
        assert_eq!(&written, b"45678");
    }

    #[test]
    fn a_chain_that_loops_ends_in_an_error() {
        let chain = [(0x1000, 1, NEXT, 1), (0x1000, 1, NEXT, 0)];
        assert!(matches!(walk(&memory(), &chain), Err(ChainError::Endless { head: 0 })));
    }

    #[test]
    fn a_chain_that_leaves_its_table_is_an_error() {
        let chain = [(0x1000, 1, NEXT, 16)];
        assert!(matches!(walk(&memory(), &chain), Err(ChainError::Endless { .. })));
    }

    #[test]
    fn a_buffer_that_is_not_memory_is_an_error() {
        for (addr, len) in [(0x1_0000, 1), (0xffff, 2), (u64::MAX, 16), (0, u32::MAX)] {
            let chain = [(addr, len, 0, 0)];
            assert!(matches!(walk(&memory(), &chain), Err(ChainError::Memory { .. })), "{addr:#x} {len:#x}");
        }
    }

    #[test]
    fn reading_after_writing_is_an_error() {
        let chain = [(0x1000, 1, NEXT | WRITE, 1), (0x1000, 1, 0, 0)];
        assert!(matches!(walk(&memory(), &chain), Err(ChainError::Order { .. })));
    }

    #[test]
    fn an_indirect_table_that_is_none_or_too_long_is_an_error() {
        let memory = memory();
        assert!(matches!(walk(&memory, &[(0x4000, 15, INDIRECT, 0)]), Err(ChainError::Endless { .. })));
        assert!(matches!(walk(&memory, &[(0x40000, 32, INDIRECT, 0)]), Err(ChainError::Endless { .. })));
        for index in 0..17u64 {
            let descriptor = Descriptor::new(0x1000, 1, NEXT, index as u16 + 1);
            memory.write_obj(RawDescriptor::from(descriptor), GuestAddress(0x4000 + 16 * index)).unwrap();
        }
        let chain = walk(&memory, &[(0x4000, 16 * 17, INDIRECT, 0)]);
        assert!(matches!(chain, Err(ChainError::TooLong { size: 16, .. })));
    }
}
