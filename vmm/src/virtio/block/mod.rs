//! Block device on a block device or a file of the host (virtio 1.3, section 5.2).
//!
//! The data takes a single system call between the host's page cache and guest memory. What the guest has flushed is
//! durable, by whatever queue: a flush is one of the whole file. A device has as many queues as there are
//! [threads](BlockThreads), which serve all block devices of a VM. So a request that does not end delays those of the
//! same queue, and those of the queues of other disks with the same number, but nothing else.

use std::{fs::File, io, sync::Arc};

use virtio_bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
        VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
        VIRTIO_BLK_ID_BYTES,
    },
    virtio_ids::VIRTIO_ID_BLOCK,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::QueueT;

pub use self::disk::{Disk, DiskError};
use self::{
    disk::Geometry,
    limits::{MAX_DISCARD, MAX_WRITE_ZEROES, SECTOR, SEG_MAX, SIZE_MAX},
    requests::ActiveQueueOfDisk,
};
use super::{
    Activation, ActiveQueue, VirtioDevice, config_space::read_config, device_threads::Job,
    queue_threads::QueueThreads,
};
use crate::jail::ThreadRole;

#[allow(unsafe_code)]
mod disk;
mod limits;
mod requests;
#[cfg(test)]
mod tests;

/// Of each queue.
const QUEUE_SIZE: u16 = 256;

const FEATURES: [u32; 7] = [
    VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_BLK_SIZE,
    VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_RING_F_INDIRECT_DESC,
    VIRTIO_RING_F_EVENT_IDX,
];

/// The threads of all block devices of a VM.
pub type BlockThreads = QueueThreads<ActiveQueueOfDisk>;

/// The device.
pub struct Block {
    disk: Arc<Disk>,
    serial: [u8; VIRTIO_BLK_ID_BYTES as usize],
    config: Vec<u8>,
    queue_sizes: Vec<u16>,
    threads: BlockThreads,
    /// Its own in the threads.
    id: u32,
}

impl Block {
    /// Makes a device on `disk` with a queue for each of `threads`. The guest finds it by `serial`.
    pub fn new(disk: Disk, serial: &str, threads: &BlockThreads) -> Result<Self, DiskError> {
        let mut padded = [0; VIRTIO_BLK_ID_BYTES as usize];
        padded.get_mut(..serial.len()).ok_or(DiskError::Serial)?.copy_from_slice(serial.as_bytes());
        let queue_sizes = vec![QUEUE_SIZE; threads.count()];
        Ok(Self {
            config: config(&disk, queue_sizes.len()),
            disk: Arc::new(disk),
            serial: padded,
            queue_sizes,
            threads: threads.clone(),
            id: threads.register(),
        })
    }

    /// What it is on. It may be closed while the driver still uses the device.
    pub fn disk(&self) -> Arc<Disk> {
        self.disk.clone()
    }

    /// Does the same with a file that came from elsewhere. See [`Disk::new`].
    pub fn open(
        file: File,
        serial: &str,
        read_only: bool,
        discards: bool,
        threads: &BlockThreads,
    ) -> Result<Self, DiskError> {
        Self::new(Disk::new(file, read_only, discards)?, serial, threads)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // A thread that does not stop keeps the disk.
        let _ = self.threads.deactivate(self.id);
    }
}

/// The device configuration (virtio 1.3, 5.2.4). Fields of features that are not offered are zeros.
fn config(disk: &Disk, queues: usize) -> Vec<u8> {
    let Geometry { block, physical, least, best } = disk.geometry;
    let blocks = |bytes: u32| bytes / block;
    let mut config = Vec::with_capacity(60);
    config.extend(disk.capacity.to_le_bytes());
    config.extend(SIZE_MAX.to_le_bytes());
    config.extend(SEG_MAX.to_le_bytes());
    let geometry = [0; 4];
    config.extend(geometry);
    config.extend(block.to_le_bytes());
    let (physical_block_exp, alignment_offset) = (blocks(physical).max(1).ilog2() as u8, 0);
    config.extend([physical_block_exp, alignment_offset]);
    config.extend(u16::try_from(blocks(least)).unwrap_or(0).to_le_bytes());
    config.extend(blocks(best).to_le_bytes());
    let (writeback, unused) = (0, 0);
    config.extend([writeback, unused]);
    let num_queues = if queues > 1 { u16::try_from(queues).unwrap_or(u16::MAX) } else { 0 };
    config.extend(num_queues.to_le_bytes());
    let alignment = block / SECTOR as u32;
    // The most sectors and segments, and the alignment.
    config.extend(
        if disk.discards { [MAX_DISCARD, 1, alignment] } else { [0; 3] }.map(u32::to_le_bytes).concat(),
    );
    config.extend(if disk.read_only { [0; 2] } else { [MAX_WRITE_ZEROES, 1] }.map(u32::to_le_bytes).concat());
    let (write_zeroes_may_unmap, unused) = (u8::from(!disk.read_only), [0; 3]);
    config.push(write_zeroes_may_unmap);
    config.extend(unused);
    config
}

impl VirtioDevice for Block {
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Block
    }

    /// All devices have theirs together.
    fn threads(&self) -> usize {
        0
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let some = [
            (VIRTIO_BLK_F_RO, self.disk.read_only),
            (VIRTIO_BLK_F_DISCARD, self.disk.discards),
            (VIRTIO_BLK_F_WRITE_ZEROES, !self.disk.read_only),
            (VIRTIO_BLK_F_MQ, self.queue_sizes.len() > 1),
        ];
        let some = some.iter().filter(|(_, offered)| *offered).map(|(bit, _)| bit);
        FEATURES.iter().chain(some).fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, queues, features, interrupt, log } = activation;
        // A driver need not use all queues, and without VIRTIO_BLK_F_MQ there is one (virtio 1.3, 5.2.2).
        let used = if features & 1 << VIRTIO_BLK_F_MQ == 0 { 1 } else { self.queue_sizes.len() };
        let part = |queue: ActiveQueue| {
            queue.queue.ready().then(|| ActiveQueueOfDisk {
                memory: memory.clone(),
                disk: self.disk.clone(),
                serial: self.serial,
                queue,
                interrupt: interrupt.clone(),
                log: log.clone(),
                flushes: features & 1 << VIRTIO_BLK_F_FLUSH != 0,
            })
        };
        let parts: Vec<_> = queues.into_iter().take(used).map(part).collect();
        if !parts.first().is_some_and(Option::is_some) {
            return Err(io::Error::other("the driver did not set up the first queue of virtio-blk"));
        }
        self.threads.activate(self.id, parts)?;
        Ok(Vec::new())
    }

    fn deactivate(&mut self) -> io::Result<()> {
        self.threads.deactivate(self.id)
    }
}
