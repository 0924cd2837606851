//! The files that the process can name: a mount namespace of its own, whose root holds what it serves and nothing else.
//!
//! | in the jail | is |
//! |---|---|
//! | `/share0`, ... | the shares. What is later mounted below one of them on the host, if it is a shared mount there, is mounted here too, and unmounted |
//! | `/vsock/NAME_PORT` | the host's sockets that the guest can connect to |
//! | `/proc/self/fd` | what the file server reaches its own open files by |

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{OFlag, open},
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::stat::Mode,
    unistd::{chdir, pivot_root},
};

use super::JailError;

/// Where the sockets of the host are in the jail.
const SOCKETS: &str = "vsock";
/// What opens nothing that is not a file or a directory, and executes nothing.
const HARMLESS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

/// A file or directory of the host that is to be in the jail.
struct Source {
    fd: OwnedFd,
    /// From the jail's root.
    place: PathBuf,
}

/// What is left of the host's files, by their paths in the jail.
pub struct Root {
    /// In the order in which they were given.
    pub shares: Vec<PathBuf>,
    /// Of the vsock socket, to which `_PORT` is added.
    pub vsock: PathBuf,
}

impl Root {
    /// Moves the process, which has but this thread, into its jail, with the directories `shares` and the sockets of the
    /// host that are called `vsock` and a port.
    pub fn enter(shares: &[&Path], vsock: &Path) -> Result<Self, JailError> {
        let failed = |what: &'static str| move |source: io::Error| JailError::Root { what, source };
        let lost = |source| JailError::Source { path: vsock.to_owned(), source };
        let (dir, name) = split(vsock).map_err(lost)?;
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC)
            .map_err(|error| failed("its namespaces")(error.into()))?;
        // What is mounted on the host still arrives; what is mounted here stays here.
        set_propagation(MsFlags::MS_SLAVE).map_err(failed("the propagation of its mounts"))?;

        let mut sources = Vec::new();
        for (index, share) in shares.iter().enumerate() {
            sources.push(Source::open(share, format!("share{index}").into())?);
        }
        let shares = sources.iter().map(|share| Path::new("/").join(&share.place)).collect();
        for port in ports(&dir, &name).map_err(lost)? {
            sources.push(Source::open(&dir.join(&port), Path::new(SOCKETS).join(&port))?);
        }
        sources.push(Source::open(Path::new("/proc/self/fd"), "proc/self/fd".into())?);
        build(&dir, &sources).map_err(failed("its root"))?;
        Ok(Self { shares, vsock: Path::new("/").join(SOCKETS).join(name) })
    }
}

impl Source {
    fn open(path: &Path, place: PathBuf) -> Result<Self, JailError> {
        match open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()) {
            Ok(fd) => Ok(Self { fd, place }),
            Err(error) => Err(JailError::Source { path: path.to_owned(), source: error.into() }),
        }
    }

    /// Binds it at its place below the working directory, with all that is mounted on it.
    fn bind(&self) -> io::Result<()> {
        let from = PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
        if let Some(parent) = self.place.parent() {
            fs::create_dir_all(parent)?;
        }
        if fs::metadata(&from)?.is_dir() {
            fs::create_dir(&self.place)?;
        } else {
            File::create(&self.place)?;
        }
        mount(Some(&from), &self.place, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)?;
        make_harmless(&self.place)
    }
}

/// The directory of the socket at `path`, and its name there.
fn split(path: &Path) -> io::Result<(PathBuf, OsString)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((dir.canonicalize()?, name.to_owned()))
}

/// The names in `dir` that are `name`, `_` and a port.
fn ports(dir: &Path, name: &OsString) -> io::Result<Vec<OsString>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?.file_name();
        let port = entry.as_encoded_bytes().strip_prefix(name.as_encoded_bytes());
        let port = port.and_then(|rest| rest.strip_prefix(b"_"));
        if port.is_some_and(|port| !port.is_empty() && port.iter().all(u8::is_ascii_digit)) {
            found.push(entry);
        }
    }
    Ok(found)
}

