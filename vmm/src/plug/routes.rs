//! KVM's table of the messages that irqfds send.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
};
use kvm_ioctls::VmFd;

use crate::{
    layout, lock,
    rate_limited_log::RateLimitedLog,
    virtio::msix::{Message, Messages, Router},
};

/// The number of inputs of a PIC.
const PIC_PINS: u32 = 8;

/// A guest may have KVM take this many tables at once: a few times what a boot does.
const BURST: u32 = 256;
/// After those, it may have another one so often.
const INTERVAL: Duration = Duration::from_millis(10);

/// By the numbers (GSIs) of the irqfds. They are those of the VM's functions, so a guest cannot make the table larger.
type Table = BTreeMap<u32, Message>;

/// Gives KVM a table.
type Install = dyn Fn(&[kvm_irq_routing_entry]) -> io::Result<()> + Send + Sync;

/// The table of a VM. KVM takes it as a whole.
pub(super) struct KvmRoutes {
    install: Box<Install>,
    pace: Pace,
    table: Mutex<Table>,
    log: RateLimitedLog,
}

impl KvmRoutes {
    /// The table that KVM has after its interrupt controllers were created: no messages.
    pub(super) fn new(vm: Arc<VmFd>) -> Self {
        Self::with(Box::new(move |entries| {
            let routing = KvmIrqRouting::from_entries(entries).map_err(|_| io::ErrorKind::OutOfMemory)?;
            vm.set_gsi_routing(&routing).map_err(|error| io::Error::from_raw_os_error(error.errno()))
        }))
    }

    fn with(install: Box<Install>) -> Self {
        Self {
            install,
            pace: Pace(Mutex::new(Instant::now())),
            table: Mutex::default(),
            log: RateLimitedLog::default(),
        }
    }

    /// Tells KVM of the messages of all these functions. KVM waits for all vCPUs after each table, so one for each
    /// function would delay the start of a clone.
    pub(super) fn route_all(&self, functions: &[&Messages]) -> io::Result<()> {
        let messages: Vec<_> = functions.iter().flat_map(|function| function.take_unrouted()).collect();
        if !messages.is_empty() {
            self.add(&mut lock(&self.table), &messages)?;
        }
        functions.iter().for_each(|function| function.set_routed(&messages));
        Ok(())
    }

    fn add(&self, table: &mut Table, messages: &[(u32, Message)]) -> io::Result<()> {
        let mut next = table.clone();
        next.extend(messages.iter().copied());
        (self.install)(&entries(&next))?;
        *table = next;
        Ok(())
    }
}

impl Router for KvmRoutes {
    fn route(&self, messages: &[(u32, Message)], is_gone: &AtomicBool) -> io::Result<()> {
        self.pace.wait();
        let mut table = lock(&self.table);
        // With the lock, because the function that has these numbers next takes it later, and so has the last word.
        if is_gone.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.add(&mut table, messages).inspect_err(|error| {
            self.log.say(&format!("KVM refuses interrupt messages, so a device is silent: {error}"));
        })
    }
}

/// Limits how often a guest has KVM take a table. The work for it is that of the host's kernel, which no cgroup limits.
/// This is the time at which all turns that were given are over, if each takes [`INTERVAL`].
struct Pace(Mutex<Instant>);

impl Pace {
    /// Waits for a turn. The thread of a vCPU takes one for each exit at most. So here it waits for one turn of each
    /// other vCPU at most, and once more as long if others of the same function come first ([`Messages`]).
    fn wait(&self) {
        let now = Instant::now();
        let turn = now + self.reserve(now);
        loop {
            let left = turn.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            thread::park_timeout(left);
        }
    }

    /// How long to wait for the next turn.
    fn reserve(&self, now: Instant) -> Duration {
        let mut end = lock(&self.0);
        *end = (*end).max(now) + INTERVAL;
        end.saturating_duration_since(now + INTERVAL * BURST)
    }
}

