//! A socket of a service of the host that a container mounts (`-v /var/run/docker.sock:/var/run/docker.sock`).
//!
//! A bind mount names an inode, and so does this: it is opened when the container is created. Whatever its path leads
//! to later, connections go to the socket that was there then, as with runc.

use std::{
    fs::File,
    io::{self, ErrorKind, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixDatagram,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};
use rustix::{
    fs::{FileType, Stat, fstat},
    process::{Gid, Uid},
    thread::{
        CapabilitySet, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
        set_thread_res_uid,
    },
};
use tokio::{
    net::{UnixDatagram as Sender, UnixStream},
    time::{Instant, sleep, timeout_at},
};

use crate::{
    host::{blocking, no_symlinks},
    types::id_mappings::IdMappings,
};

/// How long a service may take to accept a connection when others wait for that too.
const CONNECT: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 10 });

/// How long to wait until the next attempt, at first and at last. Each attempt takes a thread for a moment.
const AGAIN: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// An id that stands for none (setresuid(2)).
const NO_ID: u32 = u32::MAX;

/// Where a thread changes its AppArmor profile (kernel, Documentation/security/lsm.rst). The second is the one of
/// kernels before 5.8.
const PROFILE: [&str; 2] = ["/proc/thread-self/attr/apparmor/current", "/proc/thread-self/attr/current"];

/// The socket of a service.
#[derive(Debug)]
pub(crate) struct HostSocket {
    /// The index of its mount in the spec, or the number of a socket in a directory.
    pub(crate) index: usize,
    /// Where it was, for messages.
    pub(crate) path: PathBuf,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Its type is SOCK_DGRAM. Otherwise it is SOCK_STREAM, or one that cannot be forwarded.
    pub(crate) datagrams: bool,
    inode: OwnedFd,
}

/// What decides on the host, too, to which services a container may connect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Confinement {
    /// Its AppArmor profile, which the service is told of (SO_PEERSEC).
    pub(crate) profile: Option<String>,
    /// The ids of its user namespace. None: it has none of its own, so its root is the host's.
    pub(crate) ids: Option<IdMappings>,
}

impl Confinement {
    /// Whether a process of the container may have this user and this group.
    pub(crate) fn allows(&self, uid: u32, gid: u32) -> bool {
        self.ids.as_ref().is_none_or(|ids| ids.have(uid, gid))
    }

    /// Refuses a user or a group that no process of the container can have.
    pub(crate) fn check(&self, uid: u32, gid: u32) -> io::Result<()> {
        if !self.allows(uid, gid) {
            let reason =
                format!("the guest names user {uid} and group {gid}, which the container does not have");
            return Err(io::Error::new(ErrorKind::PermissionDenied, reason));
        }
        if uid == NO_ID || gid == NO_ID {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the guest names no user or group"));
        }
        Ok(())
    }
}

/// What the source of a bind mount is.
#[derive(Debug)]
pub(crate) enum Source {
    Socket(HostSocket),
    /// Something else.
    Other(OwnedFd),
}

/// Looks at the source of the mount of this index, which was opened by its path. A service does not notice that.
pub(crate) fn look(index: usize, path: &Path, inode: OwnedFd) -> io::Result<Source> {
    let stat = fstat(&inode)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Ok(Source::Other(inode));
    }
    // If this fails, the socket may still work. If not, the client's connection fails.
    let datagrams = matches!(bound_to(&inode), Ok(Bound::Datagrams));
    Ok(Source::Socket(HostSocket::of(index, path, inode, &stat, datagrams)))
}

/// What kind of socket a process has bound to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bound {
    Datagrams,
    /// Or packets (SOCK_SEQPACKET).
    Streams,
    Nothing,
}

/// Finds that out by connecting a datagram socket: the kernel refuses to connect sockets of different types. A service
/// of streams does not notice it.
pub(crate) fn bound_to(inode: &OwnedFd) -> io::Result<Bound> {
    let Err(error) = UnixDatagram::unbound()?.connect(no_symlinks::proc_path(inode)) else {
        return Ok(Bound::Datagrams);
    };
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EPROTOTYPE) => Ok(Bound::Streams),
        Some(Errno::ECONNREFUSED) => Ok(Bound::Nothing),
        // A datagram socket that is connected to another one.
        Some(Errno::EPERM) => Ok(Bound::Datagrams),
        _ => Err(error),
    }
}

impl HostSocket {
    /// The socket of this number, whose inode has these attributes.
    pub(crate) fn of(index: usize, path: &Path, inode: OwnedFd, stat: &Stat, datagrams: bool) -> Self {
        let mode = stat.st_mode & 0o7777;
        let (uid, gid) = (stat.st_uid, stat.st_gid);
        Self { index, path: path.into(), mode, uid, gid, datagrams, inode }
    }

