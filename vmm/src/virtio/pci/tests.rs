use std::{
    collections::BTreeMap,
    io,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Duration,
};

use bulkhead_vmm_api::Transport as Kind;

use super::*;
use crate::{
    bus::Bus,
    jail::ThreadRole,
    memory,
    snapshot::DeviceState,
    virtio::{
        Activation,
        device_threads::Job,
        mmio::MmioTransport,
        msix::Message,
        pci_bus::{PORT, PORTS, PciBus},
        rng::Rng,
        slot::{Slot, Transport},
    },
};

const ADDRESS: u64 = 0xd100_0000;
const GSI: u32 = 24;
/// The second page of the guest's memory, for the rings of the queue.
const RINGS: u32 = 0x1000;
const MESSAGE: Message = Message { address: 0xfee0_1000, data: 0x31 };

const PATIENCE: Duration = Duration::from_secs(20);

/// The messages that KVM would have, and how many tables it has taken.
#[derive(Default)]
struct Routes {
    table: Mutex<BTreeMap<u32, Message>>,
    changes: Mutex<usize>,
    refuses: Mutex<bool>,
    /// The next who routes a message says so, and waits.
    meeting: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Router for Routes {
    fn route(&self, messages: &[(u32, Message)], is_gone: &AtomicBool) -> io::Result<()> {
        let meeting = lock(&self.meeting).take();
        if let Some((begun, end)) = meeting {
            begun.send(()).unwrap();
            // The other end is gone if the test has failed.
            let _ = end.recv_timeout(PATIENCE);
        }
        if *lock(&self.refuses) || is_gone.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::Other.into());
        }
        lock(&self.table).extend(messages.iter().copied());
        *lock(&self.changes) += 1;
        Ok(())
    }
}

/// A guest with a bus, on which slot 3 has the entropy device.
struct Guest {
    bus: Bus,
    slot: Arc<Slot>,
    device: Arc<dyn Transport>,
    lines: Vec<EventFd>,
    routes: Arc<Routes>,
}

impl Guest {
    fn new() -> Self {
        Self::with(Box::new(Rng::new().unwrap()))
    }

    fn with(device: Box<dyn VirtioDevice>) -> Self {
        let routes = Arc::new(Routes::default());
        let memory = memory::lay_out(&[(0, 0x10000)], 0).unwrap();
        let resources = Resources { address: ADDRESS, gsi: GSI };
        let device = PciTransport::new(device, memory, resources, routes.clone()).unwrap();
        let device: Arc<dyn Transport> = Arc::new(device);
        let irqfds = device.irqfds();
        assert!((GSI..).zip(&irqfds).all(|(expected, (gsi, _))| expected == *gsi));
        let lines = irqfds.into_iter().map(|(_, event)| event.try_clone().unwrap()).collect();
        let slots: Vec<_> = (0..4).map(|_| Arc::new(Slot::new(Kind::Pci, resources))).collect();
        slots[2].set(Some(device.clone()));
        let (slot, mut bus) = (slots[2].clone(), Bus::default());
        bus.insert(PORT, PORTS, Arc::new(PciBus::new(slots)));
        Self { bus, slot, device, lines, routes }
    }

    /// Reads a register of the function in a slot by the ports.
    fn config_of(&self, slot: u32, at: u32, len: usize) -> u32 {
        self.bus.write(PORT, &(1 << 31 | slot << 11 | at & 0xfc).to_le_bytes());
        let mut data = vec![0; len];
        self.bus.read(PORT + 4 + u64::from(at % 4), &mut data);
        data.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
    }

    fn config(&self, at: u32, len: usize) -> u32 {
        self.config_of(3, at, len)
    }

    fn set_config(&self, at: u32, data: &[u8]) {
        self.bus.write(PORT, &(1 << 31 | 3 << 11 | at & 0xfc).to_le_bytes());
        self.bus.write(PORT + 4 + u64::from(at % 4), data);
    }

    fn read(&self, offset: u64, len: usize) -> u64 {
        let mut data = vec![0xff; len];
        self.slot.read(offset, &mut data);
        data.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.slot.write(offset, data);
    }

    /// The capabilities: where each is, and its ID.
    fn capabilities(&self) -> Vec<(u32, u8)> {
        let mut at = self.config(0x34, 1);
        let mut found = Vec::new();
        while at != 0 {
            assert!(found.len() < 48 && at >= 0x40 && at.is_multiple_of(4), "the list is a loop: {found:?}");
            found.push((at, self.config(at, 1) as u8));
            at = self.config(at + 1, 1);
        }
        found
    }

