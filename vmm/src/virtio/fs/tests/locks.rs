//! GETLK and SETLK.

use std::{fs::File, ops::RangeInclusive};

use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{FlockOperation, flock};

use super::{super::abi::LOCK_IS_FLOCK, *};

const ALL: RangeInclusive<u64> = 0..=i64::MAX as u64;
const READ: i32 = libc::F_RDLCK;
const WRITES: i32 = libc::F_WRLCK;
const NONE: i32 = libc::F_UNLCK;
const BUSY: Result<(), i32> = Err(-libc::EAGAIN);
const TOO_MANY: Result<(), i32> = Err(-libc::ENOLCK);

fn body(owner: u64, range: RangeInclusive<u64>, kind: i32, flags: u32) -> Body {
    // The handle is not looked at.
    let body = Body::default().u64(9).u64(owner).u64(*range.start()).u64(*range.end());
    body.u32(kind as u32).u32(7).u32(flags).zeros(4)
}

impl Guest {
    fn lock(&mut self, node: u64, owner: u64, range: RangeInclusive<u64>, kind: i32) -> Result<(), i32> {
        self.ask(opcode::SETLK, node, body(owner, range, kind, 0).as_bytes()).map(drop)
    }

    fn flock(&mut self, node: u64, owner: u64, kind: i32) -> Result<(), i32> {
        self.ask(opcode::SETLK, node, body(owner, ALL, kind, LOCK_IS_FLOCK).as_bytes()).map(drop)
    }

    /// The range and the kind of a lock that excludes this one. NONE: nobody has any.
    fn excludes(&mut self, node: u64, owner: u64, range: RangeInclusive<u64>, kind: i32) -> (u64, u64, i32) {
        let answer = self.ask(opcode::GETLK, node, body(owner, range, kind, 0).as_bytes()).unwrap();
        assert_eq!((answer.len(), word(&answer, 20)), (24, 0), "no pid");
        (long(&answer, 0), long(&answer, 8), word(&answer, 16) as i32)
    }

    /// A new file, open on the host, and its node.
    fn file(&mut self, name: &str) -> (File, u64) {
        let file = File::options().read(true).write(true).create_new(true).open(self.path(name));
        (file.unwrap(), self.lookup(ROOT, name).unwrap())
    }
}

/// A lock of another process of the host.
fn host_lock(file: &File, range: RangeInclusive<u64>, kind: i32) -> Result<(), i32> {
    let l_len = (range.end() - range.start()).wrapping_add(1) as i64;
    let lock = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: *range.start() as i64,
        l_len: l_len.max(0),
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).map(drop).map_err(|error| -(error as i32))
}

#[test]
fn a_lock_of_a_range_excludes_the_host_and_other_owners() {
    let mut guest = Guest::new();
    let (host, node) = guest.file("file");
    for kind in [WRITES, READ] {
        guest.lock(node, 1, 10..=19, kind).unwrap();
        assert_eq!((guest.lock(node, 2, 19..=19, WRITES), host_lock(&host, 10..=10, WRITES)), (BUSY, BUSY));
        assert_eq!(host_lock(&host, 20..=30, WRITES), Ok(()));
        assert_eq!(guest.lock(node, 1, ALL, WRITES), BUSY);
        assert_eq!(guest.excludes(node, 2, 0..=19, WRITES), (10, 19, kind));
        assert_eq!(guest.excludes(node, 2, 0..=9, WRITES).2, NONE);
        assert_eq!(guest.excludes(node, 1, 10..=19, WRITES).2, NONE, "who has it is not excluded");
        host_lock(&host, ALL, NONE).unwrap();
        guest.lock(node, 1, ALL, NONE).unwrap();
        assert_eq!(host_lock(&host, 10..=19, WRITES), Ok(()));
        assert_eq!((guest.lock(node, 1, 19..=25, READ), guest.lock(node, 1, 20..=25, READ)), (BUSY, Ok(())));
        host_lock(&host, ALL, NONE).unwrap();
        guest.lock(node, 1, ALL, NONE).unwrap();
    }
    guest.lock(node, 1, 7..=*ALL.end(), READ).unwrap();
    assert_eq!(guest.excludes(node, 2, ALL, WRITES), (7, *ALL.end(), READ));
}