    /// Connects a container to the service as this user and group, which the service is told of (SO_PEERCRED of
    /// unix(7)), and which must be allowed to write to the socket.
    pub(crate) async fn connect(
        &self,
        uid: u32,
        gid: u32,
        confinement: &Confinement,
    ) -> io::Result<UnixStream> {
        UnixStream::from_std(self.connected(SockType::Stream, uid, gid, confinement).await?.into())
    }

    /// A socket by which datagrams go to the service, if this user and this group may write to its socket. Who sends is
    /// said with each datagram.
    pub(crate) async fn sender(&self, uid: u32, gid: u32, confinement: &Confinement) -> io::Result<Sender> {
        Sender::from_std(self.connected(SockType::Datagram, uid, gid, confinement).await?.into())
    }

    async fn connected(
        &self,
        kind: SockType,
        uid: u32,
        gid: u32,
        confinement: &Confinement,
    ) -> io::Result<OwnedFd> {
        confinement.check(uid, gid)?;
        let deadline = Instant::now() + CONNECT;
        let mut pause = AGAIN;
        loop {
            let (inode, profile) = (self.inode.try_clone()?, confinement.profile.clone());
            // A thread of its own, since it stays that user, with that profile.
            let connected =
                blocking::run(move || connect_as(&inode, kind, uid, gid, profile.as_deref()), drop);
            let connected = timeout_at(deadline, connected).await?.map_err(io::Error::other)?;
            match connected {
                // As many wait as the service lets wait. No event tells when one is accepted.
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() + pause < deadline => {
                    sleep(pause).await;
                    pause = (2 * pause).min(LONGEST_PAUSE);
                }
                other => return other,
            }
        }
    }
}

/// Connects on a thread that ends afterwards.
fn connect_as(
    inode: &OwnedFd,
    kind: SockType,
    uid: u32,
    gid: u32,
    profile: Option<&str>,
) -> io::Result<OwnedFd> {
    let address = UnixAddr::new(&no_symlinks::proc_path(inode))?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_groups(&[])?;
    // The effective ids decide, and are what the service is told. The others stay root's: a process of this user must
    // not be able to signal or trace the shim.
    set_thread_res_gid(None, gid, None)?;
    set_thread_res_uid(None, uid, None)?;
    if let Some(profile) = profile {
        confine(profile).map_err(|error| {
            let reason = format!("cannot connect with the container's AppArmor profile {profile:?}: {error}");
            io::Error::new(error.kind(), reason)
        })?;
    }
    // The socket has the label of the thread that makes it.
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let client = socket(AddressFamily::Unix, kind, flags, None)?;
    match connect(client.as_raw_fd(), &address) {
        Err(Errno::EPROTOTYPE) => {
            let reason =
                "it is no socket of streams or datagrams, and others (SOCK_SEQPACKET) cannot be forwarded";
            Err(io::Error::new(ErrorKind::Unsupported, reason))
        }
        other => Ok(other.map(|()| client)?),
    }
}