    /// The offset and the length that the capability of this type of virtio names.
    fn virtio(&self, kind: u32) -> (u32, u32) {
        let mut all = self.capabilities().into_iter().filter(|(_, id)| *id == 9);
        let (at, _) = all.find(|(at, _)| self.config(at + 3, 1) == kind).unwrap();
        assert_eq!(self.config(at + 4, 1), 0, "the BAR");
        (self.config(at + 8, 4), self.config(at + 12, 4))
    }

    /// Enables the function, as a driver does first.
    fn enable(&self) {
        self.set_config(4, &[6, 0]);
    }

    fn set_msix(&self, control: u16) {
        self.set_config(0x42, &control.to_le_bytes());
    }

    fn set_entry(&self, entry: u64, words: [u32; 4]) {
        for (word, value) in (0u64..).zip(words) {
            self.write(layout::TABLE + 16 * entry + 4 * word, &value.to_le_bytes());
        }
    }

    fn mask(&self, entry: u64, masked: bool) {
        self.write(layout::TABLE + 16 * entry + 12, &u32::from(masked).to_le_bytes());
    }

    /// Enables MSI-X with a message for each entry, and gives the first to the configuration, the second to the queue.
    fn enable_messages(&self) {
        self.enable();
        self.set_msix(0x8000);
        for entry in [0, 1] {
            self.set_entry(entry, [MESSAGE.address, 0, MESSAGE.data + entry as u32, 0]);
        }
        self.write(0x10, &0u16.to_le_bytes());
        self.write(0x1a, &1u16.to_le_bytes());
    }

    /// What was sent since the last call, by entry.
    fn sent(&self) -> Vec<bool> {
        self.lines.iter().map(|line| line.read().is_ok()).collect()
    }

    fn use_buffer(&self) {
        self.device.core().interrupt().used(0).unwrap();
    }

    fn pending(&self) -> u64 {
        self.read(layout::PENDING, 8)
    }

    fn status(&self) -> u64 {
        self.read(0x14, 1)
    }

    /// Unmasks an entry whose message is new. Does something else while KVM takes that.
    fn unmask_while<T>(&self, entry: u64, act: impl FnOnce() -> T) -> T {
        let ((begun, has_begun), (go, goes)) = (channel(), channel());
        *lock(&self.routes.meeting) = Some((begun, goes));
        thread::scope(|scope| {
            let unmasking = scope.spawn(|| self.mask(entry, false));
            has_begun.recv_timeout(PATIENCE).unwrap();
            let done = act();
            go.send(()).unwrap();
            unmasking.join().unwrap();
            done
        })
    }

    /// Sets the device up to FEATURES_OK, and selects the first queue.
    fn accept(&self) {
        for status in [0, 1, 3u8] {
            self.write(0x14, &[status]);
        }
        for half in [0u32, 1] {
            self.write(0, &half.to_le_bytes());
            let offered = self.read(4, 4) as u32;
            self.write(8, &half.to_le_bytes());
            self.write(0xc, &offered.to_le_bytes());
        }
        self.write(0x14, &[11]);
        assert_eq!(self.status(), 11);
        self.write(0x16, &0u16.to_le_bytes());
    }

    /// Sets the device up to DRIVER_OK.
    fn start(&self) {
        self.accept();
        for (at, address) in [(0x20, RINGS), (0x28, RINGS + 0x2000), (0x30, RINGS + 0x3000)] {
            self.write(at, &address.to_le_bytes());
        }
        self.write(0x1c, &1u16.to_le_bytes());
        self.write(0x14, &[15]);
    }
}

#[test]
fn a_guest_finds_the_bridge_and_the_functions_and_nothing_else() {
    let guest = Guest::new();
    assert_eq!(guest.config_of(0, 0x0a, 2), 0x0600, "a bridge to the host");
    assert_eq!(guest.config(0, 4), 0x1044_1af4, "the entropy device of virtio 1.0");
    assert_eq!((guest.config(0x2c, 4), guest.config(8, 1)), (0x0044_1af4, 1));
    assert_eq!(guest.config(0x3c, 2), 0, "it has no interrupt pin");
    for slot in [1, 2, 4, 5, 31] {
        assert_eq!(guest.config_of(slot, 0, 4), u32::MAX, "slot {slot}");
    }
    for address in [3 << 11, 1 << 31 | 1 << 16 | 3 << 11, 1 << 31 | 3 << 11 | 1 << 8, 0x8100_1800] {
        guest.bus.write(PORT, &u32::to_le_bytes(address));
        let mut data = [0; 4];
        guest.bus.read(PORT + 4, &mut data);
        assert_eq!(data, [0xff; 4], "{address:#x} is disabled, or of another bus, function or range");
    }
}

