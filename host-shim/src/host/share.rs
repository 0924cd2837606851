//! The share: the directory of the host that the guest sees. A container's files are put together elsewhere and moved
//! into it.
//!
//! A guest can change the share as far as the mounts allow, and its changes must not lead the shim to another place.
//! So the guest gets complete mounts only, their own directories are read-only, and the shim works where the guest
//! has no access.
//!
//! | in the pod's state directory | is |
//! |---|---|
//! | `share.staging/` | a tmpfs, which no guest sees |
//! | `share.staging/names/ID` | an empty directory for each container, to mount on |
//! | `share.staging/new/ID` | where the mounts of a container are put together |
//! | `share/` | `names`, read-only: the guest's share. Its mounts propagate to the VMM's mount namespace |
//! | `share/ID` | the container's tmpfs, read-only: the mounts `rootfs` and `mounts/INDEX`, moved here from `new/ID` |
//! | `share/_NUMBER` | the same for a directory that containers of the pod mount (`pod_volumes.rs`), as `volume` |

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::mount::{MsFlags, mount};
use rustix::{
    fs::{Mode, OFlags, ResolveFlags, openat2},
    mount::{MoveMountFlags, move_mount},
};

use crate::host::{
    journal::{Effect, Journal},
    no_symlinks, remount,
    rootfs::RootfsError,
};

/// The VMM may create device nodes and programs, but cannot open or execute them.
const NO_DEVICES_OR_PROGRAMS: MsFlags = MsFlags::MS_NODEV.union(MsFlags::MS_NOSUID).union(MsFlags::MS_NOEXEC);

/// Directories of the staging directory: the mount points, and the containers' mounts while they are made.
const NAMES: &str = "names";
const NEW: &str = "new";

/// Directories take inodes of a tmpfs but no blocks, and zero blocks would mean no limit.
const TMPFS_SIZE: &str = "size=4k,mode=0755";
/// Inodes of the staging directory: a container takes two directories at most.
const STAGING_INODES: usize = 16 * 1024;

/// Inodes of a container's tmpfs with this many bind mounts. It has its root, `rootfs` and `mounts` besides. A tmpfs of
/// Linux 6.6 and later allows 1 KiB for each inode, and takes extended attributes from the same sum. On a host with
/// SELinux each inode has a label of about 100 bytes (security.selinux), so there are more inodes than names. The guest
/// gets none of them: when it sees the tmpfs, that is read-only.
const fn inodes(names: usize) -> usize {
    2 * names + 16
}

/// Makes the share at `share`, and its staging directory.
pub(crate) fn make(journal: &mut Journal, share: &Path) -> Result<(), RootfsError> {
    let staging = staging(share);
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| RootfsError::Share { path, source }
    };
    make_tmpfs(journal, &staging, TMPFS_SIZE, STAGING_INODES).map_err(failed(&staging))?;
    for name in [NAMES, NEW] {
        fs::create_dir(staging.join(name)).map_err(failed(&staging))?;
    }
    bind_names(journal, &staging.join(NAMES), share).map_err(failed(share))
}

