//! Reads the pod's interfaces, addresses, routes, rules and neighbours from the pod's network namespace.

use std::{
    fs::{self, File},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use bulkhead_agent_api::agent::{ConfigureNetworkRequest, Ipv6, NetlinkMessage};
use futures::TryStreamExt;
use protobuf::EnumOrUnknown;
use rtnetlink::{
    Handle,
    packet_core::{Emitable, Parseable},
    packet_route::{
        AddressFamily,
        address::{
            AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope, CacheInfo,
        },
        link::{LinkAttribute, LinkFlags, LinkMessage},
        neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState},
        route::{
            RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
            RouteType, RouteVia,
        },
    },
};

use tokio::runtime::Handle as Runtime;

use super::{
    FirstScan, Found, MOST, NetworkError, OfInterface, Parameters, Scan, failed, is_former_tap, is_tap,
    name_server, netns,
    redirect::{self, name_of},
    refused, routing,
    routing::{LOOPBACK, MOST_ROUTES, Routing},
    unsuitable,
    watch::Watch,
};

/// Interfaces that kernels with these tunnels make in every network namespace (ip-sysctl,
/// fb_tunnels_only_for_init_net).
const FALLBACK_TUNNELS: [&str; 9] =
    ["tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "sit0", "ip6tnl0", "ip6gre0"];

/// RT_TABLE_UNSPEC, RT_TABLE_LOCAL and RT_TABLE_MAIN of linux/rtnetlink.h: where the kernel adds routes for addresses.
const NO_TABLE: u32 = RouteHeader::RT_TABLE_UNSPEC as u32;
pub(super) const LOCAL_TABLE: u32 = 255;
pub(super) const MAIN_TABLE: u32 = RouteHeader::RT_TABLE_MAIN as u32;

/// Addresses that a pod can have at the loopback interface, besides those of each namespace.
const MOST_LOOPBACK_ADDRESSES: usize = 1024;

/// The metric of a route that the kernel adds for an IPv6 address (IP6_RT_PRIO_ADDRCONF of net/ip6_route.h).
const IPV6_PREFIX_METRIC: u32 = 256;

/// The pod's interfaces in a network namespace. Blocks.
pub(super) fn scan(netns: &File) -> Result<Scan, NetworkError> {
    netns::inside(netns, async |handle| read(&handle, links(&handle).await?).await)
}

/// The same, with the kernel parameters of the namespace and what tells `runtime` of the changes since. Blocks.
pub(super) fn scan_and_watch(netns: &File, runtime: &Runtime) -> Result<FirstScan, NetworkError> {
    netns::inside(netns, async |handle| {
        let watch = Watch::here(runtime).map_err(failed("watching it"))?;
        let links = links(&handle).await?;
        refuse_former_tap(&links)?;
        let loopback = links.iter().find(|link| link.header.flags.contains(LinkFlags::Loopback));
        let parameters = Parameters::read(&loopback.map(OfInterface::of).unwrap_or_default());
        Ok(FirstScan { scan: read(&handle, links).await?, parameters, watch })
    })
}

/// Refuses a namespace that has a tap of an older version. Two VMMs of this version cannot have a tap of the same name
/// in one namespace. But the tap of an older version has another name, so the kernel would not refuse the second VMM.
fn refuse_former_tap(links: &[LinkMessage]) -> Result<(), NetworkError> {
    match links.iter().map(name_of).find(|name| is_former_tap(name)) {
        Some(tap) => Err(NetworkError::Shared { tap: tap.into() }),
        None => Ok(()),
    }
}

async fn links(handle: &Handle) -> Result<Vec<LinkMessage>, NetworkError> {
    handle.link().get().execute().try_collect().await.map_err(refused("reading its interfaces"))
}

async fn read(handle: &Handle, all: Vec<LinkMessage>) -> Result<Scan, NetworkError> {
    let links = of_the_pod(&all)?;
    let loopback = loopback_addresses(handle).await?;
    let has_name_server = name_server::listens_here().map_err(failed("reading its sockets"))?;
    if links.is_empty() {
        let routing = Ok(Routing { addresses: loopback, ..Routing::default() });
        return Ok(Scan { interfaces: Vec::new(), routing, has_name_server });
    }
    let routes: Vec<_> = handle
        .route()
        .get(RouteMessage::default())
        .execute()
        .try_collect()
        .await
        .map_err(refused("reading its routes"))?;
    let (kernels, routes): (Vec<_>, Vec<_>) = routes.into_iter().partition(is_kernels);
    if routes.len() > MOST_ROUTES {
        return Err(NetworkError::TooLong { what: "routes", count: routes.len(), most: MOST_ROUTES });
    }
    let (of_none, routes): (Vec<_>, Vec<_>) = routes.into_iter().partition(routing::is_of_no_interface);
    let neighbours: Vec<_> =
        handle.neighbours().get().execute().try_collect().await.map_err(refused("reading its neighbours"))?;
    let taps = redirect::taps_in(&all);
    let qdiscs = redirect::qdiscs(handle).await.map_err(refused("reading its qdiscs"))?;
    let mut interfaces = Vec::new();
    for &link in &links {
        let index = link.header.index;
        let addresses = addresses_of(handle, index).await?;
        let is_first = interfaces.is_empty();
        let own = routes.iter().filter(|route| match interface_of(route) {
            Some(through) if links.iter().any(|link| link.header.index == through) => through == index,
            // One that is not through one of the interfaces is refused with the first.
            _ => is_first,
        });
        let filtered = redirect::is_filtered(handle, index, &qdiscs, &taps).await;
        let filtered = filtered.map_err(refused("reading its filters"))?;
        let described = unsuitable::refuse(link, &all, filtered)
            .and_then(|()| describe(link, &addresses, own.cloned().collect(), &neighbours));
        let described = described.map(|description| ConfigureNetworkRequest {
            absent_routes: absent_routes(link, &description.addresses, &kernels),
            ..description
        });
        let parameters = OfInterface::of(link);
        interfaces.push(Found { index, name: name_of(link).into(), described, parameters });
    }
    let routing = routing::read(handle, &of_none).await;
    let routing = routing.map(|routing| Routing { addresses: loopback, ..routing });
    Ok(Scan { interfaces, routing, has_name_server })
}

async fn addresses_of(handle: &Handle, index: u32) -> Result<Vec<AddressMessage>, NetworkError> {
    let found = handle.address().get().set_link_index_filter(index).execute();
    found.try_collect().await.map_err(refused("reading its addresses"))
}

/// The addresses of the loopback interface but those that it has in each namespace.
async fn loopback_addresses(handle: &Handle) -> Result<Vec<NetlinkMessage>, NetworkError> {
    let found = addresses_of(handle, LOOPBACK).await?;
    let added = found.iter().filter_map(|found| {
        let given = address(found)?;
        (!["127.0.0.1/8", "::1/128"].contains(&given.what.as_str())).then_some((found, given))
    });
    let of_loopback = |(found, given): (&AddressMessage, NetlinkMessage)| {
        // As in the guest, where it has the same index.
        let mut body = given.body;
        body.get_mut(4..8)?.copy_from_slice(&found.header.index.to_ne_bytes());
        Some(NetlinkMessage { body, ..given })
    };
    let addresses: Vec<_> = added.filter_map(of_loopback).collect();
    if addresses.len() > MOST_LOOPBACK_ADDRESSES {
        let (count, most) = (addresses.len(), MOST_LOOPBACK_ADDRESSES);
        return Err(NetworkError::TooLong { what: "addresses of lo", count, most });
    }
    Ok(addresses)
}

/// The interfaces that the guest shall have.
fn of_the_pod(all: &[LinkMessage]) -> Result<Vec<&LinkMessage>, NetworkError> {
    let is_the_pods = |link: &&LinkMessage| {
        let name = name_of(link);
        let is_own = link.header.flags.contains(LinkFlags::Loopback) || is_tap(name);
        !is_own && !FALLBACK_TUNNELS.contains(&name)
    };
    let links: Vec<_> = all.iter().filter(is_the_pods).collect();
    if links.len() > MOST {
        let names = links.iter().map(|link| name_of(link)).collect::<Vec<_>>().join(", ");
        return Err(NetworkError::TooMany { names });
    }
    Ok(links)
}

fn describe(
    link: &LinkMessage,
    addresses: &[AddressMessage],
    routes: Vec<RouteMessage>,
    neighbours: &[NeighbourMessage],
) -> Result<ConfigureNetworkRequest, NetworkError> {
    let index = link.header.index;
    let mut description = ConfigureNetworkRequest::new();
    description.name = name_of(link).into();
    description.up = link.header.flags.contains(LinkFlags::Up);
    description.noarp = link.header.flags.contains(LinkFlags::Noarp);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::Address(mac) => description.mac.clone_from(mac),
            LinkAttribute::Mtu(mtu) => description.mtu = *mtu,
            _ => {}
        }
    }
    description.ipv6 = EnumOrUnknown::new(ipv6(&description.name, addresses));
    description.addresses = addresses.iter().filter_map(address).collect();
    description.routes = routes_of(&description.name, index, routes)?;
    description.neighbours = neighbours.iter().filter_map(|found| neighbour(index, found)).collect();
    Ok(description)
}

