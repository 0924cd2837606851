//! A tap device of the host. Packets are read to guest memory and written from it without a copy.
//!
//! This is unsafe because no safe function exists for the ioctl of tap devices.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bulkhead_vmm_api::tap;
use vm_memory::VolatileSlice;
use vmm_sys_util::ioctl::ioctl_with_val;

use crate::{lock, virtio::iovecs::Iovecs};

/// UDP datagrams of both versions of IP, which the kernel has left together.
pub(super) const UDP_SEGMENTS: u32 = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// A guest may change its taps this many times at once. To start using eight cards with four queues each it needs half.
const BURST: u32 = 64;
/// After that, it may change them once in each of these times.
const INTERVAL: Duration = Duration::from_millis(100);

/// A tap device, with one queue or several. Reads and writes do not block.
pub struct Tap {
    queues: Vec<OwnedFd>,
    has_uso: bool,
    state: Mutex<State>,
    pace: Pace,
}

/// What the kernel has been told.
struct State {
    /// How many queues are attached, counted from the first.
    attached: usize,
    /// The offloads (TUN_F_*) that the reader accepts.
    offload: u32,
}

impl Tap {
    /// Makes the tap device `name` with this many queues in the network namespace of this thread. The kernel removes it
    /// when this value is dropped.
    pub fn create(name: &str, queues: usize) -> io::Result<Self> {
        Self::new(tap::create(name, queues)?)
    }

    /// Takes a tap device that [`tap::create`] has made, and asks the kernel whether it knows USO. Returns an error if
    /// a file is something else.
    pub fn new(queues: Vec<File>) -> io::Result<Self> {
        let queues: Vec<OwnedFd> = queues.into_iter().map(OwnedFd::from).collect();
        let state = Mutex::new(State { attached: queues.len(), offload: 0 });
        let mut tap = Self { queues, has_uso: false, state, pace: Pace::default() };
        tap.has_uso = tap.accepts(UDP_SEGMENTS)?;
        for queue in tap.queues.iter().skip(1) {
            set_offload(queue, 0)?;
        }
        Ok(tap)
    }

    /// The guest's changes of this device take the turns of `pace`.
    pub(super) fn with_pace(self, pace: Pace) -> Self {
        Self { pace, ..self }
    }

    /// How many queues it has.
    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Whether the device can leave UDP datagrams together, and split those that its owner has left together.
    pub(super) fn has_uso(&self) -> bool {
        self.has_uso
    }

    /// Whether the kernel knows these offloads (TUN_F_*). Afterwards the reader accepts none.
    fn accepts(&self, flags: u32) -> io::Result<bool> {
        let queue = self.queue(0)?;
        let accepted = match set_offload(queue, libc::TUN_F_CSUM | flags) {
            Ok(()) => true,
            // An older kernel does not know them.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => false,
            Err(error) => return Err(error),
        };
        set_offload(queue, 0)?;
        Ok(accepted)
    }

    /// Sets the offloads (TUN_F_*) that the reader of this device accepts.
    ///
    /// A guest causes this. The host's kernel takes the lock of all changes of networks, and tells programs that watch
    /// the namespace, such as the shim. So only a change is one for the kernel, and it takes a turn: `WouldBlock` means
    /// that nothing was changed.
    pub(super) fn set_offload(&self, flags: u32) -> io::Result<()> {
        let mut state = lock(&self.state);
        if flags == state.offload {
            return Ok(());
        }
        self.pace.take(1)?;
        set_offload(self.queue(0)?, flags)?;
        state.offload = flags;
        Ok(())
    }

    /// Has the kernel give packets to the first `count` queues only. What waits in others is lost.
    ///
    /// A guest causes this. Detaching a queue makes the host's kernel wait for all processors, with a lock that all
    /// changes of networks take. So each queue that is attached takes a turn: `WouldBlock` means that nothing was
    /// changed. A guest cannot detach more than it has attached.
    pub(super) fn use_queues(&self, count: usize) -> io::Result<()> {
        let count = count.min(self.queues.len());
        let mut state = lock(&self.state);
        self.pace.take(count.saturating_sub(state.attached))?;
        while state.attached > count {
            tap::set_attached(self.queue(state.attached - 1)?, false)?;
            state.attached -= 1;
        }
        while state.attached < count {
            tap::set_attached(self.queue(state.attached)?, true)?;
            state.attached += 1;
        }
        Ok(())
    }

