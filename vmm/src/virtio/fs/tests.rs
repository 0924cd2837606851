use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    thread,
};

use fuse_backend_rs::abi::fuse_abi::{EntryOut, InHeader, Opcode, OpenOptions, OpenOut, OutHeader};
use virtio_queue::desc::split::Descriptor;
use vm_memory::ByteValued;

use super::*;
use crate::{
    jail::{capabilities::keep_those_for_files, landlock},
    virtio::testing::{BUFFERS, Driver, NEXT, WRITE},
};

const HIPRIO: usize = 0;
const REQUESTS: usize = 1;
const REQUEST: u64 = BUFFERS;
const ANSWER: u64 = BUFFERS + 0x10_0000;
const ROOT: u64 = 1;
const HEADER: usize = size_of::<OutHeader>();

/// A guest that speaks FUSE by hand, and the directory that it is served.
struct Guest {
    driver: Driver,
    device: Fs,
    dir: tempfile::TempDir,
    unique: u64,
}

impl Guest {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut device = Fs::new("share", dir.path()).unwrap();
        let features = device.features();
        // The worker has what the thread that starts it has.
        let driver = thread::scope(|scope| {
            let jailed = || {
                keep_those_for_files().unwrap();
                assert_eq!(landlock::keep_to(&[dir.path()]).unwrap(), None);
                Driver::new(&mut device, features)
            };
            scope.spawn(jailed).join().unwrap()
        });
        let mut guest = Self { driver, device, dir, unique: 0 };
        guest.init();
        guest
    }

    /// FUSE_INIT 7.38, all features wanted that Linux 6.12 has in the first word.
    fn init(&mut self) {
        let mut body = Vec::new();
        for word in [7u32, 38, 0x2_0000, 0x3fff_fffb] {
            body.extend(word.to_le_bytes());
        }
        let answer = self.ask(Opcode::Init, 0, &body).unwrap();
        assert_eq!(answer[..4], 7u32.to_le_bytes());
        let flags = u32::from_le_bytes(answer[12..16].try_into().unwrap());
        assert_eq!(flags & 1 << 16, 0, "no writeback cache");
        assert_ne!(flags & 1 << 22, 0, "requests of many pages");
    }

    fn header(&mut self, opcode: u32, node: u64, len: usize, uid: u32) -> InHeader {
        self.unique += 1;
        InHeader {
            len: (size_of::<InHeader>() + len) as u32,
            opcode,
            unique: self.unique,
            nodeid: node,
            uid,
            gid: uid,
            pid: 1,
            padding: 0,
        }
    }

    /// Sends a request and returns its answer's body, or its errno.
    fn ask(&mut self, opcode: Opcode, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.ask_as(0, opcode, node, body)
    }

    fn ask_as(&mut self, uid: u32, opcode: Opcode, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        let header = self.header(opcode as u32, node, body.len(), uid);
        self.send(header, body)
    }

    fn send(&mut self, header: InHeader, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.driver.write(REQUEST, header.as_slice());
        self.driver.write(REQUEST + 0x1000, body);
        let buffers = [
            (REQUEST, size_of::<InHeader>() as u32, 0),
            (REQUEST + 0x1000, body.len() as u32, 0),
            (ANSWER, HEADER as u32, WRITE),
            (ANSWER + HEADER as u64, 0x8_0000, WRITE),
        ];
        self.driver.offer(REQUESTS, 0, &buffers);
        let (_, len) = self.driver.wait_used(REQUESTS);
        let answer = self.driver.read(ANSWER, len as usize);
        let out = OutHeader::from_slice(&answer[..HEADER]).unwrap();
        assert_eq!((out.len, out.unique), (len, header.unique));
        if out.error == 0 { Ok(answer[HEADER..].to_vec()) } else { Err(out.error) }
    }

    /// The node id of `name` in `parent`; ENOENT also if the guest may go on believing that it is not there.
    fn lookup(&mut self, parent: u64, name: &str) -> Result<u64, i32> {
        let entry = self.ask(Opcode::Lookup, parent, format!("{name}\0").as_bytes())?;
        match u64::from_le_bytes(entry[..8].try_into().unwrap()) {
            0 => Err(-libc::ENOENT),
            node => Ok(node),
        }
    }

    fn open(&mut self, node: u64, flags: i32) -> Result<u64, i32> {
        Ok(self.opened(node, flags)?.fh)
    }

    fn opened(&mut self, node: u64, flags: i32) -> Result<OpenOut, i32> {
        let mut body = Vec::from(flags.to_le_bytes());
        body.extend([0; 4]);
        let answer = self.ask(Opcode::Open, node, &body)?;
        Ok(*OpenOut::from_slice(&answer).unwrap())
    }

    fn read(&mut self, node: u64, handle: u64, offset: u64, size: u32) -> Result<Vec<u8>, i32> {
        let mut body = Vec::new();
        body.extend(handle.to_le_bytes());
        body.extend(offset.to_le_bytes());
        body.extend(size.to_le_bytes());
        body.extend([0; 20]);
        self.ask(Opcode::Read, node, &body)
    }

    fn write(&mut self, node: u64, handle: u64, data: &[u8]) -> Result<Vec<u8>, i32> {
        let mut body = Vec::new();
        body.extend(handle.to_le_bytes());
        body.extend(0u64.to_le_bytes());
        body.extend((data.len() as u32).to_le_bytes());
        body.extend([0; 20]);
        body.extend(data);
        self.ask(Opcode::Write, node, &body)
    }
}