fn ipv6(name: &str, addresses: &[AddressMessage]) -> Ipv6 {
    // The file shows the network namespace of the thread that opens it. A kernel without IPv6 has none.
    let disabled = fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"));
    if disabled.map_or(true, |value| value.trim() != "0") {
        return Ipv6::IPV6_DISABLED;
    }
    let is_link_local = |address: &AddressMessage| {
        address.header.family == AddressFamily::Inet6 && address.header.scope == AddressScope::Link
    };
    if addresses.iter().any(is_link_local) { Ipv6::IPV6_GIVEN } else { Ipv6::IPV6_AUTOMATIC }
}

/// An address as the guest shall have it; None if the guest makes it itself, of a router's advertisements.
fn address(found: &AddressMessage) -> Option<NetlinkMessage> {
    let flags = found.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Flags(flags) => Some(*flags),
        _ => None,
    });
    let flags = flags.unwrap_or(AddressFlags::from_bits_retain(found.header.flags.bits().into()));
    let is_ipv6 = found.header.family == AddressFamily::Inet6;
    if is_ipv6 && !flags.contains(AddressFlags::Permanent) {
        return None;
    }
    let mut given = found.clone();
    given.header.index = 0;
    given.header.flags = AddressHeaderFlags::empty();
    given.attributes.retain(|attribute| {
        use AddressAttribute as A;
        matches!(attribute, A::Address(_) | A::Local(_) | A::Broadcast(_) | A::Label(_) | A::RoutePriority(_))
    });
    let is_deprecated = |attribute: &AddressAttribute| match attribute {
        AddressAttribute::CacheInfo(times) => times.ifa_preferred == 0,
        _ => false,
    };
    // The other times begin when the address is added. It is permanent.
    if is_ipv6 && found.attributes.iter().any(is_deprecated) {
        let mut times = CacheInfo::default();
        times.ifa_valid = u32::MAX;
        given.attributes.push(AddressAttribute::CacheInfo(times));
    }
    // The host has done duplicate address detection. Doing it again would delay the guest by a second.
    let nodad = if is_ipv6 { AddressFlags::Nodad } else { AddressFlags::empty() };
    given.attributes.push(AddressAttribute::Flags(flags & AddressFlags::Noprefixroute | nodad));
    let ip = given.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Address(ip) => Some(*ip),
        _ => None,
    })?;
    Some(message(format!("{ip}/{}", given.header.prefix_len), &given))
}

