use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, openat};

use super::{super::file_stat::stat_at, *};

const LIMITS: Limits = Limits { idle: 10, open: 10, paths: 1, files: 1, anchors: 1 };

#[test]
fn directories_that_are_nested_deeper_than_the_stack_are_forgotten() {
    const DEPTH: usize = 100_000;
    let root = Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let mut stat = stat_at(&root, c"").unwrap();
    let limits = Limits { idle: 2 * DEPTH, paths: 1, anchors: 1, ..LIMITS };
    let mut nodes = Nodes::new(root, &stat, limits, false).unwrap();
    let mut chain = vec![ROOT];
    for _ in 0..DEPTH {
        stat.stx_ino += 1;
        let parent = *chain.last().unwrap();
        chain.push(nodes.found(parent, c"d", &stat, false).unwrap());
    }
    // Each but the last is still the place of another.
    for number in chain.iter().skip(1) {
        nodes.forget(*number, 1);
    }
    assert_eq!(nodes.table.len(), 1);
}

#[test]
fn a_lookup_from_before_a_rename_or_removal_changes_no_place() {
    let open = || Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let mut stat = stat_at(open(), c"").unwrap();
    let limits = Limits { idle: 10, paths: 1, anchors: 1, ..LIMITS };
    let mut nodes = Nodes::new(open(), &stat, limits, false).unwrap();
    stat.stx_ino += 1;
    let node = nodes.found(ROOT, c"old", &stat, false).unwrap();
    nodes.renamed(&stat, (ROOT, c"old"), (ROOT, c"new"));
    // Another thread has read these attributes before.
    assert_eq!(nodes.found(ROOT, c"old", &stat, false), Err(Errno::AGAIN));
    assert!(nodes.place(node).unwrap().is(ROOT, c"new"));
    let held = nodes.hold(ROOT, c"new", &open(), &stat, false);
    nodes.lost(held.unwrap());
    assert_eq!(nodes.found(ROOT, c"new", &stat, false), Err(Errno::AGAIN));
    assert!(nodes.kept(node).unwrap().is_some(), "it can still be used");
    // The file has got a name again.
    assert_eq!(nodes.found(ROOT, c"linked", &stat, true), Ok(node));
    assert!(nodes.place(node).unwrap().is(ROOT, c"linked"));
}

#[test]
fn only_an_open_file_of_nfs_is_held_when_its_name_is_removed() {
    let open = || Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let mut stat = stat_at(open(), c"").unwrap();
    let mut nodes = Nodes::new(open(), &stat, LIMITS, false).unwrap();
    for (name, is_open) in [(c"closed", false), (c"open", true)] {
        stat.stx_ino += 1;
        let node = nodes.found(ROOT, name, &stat, false).unwrap();
        nodes.keep(node, open()).unwrap();
        if is_open {
            nodes.opened_as(node, &open()).unwrap();
        }
        let fd = open();
        let held = nodes.hold(ROOT, name, &fd, &stat, true).unwrap();
        assert!(held.is_some());
        // Its own reference, and that of the anchor.
        assert_eq!(
            (Arc::strong_count(&fd), nodes.kept(node).unwrap().is_some()),
            (1 + usize::from(is_open), is_open)
        );
        // Another process opens it meanwhile.
        nodes.opened_as(node, &open()).unwrap();
        nodes.lost(held);
        assert!(nodes.kept(node).unwrap().is_some(), "it can still be used");
        assert_eq!(nodes.place(node).err(), Some(Errno::STALE));
        // By another name it is the same file.
        assert_eq!(nodes.found(ROOT, c"linked", &stat, true), Ok(node));
        assert!(nodes.place(node).unwrap().is(ROOT, c"linked"));
    }
}

