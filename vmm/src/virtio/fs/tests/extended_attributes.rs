//! Extended attributes, and what else overlayfs needs of the file system of its upper layer.

use std::os::unix::fs::symlink;

use rustix::fs::{XattrFlags, getxattr, setxattr};

use super::*;

const OPAQUE: &str = "trusted.overlay.opaque";
const OPAQUE_ON_HOST: &str = "user.bulkhead.trusted.overlay.opaque";

/// The value of an attribute on the host.
fn on_host(guest: &Guest, file: &str, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 100];
    let len = getxattr(guest.path(file), name, &mut value[..]).ok()?;
    value.truncate(len);
    Some(value)
}

impl Guest {
    fn set_xattr(&mut self, node: u64, name: &str, value: &[u8]) -> Result<Vec<u8>, i32> {
        let body = Body::default().u32(value.len() as u32).zeros(12).bytes(name.as_bytes()).zeros(1);
        self.ask(opcode::SETXATTR, node, body.bytes(value).as_bytes())
    }

    fn xattr(&mut self, node: u64, name: &str) -> Result<Vec<u8>, i32> {
        let body = Body::default().u32(100).u32(0).bytes(name.as_bytes()).zeros(1);
        self.ask(opcode::GETXATTR, node, body.as_bytes())
    }

    fn xattrs(&mut self, node: u64, size: u32) -> Result<Vec<u8>, i32> {
        self.ask(opcode::LISTXATTR, node, Body::default().u32(size).u32(0).as_bytes())
    }

    fn remove_xattr(&mut self, node: u64, name: &str) -> Result<Vec<u8>, i32> {
        self.ask(opcode::REMOVEXATTR, node, format!("{name}\0").as_bytes())
    }
}

#[test]
fn a_trusted_attribute_is_kept_under_another_name_and_the_hosts_own_is_hidden() {
    let mut guest = Guest::new();
    fs::create_dir(guest.path("dir")).unwrap();
    // As on a directory of a layer of the host's own overlay.
    setxattr(guest.path("dir"), OPAQUE, b"hosts", XattrFlags::empty()).unwrap();
    let dir = guest.lookup(ROOT, "dir").unwrap();
    assert_eq!(guest.xattr(dir, OPAQUE), Err(-libc::ENODATA));
    assert_eq!(guest.xattrs(dir, 1000).unwrap(), b"");
    guest.set_xattr(dir, OPAQUE, b"y").unwrap();
    assert_eq!(on_host(&guest, "dir", OPAQUE).unwrap(), b"hosts");
    assert_eq!(on_host(&guest, "dir", OPAQUE_ON_HOST).unwrap(), b"y");
    assert_eq!(guest.xattr(dir, OPAQUE).unwrap(), b"y");
    let list = format!("{OPAQUE}\0");
    assert_eq!(guest.xattrs(dir, list.len() as u32).unwrap(), list.as_bytes());
    assert_eq!(word(&guest.xattrs(dir, 0).unwrap(), 0) as usize, list.len());
    assert_eq!(guest.xattrs(dir, list.len() as u32 - 1), Err(-libc::ERANGE));
    guest.remove_xattr(dir, OPAQUE).unwrap();
    assert_eq!(on_host(&guest, "dir", OPAQUE).unwrap(), b"hosts");
    assert_eq!(on_host(&guest, "dir", OPAQUE_ON_HOST), None);
    assert_eq!(guest.remove_xattr(dir, OPAQUE), Err(-libc::ENODATA));
}

#[test]
fn nobody_in_the_guest_reaches_a_trusted_attribute_by_its_name_on_the_host() {
    let mut guest = Guest::new();
    fs::write(guest.path("file"), "").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    guest.set_xattr(file, "trusted.x", b"1").unwrap();
    let name = "user.bulkhead.trusted.x";
    assert_eq!(guest.set_xattr(file, name, b"2"), Err(-libc::EPERM));
    assert_eq!(guest.xattr(file, name), Err(-libc::ENODATA));
    assert_eq!(guest.remove_xattr(file, name), Err(-libc::EPERM));
    assert_eq!(guest.xattr(file, "trusted.x").unwrap(), b"1");
    assert_eq!(guest.xattrs(file, 100).unwrap(), b"trusted.x\0");
    assert_eq!(guest.set_xattr(file, "trusted.", b"1"), Err(-libc::EINVAL));
    assert_eq!(guest.set_xattr(file, &format!("trusted.{}", "x".repeat(234)), b"1"), Err(-libc::ERANGE));
    guest.set_xattr(file, &format!("trusted.{}", "x".repeat(233)), b"1").unwrap();
}

/// The host has no attributes `user.*` of other files than regular ones and directories. overlayfs works without.
#[test]
fn links_and_devices_have_no_trusted_attributes() {
    let mut guest = Guest::new();
    symlink("nowhere", guest.path("link")).unwrap();
    nix::unistd::mkfifo(&guest.path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for name in ["link", "pipe"] {
        let node = guest.lookup(ROOT, name).unwrap();
        assert_eq!(guest.set_xattr(node, OPAQUE, b"y"), Err(-libc::EPERM), "{name}");
        assert_eq!(guest.xattr(node, OPAQUE), Err(-libc::ENODATA), "{name}");
        assert_eq!(guest.xattrs(node, 100).unwrap(), b"", "{name}");
    }
}

#[test]
fn a_whiteout_that_is_left_by_a_rename_belongs_to_the_caller() {
    let mut guest = Guest::new();
    for name in ["one", "two"] {
        fs::write(guest.path(name), name).unwrap();
        let file = guest.lookup(ROOT, name).unwrap();
        // RENAME_WHITEOUT, by another user than root, and by root.
        let user = if name == "one" { 1000 } else { 0 };
        let body = Body::default().u64(ROOT).u32(libc::RENAME_WHITEOUT).u32(0);
        let body = body.bytes(format!("{name}\0new-{name}\0").as_bytes());
        guest.ask_as(user, opcode::RENAME2, ROOT, body.as_bytes()).unwrap();
        assert_eq!(guest.lookup(ROOT, &format!("new-{name}")), Ok(file));
        assert_ne!(guest.lookup(ROOT, name).unwrap(), file);
        let left = fs::symlink_metadata(guest.path(name)).unwrap();
        assert!(left.file_type().is_char_device());
        assert_eq!((left.rdev(), left.uid(), left.gid()), (0, user, user));
        assert_eq!(fs::read(guest.path(&format!("new-{name}"))).unwrap(), name.as_bytes());
    }
}

/// overlayfs stores node IDs with their generation, and looks them up in a later VM.
#[test]
fn nodes_of_another_session_with_the_same_ids_are_told_apart() {
    let generation = |guest: &mut Guest, name: &str| {
        let entry = guest.ask(opcode::LOOKUP, ROOT, format!("{name}\0").as_bytes()).unwrap();
        (long(&entry, 0), long(&entry, 8))
    };
    let found: Vec<_> = (0..2)
        .map(|_| {
            let mut guest = Guest::new();
            fs::write(guest.path("one"), "").unwrap();
            fs::write(guest.path("two"), "").unwrap();
            let (one, two) = (generation(&mut guest, "one"), generation(&mut guest, "two"));
            assert_eq!(one.1, two.1);
            assert!((1..1 << 31).contains(&one.1), "{one:?}");
            one
        })
        .collect();
    assert_eq!(found[0].0, found[1].0);
    assert_ne!(found[0].1, found[1].1);
}
