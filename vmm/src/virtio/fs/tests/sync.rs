//! SYNCFS.

use std::ffi::CString;

use super::*;

/// Offers a request of Linux's sync(2) and syncfs(2), with the node of the root.
fn offer_sync(guest: &mut Guest, head: u16) {
    let at = BUFFERS + 0x80_0000 + 0x1000 * u64::from(head);
    let header = guest.header(opcode::SYNCFS, ROOT, 8, 0);
    guest.driver.write(at, &[&header[..], &[0; 8]].concat());
    let buffers = [(at, IN_HEADER as u32 + 8, 0), (at + 0x800, OUT_HEADER as u32, WRITE)];
    guest.driver.offer(REQUESTS, head, &buffers);
}

#[test]
fn a_file_system_that_cannot_be_synced_now_keeps_one_thread_from_others() {
    const SYNCS: u16 = 10;
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        mount_in(dir.path(), &["slow", "other"]);
        let slow = dir.path().join("slow");
        let mut guest = Guest::serving(dir, Limits::of_this_process(1));
        let top = guest.lookup(ROOT, "slow").unwrap();
        let other = guest.lookup(ROOT, "other").unwrap();
        let waiting = make_opens_wait(&slow);
        let heads: Vec<u16> = (0..SYNCS).map(|index| 100 + 4 * index).collect();
        heads.iter().for_each(|head| offer_sync(&mut guest, *head));
        // Files of all file systems are served meanwhile, by any of the other threads.
        for _ in 0..50 {
            guest.lookup(top, "file").unwrap();
            let file = guest.lookup(other, "file").unwrap();
            let handle = guest.open(file, libc::O_RDONLY).unwrap();
            assert_eq!(guest.read(file, handle, 0, 10).unwrap(), b"text");
        }
        // One open waits (fanotify(7), struct fanotify_event_metadata).
        assert_eq!(rustix::io::read(&waiting, &mut [0; 4096]).unwrap(), 24);
        drop(waiting);
        let mut done: Vec<u16> = heads.iter().map(|_| guest.driver.wait_used(REQUESTS).0).collect();
        done.sort_unstable();
        assert_eq!(done, heads);
        for head in heads {
            let at = BUFFERS + 0x80_0000 + 0x1000 * u64::from(head) + 0x800;
            assert_eq!(word(&guest.driver.read(at, OUT_HEADER), 4), 0);
        }
        assert_eq!(guest.device.control().requests()["SYNCFS"], u64::from(SYNCS));
    };
    drill(body, End::succeeds);
}

#[test]
fn a_request_that_was_another_when_it_was_taken_does_not_sync_too() {
    let dir = tempfile::tempdir().unwrap();
    let (shared, mut server) = server_of(dir.path());
    shared.is_syncing.store(true, std::sync::atomic::Ordering::Release);
    assert_eq!(server.sync_file_systems().err(), Some(Errno::BUSY));
    shared.is_syncing.store(false, std::sync::atomic::Ordering::Release);
    assert!(server.sync_file_systems().is_ok() && server.sync_file_systems().is_ok());
}

#[test]
fn what_the_host_has_replaced_or_made_read_only_does_not_stop_a_sync() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        mount_in(dir.path(), &["gone", "read-only"]);
        let [gone, read_only] = ["gone", "read-only"].map(|name| dir.path().join(name));
        let (_, mut server) = server_of(dir.path());
        for name in [c"gone", c"read-only"] {
            server.find(ROOT, name).unwrap();
        }
        let none = None::<&str>;
        mount(none, &read_only, none, MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, none).unwrap();
        nix::mount::umount2(&gone, nix::mount::MntFlags::MNT_DETACH).unwrap();
        assert!(server.sync_file_systems().is_ok());
    };
    drill(body, End::succeeds);
}

/// The server does not open what would give the guest the memory of the VMM, and says so.
#[test]
fn a_file_system_that_cannot_be_opened_is_an_error_of_a_sync() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("mem"), "").unwrap();
        mount_in(dir.path(), &["other"]);
        mount(Some("/proc/self/mem"), &dir.path().join("mem"), None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .unwrap();
        let (_, mut server) = server_of(dir.path());
        for name in [c"mem", c"other"] {
            server.find(ROOT, name).unwrap();
        }
        assert_eq!(server.sync_file_systems().err(), Some(Errno::ACCESS));
        assert!(!server.shared.is_syncing.load(std::sync::atomic::Ordering::Acquire));
    };
    drill(body, End::succeeds);
}

/// They are in the host's /proc, which a container may have as a volume.
#[test]
fn addresses_of_the_vmm_are_not_shown() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        mount_in(dir.path(), &["process"]);
        let process = dir.path().join("process");
        mount(Some("/proc"), &process, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        let (_, mut server) = server_of(dir.path());
        let (proc, _) = server.find(ROOT, c"process").unwrap();
        let own = CString::new(std::process::id().to_string()).unwrap();
        let (process, _) = server.find(proc, &own).unwrap();
        let (net, _) = server.find(process, c"net").unwrap();
        let mut open = |directory, name| {
            let (number, _) = server.find(directory, name).unwrap();
            server.open_node(number, OFlags::RDONLY).err()
        };
        // A process that has ended has none, and programs that read those of all processes go on.
        let refused = (Some(Errno::ACCESS), Some(Errno::NOENT));
        assert_eq!((open(process, c"maps"), open(process, c"stat")), refused);
        assert_eq!((open(process, c"comm"), open(process, c"statm")), (None, None));
        // Neither of them is of a process.
        assert_eq!((open(proc, c"stat"), open(net, c"stat")), (None, None));
    };
    drill(body, End::succeeds);
}