#[test]
fn a_symbolic_link_with_another_target_is_another() {
    let directory = tempfile::tempdir().unwrap();
    let parent =
        Arc::new(openat(CWD, directory.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let root = stat_at(&parent, c"").unwrap();
    let limits = Limits { idle: 10, paths: 1, anchors: 1, ..LIMITS };
    let mut nodes = Nodes::new(parent.clone(), &root, limits, false).unwrap();
    let link = |target: &str| {
        let _ = std::fs::remove_file(directory.path().join("link"));
        std::os::unix::fs::symlink(target, directory.path().join("link")).unwrap();
        stat_at(&parent, c"link").unwrap()
    };
    let one = link("one");
    let node = nodes.found(ROOT, c"link", &one, false).unwrap();
    let mut other = link("other");
    // The file system uses the inode number again.
    other.stx_ino = one.stx_ino;
    assert_eq!(nodes.check(node, &other), Err(Errno::STALE));
    assert_ne!(nodes.found(ROOT, c"link", &other, false), Ok(node));
    let mut same = link("one");
    same.stx_ino = one.stx_ino;
    assert_eq!(nodes.check(node, &same), Ok(()));
}

#[test]
fn a_name_of_a_file_with_several_names_in_a_containers_root_is_looked_up_each_time() {
    let open = || Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let mut stat = stat_at(open(), c"").unwrap();
    let limits = Limits { idle: 10, paths: 2, anchors: 1, ..LIMITS };
    let mut nodes = Nodes::new(open(), &stat, limits, false).unwrap();
    let mut parent = ROOT;
    for name in [c"container", c"rootfs"] {
        stat.stx_ino += 1;
        parent = nodes.found(parent, name, &stat, false).unwrap();
    }
    stat.stx_ino += 1;
    stat.stx_mode = 0o100_644;
    stat.stx_nlink = 2;
    let node = nodes.found(parent, c"one", &stat, false).unwrap();
    assert_eq!(nodes.name_cached_for(node, &stat), Duration::ZERO);
    // What was opened by one name is not used for the other.
    nodes.keep(node, open()).unwrap();
    assert!(nodes.kept(node).unwrap().is_some());
    nodes.found(parent, c"two", &stat, true).unwrap();
    assert!(nodes.kept(node).unwrap().is_none());
    stat.stx_nlink = 1;
    assert_eq!(nodes.name_cached_for(node, &stat), nodes.cached_for(node));
}

#[test]
fn a_mount_is_listed_by_its_top_and_by_a_file_that_was_removed_there() {
    let open = || openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let root = stat_at(open(), c"").unwrap();
    let mut nodes =
        Nodes::new(open().into(), &root, Limits { idle: 20, anchors: 5, ..LIMITS }, false).unwrap();
    // The file system, the mount and the kind of a file.
    let file = |number: u64, kind: u16| {
        let mut stat = root;
        (stat.stx_ino, stat.stx_mode) = (root.stx_ino + number, kind | 0o600);
        (stat.stx_dev_minor, stat.stx_mnt_id) = (number as u32 / 10, root.stx_mnt_id + number / 10);
        stat
    };
    let (directory, regular, socket) = (0o040_000, 0o100_000, 0o140_000);
    let find = |nodes: &mut Nodes, parent, name: &CStr, number, kind| {
        nodes.found(parent, name, &file(number, kind), false).unwrap()
    };
    let volume = find(&mut nodes, ROOT, c"volume", 10, directory);
    let removed = [c"one", c"other"].map(|name| {
        let number = 11 + name.count_bytes() as u64;
        (name, number, find(&mut nodes, volume, name, number, regular))
    });
    let below = find(&mut nodes, volume, c"below", 20, directory);
    find(&mut nodes, below, c"file", 21, regular);
    find(&mut nodes, ROOT, c"socket", 30, socket);
    let mounted = find(&mut nodes, ROOT, c"file", 40, regular);
    for (name, number, _) in removed {
        let held = nodes.hold(volume, name, &Arc::new(open()), &file(number, regular), false).unwrap();
        nodes.lost(held);
    }
    let list = |nodes: &Nodes| -> Vec<_> {
        nodes.mounts().into_iter().map(|it| (it.node, it.mount - root.stx_mnt_id)).collect()
    };
    let [(.., one), _] = removed;
    // The root of the share has no place either.
    assert_eq!(list(&nodes), [(volume, 1), (below, 2), (mounted, 4), (ROOT, 0), (one, 1)]);
    nodes.close_unmounted(&[volume].into());
    assert_eq!(list(&nodes), [(mounted, 4), (ROOT, 0)]);
}

/// What is mounted, and what a mount may cover.
#[test]
fn mounts_and_roots_keep_their_nodes_when_many_files_of_volumes_are_looked_up() {
    let open = || Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let mut stat = stat_at(open(), c"").unwrap();
    let (kind, mount) = (stat.stx_mode, stat.stx_mnt_id);
    let mut nodes = Nodes::new(open(), &stat, Limits { idle: 64, ..LIMITS }, false).unwrap();
    let mut find = |nodes: &mut Nodes, parent, name: &str, mode: u16, mount: u64| {
        stat.stx_ino += 1;
        (stat.stx_mode, stat.stx_mnt_id) = (mode, mount);
        nodes.found(parent, &std::ffi::CString::new(name).unwrap(), &stat, false).unwrap()
    };
    let file = (libc::S_IFREG | 0o600) as u16;
    let container = find(&mut nodes, ROOT, "container", kind, mount);
    let root = find(&mut nodes, container, "rootfs", kind, mount + 1);
    let covered = find(&mut nodes, root, "resolv.conf", file, mount + 1);
    let mounts = find(&mut nodes, container, "mounts", kind, mount);
    let mounted = find(&mut nodes, mounts, "0", file, mount + 2);
    let volume = find(&mut nodes, mounts, "1", kind, mount + 3);
    let idle = find(&mut nodes, mounts, "2", kind, mount + 4);
    let first = find(&mut nodes, volume, "first", file, mount + 3);
    for index in 0..1000 {
        find(&mut nodes, volume, &index.to_string(), file, mount + 3);
    }
    let is_known = |nodes: &Nodes, number| nodes.table.get(number).is_some();
    assert!([root, covered, mounted, volume, idle].iter().all(|number| is_known(&nodes, *number)));
    assert!(!is_known(&nodes, first) && nodes.table.len() <= 65);
    // A root with more files than the table takes.
    for index in 0..1000 {
        find(&mut nodes, root, &index.to_string(), file, mount + 1);
    }
    assert!(is_known(&nodes, mounted) && is_known(&nodes, idle) && nodes.table.len() <= 65);
    // Many files of a volume are open, so that only those of the root can go.
    for index in 0..20 {
        let number = find(&mut nodes, volume, &format!("open-{index}"), file, mount + 3);
        nodes.opened(number).unwrap();
    }
    for index in 1000..2000 {
        find(&mut nodes, root, &index.to_string(), file, mount + 1);
    }
    assert!(is_known(&nodes, mounted) && nodes.table.len() <= 85);
    assert_eq!(nodes.own, nodes.table.iter().filter(|(_, node)| node.is_own).count());
}

#[test]
fn a_directory_is_not_begun_again_endlessly() {
    let open = || Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let stat = stat_at(open(), c"").unwrap();
    let mut nodes = Nodes::new(open(), &stat, LIMITS, true).unwrap();
    let position = listings::Position::of_cookie(1 << 32 | 5);
    assert!(!nodes.begins_again(ROOT, position));
    nodes.lost_names(ROOT, 1);
    let begun = |nodes: &mut Nodes| (0..2000).filter(|_| nodes.begins_again(ROOT, position)).count();
    assert_eq!(begun(&mut nodes), 1000);
    nodes.was_read_to_its_end(ROOT);
    assert_eq!(begun(&mut nodes), 1000);
}

#[test]
fn a_file_system_has_the_same_number_in_whatever_order_they_are_seen() {
    let open = || Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let stat = stat_at(open(), c"").unwrap();
    // Of major 8, and file systems without a disk, which are other ones in each pod.
    let disk = |minor: u64| 8 << 32 | minor;
    let numbers = |order: [u64; 3]| {
        let mut nodes = Nodes::new(open(), &stat, LIMITS, false).unwrap();
        for minor in order[0]..order[0] + 30 {
            nodes.inode_on(minor, 1);
        }
        HashMap::from(order.map(|minor| (minor, nodes.inode_on(disk(minor), 1))))
    };
    assert_eq!(numbers([1, 2, 16]), numbers([16, 2, 1]));
}

#[test]
fn inode_numbers_differ_and_are_small_where_they_can_be() {
    let open = || Arc::new(openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let stat = stat_at(open(), c"").unwrap();
    let mut nodes = Nodes::new(open(), &stat, LIMITS, false).unwrap();
    let mut seen = std::collections::HashSet::new();
    for device in 0..SMALL_INODE_DEVICES + 10 {
        for inode in [1, 2, (1 << SMALL_INODE_BITS) - 1, 1 << SMALL_INODE_BITS, 1 << 32, 1 << 40] {
            let shown = nodes.inode_on(1_000_000 + device, inode);
            assert!(seen.insert(shown), "{device} {inode}");
            // The table has seen the file system of its top directory before.
            let is_small = device + 1 < SMALL_INODE_DEVICES && inode < 1 << SMALL_INODE_BITS;
            assert_eq!(shown < 1 << 32, is_small, "{device} {inode}: {shown}");
        }
    }
}
