//! Passes datagrams of containers on to a service of the host, such as those to /dev/log. The service is told the user
//! and the group of the sender (SCM_CREDENTIALS of unix(7)), and the pid of the VMM, which is in the pod's cgroup. A
//! service that receives nothing makes the senders wait, as on the host. There is no way back: the service gets no
//! address to which it could send.

use std::{
    convert::Infallible,
    io::{self, ErrorKind, IoSlice},
    os::fd::AsRawFd,
    sync::Arc,
    time::Duration,
};

use bulkhead_agent_api::datagrams::Head;
use nix::{
    getsockopt_impl,
    libc::{self, ucred},
    sockopt_impl,
    sys::socket::{ControlMessage, MsgFlags, UnixAddr, UnixCredentials, getsockopt, sendmsg},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, Interest},
    net::UnixDatagram,
    time::timeout,
};

use super::host_sockets::{Clients, Connections};
use crate::host::host_socket::HostSocket;

/// Users who have a socket to send by, of one service. What the service has not received yet of one of them is limited
/// by the size of that socket's buffer (SO_SNDBUF).
const MOST_SENDERS: usize = 16;

/// How long an event of one socket is waited for until all are looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

sockopt_impl!(
    /// The memory of a socket, in the order of SK_MEMINFO_* (linux/sock_diag.h).
    MemoryInfo, GetOnly, libc::SOL_SOCKET, libc::SO_MEMINFO, [u32; 9]
);

/// Each datagram that was not received yet takes more, also an empty one. While the kernel tells that one was received,
/// one byte of it still counts.
const LEAST_SENT: u32 = 64;

/// Who sends: a user, a group, and the AppArmor profile.
type Sender = (u32, u32, Option<String>);

/// Sends datagrams to one service.
pub(super) struct Senders<'a> {
    socket: &'a Arc<HostSocket>,
    clients: &'a Clients,
    connections: &'a Connections,
    /// What the service is told.
    pid: u32,
    /// Who has sent nothing for the longest time comes first.
    connected: Vec<(Sender, UnixDatagram)>,
}

impl<'a> Senders<'a> {
    pub(super) fn new(
        socket: &'a Arc<HostSocket>,
        clients: &'a Clients,
        connections: &'a Connections,
        pid: u32,
    ) -> Self {
        Self { socket, clients, connections, pid, connected: Vec::new() }
    }

    /// Passes on what comes, until the stream ends (`UnexpectedEof`) or the service does (`ConnectionRefused`). Other
    /// errors are those of single datagrams, which are dropped and given to `log`.
    pub(super) async fn pass_all(
        mut self,
        mut stream: impl AsyncRead + Unpin,
        log: impl Fn(&io::Error),
    ) -> io::Result<Infallible> {
        loop {
            let head = Head::read(&mut stream).await?;
            let _room = self.connections.datagram(head.length).await?;
            let mut bytes = vec![0; head.length];
            stream.read_exact(&mut bytes).await?;
            match self.pass(head, &bytes).await {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Err(error),
                Err(error) => log(&error),
                Ok(()) => {}
            }
        }
    }

    /// Sends one when the service has room for it.
    async fn pass(&mut self, Head { uid, gid, .. }: Head, bytes: &[u8]) -> io::Result<()> {
        // Each time: another container may mount the directory now.
        let confinement = self.clients.confinement(uid, gid)?;
        confinement.check(uid, gid)?;
        let sender = (uid, gid, confinement.profile.clone());
        let place = self.connected.iter().position(|(other, _)| *other == sender);
        let last = match place.map(|place| self.connected.remove(place)) {
            Some(last) => last,
            None => {
                self.connections.pace().await;
                let connected = self.socket.sender(uid, gid, &confinement).await?;
                self.make_room().await?;
                (sender, connected)
            }
        };
        self.connected.push(last);
        let Some((_, connected)) = self.connected.last() else {
            return Err(ErrorKind::NotConnected.into());
        };
        let credentials = UnixCredentials::from(ucred { pid: self.pid.cast_signed(), uid, gid });
        let (parts, control) = ([IoSlice::new(bytes)], [ControlMessage::ScmCredentials(&credentials)]);
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let send = || Ok(sendmsg::<UnixAddr>(connected.as_raw_fd(), &parts, &control, flags, None)?);
        connected.async_io(Interest::WRITABLE, send).await.map(drop)
    }

