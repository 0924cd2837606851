//! What is to change in the guest so that its network becomes that of the host.

use std::net::IpAddr;

use bulkhead_agent_api::agent::{
    ChangeNetworkRequest, ChangeRoutingRequest, ConfigureNetworkRequest, Ipv6, NetlinkMessage,
};

use nix::libc::AF_INET;

use crate::host::network::{self, Routing};

/// What is not known of an interface after changes that failed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct FailedChange {
    /// Whether the guest's interface has IPv6.
    pub(super) switched_ipv6: bool,
}

/// Those that are in one list and not in the other.
fn only_in(these: &[NetlinkMessage], others: &[NetlinkMessage]) -> Vec<NetlinkMessage> {
    these.iter().filter(|message| !others.contains(message)).cloned().collect()
}

/// What of each kind (addresses, routes, neighbours, rules) the guest may have after changes that failed. More is
/// forgotten.
const MOST_POSSIBLE: usize = 8192;

/// Adds what the guest is asked to have now to what it may have.
pub(super) fn add_all(possible: &mut Vec<NetlinkMessage>, now: &[NetlinkMessage]) {
    possible.extend(only_in(now, possible));
    possible.truncate(MOST_POSSIBLE);
}

/// The same, of an interface.
pub(super) fn add_possible(possible: &mut ConfigureNetworkRequest, now: &ConfigureNetworkRequest) {
    add_all(&mut possible.addresses, &now.addresses);
    add_all(&mut possible.routes, &now.routes);
    add_all(&mut possible.neighbours, &now.neighbours);
    add_all(&mut possible.absent_routes, &now.absent_routes);
}

/// What of `now` the guest may lack, in this order: one may need another one. `is_lost`: its kernel may remove it with
/// something else. What the guest has already is no error when it is added.
fn missing(
    now: &[NetlinkMessage],
    before: &[NetlinkMessage],
    is_known: bool,
    is_lost: impl Fn(&NetlinkMessage) -> bool,
) -> Vec<NetlinkMessage> {
    let may_lack = |message: &&NetlinkMessage| !is_known || is_lost(message) || !before.contains(message);
    now.iter().filter(may_lack).cloned().collect()
}

/// The addresses that are to be removed, those of `before` that are not in `now`. Not one that `now` has in another
/// form, for example with other times, if it is of IPv6: adding it replaces it. Of an address of IPv4 the kernel
/// replaces the times and the metric only.
fn removed(before: &[NetlinkMessage], now: &[NetlinkMessage]) -> Vec<NetlinkMessage> {
    let name = |address: &NetlinkMessage| (address.what.clone(), network::local_address(address));
    let remain: Vec<_> = now.iter().map(name).collect();
    let mut removed = only_in(before, now);
    removed.retain(|address| is_ipv4(address) || !remain.contains(&name(address)));
    removed
}

/// The family is the first byte of a `struct ifaddrmsg`, a `struct rtmsg` and a `struct ndmsg`.
fn is_ipv4(message: &NetlinkMessage) -> bool {
    message.body.first().is_some_and(|family| i32::from(*family) == AF_INET)
}

/// The IP addresses that an interface loses if it becomes `now`, though some may come back.
pub(super) fn lost(before: &ConfigureNetworkRequest, now: &ConfigureNetworkRequest) -> Vec<IpAddr> {
    local_addresses(&removed(&before.addresses, &now.addresses))
}

pub(super) fn local_addresses(addresses: &[NetlinkMessage]) -> Vec<IpAddr> {
    addresses.iter().filter_map(network::local_address).collect()
}

/// Those of these routes whose source is one of these addresses.
pub(super) fn from_sources(routes: &[NetlinkMessage], sources: &[IpAddr]) -> Vec<NetlinkMessage> {
    let is_from = |route: &&NetlinkMessage| network::source_of(route).is_some_and(|ip| sources.contains(&ip));
    routes.iter().filter(is_from).cloned().collect()
}

