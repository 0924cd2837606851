use std::{
    fs::{self, Permissions},
    io,
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    },
    path::Path,
    sync::mpsc::channel,
    thread,
    time::{Duration, Instant},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use rustix::io::Errno;
use virtio_queue::desc::split::Descriptor;

use super::{
    abi::{
        ATTR_FILE_SYSTEM_SHIFT, Body, IN_HEADER, OPEN_CACHE_DIR, OPEN_DIRECT_IO, OPEN_KEEP_CACHE,
        OPEN_NOFLUSH, OUT_HEADER, ROOT, feature, further_feature, opcode, set,
    },
    file_server::ENTRY_OUT,
    nodes::caching::{CACHED_FOR, OWN_ABSENCE_CACHED_FOR, OWN_CACHED_FOR},
    open_files::Opened,
    *,
};
use crate::{
    jail::{
        capabilities::keep_those_for_files,
        landlock,
        testing::{End, drill},
    },
    virtio::testing::{BUFFERS, Driver, NEXT, WRITE},
};

mod exclusive;
mod extended_attributes;
mod inode_flags;
mod kernel_files;
mod listings;
mod locks;
mod sockets_and_fifos;
mod sync;

/// Linux adds it in open(2) of a 64-bit process. The constant of libc is 0 there.
const O_LARGEFILE: i32 = 0o10_0000;
const HIPRIO: usize = 0;
const REQUESTS: usize = 1;
const REQUEST: u64 = BUFFERS;
const ANSWER: u64 = BUFFERS + 0x10_0000;

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn long_of(bytes: &[u8]) -> u64 {
    long(bytes, 0)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// A guest that sends FUSE requests, and the directory that is shared with it.
struct Guest {
    driver: Driver,
    device: Fs,
    dir: tempfile::TempDir,
    unique: u64,
    /// The thread whose requests these are.
    thread: u32,
}

impl Guest {
    fn new() -> Self {
        Self::with_limits(Limits::of_this_process(1))
    }

    fn with_limits(limits: Limits) -> Self {
        Self::serving(tempfile::tempdir().unwrap(), limits)
    }

    fn serving(dir: tempfile::TempDir, limits: Limits) -> Self {
        Self::of(Fs::with_limits("share", dir.path(), THREADS, limits).unwrap(), dir)
    }

    fn of(mut device: Fs, dir: tempfile::TempDir) -> Self {
        let features = device.features();
        // The threads of the device inherit the capabilities and the Landlock domain of the thread that starts them.
        let driver = thread::scope(|scope| {
            let jailed = || {
                keep_those_for_files().unwrap();
                // As much of it as this kernel has: the tests of Landlock say how much each has.
                landlock::restrict_process(&[dir.path()]).unwrap();
                Driver::new(&mut device, features)
            };
            scope.spawn(jailed).join().unwrap()
        });
        let mut guest = Self { driver, device, dir, unique: 0, thread: 1 };
        guest.init();
        guest
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The number of descriptors of files in the directory. Other tests of this process have other ones.
    fn descriptors(&self) -> usize {
        let links = fs::read_dir("/proc/self/fd").unwrap().map(|entry| fs::read_link(entry.unwrap().path()));
        // A descriptor may be closed meanwhile.
        links.flatten().filter(|link| link.starts_with(self.dir.path())).count()
    }

    /// Sends FUSE_INIT 7.41 with all features of Linux 6.12 in the first word, and more in the second.
    fn init(&mut self) {
        let mut body = Vec::new();
        for word in [7u32, 41, 0x2_0000, 0x7fff_fffb, u32::MAX] {
            body.extend(word.to_le_bytes());
        }
        let answer = self.ask(opcode::INIT, 0, &body).unwrap();
        assert_eq!(answer[..4], 7u32.to_le_bytes());
        let flags = u32::from_le_bytes(answer[12..16].try_into().unwrap());
        assert_eq!(flags & 1 << 16, 0, "no writeback cache");
        for feature in [feature::MAX_PAGES, feature::POSIX_ACL, feature::HANDLE_KILLPRIV_V2] {
            assert_ne!(flags & feature, 0, "{feature:#x}");
        }
        assert_eq!(answer.len(), 64);
        let further = u32::from_le_bytes(answer[32..36].try_into().unwrap());
        let locks = if self.device.is_exclusive { 0 } else { further_feature::POLLED_LOCKS };
        assert_eq!(further, further_feature::ALLOW_IDMAP | locks);
        let both = feature::POSIX_LOCKS | feature::FLOCK_LOCKS;
        assert_eq!(flags & both, if locks == 0 { 0 } else { both });
    }

    fn header(&mut self, opcode: u32, node: u64, len: usize, uid: u32) -> Vec<u8> {
        self.unique += 1;
        let header = Body::default().u32((IN_HEADER + len) as u32).u32(opcode).u64(self.unique).u64(node);
        header.u32(uid).u32(uid).u32(self.thread).u32(0).as_bytes().to_vec()
    }

    /// Sends a request. Returns the body of the answer, or its errno.
    fn ask(&mut self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.ask_as(0, opcode, node, body)
    }

    fn ask_as(&mut self, uid: u32, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        let header = self.header(opcode, node, body.len(), uid);
        self.send(header, body)
    }

    fn send(&mut self, header: Vec<u8>, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.send_with_room(header, body, 0x8_0000)
    }

    fn send_with_room(&mut self, header: Vec<u8>, body: &[u8], room: u32) -> Result<Vec<u8>, i32> {
        self.driver.write(REQUEST, &header);
        self.driver.write(REQUEST + 0x1000, body);
        // As when the data cross the end of a page.
        let cut = body.len().saturating_sub(2);
        let buffers = [
            (REQUEST, IN_HEADER as u32, 0),
            (REQUEST + 0x1000, cut as u32, 0),
            (REQUEST + 0x1000 + cut as u64, (body.len() - cut) as u32, 0),
            (ANSWER, OUT_HEADER as u32, WRITE),
            (ANSWER + OUT_HEADER as u64, room, WRITE),
        ];
        self.driver.offer(REQUESTS, 0, &buffers);
        let (_, len) = self.driver.wait_used(REQUESTS);
        let answer = self.driver.read(ANSWER, len as usize);
        assert_eq!((word(&answer, 0), &answer[8..16]), (len, &header[8..16]));
        match word(&answer, 4) as i32 {
            0 => Ok(answer[OUT_HEADER..].to_vec()),
            error => Err(error),
        }
    }

    fn forget(&mut self, node: u64, lookups: u64) {
        let header = self.header(opcode::FORGET, node, 8, 0);
        self.driver.write(REQUEST, &header);
        self.driver.write(REQUEST + IN_HEADER as u64, &lookups.to_le_bytes());
        self.driver.offer(HIPRIO, 0, &[(REQUEST, IN_HEADER as u32 + 8, 0)]);
        assert_eq!(self.driver.wait_used(HIPRIO), (0, 0));
    }

    fn set_attributes(&mut self, node: u64, valid: u32, size: u64, mode: u32) -> Result<Vec<u8>, i32> {
        let body = Body::default().u32(valid).u32(0).u64(0).u64(size).zeros(44).u32(mode).zeros(16);
        self.ask(opcode::SETATTR, node, body.as_bytes())
    }

    /// The size that GETATTR without a handle says, as for fstat(2).
    fn size(&mut self, node: u64) -> Result<u64, i32> {
        self.ask(opcode::GETATTR, node, &[0; 16]).map(|answer| long(&answer, 24))
    }

    fn release(&mut self, node: u64, handle: u64) {
        self.ask(opcode::RELEASE, node, Body::default().u64(handle).zeros(16).as_bytes()).unwrap();
    }

    /// The node ID of `name` in `parent`. Node 0 counts as ENOENT.
    fn lookup(&mut self, parent: u64, name: &str) -> Result<u64, i32> {
        let entry = self.ask(opcode::LOOKUP, parent, format!("{name}\0").as_bytes())?;
        match long(&entry, 0) {
            0 => Err(-libc::ENOENT),
            node => Ok(node),
        }
    }

    fn open(&mut self, node: u64, flags: i32) -> Result<u64, i32> {
        Ok(self.opened(node, flags)?.0)
    }

    /// Opens a file. Returns the handle and the FOPEN_* flags.
    fn opened(&mut self, node: u64, flags: i32) -> Result<(u64, u32), i32> {
        self.opened_exactly(node, flags | O_LARGEFILE)
    }

    fn opened_exactly(&mut self, node: u64, flags: i32) -> Result<(u64, u32), i32> {
        let mut body = Vec::from(flags.to_le_bytes());
        body.extend([0; 4]);
        let answer = self.ask(opcode::OPEN, node, &body)?;
        Ok((long(&answer, 0), word(&answer, 8)))
    }

    fn read(&mut self, node: u64, handle: u64, offset: u64, size: u32) -> Result<Vec<u8>, i32> {
        let mut body = Vec::new();
        body.extend(handle.to_le_bytes());
        body.extend(offset.to_le_bytes());
        body.extend(size.to_le_bytes());
        body.extend([0; 20]);
        self.ask(opcode::READ, node, &body)
    }

    fn write(&mut self, node: u64, handle: u64, data: &[u8]) -> Result<Vec<u8>, i32> {
        self.write_with(node, handle, data, 0, 0)
    }

    fn write_with(
        &mut self,
        node: u64,
        handle: u64,
        data: &[u8],
        write_flags: u32,
        flags: i32,
    ) -> Result<Vec<u8>, i32> {
        let body = Body::default().u64(handle).u64(0).u32(data.len() as u32).u32(write_flags).u64(0);
        let body = body.u32(flags as u32).u32(0).bytes(data).as_bytes().to_vec();
        self.ask(opcode::WRITE, node, &body)
    }
}

/// Sends FUSE_CREATE. Returns the node and the handle.
fn create(guest: &mut Guest, uid: u32, name: &str, flags: i32, mode: u32) -> Result<(u64, u64), i32> {
    let body = Body::default().u32(flags as u32).u32(mode).u32(0o022).u32(0);
    let body = body.bytes(name.as_bytes()).zeros(1);
    let answer = guest.ask_as(uid, opcode::CREATE, ROOT, body.as_bytes())?;
    Ok((long(&answer, 0), long(&answer, 128)))
}

fn until(mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "it takes too long");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Small limits.
fn few() -> Limits {
    Limits {
        nodes: nodes::Limits { idle: 64, open: 100, paths: 4, files: 8, anchors: 16 },
        handles: handles::Limits { handles: 200, files: 8 },
        listings: crate::virtio::fs::listings::Limits { listings: 8, bytes: 1 << 18 },
        locks: lock_owners::Limits { owners: 4, ranges: 10 },
    }
}

#[test]
fn what_is_looked_up_takes_a_bounded_number_of_nodes_and_comes_back() {
    let mut guest = Guest::with_limits(few());
    fs::create_dir(guest.path("dir")).unwrap();
    for index in 0..300 {
        fs::write(guest.path(&format!("dir/{index}")), index.to_string()).unwrap();
    }
    let dir = guest.lookup(ROOT, "dir").unwrap();
    let first = guest.lookup(dir, "0").unwrap();
    for index in 0..300 {
        guest.lookup(dir, &index.to_string()).unwrap();
    }
    // The directory still has its node, because files are evicted first.
    assert_eq!(guest.open(first, libc::O_RDONLY), Err(-libc::ESTALE));
    let again = guest.lookup(dir, "0").unwrap();
    assert_ne!(again, first);
    let handle = guest.open(again, libc::O_RDONLY).unwrap();
    assert_eq!(guest.read(again, handle, 0, 10).unwrap(), b"0");
}

#[test]
fn what_is_open_takes_a_bounded_number_of_descriptors_and_can_be_read() {
    let mut guest = Guest::with_limits(few());
    let mut open = Vec::new();
    for index in 0..200 {
        let name = index.to_string();
        fs::write(guest.path(&name), &name).unwrap();
        let node = guest.lookup(ROOT, &name).unwrap();
        open.push((node, guest.open(node, libc::O_RDWR).unwrap()));
    }
    assert!(guest.descriptors() < 20, "{}", guest.descriptors());
    let (node, _) = open[0];
    assert_eq!(guest.open(node, libc::O_RDONLY), Err(-libc::ENFILE));
    // With O_EXCL the guest has not looked the name up.
    let new = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    for (name, error) in [("0", libc::EEXIST), ("new", libc::ENFILE)] {
        assert_eq!(create(&mut guest, 0, name, new, 0o600), Err(-error), "{name}");
    }
    for (index, (node, handle)) in open.iter().enumerate() {
        assert_eq!(guest.read(*node, *handle, 0, 10).unwrap(), index.to_string().as_bytes());
        guest.write(*node, *handle, b"x").unwrap();
    }
    assert!(fs::read(guest.path("0")).unwrap() == b"x" && fs::read(guest.path("199")).unwrap() == b"x99");
    for (node, handle) in open {
        guest.ask(opcode::RELEASE, node, Body::default().u64(handle).zeros(16).as_bytes()).unwrap();
        assert_eq!(guest.read(node, handle, 0, 10), Err(-libc::EBADF));
    }
    guest.open(node, libc::O_RDONLY).unwrap();
}

#[test]
fn requests_are_counted() {
    let mut guest = Guest::new();
    fs::write(guest.path("file"), "").unwrap();
    let node = guest.lookup(ROOT, "file").unwrap();
    guest.lookup(ROOT, "file").unwrap();
    guest.forget(node, 1);
    let counted = guest.device.control().requests();
    let expected = [("FORGET", 1), ("INIT", 1), ("LOOKUP", 2)];
    assert_eq!(counted, expected.map(|(name, count)| (name.to_owned(), count)).into());
}

/// MiB of memory that this process has.
fn resident_mib() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4 / 1024
}

/// A fifth of the files are open at the end. By BULKHEAD_TEST_FILES there can be more of them, in a run of this test
/// alone: `BULKHEAD_TEST_FILES=1000000 cargo test --release -p bulkhead-vmm --lib -- --nocapture many_files`.
#[test]
fn many_files_that_are_known_and_open_take_few_descriptors() {
    const IN_A_DIRECTORY: usize = 1000;
    /// The file server keeps 4,096 open files and 512 other descriptors. Other tests of this process have some too.
    const MOST_DESCRIPTORS: usize = 4800;
    /// Other tests have memory, too.
    const MOST_MIB_ALONE: u64 = 160;
    let alone = std::env::var("BULKHEAD_TEST_FILES").ok();
    let files = alone.as_ref().map_or(30_000, |files| files.parse().unwrap());
    let mut guest = Guest::new();
    for index in 0..files {
        let directory = guest.path(&(index / IN_A_DIRECTORY).to_string());
        if index % IN_A_DIRECTORY == 0 {
            fs::create_dir(&directory).unwrap();
        }
        fs::write(directory.join((index % IN_A_DIRECTORY).to_string()), "x").unwrap();
    }
    let find = |guest: &mut Guest, index: usize| {
        let directory = guest.lookup(ROOT, &(index / IN_A_DIRECTORY).to_string()).unwrap();
        guest.lookup(directory, &(index % IN_A_DIRECTORY).to_string()).unwrap()
    };
    let say = |guest: &Guest, when| {
        let (descriptors, mib) = (guest.descriptors(), resident_mib());
        println!("{when}: {descriptors} descriptors, {mib} MiB");
        assert!(descriptors <= MOST_DESCRIPTORS && (alone.is_none() || mib <= MOST_MIB_ALONE));
    };
    say(&guest, "before");
    for index in 0..files {
        find(&mut guest, index);
    }
    say(&guest, "with all known");
    let mut open = Vec::new();
    for index in 0..files / 5 {
        let node = find(&mut guest, index);
        open.push((node, guest.open(node, libc::O_RDONLY).unwrap()));
    }
    say(&guest, "with a fifth open");
    for (node, handle) in open {
        assert_eq!(guest.read(node, handle, 0, 10).unwrap(), b"x");
    }
    say(&guest, "after a look at each");
}

#[test]
fn what_is_removed_while_it_is_open_stays_until_it_is_closed() {
    let mut guest = Guest::with_limits(few());
    let mut removed = Vec::new();
    for index in 0..9 {
        let name = index.to_string();
        let (node, handle) = create(&mut guest, 0, &name, libc::O_RDWR, 0o600).unwrap();
        guest.write(node, handle, name.as_bytes()).unwrap();
        let unlinked = guest.ask(opcode::UNLINK, ROOT, format!("{name}\0").as_bytes());
        // A removed file that is open takes a descriptor. The limit of one file system is eight.
        assert_eq!(unlinked.err(), (index == 8).then_some(-libc::ENFILE));
        assert_eq!(guest.path(&name).exists(), index == 8);
        removed.push((node, handle));
    }
    for index in 100..120 {
        create(&mut guest, 0, &index.to_string(), libc::O_RDWR, 0o600).unwrap();
    }
    for (index, (node, handle)) in removed.iter().enumerate() {
        assert_eq!(guest.read(*node, *handle, 0, 10).unwrap(), index.to_string().as_bytes());
        guest.ask(opcode::GETATTR, *node, &[0; 16]).unwrap();
        guest.release(*node, *handle);
        guest.forget(*node, 1);
        assert_eq!(guest.ask(opcode::GETATTR, *node, &[0; 16]), Err(-libc::ESTALE));
    }
    guest.ask(opcode::UNLINK, ROOT, b"8\0").unwrap();
}

#[test]
fn a_file_goes_by_its_new_names() {
    let mut guest = Guest::new();
    for dir in ["a", "b"] {
        fs::create_dir(guest.path(dir)).unwrap();
    }
    fs::write(guest.path("a/file"), "text").unwrap();
    fs::write(guest.path("b/other"), "").unwrap();
    let (a, b) = (guest.lookup(ROOT, "a").unwrap(), guest.lookup(ROOT, "b").unwrap());
    let (file, other) = (guest.lookup(a, "file").unwrap(), guest.lookup(b, "other").unwrap());
    // The file replaces another, which stays usable as long as it has a node.
    guest.ask(opcode::RENAME, a, Body::default().u64(b).bytes(b"file\0other\0").as_bytes()).unwrap();
    guest.ask(opcode::GETATTR, other, &[0; 16]).unwrap();
    assert_eq!(guest.lookup(a, "file"), Err(-libc::ENOENT));
    assert_eq!(guest.lookup(b, "other"), Ok(file));
    let handle = guest.open(file, libc::O_RDONLY).unwrap();
    assert_eq!(guest.read(file, handle, 0, 10).unwrap(), b"text");
    // The file gets a second name, and the first is removed.
    guest.ask(opcode::LINK, a, Body::default().u64(file).bytes(b"link\0").as_bytes()).unwrap();
    guest.ask(opcode::UNLINK, b, b"other\0").unwrap();
    assert_eq!(guest.lookup(a, "link"), Ok(file));
    // RENAME_EXCHANGE of a directory, which is the parent of a node, and a file.
    let body = Body::default().u64(ROOT).u32(2).u32(0).bytes(b"link\0b\0");
    guest.ask(opcode::RENAME2, a, body.as_bytes()).unwrap();
    assert_eq!((guest.lookup(ROOT, "b"), guest.lookup(a, "link")), (Ok(file), Ok(b)));
    fs::write(guest.path("a/link/late"), "").unwrap();
    guest.lookup(b, "late").unwrap();
    // Renaming to another name of the same file changes nothing.
    fs::hard_link(guest.path("b"), guest.path("c")).unwrap();
    guest.ask(opcode::RENAME, ROOT, Body::default().u64(ROOT).bytes(b"b\0c\0").as_bytes()).unwrap();
    assert_eq!((guest.lookup(ROOT, "b"), guest.lookup(ROOT, "c")), (Ok(file), Ok(file)));
}

/// Mounts an overlay, in a mount namespace of this thread. In its lower layer each of these files has another name too,
/// with `other-` before it. Returns the directory of the overlay, and that of its layers `lower` and `upper`.
fn overlay_with_two_names(files: &[&str]) -> (tempfile::TempDir, tempfile::TempDir) {
    unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    let (layers, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // An overlay takes no overlay as its upper layer.
    mount(Some("layers"), layers.path(), Some("tmpfs"), MsFlags::empty(), none).unwrap();
    let at = |name: &str| layers.path().join(name).display().to_string();
    for name in ["lower", "upper", "work"] {
        fs::create_dir(at(name)).unwrap();
    }
    for file in files {
        fs::write(at("lower/") + file, "old").unwrap();
        fs::hard_link(at("lower/") + file, at("lower/other-") + file).unwrap();
    }
    let options = format!("lowerdir={},upperdir={},workdir={}", at("lower"), at("upper"), at("work"));
    mount(Some("overlay"), dir.path(), Some("overlay"), MsFlags::empty(), Some(&*options)).unwrap();
    (dir, layers)
}

/// In an overlay, with names of one file in its lower layer.
#[test]
fn a_change_by_one_name_does_not_reach_the_copy_for_a_name_that_another_thread_has_looked_up() {
    let (dir, _layers) = overlay_with_two_names(&["open", "cut", "mode", "link", "alone"]);
    let mut guest = Guest::serving(dir, Limits::of_this_process(1));
    let change = |guest: &mut Guest, name: &str, change: &dyn Fn(&mut Guest, u64) -> Result<(), i32>| {
        guest.thread = 1;
        let node = guest.lookup(ROOT, name).unwrap();
        guest.thread = 2;
        assert_eq!(guest.lookup(ROOT, &format!("other-{name}")), Ok(node), "{name}");
        guest.thread = 1;
        assert_eq!(change(guest, node), Err(-libc::ESTALE), "{name}");
        // As Linux does then.
        let node = guest.lookup(ROOT, name).unwrap();
        change(guest, node).unwrap();
        assert_eq!(fs::read(guest.path(&format!("other-{name}"))).unwrap(), b"old");
        fs::metadata(guest.path(&format!("other-{name}"))).unwrap()
    };
    let write = |flags: i32| {
        move |guest: &mut Guest, node: u64| {
            let handle = guest.open(node, flags)?;
            guest.write(node, handle, b"new").map(drop)
        }
    };
    change(&mut guest, "open", &write(libc::O_RDWR | libc::O_TRUNC));
    assert_eq!(fs::read(guest.path("open")).unwrap(), b"new");
    change(&mut guest, "cut", &|guest, node| guest.set_attributes(node, set::SIZE, 1, 0).map(drop));
    assert_eq!(fs::read(guest.path("cut")).unwrap(), b"o");
    let other =
        change(&mut guest, "mode", &|guest, node| guest.set_attributes(node, set::MODE, 0, 0o600).map(drop));
    assert_eq!(fs::metadata(guest.path("mode")).unwrap().mode() & 0o777, 0o600);
    assert_ne!(other.mode() & 0o777, 0o600);
    change(&mut guest, "link", &|guest, node| {
        let body = Body::default().u64(node).bytes(b"new-link\0");
        guest.ask(opcode::LINK, ROOT, body.as_bytes()).map(drop)
    });
    assert_eq!(fs::metadata(guest.path("link")).unwrap().nlink(), 2);

    // The thread that has looked up the place means it.
    let node = guest.lookup(ROOT, "other-alone").unwrap();
    assert_eq!(guest.lookup(ROOT, "alone"), Ok(node));
    write(libc::O_WRONLY)(&mut guest, node).unwrap();
    assert_eq!(fs::read(guest.path("alone")).unwrap(), b"new");
    assert_eq!(fs::read(guest.path("other-alone")).unwrap(), b"old");
}

#[test]
fn what_the_host_replaces_is_looked_up_again() {
    let mut guest = Guest::new();
    fs::write(guest.path("file"), "old").unwrap();
    let old = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(old, libc::O_RDONLY).unwrap();
    fs::write(guest.path("new"), "new file").unwrap();
    fs::rename(guest.path("new"), guest.path("file")).unwrap();
    assert_eq!(guest.open(old, libc::O_RDONLY), Err(-libc::ESTALE));
    assert_eq!(guest.set_attributes(old, set::MODE, 0, 0o600), Err(-libc::ESTALE));
    assert_eq!(guest.read(old, handle, 0, 10).unwrap(), b"old");
    assert_eq!(guest.size(old), Ok(3));
    guest.release(old, handle);
    assert_eq!(guest.size(old), Err(-libc::ESTALE));
    let new = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(new, libc::O_RDONLY).unwrap();
    assert_eq!(guest.read(new, handle, 0, 10).unwrap(), b"new file");
    // The host exchanges a directory with its parent.
    fs::create_dir_all(guest.path("one/two")).unwrap();
    let one = guest.lookup(ROOT, "one").unwrap();
    let two = guest.lookup(one, "two").unwrap();
    guest
        .ask(opcode::GETXATTR, two, Body::default().u32(0).u32(0).bytes(b"user.x\0").as_bytes())
        .unwrap_err();
    fs::rename(guest.path("one/two"), guest.path("two")).unwrap();
    fs::rename(guest.path("one"), guest.path("two/one")).unwrap();
    assert_eq!(guest.lookup(two, "one"), Err(-libc::ESTALE));
    assert_eq!(guest.lookup(ROOT, "two"), Ok(two));
    assert_eq!(guest.lookup(two, "one"), Ok(one));
}

#[test]
fn a_file_that_the_host_moves_or_removes_stays_usable_while_it_is_open() {
    let mut guest = Guest::new();
    let names = ["moved", "replaced", "removed"];
    let begun = Instant::now();
    let mut opened = Vec::new();
    for name in names {
        fs::write(guest.path(name), name).unwrap();
        let node = guest.lookup(ROOT, name).unwrap();
        opened.push((node, guest.open(node, libc::O_RDWR).unwrap()));
    }
    let moved = fs::File::open(guest.path("moved")).unwrap();
    fs::rename(guest.path("moved"), guest.path("other")).unwrap();
    fs::write(guest.path("new"), "").unwrap();
    fs::set_permissions(guest.path("new"), Permissions::from_mode(0o600)).unwrap();
    fs::rename(guest.path("new"), guest.path("replaced")).unwrap();
    fs::remove_file(guest.path("removed")).unwrap();
    for ((node, _), name) in opened.iter().zip(names) {
        assert_eq!(guest.size(*node), Ok(name.len() as u64), "fstat of {name}");
        // While the guest may know the name, a change may be meant for what has the name now.
        let changed = guest.set_attributes(*node, set::MODE, 0, 0o640);
        assert!(changed == Err(-libc::ESTALE) || begun.elapsed() > CACHED_FOR, "{name}");
        let statx = Body::default().zeros(24);
        assert_eq!(
            long(&guest.ask(opcode::STATX, *node, statx.as_bytes()).unwrap(), 32 + 40),
            name.len() as u64
        );
    }
    for ((node, handle), name) in opened.iter().zip(names) {
        until(|| guest.set_attributes(*node, set::MODE, 0, 0o640).is_ok());
        guest.ask(opcode::STATFS, *node, &[]).unwrap();
        let again = guest.open(*node, libc::O_RDONLY).unwrap();
        assert_eq!(guest.read(*node, again, 0, 100).unwrap(), name.as_bytes());
        guest.release(*node, again);
        guest.release(*node, *handle);
        // Nothing takes the room of a file that nobody has open.
        assert_eq!(guest.size(*node), Err(-libc::ESTALE));
    }
    assert_eq!(moved.metadata().unwrap().mode() & 0o777, 0o640);
    assert_ne!(fs::metadata(guest.path("replaced")).unwrap().mode() & 0o777, 0o640);
    // It is found where it is now.
    assert_eq!(guest.lookup(ROOT, "other"), Ok(opened[0].0));
    assert_ne!(guest.lookup(ROOT, "replaced"), Ok(opened[1].0));
    guest.forget(opened[2].0, 1);
    assert_eq!(guest.size(opened[2].0), Err(-libc::ESTALE));
}

#[test]
fn a_handle_is_closed_as_that_of_its_node_only() {
    let mut guest = Guest::new();
    let (node, handle) = create(&mut guest, 0, "one", libc::O_RDWR, 0o600).unwrap();
    let (other, _) = create(&mut guest, 0, "other", libc::O_RDWR, 0o600).unwrap();
    let release = Body::default().u64(handle).zeros(16);
    for opcode in [opcode::RELEASE, opcode::RELEASEDIR] {
        assert_eq!(guest.ask(opcode, other, release.as_bytes()), Err(-libc::EBADF));
    }
    guest.write(node, handle, b"text").unwrap();
    guest.release(node, handle);
    assert_eq!(guest.write(node, handle, b"text"), Err(-libc::EBADF));
}

#[test]
fn a_file_is_made_emptied_and_opened_in_the_callers_name() {
    let mut guest = Guest::new();
    let (node, handle) = create(&mut guest, 1000, "file", libc::O_RDWR | libc::O_EXCL, 0o666).unwrap();
    let metadata = fs::metadata(guest.path("file")).unwrap();
    assert_eq!((metadata.uid(), metadata.mode() & 0o7777), (1000, 0o644));
    guest.write(node, handle, b"text").unwrap();
    assert_eq!(create(&mut guest, 0, "file", libc::O_EXCL, 0o666), Err(-libc::EEXIST));
    // The file exists already, so it is opened.
    let (again, second) = create(&mut guest, 0, "file", libc::O_RDONLY, 0o666).unwrap();
    assert_eq!((again, guest.read(again, second, 0, 10).unwrap()), (node, b"text".to_vec()));
    guest.open(node, libc::O_RDONLY | libc::O_TRUNC).unwrap();
    assert_eq!(fs::metadata(guest.path("file")).unwrap().len(), 0);
    // The guest sets O_APPEND after it has opened the file.
    guest.write_with(node, handle, b"one", 0, libc::O_APPEND).unwrap();
    guest.write_with(node, handle, b"two", 0, libc::O_APPEND).unwrap();
    guest.write_with(node, handle, b"O", 0, 0).unwrap();
    assert_eq!(fs::read(guest.path("file")).unwrap(), b"Onetwo");
    fs::create_dir(guest.path("dir")).unwrap();
    assert_eq!(create(&mut guest, 0, "dir", libc::O_RDONLY, 0o666), Err(-libc::EEXIST));
}

#[test]
fn set_id_bits_go_when_the_guest_says_so() {
    const KILL: u32 = 1 << 2;
    let mut guest = Guest::new();
    let path = guest.path("file");
    fs::write(&path, "text").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(file, libc::O_RDWR).unwrap();
    for (flags, left) in [(0, 0o6755), (KILL, 0o755)] {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
        guest.write_with(file, handle, b"x", flags, 0).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, left);
    }
    // Truncation clears the bits too, and chmod sets them.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    guest.set_attributes(file, set::SIZE | set::KILL_SUIDGID, 1, 0).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o755);
    assert_eq!(fs::metadata(&path).unwrap().len(), 1);
    guest.set_attributes(file, set::MODE, 0, 0o4711).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o4711);
    // A request for no change is what Linux sends before it changes the file in another way.
    let answer = guest.set_attributes(file, 0, 0, 0).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o711);
    assert_eq!(word(&answer, 16 + 60) & 0o7777, 0o711);
}

