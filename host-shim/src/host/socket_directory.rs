//! A directory of the host that a container mounts, in which services have their sockets. A service that is started
//! again makes its socket anew, so the directory is watched.
//!
//! Whoever can write to the directory chooses what is in it, and a container may be able to. No name leads out of it: a
//! socket is opened as a place (O_PATH), not through a symbolic link and not in another mount. What the guest itself
//! has made is no socket at which a process of the host listens.

use std::{
    collections::HashSet,
    ffi::OsString,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStringExt},
    path::{Path, PathBuf},
};

use bulkhead_vmm_api::SharedSocket;
use rustix::{
    fs::{
        Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, inotify::WatchFlags, major, minor, openat,
        openat2,
    },
    mount::{OpenTreeFlags, open_tree},
};

use crate::host::{
    directory_watch::{self, Changes, Watch},
    host_socket::{HostSocket, Listens, listens},
};

/// How many names are looked at.
const MOST_NAMES: usize = 1024;

/// File systems of the kernel, in which services have no sockets.
const WITHOUT: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Such a directory.
#[derive(Debug)]
pub(crate) struct SocketDirectory {
    /// Where it is on the host.
    pub(crate) path: PathBuf,
    /// Where it is in the share.
    pub(crate) place: PathBuf,
    /// A mount of it that is attached nowhere: it does not keep the host from unmounting its own.
    directory: OwnedFd,
    watch: Watch,
}

/// A socket at which a service listens.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) name: OsString,
    pub(crate) id: SharedSocket,
    stat: Stat,
    /// As long as it is open, no other socket has its number.
    inode: OwnedFd,
}

/// The sockets of a directory.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub(crate) sockets: Vec<Found>,
    /// Whether there are sockets at which nobody listens, perhaps not yet.
    pub(crate) has_others: bool,
    /// Whether there are more names than were looked at.
    pub(crate) is_cut: bool,
}

/// Whether services may have sockets in a directory that is the source of a bind mount.
pub(crate) fn may_have_sockets(source: &Path) -> bool {
    !WITHOUT.iter().any(|without| source.starts_with(without))
}

impl SocketDirectory {
    /// Begins to watch the directory that was opened, and is at `place` in the share.
    pub(crate) fn watch(path: &Path, opened: &OwnedFd, place: PathBuf) -> io::Result<Self> {
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let directory = open_tree(opened, c"", clone | OpenTreeFlags::AT_EMPTY_PATH)?;
        directory_watch::keep_apart(&directory)?;
        let events = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVE;
        let watch = Watch::new(&directory, events)?;
        Ok(Self { path: path.into(), place, directory, watch })
    }

    /// Its changes from now on, and those since it was opened.
    pub(crate) fn changes(&self) -> io::Result<Changes> {
        self.watch.changes()
    }

    /// Finds the sockets. Blocks.
    pub(crate) fn list(&self) -> io::Result<Listing> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(&self.directory, c".", flags, Mode::empty())?;
        let (mut listing, mut known) = (Listing::default(), HashSet::new());
        // Two of the names are `.` and `..`.
        for (number, entry) in Dir::new(directory)?.enumerate() {
            if number >= MOST_NAMES + 2 {
                listing.is_cut = true;
                break;
            }
            let entry = entry?;
            if !matches!(entry.file_type(), FileType::Socket | FileType::Unknown) {
                continue;
            }
            let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
            // It may be gone meanwhile.
            let Ok(Some((found, listens))) = self.look(name) else { continue };
            match listens {
                // A socket may have several names.
                Listens::ForStreams if known.insert(found.id) => listing.sockets.push(found),
                Listens::ForStreams => {}
                Listens::ForDatagrams | Listens::Nobody => listing.has_others = true,
            }
        }
        Ok(listing)
    }

    /// The socket of this name. None: it is something else.
    fn look(&self, name: OsString) -> io::Result<Option<(Found, Listens)>> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let inode = openat2(&self.directory, name.as_os_str(), flags, Mode::empty(), resolve)?;
        let stat = fstat(&inode)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
            return Ok(None);
        }
        let listens = listens(&inode)?;
        let (major, minor) = (major(stat.st_dev), minor(stat.st_dev));
        let id = SharedSocket { major, minor, inode: stat.st_ino };
        Ok(Some((Found { name, id, stat, inode }, listens)))
    }
}