#[test]
fn a_lock_stays_while_its_owner_changes_the_kind() {
    let mut guest = Guest::new();
    let (host, node) = guest.file("file");
    guest.lock(node, 1, 0..=0, READ).unwrap();
    guest.lock(node, 1, 5..=9, READ).unwrap();
    // The file must be opened again to be locked for writing.
    guest.lock(node, 1, 6..=7, WRITES).unwrap();
    assert_eq!(host_lock(&host, 6..=6, READ), BUSY);
    for byte in [0, 5, 8, 9] {
        assert_eq!(
            (host_lock(&host, byte..=byte, WRITES), host_lock(&host, byte..=byte, READ)),
            (BUSY, Ok(()))
        );
    }
    // What is refused changes nothing.
    assert_eq!(guest.lock(node, 1, 5..=9, WRITES), BUSY);
    host_lock(&host, ALL, NONE).unwrap();
    assert_eq!((host_lock(&host, 5..=5, READ), host_lock(&host, 6..=6, READ)), (Ok(()), BUSY));
    guest.lock(node, 1, 6..=7, READ).unwrap();
    assert_eq!(host_lock(&host, ALL, READ), Ok(()));
    guest.lock(node, 1, ALL, NONE).unwrap();
    assert_eq!(host_lock(&host, ALL, WRITES), Ok(()));
    guest.lock(node, 1, ALL, NONE).unwrap();
}

#[test]
fn a_whole_file_or_directory_is_locked_apart_from_its_ranges() {
    let mut guest = Guest::new();
    fs::create_dir(guest.path("directory")).unwrap();
    let directory = (File::open(guest.path("directory")).unwrap(), guest.lookup(ROOT, "directory").unwrap());
    for (host, node) in [guest.file("file"), directory] {
        let exclusive = || flock(&host, FlockOperation::NonBlockingLockExclusive);
        guest.flock(node, 1, READ).unwrap();
        guest.flock(node, 2, READ).unwrap();
        assert_eq!((exclusive(), guest.flock(node, 2, WRITES)), (Err(Errno::AGAIN), BUSY));
        // The owner that could not have another lock has none now.
        guest.flock(node, 1, WRITES).unwrap();
        guest.flock(node, 1, NONE).unwrap();
        exclusive().unwrap();
        assert_eq!(guest.flock(node, 1, READ), BUSY);
        guest.lock(node, 1, ALL, READ).unwrap();
        guest.lock(node, 1, ALL, NONE).unwrap();
    }
}

/// The second open file description of a file closes as one that is not needed any more.
#[test]
fn few_locks_are_kept_and_those_that_end_make_room() {
    let mut guest = Guest::with_limits(few());
    let (host, node) = guest.file("file");
    for _ in 0..3 {
        (0..4).for_each(|owner| guest.lock(node, owner, owner..=owner, WRITES).unwrap());
        assert_eq!((guest.lock(node, 4, 4..=4, WRITES), guest.flock(node, 0, READ)), (TOO_MANY, TOO_MANY));
        // A request that is refused makes no owner.
        guest.lock(node, 3, ALL, NONE).unwrap();
        for _ in 0..3 {
            assert_eq!(guest.lock(node, 5, 0..=9, WRITES), BUSY);
        }
        let mut ranges = (100..200).step_by(2).map(|byte| guest.lock(node, 2, byte..=byte, READ));
        let refused = ranges.by_ref().find(Result::is_err);
        assert_eq!(refused, Some(TOO_MANY));
        drop(ranges);
        // Neighbours are one range.
        (0..4).for_each(|owner| guest.lock(node, owner, ALL, NONE).unwrap());
        (0..50).for_each(|byte| guest.lock(node, 1, byte..=byte, READ).unwrap());
        guest.lock(node, 1, ALL, NONE).unwrap();
        host_lock(&host, ALL, WRITES).unwrap();
        host_lock(&host, ALL, NONE).unwrap();
    }
}

