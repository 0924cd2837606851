//! The MMIO transport (virtio 1.3, 4.2): a device's registers, and the driver's way through its
//! initialization.

use std::{
    io,
    sync::{Arc, Mutex, atomic::Ordering},
};

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemory as _};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Activation, ActiveQueue, Interrupt, InterruptState, VirtioDevice, worker::Worker};
use crate::{GuestMemory, bus::BusDevice, guest_log::GuestLog, jail::ThreadError, lock};

/// Registers (virtio 1.3, 4.2.2).
mod reg {
    pub(super) const MAGIC: u64 = 0x000;
    pub(super) const VERSION: u64 = 0x004;
    pub(super) const DEVICE_ID: u64 = 0x008;
    pub(super) const VENDOR_ID: u64 = 0x00c;
    pub(super) const DEVICE_FEATURES: u64 = 0x010;
    pub(super) const DEVICE_FEATURES_SEL: u64 = 0x014;
    pub(super) const DRIVER_FEATURES: u64 = 0x020;
    pub(super) const DRIVER_FEATURES_SEL: u64 = 0x024;
    pub(super) const QUEUE_SEL: u64 = 0x030;
    pub(super) const QUEUE_SIZE_MAX: u64 = 0x034;
    pub(super) const QUEUE_SIZE: u64 = 0x038;
    pub(super) const QUEUE_READY: u64 = 0x044;
    pub(super) const QUEUE_NOTIFY: u64 = 0x050;
    pub(super) const INTERRUPT_STATUS: u64 = 0x060;
    pub(super) const INTERRUPT_ACK: u64 = 0x064;
    pub(super) const STATUS: u64 = 0x070;
    pub(super) const QUEUE_DESC_LOW: u64 = 0x080;
    pub(super) const QUEUE_DESC_HIGH: u64 = 0x084;
    pub(super) const QUEUE_DRIVER_LOW: u64 = 0x090;
    pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x094;
    pub(super) const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    pub(super) const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    pub(super) const SHM_LEN_LOW: u64 = 0x0b0;
    pub(super) const SHM_BASE_HIGH: u64 = 0x0bc;
    pub(super) const CONFIG_GENERATION: u64 = 0x0fc;
    pub(super) const CONFIG: u64 = 0x100;
}

/// Device status bits (virtio 1.3, 2.1).
mod status {
    pub(super) const ACKNOWLEDGE: u32 = 1;
    pub(super) const DRIVER: u32 = 2;
    pub(super) const DRIVER_OK: u32 = 4;
    pub(super) const FEATURES_OK: u32 = 8;
    pub(super) const NEEDS_RESET: u32 = 64;
    pub(super) const FAILED: u32 = 128;
    pub(super) const ALL: u32 = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED;
}

/// "virt".
const MAGIC_VALUE: u32 = 0x7472_6976;
/// The version of virtio 1.0 and later.
const TRANSPORT_VERSION: u32 = 2;
/// No driver asks for it; this one is "BLKH".
const VENDOR: u32 = 0x484b_4c42;
/// Feature bits (virtio 1.3, 6).
const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;
const VIRTIO_F_VERSION_1: u64 = 1 << 32;

/// Offset of the register that a queue's ioeventfd listens to.
pub const NOTIFY_OFFSET: u64 = reg::QUEUE_NOTIFY;

/// Why a device could not be connected to its guest.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    #[error("cannot make a device's events")]
    Events(#[source] io::Error),
    #[error(transparent)]
    Worker(#[from] ThreadError),
}

/// A device and its registers.
pub struct MmioTransport {
    interrupt: Arc<Interrupt>,
    kicks: Vec<EventFd>,
    state: Mutex<State>,
}

struct State {
    /// Dropped before the device that it serves.
    worker: Worker,
    device: Box<dyn VirtioDevice>,
    memory: GuestMemory,
    interrupt: Arc<Interrupt>,
    log: Arc<GuestLog>,
    registers: Registers,
}

/// What the driver has written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Registers {
    status: u32,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    queues: Vec<QueueRegisters>,
}

/// What the driver has said of a queue; believed only when it says that the queue is ready.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueRegisters {
    max_size: u16,
    size: u32,
    ready: bool,
    desc: u64,
    driver: u64,
    device: u64,
}

/// A device's registers, and by that the device: what else it has, its queues have in the guest's memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransportState {
    device_type: u32,
    /// That were offered.
    features: u64,
    interrupt: InterruptState,
    registers: Registers,
}

