//! The root directory of the jail: a mount namespace of its own that contains the served files and nothing else.
//!
//! | path in the jail | content |
//! |---|---|
//! | `/share0`, ... | the shares. If they are shared mounts on the host, its later mounts and unmounts propagate |
//! | `/vsock/NAME_PORT` | the host's sockets that the guest can connect to. The thread that does so sees nothing else |
//! | `/proc/self/fd` | the file server opens its own O_PATH descriptors again by this directory |

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use nix::{
    fcntl::{OFlag, open},
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::stat::Mode,
    unistd::{chdir, chroot, pivot_root},
};

use super::JailError;

/// The directory of the host's sockets in the jail.
const SOCKETS: &str = "vsock";
/// Flags of a mount on which device nodes cannot be opened and programs cannot be executed.
const NO_DEVICES_OR_PROGRAMS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

/// Whether this process has entered its root.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// A file or directory of the host that is bound into the jail.
struct Source {
    fd: OwnedFd,
    /// Path in the jail, relative to its root.
    target: PathBuf,
}

/// The files of the host that the jail contains, by their paths in it.
pub struct Root {
    /// In the order of the argument of [`Root::enter`].
    pub shares: Vec<PathBuf>,
    /// Path of the vsock socket for the thread that [`leave_all_but_sockets`] was called on. The sockets of the ports
    /// have this path with `_PORT` appended.
    pub vsock: PathBuf,
}

/// Makes the directory of the host's sockets the root directory of this thread. A socket in a share is no service of
/// the VM: the path of any directory of the host may have some, and this thread connects as root.
pub(super) fn leave_all_but_sockets() -> io::Result<()> {
    // A device that is tested without a VM has no jail.
    if !ENTERED.load(Ordering::Relaxed) {
        return Ok(());
    }
    // Threads share their root directory until they unshare it.
    unshare(CloneFlags::CLONE_FS)?;
    chroot(&Path::new("/").join(SOCKETS))?;
    Ok(chdir("/")?)
}

impl Root {
    /// Moves the process into a mount namespace that contains the directories `shares` and the host's sockets that are
    /// called `vsock` with a port appended. The process must have a single thread.
    pub fn enter(shares: &[&Path], vsock: &Path) -> Result<Self, JailError> {
        let failed = |what: &'static str| move |source: io::Error| JailError::Root { what, source };
        let lost = |source| JailError::Source { path: vsock.to_owned(), source };
        let (dir, name) = split(vsock).map_err(lost)?;
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC)
            .map_err(|error| failed("its namespaces")(error.into()))?;
        // Mounts of the host still propagate to this namespace. Mounts of this namespace do not propagate to the host.
        set_propagation(MsFlags::MS_SLAVE).map_err(failed("the propagation of its mounts"))?;

        let mut sources = Vec::new();
        for (index, share) in shares.iter().enumerate() {
            sources.push(Source::open(share, format!("share{index}").into())?);
        }
        let shares = sources.iter().map(|share| Path::new("/").join(&share.target)).collect();
        for port in ports(&dir, &name).map_err(lost)? {
            sources.push(Source::open(&dir.join(&port), Path::new(SOCKETS).join(&port))?);
        }
        sources.push(Source::open(Path::new("/proc/self/fd"), "proc/self/fd".into())?);
        build(&dir, &sources).map_err(failed("its root"))?;
        ENTERED.store(true, Ordering::Relaxed);
        Ok(Self { shares, vsock: Path::new("/").join(name) })
    }
}

impl Source {
    fn open(path: &Path, target: PathBuf) -> Result<Self, JailError> {
        match open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()) {
            Ok(fd) => Ok(Self { fd, target }),
            Err(error) => Err(JailError::Source { path: path.to_owned(), source: error.into() }),
        }
    }

    /// Binds the source, with all mounts below it, at its target below the working directory.
    fn bind(&self) -> io::Result<()> {
        let from = PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
        if let Some(parent) = self.target.parent() {
            fs::create_dir_all(parent)?;
        }
        if fs::metadata(&from)?.is_dir() {
            fs::create_dir(&self.target)?;
        } else {
            File::create(&self.target)?;
        }
        mount(Some(&from), &self.target, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)?;
        forbid_devices_and_programs(&self.target)
    }
}

/// Splits the path of a socket into its directory and its name.
fn split(path: &Path) -> io::Result<(PathBuf, OsString)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((dir.canonicalize()?, name.to_owned()))
}

/// The names in `dir` that consist of `name`, `_` and a port.
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

/// Makes a root directory with `sources`, mounted over `cover`, and changes the root of the process to it. The old
/// root is unmounted.
fn build(cover: &Path, sources: &[Source]) -> io::Result<()> {
    mount(Some("jail"), cover, Some("tmpfs"), NO_DEVICES_OR_PROGRAMS, Some("size=64k,mode=0700"))?;
    chdir(cover)?;
    fs::create_dir(SOCKETS)?;
    for source in sources {
        source.bind()?;
    }
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | NO_DEVICES_OR_PROGRAMS;
    mount(None::<&str>, ".", None::<&str>, read_only, None::<&str>)?;
    // This stacks the old root on top of the new one (pivot_root(2), NOTES), from where it is unmounted.
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    Ok(chdir("/")?)
}

fn set_propagation(kind: MsFlags) -> io::Result<()> {
    Ok(mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | kind, None::<&str>)?)
}

/// Sets nosuid, nodev and noexec on the mount at `target` and on all mounts below it.
#[allow(unsafe_code)]
fn forbid_devices_and_programs(target: &Path) -> io::Result<()> {
    let path = std::ffi::CString::new(target.as_os_str().as_encoded_bytes())?;
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: `path` and `attributes` live until the call returns. The call only reads them, and the size that it
    // gets is that of `attributes`. No safe function sets the flags of several mounts at once.
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

    /// A mount namespace with a directory that contains a share, which is a shared mount, a socket, and a secret.
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
            assert_eq!((root.shares, root.vsock), (vec!["/share0".into()], "/vsock.sock".into()));

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
    fn who_connects_to_sockets_sees_no_socket_of_a_share() {
        let body = || {
            let dir = host();
            let share = dir.path().join("share");
            let _service = UnixListener::bind(dir.path().join("vsock.sock_7")).unwrap();
            let _other = UnixListener::bind(share.join("other.sock")).unwrap();
            Root::enter(&[&share], &dir.path().join("vsock.sock")).unwrap();
            let tried = thread::spawn(|| {
                UnixStream::connect("/share0/other.sock").unwrap();
                leave_all_but_sockets().unwrap();
                UnixStream::connect("/vsock.sock_7").unwrap();
                ["/share0/other.sock", "../share0/other.sock", "/../share0/other.sock"]
                    .map(|path| UnixStream::connect(path).unwrap_err().kind())
            });
            assert_eq!(tried.join().unwrap(), [ErrorKind::NotFound; 3]);
            // The other threads see it all.
            assert_eq!(names("/"), ["proc", "share0", "vsock"]);
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
            // This thread stays in the mount namespace of the host.
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
