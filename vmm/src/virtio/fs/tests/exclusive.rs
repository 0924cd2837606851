//! An exclusive share, in which the guest does not say what it opens and closes.

use super::*;
use crate::virtio::fs::{attributes::ATTR_OUT, nodes::caching::EXCLUSIVE_CACHED_FOR, open_files::NO_HANDLE};

pub(super) fn guest_of(dir: tempfile::TempDir, limits: Limits) -> Guest {
    let device = Fs::with_limits("share", dir.path(), EXCLUSIVE_THREADS, limits).unwrap();
    Guest::of(Fs { is_exclusive: true, ..device }, dir)
}

fn guest() -> Guest {
    guest_of(tempfile::tempdir().unwrap(), Limits::of_this_process(1))
}

fn unlink(guest: &mut Guest, name: &str) -> Result<Vec<u8>, i32> {
    guest.ask(opcode::UNLINK, ROOT, format!("{name}\0").as_bytes())
}

#[test]
fn a_file_is_read_and_written_without_a_handle() {
    let mut guest = guest();
    fs::write(guest.path("file"), "old").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    // Linux does not send these requests again.
    assert_eq!(guest.open(file, libc::O_RDWR), Err(-libc::ENOSYS));
    assert_eq!(guest.ask(opcode::FLUSH, file, &[0; 24]), Err(-libc::ENOSYS));
    assert_eq!(guest.read(file, NO_HANDLE, 0, 10).unwrap(), b"old");
    guest.write(file, NO_HANDLE, b"new").unwrap();
    assert_eq!(guest.read(file, NO_HANDLE, 0, 10).unwrap(), b"new");
    guest.write_with(file, NO_HANDLE, b"er", 0, libc::O_APPEND | libc::O_SYNC).unwrap();
    assert_eq!(fs::read(guest.path("file")).unwrap(), b"newer");
    guest.ask(opcode::FSYNC, file, &[0; 16]).unwrap();
    for (flags, size) in [(set::SIZE, 3), (set::SIZE | set::FH, 2)] {
        guest.set_attributes(file, flags, size, 0).unwrap();
        assert_eq!(fs::metadata(guest.path("file")).unwrap().len(), size);
    }
    // Another guest's handle is none of this one.
    assert_eq!(guest.read(file, 1, 0, 10), Err(-libc::EBADF));
}

#[test]
fn the_answer_to_a_write_has_the_attributes_if_there_is_room() {
    let mut guest = guest();
    fs::write(guest.path("file"), "old").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap();
    let request = Body::default().u64(NO_HANDLE).u64(0).u32(5).u32(0).zeros(16).bytes(b"newer");
    let mut write = |room| {
        let header = guest.header(opcode::WRITE, file, request.as_bytes().len(), 0);
        guest.send_with_room(header, request.as_bytes(), room).unwrap()
    };
    let room = 8 + ATTR_OUT;
    assert_eq!(write(8).len(), 8);
    assert_eq!(write(room as u32 - 1).len(), 8);
    let answer = write(room as u32);
    let attributes = guest.ask(opcode::GETATTR, file, &[0; 16]).unwrap();
    assert_eq!((word(&answer, 0), answer.len()), (5, room));
    assert_eq!(answer[8..], attributes);
    assert_eq!(long(&attributes, 24), 5, "the size");
}

#[test]
fn a_new_file_has_no_handle() {
    let mut guest = guest();
    let (file, handle) = create(&mut guest, 1000, "new", libc::O_WRONLY | libc::O_APPEND, 0o200).unwrap();
    assert_eq!(handle, NO_HANDLE);
    guest.write(file, handle, b"data").unwrap();
    // The server's descriptor is for others who open the file too.
    assert_eq!(guest.read(file, NO_HANDLE, 0, 10).unwrap(), b"data");
    let metadata = fs::metadata(guest.path("new")).unwrap();
    assert_eq!((metadata.uid(), metadata.permissions().mode() & 0o7777), (1000, 0o200));
}

