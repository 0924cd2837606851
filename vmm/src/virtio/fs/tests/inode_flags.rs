//! Inode flags. The file system is a tmpfs, which has IMMUTABLE, APPEND, NODUMP and NOATIME since Linux 6.0.

use std::{fs::File, mem};

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::*;

const GETFLAGS: u32 = 0x8008_6601;
const SETFLAGS: u32 = 0x4008_6602;
const GETVERSION: u32 = 0x8008_7601;
const FSGETXATTR: u32 = 0x801c_581f;
const FSSETXATTR: u32 = 0x401c_5820;
const FSXATTR: u32 = 28;

impl Guest {
    /// Sends FUSE_IOCTL with an argument and with room for this many bytes. Returns what follows `fuse_ioctl_out`.
    fn ioctl(&mut self, node: u64, command: u32, argument: &[u8], returned: u32) -> Result<Vec<u8>, i32> {
        let body = Body::default().u64(0).u32(0).u32(command).u64(0).u32(argument.len() as u32).u32(returned);
        let answer = self.ask(opcode::IOCTL, node, body.bytes(argument).as_bytes())?;
        assert_eq!(answer[..16], [0; 16]);
        Ok(answer[16..].to_vec())
    }

    fn flags(&mut self, node: u64) -> Result<u32, i32> {
        let flags = self.ioctl(node, GETFLAGS, &[], 4)?;
        assert_eq!(flags.len(), 4);
        Ok(word(&flags, 0))
    }

    fn set_flags(&mut self, node: u64, flags: IFlags) -> Result<(), i32> {
        self.ioctl(node, SETFLAGS, &flags.bits().to_ne_bytes(), 0).map(|returned| assert_eq!(returned, b""))
    }
}

/// A tmpfs, in a mount namespace of this thread.
fn on_tmpfs(flags: MsFlags) -> tempfile::TempDir {
    unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
    let (none, dir) = (None::<&str>, tempfile::tempdir().unwrap());
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    mount(Some("files"), dir.path(), Some("tmpfs"), flags, none).unwrap();
    dir
}

fn on_host(path: &Path) -> IFlags {
    ioctl_getflags(File::open(path).unwrap()).unwrap()
}

#[test]
fn flags_are_those_of_the_host() {
    let mut guest = Guest::serving(on_tmpfs(MsFlags::empty()), Limits::of_this_process(1));
    fs::write(guest.path("file"), "").unwrap();
    fs::create_dir(guest.path("dir")).unwrap();
    for name in ["file", "dir"] {
        let node = guest.lookup(ROOT, name).unwrap();
        assert_eq!(guest.flags(node), Ok(0));
        for flags in [IFlags::NODUMP | IFlags::NOATIME, IFlags::NOATIME, IFlags::empty()] {
            guest.set_flags(node, flags).unwrap();
            assert_eq!(on_host(&guest.path(name)), flags);
            assert_eq!(guest.flags(node), Ok(flags.bits()));
        }
        ioctl_setflags(File::open(guest.path(name)).unwrap(), IFlags::NODUMP).unwrap();
        assert_eq!(guest.flags(node), Ok(IFlags::NODUMP.bits()));
        // `struct fsxattr` has another bit for it.
        let mut fsxattr = guest.ioctl(node, FSGETXATTR, &[], FSXATTR).unwrap();
        assert_eq!(fsxattr, [&[0x80, 0, 0, 0][..], &[0; 24]].concat());
        fsxattr[0] = 0x40;
        assert_eq!(guest.ioctl(node, FSSETXATTR, &fsxattr, 0), Ok(vec![]));
        assert_eq!(on_host(&guest.path(name)), IFlags::NOATIME);
        // What the file system does not have.
        assert_eq!(guest.set_flags(node, IFlags::NOCOW), Err(-libc::EOPNOTSUPP));
        assert_eq!(guest.ioctl(node, GETVERSION, &[], 8), Err(-libc::ENOTTY));
    }
}