/// Makes a root of `sources`, over `cover`, moves into it, and lets go of all else.
fn build(cover: &Path, sources: &[Source]) -> io::Result<()> {
    mount(Some("jail"), cover, Some("tmpfs"), HARMLESS, Some("size=64k,mode=0700"))?;
    chdir(cover)?;
    for source in sources {
        source.bind()?;
    }
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | HARMLESS;
    mount(None::<&str>, ".", None::<&str>, read_only, None::<&str>)?;
    // The old root is put over the new one, and taken away.
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    Ok(chdir("/")?)
}

fn set_propagation(kind: MsFlags) -> io::Result<()> {
    Ok(mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | kind, None::<&str>)?)
}

/// Sets [`HARMLESS`] for what is mounted at `place` and on it.
#[allow(unsafe_code)]
fn make_harmless(place: &Path) -> io::Result<()> {
    let path = std::ffi::CString::new(place.as_os_str().as_encoded_bytes())?;
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the path and the attributes live until the call returns, which only reads them, and the size is theirs.
    // Nothing safe sets the flags of several mounts at once.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::{
        io::ErrorKind,
        os::unix::net::{UnixListener, UnixStream},
        sync::mpsc::channel,
        thread,
    };

    use nix::sys::stat::{SFlag, makedev, mknod};

    use super::*;
    use crate::jail::testing::{End, drill};

    /// In mounts of its own: a directory with a share that is a shared mount, a socket of the host, and a secret.
    fn host() -> tempfile::TempDir {
        unshare(CloneFlags::CLONE_NEWNS).expect("this test takes root");
        set_propagation(MsFlags::MS_PRIVATE).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let share = dir.path().join("share");
        fs::create_dir(&share).unwrap();
        mount(Some(&share), &share, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        mount(None::<&str>, &share, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        fs::create_dir(share.join("dir")).unwrap();
        fs::write(share.join("file"), "shared").unwrap();
        fs::write(dir.path().join("secret"), "").unwrap();
        fs::write(dir.path().join("vsock.sock_secret"), "").unwrap();
        dir
    }

    fn names(dir: &str) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn nothing_is_seen_but_what_is_served() {
        let body = || {
            let dir = host();
            let _listener = UnixListener::bind(dir.path().join("vsock.sock_7")).unwrap();
            let secret = dir.path().join("secret");
            let root = Root::enter(&[&dir.path().join("share")], &dir.path().join("vsock.sock")).unwrap();
            assert_eq!((root.shares, root.vsock), (vec!["/share0".into()], "/vsock/vsock.sock".into()));

            assert_eq!(names("/"), ["proc", "share0", "vsock"]);
            assert_eq!(names("/vsock"), ["vsock.sock_7"]);
            assert_eq!((names("/proc"), names("/proc/self")), (vec!["self".into()], vec!["fd".into()]));
            assert_eq!(names("/proc/self/fd/.."), ["fd"]);
            assert_eq!(names("/share0/../.."), ["proc", "share0", "vsock"]);
            assert_eq!(fs::read_to_string("/share0/file").unwrap(), "shared");
            UnixStream::connect("/vsock/vsock.sock_7").unwrap();

            assert_eq!(File::open(&secret).unwrap_err().kind(), ErrorKind::NotFound);
            assert_eq!(File::create("/new").unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
            let zero = makedev(1, 5);
            mknod("/share0/zero", SFlag::S_IFCHR, Mode::S_IRUSR, zero).unwrap();
            assert_eq!(File::open("/share0/zero").unwrap_err().kind(), ErrorKind::PermissionDenied);
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn what_the_host_mounts_later_comes_and_goes() {
        let body = || {
            let dir = host();
            let place = dir.path().join("share/dir");
            let (ask, asked) = channel::<()>();
            let (say, done) = channel();
            // Stays on the host, as its thread does.
            let host = thread::spawn(move || {
                asked.recv().unwrap();
                mount(Some("t"), &place, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
                fs::write(place.join("late"), "").unwrap();
                say.send(()).unwrap();
                asked.recv().unwrap();
                umount2(&place, MntFlags::empty()).unwrap();
                say.send(()).unwrap();
            });
            Root::enter(&[&dir.path().join("share")], &dir.path().join("vsock.sock")).unwrap();
            assert!(names("/share0/dir").is_empty());
            for expected in [&["late"][..], &[]] {
                ask.send(()).unwrap();
                done.recv().unwrap();
                assert_eq!(names("/share0/dir"), expected);
            }
            host.join().unwrap();
        };
        drill(body, End::succeeds);
    }
}