impl MmioTransport {
    /// Takes `device` to a guest with `memory`; `line` is registered with KVM as an irqfd.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        line: EventFd,
    ) -> Result<Self, TransportError> {
        let interrupt = Arc::new(Interrupt::new(line));
        let queues: Vec<_> = device.queue_sizes().iter().copied().map(QueueRegisters::new).collect();
        let kicks = queues
            .iter()
            .map(|_| EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC))
            .collect::<Result<_, _>>()
            .map_err(TransportError::Events)?;
        let state = State {
            worker: Worker::spawn(device.duty())?,
            device,
            memory,
            interrupt: interrupt.clone(),
            log: Arc::default(),
            registers: Registers { queues, ..Registers::default() },
        };
        Ok(Self { interrupt, kicks, state: Mutex::new(state) })
    }

    /// The events to be registered as ioeventfds at [`NOTIFY_OFFSET`], each for the value that is its index.
    pub fn kicks(&self) -> &[EventFd] {
        &self.kicks
    }

    /// Stops the device, and tells what it was. What it serves besides its queues (connections, open files) is lost.
    pub fn save(&self) -> io::Result<TransportState> {
        let mut state = lock(&self.state);
        state.worker.stop()?;
        Ok(TransportState {
            device_type: state.device.device_type(),
            features: state.features(),
            interrupt: self.interrupt.save(),
            registers: state.registers.clone(),
        })
    }

    /// Makes a new device what one of its kind was, and has it work if that one did. The guest's memory and KVM's interrupt
    /// controllers must be as they were then.
    pub fn restore(&self, saved: &TransportState) -> io::Result<()> {
        let mut state = lock(&self.state);
        let sizes = |queues: &[QueueRegisters]| queues.iter().map(|queue| queue.max_size).collect::<Vec<_>>();
        let is_same = state.device.device_type() == saved.device_type
            && state.features() == saved.features
            && sizes(&state.registers.queues) == sizes(&saved.registers.queues);
        if !is_same {
            return Err(io::Error::other("it is of another type, or has other features or queues"));
        }
        state.registers.clone_from(&saved.registers);
        if state.registers.status & status::DRIVER_OK != 0 {
            state.run(&self.kicks, Position::AsUsed)?;
        }
        self.interrupt.restore(saved.interrupt)
    }

    fn read_register(&self, offset: u64) -> u32 {
        // The interrupt's registers are read at every interrupt: they do without the lock.
        match offset {
            reg::INTERRUPT_STATUS => self.interrupt.status(),
            _ => lock(&self.state).read(offset),
        }
    }

    fn write_register(&self, offset: u64, value: u32) {
        match offset {
            reg::INTERRUPT_ACK => self.interrupt.acknowledge(value),
            // KVM signals the ioeventfd without asking; what arrives here is a queue that is not, or an odd
            // write.
            reg::QUEUE_NOTIFY => {
                if let Some(kick) = self.kicks.get(value as usize) {
                    // Full means that it is signalled already.
                    let _ = kick.write(1);
                }
            }
            _ => lock(&self.state).write(offset, value, &self.kicks),
        }
    }
}

impl BusDevice for MmioTransport {
    /// Registers are read as 32-bit words (virtio 1.3, 4.2.2.2), the configuration space in any size.
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset >= reg::CONFIG {
            data.fill(0);
            lock(&self.state).device.read_config(offset - reg::CONFIG, data);
        } else if let Ok(word) = <&mut [u8; 4]>::try_from(data) {
            *word = self.read_register(offset).to_le_bytes();
        }
    }

    /// No device here looks at what its driver writes to its configuration space.
    fn write(&self, offset: u64, data: &[u8]) {
        if let (true, Ok(word)) = (offset < reg::CONFIG, <[u8; 4]>::try_from(data)) {
            self.write_register(offset, u32::from_le_bytes(word));
        }
    }
}

/// Where in its queues a device begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    /// The driver has just made them.
    Start,
    /// Behind what was used before.
    AsUsed,
}

impl QueueRegisters {
    fn new(max_size: u16) -> Self {
        Self { max_size, ..Self::default() }
    }

