//! A tap device of the host. Packets are read to guest memory and written from it without a copy.
//!
//! This is unsafe because no safe function exists for the ioctl of tap devices.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::Mutex,
    time::{Duration, Instant},
};

use bulkhead_vmm_api::tap;
use vm_memory::VolatileSlice;
use vmm_sys_util::ioctl::ioctl_with_val;

use crate::{lock, virtio::iovecs::Iovecs};

/// UDP datagrams of both versions of IP, which the kernel has left together.
pub(super) const UDP_SEGMENTS: u32 = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// A guest may have queues attached so often at once,
const BURST: u32 = 32;
/// and after that again so often.
const INTERVAL: Duration = Duration::from_millis(100);

/// A tap device, with one queue or several. Reads and writes do not block.
pub struct Tap {
    queues: Vec<OwnedFd>,
    has_uso: bool,
    attached: Mutex<Attached>,
}

/// The first `count` queues are attached.
struct Attached {
    count: usize,
    pace: Pace,
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
        let attached = Mutex::new(Attached { count: queues.len(), pace: Pace(Instant::now()) });
        let mut tap = Self { queues, has_uso: false, attached };
        tap.has_uso = tap.accepts(UDP_SEGMENTS)?;
        for queue in tap.queues.iter().skip(1) {
            set_offload(queue, 0)?;
        }
        Ok(tap)
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
        let accepted = match self.set_offload(libc::TUN_F_CSUM | flags) {
            Ok(()) => true,
            // An older kernel does not know them.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => false,
            Err(error) => return Err(error),
        };
        self.set_offload(0)?;
        Ok(accepted)
    }

    /// Sets the offloads (TUN_F_*) that the reader of this device accepts.
    pub(super) fn set_offload(&self, flags: u32) -> io::Result<()> {
        set_offload(self.queue(0)?, flags)
    }

    /// Has the kernel give packets to the first `count` queues only. What waits in others is lost.
    ///
    /// A guest causes this. Detaching a queue makes the host's kernel wait for all processors, with a lock that all
    /// changes of networks take. So a guest may not attach queues as often as it likes: `WouldBlock` means that
    /// nothing was changed. It cannot detach more than it has attached.
    pub(super) fn use_queues(&self, count: usize) -> io::Result<()> {
        let count = count.min(self.queues.len());
        let mut attached = lock(&self.attached);
        if count > attached.count && !attached.pace.takes_a_turn(Instant::now()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        while attached.count > count {
            tap::set_attached(self.queue(attached.count - 1)?, false)?;
            attached.count -= 1;
        }
        while attached.count < count {
            tap::set_attached(self.queue(attached.count)?, true)?;
            attached.count += 1;
        }
        Ok(())
    }

    /// The file of a queue.
    pub(super) fn queue(&self, index: usize) -> io::Result<&OwnedFd> {
        self.queues.get(index).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Limits how often a guest has queues attached. This is the time at which all turns that were given are over, if each
/// takes [`INTERVAL`].
struct Pace(Instant);

impl Pace {
    fn takes_a_turn(&mut self, now: Instant) -> bool {
        let end = self.0.max(now) + INTERVAL;
        let is_free = end <= now + INTERVAL * BURST;
        if is_free {
            self.0 = end;
        }
        is_free
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

    #[test]
    fn a_guest_cannot_have_queues_come_and_go_without_end() {
        with_tap(|tap| {
            let turns =
                || (0..BURST + 10).filter(|_| tap.use_queues(1).and_then(|()| tap.use_queues(3)).is_ok());
            tap.use_queues(2).unwrap();
            let begin = Instant::now();
            let count = turns().count() as u128;
            let most = u128::from(BURST) + begin.elapsed().as_millis() / INTERVAL.as_millis();
            assert!((u128::from(BURST)..=most).contains(&count), "{count} of {most}");
            // What is as it was costs nothing, and what goes away is not refused.
            tap.use_queues(1).unwrap();
            assert!((0..1000).all(|_| tap.use_queues(1).is_ok()));
        });
    }

    #[test]
    fn a_pause_gives_turns_back_but_no_more_than_the_first() {
        let now = Instant::now();
        let mut pace = Pace(now);
        let mut turns = |at: Instant| (0..1000).filter(|_| pace.takes_a_turn(at)).count() as u32;
        assert_eq!([turns(now), turns(now), turns(now + INTERVAL * 3)], [BURST, 0, 3]);
        assert_eq!(turns(now + Duration::from_secs(3600)), BURST);
    }
}