/// Changes the AppArmor profile of this thread. The change of the user comes first: a profile may not allow it.
fn confine(profile: &str) -> io::Result<()> {
    let before = capabilities(None)?;
    // Ubuntu's kernel gives an unconfined thread without this capability a stack of both labels
    // (apparmor_restrict_unprivileged_unconfined). A shim that does not have it gets what the kernel gives.
    let mut able = before;
    able.effective |= before.permitted & CapabilitySet::MAC_OVERRIDE;
    set_capabilities(None, able)?;
    let mut changed = Err(ErrorKind::NotFound.into());
    for place in PROFILE {
        changed = File::options().write(true).open(place);
        if !matches!(&changed, Err(error) if error.kind() == ErrorKind::NotFound) {
            break;
        }
    }
    // The kernel takes each write for a whole command.
    changed?.write_all(format!("changeprofile {profile}").as_bytes())?;
    Ok(set_capabilities(None, before)?)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{
            fs::{PermissionsExt, chown},
            net::UnixListener,
        },
    };

    use tokio::io::AsyncReadExt;

    use super::*;

    fn look_at(path: &Path) -> Source {
        look(3, path, no_symlinks::open(path).unwrap()).unwrap()
    }

    fn found(path: &Path) -> HostSocket {
        match look_at(path) {
            Source::Socket(socket) => socket,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn the_service_is_reached_by_its_inode_as_the_user_who_may_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service");
        let listener = UnixListener::bind(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).unwrap();
        chown(&path, Some(1234), Some(5678)).unwrap();
        let socket = found(&path);
        assert_eq!((socket.index, socket.mode, socket.uid, socket.gid), (3, 0o620, 1234, 5678));

        // Somebody puts another service in its place, to which nobody shall be led.
        fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        other.set_nonblocking(true).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::UnixListener::from_std(listener).unwrap();
        let free = Confinement::default();
        for (uid, gid) in [(1234, 77), (77, 5678), (0, 0)] {
            let _client = socket.connect(uid, gid, &free).await.unwrap();
            let (mut server, _) = listener.accept().await.unwrap();
            let cred = server.peer_cred().unwrap();
            assert_eq!((cred.uid(), cred.gid()), (uid, gid));
            drop(_client);
            assert_eq!(server.read(&mut [0]).await.unwrap(), 0);
        }
        for (uid, gid) in [(77, 77), (77, 0), (5678, 1234)] {
            let error = socket.connect(uid, gid, &free).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        }
        // Root of the host may write to it, but nobody of a user namespace is that root.
        let ids = IdMappings::take(0, &mut vec!["uidmap=0:1000:500".into(), "gidmap=0:0:9".into()]).unwrap();
        let mapped = Confinement { profile: None, ids };
        let error = socket.connect(0, 0, &mapped).await.unwrap_err().to_string();
        assert!(error.contains("user 0 and group 0"), "{error}");
        socket.connect(1234, 0, &mapped).await.unwrap();
        listener.accept().await.unwrap();
        for (uid, gid) in [(NO_ID, 0), (0, NO_ID)] {
            assert_eq!(socket.connect(uid, gid, &free).await.unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        drop(listener);
        assert_eq!(socket.connect(0, 0, &free).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(other.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(rustix::process::geteuid().is_root(), "this thread stays root");
    }

    #[tokio::test]
    async fn datagrams_are_sent_by_who_may_write_to_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let service = UnixDatagram::bind(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).unwrap();
        chown(&path, Some(1234), Some(5678)).unwrap();
        let socket = found(&path);
        let free = Confinement::default();
        socket.sender(1234, 77, &free).await.unwrap().send(b"text").await.unwrap();
        assert_eq!(service.recv(&mut [0; 100]).unwrap(), 4);
        let error = socket.sender(77, 77, &free).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        let ids = IdMappings::take(0, &mut vec!["uidmap=0:1000:500".into(), "gidmap=0:0:9".into()]).unwrap();
        let mapped = Confinement { profile: None, ids };
        let error = socket.sender(0, 0, &mapped).await.unwrap_err().to_string();
        assert!(error.contains("user 0 and group 0"), "{error}");
        drop(service);
        let refused = socket.sender(0, 0, &free).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }

    /// On a host without AppArmor, and on one without this profile.
    #[tokio::test]
    async fn who_cannot_be_confined_does_not_reach_the_service() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let socket = found(&path);
        let confined = Confinement { profile: Some("bulkhead-no-such-profile".into()), ids: None };
        let error = socket.connect(0, 0, &confined).await.unwrap_err().to_string();
        assert!(error.contains("AppArmor profile \"bulkhead-no-such-profile\": "), "{error}");
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        socket.connect(0, 0, &Confinement::default()).await.unwrap();
    }

    #[test]
    fn what_is_no_socket_of_a_service_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let _socket = UnixDatagram::bind(at("datagrams")).unwrap();
        assert!(found(&at("datagrams")).datagrams);
        fs::write(at("file"), "").unwrap();
        for other in ["file", ""] {
            assert!(matches!(look_at(&at(other)), Source::Other(_)), "{other}");
        }
        // Nobody listens any more. A mount is possible with runc too.
        drop(UnixListener::bind(at("left")).unwrap());
        assert!(!found(&at("left")).datagrams);
    }

    #[tokio::test]
    async fn a_service_of_packets_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service");
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        nix::sys::socket::bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
        let error = found(&path).connect(0, 0, &Confinement::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("(SOCK_SEQPACKET) cannot be forwarded"), "{error}");
        assert_eq!(nix::sys::socket::accept(listener.as_raw_fd()), Err(Errno::EAGAIN));
    }

    #[tokio::test]
    async fn a_service_that_accepts_nobody_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service");
        let address = UnixAddr::new(&path).unwrap();
        let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        nix::sys::socket::bind(listener.as_raw_fd(), &address).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
        let service = found(&path);
        let free = Confinement::default();
        let _first = service.connect(0, 0, &free).await.unwrap();
        let given_up = service.connect(0, 0, &free).await.unwrap_err().kind();
        assert!(matches!(given_up, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{given_up}");
    }
}
