//! Connections from the host to the loopback interface of a container.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::BorrowedFd,
    time::Duration,
};

use bulkhead_agent_api::relay;
use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{setsockopt, sockopt},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpSocket, TcpStream},
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

use super::NetworkError;

/// The connections of all containers at one time. Each has two buffers of 8 KiB.
pub const MAX_CONNECTIONS: usize = 128;

/// How long a connection waits for the end of another one, of which the shim may know a little earlier.
const ROOM: Duration = Duration::from_secs(3);

/// How long a port may take to accept a connection, at each of two addresses.
const CONNECT: Duration = Duration::from_secs(3);

/// How long a program may take no byte of those that were sent to it. After that time Linux gives up a TCP connection
/// whose other end is gone (tcp(7), tcp_retries2). The client of a program that hangs may be gone too, and nobody would
/// end the connection.
const STALLED: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 900 });

static CONNECTIONS: Semaphore = Semaphore::const_new(MAX_CONNECTIONS);

/// A port of a loopback interface.
#[derive(Debug, Clone, Copy)]
pub struct Port {
    /// The TCP port.
    pub number: u16,
    /// Whether ::1 is tried before 127.0.0.1.
    pub ipv6_first: bool,
}

/// The right to have one connection. Fails if there are [`MAX_CONNECTIONS`] for a time.
pub async fn permit() -> Result<SemaphorePermit<'static>, NetworkError> {
    match timeout(ROOM, CONNECTIONS.acquire()).await {
        Ok(Ok(permit)) => Ok(permit),
        // It is never closed.
        Ok(Err(_)) | Err(_) => Err(NetworkError::TooManyConnections),
    }
}

/// A socket for each address of a loopback interface. A socket belongs to the namespace in which it was made.
pub struct Sockets {
    ipv4: TcpSocket,
    ipv6: TcpSocket,
}

impl Sockets {
    /// Sockets in the network namespace of the process `pidfd`. Leaves this thread in that namespace.
    pub fn inside(pidfd: BorrowedFd<'_>) -> Result<Self, NetworkError> {
        setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(|errno| NetworkError::Namespace(errno.into()))?;
        Self::new().map_err(NetworkError::Namespace)
    }

    fn new() -> io::Result<Self> {
        Ok(Self { ipv4: TcpSocket::new_v4()?, ipv6: TcpSocket::new_v6()? })
    }

    /// Connects to a port.
    pub async fn connect(self, port: Port) -> Result<TcpStream, NetworkError> {
        let Port { number, ipv6_first } = port;
        let mut addresses = [
            (self.ipv4, SocketAddr::from((Ipv4Addr::LOCALHOST, number))),
            (self.ipv6, SocketAddr::from((Ipv6Addr::LOCALHOST, number))),
        ];
        if ipv6_first {
            addresses.reverse();
        }
        let [first, second] = addresses;
        let connected = match connect(first).await {
            Ok(connected) => Ok(connected),
            // The error of the address that the client asked for says more.
            Err(error) => connect(second).await.map_err(|_| error),
        };
        connected.map_err(|source| NetworkError::Loopback { port: number, source })
    }
}

async fn connect((socket, address): (TcpSocket, SocketAddr)) -> io::Result<TcpStream> {
    let connected = timeout(CONNECT, socket.connect(address)).await??;
    // The sender has already decided how to split its data.
    connected.set_nodelay(true)?;
    setsockopt(&connected, sockopt::TcpUserTimeout, &(STALLED.as_millis() as u32))?;
    Ok(connected)
}

/// Copies between the stream and the port, as [`relay::relay`] does.
pub async fn forward(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    connected: TcpStream,
    permit: SemaphorePermit<'static>,
) -> io::Result<()> {
    let copied = relay::relay(stream, connected).await;
    drop(permit);
    copied
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn connect_here(port: Port) -> Result<TcpStream, NetworkError> {
        Sockets::new().unwrap().connect(port).await
    }

    #[tokio::test]
    async fn what_one_side_ends_the_other_may_still_answer() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let number = listener.local_addr().unwrap().port();
        // Nobody listens at ::1.
        let connected = connect_here(Port { number, ipv6_first: true }).await.unwrap();
        let (mut host, guest) = tokio::io::duplex(64);
        let forwarded = tokio::spawn(forward(guest, connected, permit().await.unwrap()));
        host.write_all(b"question").await.unwrap();
        host.shutdown().await.unwrap();
        let (server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        let mut server = tokio::net::TcpStream::from_std(server).unwrap();
        let mut text = String::new();
        server.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "question");
        server.write_all(b"answer").await.unwrap();
        drop(server);
        text.clear();
        host.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "answer");
        forwarded.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_silent_after_the_other_side_has_ended_is_given_up() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let number = listener.local_addr().unwrap().port();
        let connected = connect_here(Port { number, ipv6_first: false }).await.unwrap();
        let (mut host, guest) = tokio::io::duplex(64);
        let forwarded = tokio::spawn(forward(guest, connected, permit().await.unwrap()));
        let (_server, _) = listener.accept().unwrap();
        tokio::time::sleep(10 * relay::HALF_OPEN).await;
        assert!(!forwarded.is_finished(), "both sides may be silent as long as they like");
        host.shutdown().await.unwrap();
        let ended = forwarded.await.unwrap().unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_program_that_takes_nothing_keeps_its_connection_for_a_bounded_time() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let number = listener.local_addr().unwrap().port();
        let connected = connect_here(Port { number, ipv6_first: false }).await.unwrap();
        let (_server, _) = listener.accept().unwrap();
        let (mut host, guest) = tokio::io::duplex(64);
        let forwarded = tokio::spawn(forward(guest, connected, permit().await.unwrap()));
        // As much as the kernel takes, and then until the connection ends.
        let written = async { while host.write_all(&[0; 1 << 16]).await.is_ok() {} };
        timeout(30 * STALLED, written).await.unwrap();
        let ended = forwarded.await.unwrap().unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn one_connection_too_many_waits_for_another_to_end() {
        let mut all = Vec::new();
        while let Ok(permit) = permit().await {
            all.push(permit);
        }
        assert!(all.len() <= MAX_CONNECTIONS);
        let (waited, ()) = tokio::join!(permit(), async {
            tokio::time::sleep(ROOM / 2).await;
            all.pop();
        });
        drop(waited.unwrap());
    }

    #[tokio::test]
    async fn a_port_without_a_listener_refuses() {
        let number = {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            listener.local_addr().unwrap().port()
        };
        let error = connect_here(Port { number, ipv6_first: false }).await.unwrap_err();
        let NetworkError::Loopback { source, .. } = error else { panic!("{error}") };
        assert_eq!(source.kind(), io::ErrorKind::ConnectionRefused);
    }
}