#[test]
fn an_access_of_the_ports_has_a_width_and_an_alignment() {
    let guest = Guest::new();
    // The command register, of which a driver may change some bits.
    guest.bus.write(PORT, &0x8000_1804u32.to_le_bytes());
    // Linux writes to a part of the address port, to see that this has no effect.
    guest.bus.write(PORT + 3, &[1]);
    let mut address = [0; 4];
    guest.bus.read(PORT, &mut address);
    assert_eq!(u32::from_le_bytes(address), 0x8000_1804);
    for (port, len) in
        [(PORT + 4, 8), (PORT + 4, 3), (PORT + 5, 2), (PORT + 6, 4), (PORT + 7, 2), (PORT + 2, 2)]
    {
        let mut data = vec![0; len];
        guest.bus.read(port, &mut data);
        assert!(data.iter().all(|byte| *byte == 0xff), "{port:#x} {len}");
        guest.bus.write(port, &data);
    }
    assert_eq!(guest.config(4, 4), 0x0010_0000);
    guest.bus.write(PORT + 5, &[0xff]);
    assert_eq!(guest.config(4, 4), 0x0010_0400);
}

#[test]
fn every_capability_is_in_the_list_and_inside_of_the_memory() {
    let guest = Guest::new();
    let ids: Vec<u8> = guest.capabilities().into_iter().map(|(_, id)| id).collect();
    assert_eq!(ids, [0x11, 0x14, 9, 9, 9, 9, 9]);
    let parts = [1, 2, 3, 4].map(|kind| guest.virtio(kind));
    assert!(parts.iter().all(|(offset, len)| *len > 0 && u64::from(offset + len) <= PCI_SIZE), "{parts:?}");
    let apart = |(one, len): (u32, u32), (other, _): (u32, u32)| one + len <= other;
    assert!(apart(parts[0], parts[2]) && apart(parts[2], parts[3]) && apart(parts[3], parts[1]), "{parts:?}");
    assert_eq!(guest.config(0x42, 2), 1, "the size of the MSI-X table, less one");
    assert_eq!((guest.config(0x44, 4), guest.config(0x48, 4)), (0x3000, 0x3800));
}

#[test]
fn the_memory_has_a_fixed_place_and_the_base_address_registers_are_zero() {
    let guest = Guest::new();
    for register in (0x10..0x28).step_by(4).chain([0x30]) {
        guest.set_config(register, &[0xff; 4]);
        assert_eq!(guest.config(register, 4), 0, "{register:#x} has no size");
    }
    // The entry of Enhanced Allocation: two more words, for BAR 0, enabled, not writable.
    assert_eq!(guest.config(0x4e, 1), 1);
    assert_eq!(guest.config(0x50, 4), 0x80ff_0002);
    assert_eq!((u64::from(guest.config(0x54, 4)), guest.config(0x58, 4) | 3), (ADDRESS, 0x3fff));
}

#[test]
fn a_driver_can_change_few_bits() {
    let guest = Guest::new();
    let before: Vec<u32> = (0..256).step_by(4).map(|at| guest.config(at, 4)).collect();
    for at in (0..256).step_by(4) {
        guest.set_config(at, &[0xff; 4]);
    }
    let changed: Vec<_> = (0..256u32)
        .step_by(4)
        .zip(before)
        .map(|(at, before)| (at, before ^ guest.config(at, 4)))
        .filter(|(_, bits)| *bits != 0)
        .collect();
    let expected = [
        (0x04, 0x0406),
        (0x40, 0xc000_0000),
        (0xa4, 0xff),
        (0xa8, u32::MAX),
        (0xac, u32::MAX),
        // With this window there is no access to the memory.
    ];
    assert_eq!(changed, expected);
}

#[test]
fn the_registers_of_a_function_that_does_not_decode_are_not_there() {
    let guest = Guest::new();
    let is_kicked = || guest.device.core().kicks()[0].read().is_ok();
    assert_eq!(guest.read(0x12, 2), 0xffff);
    guest.write(0x14, &[1]);
    guest.write(layout::NOTIFY, &[0, 0]);
    assert!(!is_kicked());
    guest.enable();
    assert_eq!((guest.read(0x12, 2), guest.status()), (1, 0));
    guest.write(layout::NOTIFY, &[0, 0]);
    assert!(is_kicked());
    guest.start();
    guest.set_config(4, &[4, 0]);
    assert_eq!(guest.status(), 0xff);
    guest.write(0x14, &[0]);
    guest.enable();
    assert_eq!(guest.status(), 15, "the reset was not seen");
}

