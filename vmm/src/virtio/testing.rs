//! The driver of a device, for the tests of devices.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use virtio_queue::{
    Queue, QueueT,
    desc::{RawDescriptor, split::Descriptor},
};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    Activation, ActiveQueue, INTERRUPT_CONFIG, Interrupt, VirtioDevice, device_threads::DeviceThreads,
};
use crate::{GuestMemory, memory};

use std::os::fd::AsRawFd;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
/// The address of the buffers of tests. The queues are below it.
pub(super) const BUFFERS: u64 = 0x10_0000;
pub(super) const MEMORY: u64 = 0x200_0000;

const PATIENCE: Duration = Duration::from_secs(20);

/// A guest with one device. The test is its driver.
pub(super) struct Driver {
    pub(super) memory: GuestMemory,
    pub(super) queues: Vec<DriverQueue>,
    pub(super) interrupt: Arc<Interrupt>,
    line: EventFd,
    epoll: Epoll,
    worker: DeviceThreads,
}

/// The driver's part of a queue.
pub(super) struct DriverQueue {
    pub(super) size: u16,
    base: u64,
    kick: EventFd,
    next_avail: u16,
    next_used: u16,
}

impl Driver {
    /// Activates `device` with `features`.
    pub(super) fn new(device: &mut dyn VirtioDevice, features: u64) -> Self {
        Self::with_memory(memory::lay_out(&[(0, MEMORY)], 0).unwrap(), device, features)
    }

    /// Does the same with other memory, which must contain the same addresses.
    pub(super) fn with_memory(memory: GuestMemory, device: &mut dyn VirtioDevice, features: u64) -> Self {
        Self::with_queues(memory, device, features, |_| true)
    }

