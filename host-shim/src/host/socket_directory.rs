//! A directory of the host that a container mounts, in which services have their sockets. A service that is started
//! again makes its socket anew, so the directory is watched.
//!
//! Whoever can write to the directory chooses what is in it, and a container may be able to. No name leads out of it: a
//! socket is opened as a place (O_PATH), not through a symbolic link and not in another mount. If the guest makes a
//! socket, no process of the host has bound it, so the shim does not serve it.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
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
    io::Errno,
};

use crate::{
    host::{
        directory_watch::Watch,
        host_socket::{Bound, HostSocket, bound_to},
        no_symlinks,
    },
    types::text::one_line,
};

/// How many names are looked at.
const MOST_NAMES: usize = 1024;

/// File systems of the kernel, in which services have no sockets.
const WITHOUT: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Such a directory. Nothing of it stays open.
#[derive(Debug)]
pub(crate) struct SocketDirectory {
    /// Where it is on the host, for messages.
    pub(crate) path: PathBuf,
    /// The share of the pod.
    pub(crate) share: PathBuf,
    /// Where it is in the share.
    pub(crate) place: PathBuf,
}

/// A socket at which a service listens.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) name: OsString,
    pub(crate) id: SharedSocket,
    stat: Stat,
    datagrams: bool,
    /// As long as it is open, no other socket has its number.
    inode: OwnedFd,
}

/// What is known of a directory, and what is wanted.
#[derive(Debug)]
pub(crate) struct Known {
    /// The sockets that are known already, with their names.
    pub(crate) sockets: HashMap<SharedSocket, OsString>,
    /// How many others are wanted at most.
    pub(crate) room: usize,
}

/// What is in a directory now.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// The known sockets that are still there, or may be, with their names now.
    pub(crate) known: HashMap<SharedSocket, OsString>,
    pub(crate) new: Vec<Found>,
    /// Whether there are more sockets than are wanted.
    pub(crate) has_more: bool,
    /// Whether there are files of sockets that no process has bound, or whose process has just begun to bind them.
    pub(crate) has_others: bool,
    /// Whether there are more names than were looked at.
    pub(crate) is_cut: bool,
    /// Why it is not known of a socket whether somebody listens there.
    pub(crate) failed: Option<io::Error>,
}

/// Whether services may have sockets in a directory that is the source of a bind mount.
pub(crate) fn may_have_sockets(source: &Path) -> bool {
    !WITHOUT.iter().any(|without| source.starts_with(without))
}

impl SocketDirectory {
    /// Looks for sockets, as the guest sees the directory: even if the host has mounted something there meanwhile.
    /// `watch` tells of the first change since then, and not of more: whoever can write to the directory cannot fill
    /// the queue of events. Blocks.
    pub(crate) fn look(&self, watch: &Watch, known: &Known) -> io::Result<Listing> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let opened = openat2(no_symlinks::open(&self.share)?, &self.place, flags, Mode::empty(), resolve)?;
        let events = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVE;
        watch.add(&opened, events | WatchFlags::ONESHOT)?;
        let mut listing = Listing::default();
        // Each by its name, which may not be among the first.
        for (id, name) in &known.sockets {
            match look_at(&opened, name) {
                Ok(Some((found, Bound::Streams | Bound::Datagrams))) if found.id == *id => {}
                Ok(_) => continue,
                // It may be there.
                Err(error) => listing.failed = Some(error),
            }
            listing.known.insert(*id, name.clone());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Two of the names are `.` and `..`.
        for (number, entry) in Dir::new(openat(&opened, c".", flags, Mode::empty())?)?.enumerate() {
            if number >= MOST_NAMES + 2 {
                listing.is_cut = true;
                break;
            }
            let entry = entry?;
            if matches!(entry.file_type(), FileType::Socket | FileType::Unknown) {
                let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
                listing.add(look_at(&opened, &name), known);
            }
        }
        Ok(listing)
    }
}

