//! Directories of an exclusive share, which the guest reads without a handle.

use std::collections::BTreeSet;

use super::{exclusive::guest_of, *};
use crate::virtio::fs::open_files::NO_HANDLE;

/// The root of a container, whose directories the host does not change.
fn guest_and_root(limits: Limits) -> (Guest, u64) {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("c/rootfs")).unwrap();
    let mut guest = guest_of(dir, limits);
    let container = guest.lookup(ROOT, "c").unwrap();
    let root = guest.lookup(container, "rootfs").unwrap();
    (guest, root)
}

fn make_files(guest: &Guest, directory: &str, count: usize) {
    let directory = guest.path("c/rootfs").join(directory);
    fs::create_dir_all(&directory).unwrap();
    (0..count).for_each(|index| fs::write(directory.join(format!("file-{index:04}")), "").unwrap());
}

/// Entries of a directory from a position on, with their positions. Those of READDIRPLUS are forgotten.
fn read_some(guest: &mut Guest, asked: u32, directory: u64, position: u64) -> Vec<(String, u64)> {
    let body = Body::default().u64(NO_HANDLE).u64(position).u32(1024).zeros(20);
    let answer = guest.ask(asked, directory, body.as_bytes()).unwrap();
    let fixed = if asked == opcode::READDIRPLUS { 128 } else { 0 };
    let (mut at, mut entries, mut looked_up) = (0, Vec::new(), Vec::new());
    while at < answer.len() {
        if fixed > 0 && long(&answer, at) != 0 {
            looked_up.push(long(&answer, at));
        }
        let entry = &answer[at + fixed..];
        let len = word(entry, 16) as usize;
        entries.push((String::from_utf8(entry[24..24 + len].to_vec()).unwrap(), long(entry, 8)));
        at += fixed + 24 + len.next_multiple_of(8);
    }
    looked_up.into_iter().for_each(|node| guest.forget(node, 1));
    entries
}

/// The names in a directory from a position on, in order.
fn read_from(guest: &mut Guest, asked: u32, directory: u64, mut position: u64) -> Vec<String> {
    let mut names = Vec::new();
    loop {
        let entries = read_some(guest, asked, directory, position);
        let Some((_, next)) = entries.last() else { return names };
        position = *next;
        assert!(position > 0 && position < 1 << 63);
        names.extend(entries.into_iter().map(|(name, _)| name));
    }
}

fn list(guest: &mut Guest, directory: u64) -> BTreeSet<String> {
    let names = read_from(guest, opcode::READDIR, directory, 0);
    let set: BTreeSet<_> = names.iter().cloned().collect();
    assert_eq!(set.len(), names.len(), "a name comes twice: {names:?}");
    set
}

fn remove(guest: &mut Guest, directory: u64, name: &str) {
    guest.ask(opcode::UNLINK, directory, format!("{name}\0").as_bytes()).unwrap();
}

#[test]
fn a_directory_is_read_without_a_handle() {
    let (mut guest, root) = guest_and_root(few());
    make_files(&guest, "", 300);
    // Linux does not send this request again, and none when the directory is closed.
    assert_eq!(guest.ask(opcode::OPENDIR, root, &[0; 8]), Err(-libc::ENOSYS));
    for asked in [opcode::READDIR, opcode::READDIRPLUS] {
        let names: BTreeSet<_> = read_from(&mut guest, asked, root, 0).into_iter().collect();
        assert_eq!(names.len(), 302);
        assert!(["file-0000", "file-0299", ".", ".."].iter().all(|name| names.contains(*name)));
    }
    // Each entry of an answer is a position: the buffer of a process may end there.
    let entries = read_some(&mut guest, opcode::READDIR, root, 0);
    let all = read_from(&mut guest, opcode::READDIR, root, 0);
    for (index, (name, position)) in entries.iter().enumerate() {
        assert_eq!(*name, all[index]);
        assert_eq!(read_from(&mut guest, opcode::READDIR, root, *position), all[index + 1..]);
    }
    guest.ask(opcode::FSYNCDIR, root, &[0; 16]).unwrap();
    make_files(&guest, "below", 0);
    let file = guest.lookup(root, "file-0000").unwrap();
    let body = Body::default().u64(NO_HANDLE).u64(0).u32(1024).zeros(20);
    assert_eq!(guest.ask(opcode::READDIR, file, body.as_bytes()), Err(-libc::ENOTDIR));
    assert!(guest.descriptors() < 10, "{}", guest.descriptors());
}

