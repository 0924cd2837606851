//! Connections to the loopback interface of the pod's network namespace on the host, for any TCP port.
//!
//! The pod's programs listen on the loopback interface in the guest. Port-forward of the CRI connects to 127.0.0.1 or
//! ::1 in the namespace on the host. A rule of nftables redirects all such connections to two listeners of the shim.
//! The table has an owner: the kernel removes it when the shim's netlink socket is closed, also after a crash.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener as StdTcpListener},
    os::fd::OwnedFd,
    thread,
};

use bulkhead_agent_api::nftables::{self, Protocol, Redirect};
use nix::{
    libc,
    sys::socket::{getsockopt, setsockopt, sockopt},
};
use tokio::net::{TcpListener, TcpStream};

use super::{NetworkError, broken, failed, inside, netns};
use crate::host::{blocking, process_id::ProcessId};

/// The table of nftables.
const TABLE: &str = "bulkhead-port-forward";

/// The send buffer of a connection to a client, bytes.
const SEND_BUFFER: usize = 128 << 10;

/// The listeners, and the rules that lead to them. Dropping this removes both.
pub(crate) struct Loopback {
    ipv4: TcpListener,
    /// None: the namespace has no IPv6.
    ipv6: Option<TcpListener>,
    /// The socket that owns the rules. None: it is being closed.
    table: Option<OwnedFd>,
}

impl Loopback {
    /// Redirects the connections in the network namespace of the process `vmm`.
    pub(crate) async fn redirect(vmm: ProcessId) -> Result<Self, NetworkError> {
        let opened = blocking::run(
            move || {
                let netns = inside(vmm)?;
                netns::visit(&netns, || redirect().map_err(failed("redirecting its loopback interface")))
            },
            drop,
        );
        let (ipv4, ipv6, table) = opened.await.map_err(broken)??;
        let listener = |listener| TcpListener::from_std(listener).map_err(failed("listening in it"));
        Ok(Self { ipv4: listener(ipv4)?, ipv6: ipv6.map(listener).transpose()?, table: Some(table) })
    }

    /// The next connection, and the address to which its client has connected.
    pub(crate) async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let ipv6 = async {
            match &self.ipv6 {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        let (connection, _) = tokio::select! {
            accepted = self.ipv4.accept() => accepted?,
            accepted = ipv6 => accepted?,
        };
        let address = original_address(&connection)?;
        Ok((connection, address))
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        let table = self.table.take();
        // The kernel waits for its other processors when it removes rules. If there is no thread, this one waits.
        drop(thread::Builder::new().spawn(move || drop(table)));
    }
}

fn redirect() -> io::Result<(StdTcpListener, Option<StdTcpListener>, OwnedFd)> {
    let ipv4 = listen(Ipv4Addr::LOCALHOST.into())?;
    let ipv6 = match listen(Ipv6Addr::LOCALHOST.into()) {
        Ok(listener) => Some(listener),
        Err(error) if is_without_ipv6(&error) => None,
        Err(error) => return Err(error),
    };
    let redirect = |listener: &StdTcpListener| {
        let address = listener.local_addr()?;
        let (address, to) = (address.ip(), address.port());
        Ok(Redirect { protocol: Protocol::Tcp, address, port: None, to })
    };
    let redirects: Vec<_> =
        [Some(&ipv4), ipv6.as_ref()].into_iter().flatten().map(redirect).collect::<io::Result<_>>()?;
    let table = nftables::redirect(TABLE, &redirects)?;
    Ok((ipv4, ipv6, table))
}

fn listen(address: IpAddr) -> io::Result<StdTcpListener> {
    let listener = StdTcpListener::bind(SocketAddr::new(address, 0))?;
    listener.set_nonblocking(true)?;
    // A client that does not read keeps as much in the host's memory, which no pod is charged for.
    setsockopt(&listener, sockopt::SndBuf, &SEND_BUFFER)?;
    Ok(listener)
}

/// The kernel has no IPv6, or the namespace's loopback interface has no IPv6 address.
fn is_without_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

/// The destination of a connection before the kernel redirected it.
fn original_address(connection: &TcpStream) -> io::Result<SocketAddr> {
    if connection.local_addr()?.is_ipv4() {
        let original = getsockopt(connection, sockopt::OriginalDst)?;
        let address = Ipv4Addr::from(u32::from_be(original.sin_addr.s_addr));
        Ok(SocketAddr::new(address.into(), u16::from_be(original.sin_port)))
    } else {
        let original = getsockopt(connection, sockopt::Ip6tOriginalDst)?;
        let address = Ipv6Addr::from(original.sin6_addr.s6_addr);
        Ok(SocketAddr::new(address.into(), u16::from_be(original.sin6_port)))
    }
}