/// The routes that the guest shall have, in an order in which its kernel takes them: a gateway must be reachable before
/// it is one.
fn routes_of(
    interface: &str,
    index: u32,
    found: Vec<RouteMessage>,
) -> Result<Vec<NetlinkMessage>, NetworkError> {
    let mut routes = Vec::new();
    for route in found {
        routes.push(given_route(interface, index, route)?);
    }
    routes.sort_by_key(has_gateway);
    Ok(routes.iter().map(route_message).collect())
}

/// Routes that the guest's kernel adds for these addresses of an interface, and that the host has not: a program of the
/// host has removed them, or moved them to another table, as the CNI plugin `sbr` does.
fn absent_routes(
    link: &LinkMessage,
    addresses: &[NetlinkMessage],
    kernels: &[RouteMessage],
) -> Vec<NetlinkMessage> {
    if !link.header.flags.contains(LinkFlags::Up) {
        return Vec::new();
    }
    let kernels = kernels
        .iter()
        .filter(|route| interface_of(route) == Some(link.header.index) && table_of(route) == MAIN_TABLE);
    let is_there = |wanted: &RouteMessage| {
        let mut kernels = kernels.clone();
        kernels.any(|route| {
            name_of_route(route) == name_of_route(wanted) && source_of(route) == source_of(wanted)
        })
    };
    let absent = addresses.iter().filter_map(prefix_route).filter(|route| !is_there(route));
    absent.map(|route| route_message(&route)).collect()
}