#[test]
fn an_access_control_list_is_the_hosts_too() {
    const ACCESS: &[u8] = b"system.posix_acl_access\0";
    let mut guest = Guest::new();
    fs::write(guest.path("file"), "").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let ask = |size: u32| [Body::default().u32(size).u32(0).as_bytes(), ACCESS].concat();
    assert_eq!(guest.ask(opcode::GETXATTR, file, &ask(0)), Err(-libc::ENODATA));
    // Version 2. Owner rw-, user 2000 r--, group ---, mask r--, others ---.
    let mut list = Body::default().u32(2);
    for (tag, bits, id) in
        [(1, 6, u32::MAX), (2, 4, 2000), (4, 0, u32::MAX), (0x10, 4, u32::MAX), (0x20, 0, u32::MAX)]
    {
        list = list.u16(tag).u16(bits).u32(id);
    }
    let body =
        Body::default().u32(list.len() as u32).u32(0).u32(0).u32(0).bytes(ACCESS).bytes(list.as_bytes());
    guest.ask(opcode::SETXATTR, file, body.as_bytes()).unwrap();
    assert_eq!(fs::metadata(guest.path("file")).unwrap().mode() & 0o777, 0o640);
    assert_eq!(guest.ask(opcode::GETXATTR, file, &ask(1000)).unwrap(), list.as_bytes());
    assert_eq!(word(&guest.ask(opcode::GETXATTR, file, &ask(0)).unwrap(), 0) as usize, list.len());
    assert_eq!(guest.ask(opcode::GETXATTR, file, &ask(8)), Err(-libc::ERANGE));
    // The default list of a directory determines the mode of a new file, whatever the umask is.
    fs::create_dir(guest.path("dir")).unwrap();
    let dir = guest.lookup(ROOT, "dir").unwrap();
    let name = b"system.posix_acl_default\0";
    let mut list = Body::default().u32(2);
    for (tag, bits) in [(1, 7), (4, 7), (0x20, 0)] {
        list = list.u16(tag).u16(bits).u32(u32::MAX);
    }
    let body = Body::default().u32(list.len() as u32).zeros(12).bytes(name).bytes(list.as_bytes());
    guest.ask(opcode::SETXATTR, dir, body.as_bytes()).unwrap();
    guest.ask(opcode::MKDIR, dir, Body::default().u32(0o777).u32(0o077).bytes(b"made\0").as_bytes()).unwrap();
    assert_eq!(fs::metadata(guest.path("dir/made")).unwrap().mode() & 0o777, 0o770);
}