#[test]
fn a_file_of_the_host_is_found_and_read() {
    let mut guest = Guest::new();
    let text: Vec<u8> = (0..300_000).map(|index| (index / 7) as u8).collect();
    fs::create_dir(guest.dir.path().join("sub")).unwrap();
    fs::write(guest.dir.path().join("sub/file"), &text).unwrap();

    let sub = guest.lookup(ROOT, "sub").unwrap();
    let file = guest.lookup(sub, "file").unwrap();
    let handle = guest.open(file, libc::O_RDONLY).unwrap();
    assert!(guest.read(file, handle, 0, 0x8_0000).unwrap() == text);
    assert_eq!(guest.read(file, handle, 299_999, 10).unwrap(), text[299_999..]);
    assert_eq!(guest.lookup(sub, "none"), Err(-libc::ENOENT));
}

#[test]
fn what_the_guest_writes_the_host_reads() {
    let mut guest = Guest::new();
    let path = guest.dir.path().join("file");
    fs::write(&path, "").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(file, libc::O_RDWR).unwrap();
    guest.write(file, handle, b"from the guest").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"from the guest");
}

#[test]
fn what_the_host_changes_the_guest_sees() {
    let mut guest = Guest::new();
    let path = guest.dir.path().join("file");
    assert_eq!(guest.lookup(ROOT, "file"), Err(-libc::ENOENT));
    fs::write(&path, "one").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(file, libc::O_RDONLY).unwrap();
    fs::write(&path, "other").unwrap();
    assert_eq!(guest.read(file, handle, 0, 10).unwrap(), b"other");
}

#[test]
fn what_is_not_there_is_known_for_a_while() {
    let mut guest = Guest::new();
    let answer = guest.ask(Opcode::Lookup, ROOT, b"none\0").unwrap();
    let entry = EntryOut::from_slice(&answer).unwrap();
    assert_eq!((entry.nodeid, entry.entry_valid), (0, CACHED_FOR.as_secs()));
    // An answer for which there is no room is an error, as it was.
    let header = guest.header(Opcode::Lookup as u32, ROOT, 5, 0);
    guest.driver.write(REQUEST, header.as_slice());
    guest.driver.write(REQUEST + size_of::<InHeader>() as u64, b"none\0");
    let request = (REQUEST, size_of::<InHeader>() as u32 + 5, 0);
    guest.driver.offer(REQUESTS, 0, &[request, (ANSWER, HEADER as u32 + 100, WRITE)]);
    assert_eq!(guest.driver.wait_used(REQUESTS), (0, HEADER as u32));
    let answer = guest.driver.read(ANSWER, HEADER);
    assert_eq!(OutHeader::from_slice(&answer).unwrap().error, -libc::ENOENT);
}