/// The directory of this test may be on any file system.
#[test]
fn the_generation_of_a_file_is_that_of_the_host() {
    let mut guest = Guest::new();
    fs::write(guest.path("file"), "").unwrap();
    let node = guest.lookup(ROOT, "file").unwrap();
    let mut generation = 0_u64;
    let file = File::open(guest.path("file")).unwrap();
    #[allow(unsafe_code)]
    // SAFETY: the ioctl writes a number of at most this size.
    let result =
        unsafe { vmm_sys_util::ioctl::ioctl_with_mut_ref(&file, GETVERSION.into(), &mut generation) };
    let expected = if result < 0 {
        Err(-io::Error::last_os_error().raw_os_error().unwrap())
    } else {
        Ok((generation as u32).to_ne_bytes().to_vec())
    };
    // Linux gives room for a long, and passes on what comes.
    assert_eq!(guest.ioctl(node, GETVERSION, &[], 8), expected);
}

#[test]
fn what_needs_a_capability_or_leaves_a_quota_is_refused() {
    let mut guest = Guest::serving(on_tmpfs(MsFlags::empty()), Limits::of_this_process(1));
    for name in ["plain", "immutable", "appended"] {
        fs::write(guest.path(name), "").unwrap();
    }
    let set = |guest: &Guest, name: &str, flags: IFlags| {
        ioctl_setflags(File::open(guest.path(name)).unwrap(), flags).unwrap();
    };
    let [plain, immutable, appended] =
        ["plain", "immutable", "appended"].map(|it| guest.lookup(ROOT, it).unwrap());
    set(&guest, "immutable", IFlags::IMMUTABLE);
    set(&guest, "appended", IFlags::APPEND);
    for flags in [IFlags::IMMUTABLE, IFlags::APPEND, IFlags::JOURNALING, IFlags::PROJECT_INHERIT] {
        assert_eq!(guest.set_flags(plain, flags | IFlags::NODUMP), Err(-libc::EPERM), "{flags:?}");
    }
    for (node, flags) in [(immutable, IFlags::IMMUTABLE), (appended, IFlags::APPEND)] {
        assert_eq!(guest.flags(node), Ok(flags.bits()));
        assert_eq!(guest.set_flags(node, IFlags::empty()), Err(-libc::EPERM));
        assert_eq!(guest.ioctl(node, FSSETXATTR, &[0; 28], 0), Err(-libc::EPERM));
    }
    let mut project = [0; 28];
    project[12] = 7;
    assert_eq!(guest.ioctl(plain, FSSETXATTR, &project, 0), Err(-libc::EPERM));
    assert_eq!(on_host(&guest.path("plain")), IFlags::empty());
    assert_eq!(on_host(&guest.path("immutable")), IFlags::IMMUTABLE);
    assert_eq!(on_host(&guest.path("appended")), IFlags::APPEND);
    // The directory is removed at the end.
    for name in ["immutable", "appended"] {
        set(&guest, name, IFlags::empty());
    }
}

#[test]
fn flags_of_a_read_only_file_system_are_shown_only() {
    let dir = on_tmpfs(MsFlags::empty());
    fs::write(dir.path().join("file"), "").unwrap();
    ioctl_setflags(File::open(dir.path().join("file")).unwrap(), IFlags::NODUMP).unwrap();
    // As a volume: the mount is read-only, and the file system may be written to.
    let remount = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(None::<&str>, dir.path(), None::<&str>, remount, None::<&str>).unwrap();
    let mut guest = Guest::serving(dir, Limits::of_this_process(1));
    let node = guest.lookup(ROOT, "file").unwrap();
    assert_eq!(guest.flags(node), Ok(IFlags::NODUMP.bits()));
    for flags in [IFlags::empty(), IFlags::NODUMP] {
        assert_eq!(guest.set_flags(node, flags), Err(-libc::EROFS));
    }
    assert_eq!(guest.ioctl(node, FSSETXATTR, &[0; 28], 0), Err(-libc::EROFS));
    assert_eq!(on_host(&guest.path("file")), IFlags::NODUMP);
}