#[test]
fn a_directory_is_read_in_pieces_and_its_names_are_known() {
    let mut guest = Guest::new();
    for index in 0..100 {
        fs::write(guest.path(&format!("file{index}")), "").unwrap();
    }
    for (asked, fixed) in [(opcode::READDIR, 0), (opcode::READDIRPLUS, 128)] {
        let answer = guest.ask(opcode::OPENDIR, ROOT, &[0; 8]).unwrap();
        let (handle, mut offset, mut names, mut looked_up) = (long(&answer, 0), 0, Vec::new(), Vec::new());
        loop {
            let body = Body::default().u64(handle).u64(offset).u32(1024).zeros(20);
            let answer = guest.ask(asked, ROOT, body.as_bytes()).unwrap();
            if answer.is_empty() {
                break;
            }
            assert!(answer.len() <= 1024);
            let mut at = 0;
            while at < answer.len() {
                if fixed > 0 && long(&answer, at) != 0 {
                    looked_up.push(long(&answer, at));
                }
                let entry = &answer[at + fixed..];
                let len = word(entry, 16) as usize;
                names.push(String::from_utf8(entry[24..24 + len].to_vec()).unwrap());
                offset = long(entry, 8);
                at += fixed + 24 + len.next_multiple_of(8);
            }
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 102, "{names:?}");
        assert_eq!(looked_up.len(), if fixed > 0 { 100 } else { 0 });
        for node in looked_up {
            guest.forget(node, 1);
            assert_eq!(guest.open(node, libc::O_RDONLY), Err(-libc::ESTALE));
        }
    }
}

