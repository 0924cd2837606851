use std::{
    io,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use serde_json::{Value, json};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::{
    jail::ThreadRole,
    memory,
    snapshot::DeviceState,
    virtio::{
        Activation,
        device_threads::Job,
        event_loop::{EventError, EventHandler, Events},
        transport::registers::{VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1, status},
    },
};

/// What the fake device has recorded.
#[derive(Default)]
struct Log {
    activations: Mutex<Vec<Activation>>,
    ended: AtomicU32,
}

struct Fake {
    log: Arc<Log>,
    fails: bool,
    threads: usize,
}

/// Handles no events.
struct Idle;

impl EventHandler for Idle {
    type Error = EventError;

    fn serve_queues(&mut self) -> Result<bool, EventError> {
        Ok(false)
    }
}

const FAKE_FEATURES: u64 = VIRTIO_F_EVENT_IDX | 1;

impl VirtioDevice for Fake {
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Rng
    }
    fn threads(&self) -> usize {
        self.threads
    }
    fn device_type(&self) -> u32 {
        42
    }
    fn features(&self) -> u64 {
        FAKE_FEATURES
    }
    fn queue_sizes(&self) -> &[u16] {
        &[16, 8]
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        const CONFIG: [u8; 6] = [1, 2, 3, 4, 5, 6];
        for (at, byte) in (offset as usize..).zip(data) {
            *byte = CONFIG.get(at).copied().unwrap_or(*byte);
        }
    }
    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        self.log.activations.lock().unwrap().push(activation);
        if self.fails {
            return Err(io::ErrorKind::Other.into());
        }
        let log = self.log.clone();
        Ok(vec![Box::new(move |stop| {
            Events::new(stop).unwrap().run(&mut Idle).unwrap();
            log.ended.fetch_add(1, Ordering::SeqCst);
        })])
    }
}

/// Restores a device to a new transport, as a VM does.
fn restored_from(saved: &DeviceState, transport: &MmioTransport) -> io::Result<()> {
    saved.prepare(transport)?;
    saved.restore(transport)
}

/// A driver of the fake device.
struct Driver {
    transport: MmioTransport,
    line: EventFd,
    log: Arc<Log>,
}

impl Driver {
    fn new() -> Self {
        Self::with(false)
    }

    fn with(fails: bool) -> Self {
        Self::of(memory::lay_out(&[(0, 0x10000)], 0).unwrap(), fails)
    }

    fn of(memory: GuestMemory, fails: bool) -> Self {
        Self::of_device(memory, fails, 1)
    }

    fn of_device(memory: GuestMemory, fails: bool, threads: usize) -> Self {
        let log = Arc::new(Log::default());
        let device = Box::new(Fake { log: log.clone(), fails, threads });
        let resources = Resources { address: 0xd000_0000, gsi: 5 };
        let transport = MmioTransport::new(device, memory, resources).unwrap();
        let line = transport.irqfds()[0].1.try_clone().unwrap();
        Self { transport, line, log }
    }

    fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.transport.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    fn accept(&self, features: u64) {
        self.write(reg::STATUS, 1);
        self.write(reg::STATUS, 3);
        for sel in [0, 1] {
            self.write(reg::DRIVER_FEATURES_SEL, sel);
            self.write(reg::DRIVER_FEATURES, (features >> (32 * sel)) as u32);
        }
        self.write(reg::STATUS, 0xb);
    }

    fn describe(&self, queue: u32, size: u32, [desc, driver, device]: [u32; 3]) {
        self.write(reg::QUEUE_SEL, queue);
        self.write(reg::QUEUE_SIZE, size);
        self.write(reg::QUEUE_DESC_LOW, desc);
        self.write(reg::QUEUE_DRIVER_LOW, driver);
        self.write(reg::QUEUE_DEVICE_LOW, device);
        self.write(reg::QUEUE_READY, 1);
    }

    fn needs_reset(&self) -> bool {
        self.read(reg::STATUS) & status::NEEDS_RESET != 0
    }
}

const GOOD: [u32; 3] = [0x1000, 0x2000, 0x3000];

#[test]
fn it_says_what_it_is() {
    let driver = Driver::new();
    assert_eq!(driver.read(reg::MAGIC), 0x7472_6976);
    assert_eq!(driver.read(reg::VERSION), 2);
    assert_eq!(driver.read(reg::DEVICE_ID), 42);
    assert_eq!(driver.read(reg::DEVICE_FEATURES), FAKE_FEATURES as u32);
    driver.write(reg::DEVICE_FEATURES_SEL, 1);
    assert_eq!(driver.read(reg::DEVICE_FEATURES), 1);
    driver.write(reg::DEVICE_FEATURES_SEL, 2);
    assert_eq!(driver.read(reg::DEVICE_FEATURES), 0);
    assert_eq!(driver.read(reg::QUEUE_SIZE_MAX), 16);
    driver.write(reg::QUEUE_SEL, 2);
    assert_eq!(driver.read(reg::QUEUE_SIZE_MAX), 0);
    assert_eq!(driver.read(reg::SHM_LEN_LOW), u32::MAX);
}