#[test]
fn what_is_removed_while_it_is_open_can_be_used_until_it_is_forgotten() {
    let mut guest = guest_of(tempfile::tempdir().unwrap(), few());
    let mut removed = Vec::new();
    for index in 0..8 {
        let name = index.to_string();
        let (file, _) = create(&mut guest, 0, &name, libc::O_RDWR, 0o600).unwrap();
        unlink(&mut guest, &name).unwrap();
        removed.push(file);
    }
    // There is no room for another one that may be open because its contents were used.
    fs::write(guest.path("kept"), "").unwrap();
    let kept = guest.lookup(ROOT, "kept").unwrap();
    guest.read(kept, NO_HANDLE, 0, 10).unwrap();
    assert_eq!(unlink(&mut guest, "kept"), Err(-libc::ENFILE));
    fs::write(guest.path("not used"), "").unwrap();
    let not_used = guest.lookup(ROOT, "not used").unwrap();
    unlink(&mut guest, "not used").unwrap();
    assert_eq!(guest.read(not_used, NO_HANDLE, 0, 10), Err(-libc::ESTALE));
    // Linux may know a file for long that has another name.
    fs::write(guest.path("one"), "").unwrap();
    fs::hard_link(guest.path("one"), guest.path("two")).unwrap();
    let linked = guest.lookup(ROOT, "one").unwrap();
    guest.write(linked, NO_HANDLE, b"data").unwrap();
    unlink(&mut guest, "one").unwrap();
    assert_eq!(guest.lookup(ROOT, "two"), Ok(linked));
    assert_eq!(guest.read(linked, NO_HANDLE, 0, 10).unwrap(), b"data");
    for file in &removed {
        guest.write(*file, NO_HANDLE, b"still").unwrap();
        assert_eq!(guest.read(*file, NO_HANDLE, 0, 10).unwrap(), b"still");
    }
    removed.iter().for_each(|file| guest.forget(*file, 1));
    assert_eq!(guest.read(removed[0], NO_HANDLE, 0, 10), Err(-libc::ESTALE));
    unlink(&mut guest, "kept").unwrap();
    guest.forget(kept, 1);
    assert!(guest.descriptors() < 20, "{}", guest.descriptors());
}

#[test]
fn a_file_that_was_used_is_not_evicted_and_takes_no_descriptor() {
    let mut guest = guest_of(tempfile::tempdir().unwrap(), few());
    for index in 0..300 {
        fs::write(guest.path(&index.to_string()), index.to_string()).unwrap();
    }
    let mut files = Vec::new();
    for index in 0..90 {
        files.push(guest.lookup(ROOT, &index.to_string()).unwrap());
        if index >= 40 {
            assert_eq!(guest.read(files[index], NO_HANDLE, 0, 10).unwrap(), index.to_string().as_bytes());
        }
    }
    for index in 90..300 {
        guest.lookup(ROOT, &index.to_string()).unwrap();
    }
    // The first names are cached by the guest for ever, so their nodes stay. A later one that was not used is evicted.
    assert_eq!(guest.read(files[0], NO_HANDLE, 0, 10).unwrap(), b"0");
    assert_eq!(guest.read(files[39], NO_HANDLE, 0, 10), Err(-libc::ESTALE));
    assert_eq!(cached_for(&mut guest, ROOT, "39").1, Duration::ZERO);
    for (index, file) in files.iter().enumerate().skip(40) {
        assert_eq!(guest.read(*file, NO_HANDLE, 0, 10).unwrap(), index.to_string().as_bytes());
        guest.write(*file, NO_HANDLE, b"x").unwrap();
    }
    assert!(guest.descriptors() < 30, "{}", guest.descriptors());
    // What was forgotten makes room.
    files.iter().for_each(|file| guest.forget(*file, 1));
    assert_eq!(guest.read(files[89], NO_HANDLE, 0, 10), Err(-libc::ESTALE));
}