/// Binds `names` at `share`, read-only. Mounts on it propagate to the VMM's mount namespace.
fn bind_names(journal: &mut Journal, names: &Path, share: &Path) -> io::Result<()> {
    journal.make_dir(share)?;
    journal.record(Effect::Mount { path: share.into() })?;
    mount(Some(names), share, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | NO_DEVICES_OR_PROGRAMS;
    for flags in [MsFlags::MS_PRIVATE, read_only, MsFlags::MS_SHARED] {
        mount(None::<&str>, share, None::<&str>, flags, None::<&str>)?;
    }
    Ok(())
}

/// Makes the directory `path` and mounts a private tmpfs on it. Undoing it unmounts all that is mounted on it.
pub(crate) fn make_tmpfs(journal: &mut Journal, path: &Path, options: &str, inodes: usize) -> io::Result<()> {
    journal.make_dir(path)?;
    journal.record(Effect::Mount { path: path.into() })?;
    let options = format!("{options},nr_inodes={inodes}");
    mount(Some("bulkhead"), path, Some("tmpfs"), NO_DEVICES_OR_PROGRAMS, Some(options.as_str()))?;
    Ok(mount(None::<&str>, path, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>)?)
}

/// Puts the directory `id` into the share. It is a tmpfs for `names` files and directories, which `fill` makes and
/// mounts on. The tmpfs becomes read-only and is moved into the share in one step, so that the guest never sees it
/// incomplete and cannot change it.
pub(crate) fn add(
    journal: &mut Journal,
    share: &Path,
    id: &str,
    names: usize,
    fill: impl FnOnce(&Path) -> Result<(), RootfsError>,
) -> Result<(), RootfsError> {
    let new = staging(share).join(NEW).join(id);
    let failed = |source| RootfsError::Share { path: share.join(id), source };
    make_tmpfs(journal, &new, TMPFS_SIZE, inodes(names)).map_err(failed)?;
    fill(&new)?;
    remount::add_flags(&new, NO_DEVICES_OR_PROGRAMS).map_err(failed)?;
    make_read_only(&new).map_err(failed)?;
    move_in(journal, &new, share, id).map_err(failed)
}

/// Makes the tmpfs at `path` read-only: the file system, not only its mount.
fn make_read_only(path: &Path) -> io::Result<()> {
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | NO_DEVICES_OR_PROGRAMS;
    Ok(mount(None::<&str>, path, None::<&str>, flags, None::<&str>)?)
}

/// Moves the mount at `new` to the directory `id` of the share.
fn move_in(journal: &mut Journal, new: &Path, share: &Path, id: &str) -> io::Result<()> {
    journal.make_dir(&staging(share).join(NAMES).join(id))?;
    journal.record(Effect::Moved { path: share.join(id) })?;
    let from = no_symlinks::open(new)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let to = openat2(no_symlinks::open(share)?, id, flags, Mode::empty(), beneath)?;
    let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(&from, "", &to, "", both)?)
}

/// Where the mounts of a container may be, complete or not.
pub(crate) fn places_of(share: &Path, id: &str) -> [PathBuf; 2] {
    [share.join(id), staging(share).join(NEW).join(id)]
}