#[test]
fn other_ioctls_and_other_sizes_are_refused() {
    let mut guest = Guest::serving(on_tmpfs(MsFlags::empty()), Limits::of_this_process(1));
    fs::write(guest.path("file"), "").unwrap();
    nix::unistd::mkfifo(&guest.path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let node = guest.lookup(ROOT, "file").unwrap();
    // FS_IOC_SETVERSION, FS_IOC_FIEMAP, FITRIM, FICLONE, FS_IOC_SET_ENCRYPTION_POLICY, FS_IOC_ENABLE_VERITY, TCGETS.
    let others = [
        0x4008_7602,
        0xc020_660b,
        0xc018_5879,
        0x4004_9409,
        0x800c_6613,
        0x4080_6685,
        0x5401,
        0,
        u32::MAX,
        // As GETFLAGS, with an int.
        0x8004_6601,
    ];
    for command in others {
        assert_eq!(guest.ioctl(node, command, &[0; 64], 64), Err(-libc::ENOTTY), "{command:#x}");
    }
    for returned in [0, 3] {
        assert_eq!(guest.ioctl(node, GETFLAGS, &[], returned), Err(-libc::EINVAL));
    }
    assert_eq!(guest.ioctl(node, FSGETXATTR, &[], FSXATTR - 1), Err(-libc::EINVAL));
    for argument in [&[0x40; 3][..], &[0x40; 8], &[]] {
        assert_eq!(guest.ioctl(node, SETFLAGS, argument, 0), Err(-libc::EINVAL));
        assert_eq!(guest.ioctl(node, FSSETXATTR, argument, 0), Err(-libc::EINVAL));
    }
    // It promises an argument that does not come.
    let body = Body::default().u64(0).u32(0).u32(SETFLAGS).u64(0).u32(4).u32(0);
    assert_eq!(guest.ask(opcode::IOCTL, node, body.as_bytes()), Err(-libc::EINVAL));
    assert_eq!(guest.ask(opcode::IOCTL, node, &body.as_bytes()[..20]), Err(-libc::EINVAL));
    assert_eq!(on_host(&guest.path("file")), IFlags::empty());
    // The server opens no pipe.
    let pipe = guest.lookup(ROOT, "pipe").unwrap();
    assert_eq!(guest.flags(pipe), Err(-libc::ENXIO));
    assert_eq!(guest.flags(12345), Err(-libc::ESTALE));
    // There is less room than the request says.
    let header = guest.header(opcode::IOCTL, node, 32, 0);
    let body = Body::default().u64(0).u32(0).u32(GETFLAGS).u64(0).u32(0).u32(4);
    assert_eq!(guest.send_with_room(header, body.as_bytes(), 19), Err(-libc::EIO));
}

#[test]
fn a_file_of_a_lower_layer_is_copied_and_stays_as_it_was() {
    for is_exclusive in [false, true] {
        let (dir, layers) = overlay_with_two_names(&["one", "two"]);
        let limits = Limits::of_this_process(1);
        let mut guest =
            if is_exclusive { exclusive::guest_of(dir, limits) } else { Guest::serving(dir, limits) };
        let node = guest.lookup(ROOT, "one").unwrap();
        guest.set_flags(node, IFlags::NODUMP).unwrap();
        assert_eq!(on_host(&layers.path().join("lower/one")), IFlags::empty());
        assert_eq!(on_host(&layers.path().join("upper/one")), IFlags::NODUMP);
        // In a share that is not exclusive, the copy is another file than that of the node.
        let node = if is_exclusive { node } else { guest.lookup(ROOT, "one").unwrap() };
        assert_eq!(guest.flags(node), Ok(IFlags::NODUMP.bits()));
        let other = guest.lookup(ROOT, "other-one").unwrap();
        assert_eq!(guest.flags(other), Ok(0));
        // Another thread has looked up another name, so the server does not know which one this one means.
        let node = guest.lookup(ROOT, "two").unwrap();
        let thread = mem::replace(&mut guest.thread, 2);
        assert_eq!(guest.lookup(ROOT, "other-two"), Ok(node));
        guest.thread = thread;
        assert_eq!(guest.set_flags(node, IFlags::NOATIME), Err(-libc::ESTALE));
        let node = guest.lookup(ROOT, "two").unwrap();
        guest.set_flags(node, IFlags::NOATIME).unwrap();
        assert_eq!(on_host(&guest.path("two")), IFlags::NOATIME);
        assert_eq!(on_host(&guest.path("other-two")), IFlags::empty());
        assert_eq!(on_host(&layers.path().join("lower/two")), IFlags::empty());
    }
}