    /// Does the same, and sets only those queues up whose indices are `ready`.
    pub(super) fn with_queues(
        memory: GuestMemory,
        device: &mut dyn VirtioDevice,
        features: u64,
        ready: impl Fn(usize) -> bool,
    ) -> Self {
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let interrupt = Arc::new(Interrupt::new(line.try_clone().unwrap()));
        let mut queues = Vec::new();
        let mut active = Vec::new();
        for (index, size) in device.queue_sizes().iter().enumerate() {
            let kick = EventFd::new(EFD_NONBLOCK).unwrap();
            let base = 0x1_0000 * (index as u64 + 1);
            let mut queue = Queue::new(*size).unwrap();
            queue.set_desc_table_address(Some(base as u32), None);
            queue.set_avail_ring_address(Some(base as u32 + 0x8000), None);
            queue.set_used_ring_address(Some(base as u32 + 0xa000), None);
            queue.set_event_idx(features & 1 << 29 != 0);
            queue.set_ready(ready(index));
            active.push(ActiveQueue { queue, kick: kick.try_clone().unwrap(), index });
            queues.push(DriverQueue { size: *size, base, kick, next_avail: 0, next_used: 0 });
        }
        let activation = Activation {
            memory: memory.clone(),
            queues: active,
            features,
            interrupt: interrupt.clone(),
            log: Arc::default(),
        };
        let mut worker = DeviceThreads::spawn(device.thread_role(), device.threads()).unwrap();
        worker.start(device.activate(activation).unwrap()).unwrap();
        let epoll = Epoll::new().unwrap();
        let event = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, line.as_raw_fd(), event).unwrap();
        Self { memory, queues, interrupt, line, epoll, worker }
    }

    /// Stops the device, as a reset does.
    pub(super) fn reset(&mut self) {
        self.worker.stop().unwrap();
    }

    /// Makes a chain of `(address, len, flags)` available and notifies the device. Uses the descriptors from `first`
    /// on.
    pub(super) fn offer(&mut self, queue: usize, first: u16, buffers: &[(u64, u32, u16)]) {
        for (index, (addr, len, flags)) in buffers.iter().enumerate() {
            let place = first + index as u16;
            let more = if index + 1 < buffers.len() { NEXT } else { 0 };
            self.describe(queue, place, Descriptor::new(*addr, *len, flags | more, place + 1));
        }
        self.publish(queue, first);
    }

    /// Writes a descriptor, legal or not.
    pub(super) fn describe(&mut self, queue: usize, place: u16, descriptor: Descriptor) {
        let addr = GuestAddress(self.queues[queue].base + 16 * u64::from(place));
        self.memory.write_obj(RawDescriptor::from(descriptor), addr).unwrap();
    }

    /// Makes the chain that starts at `head` available and notifies the device.
    pub(super) fn publish(&mut self, queue: usize, head: u16) {
        let queue = &mut self.queues[queue];
        let avail = queue.base + 0x8000;
        let slot = u64::from(queue.next_avail % queue.size);
        self.memory.write_obj(head, GuestAddress(avail + 4 + 2 * slot)).unwrap();
        queue.next_avail = queue.next_avail.wrapping_add(1);
        self.memory.store(queue.next_avail, GuestAddress(avail + 2), Ordering::SeqCst).unwrap();
        queue.kick.write(1).unwrap();
    }

    /// Sets the available index to an illegal value and notifies the device.
    pub(super) fn break_avail_index(&mut self, queue: usize) {
        let queue = &mut self.queues[queue];
        let index = queue.next_avail.wrapping_add(queue.size + 1);
        self.memory.store(index, GuestAddress(queue.base + 0x8002), Ordering::SeqCst).unwrap();
        queue.kick.write(1).unwrap();
    }

    /// Takes the next used chain. Returns its head and the number of bytes that were written to it.
    pub(super) fn used(&mut self, queue: usize) -> Option<(u16, u32)> {
        let queue = &mut self.queues[queue];
        let used = queue.base + 0xa000;
        let index: u16 = self.memory.load(GuestAddress(used + 2), Ordering::SeqCst).unwrap();
        if index == queue.next_used {
            return None;
        }
        let slot = used + 4 + 8 * u64::from(queue.next_used % queue.size);
        let head: u32 = self.memory.read_obj(GuestAddress(slot)).unwrap();
        let len: u32 = self.memory.read_obj(GuestAddress(slot + 4)).unwrap();
        queue.next_used = queue.next_used.wrapping_add(1);
        // `used_event`: request an interrupt at the next used chain (virtio 1.3, 2.7.7.1).
        let event = queue.base + 0x8004 + 2 * u64::from(queue.size);
        self.memory.store(queue.next_used, GuestAddress(event), Ordering::SeqCst).unwrap();
        Some((head as u16, len))
    }

    /// Waits for the next used chain.
    pub(super) fn wait_used(&mut self, queue: usize) -> (u16, u32) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(used) = self.used(queue) {
                return used;
            }
            assert!(Instant::now() < deadline, "the device used nothing in queue {queue}");
            self.wait_interrupt(100);
        }
    }

    /// Waits at most `millis` for an interrupt.
    pub(super) fn wait_interrupt(&mut self, millis: i32) {
        let mut events = [EpollEvent::default()];
        if self.epoll.wait(millis, &mut events).unwrap() > 0 {
            let _ = self.line.read();
        }
    }

    /// Waits for a configuration change notification.
    pub(super) fn wait_config_changed(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.interrupt.status() & INTERRUPT_CONFIG == 0 {
            assert!(Instant::now() < deadline, "the device does not tell of its configuration");
            self.wait_interrupt(100);
        }
    }

    /// Waits for DEVICE_NEEDS_RESET.
    pub(super) fn wait_needs_reset(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.interrupt.is_reset_needed() {
            assert!(Instant::now() < deadline, "the device does not ask for a reset");
            self.wait_interrupt(100);
        }
    }

    pub(super) fn write(&self, addr: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(addr)).unwrap();
    }

    pub(super) fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(addr)).unwrap();
        bytes
    }
}
