//! The PCI transport (virtio 1.3, 4.1), without its legacy interface.
//!
//! A device is a function of bus 0 with one range of memory, which does not move ([`config_space`]). Its interrupts are
//! messages ([`super::msix`]); it has no interrupt line (INTx). The guest finds the functions on the bus
//! ([`super::pci_bus`]).

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use self::config_space::{
    BUS_MASTER, ConfigSpace, INTERRUPT_STATUS, Identity, MEMORY_SPACE, MSIX_ENABLE, MSIX_MASK, STATUS,
    SavedConfig,
};
use super::{
    Interrupt, VirtioDevice,
    msix::{Irqfd, Messages, Router, SavedMessages},
    transport::{Core, IoEventFd, TransportError, event},
};
use crate::{
    GuestMemory,
    bus::BusDevice,
    layout::{PCI_SIZE, PCI_VECTORS, Resources},
    lock,
};

mod common;
pub(super) mod config_space;
pub mod layout;

/// A device as a PCI function.
pub struct PciTransport {
    core: Core,
    address: u64,
    messages: Arc<Messages>,
    /// Boxed, because it is much larger than the rest.
    config: Box<Mutex<ConfigSpace>>,
    /// A driver has the function, as the command register says.
    is_held: AtomicBool,
}

/// The state of a function beside that of its device.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciState {
    config: SavedConfig,
    messages: SavedMessages,
}