#[test]
fn a_file_without_a_name_can_be_given_one() {
    let mut guest = Guest::new();
    let body = Body::default().u32((libc::O_RDWR | libc::O_TMPFILE) as u32).u32(0o600).u32(0).u32(0).zeros(1);
    let answer = guest.ask_as(1000, opcode::TMPFILE, ROOT, body.as_bytes()).unwrap();
    let (node, handle) = (long(&answer, 0), long(&answer, 128));
    guest.write(node, handle, b"text").unwrap();
    guest.ask(opcode::LINK, ROOT, Body::default().u64(node).bytes(b"named\0").as_bytes()).unwrap();
    assert_eq!(fs::read(guest.path("named")).unwrap(), b"text");
    assert_eq!(guest.lookup(ROOT, "named"), Ok(node));
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
fn a_file_stays_non_blocking_when_the_guest_changes_its_flags() {
    let mut guest = Guest::new();
    let (node, handle) = create(&mut guest, 0, "file", libc::O_RDWR | libc::O_APPEND, 0o644).unwrap();
    for (flags, text) in [(libc::O_APPEND, "ab"), (0, "cd"), (libc::O_APPEND, "ef")] {
        guest.write_with(node, handle, text.as_bytes(), 0, flags).unwrap();
    }
    assert_eq!(fs::read(guest.path("file")).unwrap(), b"cdef");
    let path = guest.path("file").canonicalize().unwrap();
    let open_flags = || -> Vec<i32> {
        let entries = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap());
        let open = entries.filter(|entry| fs::read_link(entry.path()).is_ok_and(|link| link == path));
        let flags = open.filter_map(|entry| {
            // An error: it was closed meanwhile.
            let info = fs::read_to_string(Path::new("/proc/self/fdinfo").join(entry.file_name())).ok()?;
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            Some(i32::from_str_radix(flags.trim(), 8).unwrap())
        });
        flags.filter(|flags| flags & libc::O_PATH == 0).collect()
    };
    // A thread that has replaced a descriptor may answer before it closes the old one.
    let deadline = Instant::now() + Duration::from_secs(10);
    while open_flags().len() > 1 && Instant::now() < deadline {
        thread::yield_now();
    }
    let flags = open_flags();
    // Another thread may write with the descriptor: its flag does not follow the last write.
    assert_eq!((flags.len(), flags[0] & libc::O_APPEND), (1, 0));
    assert_ne!(flags[0] & libc::O_NONBLOCK, 0);
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
fn a_lookup_without_room_for_its_answer_fails() {
    let mut guest = Guest::new();
    let header = guest.header(opcode::LOOKUP, ROOT, 5, 0);
    guest.driver.write(REQUEST, &header);
    guest.driver.write(REQUEST + IN_HEADER as u64, b"none\0");
    let request = (REQUEST, IN_HEADER as u32 + 5, 0);
    guest.driver.offer(REQUESTS, 0, &[request, (ANSWER, OUT_HEADER as u32 + 100, WRITE)]);
    assert_eq!(guest.driver.wait_used(REQUESTS), (0, OUT_HEADER as u32));
    let answer = guest.driver.read(ANSWER, OUT_HEADER);
    assert_eq!(word(&answer, 4) as i32, -libc::EIO);
}

#[test]
fn the_pages_of_a_file_are_kept_until_it_changes() {
    let mut guest = Guest::new();
    let path = guest.dir.path().join("file");
    fs::write(&path, "one").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    // As Linux does for lsattr(1), or a 32-bit process. Nothing is remembered by that.
    let by_no_flags = |guest: &mut Guest| guest.opened_exactly(file, 0).unwrap().1 & OPEN_KEEP_CACHE != 0;
    let mut keeps = || {
        let expected = by_no_flags(&mut guest);
        let keeps = guest.opened(file, libc::O_RDONLY).unwrap().1 & OPEN_KEEP_CACHE != 0;
        assert_eq!(keeps, expected);
        keeps
    };
    // Shortly after a change, the next change may leave the same times.
    assert!(!keeps() && !keeps());
    thread::sleep(Duration::from_secs(3));
    assert!(!keeps());
    assert!(keeps() && keeps());
    fs::write(&path, "two").unwrap();
    assert!(!keeps() && !keeps());
}

#[test]
fn a_close_is_told_of_pages_that_may_have_been_written() {
    let mut guest = Guest::new();
    fs::write(guest.dir.path().join("file"), "").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    for (flags, expected) in
        [(libc::O_RDONLY, OPEN_NOFLUSH), (libc::O_WRONLY, OPEN_NOFLUSH), (libc::O_RDWR, 0)]
    {
        assert_eq!(guest.opened(file, flags).unwrap().1 & OPEN_NOFLUSH, expected);
    }
    // A file system that may do something at close(2).
    let proc = OwnedFd::from(fs::File::open("/proc/version").unwrap());
    assert_eq!(read_write::flush_flags(libc::O_WRONLY as u32, &proc), 0);
}

/// How long the name and the attributes of a file may be cached.
fn cached_for(guest: &mut Guest, parent: u64, name: &str) -> (u64, Duration, Duration) {
    let entry = guest.ask(opcode::LOOKUP, parent, format!("{name}\0").as_bytes()).unwrap();
    let [name, attributes] = [16, 24].map(|at| Duration::from_secs(long(&entry, at)));
    (long(&entry, 0), name, attributes)
}

#[test]
fn what_only_the_guest_changes_is_cached_for_longer() {
    let mut guest = Guest::new();
    for place in ["c/rootfs/rootfs", "c/mounts/0/rootfs"] {
        fs::create_dir_all(guest.path(place)).unwrap();
        fs::write(guest.path(place).join("file"), "").unwrap();
        std::os::unix::fs::symlink("file", guest.path(place).join("link")).unwrap();
    }
    let container = guest.lookup(ROOT, "c").unwrap();
    let mounts = guest.lookup(container, "mounts").unwrap();
    let (volume, ..) = cached_for(&mut guest, mounts, "0");
    let (root, name, attributes) = cached_for(&mut guest, container, "rootfs");
    assert_eq!((name, attributes), (OWN_CACHED_FOR, OWN_CACHED_FOR));
    for (parent, link, own, absence) in [
        (root, OWN_CACHED_FOR, OWN_CACHED_FOR, OWN_ABSENCE_CACHED_FOR),
        (volume, Duration::ZERO, CACHED_FOR, CACHED_FOR),
    ] {
        let (directory, name, attributes) = cached_for(&mut guest, parent, "rootfs");
        assert_eq!((name, attributes), (own, own));
        let (_, name, attributes) = cached_for(&mut guest, directory, "file");
        assert_eq!((name, attributes), (own, own));
        let (_, name, attributes) = cached_for(&mut guest, directory, "link");
        assert_eq!((name, attributes), (link, own));
        assert_eq!(cached_for(&mut guest, directory, "none"), (0, absence, Duration::ZERO));
        let opened = guest.ask(opcode::OPENDIR, directory, &[0; 8]).unwrap();
        assert_eq!(word(&opened, 8) & OPEN_CACHE_DIR != 0, own == OWN_CACHED_FOR);
    }
    // In the directory of a container, and more so in the share, the host adds names.
    assert_eq!(cached_for(&mut guest, container, "none"), (0, CACHED_FOR, Duration::ZERO));
    assert_eq!(cached_for(&mut guest, ROOT, "rootfs"), (0, Duration::ZERO, Duration::ZERO));
}

#[test]
fn a_mount_below_the_root_of_a_container_is_not_the_guests_own() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("c/rootfs")).unwrap();
        mount_in(dir.path(), &["c/rootfs/mounted"]);
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        let container = guest.lookup(ROOT, "c").unwrap();
        let root = guest.lookup(container, "rootfs").unwrap();
        let (mounted, name, attributes) = cached_for(&mut guest, root, "mounted");
        assert_eq!((name, attributes), (CACHED_FOR, CACHED_FOR));
        let (_, name, attributes) = cached_for(&mut guest, mounted, "file");
        assert_eq!((name, attributes), (CACHED_FOR, CACHED_FOR));
    };
    drill(body, End::succeeds);
}