impl Found {
    /// The socket, with a number by which the agent names it. `directory` is where it was found.
    pub(crate) fn into_socket(self, number: usize, directory: &Path) -> HostSocket {
        HostSocket::of(number, &directory.join(&self.name), self.inode, &self.stat)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{
            fs::symlink,
            net::{UnixDatagram, UnixListener},
        },
    };

    use nix::mount::{MsFlags, mount};
    use tempfile::TempDir;

    use super::*;
    use crate::{host::no_symlinks, testing::private_mounts};

    fn watched() -> (TempDir, SocketDirectory) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("services")).unwrap();
        let opened = no_symlinks::open(&dir.path().join("services")).unwrap();
        let watched = SocketDirectory::watch(&dir.path().join("services"), &opened, "a".into()).unwrap();
        (dir, watched)
    }

    fn names(listing: &Listing) -> Vec<&OsString> {
        listing.sockets.iter().map(|found| &found.name).collect()
    }

    #[test]
    fn only_what_a_process_of_the_host_serves_in_the_directory_itself_is_found() {
        private_mounts();
        let (dir, watched) = watched();
        let at = |name: &str| dir.path().join("services").join(name);
        let _listener = UnixListener::bind(at("service")).unwrap();
        assert_eq!(names(&watched.list().unwrap()), ["service"]);
        assert!(!watched.list().unwrap().has_others);

        // Somebody who can write to the directory wants to reach another service.
        let elsewhere = dir.path().join("elsewhere");
        let _other = UnixListener::bind(&elsewhere).unwrap();
        symlink("../elsewhere", at("link")).unwrap();
        symlink(&elsewhere, at("absolute link")).unwrap();
        symlink("..", at("directory")).unwrap();
        fs::create_dir(at("below")).unwrap();
        let _below = UnixListener::bind(at("below/service")).unwrap();
        fs::write(at("mounted"), "").unwrap();
        mount(Some(&elsewhere), &at("mounted"), None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        fs::write(at("file"), "").unwrap();
        fs::hard_link(at("service"), at("second name")).unwrap();
        assert_eq!(watched.list().unwrap().sockets.len(), 1);
        assert!(!watched.list().unwrap().has_others);
        // And one that nobody serves, as a guest makes it.
        drop(UnixListener::bind(at("left")).unwrap());
        assert_eq!(watched.list().unwrap().sockets.len(), 1);
        assert!(watched.list().unwrap().has_others);
        let _log = UnixDatagram::bind(at("log")).unwrap();
        assert_eq!(watched.list().unwrap().sockets.len(), 1);
    }

    #[test]
    fn very_many_names_are_not_all_read() {
        let (dir, watched) = watched();
        let at = |name: usize| dir.path().join("services").join(name.to_string());
        (0..MOST_NAMES).for_each(|name| fs::write(at(name), "").unwrap());
        assert!(!watched.list().unwrap().is_cut);
        fs::write(at(MOST_NAMES), "").unwrap();
        assert!(watched.list().unwrap().is_cut);
    }

    #[tokio::test]
    async fn the_socket_that_was_made_anew_is_another_one() {
        let (dir, watched) = watched();
        let mut changes = watched.changes().unwrap();
        let path = dir.path().join("services/service");
        let mut known = Vec::new();
        for _ in 0..3 {
            let _listener = UnixListener::bind(&path).unwrap();
            changes.next().await.unwrap();
            let mut listing = watched.list().unwrap();
            let found = listing.sockets.pop().unwrap();
            assert!(!known.iter().any(|other: &Found| other.id == found.id), "the number was used again");
            known.push(found);
            fs::remove_file(&path).unwrap();
            changes.next().await.unwrap();
            assert!(watched.list().unwrap().sockets.is_empty());
        }
    }

    #[test]
    fn services_have_no_sockets_in_file_systems_of_the_kernel() {
        for source in ["/dev", "/dev/snd", "/proc/1", "/sys/fs/cgroup"] {
            assert!(!may_have_sockets(Path::new(source)), "{source}");
        }
        for source in ["/", "/run/spire", "/device"] {
            assert!(may_have_sockets(Path::new(source)), "{source}");
        }
    }
}