#[test]
fn each_entry_comes_once_while_files_are_removed_and_created() {
    let (mut guest, root) = guest_and_root(few());
    make_files(&guest, "", 1000);
    let (mut position, mut seen) = (0, BTreeSet::new());
    loop {
        let entries = read_some(&mut guest, opcode::READDIR, root, position);
        let Some((_, next)) = entries.last() else { break };
        position = *next;
        for (name, _) in entries.into_iter().filter(|(name, _)| name.starts_with("file-")) {
            remove(&mut guest, root, &name);
            assert!(seen.insert(name));
        }
        // Others begin to read the directory meanwhile, and change it.
        read_some(&mut guest, opcode::READDIR, root, 0);
        let name = format!("new-{}", seen.len());
        create_in(&mut guest, root, &name);
    }
    assert_eq!(seen.len(), 1000);
    let left = list(&mut guest, root);
    assert!(left.iter().all(|name| name.starts_with("new-") || name.starts_with('.')), "{left:?}");
}

fn create_in(guest: &mut Guest, directory: u64, name: &str) {
    let body = Body::default().u32(libc::O_RDWR as u32).u32(0o600).u32(0).u32(0).bytes(name.as_bytes());
    guest.ask(opcode::CREATE, directory, body.zeros(1).as_bytes()).unwrap();
}

#[test]
fn each_entry_of_a_large_directory_comes_once_though_another_process_is_far_ahead() {
    const FILES: usize = 12_000;
    let (mut guest, root) = guest_and_root(Limits::of_this_process(1));
    make_files(&guest, "", FILES);
    let begun = read_some(&mut guest, opcode::READDIR, root, 0);
    assert_eq!(list(&mut guest, root).len(), FILES + 2);
    begun
        .iter()
        .filter(|(name, _)| name.starts_with("file"))
        .for_each(|(name, _)| remove(&mut guest, root, name));
    let rest = read_from(&mut guest, opcode::READDIR, root, begun.last().unwrap().1);
    assert_eq!(begun.len() + rest.len(), FILES + 2);
    // A position of which the entry is not kept any more: the directory is read again up to it.
    let left = read_from(&mut guest, opcode::READDIR, root, 0);
    let mut position = 0;
    while let Some((_, next)) = read_some(&mut guest, opcode::READDIR, root, position).last() {
        position = *next;
    }
    assert_eq!(read_from(&mut guest, opcode::READDIR, root, (position >> 32 << 32) + 10), left[10..]);
}

