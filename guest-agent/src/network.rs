//! The pod's network: the guest's one network card, moved into the pod's network namespace and set up there.
//!
//! Addresses, routes and neighbours are netlink messages. The agent passes those of the host's kernel to the guest's
//! kernel unchanged (agent.proto, ConfigureNetworkRequest).

pub mod loopback;
pub mod name_server;
mod netlink;

use std::{
    fs::{self, File},
    io::{self, Write},
    os::fd::{AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
};

use bulkhead_agent_api::agent::{ConfigureNetworkRequest, Ipv6, NetlinkMessage};
use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, setns},
};

use self::netlink::{LinkMessage, Socket};

/// What the guest's kernel knows of interfaces. Mounted by the agent, so it shows those of the guest's own namespace.
const INTERFACES: &str = "/sys/class/net";

/// IN6_ADDR_GEN_MODE_NONE of linux/if_link.h: the kernel makes no link-local address.
const NO_LINK_LOCAL: &str = "1";

/// Where in a `struct ifaddrmsg` and a `struct ndmsg` the interface's index is (rtnetlink(7)).
const INDEX: std::ops::Range<usize> = 4..8;

/// Why a container has no network.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The request makes no sense.
    #[error("interface {name:?}: {reason}")]
    Invalid {
        /// As the request has it.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The VM has no network card, or another container has it.
    #[error("interface {name}: the guest has no network card for it")]
    NoCard {
        /// Name of the interface.
        name: String,
    },
    /// The kernel refused.
    #[error("interface {name}: {action}: {source}")]
    Kernel {
        /// Name of the interface.
        name: String,
        /// What was tried: "adding the route default via 10.0.0.1".
        action: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A kernel parameter of an interface.
    #[error("linux.sysctl {} = {value:?}: {source}", path.display())]
    Sysctl {
        /// Below /proc/sys.
        path: PathBuf,
        /// What was written.
        value: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A port of the loopback interface.
    #[error("port {port} of the container's loopback interface: {source}")]
    Loopback {
        /// The TCP port.
        port: u16,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Too many connections to ports of the loopback interface.
    #[error("the guest has {} connections to loopback interfaces already", loopback::MAX_CONNECTIONS)]
    TooManyConnections,
    /// docker's name server.
    #[error("serving docker's name server at {}: {_0}", bulkhead_agent_api::name_server::ADDRESS)]
    NameServer(#[source] io::Error),
    /// The container's network namespace.
    #[error("entering the container's network namespace: {0}")]
    Namespace(#[source] io::Error),
    /// The thread in the namespace has ended without a result.
    #[error("the thread in the container's network namespace has ended without an answer")]
    Abandoned,
}

/// An interface as the container shall see it.
#[derive(Debug)]
pub struct Interface {
    name: String,
    mac: [u8; 6],
    mtu: u32,
    up: bool,
    ipv6: Ipv6,
    addresses: Vec<NetlinkMessage>,
    routes: Vec<NetlinkMessage>,
    neighbours: Vec<NetlinkMessage>,
}

impl TryFrom<ConfigureNetworkRequest> for Interface {
    type Error = NetworkError;

    fn try_from(request: ConfigureNetworkRequest) -> Result<Self, NetworkError> {
        let invalid = |reason| NetworkError::Invalid { name: request.name.clone(), reason };
        // It becomes part of a path.
        if request.name.is_empty() || request.name.contains('/') || request.name.starts_with('.') {
            return Err(invalid("the kernel takes no such name for an interface"));
        }
        let mac =
            request.mac.as_slice().try_into().map_err(|_| invalid("its MAC address is not 6 bytes long"))?;
        let messages = [&request.addresses, &request.neighbours];
        if messages.into_iter().flatten().any(|message| message.body.len() < INDEX.end) {
            return Err(invalid("a message is too short"));
        }
        let ipv6 =
            request.ipv6.enum_value().map_err(|_| invalid("the IPv6 mode of the request is unknown"))?;
        Ok(Self {
            name: request.name,
            mac,
            mtu: request.mtu,
            up: request.up,
            ipv6,
            addresses: request.addresses,
            routes: request.routes,
            neighbours: request.neighbours,
        })
    }
}

impl Interface {
    fn failed(&self, action: impl Into<String>) -> impl FnOnce(io::Error) -> NetworkError {
        let (name, action) = (self.name.clone(), action.into());
        move |source| NetworkError::Kernel { name, action, source }
    }
}

/// Moves the card into the network namespace of the process `pidfd`, makes it the interface, and leaves this thread in
/// that namespace.
pub fn configure(pidfd: BorrowedFd<'_>, interface: &Interface) -> Result<(), NetworkError> {
    let Some(card) = card().map_err(interface.failed("looking for the network card"))? else {
        return Err(NetworkError::NoCard { name: interface.name.clone() });
    };
    let guest = Socket::open().map_err(interface.failed("opening a netlink socket"))?;
    let entered = setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(io::Error::from);
    entered.map_err(interface.failed("entering the container's network namespace"))?;
    let netns = File::open("/proc/thread-self/ns/net");
    let netns = netns.map_err(interface.failed("opening the container's network namespace"))?;
    let moved = LinkMessage::new(card).name(&interface.name).netns(netns.as_raw_fd());
    guest.set_link(&moved).map_err(interface.failed("moving the network card to it"))?;
    set_up(interface)
}

/// Writes files below /proc/sys in the network namespace of the process `pidfd`, and leaves this thread in it.
pub fn set_sysctls(pidfd: BorrowedFd<'_>, sysctls: &[(PathBuf, String)]) -> Result<(), NetworkError> {
    setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(|errno| NetworkError::Namespace(errno.into()))?;
    for (path, value) in sysctls {
        // These files show the network namespace of the thread that opens them.
        let written = File::options().write(true).open(Path::new("/proc/sys").join(path));
        let written = written.and_then(|mut file| file.write_all(value.as_bytes()));
        written.map_err(|source| NetworkError::Sysctl {
            path: path.clone(),
            value: value.clone(),
            source,
        })?;
    }
    Ok(())
}

/// Index of the guest's network card: the one interface that a device is behind.
fn card() -> io::Result<Option<u32>> {
    for entry in fs::read_dir(INTERFACES)? {
        let path = entry?.path();
        if path.join("device").exists() {
            let index = fs::read_to_string(path.join("ifindex"))?;
            return index.trim().parse().map(Some).map_err(io::Error::other);
        }
    }
    Ok(None)
}

/// Sets up the interface of this name in this thread's network namespace.
fn set_up(interface: &Interface) -> Result<(), NetworkError> {
    let Interface { name, mac, mtu, .. } = interface;
    let socket = Socket::open().map_err(interface.failed("opening a netlink socket"))?;
    let index = if_nametoindex(name.as_str()).map_err(io::Error::from);
    let index = index.map_err(interface.failed("looking for it"))?;
    let link = || LinkMessage::new(index);
    socket.set_link(&link().address(mac)).map_err(interface.failed("setting its address"))?;
    socket.set_link(&link().mtu(*mtu)).map_err(interface.failed(format!("setting its MTU to {mtu}")))?;
    // Before the interface is up: the kernel adds IPv6 addresses by itself then.
    set_ipv6(interface).map_err(interface.failed("setting its IPv6 mode"))?;
    if interface.up {
        socket.set_link(&link().up()).map_err(interface.failed("bringing it up"))?;
    }
    for NetlinkMessage { what, body, .. } in &interface.addresses {
        let added = socket.add_address(&with_index(body, index));
        added.map_err(interface.failed(format!("adding the address {what}")))?;
    }
    for NetlinkMessage { what, body, .. } in &interface.routes {
        let added = socket.add_route(body, index);
        added.map_err(interface.failed(format!("adding the route {what}")))?;
    }
    for NetlinkMessage { what, body, .. } in &interface.neighbours {
        let added = socket.add_neighbour(&with_index(body, index));
        added.map_err(interface.failed(format!("adding the neighbour {what}")))?;
    }
    Ok(())
}

fn set_ipv6(interface: &Interface) -> io::Result<()> {
    let (knob, value) = match interface.ipv6 {
        Ipv6::IPV6_AUTOMATIC => return Ok(()),
        Ipv6::IPV6_DISABLED => ("disable_ipv6", "1"),
        Ipv6::IPV6_GIVEN => ("addr_gen_mode", NO_LINK_LOCAL),
    };
    // These files show the network namespace of the thread that opens them.
    let directory: PathBuf = Path::new("/proc/sys/net/ipv6/conf").join(&interface.name);
    fs::write(directory.join(knob), value)
}

/// The body of a message about an address or a neighbour, now of this interface.
fn with_index(body: &[u8], index: u32) -> Vec<u8> {
    let mut body = body.to_vec();
    if let Some(place) = body.get_mut(INDEX) {
        place.copy_from_slice(&index.to_ne_bytes());
    }
    body
}

#[cfg(test)]
mod tests;