#[test]
fn a_driver_starts_the_device_and_resets_it() {
    let guest = Guest::new();
    guest.enable();
    let size = guest.read(0x18, 2);
    guest.start();
    assert_eq!((guest.status(), guest.read(0x1c, 2)), (15, 1));
    assert_eq!((guest.read(0x18, 2), guest.read(0x20, 8)), (size, 0), "64 bits are two accesses");
    assert_eq!((guest.read(0x20, 4), guest.read(0x28, 4)), (RINGS.into(), u64::from(RINGS) + 0x2000));
    guest.write(0x1a, &0u16.to_le_bytes());
    guest.write(0x14, &[0]);
    assert_eq!((guest.status(), guest.read(0x1c, 2), guest.read(0x1a, 2)), (0, 0, 0xffff));
    guest.start();
    assert_eq!(guest.status(), 15);
}

#[test]
fn a_field_is_accessed_by_its_own_width() {
    let guest = Guest::new();
    guest.enable();
    for (offset, len) in [(0x14, 4), (0x14, 2), (0x12, 4), (0x13, 1), (0, 8), (0x38, 2), (0x100, 4)] {
        assert_eq!(guest.read(offset, len), 0, "{offset:#x} {len}");
    }
    guest.write(0x14, &[1, 0, 0, 0]);
    assert_eq!(guest.status(), 0);
    // A queue that does not exist has no size, no vector and no addresses.
    guest.write(0x16, &7u16.to_le_bytes());
    guest.write(0x1a, &0u16.to_le_bytes());
    guest.write(0x1c, &1u16.to_le_bytes());
    assert_eq!([0x18, 0x1a, 0x1c].map(|at| guest.read(at, 2)), [0, 0xffff, 0]);
    assert_eq!(guest.status(), 0);
}

#[test]
fn what_a_driver_must_not_do_is_answered_with_needs_reset() {
    let guest = Guest::new();
    guest.enable();
    guest.write(0x14, &[4]);
    assert_eq!(guest.status() & 64, 64);
    let guest = Guest::new();
    guest.enable_messages();
    guest.start();
    guest.write(0x10, &0u16.to_le_bytes());
    guest.write(0x18, &3u16.to_le_bytes());
    assert_eq!((guest.status() & 64, guest.sent()), (64, vec![true, false]));
}

#[test]
fn a_driver_does_not_disable_a_queue_and_gives_it_a_size_if_any() {
    for act in [
        &(|guest: &Guest| guest.write(0x1c, &0u16.to_le_bytes())) as &dyn Fn(&Guest),
        &|guest: &Guest| guest.write(0x1c, &2u16.to_le_bytes()),
        &|guest: &Guest| {
            guest.write(0x18, &0u16.to_le_bytes());
            guest.write(0x1c, &1u16.to_le_bytes());
        },
    ] {
        let guest = Guest::new();
        guest.enable();
        guest.accept();
        act(&guest);
        assert_eq!((guest.status() & 64, guest.read(0x1c, 2)), (64, 0));
    }
}

/// A device with two queues. The test gets what its driver has set up.
struct TwoQueues(Sender<Activation>);

impl VirtioDevice for TwoQueues {
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Rng
    }
    fn threads(&self) -> usize {
        0
    }
    fn device_type(&self) -> u32 {
        42
    }
    fn features(&self) -> u64 {
        0
    }
    fn queue_sizes(&self) -> &[u16] {
        &[16, 8]
    }
    fn read_config(&self, _: u64, _: &mut [u8]) {}
    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        self.0.send(activation).unwrap();
        Ok(Vec::new())
    }
}

#[test]
fn each_queue_of_a_device_interrupts_by_its_own_message() {
    let (sender, activations) = channel();
    let guest = Guest::with(Box::new(TwoQueues(sender)));
    guest.enable();
    guest.set_msix(0x8000);
    (0..3).for_each(|entry| guest.set_entry(entry, [MESSAGE.address, 0, MESSAGE.data, 0]));
    guest.start();
    for (queue, vector) in [(0u16, 2u16), (1, 1)] {
        guest.write(0x16, &queue.to_le_bytes());
        guest.write(0x1a, &vector.to_le_bytes());
    }
    let Activation { memory, mut queues, interrupt, .. } = activations.try_recv().unwrap();
    for (queue, expected) in queues.iter_mut().zip([[false, false, true], [false, true, false]]) {
        queue.notify(&memory, &interrupt).unwrap();
        assert_eq!(guest.sent(), expected);
    }
}