#[test]
fn a_change_is_seen_at_once_by_whoever_begins_to_read() {
    let (mut guest, root) = guest_and_root(few());
    make_files(&guest, "other", 0);
    let other = guest.lookup(root, "other").unwrap();
    let names = |guest: &mut Guest, directory| -> Vec<String> {
        list(guest, directory).into_iter().filter(|name| !name.starts_with('.')).collect()
    };
    assert_eq!(names(&mut guest, root), ["other"]);
    create_in(&mut guest, root, "file");
    assert_eq!(names(&mut guest, root), ["file", "other"]);
    let made = Body::default().u32(0o755).u32(0).bytes(b"dir\0");
    guest.ask(opcode::MKDIR, root, made.as_bytes()).unwrap();
    guest.ask(opcode::SYMLINK, root, b"link\0target\0").unwrap();
    let made = Body::default().u32(libc::S_IFIFO | 0o600).u32(0).u32(0).u32(0).bytes(b"pipe\0");
    guest.ask(opcode::MKNOD, root, made.as_bytes()).unwrap();
    assert_eq!(names(&mut guest, root), ["dir", "file", "link", "other", "pipe"]);
    let file = guest.lookup(root, "file").unwrap();
    guest.ask(opcode::LINK, root, Body::default().u64(file).bytes(b"hard\0").as_bytes()).unwrap();
    guest.ask(opcode::RMDIR, root, b"dir\0").unwrap();
    assert_eq!(names(&mut guest, root), ["file", "hard", "link", "other", "pipe"]);
    assert!(names(&mut guest, other).is_empty());
    guest.ask(opcode::RENAME, root, Body::default().u64(other).bytes(b"hard\0moved\0").as_bytes()).unwrap();
    assert_eq!(names(&mut guest, root), ["file", "link", "other", "pipe"]);
    assert_eq!(names(&mut guest, other), ["moved"]);
    let exchange = Body::default().u64(other).u32(libc::RENAME_EXCHANGE).u32(0);
    guest.ask(opcode::RENAME2, root, exchange.bytes(b"pipe\0moved\0").as_bytes()).unwrap();
    remove(&mut guest, root, "link");
    assert_eq!(names(&mut guest, root), ["file", "other", "pipe"]);
    // The host changes the directories above the roots of containers.
    let container = guest.lookup(ROOT, "c").unwrap();
    assert_eq!(names(&mut guest, container), ["rootfs"]);
    fs::write(guest.path("c/new"), "").unwrap();
    assert_eq!(names(&mut guest, container), ["new", "rootfs"]);
}

#[test]
fn listings_take_a_bounded_number_of_descriptors_and_go_on_after_they_were_removed() {
    const DIRECTORIES: usize = 40;
    let (mut guest, root) = guest_and_root(few());
    let mut begun = Vec::new();
    for index in 0..DIRECTORIES {
        make_files(&guest, &index.to_string(), 600);
        let directory = guest.lookup(root, &index.to_string()).unwrap();
        let entries = read_some(&mut guest, opcode::READDIR, directory, 0);
        begun.push((directory, entries));
    }
    assert!(guest.descriptors() < 20, "{}", guest.descriptors());
    for (directory, entries) in begun {
        let mut names: BTreeSet<_> = entries.iter().map(|(name, _)| name.clone()).collect();
        names.extend(read_from(&mut guest, opcode::READDIR, directory, entries.last().unwrap().1));
        assert_eq!(names.len(), 602);
    }
    // What the guest makes up is no position that takes long to reach.
    let body = Body::default().u64(NO_HANDLE).u64(u64::MAX).u32(1024).zeros(20);
    assert_eq!(guest.ask(opcode::READDIR, root, body.as_bytes()), Err(-libc::ESTALE));
    let body = Body::default().u64(NO_HANDLE).u64(1 << 19).u32(1024).zeros(20);
    assert_eq!(guest.ask(opcode::READDIR, root, body.as_bytes()), Ok(Vec::new()));
}

/// Makes a directory with 10 files, reads it to its end, and removes it.
fn make_read_and_remove(guest: &mut Guest, root: u64, name: &str) {
    make_files(guest, name, 10);
    let directory = guest.lookup(root, name).unwrap();
    for file in list(guest, directory).iter().filter(|name| name.starts_with("file-")) {
        remove(guest, directory, file);
    }
    guest.ask(opcode::RMDIR, root, format!("{name}\0").as_bytes()).unwrap();
}