#[test]
fn configuration_space_is_read_in_any_size_and_zero_beyond_its_end() {
    let driver = Driver::new();
    let mut data = [9; 8];
    driver.transport.read(reg::CONFIG + 2, &mut data);
    assert_eq!(data, [3, 4, 5, 6, 0, 0, 0, 0]);
    let mut byte = [9];
    driver.transport.read(reg::CONFIG + 5, &mut byte);
    assert_eq!(byte, [6]);
}

#[test]
fn a_well_behaved_driver_gets_its_device_started() {
    let driver = Driver::new();
    driver.accept(VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX);
    assert_eq!(driver.read(reg::STATUS), 0xb);
    driver.describe(0, 8, GOOD);
    assert_eq!(driver.read(reg::QUEUE_READY), 1);
    driver.write(reg::STATUS, 0xf);
    assert_eq!(driver.read(reg::STATUS), 0xf);

    let activations = driver.log.activations.lock().unwrap();
    let [activation] = activations.as_slice() else { panic!("started once") };
    assert_eq!(activation.features, VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX);
    let [first, second] = activation.queues.as_slice() else { panic!("all queues") };
    assert_eq!((first.queue.size(), first.queue.desc_table(), first.queue.used_ring()), (8, 0x1000, 0x3000));
    assert!(first.queue.ready() && first.queue.event_idx_enabled());
    assert!(!second.queue.ready());

    driver.write(reg::QUEUE_NOTIFY, 0);
    assert_eq!(first.kick.read().unwrap(), 1);
    driver.write(reg::QUEUE_NOTIFY, 77);
    activation.interrupt.used(0).unwrap();
    assert_eq!((driver.line.read().unwrap(), driver.read(reg::INTERRUPT_STATUS)), (1, 1));
    driver.write(reg::INTERRUPT_ACK, 1);
    assert_eq!(driver.read(reg::INTERRUPT_STATUS), 0);
}

#[test]
fn features_that_were_not_offered_are_not_ok() {
    for features in [VIRTIO_F_VERSION_1 | 2, FAKE_FEATURES] {
        let driver = Driver::new();
        driver.accept(features);
        assert_eq!(driver.read(reg::STATUS), 3, "{features:#x}");
        driver.write(reg::STATUS, 7);
        assert!(driver.needs_reset());
        assert!(driver.log.activations.lock().unwrap().is_empty());
    }
}

#[test]
fn a_queue_that_cannot_be_is_refused() {
    let cases = [
        (0, GOOD),
        (5, GOOD),
        (32, GOOD),
        (0x1_0008, GOOD),
        (8, [0x1008, 0x2000, 0x3000]),
        (8, [0x1000, 0x2001, 0x3000]),
        (8, [0x1000, 0x2000, 0x3002]),
        (8, [0xffc0, 0x2000, 0x3000]),
        (8, [0x1000, 0xfff0, 0x3000]),
        (8, [0x1000, 0x2000, 0xd000_0000]),
    ];
    for (size, places) in cases {
        let driver = Driver::new();
        driver.accept(VIRTIO_F_VERSION_1);
        driver.describe(0, size, places);
        assert_eq!(driver.read(reg::QUEUE_READY), 0, "{size} {places:x?}");
        assert!(driver.needs_reset(), "{size} {places:x?}");
    }
}

#[test]
fn a_queue_may_end_where_memory_ends() {
    let driver = Driver::new();
    driver.accept(VIRTIO_F_VERSION_1);
    driver.describe(0, 16, [0xff00, 0x2000, 0x3000]);
    assert_eq!(driver.read(reg::QUEUE_READY), 1);
}

#[test]
fn addresses_have_two_halves() {
    let driver = Driver::new();
    driver.accept(VIRTIO_F_VERSION_1);
    driver.write(reg::QUEUE_DESC_HIGH, 1);
    driver.describe(0, 8, GOOD);
    assert!(driver.needs_reset(), "4 GiB + 0x1000 is not memory");
}

