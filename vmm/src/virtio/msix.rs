//! MSI-X (PCI Local Bus Specification 3.0, 6.8.2): the interrupt messages of a function, one for each queue and one for
//! changes of the configuration.
//!
//! Each entry of the table has an irqfd. KVM has the message that the irqfd sends, so an interrupt is a write to the
//! eventfd, and no exit of the guest. The message goes to KVM when the driver unmasks the entry. An interrupt of an
//! entry that is masked, or whose message KVM does not have yet, is pending until then.
//!
//! The thread of a vCPU may wait for KVM. It holds no lock then that other threads need: meanwhile the entry has no
//! routed message. Each change of an entry ends with an attempt to send what is pending, so no interrupt is lost.

use std::{
    io, slice,
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

/// The last word of an entry, and its only bit that is not reserved.
const CONTROL: usize = 3;
const MASKED: u32 = 1;

/// The address of a message (Intel SDM 3, 11.11.1): these bits are fixed, and the others are below.
const ADDRESS_BASE: u32 = 0xfee0_0000;
const DESTINATION: u32 = 0xff << 12;
const REDIRECTION_HINT: u32 = 1 << 3;
const LOGICAL: u32 = 1 << 2;

/// The data of a message (Intel SDM 3, 11.11.2): the vector, and a delivery mode that is fixed (0) or lowest priority.
/// Other modes are for hardware and firmware, and a message is edge-triggered.
const VECTOR: u32 = 0xff;
const LOWEST_PRIORITY: u32 = 1 << 8;
/// Those before are illegal for interrupts (Intel SDM 3, 11.5.2).
const FIRST_VECTOR: u32 = 16;

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The low half of the address. The high half is 0.
    pub address: u32,
    pub data: u32,
}

/// Says what an irqfd sends.
pub trait Router: Send + Sync {
    /// From now on, the irqfds of these interrupts (GSIs) send these messages. If `is_gone` is set, the numbers may be
    /// those of another function already, and this fails. If it fails, nothing is changed. The thread of a vCPU may
    /// have to wait here.
    fn route(&self, messages: &[(u32, Message)], is_gone: &AtomicBool) -> io::Result<()>;
}

/// The interrupt of a device, or one of them.
pub struct Irqfd {
    /// Its number (GSI), which no other irqfd of the VM has.
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
    /// The function was disconnected.
    is_gone: AtomicBool,
    /// Held while messages go to KVM. Only vCPUs wait for it.
    routing: Mutex<()>,
    router: Arc<dyn Router>,
}

struct Entry {
    irqfd: Irqfd,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    words: Words,
    /// MSI-X is enabled, the function is not masked, and it is bus master.
    function_sends: bool,
    is_pending: bool,
    /// A message was sent since the last reset of the device, perhaps before the state was saved.
    was_sent: bool,
    /// The message that KVM has for the irqfd. Also None while it gets another one.
    routed: Option<Message>,
}

/// An entry as the driver sees it: the low and the high half of the address, the data, and the mask bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Words([u32; 4]);

/// Each entry is masked at first.
impl Default for Words {
    fn default() -> Self {
        Self([0, 0, 0, MASKED])
    }
}

impl Words {
    /// Writes a word without its reserved bits. The lowest two of the address are reserved too.
    fn set(&mut self, index: usize, value: u32) {
        if let Some(word) = self.0.get_mut(index) {
            *word = match index {
                0 => value & !3,
                CONTROL => value & MASKED,
                _ => value,
            };
        }
    }

    /// The message, if the entry is not masked, and the message is one that a device may send.
    fn message(self) -> Option<Message> {
        let [address, high, data, control] = self.0;
        let goes_to_processors =
            address & !(DESTINATION | REDIRECTION_HINT | LOGICAL) == ADDRESS_BASE && high == 0;
        let is_interrupt = data & !(VECTOR | LOWEST_PRIORITY) == 0 && data & VECTOR >= FIRST_VECTOR;
        // One of all processors, by their physical IDs: not defined. KVM would write a line to the host's log for each.
        let is_one_of_all = address & (DESTINATION | LOGICAL) == DESTINATION
            && (address & REDIRECTION_HINT != 0 || data & LOWEST_PRIORITY != 0);
        let is_legal = goes_to_processors && is_interrupt && !is_one_of_all;
        (control & MASKED == 0 && is_legal).then_some(Message { address, data })
    }
}

/// The state for [`Messages::restore`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedMessages {
    table: Vec<SavedEntry>,
    config: u16,
    queues: Vec<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedEntry {
    /// What the driver has written.
    words: Words,
    is_pending: bool,
    was_sent: bool,
}

impl Messages {
    /// The messages of a function with `queues` queues: an entry for each irqfd.
    pub(crate) fn new(irqfds: Vec<Irqfd>, queues: usize, router: Arc<dyn Router>) -> Self {
        let entry = |irqfd| Entry { irqfd, state: Mutex::default() };
        Self {
            entries: irqfds.into_iter().map(entry).collect(),
            config: AtomicU16::new(NO_VECTOR),
            queues: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            enabled: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            routing: Mutex::default(),
            router,
        }
    }

    pub(crate) fn irqfds(&self) -> impl Iterator<Item = &Irqfd> {
        self.entries.iter().map(|entry| &entry.irqfd)
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
        match self.entries.get(usize::from(self.vector(source))) {
            Some(entry) => entry.send(),
            None => Ok(()),
        }
    }

    /// Sends once more each message that was ever sent.
    pub(in crate::virtio) fn send_again(&self) -> io::Result<()> {
        if !self.are_enabled() {
            return Ok(());
        }
        let mut sent = self.entries.iter().filter(|entry| lock(&entry.state).was_sent);
        sent.try_for_each(Entry::send)
    }