#[test]
fn the_pages_of_a_file_are_kept_until_it_changes() {
    let mut guest = Guest::new();
    let path = guest.dir.path().join("file");
    fs::write(&path, "one").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let mut keeps = || {
        let opened = guest.opened(file, libc::O_RDONLY).unwrap();
        opened.open_flags & OpenOptions::KEEP_CACHE.bits() != 0
    };
    // While it is new, the next change may leave its times as they are.
    assert!(!keeps() && !keeps());
    thread::sleep(Duration::from_secs(3));
    assert!(!keeps());
    assert!(keeps() && keeps());
    fs::write(&path, "two").unwrap();
    assert!(!keeps() && !keeps());
}

#[test]
fn a_close_is_told_of_what_may_have_been_written() {
    const NOFLUSH: u32 = 1 << 5;
    let mut guest = Guest::new();
    fs::write(guest.dir.path().join("file"), "").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    for (flags, expected) in [(libc::O_RDONLY, NOFLUSH), (libc::O_WRONLY, 0), (libc::O_RDWR, 0)] {
        assert_eq!(guest.opened(file, flags).unwrap().open_flags & NOFLUSH, expected);
    }
}

#[test]
fn a_file_belongs_to_whom_the_request_names() {
    let mut guest = Guest::new();
    assert_eq!(fs::metadata("/proc/self").unwrap().uid(), 0, "this test gives files away: run it as root");
    fs::set_permissions(guest.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    // fuse_mkdir_in: mode, umask.
    let mut body = Vec::new();
    body.extend(0o755u32.to_le_bytes());
    body.extend(0o022u32.to_le_bytes());
    body.extend(b"dir\0");
    guest.ask_as(1000, Opcode::Mkdir, ROOT, &body).unwrap();
    let metadata = fs::metadata(guest.dir.path().join("dir")).unwrap();
    assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o777), (1000, 1000, 0o755));
}

#[test]
fn who_may_create_is_for_the_guest_to_say() {
    let mut guest = Guest::new();
    // The caller is in the group by a membership that no request tells of.
    let volume = guest.dir.path().join("volume");
    fs::create_dir(&volume).unwrap();
    std::os::unix::fs::chown(&volume, Some(0), Some(5000)).unwrap();
    fs::set_permissions(&volume, fs::Permissions::from_mode(0o2770)).unwrap();
    let node = guest.lookup(ROOT, "volume").unwrap();
    let body = [&0o755u32.to_le_bytes()[..], &0u32.to_le_bytes(), b"made\0"].concat();
    guest.ask_as(1000, Opcode::Mkdir, node, &body).unwrap();
    let metadata = fs::metadata(volume.join("made")).unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (1000, 5000));
}

#[test]
fn nothing_outside_of_the_directory_is_reached() {
    let mut guest = Guest::new();
    for name in ["../x", "/etc", "a/b"] {
        assert_eq!(guest.lookup(ROOT, name), Err(-libc::EINVAL), "{name}");
    }
    let root = guest.lookup(ROOT, ".").unwrap();
    assert_eq!(guest.lookup(ROOT, ".."), Ok(root));
    std::os::unix::fs::symlink("/etc", guest.dir.path().join("link")).unwrap();
    let link = guest.lookup(ROOT, "link").unwrap();
    assert!(guest.lookup(link, "passwd").is_err());
    assert!(guest.open(link, libc::O_RDONLY).is_err());
}

#[test]
fn a_device_node_of_the_guest_is_never_opened() {
    let mut guest = Guest::new();
    // fuse_mknod_in: mode, rdev, umask, padding. /dev/zero.
    let mut body = Vec::new();
    for word in [libc::S_IFCHR | 0o666, libc::makedev(1, 5) as u32, 0, 0] {
        body.extend(word.to_le_bytes());
    }
    body.extend(b"zero\0");
    guest.ask(Opcode::Mknod, ROOT, &body).unwrap();
    assert!(fs::metadata(guest.dir.path().join("zero")).unwrap().file_type().is_char_device());
    let zero = guest.lookup(ROOT, "zero").unwrap();
    assert_eq!(guest.open(zero, libc::O_RDONLY), Err(-libc::EBADF));
}