#[test]
fn a_queue_and_the_configuration_have_messages_of_their_own() {
    let guest = Guest::new();
    guest.enable_messages();
    assert_eq!(
        lock(&guest.routes.table).clone(),
        BTreeMap::from([(GSI, MESSAGE), (GSI + 1, Message { data: MESSAGE.data + 1, ..MESSAGE }),])
    );
    guest.use_buffer();
    assert_eq!(guest.sent(), [false, true]);
    guest.device.core().interrupt().config_changed().unwrap();
    assert_eq!(guest.sent(), [true, false]);
    assert_eq!(guest.read(layout::ISR, 1), 2, "that of queues is for drivers without messages");
    // A vector that the table does not have is none.
    guest.write(0x1a, &2u16.to_le_bytes());
    assert_eq!(guest.read(0x1a, 2), 0xffff);
    guest.use_buffer();
    assert_eq!((guest.sent(), guest.pending()), (vec![false, false], 0));
}

#[test]
fn an_entry_that_is_masked_is_pending_until_it_is_unmasked() {
    let guest = Guest::new();
    guest.enable_messages();
    guest.mask(1, true);
    guest.use_buffer();
    guest.use_buffer();
    assert_eq!((guest.sent(), guest.pending()), (vec![false, false], 2));
    guest.mask(1, false);
    assert_eq!((guest.sent(), guest.pending()), (vec![false, true], 0));
    guest.mask(1, true);
    guest.mask(1, false);
    assert_eq!(guest.sent(), [false, false], "it was sent already");
}

#[test]
fn a_function_that_is_masked_or_not_bus_master_sends_nothing_until_it_may() {
    let guest = Guest::new();
    guest.enable_messages();
    for (hold, release) in [
        (
            &(|guest: &Guest| guest.set_msix(0xc000)) as &dyn Fn(&Guest),
            &(|guest: &Guest| guest.set_msix(0x8000)) as &dyn Fn(&Guest),
        ),
        (&|guest: &Guest| guest.set_config(4, &[2, 0]), &|guest: &Guest| guest.enable()),
    ] {
        hold(&guest);
        guest.use_buffer();
        assert_eq!((guest.sent(), guest.pending()), (vec![false, false], 2));
        release(&guest);
        assert_eq!((guest.sent(), guest.pending()), (vec![false, true], 0));
    }
    guest.set_msix(0);
    guest.use_buffer();
    assert_eq!((guest.sent(), guest.read(layout::ISR, 1)), (vec![false, false], 1));
    assert_eq!(guest.read(layout::ISR, 1), 0, "a read clears it");
}

#[test]
fn a_new_message_is_told_when_the_entry_is_unmasked() {
    let guest = Guest::new();
    guest.enable_messages();
    let changes = || *lock(&guest.routes.changes);
    let before = changes();
    guest.mask(1, true);
    guest.set_entry(1, [0xfee0_2000, 0, 0x41, 1]);
    assert_eq!(changes(), before);
    guest.mask(1, false);
    guest.mask(1, true);
    guest.mask(1, false);
    assert_eq!(changes(), before + 1);
    assert_eq!(lock(&guest.routes.table)[&(GSI + 1)], Message { address: 0xfee0_2000, data: 0x41 });
    // A driver that does not mask the entry first waits for its interrupts until it does.
    guest.write(layout::TABLE + 16 + 8, &0x51u32.to_le_bytes());
    guest.use_buffer();
    assert_eq!((changes(), guest.sent(), guest.pending()), (before + 1, vec![false, false], 2));
    guest.mask(1, false);
    assert_eq!((changes(), guest.sent(), guest.pending()), (before + 2, vec![false, true], 0));
}

#[test]
fn the_messages_of_a_function_that_is_unmasked_are_told_at_once() {
    let guest = Guest::new();
    guest.enable();
    guest.set_msix(0xc000);
    for entry in [0, 1] {
        guest.set_entry(entry, [MESSAGE.address, 0, MESSAGE.data, 0]);
    }
    assert_eq!(*lock(&guest.routes.changes), 0);
    guest.set_msix(0x8000);
    assert_eq!((*lock(&guest.routes.changes), lock(&guest.routes.table).len()), (1, 2));
}