impl Listing {
    fn add(&mut self, looked: io::Result<Option<(Found, Bound)>>, known: &Known) {
        match looked {
            Ok(None) => {}
            Ok(Some((_, Bound::Nothing))) => self.has_others = true,
            // Perhaps by another name than before.
            Ok(Some((found, _))) if known.sockets.contains_key(&found.id) => {
                self.known.entry(found.id).or_insert(found.name);
            }
            // A socket may have several names.
            Ok(Some((found, _))) if self.new.iter().any(|other| other.id == found.id) => {}
            Ok(Some(_)) if self.new.len() >= known.room => self.has_more = true,
            Ok(Some((found, _))) => self.new.push(found),
            Err(error) => self.failed = Some(error),
        }
    }
}

/// The socket of this name in a directory. None: it is something else, in another mount, or gone.
fn look_at(directory: &OwnedFd, name: &OsStr) -> io::Result<Option<(Found, Bound)>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let inode = match openat2(directory, name, flags, Mode::empty(), resolve) {
        Err(Errno::NOENT | Errno::XDEV) => return Ok(None),
        other => other?,
    };
    let stat = fstat(&inode)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Ok(None);
    }
    let bound = bound_to(&inode)?;
    let (major, minor) = (major(stat.st_dev), minor(stat.st_dev));
    let id = SharedSocket { major, minor, inode: stat.st_ino };
    let datagrams = bound == Bound::Datagrams;
    Ok(Some((Found { name: name.into(), id, stat, datagrams, inode }, bound)))
}

impl Found {
    /// The socket, with a number by which the agent names it. `directory` is where it was found. Its path is fit for
    /// the log: perhaps a container has chosen the name.
    pub(crate) fn into_socket(self, number: u32, directory: &Path) -> HostSocket {
        let path = directory.join(one_line(&self.name.to_string_lossy()));
        HostSocket::of(number as usize, &path, self.inode, &self.stat, self.datagrams)
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
    use crate::testing::private_mounts;

    struct Watched(SocketDirectory, Watch);

    impl Watched {
        /// Of which nothing is known yet.
        fn list(&self) -> Listing {
            self.list_again(HashMap::new())
        }

        fn list_again(&self, sockets: HashMap<SharedSocket, OsString>) -> Listing {
            self.0.look(&self.1, &Known { sockets, room: 2 }).unwrap()
        }
    }

    fn watched() -> (TempDir, Watched) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("services");
        fs::create_dir(&path).unwrap();
        let directory = SocketDirectory { path, share: dir.path().into(), place: "services".into() };
        (dir, Watched(directory, Watch::of_nothing().unwrap()))
    }

    fn names(listing: &Listing) -> Vec<&OsString> {
        listing.new.iter().map(|found| &found.name).collect()
    }

    fn known(listing: &Listing) -> HashMap<SharedSocket, OsString> {
        listing.new.iter().map(|found| (found.id, found.name.clone())).collect()
    }

    #[test]
    fn only_what_a_process_of_the_host_serves_in_the_directory_itself_is_found() {
        private_mounts();
        let (dir, watched) = watched();
        let at = |name: &str| dir.path().join("services").join(name);
        let _listener = UnixListener::bind(at("service")).unwrap();
        assert_eq!(names(&watched.list()), ["service"]);
        assert!(!watched.list().has_others);

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
        assert_eq!(watched.list().new.len(), 1);
        assert!(!watched.list().has_others);
        // And one that nobody serves, as a guest makes it.
        drop(UnixListener::bind(at("left")).unwrap());
        assert_eq!(watched.list().new.len(), 1);
        assert!(watched.list().has_others);
        let _log = UnixDatagram::bind(at("log")).unwrap();
        let listing = watched.list();
        let found: Vec<_> = listing.new.iter().map(|found| (found.name == "log", found.datagrams)).collect();
        assert!(found.len() == 2 && found.iter().all(|(is_log, datagrams)| is_log == datagrams), "{found:?}");
    }

    #[test]
    fn very_many_names_are_not_all_read() {
        let (dir, watched) = watched();
        let at = |name: usize| dir.path().join("services").join(name.to_string());
        (0..MOST_NAMES).for_each(|name| fs::write(at(name), "").unwrap());
        assert!(!watched.list().is_cut);
        fs::write(at(MOST_NAMES), "").unwrap();
        assert!(watched.list().is_cut);
    }

