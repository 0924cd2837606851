//! The thread that serves all network devices of a VM.
//!
//! A device that is attached while the VM runs cannot have a thread of its own: the jail forbids starting one. So the
//! job of the thread is stopped and started again whenever a device is activated or stopped. Between two jobs the
//! packets wait in the queues and in the tap devices.

use std::{
    io, mem,
    os::fd::AsRawFd,
    sync::{Arc, Mutex},
};

use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::forwarding::{ActiveCard, Forwarding};
use crate::{
    jail::{ThreadError, ThreadRole},
    lock,
    virtio::{
        device::conclude,
        device_threads::DeviceThreads,
        event_loop::{EventError, EventHandler, Events},
    },
};

/// The thread. Clones are the same.
#[derive(Clone)]
pub struct NetThread(Arc<Mutex<Shared>>);

struct Shared {
    threads: DeviceThreads,
    /// The job locks them as long as it runs.
    cards: Arc<Mutex<Vec<Active>>>,
    /// The id of the next device.
    next: u32,
}

/// A device that is active.
struct Active {
    id: u32,
    card: ActiveCard,
}

impl NetThread {
    /// Starts the thread, which waits for the first device in the jail of its role.
    pub fn start() -> Result<Self, ThreadError> {
        let threads = DeviceThreads::spawn(ThreadRole::Net, 1)?;
        Ok(Self(Arc::new(Mutex::new(Shared { threads, cards: Arc::default(), next: 0 }))))
    }

    /// The id of a new device.
    pub(super) fn register(&self) -> u32 {
        let mut shared = lock(&self.0);
        shared.next += 1;
        shared.next
    }

    /// Serves a device from now on, in the place of what was active with this id.
    pub(super) fn activate(&self, id: u32, card: ActiveCard) -> io::Result<()> {
        lock(&self.0).replace(id, Some(card))
    }

    /// Serves a device no longer. An error means that it is not known whether it is still served.
    pub(super) fn deactivate(&self, id: u32) -> io::Result<()> {
        lock(&self.0).replace(id, None)
    }
}

impl Shared {
    fn replace(&mut self, id: u32, card: Option<ActiveCard>) -> io::Result<()> {
        self.threads.stop()?;
        let mut cards = lock(&self.cards);
        cards.retain(|active| active.id != id);
        cards.extend(card.map(|card| Active { id, card }));
        if cards.is_empty() {
            return Ok(());
        }
        drop(cards);
        let cards = self.cards.clone();
        self.threads.start(vec![Box::new(move |stop| serve(&mut lock(&cards), stop))])
    }
}

/// Serves the devices until `stop` is signalled. Those that have failed are not among them afterwards: their drivers
/// have to reset them.
fn serve(cards: &mut Vec<Active>, stop: &EventFd) {
    let failed = match serve_until(cards, stop) {
        Ok(failed) => failed,
        Err(error) => {
            let error = Arc::new(error);
            for Active { card, .. } in mem::take(cards) {
                conclude("virtio-net", Err(error.clone()), &card.interrupt, &card.log);
            }
            return;
        }
    };
    let mut failed = failed.into_iter();
    cards.retain(|_| !failed.next().unwrap_or_default());
}

/// Serves the devices until `stop` is signalled, and says which of them have failed.
fn serve_until(cards: &mut [Active], stop: &EventFd) -> Result<Vec<bool>, EventError> {
    let events = Events::new(stop)?;
    for (index, Active { card, .. }) in (0..).zip(cards.iter()) {
        events.watch(card.rx.kick.as_raw_fd(), EventSet::IN, token(index, RX))?;
        events.watch(card.tx.kick.as_raw_fd(), EventSet::IN, token(index, TX))?;
        events.watch(card.tap.as_raw_fd(), EventSet::IN | EventSet::OUT, token(index, TAP))?;
    }
    let mut all = All { cards: cards.iter_mut().map(|Active { card, .. }| Some(card.begin())).collect() };
    events.run(&mut all)?;
    Ok(all.cards.into_iter().map(|card| card.map(Forwarding::end).is_none()).collect())
}

/// The sources of a device's events.
const RX: u64 = 0;
const TX: u64 = 1;
const TAP: u64 = 2;
const SOURCES: u64 = 3;

fn token(index: u64, source: u64) -> u64 {
    index * SOURCES + source
}

/// The devices by their indices. None: it has failed.
struct All<'m> {
    cards: Vec<Option<Forwarding<'m>>>,
}

impl EventHandler for All<'_> {
    type Error = EventError;

    fn on_event(&mut self, token: u64, events: EventSet) -> Result<(), EventError> {
        let Some(Some(card)) = self.cards.get_mut((token / SOURCES) as usize) else { return Ok(()) };
        match token % SOURCES {
            RX => card.rx_pending = true,
            TX => card.tx_pending = true,
            _ => {
                card.tap_readable |= events.contains(EventSet::IN);
                card.tap_writable |= events.contains(EventSet::OUT);
            }
        }
        Ok(())
    }

    fn serve_queues(&mut self) -> Result<bool, EventError> {
        let mut busy = false;
        for place in &mut self.cards {
            let Some(card) = place else { continue };
            match card.serve_queues() {
                Ok(more) => busy |= more,
                Err(error) => {
                    conclude("virtio-net", Err(error), card.interrupt, card.log);
                    *place = None;
                }
            }
        }
        Ok(busy)
    }
}