#[test]
fn a_queue_is_described_at_its_time_only() {
    let early = Driver::new();
    early.write(reg::QUEUE_SIZE, 8);
    assert!(early.needs_reset());
    assert!(early.line.read().is_err(), "no interrupt before DRIVER_OK");

    let late = Driver::new();
    late.accept(VIRTIO_F_VERSION_1);
    late.describe(0, 8, GOOD);
    late.write(reg::STATUS, 0xf);
    late.write(reg::QUEUE_DESC_LOW, 0x4000);
    assert!(late.needs_reset());
    assert_eq!((late.line.read().unwrap(), late.read(reg::INTERRUPT_STATUS)), (1, 2));

    let ready = Driver::new();
    ready.accept(VIRTIO_F_VERSION_1);
    ready.describe(0, 8, GOOD);
    ready.write(reg::QUEUE_SIZE, 16);
    assert!(ready.needs_reset());
}

#[test]
fn features_and_status_bits_are_not_taken_back() {
    let driver = Driver::new();
    driver.accept(VIRTIO_F_VERSION_1);
    driver.write(reg::DRIVER_FEATURES, 0);
    assert!(driver.needs_reset());

    let driver = Driver::new();
    driver.accept(VIRTIO_F_VERSION_1);
    driver.write(reg::STATUS, 3);
    assert!(driver.needs_reset());
}

#[test]
fn a_reset_makes_all_new() {
    let driver = Driver::new();
    driver.accept(VIRTIO_F_VERSION_1);
    driver.describe(0, 8, GOOD);
    driver.write(reg::STATUS, 0xf);
    let ended = || driver.log.ended.load(Ordering::SeqCst);
    assert_eq!(ended(), 0);
    driver.write(reg::QUEUE_SIZE, 8);
    assert!(driver.needs_reset());
    driver.write(reg::STATUS, 0);
    assert_eq!((driver.read(reg::STATUS), driver.read(reg::INTERRUPT_STATUS)), (0, 0));
    assert_eq!(driver.read(reg::QUEUE_READY), 0);
    assert_eq!(ended(), 1, "its job has ended");

    driver.accept(VIRTIO_F_VERSION_1);
    driver.describe(1, 8, GOOD);
    driver.write(reg::STATUS, 0xf);
    let activations = driver.log.activations.lock().unwrap();
    let [first, second] = &activations[..] else { panic!("two starts, {} activations", activations.len()) };
    assert!(Arc::ptr_eq(&first.log, &second.log), "a guest renews its share of the log by a reset");
}

#[test]
fn a_device_that_cannot_start_needs_a_reset() {
    let driver = Driver::with(true);
    driver.accept(VIRTIO_F_VERSION_1);
    driver.write(reg::STATUS, 0xf);
    assert!(driver.needs_reset());
}

#[test]
fn odd_accesses_change_nothing() {
    let driver = Driver::new();
    driver.transport.write(reg::STATUS, &[1]);
    driver.transport.write(reg::STATUS + 1, &[1, 0, 0, 0]);
    driver.transport.write(0x1000, &[1, 0, 0, 0]);
    assert_eq!(driver.read(reg::STATUS), 0);
    let mut data = [0xff];
    driver.transport.read(reg::MAGIC, &mut data);
    assert_eq!(data, [0xff]);
}

/// A driver whose device is active with one queue, and their memory.
fn at_work() -> (Driver, GuestMemory) {
    at_work_with(1)
}

fn at_work_with(threads: usize) -> (Driver, GuestMemory) {
    let memory = memory::lay_out(&[(0, 0x10000)], 0).unwrap();
    let driver = Driver::of_device(memory.clone(), false, threads);
    driver.accept(FAKE_FEATURES | VIRTIO_F_VERSION_1);
    driver.describe(0, 16, GOOD);
    driver.write(reg::STATUS, 0xf);
    (driver, memory)
}

#[test]
fn a_device_goes_on_behind_what_was_used() {
    let (driver, memory) = at_work();
    // Five chains are available, of which three are used.
    memory.write_obj(5u16.to_le(), GuestAddress(0x2002)).unwrap();
    memory.write_obj(3u16.to_le(), GuestAddress(0x3002)).unwrap();
    let saved = DeviceState::save(&driver.transport).unwrap();
    assert_eq!(driver.log.ended.load(Ordering::SeqCst), 1, "it stopped");

    // The state goes through the format of the file.
    let saved: DeviceState = serde_json::from_str(&serde_json::to_string(&saved).unwrap()).unwrap();
    let restored = Driver::of(memory, false);
    restored_from(&saved, &restored.transport).unwrap();
    assert_eq!(restored.read(reg::STATUS), 0xf);
    assert_eq!(restored.read(reg::QUEUE_READY), 1);
    assert!(restored.line.read().is_err(), "there was nothing to tell");
    let activations = restored.log.activations.lock().unwrap();
    let [activation] = activations.as_slice() else { panic!("{} activations", activations.len()) };
    assert_eq!(activation.features, FAKE_FEATURES | VIRTIO_F_VERSION_1);
    let [first, second] = activation.queues.as_slice() else { panic!("two queues") };
    assert_eq!((first.queue.next_avail(), first.queue.next_used()), (3, 3));
    assert!(!second.queue.ready());
}