#[test]
fn nothing_is_left_by_who_removes_what_it_reads_and_reads_many_directories_meanwhile() {
    let (mut guest, root) = guest_and_root(few());
    make_files(&guest, "tree", 100);
    let tree = guest.lookup(root, "tree").unwrap();
    let (mut position, mut pages) = (0, 0);
    loop {
        let entries = read_some(&mut guest, opcode::READDIR, tree, position);
        let Some((_, next)) = entries.last() else { break };
        (position, pages) = (*next, pages + 1);
        for (name, _) in entries.into_iter().filter(|(name, _)| name.starts_with("file-")) {
            remove(&mut guest, tree, &name);
            // Linux forgets it later.
            make_read_and_remove(&mut guest, root, &format!("dir-of-{name}"));
        }
    }
    guest.ask(opcode::RMDIR, root, b"tree\0").unwrap();
    assert!((4..8).contains(&pages), "{pages}");
}

#[test]
fn no_entry_is_left_out_after_the_listing_was_removed_and_names_were_removed_from_the_directory() {
    for removes in [true, false] {
        let (mut guest, root) = guest_and_root(few());
        make_files(&guest, "tree", 100);
        let tree = guest.lookup(root, "tree").unwrap();
        let (mut position, mut seen, mut pages) = (0, Vec::new(), 0);
        loop {
            let entries = read_some(&mut guest, opcode::READDIR, tree, position);
            let Some((_, next)) = entries.last() else { break };
            (position, pages) = (*next, pages + 1);
            let names = entries.into_iter().map(|(name, _)| name).filter(|name| name.starts_with("file-"));
            for name in names {
                if removes {
                    remove(&mut guest, tree, &name);
                }
                seen.push(name);
            }
            // These are never read to their ends.
            for index in 0..10 {
                let name = format!("begun-{pages}-{index}");
                make_files(&guest, &name, 60);
                let begun = guest.lookup(root, &name).unwrap();
                read_some(&mut guest, opcode::READDIR, begun, 0);
            }
            assert!(pages < 20, "it does not end");
        }
        let names: BTreeSet<_> = seen.iter().collect();
        assert_eq!((seen.len(), names.len()), (100, 100), "{removes}");
    }
}

#[test]
fn a_removal_that_fails_begins_no_directory_again() {
    let (mut guest, root) = guest_and_root(few());
    make_files(&guest, "tree", 100);
    make_files(&guest, "tree/full", 1);
    let tree = guest.lookup(root, "tree").unwrap();
    let first = read_some(&mut guest, opcode::READDIR, tree, 0);
    assert_eq!(guest.ask(opcode::RMDIR, tree, b"full\0"), Err(-libc::ENOTEMPTY));
    for index in 0..10 {
        let name = format!("begun-{index}");
        make_files(&guest, &name, 60);
        let begun = guest.lookup(root, &name).unwrap();
        read_some(&mut guest, opcode::READDIR, begun, 0);
    }
    let next = read_some(&mut guest, opcode::READDIR, tree, first.last().unwrap().1);
    assert!(!next.iter().any(|(name, _)| first.iter().any(|(other, _)| other == name)), "{first:?} {next:?}");
}

#[test]
fn the_listings_of_a_directory_that_the_guest_has_forgotten_are_removed() {
    let (mut guest, root) = guest_and_root(few());
    make_files(&guest, "dir", 600);
    let dir = guest.lookup(root, "dir").unwrap();
    read_some(&mut guest, opcode::READDIR, dir, 0);
    let place = guest.path("c/rootfs/dir");
    let open = || {
        let links = fs::read_dir("/proc/self/fd").unwrap().map(|entry| fs::read_link(entry.unwrap().path()));
        links.flatten().filter(|link| *link == place).count()
    };
    assert!(open() > 0);
    guest.forget(dir, 1);
    until(|| open() == 0);
}