    /// The file of a queue.
    pub(super) fn queue(&self, index: usize) -> io::Result<&OwnedFd> {
        self.queues.get(index).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Limits how often a guest has its taps changed. Clones are the same limit: the lock that a change takes is one of the
/// whole host. This is the time at which all turns that were given are over, if each takes [`INTERVAL`].
#[derive(Clone)]
pub(super) struct Pace(Arc<Mutex<Instant>>);

impl Default for Pace {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl Pace {
    /// Takes this many turns, or none: `WouldBlock`.
    fn take(&self, turns: usize) -> io::Result<()> {
        if self.takes(turns, Instant::now()) { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    fn takes(&self, turns: usize, now: Instant) -> bool {
        let turns = u32::try_from(turns).unwrap_or(u32::MAX);
        let mut last = lock(&self.0);
        let end = (*last).max(now) + INTERVAL.saturating_mul(turns);
        let is_free = turns == 0 || end <= now + INTERVAL * BURST;
        if is_free {
            *last = end;
        }
        is_free
    }

    /// There is no turn for an hour.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        *lock(&self.0) = Instant::now() + INTERVAL * BURST + Duration::from_secs(3600);
    }
}

fn set_offload(queue: &OwnedFd, flags: u32) -> io::Result<()> {
    // SAFETY: the argument of TUNSETOFFLOAD is a number, not an address.
    let result = unsafe { ioctl_with_val(queue, libc::TUNSETOFFLOAD, flags.into()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A queue of a tap device.
#[derive(Clone, Copy)]
pub(super) struct TapQueue<'t>(pub(super) &'t OwnedFd);

impl TapQueue<'_> {
    /// Reads a packet to `slices`, and truncates it if it is longer. Returns the number of bytes that were written
    /// there.
    pub(super) fn read<'a, 'm: 'a>(
        self,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        iovecs: &mut Iovecs,
    ) -> io::Result<usize> {
        iovecs.read(self.0, slices)
    }

    /// Writes the packet that is in `slices`.
    pub(super) fn write<'a, 'm: 'a>(
        self,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        iovecs: &mut Iovecs,
    ) -> io::Result<usize> {
        iovecs.write(self.0, slices)
    }
}

impl AsRawFd for TapQueue<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Calls `story` with a tap device in a network namespace that ends with it.
    fn with_tap(story: impl FnOnce(&Tap) + Send + 'static) {
        let story = move || {
            crate::netns::enter(None).expect("this test makes a network namespace: run it as root");
            story(&Tap::create("tap0", 3).expect("this test needs /dev/net/tun: modprobe tun"));
        };
        thread::spawn(story).join().unwrap();
    }

    /// As it is on a kernel that is older than USO.
    #[test]
    fn offloads_that_the_kernel_does_not_know_are_not_there() {
        with_tap(|tap| {
            assert!(tap.accepts(libc::TUN_F_TSO4 | libc::TUN_F_TSO6).unwrap());
            assert!(!tap.accepts(1 << 31).unwrap());
            assert!(!tap.accepts(UDP_SEGMENTS | 1 << 31).unwrap());
            assert!(tap.set_offload(libc::TUN_F_CSUM | libc::TUN_F_TSO4).is_ok());
        });
    }

    #[test]
    fn what_is_no_tap_is_refused() {
        let file = File::open("/dev/null").unwrap();
        assert!(Tap::new(vec![file]).is_err());
    }

    /// Tries something that costs so many turns each time, more often than there are turns.
    fn done(cost: u32, work: impl Fn() -> io::Result<()>) {
        let begin = Instant::now();
        let count = (0..BURST + 10).filter(|_| work().is_ok()).count() as u128;
        let later = begin.elapsed().as_millis() / INTERVAL.as_millis();
        let (least, most) = (u128::from(BURST / cost), (u128::from(BURST) + later) / u128::from(cost));
        assert!((least..=most).contains(&count), "{count} of {most}");
    }

    #[test]
    fn a_guest_cannot_have_queues_come_and_go_without_end() {
        with_tap(|tap| {
            tap.use_queues(2).unwrap();
            done(2, || tap.use_queues(1).and_then(|()| tap.use_queues(3)));
            // What is as it was costs nothing, and what goes away is not refused.
            tap.use_queues(1).unwrap();
            assert!((0..1000).all(|_| tap.use_queues(1).is_ok()));
        });
    }

    #[test]
    fn a_guest_cannot_change_offloads_without_end() {
        with_tap(|tap| {
            let now = || lock(&tap.state).offload;
            done(1, || tap.set_offload(now() ^ libc::TUN_F_CSUM));
            tap.pace.use_up();
            let refused = tap.set_offload(now() ^ libc::TUN_F_CSUM).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
            // What is as it was costs nothing.
            assert!((0..1000).all(|_| tap.set_offload(now()).is_ok()));
        });
    }

    #[test]
    fn a_pause_gives_turns_back_but_no_more_than_the_first() {
        let now = Instant::now();
        let pace = Pace(Arc::new(Mutex::new(now)));
        let turns = |at: Instant| (0..1000).filter(|_| pace.takes(1, at)).count() as u32;
        assert_eq!([turns(now), turns(now), turns(now + INTERVAL * 3)], [BURST, 0, 3]);
        let later = now + Duration::from_secs(3600);
        assert!(pace.takes(3, later) && !pace.takes(BURST as usize - 2, later) && pace.takes(0, later));
        assert_eq!(turns(later), BURST - 3);
    }
}