#[test]
fn each_file_system_has_a_number_of_its_own() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        mount_in(dir.path(), &["one", "other"]);
        fs::create_dir(dir.path().join("here")).unwrap();
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        let mut number = |parent, name: &str| {
            let entry = guest.ask(opcode::LOOKUP, parent, format!("{name}\0").as_bytes()).unwrap();
            // `fuse_attr.flags` is the last field.
            (long(&entry, 0), word(&entry, ENTRY_OUT - 4) >> ATTR_FILE_SYSTEM_SHIFT)
        };
        let [(_, here), (one, of_one), (_, of_other)] =
            ["here", "one", "other"].map(|name| number(ROOT, name));
        assert_eq!(here, 0);
        assert!(of_one > 0 && of_other > 0 && of_one != of_other, "{of_one} {of_other}");
        assert_eq!(number(one, "file").1, of_one);
    };
    drill(body, End::succeeds);
}

#[test]
fn a_file_whose_size_the_host_has_changed_is_looked_up_again_when_it_is_opened() {
    let mut guest = Guest::new();
    fs::create_dir_all(guest.path("c/rootfs")).unwrap();
    let path = guest.path("c/rootfs/file");
    fs::write(&path, "text").unwrap();
    let container = guest.lookup(ROOT, "c").unwrap();
    let root = guest.lookup(container, "rootfs").unwrap();
    let file = guest.lookup(root, "file").unwrap();
    let handle = guest.open(file, libc::O_RDWR).unwrap();
    thread::sleep(CACHED_FOR + Duration::from_millis(100));
    // The guest knows what it has written itself.
    guest.write(file, handle, b"longer text").unwrap();
    guest.open(file, libc::O_RDONLY).unwrap();
    guest.lookup(root, "file").unwrap();
    fs::write(&path, "changed by the host").unwrap();
    // What the guest was told just now is as good as before the open.
    guest.open(file, libc::O_RDONLY).unwrap();
    thread::sleep(CACHED_FOR + Duration::from_millis(100));
    // Linux would not look it up again for lsattr(1). A 32-bit process that reads gets what the host has.
    assert_eq!(guest.opened_exactly(file, 0).unwrap().1 & OPEN_DIRECT_IO, OPEN_DIRECT_IO);
    assert_eq!(guest.open(file, libc::O_RDONLY), Err(-libc::ESTALE));
    assert_eq!(guest.lookup(root, "file"), Ok(file));
    guest.open(file, libc::O_RDONLY).unwrap();
    // Without a lookup between them, the second open succeeds.
    thread::sleep(CACHED_FOR + Duration::from_millis(100));
    fs::write(&path, "changed by the host again").unwrap();
    assert_eq!(guest.open(file, libc::O_RDONLY), Err(-libc::ESTALE));
    guest.open(file, libc::O_RDONLY).unwrap();
}

#[test]
fn a_file_belongs_to_whom_the_request_names() {
    let mut guest = Guest::new();
    assert_eq!(fs::metadata("/proc/self").unwrap().uid(), 0, "this test gives files away: run it as root");
    fs::set_permissions(guest.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    // `fuse_mkdir_in`: mode, umask.
    let mut body = Vec::new();
    body.extend(0o755u32.to_le_bytes());
    body.extend(0o022u32.to_le_bytes());
    body.extend(b"dir\0");
    guest.ask_as(1000, opcode::MKDIR, ROOT, &body).unwrap();
    let metadata = fs::metadata(guest.dir.path().join("dir")).unwrap();
    assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o777), (1000, 1000, 0o755));
}