#[test]
fn nobody_waits_for_kvm_but_the_vcpu_that_has_a_message_for_it() {
    let guest = Guest::new();
    guest.enable_messages();
    guest.mask(1, true);
    guest.set_entry(1, [0xfee0_2000, 0, 0x41, 1]);
    guest.unmask_while(1, || {
        // The device's thread, another vCPU, and the main thread.
        guest.use_buffer();
        assert_eq!((guest.sent(), guest.pending()), (vec![false, false], 2));
        guest.mask(0, true);
        guest.mask(0, false);
        assert_eq!((guest.status(), guest.config(0x42, 2)), (0, 0x8001));
        guest.device.core().hide();
        assert!(guest.device.core().has_no_driver());
    });
    assert_eq!((guest.sent(), guest.pending()), (vec![false, true], 0));
}

#[test]
fn a_message_that_changes_back_while_kvm_takes_another_is_told_again() {
    let guest = Guest::new();
    guest.enable_messages();
    let before = lock(&guest.routes.table).clone();
    guest.mask(1, true);
    guest.set_entry(1, [0xfee0_2000, 0, 0x41, 1]);
    thread::scope(|scope| {
        guest.unmask_while(1, || {
            guest.use_buffer();
            guest.mask(1, true);
            guest.set_entry(1, [MESSAGE.address, 0, MESSAGE.data + 1, 1]);
            scope.spawn(|| guest.mask(1, false));
        });
    });
    assert_eq!(*lock(&guest.routes.table), before);
    assert_eq!((guest.sent(), guest.pending()), (vec![false, true], 0));
}

#[test]
fn a_function_that_was_disconnected_routes_no_message() {
    let guest = Guest::new();
    guest.enable_messages();
    guest.device.pci().unwrap().messages().disconnect();
    let before = lock(&guest.routes.table).clone();
    guest.set_entry(1, [0xfee0_2000, 0, 0x41, 0]);
    assert_eq!(*lock(&guest.routes.table), before);
    guest.use_buffer();
    assert_eq!(guest.sent(), [false, false], "the number of its interrupt may be another function's");
}

#[test]
fn a_message_that_a_device_must_not_send_is_not_sent() {
    for words in [
        [0x1000, 0, 0x31, 0],
        [0xfed0_1000, 0, 0x31, 0],
        [0xfee0_1000, 1, 0x31, 0],
        [0xfee0_1000, 0, 0x431, 0],
        [0xfee0_1000, 0, 0x8031, 0],
        [0xfee0_1000, 0, 0x1_0031, 0],
        [0xfee0_1010, 0, 0x31, 0],
        [0xfee0_1800, 0, 0x31, 0],
        [0xfee0_1000, 0, 0x0f, 0],
        [0xfee0_1000, 0, 0x10f, 0],
        [0xfeef_f000, 0, 0x131, 0],
        [0xfeef_f008, 0, 0x31, 0],
    ] {
        let guest = Guest::new();
        guest.enable();
        guest.set_msix(0x8000);
        guest.write(0x1a, &1u16.to_le_bytes());
        guest.set_entry(1, words);
        guest.use_buffer();
        assert_eq!((guest.sent(), guest.pending()), (vec![false, false], 2), "{words:x?}");
        assert!(lock(&guest.routes.table).is_empty(), "{words:x?}");
        assert_eq!(guest.read(layout::TABLE + 16, 4) as u32, words[0]);
        guest.set_entry(1, [MESSAGE.address, 0, MESSAGE.data, 0]);
        assert_eq!(guest.sent(), [false, true]);
    }
}

#[test]
fn a_message_goes_to_one_processor_or_to_all() {
    for (address, data) in [
        (0xfee0_1000, 0x10),
        (0xfee0_1000, 0x131),
        (0xfee0_1008, 0x31),
        (0xfeef_f000, 0x31),
        (0xfeef_f00c, 0x131),
    ] {
        let guest = Guest::new();
        guest.enable_messages();
        guest.set_entry(1, [address, 0, data, 0]);
        assert_eq!(lock(&guest.routes.table)[&(GSI + 1)], Message { address, data });
        guest.use_buffer();
        assert_eq!(guest.sent(), [false, true]);
    }
}

#[test]
fn a_message_that_kvm_does_not_take_is_not_sent() {
    let guest = Guest::new();
    *lock(&guest.routes.refuses) = true;
    guest.enable_messages();
    guest.use_buffer();
    assert_eq!((guest.sent(), guest.pending()), (vec![false, false], 2));
}