#[test]
fn a_directory_that_was_removed_is_read_to_where_it_was_listed() {
    let (mut guest, root) = guest_and_root(few());
    make_files(&guest, "dir", 100);
    let dir = guest.lookup(root, "dir").unwrap();
    let begun = read_some(&mut guest, opcode::READDIR, dir, 0);
    (0..100).for_each(|index| remove(&mut guest, dir, &format!("file-{index:04}")));
    guest.ask(opcode::RMDIR, root, b"dir\0").unwrap();
    let rest = read_from(&mut guest, opcode::READDIR, dir, begun.last().unwrap().1);
    assert_eq!(begun.len() + rest.len(), 102);
    // As on the host.
    let body = Body::default().u64(NO_HANDLE).u64(0).u32(1024).zeros(20);
    assert_eq!(guest.ask(opcode::READDIR, dir, body.as_bytes()), Err(-libc::ENOENT));
}

#[test]
fn a_listing_of_a_merged_directory_is_not_changed_by_another_one() {
    let body = || {
        let layers = tempfile::tempdir().unwrap();
        unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(Some("layers"), layers.path(), Some("tmpfs"), MsFlags::empty(), none).unwrap();
        for name in ["lower", "upper", "work"] {
            fs::create_dir(layers.path().join(name)).unwrap();
        }
        for index in 0..600 {
            let layer = if index % 2 == 0 { "lower" } else { "upper" };
            fs::write(layers.path().join(layer).join(format!("file-{index:04}")), "").unwrap();
        }
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("c/rootfs");
        fs::create_dir_all(&root).unwrap();
        let at = |name: &str| layers.path().join(name).display().to_string();
        let options = format!("lowerdir={},upperdir={},workdir={}", at("lower"), at("upper"), at("work"));
        mount(Some("overlay"), &root, Some("overlay"), MsFlags::empty(), Some(options.as_str())).unwrap();
        let mut guest = guest_of(dir, few());
        let container = guest.lookup(ROOT, "c").unwrap();
        let root = guest.lookup(container, "rootfs").unwrap();

        let begun = read_some(&mut guest, opcode::READDIR, root, 0);
        let mut seen: Vec<_> = begun.iter().map(|(name, _)| name.clone()).collect();
        seen.iter().filter(|name| name.starts_with("file-")).for_each(|name| remove(&mut guest, root, name));
        assert_eq!(list(&mut guest, root).len(), 602 - seen.len() + 2);
        seen.extend(read_from(&mut guest, opcode::READDIR, root, begun.last().unwrap().1));
        let names: BTreeSet<_> = seen.iter().collect();
        assert_eq!((seen.len(), names.len()), (602, 602));
    };
    drill(body, End::succeeds);
}

#[test]
fn a_directory_that_the_host_has_unmounted_is_closed() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("c/rootfs");
        fs::create_dir_all(&root).unwrap();
        let device = mount_in(&dir.path().join("c"), &["rootfs"]);
        (0..600).for_each(|index| fs::write(root.join(index.to_string()), "").unwrap());
        let mut guest = guest_of(dir, few());
        let container = guest.lookup(ROOT, "c").unwrap();
        let node = guest.lookup(container, "rootfs").unwrap();
        let begun = read_some(&mut guest, opcode::READDIR, node, 0);
        nix::mount::umount2(&root, nix::mount::MntFlags::MNT_DETACH).unwrap();
        fs::remove_dir_all(guest.path("c")).unwrap();
        guest.device.control().close_unmounted();
        let open = || {
            let entries = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
            entries.filter(|fd| fs::metadata(fd).is_ok_and(|file| file.dev() == device)).count()
        };
        let deadline = Instant::now() + Duration::from_secs(5);
        while open() > 0 {
            assert!(Instant::now() < deadline, "{} descriptors are open", open());
            thread::sleep(Duration::from_millis(5));
        }
        let body = Body::default().u64(NO_HANDLE).u64(begun.last().unwrap().1).u32(1024).zeros(20);
        assert_eq!(guest.ask(opcode::READDIR, node, body.as_bytes()), Err(-libc::ESTALE));
    };
    drill(body, End::succeeds);
}