/// The same interface without the first route whose source is not an address of it, and without those that follow,
/// which may need that one.
pub(super) fn without_foreign_sources(description: &ConfigureNetworkRequest) -> ConfigureNetworkRequest {
    let own = local_addresses(&description.addresses);
    let is_foreign = |route: &NetlinkMessage| network::source_of(route).is_some_and(|ip| !own.contains(&ip));
    let mut early = description.clone();
    let count = early.routes.iter().position(is_foreign);
    early.routes.truncate(count.unwrap_or(usize::MAX));
    early
}

/// What is to change so that the rules of `before` become those of `now`. Unless it is known that the guest has
/// all of `before`, it adds all of `now`.
pub(super) fn change_of_rules(before: &Routing, is_known: bool, now: &Routing) -> ChangeRoutingRequest {
    let removed_addresses = removed(&before.addresses, &now.addresses);
    // The guest's kernel removes these with the address.
    let from_removed = from_sources(&now.routes, &local_addresses(&removed_addresses));
    ChangeRoutingRequest {
        rules: missing(&now.rules, &before.rules, is_known, |_| false),
        routes: missing(&now.routes, &before.routes, is_known, |route| from_removed.contains(route)),
        removed_rules: only_in(&before.rules, &now.rules),
        removed_routes: only_in(&before.routes, &now.routes),
        addresses: missing(&now.addresses, &before.addresses, is_known, |_| false),
        // The agent removes these before it adds `addresses`: the kernel has each IPv6 address only once.
        removed_addresses,
        ..Default::default()
    }
}

/// What is to change so that `before` becomes `now`. If it is not known that the guest has all of `before`, all of
/// `now` is added. When an address is removed, the guest's kernel also removes the routes with this source, or takes
/// the source from them. `lost` has such addresses, if the guest has them again or gets them by this change. The routes
/// with such a source are added again.
pub(super) fn change(
    before: &ConfigureNetworkRequest,
    failed: Option<FailedChange>,
    now: &ConfigureNetworkRequest,
    lost: &[IpAddr],
) -> ChangeNetworkRequest {
    let is_known = failed.is_none();
    let removed_addresses = removed(&before.addresses, &now.addresses);
    // With an address of IPv4, the guest's kernel removes those that are secondary to it. With the last one, it removes
    // all routes and neighbours.
    let loses_ipv4 = removed_addresses.iter().any(is_ipv4);
    let is_lost = |message: &NetlinkMessage| loses_ipv4 && is_ipv4(message);
    let from_lost = from_sources(&now.routes, lost);
    let mut interface = now.clone();
    interface.addresses = missing(&now.addresses, &before.addresses, is_known, is_lost);
    interface.routes =
        missing(&now.routes, &before.routes, is_known, |route| is_lost(route) || from_lost.contains(route));
    // The guest's kernel adds one for an address that is new, but not again for one that stays.
    let stay = now.addresses.iter().filter(|address| before.addresses.contains(address));
    let is_back =
        |route: &NetlinkMessage| before.absent_routes.contains(route) && !now.absent_routes.contains(route);
    // When an interface comes up, the kernel adds them by itself, and while it is down it refuses them.
    if (before.up || !is_known) && now.up {
        interface.routes.splice(0..0, stay.filter_map(network::connected_route).filter(is_back));
    }
    interface.neighbours = missing(&now.neighbours, &before.neighbours, is_known, is_lost);
    let mut change = ChangeNetworkRequest::new();
    change.interface = Some(interface).into();
    change.removed_addresses = removed_addresses;
    change.removed_routes = only_in(&before.routes, &now.routes);
    change.removed_routes.extend(only_in(&from_lost, &change.removed_routes));
    change.removed_neighbours = only_in(&before.neighbours, &now.neighbours);
    let has_none = |interface: &ConfigureNetworkRequest| interface.ipv6 == Ipv6::IPV6_DISABLED.into();
    let may_be_switched = failed.is_some_and(|failed| failed.switched_ipv6);
    change.switches_ipv6 = may_be_switched || has_none(before) != has_none(now);
    change
}
