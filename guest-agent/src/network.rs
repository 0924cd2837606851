//! The pod's network: the guest's network cards, moved into the pod's network namespace and set up there.
//!
//! Addresses, routes and neighbours are netlink messages. The shim makes them from those of the host's kernel, and
//! leaves out what means nothing in the guest. The agent adds the index of the guest's interface, and passes them to
//! the guest's kernel (agent.proto, ConfigureNetworkRequest).

mod cards;
pub mod loopback;
pub mod name_server;
mod netlink;
pub mod parameters;
pub mod routing;

use std::{
    fs::{self, File},
    io::{self, Write},
    os::fd::{AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
};

use bulkhead_agent_api::agent::{ChangeNetworkRequest, ConfigureNetworkRequest, Ipv6, NetlinkMessage};
use nix::sched::{CloneFlags, setns};

use self::{
    netlink::{LinkMessage, Socket},
    parameters::{InvalidName, Parameter},
};
use crate::{processors::Processors, syscall};

/// IN6_ADDR_GEN_MODE_NONE of linux/if_link.h: the kernel makes no link-local address.
const NO_LINK_LOCAL: &str = "1";

/// As ethtool(8) calls it.
const DATAGRAMS_TOGETHER: &str = "tx-udp-segmentation";

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
    /// The VM has no such network card, or it is in another network namespace.
    #[error("interface {name:?}: there is no network card with the permanent address {card:02x?}")]
    NoCard {
        /// Name of the interface.
        name: String,
        /// As in the request.
        card: [u8; 6],
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
    /// The kernel refused a rule of policy routing, or a route of no interface.
    #[error("{action}: {source}")]
    Routing {
        /// What was tried: "adding the rule 100: from 10.0.0.2 lookup 100".
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
    /// A kernel parameter of the host's.
    #[error(transparent)]
    Parameter(#[from] InvalidName),
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
    card: [u8; 6],
    name: String,
    mac: [u8; 6],
    mtu: u32,
    up: bool,
    noarp: bool,
    ipv6: Ipv6,
    addresses: Vec<NetlinkMessage>,
    absent_routes: Vec<NetlinkMessage>,
    routes: Vec<NetlinkMessage>,
    neighbours: Vec<NetlinkMessage>,
    parameters: Vec<Parameter>,
}

impl TryFrom<ConfigureNetworkRequest> for Interface {
    type Error = NetworkError;

    fn try_from(request: ConfigureNetworkRequest) -> Result<Self, NetworkError> {
        let invalid = |reason| NetworkError::Invalid { name: request.name.clone(), reason };
        // It becomes part of a path.
        if request.name.is_empty() || request.name.contains('/') || request.name.starts_with('.') {
            return Err(invalid("the kernel takes no such name for an interface"));
        }
        let address = |bytes: &[u8]| {
            bytes.try_into().map_err(|_| invalid("its MAC address is not 6 bytes long, or its card's"))
        };
        let (mac, card) = (address(&request.mac)?, address(&request.card)?);
        if [&request.addresses, &request.neighbours].into_iter().any(|messages| are_too_short(messages)) {
            return Err(invalid("a message is too short"));
        }
        let ipv6 =
            request.ipv6.enum_value().map_err(|_| invalid("the IPv6 mode of the request is unknown"))?;
        Ok(Self {
            card,
            name: request.name,
            mac,
            mtu: request.mtu,
            up: request.up,
            noarp: request.noarp,
            ipv6,
            addresses: request.addresses,
            absent_routes: request.absent_routes,
            routes: request.routes,
            neighbours: request.neighbours,
            parameters: parameters::all(request.parameters)?,
        })
    }
}

impl Interface {
    /// The permanent address of its card.
    pub fn card(&self) -> [u8; 6] {
        self.card
    }

    /// Leaves the kernel parameters to the spec of a container that it sets, files below /proc/sys.
    pub fn leave_parameters(&mut self, in_spec: &[PathBuf]) {
        parameters::leave_out(&mut self.parameters, in_spec);
    }

    fn failed(&self, action: impl Into<String>) -> impl FnOnce(io::Error) -> NetworkError {
        let (name, action) = (self.name.clone(), action.into());
        move |source| NetworkError::Kernel { name, action, source }
    }

    fn no_card(&self) -> NetworkError {
        NetworkError::NoCard { name: self.name.clone(), card: self.card }
    }
}

/// Whether one of them has no place for the index of an interface.
fn are_too_short(messages: &[NetlinkMessage]) -> bool {
    messages.iter().any(|message| message.body.len() < INDEX.end)
}

/// What changes of an interface.
#[derive(Debug)]
pub struct Change {
    /// What it is from now on. Of addresses, routes and neighbours, those that are added.
    interface: Interface,
    removed_addresses: Vec<NetlinkMessage>,
    removed_routes: Vec<NetlinkMessage>,
    removed_neighbours: Vec<NetlinkMessage>,
    switches_ipv6: bool,
}

impl TryFrom<ChangeNetworkRequest> for Change {
    type Error = NetworkError;

    fn try_from(request: ChangeNetworkRequest) -> Result<Self, NetworkError> {
        let ChangeNetworkRequest {
            removed_addresses, removed_routes, removed_neighbours, switches_ipv6, ..
        } = request;
        let interface = Interface::try_from(request.interface.unwrap_or_default())?;
        if [&removed_addresses, &removed_neighbours].into_iter().any(|messages| are_too_short(messages)) {
            return Err(NetworkError::Invalid { name: interface.name, reason: "a message is too short" });
        }
        Ok(Self { interface, removed_addresses, removed_routes, removed_neighbours, switches_ipv6 })
    }
}

/// Moves the card into the network namespace of the process `pidfd`, makes it the interface, and leaves this thread in
/// that namespace.
pub fn configure(pidfd: BorrowedFd<'_>, interface: &Interface) -> Result<(), NetworkError> {
    let guest = Socket::open().map_err(interface.failed("opening a netlink socket"))?;
    let card =
        cards::find(&guest, &interface.card).map_err(interface.failed("looking for its network card"))?;
    let card = card.ok_or_else(|| interface.no_card())?;
    // Other interfaces of Linux have it from the start, and the driver of the card does not. Without it, datagrams pass
    // one by one.
    if let Err(error) = syscall::enable_offload(card, DATAGRAMS_TOGETHER) {
        eprintln!("bulkhead-agent: {} does not leave datagrams together: {error}", interface.name);
    }
    use_processors(card, &interface.name);
    let entered = setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(io::Error::from);
    entered.map_err(interface.failed("entering the container's network namespace"))?;
    let netns = own_netns().map_err(interface.failed("opening the container's network namespace"))?;
    let moved = LinkMessage::new(card).name(&interface.name).netns(netns.as_raw_fd());
    guest.set_link(&moved).map_err(interface.failed("moving the network card to it"))?;
    let (socket, index) = card_here(interface)?;
    set_up(&socket, index, interface)
}

/// Changes the interface in the network namespace of the process `pidfd`, and leaves this thread in that namespace.
pub fn change(pidfd: BorrowedFd<'_>, change: &Change) -> Result<(), NetworkError> {
    let entered = setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(io::Error::from);
    entered.map_err(change.interface.failed("entering the container's network namespace"))?;
    let (socket, index) = card_here(&change.interface)?;
    apply(&socket, index, change)
}

/// Moves the card from the network namespace of the process `pidfd` to that of the agent, and leaves this thread in the
/// former. Its addresses, routes and neighbours end with that. It is no error if the card is there already.
pub fn remove(pidfd: BorrowedFd<'_>, card: &[u8]) -> Result<(), NetworkError> {
    let name = || String::from("of a card");
    let reason = "the address of its card is not 6 bytes long";
    let card: [u8; 6] = card.try_into().map_err(|_| NetworkError::Invalid { name: name(), reason })?;
    let failed = |action: &str| {
        let (name, action) = (name(), action.to_owned());
        move |source| NetworkError::Kernel { name, action, source }
    };
    let home = own_netns().map_err(failed("opening the agent's network namespace"))?;
    let guest = Socket::open().map_err(failed("opening a netlink socket"))?;
    let entered = setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(io::Error::from);
    entered.map_err(failed("entering the container's network namespace"))?;
    let socket = Socket::open().map_err(failed("opening a netlink socket"))?;
    let looking = || failed("looking for the network card");
    let Some(index) = socket.find(&card).map_err(looking())? else {
        // It never left, for example because the container has an interface of that name.
        let is_at_home = cards::find(&guest, &card).map_err(looking())?.is_some();
        return if is_at_home { Ok(()) } else { Err(NetworkError::NoCard { name: name(), card }) };
    };
    // A name that no other interface there has.
    let [.., number] = card;
    let moved = LinkMessage::new(index).name(&format!("card{number}")).netns(home.as_raw_fd());
    socket.set_link(&moved).map_err(failed("moving the network card from it"))
}

/// Has these cards, which are in the network namespace of the process `pidfd`, use as many pairs of queues as there are
/// processors, and leaves this thread in that namespace. A card that is gone needs none.
pub fn spread(pidfd: BorrowedFd<'_>, cards: &[[u8; 6]]) -> Result<(), NetworkError> {
    setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(|errno| NetworkError::Namespace(errno.into()))?;
    let socket = Socket::open().map_err(NetworkError::Namespace)?;
    for card in cards {
        if let Some(index) = socket.find(card).map_err(NetworkError::Namespace)? {
            use_processors(index, &format!("the card {card:02x?}"));
        }
    }
    Ok(())
}

/// The driver of Linux uses as many pairs of queues as there were processors when it found the card, and no more when
/// further ones come online. That it uses fewer than it could is no reason to be without a network.
fn use_processors(card: u32, name: &str) {
    let raised = Processors::default().online().and_then(|online| syscall::raise_channels(card, online));
    match raised {
        Ok((before, now)) if before != now => {
            eprintln!("bulkhead-agent: {name} uses {now} pairs of queues, and no longer {before}");
        }
        Ok(_) => {}
        Err(error) => {
            eprintln!("bulkhead-agent: {name} does not use a pair of queues for each processor: {error}")
        }
    }
}

/// The network namespace of this thread.
fn own_netns() -> io::Result<File> {
    File::open("/proc/thread-self/ns/net")
}

/// A socket in the network namespace of this thread, and the index of the interface's card there.
fn card_here(interface: &Interface) -> Result<(Socket, u32), NetworkError> {
    let socket = Socket::open().map_err(interface.failed("opening a netlink socket"))?;
    let index = socket.find(&interface.card).map_err(interface.failed("looking for it"))?;
    Ok((socket, index.ok_or_else(|| interface.no_card())?))
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

/// Sets up the interface of this index.
fn set_up(socket: &Socket, index: u32, interface: &Interface) -> Result<(), NetworkError> {
    let Interface { mac, .. } = interface;
    let address = LinkMessage::new(index).address(mac);
    socket.set_link(&address).map_err(interface.failed("setting its address"))?;
    // Before the interface is up: the kernel adds IPv6 addresses by itself then.
    parameters::set_here(&interface.parameters);
    set_ipv6(interface).map_err(interface.failed("setting its IPv6 mode"))?;
    set_link(socket, index, interface)?;
    add(socket, index, interface)
}

/// Changes the interface of this index.
fn apply(socket: &Socket, index: u32, change: &Change) -> Result<(), NetworkError> {
    let Change { interface, removed_addresses, removed_routes, removed_neighbours, switches_ipv6 } = change;
    for NetlinkMessage { what, body, .. } in removed_routes {
        let removed = socket.remove_route(body, index);
        removed.map_err(interface.failed(format!("removing the route {what}")))?;
    }
    for NetlinkMessage { what, body, .. } in removed_neighbours {
        let removed = socket.remove_neighbour(&with_index(body, index));
        removed.map_err(interface.failed(format!("removing the neighbour {what}")))?;
    }
    for NetlinkMessage { what, body, .. } in removed_addresses {
        let removed = socket.remove_address(&with_index(body, index));
        removed.map_err(interface.failed(format!("removing the address {what}")))?;
    }
    if *switches_ipv6 {
        switch_ipv6(interface).map_err(interface.failed("setting its IPv6 mode"))?;
    }
    set_link(socket, index, interface)?;
    add(socket, index, interface)
}

fn set_link(socket: &Socket, index: u32, interface: &Interface) -> Result<(), NetworkError> {
    let Interface { mtu, up, noarp, .. } = interface;
    let link = || LinkMessage::new(index);
    socket.set_link(&link().mtu(*mtu)).map_err(interface.failed(format!("setting its MTU to {mtu}")))?;
    let what = if *up { "bringing it up" } else { "bringing it down" };
    socket.set_link(&link().noarp(*noarp).up(*up)).map_err(interface.failed(what))
}

fn add(socket: &Socket, index: u32, interface: &Interface) -> Result<(), NetworkError> {
    for NetlinkMessage { what, body, .. } in &interface.addresses {
        let added = socket.add_address(&with_index(body, index));
        added.map_err(interface.failed(format!("adding the address {what}")))?;
    }
    for NetlinkMessage { what, body, .. } in &interface.absent_routes {
        let removed = socket.remove_route(body, index);
        removed.map_err(interface.failed(format!("removing the kernel's route {what}")))?;
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

/// Enables or disables IPv6 of an interface that has been set up.
fn switch_ipv6(interface: &Interface) -> io::Result<()> {
    let value = if interface.ipv6 == Ipv6::IPV6_DISABLED { "1" } else { "0" };
    match fs::write(ipv6_knobs(interface).join("disable_ipv6"), value) {
        // The container has renamed it, and has to do this itself.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn set_ipv6(interface: &Interface) -> io::Result<()> {
    let (knob, value) = match interface.ipv6 {
        Ipv6::IPV6_AUTOMATIC => return Ok(()),
        Ipv6::IPV6_DISABLED => ("disable_ipv6", "1"),
        Ipv6::IPV6_GIVEN => ("addr_gen_mode", NO_LINK_LOCAL),
    };
    fs::write(ipv6_knobs(interface).join(knob), value)
}

/// These files show the network namespace of the thread that opens them.
fn ipv6_knobs(interface: &Interface) -> PathBuf {
    Path::new("/proc/sys/net/ipv6/conf").join(&interface.name)
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
