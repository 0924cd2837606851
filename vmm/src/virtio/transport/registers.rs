//! The registers of a device: what the driver has written to them, and which writes are legal. They have the offsets of
//! the MMIO transport (virtio 1.3, 4.2.2). The PCI transport has the same registers at other places.

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend as _};

use crate::GuestMemory;

/// Offsets of the registers (virtio 1.3, 4.2.2).
pub(in crate::virtio) mod reg {
    pub(crate) const MAGIC: u64 = 0x000;
    pub(crate) const VERSION: u64 = 0x004;
    pub(crate) const DEVICE_ID: u64 = 0x008;
    pub(crate) const VENDOR_ID: u64 = 0x00c;
    pub(crate) const DEVICE_FEATURES: u64 = 0x010;
    pub(crate) const DEVICE_FEATURES_SEL: u64 = 0x014;
    pub(crate) const DRIVER_FEATURES: u64 = 0x020;
    pub(crate) const DRIVER_FEATURES_SEL: u64 = 0x024;
    pub(crate) const QUEUE_SEL: u64 = 0x030;
    pub(crate) const QUEUE_SIZE_MAX: u64 = 0x034;
    pub(crate) const QUEUE_SIZE: u64 = 0x038;
    pub(crate) const QUEUE_READY: u64 = 0x044;
    pub(crate) const QUEUE_NOTIFY: u64 = 0x050;
    pub(crate) const INTERRUPT_STATUS: u64 = 0x060;
    pub(crate) const INTERRUPT_ACK: u64 = 0x064;
    pub(crate) const STATUS: u64 = 0x070;
    pub(crate) const QUEUE_DESC_LOW: u64 = 0x080;
    pub(crate) const QUEUE_DESC_HIGH: u64 = 0x084;
    pub(crate) const QUEUE_DRIVER_LOW: u64 = 0x090;
    pub(crate) const QUEUE_DRIVER_HIGH: u64 = 0x094;
    pub(crate) const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    pub(crate) const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    pub(crate) const SHM_LEN_LOW: u64 = 0x0b0;
    pub(crate) const SHM_BASE_HIGH: u64 = 0x0bc;
    pub(crate) const CONFIG_GENERATION: u64 = 0x0fc;
    pub(crate) const CONFIG: u64 = 0x100;
}

/// Device status bits (virtio 1.3, 2.1).
pub(in crate::virtio) mod status {
    pub(crate) const ACKNOWLEDGE: u32 = 1;
    pub(crate) const DRIVER: u32 = 2;
    pub(crate) const DRIVER_OK: u32 = 4;
    pub(crate) const FEATURES_OK: u32 = 8;
    pub(crate) const NEEDS_RESET: u32 = 64;
    pub(crate) const FAILED: u32 = 128;
    pub(super) const ALL: u32 = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED;
}

/// "virt".
const MAGIC_VALUE: u32 = 0x7472_6976;
/// The version of virtio 1.0 and later.
const TRANSPORT_VERSION: u32 = 2;
/// "BLKH". No driver looks at it.
const VENDOR: u32 = 0x484b_4c42;

/// Reads a register that is the same for all devices, and where there is none. None: it is another register.
pub(in crate::virtio) fn read_of_any(offset: u64) -> Option<u32> {
    match offset {
        reg::MAGIC => Some(MAGIC_VALUE),
        reg::VERSION => Some(TRANSPORT_VERSION),
        _ => None,
    }
}

/// Feature bits (virtio 1.3, 6).
pub(in crate::virtio) const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;
pub(in crate::virtio) const VIRTIO_F_VERSION_1: u64 = 1 << 32;

/// The values that the driver has written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Registers {
    status: u32,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    queues: Vec<QueueRegisters>,
}

/// What the driver has written about a queue. It is validated when the driver enables the queue.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QueueRegisters {
    max_size: u16,
    size: u32,
    ready: bool,
    desc: u64,
    driver: u64,
    device: u64,
}

/// What the transport has to do after a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    Nothing,
    /// The driver has written 0 to the status register.
    Reset,
    /// The driver has set DRIVER_OK.
    Activate,
    /// The driver must not do this. The device answers with DEVICE_NEEDS_RESET.
    Illegal,
}