#[test]
fn garbage_is_answered_and_breaks_nothing() {
    let mut guest = Guest::new();
    for opcode in 0..60 {
        // These have no answer, or end the session.
        let silent = [Opcode::Forget, Opcode::BatchForget, Opcode::Interrupt, Opcode::Destroy];
        if silent.iter().any(|silent| *silent as u32 == opcode) {
            continue;
        }
        for (node, body) in [(ROOT, vec![0xff; 64]), (u64::MAX, vec![]), (12345, vec![0x41; 5000])] {
            for len in [body.len(), 0x10_0000, usize::MAX / 2] {
                let mut header = guest.header(opcode, node, 0, 0);
                header.len = (size_of::<InHeader>()).wrapping_add(len) as u32;
                // Some of it makes sense by chance; what counts is that an answer comes, and is well-formed.
                let _ = guest.send(header, &body);
            }
        }
    }
    // It still works.
    fs::write(guest.dir.path().join("file"), "x").unwrap();
    guest.lookup(ROOT, "file").unwrap();
}

#[test]
fn a_forget_wants_no_answer() {
    let mut guest = Guest::new();
    fs::write(guest.dir.path().join("file"), "x").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let header = guest.header(Opcode::Forget as u32, file, 8, 0);
    guest.driver.write(REQUEST, header.as_slice());
    guest.driver.write(REQUEST + size_of::<InHeader>() as u64, &1u64.to_le_bytes());
    guest.driver.offer(HIPRIO, 0, &[(REQUEST, size_of::<InHeader>() as u32 + 8, 0)]);
    assert_eq!(guest.driver.wait_used(HIPRIO), (0, 0));
    assert_eq!(guest.open(file, libc::O_RDONLY), Err(-libc::EBADF));
}

#[test]
fn a_request_that_is_too_short_for_a_header_has_no_answer() {
    let mut guest = Guest::new();
    guest.driver.offer(REQUESTS, 0, &[(REQUEST, 8, 0), (ANSWER, 0x1000, WRITE)]);
    assert_eq!(guest.driver.wait_used(REQUESTS), (0, 0));
    // Nor has one that leaves no room for one.
    let header = guest.header(Opcode::Statfs as u32, ROOT, 0, 0);
    guest.driver.write(REQUEST, header.as_slice());
    guest.driver.offer(REQUESTS, 0, &[(REQUEST, size_of::<InHeader>() as u32, 0), (ANSWER, 8, WRITE)]);
    assert_eq!(guest.driver.wait_used(REQUESTS), (0, 0));
}

#[test]
fn an_illegal_chain_asks_for_a_reset() {
    let illegal: [&dyn Fn(&mut Driver); 4] = [
        &|driver| {
            driver.describe(REQUESTS, 0, Descriptor::new(REQUEST, 40, NEXT, 0));
            driver.publish(REQUESTS, 0);
        },
        &|driver| driver.offer(REQUESTS, 0, &[(u64::MAX - 10, 40, 0)]),
        &|driver| driver.offer(REQUESTS, 0, &[(ANSWER, 40, WRITE), (REQUEST, 40, 0)]),
        &|driver| driver.break_avail_index(HIPRIO),
    ];
    for act in illegal {
        let mut guest = Guest::new();
        act(&mut guest.driver);
        guest.driver.wait_needs_reset();
    }
}

#[test]
fn after_a_reset_the_next_driver_starts_anew() {
    let mut guest = Guest::new();
    fs::write(guest.dir.path().join("file"), "x").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    guest.driver.reset();
    guest.driver = Driver::new(&mut guest.device, 0);
    guest.init();
    assert_eq!(guest.open(file, libc::O_RDONLY), Err(-libc::EBADF));
    guest.lookup(ROOT, "file").unwrap();
}

#[test]
fn the_configuration_is_the_tag_and_one_queue() {
    let guest = Guest::new();
    let mut config = [0xaa; 40];
    guest.device.read_config(0, &mut config);
    assert_eq!(&config[..6], b"share\0");
    assert_eq!(config[36..], 1u32.to_le_bytes());
}

#[test]
fn what_cannot_be_served_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    for tag in ["", "0123456789012345678901234567890123456", "a\0b"] {
        assert!(matches!(Fs::new(tag, dir.path()), Err(FsError::Tag { .. })), "{tag:?}");
    }
    assert!(matches!(Fs::new("x", &dir.path().join("none")), Err(FsError::Serve { .. })));
    assert!(matches!(Fs::new("x", &dir.path().join("file")), Err(FsError::Serve { .. })));
}
