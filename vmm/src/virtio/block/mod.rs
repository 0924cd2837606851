//! Block device on a block device or a file of the host (virtio 1.3, section 5.2).
//!
//! The data takes a single system call between the host's page cache and guest memory. What the guest has flushed is
//! durable. One [thread](BlockThread) serves all block devices of a VM. So a disk that does not respond delays the
//! other disks, but nothing else.

use std::{fs::File, io, sync::Arc};

use virtio_bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
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
    requests::ActiveDisk,
};
use super::{
    Activation, VirtioDevice, config_space::read_config, device_threads::Job, shared_thread::SharedThread,
};
use crate::jail::ThreadRole;

#[allow(unsafe_code)]
mod disk;
mod limits;
mod requests;
#[cfg(test)]
mod tests;

const QUEUE_SIZES: [u16; 1] = [256];

const FEATURES: [u32; 7] = [
    VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_BLK_SIZE,
    VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_RING_F_INDIRECT_DESC,
    VIRTIO_RING_F_EVENT_IDX,
];

/// The thread of all block devices of a VM.
pub type BlockThread = SharedThread<ActiveDisk>;

/// The device.
pub struct Block {
    disk: Arc<Disk>,
    serial: [u8; VIRTIO_BLK_ID_BYTES as usize],
    config: Vec<u8>,
    thread: BlockThread,
    /// Its own in the thread.
    id: u32,
}

impl Block {
    /// Makes a device on `disk` that `thread` serves. The guest finds it by `serial`.
    pub fn new(disk: Disk, serial: &str, thread: &BlockThread) -> Result<Self, DiskError> {
        let mut padded = [0; VIRTIO_BLK_ID_BYTES as usize];
        padded.get_mut(..serial.len()).ok_or(DiskError::Serial)?.copy_from_slice(serial.as_bytes());
        let config = config(&disk);
        Ok(Self {
            disk: Arc::new(disk),
            serial: padded,
            config,
            thread: thread.clone(),
            id: thread.register(),
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
        thread: &BlockThread,
    ) -> Result<Self, DiskError> {
        Self::new(Disk::new(file, read_only, discards)?, serial, thread)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // A thread that does not stop keeps the disk.
        let _ = self.thread.deactivate(self.id);
    }
}

/// The device configuration (virtio 1.3, 5.2.4). Fields of features that are not offered are zeros.
fn config(disk: &Disk) -> Vec<u8> {
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
    let (writeback, unused, num_queues) = (0, 0, [0; 2]);
    config.extend([writeback, unused]);
    config.extend(num_queues);
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

    /// All devices have one together.
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
        ];
        let some = some.iter().filter(|(_, offered)| *offered).map(|(bit, _)| bit);
        FEATURES.iter().chain(some).fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, queues, features, interrupt, log } = activation;
        let queue = queues.into_iter().next().filter(|queue| queue.queue.ready());
        let queue =
            queue.ok_or_else(|| io::Error::other("the driver did not set up the queue of virtio-blk"))?;
        let disk = ActiveDisk {
            memory,
            disk: self.disk.clone(),
            serial: self.serial,
            queue,
            interrupt,
            log,
            flushes: features & 1 << VIRTIO_BLK_F_FLUSH != 0,
        };
        self.thread.activate(self.id, disk)?;
        Ok(Vec::new())
    }

    fn deactivate(&mut self) -> io::Result<()> {
        self.thread.deactivate(self.id)
    }
}
