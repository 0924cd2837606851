//! How many pairs of queues are in use. The driver decides, by its control queue (virtio 1.3, 5.1.6.5.5).

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

use super::tap::Tap;
use crate::virtio::queue_threads::Waker;

/// The pairs of an active device. The thread of the first pair changes what is in use, and the others follow.
pub(super) struct Pairs {
    /// How many are to be in use.
    wanted: Arc<AtomicU16>,
    /// How many are in use. The first pair is the first to begin.
    used: AtomicU16,
    /// The first ones whose queues the driver has set up.
    ready: u16,
    /// Those of the threads of the other pairs.
    wakers: Vec<Waker>,
}

impl Pairs {
    /// None of them is in use until [`Pairs::begin`].
    pub(super) fn new(wanted: Arc<AtomicU16>, ready: u16, wakers: Vec<Waker>) -> Self {
        Self { wanted, used: AtomicU16::new(0), ready, wakers }
    }

    /// Whether the pair with this index is in use.
    pub(super) fn has(&self, index: usize) -> bool {
        index < usize::from(self.used.load(Ordering::SeqCst))
    }

    /// Uses as many as the driver has said. Does nothing if it does so already.
    pub(super) fn begin(&self, tap: &Tap) -> io::Result<()> {
        let wanted = self.wanted.load(Ordering::SeqCst).clamp(1, self.ready.max(1));
        self.change(wanted, tap)
    }

    /// Uses the first `count` pairs. An error: nothing has changed, since there are not so many, the driver has not set
    /// them up, or it changes them too often.
    pub(super) fn set(&self, count: u16, tap: &Tap) -> io::Result<()> {
        if !(1..=self.ready).contains(&count) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.change(count, tap)?;
        self.wanted.store(count, Ordering::SeqCst);
        Ok(())
    }

    fn change(&self, count: u16, tap: &Tap) -> io::Result<()> {
        let before = self.used.load(Ordering::SeqCst);
        if count == before {
            return Ok(());
        }
        // A pair that is no longer in use rests before its queue of the tap goes, and one that comes begins after it.
        self.used.store(before.min(count), Ordering::SeqCst);
        if let Err(error) = tap.use_queues(count.into()) {
            // Some may be attached, whose packets nobody would get.
            let _ = tap.use_queues(before.max(1).into());
            self.used.store(before, Ordering::SeqCst);
            return Err(error);
        }
        self.used.store(count, Ordering::SeqCst);
        // What came for a pair before it was in use was left where it is, and nothing tells of it again.
        self.wakers.iter().for_each(Waker::wake);
        Ok(())
    }
}
