//! MSI-X (PCI Local Bus Specification 3.0, 6.8.2): the interrupt messages of a function, one for each queue and one for
//! changes of the configuration.
//!
//! Each entry of the table has an irqfd. KVM has the message that the irqfd sends, so an interrupt is a write to the
//! eventfd, and no exit of the guest. The message goes to KVM when the driver unmasks the entry. An interrupt of an
//! entry that is masked is pending until then.

use std::{
    io, mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::lock;

/// The value of a vector register whose source sends no message (virtio 1.3, 4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;
/// The bytes of an entry of the table.
pub(super) const ENTRY_SIZE: u64 = 16;

/// Bit 0 of the last word of an entry.
const MASKED: u32 = 1;
/// Messages go to these addresses (Intel SDM 3, 11.11.1): bits 19 to 12 are the destination.
const ADDRESS_BASE: u32 = 0xfee0_0000;
const ADDRESS_MASK: u32 = 0xfff0_0000;
/// The bits of the data that may be set: the vector, and the lower bit of the delivery mode, which is fixed (0) or
/// lowest priority (1). Other modes are for hardware and firmware, and a message is edge-triggered.
const DATA_MASK: u32 = 0x1ff;

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The low half of the address. The high half is 0.
    pub address: u32,
    pub data: u32,
}

/// Says what an irqfd sends.
pub trait Router: Send + Sync {
    /// From now on, the irqfd of the interrupt `gsi` sends this message.
    fn route(&self, gsi: u32, message: Message) -> io::Result<()>;
}

/// The irqfd of an entry.
pub struct Line {
    /// Its number, which no other line of the VM has.
    pub gsi: u32,
    pub event: EventFd,
}

/// What an interrupt is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::virtio) enum Source {
    Config,
    /// Used buffers of the queue with this index.
    Queue(usize),
}

/// The messages of a function.
pub struct Messages {
    entries: Vec<Entry>,
    /// The vector registers: which entry a source uses.
    config: AtomicU16,
    queues: Vec<AtomicU16>,
    /// MSI-X is enabled.
    enabled: AtomicBool,
    router: Arc<dyn Router>,
}

struct Entry {
    line: Line,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    words: Words,
    /// The function sends no message at all: MSI-X is not enabled, the function is masked, or is not bus master.
    is_held: bool,
    is_pending: bool,
    /// A message was sent, now or before the state was saved.
    was_sent: bool,
    /// The message that KVM has for the irqfd.
    routed: Option<Message>,
}

/// An entry as the driver sees it: the low and the high half of the address, the data, and the mask bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Words([u32; 4]);

/// Each entry is masked at first.
impl Default for Words {
    fn default() -> Self {
        Self([0, 0, 0, MASKED])
    }
}

impl Words {
    fn is_masked(self) -> bool {
        self.0[3] & MASKED != 0
    }

    /// The message, if it is one that a device may send.
    fn message(self) -> Option<Message> {
        let [address, high, data, _] = self.0;
        let is_legal = address & ADDRESS_MASK == ADDRESS_BASE && high == 0 && data & !DATA_MASK == 0;
        is_legal.then_some(Message { address, data })
    }
}

/// The state for [`Messages::restore`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedMessages {
    table: Vec<SavedEntry>,
    config: u16,
    queues: Vec<u16>,
}

/// An entry: what the driver has written, whether its message is pending, and whether one was sent.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct SavedEntry(Words, bool, bool);

impl Messages {
    /// The messages of a function with `queues` queues: an entry for each line.
    pub(super) fn new(lines: Vec<Line>, queues: usize, router: Arc<dyn Router>) -> Self {
        let entry = |line| Entry { line, state: Mutex::new(State { is_held: true, ..State::default() }) };
        Self {
            entries: lines.into_iter().map(entry).collect(),
            config: AtomicU16::new(NO_VECTOR),
            queues: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            enabled: AtomicBool::new(false),
            router,
        }
    }

