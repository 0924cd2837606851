//! Connections from the host to the loopback interface of a container.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::BorrowedFd,
    time::Duration,
};

use nix::sched::{CloneFlags, setns};
use tokio::{
    io::{AsyncRead, AsyncWrite, copy_bidirectional},
    sync::{Semaphore, SemaphorePermit},
};

use super::NetworkError;

/// The connections of all containers at one time. Each has two buffers of 8 KiB.
pub const MAX_CONNECTIONS: usize = 64;

/// How long a port may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);

static CONNECTIONS: Semaphore = Semaphore::const_new(MAX_CONNECTIONS);

/// A port of a loopback interface.
#[derive(Debug, Clone, Copy)]
pub struct Port {
    /// The TCP port.
    pub number: u16,
    /// Whether ::1 is tried before 127.0.0.1.
    pub ipv6_first: bool,
}

/// The right to have one connection. Fails if there are [`MAX_CONNECTIONS`] already.
pub fn permit() -> Result<SemaphorePermit<'static>, NetworkError> {
    CONNECTIONS.try_acquire().map_err(|_| NetworkError::TooManyConnections)
}

/// Connects to a port in the network namespace of the process `pidfd`, and leaves this thread in that namespace.
/// Blocks.
pub fn connect(pidfd: BorrowedFd<'_>, port: Port) -> Result<TcpStream, NetworkError> {
    setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(|errno| NetworkError::Namespace(errno.into()))?;
    connect_here(port).map_err(|source| NetworkError::Loopback { port: port.number, source })
}

fn connect_here(Port { number, ipv6_first }: Port) -> io::Result<TcpStream> {
    let mut addresses = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
    if ipv6_first {
        addresses.reverse();
    }
    let [first, second] = addresses.map(|address| SocketAddr::new(address, number));
    let connected = TcpStream::connect_timeout(&first, CONNECT).or_else(|error| {
        // The error of the address that the client asked for says more.
        TcpStream::connect_timeout(&second, CONNECT).map_err(|_| error)
    })?;
    connected.set_nonblocking(true)?;
    // What is forwarded was in segments before.
    connected.set_nodelay(true)?;
    Ok(connected)
}

/// Copies both ways until both have ended, or one has failed.
pub async fn forward(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    connected: TcpStream,
    permit: SemaphorePermit<'static>,
) -> io::Result<()> {
    let copied = copy_bidirectional(&mut stream, &mut tokio::net::TcpStream::from_std(connected)?).await;
    drop(permit);
    copied.map(drop)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn what_one_side_ends_the_other_may_still_answer() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let number = listener.local_addr().unwrap().port();
        // Nobody listens at ::1.
        let connected = connect_here(Port { number, ipv6_first: true }).unwrap();
        let (mut host, guest) = tokio::io::duplex(64);
        let forwarded = tokio::spawn(forward(guest, connected, permit().unwrap()));
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

    #[test]
    fn a_port_without_a_listener_refuses() {
        let number = {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            listener.local_addr().unwrap().port()
        };
        let error = connect_here(Port { number, ipv6_first: false }).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