#[test]
fn a_table_has_no_more_than_its_entries() {
    let guest = Guest::new();
    guest.enable_messages();
    for (offset, len) in [(0x20, 4), (0x7fc, 4), (1, 4), (0, 2), (4, 8), (0, 1)] {
        guest.write(layout::TABLE + offset, &vec![0xff; len]);
        assert_eq!(guest.read(layout::TABLE + offset, len), 0, "{offset:#x} {len}");
    }
    assert_eq!(guest.read(layout::TABLE, 8), u64::from(MESSAGE.address));
    guest.write(layout::TABLE + 8, &[0x55, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    assert_eq!(guest.read(layout::TABLE + 8, 8), 0x1_0000_0055, "of the last word only the mask is kept");
    guest.write(layout::PENDING, &[0xff; 8]);
    assert_eq!(guest.pending(), 0);
}

#[test]
fn the_memory_is_accessible_by_the_configuration_space() {
    let guest = Guest::new();
    guest.enable();
    let window = |offset: u32, len: u32, bar: u8| {
        guest.set_config(0xa4, &[bar]);
        guest.set_config(0xa8, &offset.to_le_bytes());
        guest.set_config(0xac, &len.to_le_bytes());
    };
    window(0x14, 1, 0);
    guest.set_config(0xb0, &[1]);
    assert_eq!((guest.status(), guest.config(0xb0, 1)), (1, 1));
    for (offset, len, bar) in
        [(0x14, 2, 0), (0x14, 1, 1), (0x4000, 1, 0), (u32::MAX, 1, 0), (0x15, 4, 0), (0, 8, 0)]
    {
        window(offset, len, bar);
        guest.set_config(0xb0, &[3]);
        assert_eq!((guest.status(), guest.config(0xb0, 1)), (1, 0), "{offset:#x} {len} {bar}");
    }
    // An access may be wider than the window, and firmware has not enabled the memory.
    guest.set_config(4, &[0, 0]);
    window(0x14, 1, 0);
    guest.set_config(0xb0, &[3, 0xff, 0xff, 0xff]);
    assert_eq!((guest.config(0xb0, 1), guest.config(0xb0, 4), guest.status()), (3, 3, 0xff));
}

#[test]
fn a_device_that_was_taken_away_is_there_for_its_driver_and_for_nobody_else() {
    let guest = Guest::new();
    guest.enable();
    guest.start();
    guest.device.core().hide();
    assert_eq!(guest.config(0, 4), 0x1044_1af4, "its driver would take its queues for broken");
    assert_eq!((guest.status(), guest.config(4, 2)), (15, 6));
    guest.write(0x14, &[0]);
    assert!(guest.device.core().has_no_driver());
    assert_eq!((guest.config(0, 4), guest.config(4, 2)), (u32::MAX, 6));
    // It waits until it has seen the reset. Another function in this place would have its registers off.
    assert!(!guest.device.is_let_go());
    assert_eq!(guest.status(), 0);
    guest.set_config(4, &[2, 0]);
    assert!(guest.device.is_let_go());
    guest.slot.set(None);
    assert_eq!((guest.config(4, 2), guest.read(0x14, 1)), (0xffff, 0xff));
}

#[test]
fn a_driver_without_messages_sees_interrupts_in_the_status_until_it_reads_the_isr_status() {
    let guest = Guest::new();
    guest.enable();
    guest.use_buffer();
    assert_eq!([(6, 1), (6, 2), (4, 4)].map(|(at, len)| guest.config(at, len)), [0x18, 0x18, 0x18_0006]);
    assert_eq!(guest.read(layout::ISR, 1), 1);
    assert_eq!(guest.config(6, 2), 0x10);
    guest.enable_messages();
    guest.device.core().interrupt().config_changed().unwrap();
    assert_eq!((guest.config(6, 2), guest.read(layout::ISR, 1)), (0x10, 2));
}

#[test]
fn a_reset_device_sends_no_message_once_more() {
    let guest = Guest::new();
    guest.enable_messages();
    guest.use_buffer();
    assert_eq!(guest.sent(), [false, true]);
    guest.write(0x14, &[0]);
    guest.device.pci().unwrap().messages().send_again().unwrap();
    assert_eq!(guest.sent(), [false, false]);
}

/// Linux does not reset a device whose probe has failed, even when it removes the function.
#[test]
fn a_device_that_was_taken_away_while_its_driver_gave_up_is_let_go_when_the_function_is_removed() {
    let guest = Guest::new();
    guest.enable();
    guest.device.core().hide();
    [0, 1, 3].into_iter().for_each(|status| guest.write(0x14, &[status]));
    assert_ne!(guest.config(0, 4), u32::MAX, "its driver still tries");
    guest.write(0x14, &[0x83]);
    assert_eq!((guest.config(0, 4), guest.status()), (u32::MAX, 0x83));
    assert!(!guest.device.is_let_go());
    guest.set_config(4, &[2, 0]);
    assert!(guest.device.is_let_go());
}

#[test]
fn a_device_that_serves_is_not_let_go_although_its_driver_has_given_up() {
    let guest = Guest::new();
    guest.enable();
    guest.start();
    guest.device.core().hide();
    guest.write(0x14, &[0x8f]);
    guest.set_config(4, &[2, 0]);
    assert!(!guest.device.is_let_go());
    assert_ne!(guest.config(0, 4), u32::MAX);
}

#[test]
fn a_function_that_a_driver_begins_to_use_is_not_let_go() {
    let guest = Guest::new();
    let command = |value: u8| {
        guest.set_config(4, &[value, 0]);
        guest.device.is_let_go()
    };
    assert!(guest.device.is_let_go(), "nobody has looked at it");
    assert_eq!([2, 6, 2, 0].map(command), [false, false, true, true]);
}

#[test]
fn a_function_continues_from_its_saved_state() {
    let guest = Guest::new();
    guest.enable_messages();
    guest.start();
    // A start resets the device, and with it the vectors.
    guest.write(0x10, &0u16.to_le_bytes());
    guest.write(0x1a, &1u16.to_le_bytes());
    guest.device.core().interrupt().config_changed().unwrap();
    assert_eq!(guest.sent(), [true, false]);
    guest.mask(1, true);
    guest.use_buffer();
    let saved = serde_json::to_string(&DeviceState::save(&*guest.device).unwrap()).unwrap();
    let saved: DeviceState = serde_json::from_str(&saved).unwrap();

    let restored = Guest::new();
    saved.prepare(&*restored.device).unwrap();
    restored.device.pci().unwrap().route();
    assert_eq!(lock(&restored.routes.table).clone(), BTreeMap::from([(GSI, MESSAGE)]), "the other is masked");
    saved.restore(&*restored.device).unwrap();
    assert_eq!((restored.status(), restored.pending()), (15, 2));
    assert_eq!(restored.sent(), [true, false], "an interrupt too many does no harm");
    restored.mask(1, false);
    assert_eq!(restored.sent(), [false, true]);
    assert_eq!((restored.config(4, 2), restored.config(0x42, 2)), (6, 0x8001));
}

#[test]
fn a_state_of_another_function_is_refused() {
    let guest = Guest::new();
    let saved = serde_json::to_value(DeviceState::save(&*guest.device).unwrap()).unwrap();
    let refused = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut state = saved.clone();
        change(&mut state);
        let state = serde_json::from_value::<DeviceState>(state);
        state.map_or(true, |state| state.prepare(&*Guest::new().device).is_err())
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|state| drop(state.as_object_mut().unwrap().remove("pci"))));
    let (device, memory) = (Rng::new().unwrap(), memory::lay_out(&[(0, 0x10000)], 0).unwrap());
    let mmio =
        MmioTransport::new(Box::new(device), memory, Resources { address: 0xd000_0000, gsi: 5 }).unwrap();
    assert!(serde_json::from_value::<DeviceState>(saved.clone()).unwrap().prepare(&mmio).is_err());
    assert!(refused(&|state| state["pci"]["messages"]["table"] = serde_json::json!([])));
    assert!(refused(&|state| state["pci"]["messages"]["queues"] = serde_json::json!([0, 0])));
    // What no driver can leave.
    assert!(refused(&|state| state["pci"]["config"]["command"] = 0xffff.into()));
    assert!(refused(&|state| state["pci"]["config"]["msix"] = 0x8002.into()));
    assert!(refused(&|state| state["pci"]["messages"]["config"] = 2.into()));
    assert!(refused(&|state| state["pci"]["messages"]["queues"][0] = 9.into()));
    assert!(refused(&|state| state["pci"]["messages"]["table"][0]["words"][0] = 0xfee0_1001u32.into()));
    assert!(refused(&|state| state["pci"]["messages"]["table"][1]["words"][3] = 3.into()));
}