#[test]
fn who_may_create_is_for_the_guest_to_say() {
    let mut guest = Guest::new();
    // The caller is a member of the group, but the request does not say so.
    let volume = guest.dir.path().join("volume");
    fs::create_dir(&volume).unwrap();
    std::os::unix::fs::chown(&volume, Some(0), Some(5000)).unwrap();
    fs::set_permissions(&volume, fs::Permissions::from_mode(0o2770)).unwrap();
    let node = guest.lookup(ROOT, "volume").unwrap();
    let body = [&0o755u32.to_le_bytes()[..], &0u32.to_le_bytes(), b"made\0"].concat();
    guest.ask_as(1000, opcode::MKDIR, node, &body).unwrap();
    let metadata = fs::metadata(volume.join("made")).unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (1000, 5000));
}

#[test]
fn nothing_outside_of_the_directory_is_reached() {
    let mut guest = Guest::new();
    for name in ["../x", "/etc", "a/b", ".", "..", ""] {
        assert_eq!(guest.lookup(ROOT, name), Err(-libc::EINVAL), "{name}");
    }
    std::os::unix::fs::symlink("/etc", guest.dir.path().join("link")).unwrap();
    let link = guest.lookup(ROOT, "link").unwrap();
    assert!(guest.lookup(link, "passwd").is_err());
    assert!(guest.open(link, libc::O_RDONLY).is_err());
}

#[test]
fn a_device_node_of_the_guest_is_never_opened() {
    let mut guest = Guest::new();
    // `fuse_mknod_in`: mode, rdev, umask, padding. The device is /dev/zero.
    let mut body = Vec::new();
    for word in [libc::S_IFCHR | 0o666, libc::makedev(1, 5) as u32, 0, 0] {
        body.extend(word.to_le_bytes());
    }
    body.extend(b"zero\0");
    guest.ask(opcode::MKNOD, ROOT, &body).unwrap();
    assert!(fs::metadata(guest.dir.path().join("zero")).unwrap().file_type().is_char_device());
    let zero = guest.lookup(ROOT, "zero").unwrap();
    assert_eq!(guest.open(zero, libc::O_RDONLY), Err(-libc::ENXIO));
}

#[test]
fn what_has_become_a_pipe_is_not_opened_to_find_that_out() {
    let mut guest = Guest::new();
    let path = guest.path("file");
    fs::write(&path, "").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // The open of a reader blocks until there is a writer.
    let (opened, has_opened) = channel();
    let reader = thread::spawn({
        let path = path.clone();
        move || opened.send(fs::File::open(path).map(drop)).unwrap()
    });
    thread::sleep(Duration::from_millis(200));
    assert_eq!(guest.open(file, libc::O_WRONLY), Err(-libc::ESTALE));
    assert!(has_opened.recv_timeout(Duration::from_millis(500)).is_err(), "the server has opened the pipe");
    fs::OpenOptions::new().write(true).open(&path).unwrap();
    has_opened.recv().unwrap().unwrap();
    reader.join().unwrap();
}

#[test]
fn a_request_is_not_longer_than_was_negotiated() {
    const MOST: u32 = 1 << 20;
    let mut guest = Guest::new();
    fs::write(guest.path("file"), vec![7; 3 << 20]).unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(file, libc::O_RDWR).unwrap();
    for (size, expected) in [(MOST, Ok(MOST as usize)), (MOST + 1, Err(-libc::EINVAL))] {
        let body = Body::default().u64(handle).u64(0).u32(size).zeros(20);
        let header = guest.header(opcode::READ, file, body.len(), 0);
        assert_eq!(guest.send_with_room(header, body.as_bytes(), 2 * MOST).map(|data| data.len()), expected);
    }
    let body = Body::default().u64(handle).u64(0).u32(MOST + 1).zeros(20).zeros(MOST as usize + 1);
    let header = guest.header(opcode::WRITE, file, body.len(), 0);
    guest.driver.write(REQUEST, &header);
    let long = ANSWER + 0x40_0000;
    guest.driver.write(long, body.as_bytes());
    guest.driver.offer(
        REQUESTS,
        0,
        &[(REQUEST, IN_HEADER as u32, 0), (long, body.len() as u32, 0), (ANSWER, 0x1000, WRITE)],
    );
    guest.driver.wait_used(REQUESTS);
    assert_eq!(word(&guest.driver.read(ANSWER, OUT_HEADER), 4) as i32, -libc::EINVAL);

    fs::create_dir(guest.path("dir")).unwrap();
    for index in 0..6000 {
        fs::write(guest.path(&format!("dir/{index:0200}")), "").unwrap();
    }
    let dir = guest.lookup(ROOT, "dir").unwrap();
    for asked in [opcode::READDIR, opcode::READDIRPLUS] {
        let handle = long_of(&guest.ask(opcode::OPENDIR, dir, &[0; 8]).unwrap());
        let body = Body::default().u64(handle).u64(0).u32(8 * MOST).zeros(20);
        let header = guest.header(asked, dir, body.len(), 0);
        let answer = guest.send_with_room(header, body.as_bytes(), 8 * MOST).unwrap();
        assert!((MOST as usize / 2..=MOST as usize).contains(&answer.len()), "{}", answer.len());
    }
}

/// Makes every open of a file or a directory on a mount wait, as on NFS whose server does not respond. When the result
/// is dropped, they continue.
#[allow(unsafe_code)]
fn make_opens_wait(mount_point: &Path) -> OwnedFd {
    let path = std::ffi::CString::new(mount_point.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: the arguments are numbers.
    let fd = unsafe { libc::fanotify_init(libc::FAN_CLASS_CONTENT, libc::O_RDONLY as u32) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the descriptor is new, and only this value owns it.
    let fanotify = unsafe { OwnedFd::from_raw_fd(fd) };
    let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_MOUNT;
    // SAFETY: the call only reads the path, which lives until it returns.
    let marked = unsafe {
        let mask = libc::FAN_OPEN_PERM | libc::FAN_ONDIR;
        libc::fanotify_mark(fd, flags, mask, libc::AT_FDCWD, path.as_ptr())
    };
    assert_eq!(marked, 0, "{}", io::Error::last_os_error());
    fanotify
}

#[test]
fn a_file_system_that_does_not_respond_does_not_stop_the_others() {
    const SLOW: usize = 20;
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        let slow = dir.path().join("slow");
        fs::create_dir(&slow).unwrap();
        unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(Some("slow"), &slow, Some("tmpfs"), MsFlags::empty(), none).unwrap();
        fs::write(slow.join("file"), "slow").unwrap();
        fs::write(dir.path().join("file"), "fast").unwrap();
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        let slow_dir = guest.lookup(ROOT, "slow").unwrap();
        let slow_file = guest.lookup(slow_dir, "file").unwrap();
        let slow_handle = guest.open(slow_file, libc::O_RDWR).unwrap();
        let waiting = make_opens_wait(&slow);

        let heads: Vec<u16> = (0..SLOW).map(|index| 100 + 4 * index as u16).collect();
        for head in &heads {
            let at = BUFFERS + 0x80_0000 + 0x1000 * u64::from(*head);
            let header = guest.header(opcode::OPEN, slow_file, 8, 0);
            guest.driver.write(at, &[&header[..], &[0; 8]].concat());
            let buffers = [(at, IN_HEADER as u32 + 8, 0), (at + 0x800, OUT_HEADER as u32 + 0x100, WRITE)];
            guest.driver.offer(REQUESTS, *head, &buffers);
        }
        // A request for both is refused before it waits for one of them.
        let file = guest.lookup(ROOT, "file").unwrap();
        let handle = guest.open(file, libc::O_RDWR).unwrap();
        let link = Body::default().u64(slow_file).bytes(b"link\0");
        assert_eq!(guest.ask(opcode::LINK, ROOT, link.as_bytes()), Err(-libc::EXDEV));
        let rename = Body::default().u64(slow_dir).bytes(b"file\0file\0");
        assert_eq!(guest.ask(opcode::RENAME, ROOT, rename.as_bytes()), Err(-libc::EXDEV));
        let copy = Body::default().u64(handle).u64(0).u64(slow_file).u64(slow_handle).u64(0).u64(4).u64(0);
        assert_eq!(guest.ask(opcode::COPY_FILE_RANGE, file, copy.as_bytes()), Err(-libc::EXDEV));
        // The other file system is served while three requests wait and the others are parked.
        for _ in 0..50 {
            let file = guest.lookup(ROOT, "file").unwrap();
            let handle = guest.open(file, libc::O_RDONLY).unwrap();
            assert_eq!(guest.read(file, handle, 0, 10).unwrap(), b"fast");
            guest.ask(opcode::RELEASE, file, Body::default().u64(handle).zeros(16).as_bytes()).unwrap();
        }
        drop(waiting);
        let mut done: Vec<u16> = heads.iter().map(|_| guest.driver.wait_used(REQUESTS).0).collect();
        done.sort_unstable();
        assert_eq!(done, heads);
        let at = BUFFERS + 0x80_0000 + 0x1000 * u64::from(heads[0]) + 0x800;
        assert_eq!(word(&guest.driver.read(at, OUT_HEADER), 4), 0);
    };
    drill(body, End::succeeds);
}

#[test]
fn more_requests_than_the_queues_have_entries_break_the_device() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(Some("slow"), dir.path(), Some("tmpfs"), MsFlags::empty(), none).unwrap();
        fs::write(dir.path().join("file"), "slow").unwrap();
        let mount_point = dir.path().to_owned();
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        let file = guest.lookup(ROOT, "file").unwrap();
        let _waiting = make_opens_wait(&mount_point);
        let header = guest.header(opcode::OPEN, file, 8, 0);
        guest.driver.write(REQUEST, &[&header[..], &[0; 8]].concat());
        let buffers = [(REQUEST, IN_HEADER as u32 + 8, 0), (ANSWER, OUT_HEADER as u32 + 0x100, WRITE)];
        guest.driver.offer(REQUESTS, 0, &buffers);
        // The driver makes the same chain available again and again. The device must not remember it without end.
        let deadline = Instant::now() + Duration::from_secs(20);
        while !guest.driver.interrupt.is_reset_needed() {
            assert!(Instant::now() < deadline, "the device takes any number of requests");
            for _ in 0..100 {
                guest.driver.publish(REQUESTS, 0);
            }
            thread::sleep(Duration::from_millis(10));
        }
    };
    drill(body, End::succeeds);
}