impl Registers {
    /// The registers after a reset, for queues with these maximum sizes.
    pub(super) fn new(queue_sizes: impl IntoIterator<Item = u16>) -> Self {
        Self { queues: queue_sizes.into_iter().map(QueueRegisters::new).collect(), ..Self::default() }
    }

    /// Resets all registers.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.queue_sizes().collect::<Vec<_>>());
    }

    /// The maximum sizes of the queues.
    pub(crate) fn queue_sizes(&self) -> impl Iterator<Item = u16> {
        self.queues.iter().map(|queue| queue.max_size)
    }

    pub(super) fn queues(&self) -> &[QueueRegisters] {
        &self.queues
    }

    /// The feature bits that the driver has accepted.
    pub(super) fn driver_features(&self) -> u64 {
        self.driver_features
    }

    /// Whether the driver has set DRIVER_OK.
    pub(crate) fn is_driver_ok(&self) -> bool {
        self.status & status::DRIVER_OK != 0
    }

    /// Sets DRIVER_OK, after the device was activated.
    pub(super) fn set_driver_ok(&mut self) {
        self.status |= status::DRIVER_OK;
    }

    /// The status bits that the driver has set.
    pub(super) fn status(&self) -> u32 {
        self.status
    }

    /// Reads a register that depends on the transport and the driver only. `features` are those that the device offers.
    pub(super) fn read(&self, offset: u64, features: u64) -> u32 {
        let queue = self.queues.get(self.queue_sel as usize);
        match offset {
            reg::MAGIC | reg::VERSION => read_of_any(offset).unwrap_or_default(),
            reg::VENDOR_ID => VENDOR,
            reg::DEVICE_FEATURES => match self.device_features_sel {
                0 => features as u32,
                1 => (features >> 32) as u32,
                _ => 0,
            },
            // 0 means that the queue does not exist.
            reg::QUEUE_SIZE_MAX => queue.map_or(0, |queue| queue.max_size.into()),
            reg::QUEUE_READY => queue.is_some_and(|queue| queue.ready).into(),
            // The length and base of a shared memory region that does not exist are -1.
            reg::SHM_LEN_LOW..=reg::SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    /// The driver's own value of a register. The MMIO transport does not show it.
    pub(in crate::virtio) fn written(&self, offset: u64) -> u32 {
        let queue = self.queues.get(self.queue_sel as usize).copied().unwrap_or_default();
        match offset {
            reg::DEVICE_FEATURES_SEL => self.device_features_sel,
            reg::DRIVER_FEATURES_SEL => self.driver_features_sel,
            reg::DRIVER_FEATURES => match self.driver_features_sel {
                0 => self.driver_features as u32,
                1 => (self.driver_features >> 32) as u32,
                _ => 0,
            },
            reg::QUEUE_SEL => self.queue_sel,
            reg::QUEUE_SIZE => queue.size,
            reg::QUEUE_DESC_LOW => queue.desc as u32,
            reg::QUEUE_DESC_HIGH => (queue.desc >> 32) as u32,
            reg::QUEUE_DRIVER_LOW => queue.driver as u32,
            reg::QUEUE_DRIVER_HIGH => (queue.driver >> 32) as u32,
            reg::QUEUE_DEVICE_LOW => queue.device as u32,
            reg::QUEUE_DEVICE_HIGH => (queue.device >> 32) as u32,
            _ => 0,
        }
    }

    /// Writes a register. `features` are those that the device offers.
    pub(super) fn write(&mut self, offset: u64, value: u32, features: u64, memory: &GuestMemory) -> Effect {
        match offset {
            reg::DEVICE_FEATURES_SEL => self.device_features_sel = value,
            reg::DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            reg::DRIVER_FEATURES => return self.write_driver_features(value),
            reg::QUEUE_SEL => self.queue_sel = value,
            reg::STATUS => return self.write_status(value, features),
            reg::QUEUE_SIZE | reg::QUEUE_READY | reg::QUEUE_DESC_LOW..=reg::QUEUE_DEVICE_HIGH => {
                return self.write_queue(offset, value, memory);
            }
            _ => {}
        }
        Effect::Nothing
    }

    /// The driver must not change the features after it has set FEATURES_OK (virtio 1.3, 3.1.1).
    fn write_driver_features(&mut self, value: u32) -> Effect {
        if self.status & status::FEATURES_OK != 0 {
            return Effect::Illegal;
        }
        match self.driver_features_sel {
            0 => set_low(&mut self.driver_features, value),
            1 => set_high(&mut self.driver_features, value),
            _ => {}
        }
        Effect::Nothing
    }

    /// The driver configures a queue between FEATURES_OK and DRIVER_OK, and before it enables the queue (virtio 1.3,
    /// 4.2.2.2).
    fn write_queue(&mut self, offset: u64, value: u32, memory: &GuestMemory) -> Effect {
        let configurable = self.status & (status::FEATURES_OK | status::DRIVER_OK) == status::FEATURES_OK;
        let Some(queue) = self.queues.get_mut(self.queue_sel as usize) else { return Effect::Nothing };
        let disables = offset == reg::QUEUE_READY && value == 0;
        if !configurable || (queue.ready && !disables) {
            return Effect::Illegal;
        }
        match offset {
            reg::QUEUE_SIZE => queue.size = value,
            reg::QUEUE_DESC_LOW => set_low(&mut queue.desc, value),
            reg::QUEUE_DESC_HIGH => set_high(&mut queue.desc, value),
            reg::QUEUE_DRIVER_LOW => set_low(&mut queue.driver, value),
            reg::QUEUE_DRIVER_HIGH => set_high(&mut queue.driver, value),
            reg::QUEUE_DEVICE_LOW => set_low(&mut queue.device, value),
            reg::QUEUE_DEVICE_HIGH => set_high(&mut queue.device, value),
            reg::QUEUE_READY if disables => queue.ready = false,
            reg::QUEUE_READY if value == 1 && queue.validate(memory).is_some() => queue.ready = true,
            reg::QUEUE_READY => return Effect::Illegal,
            _ => {}
        }
        Effect::Nothing
    }

    /// The driver sets status bits in the order of virtio 1.3, 3.1.1, and does not clear any. 0 resets the device.
    fn write_status(&mut self, value: u32, features: u64) -> Effect {
        if value == 0 {
            return Effect::Reset;
        }
        let value = value & status::ALL;
        if self.status & !value != 0 {
            return Effect::Illegal;
        }
        let added = value & !self.status;
        self.status |= added & (status::ACKNOWLEDGE | status::DRIVER | status::FAILED);
        if added & status::FEATURES_OK != 0 {
            self.settle_features(features);
        }
        if added & status::DRIVER_OK == 0 {
            Effect::Nothing
        } else if self.status & status::FEATURES_OK == 0 {
            Effect::Illegal
        } else {
            Effect::Activate
        }
    }

    /// Leaves FEATURES_OK clear if the driver has accepted a feature that was not offered, or is older than virtio
    /// 1.0. The driver then sees that the bit is clear.
    fn settle_features(&mut self, offered: u64) {
        let known = self.driver_features & !offered == 0;
        let modern = self.driver_features & VIRTIO_F_VERSION_1 != 0;
        if known && modern && self.status & status::DRIVER != 0 {
            self.status |= status::FEATURES_OK;
        }
    }
}

impl QueueRegisters {
    /// A driver need not write the size: it is the largest one until then (virtio 1.3, 4.1.5.1.3).
    fn new(max_size: u16) -> Self {
        Self { max_size, size: max_size.into(), ..Self::default() }
    }

    /// The queue for the device. A queue that the driver has not enabled is not `ready()`.
    pub(super) fn queue(&self, memory: &GuestMemory) -> Result<Queue, virtio_queue::Error> {
        // Guest memory never shrinks, so a queue that was valid when the driver enabled it is valid still. The saved
        // state of a VM may name an invalid one.
        let ready = if self.ready { self.validate(memory) } else { None };
        ready.map_or_else(|| Queue::new(self.max_size), Ok)
    }

    /// Returns the queue if its size is legal, and its rings are aligned as in virtio 1.3, 2.7, and are in guest
    /// memory.
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

fn set_low(address: &mut u64, value: u32) {
    *address = (*address & !0xffff_ffff) | u64::from(value);
}

fn set_high(address: &mut u64, value: u32) {
    *address = (*address & 0xffff_ffff) | (u64::from(value) << 32);
}