/// The end of a lock in the middle of a range makes two ranges of one.
#[test]
fn what_is_unlocked_takes_no_more_room_than_what_is_locked() {
    let mut guest = Guest::with_limits(few());
    let (host, node) = guest.file("file");
    guest.lock(node, 1, 0..=1000, WRITES).unwrap();
    let ends: Vec<_> = (1..20).map(|byte| guest.lock(node, 1, 2 * byte..=2 * byte, NONE)).collect();
    assert_eq!(ends, [vec![Ok(()); 9], vec![TOO_MANY; 10]].concat());
    // All other ends of locks take none.
    for range in [0..=1, 19..=30, 900..=2000, 17..=17] {
        guest.lock(node, 1, range, NONE).unwrap();
    }
    guest.lock(node, 1, 500..=500, NONE).unwrap();
    guest.lock(node, 1, ALL, NONE).unwrap();
    host_lock(&host, ALL, WRITES).unwrap();
}

#[test]
fn locks_end_with_the_session_and_with_the_mount() {
    let run = |forgets: bool| {
        let dir = tempfile::tempdir().unwrap();
        mount_in(dir.path(), &["volume"]);
        let host = File::options().write(true).open(dir.path().join("volume/file")).unwrap();
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        for ends in [
            (|guest: &mut Guest| {
                guest.ask(opcode::DESTROY, 0, &[]).unwrap();
                guest.init();
            }) as fn(&mut Guest),
            |guest| {
                nix::mount::umount2(&guest.path("volume"), nix::mount::MntFlags::MNT_DETACH).unwrap();
                guest.device.control().close_unmounted();
            },
        ] {
            let top = guest.lookup(ROOT, "volume").unwrap();
            let node = guest.lookup(top, "file").unwrap();
            guest.lock(node, 1, ALL, WRITES).unwrap();
            if forgets {
                guest.forget(node, 1);
                guest.forget(top, 1);
            }
            assert_eq!(host_lock(&host, ALL, WRITES), BUSY);
            ends(&mut guest);
            let begun = Instant::now();
            while host_lock(&host, ALL, WRITES) == BUSY {
                assert!(begun.elapsed() < Duration::from_secs(60));
                thread::sleep(Duration::from_millis(1));
            }
            host_lock(&host, ALL, NONE).unwrap();
        }
    };
    // A legal guest forgets no file that it has open.
    for forgets in [false, true] {
        drill(|| run(forgets), End::succeeds);
    }
}

#[test]
fn a_request_that_linux_does_not_send_is_refused() {
    let mut guest = Guest::new();
    let (_, node) = guest.file("file");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        guest.path("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    let fifo = guest.lookup(ROOT, "fifo").unwrap();
    let illegal = Err(-libc::EINVAL);
    assert_eq!(guest.lock(node, 1, RangeInclusive::new(2, 1), READ), illegal);
    assert_eq!(guest.lock(node, 1, 0..=1 << 63, READ), illegal);
    assert_eq!(guest.lock(node, 1, ALL, 3), illegal);
    assert_eq!(guest.lock(fifo, 1, ALL, READ), Err(-libc::ENXIO));
    assert_eq!(guest.lock(node + 1000, 1, ALL, READ), Err(-libc::ESTALE));
    assert_eq!(guest.lock(node + 1000, 1, ALL, NONE), Ok(()));
    assert_eq!(guest.ask(opcode::SETLK, node, &[0; 40]), Err(-libc::EINVAL));
    let waits = opcode::SETLK + 1;
    assert_eq!(guest.ask(waits, node, body(1, ALL, READ, 0).as_bytes()), Err(-libc::ENOSYS));
    let flock = body(1, ALL, READ, LOCK_IS_FLOCK);
    assert_eq!(guest.ask(opcode::GETLK, node, flock.as_bytes()), Err(-libc::EINVAL));
}

#[test]
fn only_a_guest_that_polls_is_offered_locks() {
    let mut guest = Guest::new();
    let mut body = Vec::new();
    let further = !further_feature::POLLED_LOCKS;
    for word in [7u32, 41, 0x2_0000, 0x7fff_fffb, further] {
        body.extend(word.to_le_bytes());
    }
    let answer = guest.ask(opcode::INIT, 0, &body).unwrap();
    assert_eq!(word(&answer, 12) & (feature::POSIX_LOCKS | feature::FLOCK_LOCKS), 0);
    assert_eq!(word(&answer, 32), further_feature::ALLOW_IDMAP);
}