#[test]
fn a_device_that_uses_chains_in_any_order_is_saved_when_it_has_used_all() {
    for (used, is_saved) in [(5u16, true), (3, false)] {
        let (driver, memory) = at_work_with(2);
        memory.write_obj(5u16.to_le(), GuestAddress(0x2002)).unwrap();
        memory.write_obj(used.to_le(), GuestAddress(0x3002)).unwrap();
        assert_eq!(DeviceState::save(&driver.transport).is_ok(), is_saved, "{used}");
    }
}

#[test]
fn an_interrupt_that_was_not_acknowledged_comes_again() {
    let (driver, memory) = at_work();
    driver.transport.core().interrupt().used(0).unwrap();
    let saved = DeviceState::save(&driver.transport).unwrap();
    let restored = Driver::of(memory, false);
    restored_from(&saved, &restored.transport).unwrap();
    assert_eq!(restored.line.read().unwrap(), 1);
    assert_eq!(restored.read(reg::INTERRUPT_STATUS), 1);
}

#[test]
fn an_interrupt_of_a_device_that_goes_on_is_not_lost() {
    let (driver, memory) = at_work();
    let saved = DeviceState::save(&driver.transport).unwrap();
    let restored = Driver::of(memory, false);
    // As a device does that has work before all of its state is restored.
    restored.transport.core().interrupt().used(0).unwrap();
    restored_from(&saved, &restored.transport).unwrap();
    assert_eq!((restored.line.read().unwrap(), restored.read(reg::INTERRUPT_STATUS)), (1, 1));
}

#[test]
fn a_device_that_had_no_driver_yet_has_none_now() {
    let driver = Driver::new();
    let restored = Driver::new();
    DeviceState::save(&driver.transport).unwrap().restore(&restored.transport).unwrap();
    assert_eq!(restored.read(reg::STATUS), 0);
    assert!(restored.log.activations.lock().unwrap().is_empty());
}

#[test]
fn a_device_does_not_become_another() {
    let (driver, memory) = at_work();
    let saved = DeviceState::save(&driver.transport).unwrap();
    let changed = |pointer: &str, value: Value| {
        let mut state = serde_json::to_value(&saved).unwrap();
        *state.pointer_mut(pointer).unwrap() = value;
        serde_json::from_value::<DeviceState>(state).unwrap()
    };
    let features = changed("/features", json!(FAKE_FEATURES ^ 1));
    let kind = changed("/device_type", json!(4));
    let queues = changed("/registers/queues", json!([]));
    for other in [features, kind, queues] {
        let restored = Driver::of(memory.clone(), false);
        assert!(restored_from(&other, &restored.transport).is_err());
        assert_eq!(restored.read(reg::STATUS), 0);
    }
}

#[test]
fn a_device_that_was_taken_away_is_served_until_its_driver_resets_it() {
    let (driver, _) = at_work();
    driver.transport.core().hide();
    // Whoever looks for a device finds none.
    assert_eq!(driver.read(reg::DEVICE_ID), 0);
    assert!(driver.log.ended.load(Ordering::SeqCst) == 0 && !driver.transport.core().has_no_driver());
    driver.write(reg::STATUS, 0);
    driver.write(reg::STATUS, 1);
    assert!(driver.log.ended.load(Ordering::SeqCst) == 1 && driver.transport.core().has_no_driver());
    driver.accept(FAKE_FEATURES | VIRTIO_F_VERSION_1);
    driver.describe(0, 16, GOOD);
    assert_eq!(driver.read(reg::STATUS) & status::FEATURES_OK, 0);
    driver.write(reg::STATUS, 0xf);
    assert_eq!(driver.log.activations.lock().unwrap().len(), 1);
    assert!(driver.needs_reset());
}

#[test]
fn a_driver_that_is_about_to_have_a_device_which_is_taken_away_is_served_too() {
    let driver = Driver::of(memory::lay_out(&[(0, 0x10000)], 0).unwrap(), false);
    driver.accept(FAKE_FEATURES | VIRTIO_F_VERSION_1);
    driver.transport.core().hide();
    driver.describe(0, 16, GOOD);
    driver.write(reg::STATUS, 0xf);
    assert_eq!(driver.log.activations.lock().unwrap().len(), 1);
    assert!(!driver.needs_reset() && !driver.transport.core().has_no_driver());
    driver.write(reg::STATUS, 0);
    assert!(driver.log.ended.load(Ordering::SeqCst) == 1 && driver.transport.core().has_no_driver());
}
