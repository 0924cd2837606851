//! Files whose contents the host's kernel makes when they are read.

use super::*;

#[test]
fn what_the_kernel_makes_is_read_and_written_without_the_page_cache() {
    let body = || {
        unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for kind in ["proc", "sysfs", "cgroup2"] {
            let place = dir.path().join(kind);
            fs::create_dir(&place).unwrap();
            mount(Some(kind), &place, Some(kind), MsFlags::empty(), none).unwrap();
        }
        fs::write(dir.path().join("file"), "").unwrap();
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        let find = |guest: &mut Guest, path: &str| {
            path.split('/').fold(ROOT, |parent, name| guest.lookup(parent, name).unwrap())
        };

        for path in ["proc/sys/kernel/ostype", "sysfs/kernel/uevent_seqnum", "cgroup2/cgroup.procs"] {
            let node = find(&mut guest, path);
            let expected = fs::read(guest.path(path)).unwrap();
            for _ in 0..2 {
                let (handle, flags) = guest.opened(node, libc::O_RDONLY).unwrap();
                assert_eq!(flags & (OPEN_DIRECT_IO | OPEN_KEEP_CACHE), OPEN_DIRECT_IO, "{path}");
                assert_eq!(guest.read(node, handle, 0, 0x1_0000).unwrap(), expected, "{path}");
                guest.release(node, handle);
            }
            // Of a 32-bit process.
            assert_eq!(guest.opened_exactly(node, 0).unwrap().1 & OPEN_DIRECT_IO, OPEN_DIRECT_IO, "{path}");
        }
        // The name of this process.
        let path = format!("proc/{}/comm", std::process::id());
        let node = find(&mut guest, &path);
        let (handle, flags) = guest.opened(node, libc::O_WRONLY | libc::O_TRUNC).unwrap();
        assert_eq!(flags & OPEN_DIRECT_IO, OPEN_DIRECT_IO);
        guest.write(node, handle, b"renamed").unwrap();
        let reader = guest.open(node, libc::O_RDONLY).unwrap();
        assert_eq!(guest.read(node, reader, 0, 100).unwrap(), b"renamed\n");
        let handle = guest.open(node, libc::O_WRONLY | libc::O_APPEND).unwrap();
        guest.write_with(node, handle, b"again", 0, libc::O_APPEND).unwrap();
        assert_eq!(guest.read(node, reader, 0, 100).unwrap(), b"again\n");
        assert_eq!(guest.size(node), Ok(0));
        // In parts it would be 0: the last part.
        let node = find(&mut guest, &format!("proc/{}/oom_score_adj", std::process::id()));
        let handle = guest.open(node, libc::O_WRONLY).unwrap();
        guest.write(node, handle, b"900\n").unwrap();
        let reader = guest.open(node, libc::O_RDONLY).unwrap();
        assert_eq!(guest.read(node, reader, 0, 100).unwrap(), b"900\n");
        // An empty file on a disk stays one that is cached.
        let node = find(&mut guest, "file");
        assert_eq!(guest.opened(node, libc::O_RDONLY).unwrap().1 & OPEN_DIRECT_IO, 0);
    };
    drill(body, End::succeeds);
}
