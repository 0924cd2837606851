//! Sockets and FIFOs, by which containers communicate that mount the same volume, each for itself.

use std::os::unix::net::UnixListener;

use nix::mount::{MntFlags, umount2};

use super::*;

/// MKNOD of a socket.
fn bind(guest: &mut Guest, name: &str) -> Result<u64, i32> {
    let mut body = Vec::new();
    for word in [libc::S_IFSOCK | 0o755, 0, 0, 0] {
        body.extend(word.to_le_bytes());
    }
    body.extend(format!("{name}\0").as_bytes());
    guest.ask(opcode::MKNOD, ROOT, &body).map(|entry| long(&entry, 0))
}

#[test]
fn a_socket_that_the_guest_knows_has_a_second_name() {
    let mut guest = Guest::new();
    fs::create_dir(guest.path("volume")).unwrap();
    let (path, file) = (guest.path("volume/socket"), guest.path("volume/file"));
    let _listener = UnixListener::bind(&path).unwrap();
    fs::write(&file, "").unwrap();
    let name_of = |path: &Path| {
        let found = fs::metadata(path).unwrap();
        let (major, minor) = (libc::major(found.dev()), libc::minor(found.dev()));
        bulkhead_vmm_api::SharedSocket { major, minor, inode: found.ino() }.name()
    };
    let (socket, other) = (name_of(&path), name_of(&file));
    assert_eq!(bind(&mut guest, &socket), Err(-libc::ENOENT), "the guest does not know it");
    let volume = guest.lookup(ROOT, "volume").unwrap();
    let node = guest.lookup(volume, "socket").unwrap();
    guest.lookup(volume, "file").unwrap();
    assert_eq!(bind(&mut guest, &other), Err(-libc::ENOENT), "it is no socket");
    assert_eq!(bind(&mut guest, &socket), Ok(node));
    assert_eq!(bind(&mut guest, &socket), Ok(node));
    let mut names: Vec<_> =
        fs::read_dir(guest.dir.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!((names.pop().unwrap(), names.len()), ("volume".into(), 0), "no file was made");
    // Each was a lookup.
    guest.forget(node, 2);
    assert_eq!(guest.lookup(volume, "socket"), Ok(node));
    guest.forget(node, 2);
    assert_ne!(guest.lookup(volume, "socket"), Ok(node));

    // Elsewhere a socket of such a name is a file.
    fs::remove_file(&path).unwrap();
    assert_eq!(bind(&mut guest, &socket), Err(-libc::ENOENT));
    assert_eq!(bind(&mut guest, "socket:other").map(drop), Ok(()));
    assert!(fs::symlink_metadata(guest.path("socket:other")).unwrap().file_type().is_socket());
}

#[test]
fn a_socket_and_a_pipe_are_one_file_in_all_mounts_of_their_directory() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        mount_in(dir.path(), &["one"]);
        let none = None::<&str>;
        for place in ["two", "read-only"] {
            fs::create_dir(at(place)).unwrap();
            mount(Some(&at("one")), &at(place), none, MsFlags::MS_BIND, none).unwrap();
        }
        let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, &at("read-only"), none, read_only, none).unwrap();
        let _listener = UnixListener::bind(at("one/socket")).unwrap();
        nix::unistd::mkfifo(&at("one/pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (two, socket) = (at("two"), at("one/socket"));
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        let tops = ["one", "two", "read-only"].map(|name| guest.lookup(ROOT, name).unwrap());
        let mut nodes_of = |name: &str| tops.map(|top| guest.lookup(top, name).unwrap());
        let (sockets, pipes, files) = (nodes_of("socket"), nodes_of("pipe"), nodes_of("file"));
        for same in [sockets, pipes] {
            assert_eq!(same, [same[0]; 3]);
        }
        assert!(files[0] != files[1] && files[1] != files[2]);

        // It was found in the read-only mount last. Linux looks it up again where it is changed.
        let node = sockets[0];
        let chmod = |guest: &mut Guest| guest.set_attributes(node, set::MODE, 0, 0o600).map(drop);
        assert_eq!(chmod(&mut guest), Err(-libc::ESTALE));
        assert_eq!(guest.lookup(tops[1], "socket"), Ok(node));
        assert_eq!(chmod(&mut guest), Ok(()));
        // The container that has found it last is gone.
        umount2(&two, MntFlags::MNT_DETACH).unwrap();
        guest.device.control().close_unmounted();
        let deadline = Instant::now() + Duration::from_secs(5);
        while chmod(&mut guest) != Err(-libc::ESTALE) {
            assert!(Instant::now() < deadline, "it is changed in a mount that is gone");
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(guest.lookup(tops[2], "socket"), Ok(node));
        assert_eq!(guest.lookup(tops[0], "socket"), Ok(node));
        assert_eq!(chmod(&mut guest), Ok(()));

        // A listener that is still there is not that of the next socket, whose inode could have the same number.
        assert_eq!(guest.lookup(tops[2], "socket"), Ok(node));
        guest.ask(opcode::UNLINK, tops[0], b"socket\0").unwrap();
        assert_eq!(chmod(&mut guest), Ok(()));
        let _next = UnixListener::bind(&socket).unwrap();
        assert_ne!(guest.lookup(tops[0], "socket").unwrap(), node);
    };
    drill(body, End::succeeds);
}