/// Numbers that look random and are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// A guest's kernel would not send these requests at the same time. The tables must stay consistent all the same: an
/// inconsistency would be a panic of a thread, whose request would have no answer.
#[test]
fn requests_that_contradict_each_other_do_no_harm() {
    const AT_ONCE: u16 = 64;
    const NAMES: [&str; 6] = ["a\0", "b\0", "c\0", "d\0", "dir\0", "e\0"];
    let mut guest = Guest::with_limits(few());
    fs::create_dir(guest.path("dir")).unwrap();
    let (mut random, mut done) = (Random(7), 0);
    for _ in 0..300 {
        for index in 0..AT_ONCE {
            let name = NAMES[random.below(6) as usize].as_bytes();
            // Nodes and handles have numbers with an index in the low bits. Small numbers are likely to exist.
            let number = |random: &mut Random| random.below(2000) << 20 | (1 + random.below(12));
            let parent = if random.below(4) == 0 { number(&mut random) } else { ROOT };
            let node = number(&mut random);
            let body = Body::default();
            let (operation, node, body) = match random.below(14) {
                0 => (opcode::LOOKUP, parent, body.bytes(name)),
                1 => (opcode::CREATE, parent, body.u32(2).u32(0o600).u32(0).u32(0).bytes(name)),
                2 => (opcode::UNLINK, parent, body.bytes(name)),
                3 => (opcode::RENAME, parent, body.u64(ROOT).bytes(name).bytes(NAMES[2].as_bytes())),
                4 => (opcode::OPEN, node, body.zeros(8)),
                5 => (opcode::RELEASE, node, body.u64(number(&mut random)).zeros(16)),
                6 => (opcode::FORGET, node, body.u64(1 + random.below(3))),
                7 => (opcode::LINK, parent, body.u64(node).bytes(name)),
                8 => (opcode::MKDIR, parent, body.u32(0o700).u32(0).bytes(name)),
                9 => (opcode::RMDIR, parent, body.bytes(name)),
                10 => (opcode::GETATTR, node, body.zeros(16)),
                11 => (opcode::TMPFILE, ROOT, body.u32(2).u32(0o600).u32(0).u32(0).zeros(1)),
                12 if random.below(50) == 0 => (opcode::DESTROY, ROOT, body),
                _ => (opcode::READ, node, body.u64(number(&mut random)).u64(0).u32(16).zeros(20)),
            };
            let at = BUFFERS + 0x80_0000 + 0x1000 * u64::from(index);
            let header = guest.header(operation, node, body.len(), 0);
            guest.driver.write(at, &[&header[..], body.as_bytes()].concat());
            let buffers = [(at, (IN_HEADER + body.len()) as u32, 0), (at + 0x800, 0x200, WRITE)];
            guest.driver.offer(REQUESTS, 2 * index, &buffers);
        }
        for _ in 0..AT_ONCE {
            let (head, len) = guest.driver.wait_used(REQUESTS);
            let answer = BUFFERS + 0x80_0000 + 0x800 * u64::from(head) + 0x800;
            done += u32::from(len > 0 && word(&guest.driver.read(answer, OUT_HEADER), 4) == 0);
        }
    }
    assert!(done > 1000, "only {done} requests have succeeded");
    assert!(!guest.driver.interrupt.is_reset_needed());
    guest.ask(opcode::DESTROY, ROOT, &[]).unwrap();
    fs::write(guest.path("file"), "x").unwrap();
    guest.lookup(ROOT, "file").unwrap();
}

/// A request that is handled while the session ends may keep a descriptor under its number after that.
#[test]
fn the_numbers_of_a_session_are_not_used_by_the_next_one() {
    let mut guest = Guest::new();
    fs::write(guest.path("file"), "").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(file, libc::O_RDONLY).unwrap();
    guest.ask(opcode::DESTROY, ROOT, &[]).unwrap();
    let next = guest.lookup(ROOT, "file").unwrap();
    assert_ne!(next, file);
    assert_ne!(guest.open(next, libc::O_RDONLY).unwrap(), handle);
}

#[test]
fn many_requests_at_once_are_all_answered() {
    const FILES: usize = 100;
    let mut guest = Guest::new();
    for index in 0..FILES {
        fs::write(guest.path(&index.to_string()), index.to_string()).unwrap();
    }
    for round in 0..20 {
        for index in 0..FILES {
            let at = BUFFERS + 0x80_0000 + 0x1000 * index as u64;
            let name = format!("{index}\0");
            let header = guest.header(opcode::LOOKUP, ROOT, name.len(), 0);
            guest.driver.write(at, &[&header[..], name.as_bytes()].concat());
            let buffers = [(at, (IN_HEADER + name.len()) as u32, 0), (at + 0x800, 0x200, WRITE)];
            guest.driver.offer(REQUESTS, 2 * index as u16, &buffers);
        }
        let mut heads: Vec<_> = (0..FILES).map(|_| guest.driver.wait_used(REQUESTS)).collect();
        heads.sort_unstable();
        let expected: Vec<_> = (0..FILES as u16).map(|index| (2 * index, OUT_HEADER as u32 + 128)).collect();
        assert_eq!(heads, expected, "round {round}");
    }
    // Each was looked up 20 times.
    let node = guest.lookup(ROOT, "7").unwrap();
    guest.forget(node, 20);
    guest.ask(opcode::GETATTR, node, &[0; 16]).unwrap();
    guest.forget(node, 1);
    assert_eq!(guest.ask(opcode::GETATTR, node, &[0; 16]), Err(-libc::ESTALE));
}

/// A pod can do this if it has the host's /proc as a volume.
#[test]
fn the_memory_of_the_vmm_is_not_served() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("proc")).unwrap();
        unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(Some("/proc"), &dir.path().join("proc"), none, MsFlags::MS_BIND | MsFlags::MS_REC, none)
            .unwrap();
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        let proc = guest.lookup(ROOT, "proc").unwrap();
        let own = guest.lookup(proc, &std::process::id().to_string()).unwrap();
        let task = guest.lookup(own, "task").unwrap();
        let thread = guest.lookup(task, &std::process::id().to_string()).unwrap();
        for dir in [own, thread] {
            for name in ["mem", "maps", "smaps", "pagemap", "environ", "auxv", "clear_refs"] {
                let file = guest.lookup(dir, name).unwrap();
                for flags in [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR] {
                    assert_eq!(guest.open(file, flags), Err(-libc::EACCES), "{name}");
                }
            }
        }
        // The other files of procfs are served.
        let status = guest.lookup(own, "status").unwrap();
        let handle = guest.open(status, libc::O_RDONLY).unwrap();
        assert!(guest.read(status, handle, 0, 100).unwrap().starts_with(b"Name:"));
        let load = guest.lookup(proc, "loadavg").unwrap();
        guest.open(load, libc::O_RDONLY).unwrap();
    };
    drill(body, End::succeeds);
}