    /// The irqfds.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &Line> {
        self.entries.iter().map(|entry| &entry.line)
    }

    /// How many entries the table has.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the driver has enabled MSI-X.
    pub(in crate::virtio) fn are_enabled(&self) -> bool {
        self.enabled.load(Ordering::SeqCst)
    }

    /// Sends the message of `source`, if the driver has given it one.
    pub(in crate::virtio) fn send(&self, source: Source) -> io::Result<()> {
        let vector = self.register(source).map_or(NO_VECTOR, |register| register.load(Ordering::SeqCst));
        match self.entries.get(usize::from(vector)) {
            Some(entry) => entry.send(),
            None => Ok(()),
        }
    }

    /// Sends each message once that was sent before.
    pub(in crate::virtio) fn send_all(&self) -> io::Result<()> {
        if !self.are_enabled() {
            return Ok(());
        }
        let mut sent = self.entries.iter().filter(|entry| lock(&entry.state).was_sent);
        sent.try_for_each(Entry::send)
    }

    /// The device is reset: no source has a message, and nothing is pending.
    pub(in crate::virtio) fn forget(&self) {
        self.config.store(NO_VECTOR, Ordering::SeqCst);
        self.queues.iter().for_each(|queue| queue.store(NO_VECTOR, Ordering::SeqCst));
        self.entries.iter().for_each(|entry| lock(&entry.state).is_pending = false);
    }

    /// Whether MSI-X is enabled, and whether messages are sent at all.
    pub(super) fn set_gate(&self, enabled: bool, open: bool) {
        self.enabled.store(enabled, Ordering::SeqCst);
        for entry in &self.entries {
            let mut state = lock(&entry.state);
            state.is_held = !open;
            if !enabled {
                state.is_pending = false;
            }
            entry.settle(&mut state, &*self.router);
        }
    }

    /// Reads the vector register of a source.
    pub(super) fn vector(&self, source: Source) -> u16 {
        self.register(source).map_or(NO_VECTOR, |register| register.load(Ordering::SeqCst))
    }

    /// Writes it. A vector that the table does not have becomes [`NO_VECTOR`] (virtio 1.3, 4.1.5.1.2.1).
    pub(super) fn set_vector(&self, source: Source, vector: u16) {
        let vector = if usize::from(vector) < self.len() { vector } else { NO_VECTOR };
        if let Some(register) = self.register(source) {
            register.store(vector, Ordering::SeqCst);
        }
    }

    fn register(&self, source: Source) -> Option<&AtomicU16> {
        match source {
            Source::Config => Some(&self.config),
            Source::Queue(index) => self.queues.get(index),
        }
    }

    /// Reads the table. An access has 4 or 8 bytes and is aligned (PCI 3.0, 6.8.2). Another one reads zeros.
    pub(super) fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Some((entry, word)) = self.place(offset, data.len()) else { return };
        let words = lock(&entry.state).words.0;
        for (bytes, word) in data.chunks_exact_mut(4).zip(words.iter().skip(word)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Writes to the table. An access as [`Messages::read_table`] does not allow is ignored.
    pub(super) fn write_table(&self, offset: u64, data: &[u8]) {
        let Some((entry, word)) = self.place(offset, data.len()) else { return };
        let state = &mut *lock(&entry.state);
        for (bytes, (index, word)) in
            data.chunks_exact(4).zip(state.words.0.iter_mut().enumerate().skip(word))
        {
            let value = bytes.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte));
            // All other bits of the last word are reserved, and so are the lowest two of the address.
            *word = match index {
                0 => value & !3,
                3 => value & MASKED,
                _ => value,
            };
        }
        entry.settle(state, &*self.router);
    }

    /// Finds the entry and the word in it.
    fn place(&self, offset: u64, len: usize) -> Option<(&Entry, usize)> {
        if !matches!(len, 4 | 8) || !offset.is_multiple_of(len as u64) {
            return None;
        }
        let entry = self.entries.get((offset / ENTRY_SIZE) as usize)?;
        Some((entry, (offset % ENTRY_SIZE / 4) as usize))
    }

    /// Reads the array of pending bits.
    pub(super) fn read_pending(&self, offset: u64, data: &mut [u8]) {
        let byte = |index: u64| {
            let first = (index as usize).saturating_mul(8);
            let entries = self.entries.iter().skip(first).take(8);
            let bits = entries.zip(0u8..).map(|(entry, bit)| u8::from(lock(&entry.state).is_pending) << bit);
            bits.fold(0, |sum, bit| sum | bit)
        };
        data.iter_mut().zip(offset..).for_each(|(value, index)| *value = byte(index));
    }

    /// The state for [`Messages::restore`].
    pub(super) fn save(&self) -> SavedMessages {
        let entry = |entry: &Entry| {
            let state = lock(&entry.state);
            SavedEntry(state.words, state.is_pending, state.was_sent)
        };
        SavedMessages {
            table: self.entries.iter().map(entry).collect(),
            config: self.vector(Source::Config),
            queues: (0..self.queues.len()).map(|index| self.vector(Source::Queue(index))).collect(),
        }
    }

    /// Restores the state of a function that sends no messages yet.
    pub(super) fn restore(&self, saved: &SavedMessages) -> io::Result<()> {
        if saved.table.len() != self.len() || saved.queues.len() != self.queues.len() {
            return Err(io::Error::other("it has another number of interrupts"));
        }
        for (entry, SavedEntry(words, is_pending, was_sent)) in self.entries.iter().zip(&saved.table) {
            let [address, high, data, mask] = words.0;
            let mut state = lock(&entry.state);
            state.words = Words([address & !3, high, data, mask & MASKED]);
            state.is_pending = *is_pending;
            state.was_sent = *was_sent;
        }
        self.set_vector(Source::Config, saved.config);
        let queues = (0..).map(Source::Queue).zip(&saved.queues);
        queues.for_each(|(source, vector)| self.set_vector(source, *vector));
        Ok(())
    }
}

impl Entry {
    fn send(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        if state.can_send() {
            state.was_sent = true;
            return self.line.event.write(1);
        }
        state.is_pending = true;
        Ok(())
    }

    /// After a change: tells KVM of a new message, and sends it if it is pending.
    fn settle(&self, state: &mut State, router: &dyn Router) {
        if state.is_held || state.words.is_masked() {
            return;
        }
        // What is not legal, or what KVM does not take, is never sent. It is the driver's loss.
        let Some(message) = state.words.message() else { return };
        if state.routed != Some(message) {
            state.routed = router.route(self.line.gsi, message).is_ok().then_some(message);
        }
        if state.can_send() && mem::take(&mut state.is_pending) {
            state.was_sent = true;
            // The eventfd belongs to the VMM. If the write fails, there is no other way to reach the driver.
            let _ = self.line.event.write(1);
        }
    }
}

impl State {
    fn can_send(&self) -> bool {
        !self.is_held
            && !self.words.is_masked()
            && self.routed.is_some()
            && self.routed == self.words.message()
    }
}