/// The route that the guest's kernel adds by itself for such an address.
pub(crate) fn connected_route(address: &NetlinkMessage) -> Option<NetlinkMessage> {
    prefix_route(address).as_ref().map(route_message)
}

/// The route that the kernel adds to table main for an address, to all that has the same prefix.
fn prefix_route(address: &NetlinkMessage) -> Option<RouteMessage> {
    use AddressAttribute as A;
    let AddressMessage { header, attributes, .. } = AddressMessage::parse(&address.body[..]).ok()?;
    let (mut ip, mut local, mut metric) = (None, None, None);
    for attribute in attributes {
        match attribute {
            A::Address(found) => ip = Some(found),
            A::Local(found) => local = Some(found),
            A::RoutePriority(found) => metric = Some(found),
            A::Flags(flags) if flags.contains(AddressFlags::Noprefixroute) => return None,
            _ => {}
        }
    }
    let mut route = RouteMessage::default();
    let destination = match ip? {
        // For one of 32 bits there is none.
        IpAddr::V4(ip) if header.prefix_len < 32 => {
            let source = local.unwrap_or(IpAddr::V4(ip));
            route.header.scope = RouteScope::Link;
            route.attributes.push(RouteAttribute::PrefSource(source.into()));
            let mask = u32::MAX.checked_shl(32 - u32::from(header.prefix_len)).unwrap_or(0);
            IpAddr::from(Ipv4Addr::from_bits(ip.to_bits() & mask))
        }
        // One with a peer has two.
        IpAddr::V6(ip) if local.is_none() => {
            metric = metric.or(Some(IPV6_PREFIX_METRIC));
            let missing = 128_u32.checked_sub(header.prefix_len.into())?;
            IpAddr::from(Ipv6Addr::from_bits(ip.to_bits() & u128::MAX.checked_shl(missing).unwrap_or(0)))
        }
        _ => return None,
    };
    route.header.address_family = header.family;
    route.header.destination_prefix_length = header.prefix_len;
    (route.header.table, route.header.protocol) = (RouteHeader::RT_TABLE_MAIN, RouteProtocol::Kernel);
    route.header.kind = RouteType::Unicast;
    // That of no bits, the default route, has none.
    if header.prefix_len > 0 {
        route.attributes.push(RouteAttribute::Destination(destination.into()));
    }
    route.attributes.extend(metric.map(RouteAttribute::Priority));
    Some(route)
}

/// The source that a route says, if it does.
pub(crate) fn source_of_message(route: &NetlinkMessage) -> Option<IpAddr> {
    match source_of(&RouteMessage::parse(&route.body[..]).ok()?)? {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

/// The address that an interface has itself.
pub(crate) fn local_address(address: &NetlinkMessage) -> Option<IpAddr> {
    use AddressAttribute as A;
    let attributes = AddressMessage::parse(&address.body[..]).ok()?.attributes;
    let local = attributes.iter().find_map(|it| if let A::Local(ip) = it { Some(*ip) } else { None });
    local.or_else(|| attributes.iter().find_map(|it| if let A::Address(ip) = it { Some(*ip) } else { None }))
}

fn source_of(route: &RouteMessage) -> Option<&RouteAddress> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::PrefSource(address) => Some(address),
        _ => None,
    })
}

/// Whether the guest's kernel adds the route itself, for an address or from a router's advertisement. What has been
/// moved to another table is still called the kernel's.
fn is_kernels(route: &RouteMessage) -> bool {
    let RouteHeader { address_family, protocol, .. } = route.header;
    let ours = matches!(address_family, AddressFamily::Inet | AddressFamily::Inet6);
    let made = matches!(protocol, RouteProtocol::Kernel | RouteProtocol::Ra | RouteProtocol::IcmpRedirect);
    // Older kernels say that somebody else has made that of IPv6 for multicast (ff00::/8).
    let is_multicast = route.header.kind == RouteType::Multicast && table_of(route) == LOCAL_TABLE;
    !ours || is_multicast || made && matches!(table_of(route), NO_TABLE | MAIN_TABLE | LOCAL_TABLE)
}