/// The inputs of the interrupt controllers, as KVM has them at first, and the messages.
fn entries(messages: &Table) -> Vec<kvm_irq_routing_entry> {
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
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;
    use crate::virtio::msix::Irqfd;

    const MESSAGE: Message = Message { address: 0xfee0_1000, data: 0x31 };
    const OTHER: Message = Message { address: 0xfee0_2000, data: 0x32 };

    /// What KVM was told: the numbers of the messages in each table.
    #[derive(Default)]
    struct Kvm {
        tables: Mutex<Vec<Vec<u32>>>,
        refuses: AtomicBool,
    }

    fn routes() -> (Arc<Kvm>, Arc<KvmRoutes>) {
        let kvm = Arc::new(Kvm::default());
        let told = kvm.clone();
        let routes = KvmRoutes::with(Box::new(move |entries| {
            let messages = entries.iter().filter(|entry| entry.type_ == KVM_IRQ_ROUTING_MSI);
            lock(&told.tables).push(messages.map(|entry| entry.gsi).collect());
            if told.refuses.load(Ordering::SeqCst) { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
        }));
        (kvm, Arc::new(routes))
    }

    fn messages(routes: &Arc<KvmRoutes>, gsi: u32) -> Messages {
        let event = EventFd::new(EFD_NONBLOCK).unwrap();
        let messages = Messages::new(vec![Irqfd { gsi, event }], 0, routes.clone());
        messages.set_control(true, true);
        messages
    }

    fn unmask(messages: &Messages, message: Message) {
        for (offset, word) in [(12, 1), (0, message.address), (8, message.data), (12, 0)] {
            messages.write_table(offset, &u32::to_le_bytes(word));
        }
    }

    #[test]
    fn kvm_gets_the_messages_of_all_restored_functions_at_once() {
        let (kvm, routes) = routes();
        let functions = [24, 40, 56].map(|gsi| messages(&routes, gsi));
        routes.route_all(&functions.each_ref()).unwrap();
        assert!(lock(&kvm.tables).is_empty(), "none of them has a message");
        let saved = functions.each_ref().map(|function| {
            unmask(function, MESSAGE);
            function.save()
        });
        let before = lock(&kvm.tables).len();
        let restored = [24, 40, 56].map(|gsi| messages(&routes, gsi));
        restored.iter().zip(&saved).for_each(|(function, saved)| function.restore(saved).unwrap());
        routes.route_all(&restored.each_ref()).unwrap();
        assert_eq!(lock(&kvm.tables)[before..], [[24, 40, 56]]);
    }

    #[test]
    fn a_message_that_kvm_refuses_is_in_no_later_table() {
        let (kvm, routes) = routes();
        let (one, other) = (messages(&routes, 24), messages(&routes, 40));
        kvm.refuses.store(true, Ordering::SeqCst);
        unmask(&one, MESSAGE);
        kvm.refuses.store(false, Ordering::SeqCst);
        unmask(&other, MESSAGE);
        unmask(&one, OTHER);
        assert_eq!(*lock(&kvm.tables), [vec![24], vec![40], vec![24, 40]]);
    }

    #[test]
    fn a_function_that_is_gone_does_not_change_the_message_of_the_next_one() {
        let (kvm, routes) = routes();
        let gone = messages(&routes, 24);
        unmask(&gone, MESSAGE);
        gone.disconnect();
        unmask(&messages(&routes, 24), MESSAGE);
        unmask(&gone, OTHER);
        assert_eq!(lock(&kvm.tables).len(), 2);
    }

    #[test]
    fn a_guest_that_changes_its_messages_without_end_is_slowed_down() {
        let (kvm, routes) = routes();
        let function = messages(&routes, 24);
        let begin = Instant::now();
        for _ in 0..(BURST + 10) / 2 {
            unmask(&function, MESSAGE);
            unmask(&function, OTHER);
        }
        assert!(begin.elapsed() >= INTERVAL * 9, "{:?}", begin.elapsed());
        assert_eq!(lock(&kvm.tables).len(), BURST as usize + 10);
        // What is as before costs nothing.
        unmask(&function, OTHER);
        assert_eq!(lock(&kvm.tables).len(), BURST as usize + 10);
    }

    #[test]
    fn a_pause_gives_turns_back_but_no_more_than_the_first() {
        let now = Instant::now();
        let pace = Pace(Mutex::new(now));
        let waits = |from: Instant, count: u32| (0..count).map(|_| pace.reserve(from)).collect::<Vec<_>>();
        assert!(waits(now, BURST).iter().all(Duration::is_zero));
        assert_eq!(waits(now, 2), [INTERVAL, INTERVAL * 2]);
        assert_eq!(waits(now + INTERVAL * 4, 3), [Duration::ZERO, Duration::ZERO, INTERVAL]);
        let later = now + Duration::from_secs(3600);
        assert_eq!(waits(later, BURST + 1).iter().filter(|wait| wait.is_zero()).count(), BURST as usize);
    }

    #[test]
    fn a_table_has_the_pins_of_the_interrupt_controllers_and_the_messages() {
        let entries = entries(&Table::from([(40, MESSAGE)]));
        let chips = entries.iter().filter(|entry| entry.type_ == KVM_IRQ_ROUTING_IRQCHIP).count();
        assert_eq!((chips, entries.len()), (24 + 16, 24 + 16 + 1));
        let last = entries.last().unwrap();
        #[allow(unsafe_code)]
        // SAFETY: the entry was made as a message, whose fields are integers.
        let routed = unsafe { (last.u.msi.address_lo, last.u.msi.address_hi, last.u.msi.data) };
        assert_eq!((last.gsi, last.type_, routed), (40, KVM_IRQ_ROUTING_MSI, (0xfee0_1000, 0, 0x31)));
    }
}
