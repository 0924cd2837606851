//! What is to change in the guest so that its network becomes that of the host.

use bulkhead_agent_api::agent::{
    ChangeNetworkRequest, ChangeRoutingRequest, ConfigureNetworkRequest, Ipv6, NetlinkMessage,
};

use super::FailedChange;
use crate::host::network::{self, Routing};

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

/// What of `now` the guest may lack. What it has already is no error when it is added.
fn missing(now: &[NetlinkMessage], before: &[NetlinkMessage], is_known: bool) -> Vec<NetlinkMessage> {
    if is_known { only_in(now, before) } else { now.to_vec() }
}

/// The same interface without the first route whose source is not an address of it, and without those that follow,
/// which may need that one.
pub(super) fn without_foreign_sources(description: &ConfigureNetworkRequest) -> ConfigureNetworkRequest {
    let own: Vec<_> = description.addresses.iter().filter_map(network::local_address).collect();
    let is_foreign = |route: &NetlinkMessage| network::source_of(route).is_some_and(|ip| !own.contains(&ip));
    let mut early = description.clone();
    let count = early.routes.iter().position(is_foreign);
    early.routes.truncate(count.unwrap_or(usize::MAX));
    early
}

/// What is to change so that the rules of `before` become those of `now`. Unless it is known that the guest has
/// all of `before`, it adds all of `now`.
pub(super) fn change_of_rules(before: &Routing, is_known: bool, now: &Routing) -> ChangeRoutingRequest {
    ChangeRoutingRequest {
        rules: missing(&now.rules, &before.rules, is_known),
        routes: missing(&now.routes, &before.routes, is_known),
        removed_rules: only_in(&before.rules, &now.rules),
        removed_routes: only_in(&before.routes, &now.routes),
        addresses: missing(&now.addresses, &before.addresses, is_known),
        removed_addresses: only_in(&before.addresses, &now.addresses),
        ..Default::default()
    }
}

/// What is to change so that `before` becomes `now`. Unless it is known that the guest has all of `before`, it adds all
/// of `now`.
pub(super) fn change(
    before: &ConfigureNetworkRequest,
    failed: Option<FailedChange>,
    now: &ConfigureNetworkRequest,
) -> ChangeNetworkRequest {
    let is_known = failed.is_none();
    let mut interface = now.clone();
    interface.addresses = missing(&now.addresses, &before.addresses, is_known);
    interface.routes = missing(&now.routes, &before.routes, is_known);
    // The guest's kernel adds one for an address that is new, but not again for one that stays.
    let stay = now.addresses.iter().filter(|address| before.addresses.contains(address));
    let is_back =
        |route: &NetlinkMessage| before.absent_routes.contains(route) && !now.absent_routes.contains(route);
    // When an interface comes up, the kernel adds them by itself, and while it is down it refuses them.
    if (before.up || !is_known) && now.up {
        interface.routes.splice(0..0, stay.filter_map(network::connected_route).filter(is_back));
    }
    interface.neighbours = missing(&now.neighbours, &before.neighbours, is_known);
    let mut change = ChangeNetworkRequest::new();
    change.interface = Some(interface).into();
    change.removed_addresses = only_in(&before.addresses, &now.addresses);
    change.removed_routes = only_in(&before.routes, &now.routes);
    change.removed_neighbours = only_in(&before.neighbours, &now.neighbours);
    let has_none = |interface: &ConfigureNetworkRequest| interface.ipv6 == Ipv6::IPV6_DISABLED.into();
    let may_be_switched = failed.is_some_and(|failed| failed.switched_ipv6);
    change.switches_ipv6 = may_be_switched || has_none(before) != has_none(now);
    change
}