/// The interface through which a route goes.
pub(super) fn interface_of(route: &RouteMessage) -> Option<u32> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(through) => Some(*through),
        _ => None,
    })
}

fn table_of(route: &RouteMessage) -> u32 {
    let large = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    large.unwrap_or(route.header.table.into())
}

/// The route without attributes of the host only. An error: an attribute cannot be given to the guest.
fn given_route(interface: &str, index: u32, route: RouteMessage) -> Result<RouteMessage, NetworkError> {
    use RouteAttribute as A;
    let refused = |what: String| {
        Err(NetworkError::Route { interface: interface.into(), route: name_of_route(&route), what })
    };
    if !matches!(route.header.kind, RouteType::Unicast | RouteType::Local) {
        return refused(format!("the type {:?}", route.header.kind));
    }
    let mut given = RouteMessage::default();
    given.header = route.header.clone();
    given.header.flags &= RouteFlags::Onlink;
    for attribute in &route.attributes {
        match attribute {
            A::Destination(_)
            | A::Gateway(_)
            | A::Via(_)
            | A::PrefSource(_)
            | A::Priority(_)
            | A::Table(_)
            | A::Metrics(_)
            | A::Preference(_) => given.attributes.push(attribute.clone()),
            A::Oif(through) if *through == index => {}
            A::CacheInfo(_) => {}
            other => return refused(format!("{other:?}")),
        }
    }
    Ok(given)
}

fn has_gateway(route: &RouteMessage) -> bool {
    use RouteAttribute::{Gateway, Via};
    route.attributes.iter().any(|attribute| matches!(attribute, Gateway(_) | Via(_)))
}

/// As ip-route(8) writes it.
pub(super) fn name_of_route(route: &RouteMessage) -> String {
    let (mut destination, mut gateway) = ("default".to_owned(), String::new());
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Destination(address) => {
                let prefix = route.header.destination_prefix_length;
                destination = format!("{}/{prefix}", name_of_address(address));
            }
            RouteAttribute::Gateway(address) => gateway = format!(" via {}", name_of_address(address)),
            RouteAttribute::Via(RouteVia::Inet6(address)) => gateway = format!(" via {address}"),
            _ => {}
        }
    }
    destination + &gateway
}

fn name_of_address(address: &RouteAddress) -> String {
    match address {
        RouteAddress::Inet(ip) => ip.to_string(),
        RouteAddress::Inet6(ip) => ip.to_string(),
        other => format!("{other:?}"),
    }
}

/// A neighbour that was added by hand. The guest discovers the others.
fn neighbour(index: u32, found: &NeighbourMessage) -> Option<NetlinkMessage> {
    let is_entered = found.header.state == NeighbourState::Permanent;
    let is_ip = matches!(found.header.family, AddressFamily::Inet | AddressFamily::Inet6);
    if !is_entered || !is_ip || found.header.ifindex != index {
        return None;
    }
    let mut given = found.clone();
    given.header.ifindex = 0;
    given.attributes.retain(|attribute| {
        matches!(attribute, NeighbourAttribute::Destination(_) | NeighbourAttribute::LinkLayerAddress(_))
    });
    let ip = address_of_neighbour(&given)?;
    Some(message(ip.to_string(), &given))
}

pub(super) fn address_of_neighbour(neighbour: &NeighbourMessage) -> Option<IpAddr> {
    neighbour.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => Some(IpAddr::from(*ip)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => Some(IpAddr::from(*ip)),
        _ => None,
    })
}

fn route_message(route: &RouteMessage) -> NetlinkMessage {
    message(name_of_route(route), route)
}

pub(super) fn message(what: String, body: &impl Emitable) -> NetlinkMessage {
    let mut message = NetlinkMessage::new();
    message.what = what;
    message.body = vec![0; body.buffer_len()];
    body.emit(&mut message.body);
    message
}