#[test]
fn no_more_files_count_as_open_than_may_be() {
    let mut guest = guest_of(tempfile::tempdir().unwrap(), few());
    let mut files = Vec::new();
    for index in 0..400 {
        fs::write(guest.path(&index.to_string()), index.to_string()).unwrap();
        let file = guest.lookup(ROOT, &index.to_string()).unwrap();
        assert_eq!(guest.read(file, NO_HANDLE, 0, 10).unwrap(), index.to_string().as_bytes());
        files.push(file);
    }
    let readable = files.iter().filter(|file| guest.read(**file, NO_HANDLE, 0, 10).is_ok()).count();
    assert!((100..=164).contains(&readable), "{readable} of 100 open and 64 idle ones");
    assert!(guest.read(files[399], NO_HANDLE, 0, 10).is_ok(), "it was used last");
}

#[test]
fn a_file_with_several_names_in_a_lower_layer_is_copied_for_the_name_that_is_written() {
    let (dir, layers) = overlay_with_two_names(&["written", "changed", "opened"]);
    let mut guest = guest_of(dir, few());
    let written = guest.lookup(ROOT, "written").unwrap();
    let changed = guest.lookup(ROOT, "changed").unwrap();
    assert_eq!(guest.read(written, NO_HANDLE, 0, 10).unwrap(), b"old");
    guest.write(written, NO_HANDLE, b"new").unwrap();
    guest.set_attributes(changed, set::MODE, 0, 0o600).unwrap();
    // The descriptors of these files make room for others.
    for index in 0..20 {
        let (file, _) = create(&mut guest, 0, &index.to_string(), libc::O_RDWR, 0o600).unwrap();
        guest.read(file, NO_HANDLE, 0, 10).unwrap();
    }
    assert_eq!(guest.read(written, NO_HANDLE, 0, 10).unwrap(), b"new");
    assert_eq!(guest.read(changed, NO_HANDLE, 0, 10).unwrap(), b"old");
    // Another thread has looked up another name, so the server does not know which one this one means.
    let opened = guest.lookup(ROOT, "opened").unwrap();
    guest.thread = 2;
    assert_eq!(guest.lookup(ROOT, "other-opened"), Ok(opened));
    guest.thread = 1;
    assert_eq!(guest.write(opened, NO_HANDLE, b"new"), Err(-libc::ESTALE));
    for name in ["opened", "other-opened"] {
        assert_eq!(fs::read(guest.path(name)).unwrap(), b"old");
    }
    let other = guest.lookup(ROOT, "other-written").unwrap();
    assert_ne!(other, written);
    assert_eq!(guest.read(other, NO_HANDLE, 0, 10).unwrap(), b"old");
    assert_eq!(guest.lookup(ROOT, "written"), Ok(written));
    assert_eq!(fs::read(layers.path().join("upper/written")).unwrap(), b"new");
    assert!(fs::metadata(layers.path().join("upper/other-changed")).is_err());
}

#[test]
fn the_root_of_a_container_is_cached_for_ever() {
    let mut guest = guest();
    for place in ["c/rootfs", "c/mounts/0"] {
        fs::create_dir_all(guest.path(place)).unwrap();
        fs::write(guest.path(place).join("file"), "").unwrap();
    }
    let container = guest.lookup(ROOT, "c").unwrap();
    let root = guest.lookup(container, "rootfs").unwrap();
    let (_, name, attributes) = cached_for(&mut guest, root, "file");
    assert_eq!((name, attributes), (EXCLUSIVE_CACHED_FOR, EXCLUSIVE_CACHED_FOR));
    assert_eq!(cached_for(&mut guest, root, "none"), (0, EXCLUSIVE_CACHED_FOR, Duration::ZERO));
    // The host adds names here.
    assert_eq!(cached_for(&mut guest, container, "none"), (0, CACHED_FOR, Duration::ZERO));
    let mounts = guest.lookup(container, "mounts").unwrap();
    let volume = guest.lookup(mounts, "0").unwrap();
    assert_eq!(cached_for(&mut guest, volume, "file").1, CACHED_FOR);
}
