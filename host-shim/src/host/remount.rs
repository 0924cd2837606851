//! Adds flags to a mount and to all mounts below it. It does so one by one, because mount(2) remounts one mount only.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io, iter,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
};

use nix::mount::{MsFlags, mount};

use crate::host::{
    mountinfo::{self, Mount},
    no_symlinks,
};

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
    for listed in reachable(tree, table) {
        let kept = if listed.has(b"ro") { MsFlags::MS_RDONLY } else { MsFlags::empty() };
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | added | kept;
        // No link, and the very mount that has these options: it keeps them.
        let place = match no_symlinks::open(&listed.place) {
            Ok(place) => place,
            // The host has unmounted it since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        if mount_id(&place)? != listed.id {
            return Ok(false);
        }
        mount(None::<&str>, &no_symlinks::proc_path(&place), None::<&str>, flags, None::<&str>)?;
    }
    Ok(true)
}

/// The mounts at `tree` and below it, without those that a later mount covers, at their place or above it: no path
/// leads there.
fn reachable<'t>(tree: &Path, table: &'t [u8]) -> Vec<Mount<'t>> {
    let mounts = || mountinfo::mounts(table).filter(|mount| mount.place.starts_with(tree));
    let parents: HashMap<_, _> = mounts().map(|mount| (mount.id, mount.parent)).collect();
    // Of several mounts at one place the last one covers the others.
    let tops: BTreeMap<_, _> = mounts().map(|mount| (mount.place.clone(), mount)).collect();
    let is_inside = |mount: &Mount<'_>, outer: u64| {
        let outers = iter::successors(Some(mount.parent), |id| parents.get(id).copied());
        outers.take(parents.len()).any(|id| id == outer)
    };
    let is_reached = |mount: &&Mount<'_>| {
        let mut above = mount.place.ancestors().skip(1).filter_map(|place| tops.get(place));
        above.all(|top| is_inside(mount, top.id))
    };
    tops.values().filter(is_reached).cloned().collect()
}

/// The number of the mount that an O_PATH descriptor refers to. The file system is not asked, unlike by statx(2): that
/// of FUSE refuses this for root if another user has mounted it.
fn mount_id(file: &OwnedFd) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", file.as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    id.and_then(|id| id.trim().parse().ok()).ok_or_else(|| io::Error::other("fdinfo has no mnt_id"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

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

    /// `docker run -v /:/host` on a host where a user has mounted something by FUSE, such as gvfs of a desktop.
    #[test]
    fn what_a_user_has_mounted_and_what_is_covered_is_no_error() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let tmpfs = |name: &str| {
            fs::create_dir_all(at(name)).unwrap();
            mount(Some("t"), &at(name), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        };
        tmpfs("tree");
        tmpfs("tree/covered/below");
        tmpfs("tree/covered");
        tmpfs("tree/covered/above");
        tmpfs("tree/twice");
        tmpfs("tree/twice");
        fs::create_dir(at("tree/fuse")).unwrap();
        // Nobody answers its requests.
        let device = fs::File::options().read(true).write(true).open("/dev/fuse");
        let device = device.expect("this test needs /dev/fuse: modprobe fuse");
        let options = format!("fd={},rootmode=40000,user_id=1000,group_id=1000", device.as_raw_fd());
        mount(Some("fuse"), &at("tree/fuse"), Some("fuse"), MsFlags::empty(), Some(&*options)).unwrap();
        add_flags(&at("tree"), NO_DEVICES_OR_PROGRAMS).unwrap();
        let (with, without): (Vec<_>, Vec<_>) =
            mounts_below(&at("tree")).into_iter().partition(|line| line.contains("nosuid,nodev,noexec"));
        assert_eq!((with.len(), without.len()), (5, 2), "{with:#?} {without:#?}");
        umount2(&at("tree/fuse"), MntFlags::MNT_DETACH).unwrap();
        umount2(&at("tree"), MntFlags::MNT_DETACH).unwrap();
    }
}