    /// The queue that the driver described, if it lies in the guest's memory, aligned as virtio 1.3, 2.7, has
    /// it.
    fn validate(&self, memory: &GuestMemory) -> Option<Queue> {
        let size = u16::try_from(self.size).ok()?;
        let mut queue = Queue::new(self.max_size).ok()?;
        queue.try_set_size(size).ok()?;
        queue.try_set_desc_table_address(GuestAddress(self.desc)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(self.driver)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(self.device)).ok()?;
        let size = usize::from(size);
        let inside = memory.check_range(GuestAddress(self.desc), 16 * size)
            && memory.check_range(GuestAddress(self.driver), 6 + 2 * size)
            && memory.check_range(GuestAddress(self.device), 6 + 8 * size);
        queue.set_ready(true);
        inside.then_some(queue)
    }
}

impl State {
    fn features(&self) -> u64 {
        self.device.features() | VIRTIO_F_VERSION_1
    }

    fn read(&self, offset: u64) -> u32 {
        let queue = self.registers.queues.get(self.registers.queue_sel as usize);
        match offset {
            reg::MAGIC => MAGIC_VALUE,
            reg::VERSION => TRANSPORT_VERSION,
            reg::DEVICE_ID => self.device.device_type(),
            reg::VENDOR_ID => VENDOR,
            reg::DEVICE_FEATURES => match self.registers.device_features_sel {
                0 => self.features() as u32,
                1 => (self.features() >> 32) as u32,
                _ => 0,
            },
            // 0: there is no such queue.
            reg::QUEUE_SIZE_MAX => queue.map_or(0, |queue| queue.max_size.into()),
            reg::QUEUE_READY => queue.is_some_and(|queue| queue.ready).into(),
            reg::STATUS => self.status(),
            // Length and base of a shared memory region that is not there: -1.
            reg::SHM_LEN_LOW..=reg::SHM_BASE_HIGH => u32::MAX,
            reg::CONFIG_GENERATION => self.device.config_generation(),
            _ => 0,
        }
    }

    fn status(&self) -> u32 {
        if self.interrupt.is_reset_needed() {
            self.registers.status | status::NEEDS_RESET
        } else {
            self.registers.status
        }
    }

    fn write(&mut self, offset: u64, value: u32, kicks: &[EventFd]) {
        match offset {
            reg::DEVICE_FEATURES_SEL => self.registers.device_features_sel = value,
            reg::DRIVER_FEATURES_SEL => self.registers.driver_features_sel = value,
            reg::DRIVER_FEATURES => self.write_driver_features(value),
            reg::QUEUE_SEL => self.registers.queue_sel = value,
            reg::STATUS => self.write_status(value, kicks),
            reg::QUEUE_SIZE | reg::QUEUE_READY | reg::QUEUE_DESC_LOW..=reg::QUEUE_DEVICE_HIGH => {
                self.write_queue(offset, value);
            }
            _ => {}
        }
    }

    /// Features are settled once FEATURES_OK is set (virtio 1.3, 3.1.1).
    fn write_driver_features(&mut self, value: u32) {
        if self.registers.status & status::FEATURES_OK != 0 {
            return self.driver_broke_the_rules();
        }
        let value = u64::from(value);
        match self.registers.driver_features_sel {
            0 => self.registers.driver_features = (self.registers.driver_features & !0xffff_ffff) | value,
            1 => {
                self.registers.driver_features =
                    (self.registers.driver_features & 0xffff_ffff) | (value << 32)
            }
            _ => {}
        }
    }

    /// A queue is described between FEATURES_OK and DRIVER_OK, and not after it was said to be ready (virtio
    /// 1.3, 4.2.2.2).
    fn write_queue(&mut self, offset: u64, value: u32) {
        let configurable =
            self.registers.status & (status::FEATURES_OK | status::DRIVER_OK) == status::FEATURES_OK;
        let Some(queue) = self.registers.queues.get_mut(self.registers.queue_sel as usize) else { return };
        let unready = offset == reg::QUEUE_READY && value == 0;
        if !configurable || (queue.ready && !unready) {
            return self.driver_broke_the_rules();
        }
        match offset {
            reg::QUEUE_SIZE => queue.size = value,
            reg::QUEUE_DESC_LOW => set_low(&mut queue.desc, value),
            reg::QUEUE_DESC_HIGH => set_high(&mut queue.desc, value),
            reg::QUEUE_DRIVER_LOW => set_low(&mut queue.driver, value),
            reg::QUEUE_DRIVER_HIGH => set_high(&mut queue.driver, value),
            reg::QUEUE_DEVICE_LOW => set_low(&mut queue.device, value),
            reg::QUEUE_DEVICE_HIGH => set_high(&mut queue.device, value),
            reg::QUEUE_READY if unready => queue.ready = false,
            reg::QUEUE_READY if value == 1 && queue.validate(&self.memory).is_some() => queue.ready = true,
            reg::QUEUE_READY => self.driver_broke_the_rules(),
            _ => {}
        }
    }