    /// The device is reset: no source has a message, nothing is pending, and nothing need be sent once more.
    pub(in crate::virtio) fn reset(&self) {
        self.config.store(NO_VECTOR, Ordering::SeqCst);
        self.queues.iter().for_each(|queue| queue.store(NO_VECTOR, Ordering::SeqCst));
        for entry in &self.entries {
            let mut state = lock(&entry.state);
            (state.is_pending, state.was_sent) = (false, false);
        }
    }

    /// The driver has changed whether MSI-X is enabled, and whether the function sends messages at all.
    /// [`Messages::update`] has to follow.
    pub(crate) fn set_control(&self, enabled: bool, function_sends: bool) {
        self.enabled.store(enabled, Ordering::SeqCst);
        for entry in &self.entries {
            entry.change(|state| {
                state.function_sends = function_sends;
                state.is_pending &= enabled;
            });
        }
    }

    /// Tells KVM of all messages that it does not have yet.
    pub(super) fn update(&self) {
        self.route(&self.entries);
    }

    fn route(&self, entries: &[Entry]) {
        if entries.iter().all(|entry| lock(&entry.state).unrouted().is_none()) {
            return;
        }
        let _turn = lock(&self.routing);
        let messages: Vec<_> = entries.iter().filter_map(Entry::take_unrouted).collect();
        // What KVM does not take is never sent. It is the driver's loss.
        if !messages.is_empty() && self.router.route(&messages, &self.is_gone).is_ok() {
            self.set_routed(&messages);
        }
    }

    /// The messages that KVM does not have yet, with the interrupts (GSIs) that send them. The caller tells KVM.
    pub(crate) fn take_unrouted(&self) -> Vec<(u32, Message)> {
        self.entries.iter().filter_map(Entry::take_unrouted).collect()
    }

    /// KVM has these messages, some of which may be those of other functions.
    pub(crate) fn set_routed(&self, messages: &[(u32, Message)]) {
        for (gsi, message) in messages {
            let mut entries = self.entries.iter();
            if let Some(entry) = entries.find(|entry| entry.irqfd.gsi == *gsi) {
                entry.change(|state| state.routed = Some(*message));
            }
        }
    }

    /// From now on, KVM gets no message. Whoever gets the interrupts next is told of its own. Waits for nobody.
    pub(crate) fn disconnect(&self) {
        self.is_gone.store(true, Ordering::SeqCst);
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

    /// Writes to the table. An access as [`Messages::read_table`] does not allow is ignored. A driver masks an entry
    /// before it changes the message (PCI 3.0, 6.8.2), so KVM is told when the mask is written.
    pub(crate) fn write_table(&self, offset: u64, data: &[u8]) {
        let Some((entry, first)) = self.place(offset, data.len()) else { return };
        entry.change(|state| {
            for (index, bytes) in (first..).zip(data.as_chunks().0) {
                state.words.set(index, u32::from_le_bytes(*bytes));
            }
        });
        if first + data.len() / 4 > CONTROL {
            self.route(slice::from_ref(entry));
        }
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
    pub(crate) fn save(&self) -> SavedMessages {
        let entry = |entry: &Entry| {
            let State { words, is_pending, was_sent, .. } = *lock(&entry.state);
            SavedEntry { words, is_pending, was_sent }
        };
        SavedMessages {
            table: self.entries.iter().map(entry).collect(),
            config: self.vector(Source::Config),
            queues: (0..self.queues.len()).map(|index| self.vector(Source::Queue(index))).collect(),
        }
    }

    /// Restores the state of a function that sends no messages yet. Returns an error if a driver cannot have left the
    /// function so.
    pub(crate) fn restore(&self, saved: &SavedMessages) -> io::Result<()> {
        for (entry, SavedEntry { words, is_pending, was_sent }) in self.entries.iter().zip(&saved.table) {
            let mut state = lock(&entry.state);
            words.0.iter().enumerate().for_each(|(index, word)| state.words.set(index, *word));
            state.is_pending = *is_pending;
            state.was_sent = *was_sent;
        }
        self.set_vector(Source::Config, saved.config);
        let queues = (0..).map(Source::Queue).zip(&saved.queues);
        queues.for_each(|(source, vector)| self.set_vector(source, *vector));
        if self.save() == *saved { Ok(()) } else { Err(io::Error::other("it has other interrupts")) }
    }
}

impl Entry {
    fn send(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        state.is_pending = true;
        self.send_pending(&mut state)
    }

    /// Changes the state. Sends what is pending if that is possible now.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        // The eventfd belongs to the VMM. If the write fails, there is no other way to reach the driver.
        let _ = self.send_pending(&mut state);
    }

    fn send_pending(&self, state: &mut State) -> io::Result<()> {
        if !state.is_pending || !state.can_send() {
            return Ok(());
        }
        state.is_pending = false;
        state.was_sent = true;
        self.irqfd.event.write(1)
    }

    /// The message that KVM is told of next, with its interrupt. Nothing is sent until KVM has it.
    fn take_unrouted(&self) -> Option<(u32, Message)> {
        let mut state = lock(&self.state);
        let message = state.unrouted()?;
        state.routed = None;
        Some((self.irqfd.gsi, message))
    }
}

impl State {
    /// The message that an interrupt sends now.
    fn message(&self) -> Option<Message> {
        if self.function_sends { self.words.message() } else { None }
    }

    fn unrouted(&self) -> Option<Message> {
        self.message().filter(|message| self.routed != Some(*message))
    }

    fn can_send(&self) -> bool {
        self.message().is_some() && self.unrouted().is_none()
    }
}
