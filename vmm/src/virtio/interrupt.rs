//! The interrupt of a virtio device, and the DEVICE_NEEDS_RESET status bit.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use super::msix::{Messages, Source};

/// Bit 0 of InterruptStatus: the device has used buffers (virtio 1.3, 4.2.2).
pub const INTERRUPT_USED: u32 = 1;
/// Bit 1 of InterruptStatus: the configuration or the status of the device has changed.
pub const INTERRUPT_CONFIG: u32 = 2;

/// The interrupt of a device. The transport and the device's thread share it.
pub struct Interrupt {
    wiring: Wiring,
    status: AtomicU32,
    needs_reset: AtomicBool,
}

/// How an interrupt reaches the guest.
enum Wiring {
    /// By one line for everything. The status says what has happened.
    Line(EventFd),
    /// By messages of PCI, one for each queue. The status is for a driver that has not enabled messages, and polls. It
    /// says of changes of the configuration in any case.
    Messages(Arc<Messages>),
}

/// The interrupts that the driver has not acknowledged yet, or whose acknowledgement KVM has handled by itself (see
/// [`super::mmio::MmioTransport`]), and DEVICE_NEEDS_RESET.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InterruptState {
    status: u32,
    needs_reset: bool,
}

impl Interrupt {
    /// `line` is registered with KVM as an irqfd.
    pub fn new(line: EventFd) -> Self {
        Self::wired(Wiring::Line(line))
    }

    /// The irqfd. None: it has several, for messages.
    pub(crate) fn line(&self) -> Option<&EventFd> {
        match &self.wiring {
            Wiring::Line(line) => Some(line),
            Wiring::Messages(_) => None,
        }
    }

    /// The interrupt of a PCI function.
    pub(super) fn by_messages(messages: Arc<Messages>) -> Self {
        Self::wired(Wiring::Messages(messages))
    }

    fn wired(wiring: Wiring) -> Self {
        Self { wiring, status: AtomicU32::new(0), needs_reset: AtomicBool::new(false) }
    }

    /// Notifies the driver that the device has used buffers of the queue with this index.
    pub fn used(&self, queue: usize) -> io::Result<()> {
        self.raise(INTERRUPT_USED, Source::Queue(queue))
    }

    /// Notifies the driver that the device's configuration has changed.
    pub fn config_changed(&self) -> io::Result<()> {
        self.raise(INTERRUPT_CONFIG, Source::Config)
    }

    /// Sets DEVICE_NEEDS_RESET and sends a configuration change notification (virtio 1.3, 2.1.2).
    pub fn needs_reset(&self) -> io::Result<()> {
        self.set_needs_reset();
        self.config_changed()
    }

    /// Sets DEVICE_NEEDS_RESET without a notification, for a driver that has not set DRIVER_OK yet.
    pub(super) fn set_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
    }

    /// Whether DEVICE_NEEDS_RESET is set.
    pub fn is_reset_needed(&self) -> bool {
        self.needs_reset.load(Ordering::SeqCst)
    }

    /// The value of the InterruptStatus register.
    pub fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }

    /// A read of the ISR status (virtio 1.3, 4.1.4.5), which clears it.
    pub(super) fn take_status(&self) -> u32 {
        self.status.swap(0, Ordering::SeqCst)
    }

    /// A write to the InterruptACK register.
    pub fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::SeqCst);
    }

    /// Clears everything when the driver resets the device.
    pub fn clear(&self) {
        self.status.store(0, Ordering::SeqCst);
        self.needs_reset.store(false, Ordering::SeqCst);
        if let Wiring::Messages(messages) = &self.wiring {
            messages.reset();
        }
    }

    /// The state for [`Interrupt::restore`].
    pub(crate) fn save(&self) -> InterruptState {
        InterruptState { status: self.status(), needs_reset: self.is_reset_needed() }
    }

    /// Restores a saved state. If a bit of the status is set, the driver is interrupted once more: the saved state does
    /// not say whether the last interrupt was delivered, and one interrupt too many does no harm. With messages, each
    /// that was sent is sent once more.
    pub(crate) fn restore(&self, saved: InterruptState) -> io::Result<()> {
        let InterruptState { status, needs_reset } = saved;
        // The device is active already, and may have raised an interrupt.
        self.status.fetch_or(status, Ordering::SeqCst);
        self.needs_reset.store(needs_reset, Ordering::SeqCst);
        match &self.wiring {
            Wiring::Line(line) if status != 0 => line.write(1),
            Wiring::Line(_) => Ok(()),
            Wiring::Messages(messages) => messages.send_again(),
        }
    }

    fn raise(&self, bit: u32, source: Source) -> io::Result<()> {
        if let Wiring::Messages(messages) = &self.wiring
            && messages.are_enabled()
        {
            if source == Source::Config {
                // Also with messages (virtio 1.3, 4.1.4.5.1).
                self.status.fetch_or(bit, Ordering::SeqCst);
            }
            return messages.send(source);
        }
        self.status.fetch_or(bit, Ordering::SeqCst);
        match &self.wiring {
            Wiring::Line(line) => line.write(1),
            Wiring::Messages(_) => Ok(()),
        }
    }
}