#[test]
fn garbage_is_answered_and_breaks_nothing() {
    let mut guest = Guest::new();
    for asked in 0..60 {
        // These have no answer, or end the session.
        let silent = [opcode::FORGET, opcode::BATCH_FORGET, opcode::INTERRUPT, opcode::DESTROY];
        if silent.contains(&asked) {
            continue;
        }
        for (node, body) in [(ROOT, vec![0xff; 64]), (u64::MAX, vec![]), (12345, vec![0x41; 5000])] {
            for len in [body.len(), 0x10_0000, usize::MAX / 2] {
                let mut header = guest.header(asked, node, 0, 0);
                header[..4].copy_from_slice(&(IN_HEADER.wrapping_add(len) as u32).to_le_bytes());
                // Some of it may be valid. There must be an answer, and it must be well-formed.
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
    guest.forget(file, 1);
    assert_eq!(guest.open(file, libc::O_RDONLY), Err(-libc::ESTALE));
}

#[test]
fn the_numbers_of_a_session_are_not_used_by_the_next() {
    let mut guest = Guest::new();
    fs::write(guest.path("file"), "x").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(file, libc::O_RDONLY).unwrap();
    guest.ask(opcode::DESTROY, 0, &[]).unwrap();
    guest.init();
    // A request of the first session that is still handled must find neither.
    let later = guest.lookup(ROOT, "file").unwrap();
    assert_ne!(later, file);
    assert_ne!(guest.open(later, libc::O_RDONLY).unwrap(), handle);
    assert_eq!(guest.open(file, libc::O_RDONLY), Err(-libc::ESTALE));
    assert_eq!(guest.read(later, handle, 0, 1), Err(-libc::EBADF));
}

#[test]
fn a_request_that_is_too_short_for_a_header_has_no_answer() {
    let mut guest = Guest::new();
    guest.driver.offer(REQUESTS, 0, &[(REQUEST, 8, 0), (ANSWER, 0x1000, WRITE)]);
    assert_eq!(guest.driver.wait_used(REQUESTS), (0, 0));
    // A request without room for an answer has none either.
    let header = guest.header(opcode::STATFS, ROOT, 0, 0);
    guest.driver.write(REQUEST, &header);
    guest.driver.offer(REQUESTS, 0, &[(REQUEST, IN_HEADER as u32, 0), (ANSWER, 8, WRITE)]);
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
    assert_eq!(guest.open(file, libc::O_RDONLY), Err(-libc::ESTALE));
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
    let with_tag = |tag: &str, dir: &Path| Fs::with_limits(tag, dir, 1, Limits::of_this_process(1));
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    for tag in ["", "0123456789012345678901234567890123456", "a\0b"] {
        assert!(matches!(with_tag(tag, dir.path()), Err(FsError::Tag { .. })), "{tag:?}");
    }
    assert!(matches!(with_tag("x", &dir.path().join("none")), Err(FsError::Serve { .. })));
    assert!(matches!(with_tag("x", &dir.path().join("file")), Err(FsError::Serve { .. })));
}

/// A guest keeps what it knows and has open, even of a container that is deleted.
#[test]
fn nothing_is_open_of_what_the_host_has_unmounted() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        let places = ["one", "two"].map(|name| dir.path().join(name));
        for place in &places {
            fs::create_dir(place).unwrap();
            mount(Some("files"), place, Some("tmpfs"), MsFlags::empty(), none).unwrap();
            fs::create_dir(place.join("volume")).unwrap();
            mount(Some("volume"), &place.join("volume"), Some("tmpfs"), MsFlags::empty(), none).unwrap();
            for name in ["kept", "removed"] {
                fs::write(place.join("volume").join(name), name).unwrap();
            }
        }
        let devices = places.clone().map(|place| fs::metadata(place.join("volume")).unwrap().dev());
        let open_on = |device| {
            let entries = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
            entries.filter(|fd| fs::metadata(fd).is_ok_and(|file| file.dev() == device)).count()
        };
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        let opened = ["one", "two"].map(|name| {
            let top = guest.lookup(ROOT, name).unwrap();
            let volume = guest.lookup(top, "volume").unwrap();
            let files = ["kept", "removed"].map(|name| {
                let file = guest.lookup(volume, name).unwrap();
                (file, guest.open(file, libc::O_RDWR).unwrap())
            });
            guest.ask(opcode::UNLINK, volume, b"removed\0").unwrap();
            files
        });
        assert!(devices.iter().all(|device| open_on(*device) > 0));
        // A name in the volume would keep the mount in use if its node could be below another directory.
        let [one, stays] = ["one", "two"].map(|name| guest.lookup(ROOT, name).unwrap());
        let volume = guest.lookup(one, "volume").unwrap();
        let listing = long(&guest.ask(opcode::OPENDIR, volume, &[0; 8]).unwrap(), 0);
        let body = Body::default().u64(listing).u64(0).u32(1024).zeros(20);
        assert_eq!(guest.ask(opcode::READDIRPLUS, stays, body.as_bytes()), Err(-libc::EBADF));
        nix::mount::umount2(&places[0], nix::mount::MntFlags::MNT_DETACH).unwrap();
        guest.device.control().close_unmounted();
        let deadline = Instant::now() + Duration::from_secs(5);
        while open_on(devices[0]) > 0 {
            assert!(Instant::now() < deadline, "{} descriptors are open", open_on(devices[0]));
            thread::sleep(Duration::from_millis(5));
        }
        for (file, handle) in opened[0] {
            assert_eq!(guest.read(file, handle, 0, 10), Err(-libc::ESTALE));
        }
        for ((file, handle), text) in opened[1].into_iter().zip(["kept", "removed"]) {
            assert_eq!(guest.read(file, handle, 0, 10).unwrap(), text.as_bytes());
        }
    };
    drill(body, End::succeeds);
}

/// Makes a private mount namespace, and mounts a file system with a file at each of `names` in `dir`. Returns the
/// device
/// number of the first one.
fn mount_in(dir: &Path, names: &[&str]) -> u64 {
    unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    for place in names.iter().map(|name| dir.join(name)) {
        fs::create_dir_all(&place).unwrap();
        mount(Some("files"), &place, Some("tmpfs"), MsFlags::empty(), none).unwrap();
        fs::write(place.join("file"), "text").unwrap();
    }
    fs::metadata(dir.join(names[0])).unwrap().dev()
}

fn server_of(dir: &Path) -> (Arc<Shared>, Server) {
    let root = Arc::new(openat(CWD, dir, OFlags::PATH, Mode::empty()).unwrap());
    let stat = stat_at(&*root, c"").unwrap();
    let shared = Arc::new(Shared::new(root, &stat, Limits::of_this_process(1), false).unwrap());
    (shared.clone(), Server::new(shared, Arc::new(Counts::new())))
}

/// Files that a request has opened before the host unmounts them are not kept open.
#[test]
fn a_request_that_is_handled_meanwhile_brings_nothing_back_that_was_unmounted() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        let device = mount_in(dir.path(), &["one"]);
        let (shared, mut server) = server_of(dir.path());
        let (top, _) = server.find(ROOT, c"one").unwrap();
        let (file, stat) = server.find(top, c"file").unwrap();
        let (append, flags) = (OFlags::RDWR | OFlags::APPEND, OFlags::RDWR);
        let open = |server: &mut Server, flags| server.open_node(file, flags).unwrap().0;
        let opened = open(&mut server, append);
        let handle = server.add_handle(file, append, opened).unwrap();
        // What the requests have opened.
        let (directory, path) = (server.path(top).unwrap(), server.path(file).unwrap());
        let files = [append, flags, flags].map(|flags| open(&mut server, flags));
        let [kept, replaced, added] = files;
        let nameless = open(&mut server, flags);

        nix::mount::umount2(&dir.path().join("one"), nix::mount::MntFlags::MNT_DETACH).unwrap();
        shared.close_unmounted();
        let stale = Err(Errno::STALE);
        assert_eq!(shared.tables().nodes.keep(top, directory), stale);
        assert_eq!(shared.tables().nodes.keep(file, path), stale);
        assert_eq!(shared.tables().keep_file(handle, append, &Arc::new(kept)), stale);
        assert_eq!(shared.tables().replace_file(handle, flags, &Arc::new(replaced)), stale);
        assert_eq!(server.add_handle(file, flags, added), Err(Errno::STALE));
        let mut other = stat;
        other.stx_ino += 1;
        assert_eq!(shared.tables().nodes.found(top, c"new", &other, true), Err(Errno::STALE));
        assert_eq!(shared.tables().nodes.found_nameless(top, &other, nameless), Err(Errno::STALE));

        while shared.take_unused(|_| true).is_some() {}
        let fds = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
        let left = fds.filter(|fd| fs::metadata(fd).is_ok_and(|file| file.dev() == device)).count();
        assert_eq!(left, 0);
        // The same file in a later mount with the same number is another one.
        assert_ne!(shared.tables().nodes.found(ROOT, c"one", &stat, true).unwrap(), file);
    };
    drill(body, End::succeeds);
}

/// Closing a file may wait for its file system, as other requests do.
#[test]
fn what_a_session_had_open_is_closed_by_threads_of_its_file_systems() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        let device = mount_in(dir.path(), &["one"]);
        let (shared, mut server) = server_of(dir.path());
        let (top, _) = server.find(ROOT, c"one").unwrap();
        let (file, _) = server.find(top, c"file").unwrap();
        let (opened, _) = server.open_node(file, OFlags::RDWR).unwrap();
        server.add_handle(file, OFlags::RDWR, opened).unwrap();
        let held = server.hold(top, c"file").unwrap();
        shared.tables().nodes.lost(held);
        let open = || {
            let fds = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
            fds.filter(|fd| fs::metadata(fd).is_ok_and(|file| file.dev() == device)).count()
        };
        let close_all = || while shared.take_unused(|_| true).is_some() {};
        close_all();
        // Of the directory, of the file without a name, and of the handle.
        assert_eq!(open(), 3);
        server.destroy().unwrap();
        assert_eq!(open(), 3, "the thread does not wait for the file system");
        close_all();
        assert_eq!(open(), 0);
    };
    drill(body, End::succeeds);
}

/// The guest may look up a container that is created just then.
#[test]
fn what_is_found_while_it_is_checked_what_was_unmounted_stays_open() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        mount_in(dir.path(), &["one", "new"]);
        let (shared, mut server) = server_of(dir.path());
        server.find(ROOT, c"one").unwrap();
        nix::mount::umount2(&dir.path().join("one"), nix::mount::MntFlags::MNT_DETACH).unwrap();
        let gone = shared.gone();
        let (new, _) = server.find(ROOT, c"new").unwrap();
        let (file, _) = server.find(new, c"file").unwrap();
        let (opened, _) = server.open_node(file, OFlags::RDWR).unwrap();
        let handle = server.add_handle(file, OFlags::RDWR, opened).unwrap();
        shared.tables().close_unmounted(&gone);
        assert!(server.file_if_open(Opened::Handle(handle)).unwrap().is_some());
        assert!(server.path(file).is_ok());
    };
    drill(body, End::succeeds);
}