    #[test]
    fn a_known_socket_is_found_among_very_many_names() {
        private_mounts();
        let (dir, watched) = watched();
        // The names of a tmpfs are read from the last one that was made.
        let services = dir.path().join("services");
        mount(Some("t"), &services, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        let listener = UnixListener::bind(services.join("service")).unwrap();
        let before = known(&watched.list());
        assert_eq!(before.len(), 1);
        (0..2 * MOST_NAMES).for_each(|name| fs::write(services.join(name.to_string()), "").unwrap());
        assert!(watched.list().new.is_empty(), "it is among the first names");
        assert_eq!(watched.list_again(before.clone()).known, before);
        drop(listener);
        assert!(watched.list_again(before).known.is_empty());
    }

    #[test]
    fn a_socket_that_is_known_may_get_another_name() {
        let (dir, watched) = watched();
        let at = |name: &str| dir.path().join("services").join(name);
        let _listener = UnixListener::bind(at("service")).unwrap();
        let before = known(&watched.list());
        fs::rename(at("service"), at("renamed")).unwrap();
        let listing = watched.list_again(before.clone());
        assert!(listing.new.is_empty());
        assert_eq!(listing.known.into_values().collect::<Vec<_>>(), ["renamed"]);
        let _other = UnixListener::bind(at("service")).unwrap();
        let listing = watched.list_again(before);
        assert_eq!((names(&listing), listing.known.len()), (vec![&OsString::from("service")], 1));
    }

    #[test]
    fn no_more_sockets_are_found_than_are_wanted() {
        let (dir, watched) = watched();
        let bind = |name: &str| UnixListener::bind(dir.path().join("services").join(name)).unwrap();
        let _two = ["one", "other"].map(bind);
        assert!(!watched.list().has_more);
        let _third = bind("third");
        let listing = watched.list();
        assert_eq!((listing.new.len(), listing.has_more), (2, true));
    }

    #[test]
    fn a_service_that_a_mount_hides_is_not_found() {
        private_mounts();
        let (dir, watched) = watched();
        let at = |name: &str| dir.path().join("services").join(name);
        let _listeners = ["hidden", "seen"].map(|name| UnixListener::bind(at(name)).unwrap());
        let before = known(&watched.list());
        assert_eq!(before.len(), 2);
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        mount(Some(&file), &at("hidden"), None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        let listing = watched.list();
        assert_eq!((names(&listing), listing.failed.is_none()), (vec![&OsString::from("seen")], true));
        assert_eq!(watched.list_again(before).known.len(), 1);
    }

    #[test]
    fn who_chooses_the_name_of_a_socket_chooses_no_line_of_the_log() {
        let (dir, watched) = watched();
        let name = "a\u{1b}[2J\nb";
        let _listener = UnixListener::bind(dir.path().join("services").join(name)).unwrap();
        let found = watched.list().new.pop().unwrap();
        assert_eq!(found.name, name);
        assert_eq!(found.into_socket(1, Path::new("/run")).path, Path::new("/run/a [2J b"));
    }

    #[tokio::test]
    async fn the_socket_that_was_made_anew_is_another_one() {
        let (dir, watched) = watched();
        let mut changes = watched.1.changes().unwrap();
        assert!(watched.list().new.is_empty());
        let path = dir.path().join("services/service");
        let mut known = Vec::new();
        for _ in 0..3 {
            let _listener = UnixListener::bind(&path).unwrap();
            changes.next().await.unwrap();
            let mut listing = watched.list();
            let found = listing.new.pop().unwrap();
            assert!(!known.iter().any(|other: &Found| other.id == found.id), "the number was used again");
            known.push(found);
            fs::remove_file(&path).unwrap();
            changes.next().await.unwrap();
            assert!(watched.list().new.is_empty());
        }
    }

    #[test]
    fn services_have_no_sockets_in_file_systems_of_the_kernel() {
        for source in ["/dev", "/dev/snd", "/proc/1", "/sys/fs/cgroup"] {
            assert!(!may_have_sockets(Path::new(source)), "{source}");
        }
        for source in ["/", "/run/service", "/device"] {
            assert!(may_have_sockets(Path::new(source)), "{source}");
        }
    }
}
