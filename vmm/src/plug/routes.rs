//! KVM's table of the messages that irqfds send.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex},
};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
};
use kvm_ioctls::VmFd;

use crate::{
    layout, lock,
    virtio::msix::{Message, Router},
};

/// The number of inputs of a PIC.
const PIC_PINS: u32 = 8;

/// The table of a VM. KVM takes it as a whole.
pub struct KvmRoutes {
    vm: Arc<VmFd>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// By the numbers of the irqfds. They are those of the VM's lines, so a guest cannot make the table larger.
    messages: BTreeMap<u32, Message>,
    /// KVM gets the table later.
    is_batch: bool,
}

impl KvmRoutes {
    /// The table that KVM has after its interrupt controllers were created: no messages.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { vm, table: Mutex::default() }
    }

    /// Runs `change`, and tells KVM of all messages that it has routed. KVM waits for all vCPUs after each table, so
    /// one for each message would delay the start of a clone.
    pub fn batch<E: From<io::Error>>(&self, change: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        lock(&self.table).is_batch = true;
        let changed = change();
        let mut table = lock(&self.table);
        table.is_batch = false;
        changed?;
        Ok(self.tell(&table)?)
    }

    fn tell(&self, table: &Table) -> io::Result<()> {
        let entries = entries(&table.messages);
        let routing = KvmIrqRouting::from_entries(&entries).map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.vm.set_gsi_routing(&routing).map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }
}

impl Router for KvmRoutes {
    fn route(&self, gsi: u32, message: Message) -> io::Result<()> {
        let mut table = lock(&self.table);
        let before = table.messages.insert(gsi, message);
        if table.is_batch {
            return Ok(());
        }
        let told = self.tell(&table);
        if told.is_err() {
            // Otherwise no later table would be taken either.
            match before {
                Some(before) => table.messages.insert(gsi, before),
                None => table.messages.remove(&gsi),
            };
        }
        told
    }
}

/// The inputs of the interrupt controllers, as KVM has them at first, and the messages.
fn entries(messages: &BTreeMap<u32, Message>) -> Vec<kvm_irq_routing_entry> {
    let mut entries = Vec::with_capacity(layout::LAST_GSI as usize * 2 + messages.len());
    for gsi in 0..=layout::LAST_GSI {
        entries.push(chip(gsi, KVM_IRQCHIP_IOAPIC, gsi));
        match gsi / PIC_PINS {
            0 => entries.push(chip(gsi, KVM_IRQCHIP_PIC_MASTER, gsi)),
            1 => entries.push(chip(gsi, KVM_IRQCHIP_PIC_SLAVE, gsi % PIC_PINS)),
            _ => {}
        }
    }
    for (gsi, message) in messages {
        let mut entry = kvm_irq_routing_entry { gsi: *gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
        entry.u.msi.address_lo = message.address;
        entry.u.msi.data = message.data;
        entries.push(entry);
    }
    entries
}

fn chip(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip.irqchip = irqchip;
    entry.u.irqchip.pin = pin;
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_pins_of_the_interrupt_controllers_and_the_messages() {
        let message = Message { address: 0xfee0_1000, data: 0x31 };
        let entries = entries(&BTreeMap::from([(40, message)]));
        let chips = entries.iter().filter(|entry| entry.type_ == KVM_IRQ_ROUTING_IRQCHIP).count();
        assert_eq!((chips, entries.len()), (24 + 16, 24 + 16 + 1));
        let last = entries.last().unwrap();
        #[allow(unsafe_code)]
        // SAFETY: the entry was made as a message, whose fields are integers.
        let routed = unsafe { (last.u.msi.address_lo, last.u.msi.address_hi, last.u.msi.data) };
        assert_eq!((last.gsi, last.type_, routed), (40, KVM_IRQ_ROUTING_MSI, (0xfee0_1000, 0, 0x31)));
    }
}