fn staging(share: &Path) -> PathBuf {
    share.with_extension("staging")
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        sync::{
            atomic::{AtomicBool, Ordering},
            mpsc::channel,
        },
        thread,
    };

    use nix::{
        mount::{MntFlags, umount2},
        sched::{CloneFlags, unshare},
    };
    use rustix::fs::{XattrFlags, setxattr};

    use super::*;
    use crate::{
        host::rootfs::{BindMount, Propagation, ReadOnly, bind_source},
        testing::private_mounts,
    };

    /// The mounts below `place` in the mount namespace of a thread.
    fn mounts_below(place: &Path) -> Vec<String> {
        let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let place = place.display().to_string();
        table.lines().filter(|line| line.contains(&place)).map(str::to_owned).collect()
    }

    #[test]
    fn what_is_made_in_the_share_comes_to_the_jail_as_it_is_and_leaves_it() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        let below = source.join("a blank");
        fs::create_dir(&source).unwrap();
        mount(Some("t"), &source, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        mount(None::<&str>, &source, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        fs::create_dir(&below).unwrap();
        mount(Some("t"), &below, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(below.join("data"), "kept").unwrap();
        let share = dir.path().join("share");
        let mut sandbox = Journal::open(&dir.path().join("sandbox")).unwrap();
        make(&mut sandbox, &share).unwrap();

        let (ask, asked) = channel::<()>();
        let (say, said) = channel();
        let place = share.join("c");
        // As the VMM: in a mount namespace that is the slave of this one.
        let jail = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
            mount(None::<&str>, "/", None::<&str>, slave, None::<&str>).unwrap();
            say.send(Vec::new()).unwrap();
            for () in asked {
                say.send(mounts_below(&place)).unwrap();
            }
        });
        said.recv().unwrap();
        let look = || {
            ask.send(()).unwrap();
            said.recv().unwrap()
        };

        let mut journal = Journal::open(&dir.path().join("container")).unwrap();
        let add_bound = |journal: &mut Journal, read_only, propagation| {
            let (index, source, is_of_pod) = (0, source.clone(), false);
            let bound = BindMount { index, source, recursive: true, read_only, propagation, is_of_pod };
            add(journal, &share, "c", 1, |own| bind_source(&bound, &own.join("0"))).unwrap();
        };
        add_bound(&mut journal, ReadOnly::Top, Propagation::Private);
        assert_eq!(fs::read_to_string(share.join("c/0/a blank/data")).unwrap(), "kept");
        let seen = look();
        assert_eq!(seen.len(), 3, "the directory, what is bound, and what is mounted in that: {seen:?}");
        assert!(seen.iter().all(|line| line.contains("nosuid,nodev,noexec")), "{seen:?}");
        assert!(seen.iter().any(|line| line.contains("/c/0 ro,")), "{seen:?}");

        fs::create_dir(source.join("later")).unwrap();
        mount(Some("t"), &source.join("later"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        assert_eq!(look().len(), 3, "what is mounted in the source later stays on the host");
        journal.undo().unwrap();
        assert_eq!(look(), [""; 0]);

        // Or comes too, if that was asked for.
        let mut journal = Journal::open(&dir.path().join("container")).unwrap();
        add_bound(&mut journal, ReadOnly::None, Propagation::Slave);
        let before = look().len();
        fs::create_dir(source.join("even later")).unwrap();
        mount(Some("t"), &source.join("even later"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        assert_eq!(look().len(), before + 1);
        journal.undo().unwrap();
        assert_eq!(look(), [""; 0]);
        drop(ask);
        jail.join().unwrap();
        sandbox.undo().unwrap();
        assert_eq!(fs::read_to_string(below.join("data")).unwrap(), "kept");
        assert!(!share.exists());
    }

    /// A share with a directory in it, `c`, which has a mount at `c/rootfs`, and the journals of both.
    fn share_with_a_container(dir: &Path) -> (Journal, Journal) {
        let mut sandbox = Journal::open(&dir.join("sandbox")).unwrap();
        make(&mut sandbox, &dir.join("share")).unwrap();
        let mut journal = Journal::open(&dir.join("container")).unwrap();
        add(&mut journal, &dir.join("share"), "c", 1, |own| {
            let root = own.join("rootfs");
            fs::create_dir(&root).unwrap();
            mount(Some("t"), &root, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
            Ok(())
        })
        .unwrap();
        (sandbox, journal)
    }

    #[test]
    fn only_what_the_container_has_can_be_written() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let (sandbox, journal) = share_with_a_container(dir.path());
        let share = dir.path().join("share");
        fs::write(share.join("c/rootfs/file"), "").unwrap();
        let refused = |result: io::Result<()>| {
            let kind = result.unwrap_err().kind();
            assert!(
                matches!(kind, io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::ResourceBusy),
                "{kind}"
            );
        };
        refused(fs::create_dir(share.join("new")));
        refused(symlink("/", share.join("new")));
        refused(fs::rename(share.join("c"), share.join("moved")));
        refused(fs::create_dir(share.join("c/new")));
        refused(symlink("/", share.join("c/new")));
        refused(fs::rename(share.join("c/rootfs"), share.join("c/moved")));
        refused(fs::remove_dir(share.join("c/rootfs")));
        // Nor by whoever makes the mount writable: it is the tmpfs itself.
        let writable = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
        mount(None::<&str>, &share.join("c"), None::<&str>, writable, None::<&str>).unwrap();
        refused(fs::create_dir(share.join("c/new")));
        journal.undo().unwrap();
        sandbox.undo().unwrap();
        assert!(!share.exists() && !staging(&share).exists());
    }

    #[test]
    fn a_container_leaves_nothing_in_a_share_that_lives_on() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let (sandbox, journal) = share_with_a_container(dir.path());
        journal.undo().unwrap();
        for place in ["share", "share.staging/names", "share.staging/new"] {
            assert_eq!(fs::read_dir(dir.path().join(place)).unwrap().count(), 0, "{place}");
        }
        assert_eq!(mounts_below(&dir.path().join("share")).len(), 2, "the share and its staging directory");
        sandbox.undo().unwrap();
    }

    /// With SELinux, each new file has a label. Without it, whoever makes the file can set the same label.
    #[test]
    fn a_label_of_each_file_takes_no_room_that_a_container_needs() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let share = dir.path().join("share");
        let mut sandbox = Journal::open(&dir.path().join("sandbox")).unwrap();
        make(&mut sandbox, &share).unwrap();
        for names in [0, 1, 9, 200] {
            let mut journal = Journal::open(&dir.path().join("container")).unwrap();
            let label = |path: &Path| {
                let label = b"system_u:object_r:container_var_run_t:s0:c1022,c1023\0";
                setxattr(path, "security.selinux", label, XattrFlags::empty()).unwrap();
            };
            let fill = |own: &Path| {
                label(own);
                let mounts = own.join("mounts");
                let own = [own.join("rootfs"), mounts.clone()];
                for place in own.into_iter().chain((0..names).map(|name| mounts.join(name.to_string()))) {
                    fs::create_dir(&place).unwrap();
                    label(&place);
                }
                Ok(())
            };
            add(&mut journal, &share, "c", names, fill).unwrap();
            journal.undo().unwrap();
        }
        sandbox.undo().unwrap();
    }

    #[test]
    fn a_container_that_fails_half_way_leaves_nothing() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let share = dir.path().join("share");
        let mut sandbox = Journal::open(&dir.path().join("sandbox")).unwrap();
        make(&mut sandbox, &share).unwrap();
        let mut journal = Journal::open(&dir.path().join("container")).unwrap();
        add(&mut journal, &share, "c", 1, |own| {
            fs::create_dir(own.join("rootfs")).unwrap();
            mount(Some("t"), &own.join("rootfs"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
            Err(RootfsError::NotDirectory { path: own.into() })
        })
        .unwrap_err();
        assert_eq!(fs::read_dir(&share).unwrap().count(), 0, "the guest sees nothing of it");
        journal.undo().unwrap();
        assert_eq!(mounts_below(&share).len(), 2);
        sandbox.undo().unwrap();
        assert_eq!(mounts_below(dir.path()), [""; 0]);
    }

    /// As if the read-only mounts had failed: somebody swaps each new directory of the share for a link to a
    /// directory of the host, before something is mounted on it, and before it is unmounted and removed.
    #[test]
    fn a_link_in_the_share_leads_to_no_directory_of_the_host() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let (share, victim) = (dir.path().join("share"), dir.path().join("victim"));
        fs::create_dir_all(victim.join("c")).unwrap();
        mount(Some("t"), &victim.join("c"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        let mut sandbox = Journal::open(&dir.path().join("sandbox")).unwrap();
        make(&mut sandbox, &share).unwrap();
        let names = staging(&share).join(NAMES);
        let nothing = |own: &Path| {
            fs::create_dir(own.join("rootfs")).unwrap();
            Ok(())
        };

        symlink(&victim, names.join("c")).unwrap();
        let mut journal = Journal::open(&dir.path().join("planted")).unwrap();
        add(&mut journal, &share, "c", 1, nothing).unwrap_err();
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 1);
        fs::remove_file(names.join("c")).unwrap();
        journal.undo().unwrap();

        let ends = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    if fs::rename(names.join("c"), names.join("moved")).is_ok() {
                        let _ = symlink(&victim, names.join("c"));
                        let _ = fs::remove_file(names.join("c"));
                        let _ = fs::remove_dir(names.join("moved"));
                    }
                }
            });
            for _ in 0..200 {
                let mut journal = Journal::open(&dir.path().join("raced")).unwrap();
                // Whether it comes to be, and whether it is undone, depends on who is faster.
                let _ = add(&mut journal, &share, "c", 1, nothing);
                let _ = journal.undo();
                assert_eq!(mounts_below(&victim).len(), 1);
            }
            ends.store(true, Ordering::Relaxed);
        });
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 1);
        umount2(&victim.join("c"), MntFlags::MNT_DETACH).unwrap();
        let _ = fs::remove_file(dir.path().join("raced"));
        sandbox.undo().unwrap();
    }
}
