//! Adds flags to a mount and to all mounts below it. It does so one by one, because mount(2) remounts one mount only.

use std::{collections::BTreeMap, io, path::Path};

use nix::mount::{MsFlags, mount};
use rustix::fs::{AtFlags, StatxFlags, statx};

use crate::host::{mountinfo, no_symlinks};

/// How often the table of mounts is read again because a name led to another mount than the one that was listed.
const READINGS: usize = 100;

/// Adds flags of mount(2) to the mount at `tree` and all mounts below it. A mount that is read-only stays so.
///
/// Another pod may have the same volume, and move the directories on the way to mounts in it, or exchange them, while
/// this is done.
pub(crate) fn add_flags(tree: &Path, flags: MsFlags) -> io::Result<()> {
    for _ in 0..READINGS {
        if add_as_listed(tree, flags, &mountinfo::read()?)? {
            return Ok(());
        }
    }
    Err(io::Error::other("gave up, because the mounts of the volume kept changing"))
}

/// The same by this table of the mounts, which may be out of date. False: a mount is not where it was, and the rest is
/// left as it is.
fn add_as_listed(tree: &Path, added: MsFlags, table: &[u8]) -> io::Result<bool> {
    // Of several mounts at one place the last one covers the others.
    let mut mounts = BTreeMap::new();
    for mount in mountinfo::mounts(table).filter(|mount| mount.place.starts_with(tree)) {
        mounts.insert(mount.place.clone(), (mount.id, mount.has(b"ro")));
    }
    for (place, (id, is_read_only)) in mounts {
        let kept = if is_read_only { MsFlags::MS_RDONLY } else { MsFlags::empty() };
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | added | kept;
        // No link, and the very mount that has these options: it keeps them.
        let place = no_symlinks::open(&place)?;
        let found = statx(&place, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
        if found != id {
            return Ok(false);
        }
        mount(None::<&str>, &no_symlinks::proc_path(&place), None::<&str>, flags, None::<&str>)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use nix::mount::{MntFlags, umount2};

    use super::*;
    use crate::testing::private_mounts;

    const NO_DEVICES_OR_PROGRAMS: MsFlags =
        MsFlags::MS_NODEV.union(MsFlags::MS_NOSUID).union(MsFlags::MS_NOEXEC);

    /// The mounts below `place` in the mount namespace of a thread.
    fn mounts_below(place: &Path) -> Vec<String> {
        let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let place = place.display().to_string();
        table.lines().filter(|line| line.contains(&place)).map(str::to_owned).collect()
    }

    /// A pod that shares a volume with a new one swaps two directories of it that have mounts of the host in them.
    #[test]
    fn a_directory_that_is_moved_does_not_take_the_flags_of_another_mount_along() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for place in ["volume/one/sub", "volume/two/sub"] {
            fs::create_dir_all(at(place)).unwrap();
            mount(Some("t"), &at(place), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        }
        let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(None::<&str>, &at("volume/one/sub"), None::<&str>, read_only, None::<&str>).unwrap();
        fs::create_dir(at("tree")).unwrap();
        mount(
            Some(&at("volume")),
            &at("tree"),
            None::<&str>,
            MsFlags::MS_BIND | MsFlags::MS_REC,
            None::<&str>,
        )
        .unwrap();
        let table = mountinfo::read().unwrap();
        let (one, two, exchange) = (at("volume/one"), at("volume/two"), rustix::fs::RenameFlags::EXCHANGE);
        rustix::fs::renameat_with(rustix::fs::CWD, &one, rustix::fs::CWD, &two, exchange).unwrap();
        assert!(!add_as_listed(&at("tree"), NO_DEVICES_OR_PROGRAMS, &table).unwrap());
        add_flags(&at("tree"), NO_DEVICES_OR_PROGRAMS).unwrap();
        let mounts = mounts_below(&at("tree"));
        assert!(mounts.iter().all(|line| line.contains("nosuid,nodev,noexec")), "{mounts:?}");
        assert!(mounts.iter().any(|line| line.contains("tree/two/sub ro,")), "{mounts:?}");
        assert!(mounts.iter().any(|line| line.contains("tree/one/sub rw,")), "{mounts:?}");
        for place in ["tree", "volume/one/sub", "volume/two/sub"] {
            umount2(&at(place), MntFlags::MNT_DETACH).unwrap();
        }
    }

    /// A pod that shares a volume with a new one swaps a directory of it, on the way to a mount of the host.
    #[test]
    fn a_link_in_a_volume_leads_to_no_mount_of_the_host() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for place in ["volume/way/mount", "victim/mount"] {
            fs::create_dir_all(at(place)).unwrap();
            mount(Some("t"), &at(place), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        }
        let tree = at("tree");
        fs::create_dir(&tree).unwrap();
        mount(Some(&at("volume")), &tree, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
            .unwrap();
        let table = mountinfo::read().unwrap();
        fs::rename(at("volume/way"), at("volume/moved")).unwrap();
        symlink(at("victim"), at("volume/way")).unwrap();
        let error = add_as_listed(&tree, NO_DEVICES_OR_PROGRAMS, &table).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ELOOP));
        let victims = mounts_below(&at("victim"));
        assert!(!victims[0].contains("nodev"), "{victims:?}");
        for place in ["tree", "volume/moved/mount", "victim/mount"] {
            umount2(&at(place), MntFlags::MNT_DETACH).unwrap();
        }
    }
}