    /// Bits are only ever added, in the order of virtio 1.3, 3.1.1; 0 resets the device.
    fn write_status(&mut self, value: u32, kicks: &[EventFd]) {
        if value == 0 {
            return self.reset();
        }
        let value = value & status::ALL;
        if self.registers.status & !value != 0 {
            return self.driver_broke_the_rules();
        }
        let added = value & !self.registers.status;
        self.registers.status |= added & (status::ACKNOWLEDGE | status::DRIVER | status::FAILED);
        if added & status::FEATURES_OK != 0 {
            self.settle_features();
        }
        if added & status::DRIVER_OK != 0 {
            self.start(kicks);
        }
    }

    /// FEATURES_OK stays clear, for the driver to see, if it asked for what was not offered, or is of before
    /// virtio 1.0.
    fn settle_features(&mut self) {
        let known = self.registers.driver_features & !self.features() == 0;
        let modern = self.registers.driver_features & VIRTIO_F_VERSION_1 != 0;
        if known && modern && self.registers.status & status::DRIVER != 0 {
            self.registers.status |= status::FEATURES_OK;
        }
    }

    fn start(&mut self, kicks: &[EventFd]) {
        if self.registers.status & status::FEATURES_OK == 0 {
            return self.driver_broke_the_rules();
        }
        let started = self.run(kicks, Position::Start);
        self.registers.status |= status::DRIVER_OK;
        if started.is_err() {
            // The line is an eventfd of this process: it cannot fail in a way that anything could be done
            // about.
            let _ = self.interrupt.needs_reset();
        }
    }

    /// Has the device work on its queues.
    fn run(&mut self, kicks: &[EventFd], from: Position) -> io::Result<()> {
        let activation = self.activation(kicks, from)?;
        let job = self.device.activate(activation)?;
        self.worker.start(job)
    }

    fn activation(&self, kicks: &[EventFd], from: Position) -> io::Result<Activation> {
        let mut queues = Vec::with_capacity(self.registers.queues.len());
        for (registers, kick) in self.registers.queues.iter().zip(kicks) {
            // Validated when it became ready; the guest's memory has not changed since.
            let ready = if registers.ready { registers.validate(&self.memory) } else { None };
            let mut queue = match ready {
                Some(queue) => queue,
                None => Queue::new(registers.max_size).map_err(io::Error::other)?,
            };
            queue.set_event_idx(self.registers.driver_features & VIRTIO_F_EVENT_IDX != 0);
            if from == Position::AsUsed && queue.ready() {
                // Devices use chains in the order in which they are made available, so those that one had taken and not
                // used when it was stopped are the next ones again.
                let used = queue.used_idx(&self.memory, Ordering::Acquire).map_err(io::Error::other)?.0;
                queue.set_next_avail(used);
                queue.set_next_used(used);
            }
            queues.push(ActiveQueue { queue, kick: kick.try_clone()? });
        }
        Ok(Activation {
            memory: self.memory.clone(),
            queues,
            features: self.registers.driver_features,
            interrupt: self.interrupt.clone(),
            log: self.log.clone(),
        })
    }

    fn reset(&mut self) {
        // One that does not stop cannot be started again, which its next driver is told then.
        let _ = self.worker.stop();
        self.interrupt.clear();
        let queues = self.registers.queues.iter().map(|queue| QueueRegisters::new(queue.max_size)).collect();
        self.registers = Registers { queues, ..Registers::default() };
    }

    /// DEVICE_NEEDS_RESET; the driver is interrupted only if it has said that it is ready for it (virtio 1.3,
    /// 2.1.2).
    fn driver_broke_the_rules(&self) {
        if self.registers.status & status::DRIVER_OK == 0 {
            self.interrupt.mark_broken();
        } else {
            // As in `start`.
            let _ = self.interrupt.needs_reset();
        }
    }
}

fn set_low(address: &mut u64, value: u32) {
    *address = (*address & !0xffff_ffff) | u64::from(value);
}

fn set_high(address: &mut u64, value: u32) {
    *address = (*address & 0xffff_ffff) | (u64::from(value) << 32);
}

#[cfg(test)]
#[path = "mmio_tests.rs"]
mod tests;