    /// Closes the socket of somebody who has sent nothing for a long time, so that there is room for another. Only one
    /// of which the service has received everything: what is left would stay in the memory of the host's kernel, and
    /// not count for any socket that could become full. Until there is one, the guest waits.
    async fn make_room(&mut self) -> io::Result<()> {
        while self.connected.len() >= MOST_SENDERS {
            let idle = self.connected.iter().position(|(_, socket)| is_idle(socket));
            if let Some(place) = idle {
                self.connected.remove(place);
            } else if let Some((_, first)) = self.connected.first() {
                // A service receives in the order of sending, so this one is the first to become idle.
                let received = || if is_idle(first) { Ok(()) } else { Err(ErrorKind::WouldBlock.into()) };
                let waited = timeout(LOOK_AGAIN, first.async_io(Interest::WRITABLE, received)).await;
                waited.unwrap_or(Ok(()))?;
            }
        }
        Ok(())
    }
}

/// Whether the service has received everything that was sent by a socket.
fn is_idle(socket: &UnixDatagram) -> bool {
    // SK_MEMINFO_WMEM_ALLOC, which is what SIOCOUTQ answers (unix(7)).
    getsockopt(socket, MemoryInfo).is_ok_and(|[_, _, sent, ..]| sent < LEAST_SENT)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        io::IoSliceMut,
        os::unix::fs::{PermissionsExt, chown},
        path::Path,
        sync::Mutex,
        thread,
    };

    use bulkhead_agent_api::datagrams::MAX_DATAGRAM;
    use nix::{
        sched::{CloneFlags, unshare},
        sys::socket::{ControlMessageOwned, recvmsg, setsockopt, sockopt::PassCred},
    };
    use tokio::{
        io::{AsyncWriteExt, DuplexStream, duplex},
        task::JoinHandle,
        time::{Instant, timeout},
    };

    use super::{
        super::host_sockets::{BYTES_OF_ONE, DATAGRAMS_WINDOW, MOST_DATAGRAMS},
        *,
    };
    use crate::{
        host::{
            host_socket::{Confinement, Source, look},
            no_symlinks,
        },
        types::{id_mappings::IdMappings, lock::lock},
    };

    const WAIT: Duration = Duration::from_secs(20);
    /// More than the stream of a guest has room for.
    const LONG: &[u8] = &[7; 1000];

    /// What passes datagrams on to the service at a path, the guest's end of its stream, and what was dropped.
    struct Passing {
        guest: DuplexStream,
        ends: JoinHandle<io::Error>,
        dropped: Arc<Mutex<Vec<ErrorKind>>>,
    }

    impl Passing {
        fn to(path: &Path, confinement: Confinement) -> Self {
            Self::among(&Connections::default(), path, confinement)
        }

        /// As one of several of a pod.
        fn among(connections: &Connections, path: &Path, confinement: Confinement) -> Self {
            let Source::Socket(socket) = look(0, path, no_symlinks::open(path).unwrap()).unwrap() else {
                panic!("no socket")
            };
            let clients = Clients::Container { id: "demo".into(), confinement: Arc::new(confinement) };
            let (guest, stream) = duplex(64);
            let dropped = Arc::<Mutex<Vec<ErrorKind>>>::default();
            let (log, connections) = (Arc::clone(&dropped), connections.clone());
            let ends = tokio::spawn(async move {
                let socket = Arc::new(socket);
                let senders = Senders::new(&socket, &clients, &connections, std::process::id());
                let ended = senders.pass_all(stream, |error| lock(&log).push(error.kind())).await;
                match ended {
                    Err(error) => error,
                }
            });
            Self { guest, ends, dropped }
        }

        async fn send(&mut self, from: (u32, u32), bytes: &[u8]) {
            timeout(WAIT, Head::write(&mut self.guest, from, bytes)).await.unwrap().unwrap();
        }

        async fn end(self) -> ErrorKind {
            timeout(WAIT, self.ends).await.unwrap().unwrap().kind()
        }
    }

    /// Receives one, with what the service is told of its sender.
    async fn receive(service: &UnixDatagram) -> (Vec<u8>, (u32, u32, u32)) {
        let receive = || {
            let mut bytes = vec![0; MAX_DATAGRAM];
            let mut space = nix::cmsg_space!(UnixCredentials);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_DONTWAIT;
            let received = recvmsg::<UnixAddr>(service.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
            let Some(ControlMessageOwned::ScmCredentials(who)) = received.cmsgs()?.next() else {
                panic!("nobody has sent it")
            };
            let length = received.bytes;
            bytes.truncate(length);
            Ok((bytes, (who.pid().cast_unsigned(), who.uid(), who.gid())))
        };
        timeout(WAIT, service.async_io(Interest::READABLE, receive)).await.unwrap().unwrap()
    }

    fn service(path: &Path) -> UnixDatagram {
        let service = UnixDatagram::bind(path).unwrap();
        setsockopt(&service, PassCred, &true).unwrap();
        service
    }

    #[tokio::test]
    async fn the_service_is_told_who_sends_and_a_refused_sender_costs_nobody_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let service = service(&path);
        chown(&path, Some(1234), Some(5678)).unwrap();
        let ids = IdMappings::take(0, &mut vec!["uidmap=0:0:5000".into(), "gidmap=0:0:9000".into()]).unwrap();
        let mut passing = Passing::to(&path, Confinement { profile: None, ids });
        passing.send((1234, 77), b"first").await;
        // The first may not write to the socket, and nobody of the container can be the second.
        passing.send((99, 99), b"lost").await;
        passing.send((5001, 77), b"lost").await;
        passing.send((0, 0), b"").await;
        let longest = vec![7; MAX_DATAGRAM];
        passing.send((1234, 78), &longest).await;
        let pid = std::process::id();
        assert_eq!(receive(&service).await, (b"first".to_vec(), (pid, 1234, 77)));
        assert_eq!(receive(&service).await, (Vec::new(), (pid, 0, 0)));
        assert!(receive(&service).await == (longest, (pid, 1234, 78)));
        assert_eq!(*lock(&passing.dropped), [ErrorKind::PermissionDenied; 2]);
        drop(service);
        passing.send((1234, 77), b"late").await;
        assert_eq!(passing.end().await, ErrorKind::ConnectionRefused);
    }

    #[tokio::test]
    async fn a_service_that_receives_nothing_makes_the_guest_wait_and_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let service = service(&path);
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let mut passing = Passing::to(&path, Confinement::default());
        let mut sent = 0_u32;
        // More users than have a socket at one time.
        while let Ok(written) = timeout(
            Duration::from_millis(300),
            Head::write(&mut passing.guest, (sent % 40, 0), &sent.to_be_bytes()),
        )
        .await
        {
            written.unwrap();
            sent += 1;
            assert!(sent < 10_000, "the queue of the service has no limit");
        }
        for number in 0..sent {
            let (bytes, (_, uid, _)) = receive(&service).await;
            assert_eq!((bytes, uid), (number.to_be_bytes().to_vec(), number % 40));
        }
        assert!(lock(&passing.dropped).is_empty());
    }

    /// A service with as long a queue as systemd's default, which others have only after it has started.
    fn patient_service(path: &Path) -> UnixDatagram {
        let path = path.to_owned();
        let bind = move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("this test makes a network namespace: run it as root");
            fs::write("/proc/sys/net/unix/max_dgram_qlen", "512").unwrap();
            let service = std::os::unix::net::UnixDatagram::bind(path).unwrap();
            service.set_nonblocking(true).unwrap();
            service
        };
        let service = UnixDatagram::from_std(thread::spawn(bind).join().unwrap()).unwrap();
        setsockopt(&service, PassCred, &true).unwrap();
        service
    }

    /// A service that has received nothing of what a guest has sent as many users, until the guest had to wait.
    async fn stalled(connections: &Connections, dir: &Path) -> (UnixDatagram, Passing) {
        let path = dir.join("stalled");
        let service = patient_service(&path);
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let mut passing = Passing::among(connections, &path, Confinement::default());
        // The last of these waits in the shim.
        for uid in 0..=MOST_SENDERS as u32 {
            passing.send((uid, 0), LONG).await;
        }
        let another = Head::write(&mut passing.guest, (MOST_SENDERS as u32 + 1, 0), LONG);
        assert!(timeout(Duration::from_secs(1), another).await.is_err(), "another user has a socket");
        (service, passing)
    }

    #[tokio::test]
    async fn a_service_that_receives_nothing_keeps_datagrams_of_a_few_users_only() {
        let (dir, connections) = (tempfile::tempdir().unwrap(), Connections::default());
        let (stalled, _passing) = stalled(&connections, dir.path()).await;
        let path = dir.path().join("other");
        let service = service(&path);
        let mut other = Passing::among(&connections, &path, Confinement::default());
        for _ in 0..2 {
            other.send((0, 0), b"another service does not wait").await;
            receive(&service).await;
        }
        let kept = std::iter::from_fn(|| stalled.try_recv(&mut [0]).ok()).count();
        assert_eq!(kept, MOST_SENDERS);
        // The guest goes on when the service does.
        let (bytes, (_, uid, _)) = receive(&stalled).await;
        assert_eq!((&bytes[..], uid), (LONG, MOST_SENDERS as u32));
    }

    #[tokio::test]
    async fn a_guest_that_waits_for_a_service_is_told_when_that_ends() {
        let dir = tempfile::tempdir().unwrap();
        let (service, passing) = stalled(&Connections::default(), dir.path()).await;
        drop(service);
        assert_eq!(passing.end().await, ErrorKind::ConnectionRefused);
    }

    #[tokio::test(start_paused = true)]
    async fn datagrams_pass_at_a_bounded_rate_and_those_that_are_refused_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let _service = service(&path);
        let mut passing = Passing::to(&path, Confinement::default());
        let begun = Instant::now();
        for _ in 0..3 * MOST_DATAGRAMS {
            passing.send((u32::MAX, 0), b"").await;
        }
        // Each of these counts twice.
        for _ in 0..MOST_DATAGRAMS / 2 {
            passing.send((u32::MAX, 0), &[0; BYTES_OF_ONE]).await;
        }
        drop(passing.guest.shutdown().await);
        passing.ends.await.unwrap();
        assert_eq!(begun.elapsed().as_millis() / DATAGRAMS_WINDOW.as_millis(), 3);
    }

    #[tokio::test]
    async fn a_guest_that_breaks_the_rules_sends_nothing_more() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let _service = service(&path);
        let mut passing = Passing::to(&path, Confinement::default());
        passing.guest.write_all(&[[0; 4], [0; 4], [0xff; 4]].concat()).await.unwrap();
        assert_eq!(passing.end().await, ErrorKind::InvalidData);
        let mut passing = Passing::to(&path, Confinement::default());
        passing.guest.write_all(&[[0; 4], [0; 4], [0, 0, 0, 9]].concat()).await.unwrap();
        passing.guest.write_all(b"short").await.unwrap();
        passing.guest.shutdown().await.unwrap();
        assert_eq!(passing.end().await, ErrorKind::UnexpectedEof);
    }
}