impl PciTransport {
    /// Connects `device` to a guest with `memory`. It has an interrupt for each queue, and one for changes of its
    /// configuration. An error if they are more than [`PCI_VECTORS`].
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        resources: Resources,
        router: Arc<dyn Router>,
    ) -> Result<Self, TransportError> {
        let Resources { address, gsi } = resources;
        let queues = device.queue_sizes().len();
        if queues >= PCI_VECTORS as usize {
            return Err(TransportError::Queues);
        }
        let irqfd = |gsi| Ok(Irqfd { gsi, event: event()? });
        let irqfds = (gsi..).take(queues + 1).map(irqfd).collect::<Result<Vec<_>, TransportError>>()?;
        let identity =
            Identity { device: device.device_type(), vectors: irqfds.len(), address: address as u32 };
        let messages = Arc::new(Messages::new(irqfds, queues, router));
        let interrupt = Arc::new(Interrupt::by_messages(messages.clone()));
        let core = Core::new(device, memory, interrupt)?;
        let config = Box::new(Mutex::new(ConfigSpace::new(identity)));
        Ok(Self { core, address, messages, config, is_held: AtomicBool::new(false) })
    }

    /// The device.
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// Whether no driver uses the device, nor is about to let it go: Linux reads the status until it says that the
    /// device is reset, and then disables the function (pci_disable_device). If there were another function in this
    /// place before that, whose registers are off, Linux would wait for ever.
    pub fn is_let_go(&self) -> bool {
        self.is_unused() && !self.is_held.load(Ordering::SeqCst)
    }

    /// Linux does not reset a device whose driver has failed. It only disables the function.
    fn is_unused(&self) -> bool {
        self.core.has_no_driver() || self.core.has_failed()
    }

    /// The notifications of the queues. Nobody else writes to their addresses, so KVM need not look at the value.
    pub fn ioeventfds(&self) -> Vec<IoEventFd<'_>> {
        let addresses = (self.address + layout::NOTIFY..).step_by(layout::NOTIFY_STEP as usize);
        let queues = addresses.zip(self.core.kicks());
        queues.map(|(address, event)| IoEventFd { address, value: None, event }).collect()
    }

    /// The events of its interrupts, with their numbers (GSI).
    pub fn irqfds(&self) -> Vec<(u32, &EventFd)> {
        self.messages.irqfds().map(|irqfd| (irqfd.gsi, &irqfd.event)).collect()
    }

    /// Its interrupts.
    pub(crate) fn messages(&self) -> &Messages {
        &self.messages
    }

    /// Tells the router of the messages of a function that was restored.
    pub fn route(&self) {
        self.messages.update();
    }

    /// Reads from the configuration space at `at`: 1, 2 or 4 bytes. The caller has filled `data` with ones.
    pub fn read_config_space(&self, at: usize, data: &mut [u8]) {
        // Whoever looks for a device reads these first, and finds none. A driver that has the device finds it still:
        // Linux reads them too before it lets a device go. If there were none, it would drop the completions of the
        // requests that are under way, and wait for them for ever (drivers/virtio/virtio_pci_common.c,
        // virtio_pci_remove).
        if at < 4 && self.core.is_hidden() && self.is_unused() {
            return;
        }
        let config = lock(&self.config);
        config.read(at, data);
        if config.msix() & MSIX_ENABLE == 0 && self.core.interrupt().status() != 0 {
            // virtio 1.3, 4.1.4.5.1.
            let status = STATUS.checked_sub(at).and_then(|index| data.get_mut(index));
            status.into_iter().for_each(|byte| *byte |= INTERRUPT_STATUS);
        }
        let window = config.window(at, data.len());
        drop(config);
        if let Some((offset, len)) = window {
            self.read_memory(offset, &mut data[..len]);
        }
    }

    /// Writes to the configuration space at `at`: 1, 2 or 4 bytes.
    pub fn write_config_space(&self, at: usize, data: &[u8]) {
        let mut config = lock(&self.config);
        if let Some((offset, len)) = config.window(at, data.len()) {
            drop(config);
            return self.write_memory(offset, &data[..len]);
        }
        let before = (config.command(), config.msix());
        config.write(at, data);
        self.note_command(before.0, config.command());
        if before != (config.command(), config.msix()) {
            // With the lock, so that two writes take effect in order.
            self.set_control(&config);
            // Without it, because KVM may take its time.
            drop(config);
            self.messages.update();
        }
    }

    /// Linux enables the registers, makes the function bus master, and takes only the latter back.
    fn note_command(&self, before: u16, now: u16) {
        let [had, has] = [before, now].map(|command| command & BUS_MASTER != 0);
        let enables = now & !before & MEMORY_SPACE != 0;
        if has || enables {
            self.is_held.store(true, Ordering::SeqCst);
        } else if had || now & MEMORY_SPACE == 0 {
            self.is_held.store(false, Ordering::SeqCst);
        }
    }

    /// A function that is not bus master writes no memory, and a message is such a write (PCI 3.0, 6.8.3).
    fn set_control(&self, config: &ConfigSpace) {
        let enabled = config.msix() & MSIX_ENABLE != 0;
        let masked = config.msix() & MSIX_MASK != 0;
        let is_master = config.command() & BUS_MASTER != 0;
        self.messages.set_control(enabled, enabled && !masked && is_master);
    }

    fn is_decoding(&self) -> bool {
        lock(&self.config).command() & MEMORY_SPACE != 0
    }

    fn read_memory(&self, offset: u64, data: &mut [u8]) {
        match offset {
            ..layout::ISR => common::read(&self.core, &self.messages, offset, data),
            layout::ISR => {
                data.fill(0);
                if let [byte, ..] = data {
                    *byte = self.core.interrupt().take_status() as u8;
                }
            }
            layout::DEVICE..layout::NOTIFY => self.core.read_config(offset - layout::DEVICE, data),
            layout::TABLE..layout::PENDING => self.messages.read_table(offset - layout::TABLE, data),
            layout::PENDING..PCI_SIZE => self.messages.read_pending(offset - layout::PENDING, data),
            _ => data.fill(0),
        }
    }

    /// Writes to the device configuration space are ignored: no driver writes to a field that a device reads.
    fn write_memory(&self, offset: u64, data: &[u8]) {
        match offset {
            ..layout::ISR => common::write(&self.core, &self.messages, offset, data),
            layout::NOTIFY..layout::TABLE => {
                self.core.kick(((offset - layout::NOTIFY) / layout::NOTIFY_STEP) as usize);
            }
            layout::TABLE..layout::PENDING => self.messages.write_table(offset - layout::TABLE, data),
            _ => {}
        }
    }

    /// The state beside that of the device.
    pub(crate) fn save(&self) -> PciState {
        PciState { config: lock(&self.config).save(), messages: self.messages.save() }
    }

    /// Restores the state to a new function. [`PciTransport::route`] has to follow. The device is restored later.
    pub(crate) fn restore(&self, saved: &PciState) -> io::Result<()> {
        self.messages.restore(&saved.messages)?;
        let mut config = lock(&self.config);
        let before = config.command();
        config.restore(saved.config)?;
        self.note_command(before, config.command());
        self.set_control(&config);
        Ok(())
    }
}

/// The memory of the function. The guest reaches it only if it has enabled that. KVM handles notifications by itself.
impl BusDevice for PciTransport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if self.is_decoding() {
            self.read_memory(offset, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if self.is_decoding() {
            self.write_memory(offset, data);
        }
    }
}

#[cfg(test)]
mod tests;
