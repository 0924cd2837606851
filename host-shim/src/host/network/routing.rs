//! Policy routing of the pod's network namespace: the rules that say which table of routes is asked (ip-rule(8)), and
//! the routes that belong to no interface, such as those that drop what has no other way.
//!
//! CNI plugins use them: `sbr` of the CNI project, those of AWS and Cilium. Each rule becomes the body of a netlink
//! message for the guest's kernel, with its attributes in one order, so that two rules can be compared.

use futures::TryStreamExt;
use nix::libc::{EAFNOSUPPORT, EOPNOTSUPP};
use rtnetlink::{
    Error, Handle, IpVersion,
    packet_core::Nla,
    packet_route::{
        AddressFamily,
        route::{RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteType},
        rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
    },
};

use bulkhead_agent_api::agent::NetlinkMessage;

use super::{
    NetworkError, refused,
    scan::{LOCAL_TABLE, MAIN_TABLE, interface_of, message, name_of_route},
};

/// Rules that a pod can have, of both families together. The kernel asks them one after the other for each packet.
pub(super) const MOST_RULES: usize = 1024;
/// Routes that a pod can have, of all tables together.
pub(super) const MOST_ROUTES: usize = 4096;

/// RT_TABLE_DEFAULT of linux/rtnetlink.h.
const DEFAULT_TABLE: u32 = 253;
/// The rules of a new network namespace: priority and table. IPv6 has no table `default`.
const DEFAULT_RULES: [(u32, u32); 3] = [(0, LOCAL_TABLE), (32766, MAIN_TABLE), (32767, DEFAULT_TABLE)];
/// The loopback interface has this index in each network namespace.
pub(super) const LOOPBACK: u32 = 1;
/// FRA_SUPPRESS_PREFIXLEN and FRA_SUPPRESS_IFGROUP of a rule that suppresses nothing.
const NOTHING: u32 = u32::MAX;

/// What a pod has of policy routing, and at the loopback interface: bodies of RTM_NEWRULE, RTM_NEWROUTE and
/// RTM_NEWADDR.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Routing {
    pub(crate) rules: Vec<NetlinkMessage>,
    pub(crate) routes: Vec<NetlinkMessage>,
    pub(crate) addresses: Vec<NetlinkMessage>,
}

impl Default for Routing {
    /// That of a new network namespace.
    fn default() -> Self {
        let families = [AddressFamily::Inet, AddressFamily::Inet6];
        Self {
            rules: families.into_iter().flat_map(default_rules).collect(),
            routes: Vec::new(),
            addresses: Vec::new(),
        }
    }
}

fn default_rules(family: AddressFamily) -> Vec<NetlinkMessage> {
    let is_of_family = |table: u32| family == AddressFamily::Inet || table != DEFAULT_TABLE;
    let rules = DEFAULT_RULES.into_iter().filter(|(_, table)| is_of_family(*table));
    let rule = |(priority, table)| {
        let mut rule = RuleMessage::default();
        rule.header.family = family;
        rule.header.action = RuleAction::ToTable;
        rule.header.table = table as u8;
        rule.attributes = vec![
            RuleAttribute::Priority(priority),
            RuleAttribute::Table(table),
            RuleAttribute::Protocol(RouteProtocol::Kernel),
        ];
        message(name_of_rule(&rule), &rule)
    };
    rules.map(rule).collect()
}

/// The rules of the network namespace of `handle`, and these routes of it.
pub(super) async fn read(handle: &Handle, routes: &[RouteMessage]) -> Result<Routing, NetworkError> {
    let mut rules = Vec::new();
    for (version, family) in [(IpVersion::V4, AddressFamily::Inet), (IpVersion::V6, AddressFamily::Inet6)] {
        let found: Result<Vec<_>, _> = handle.rule().get(version).execute().try_collect().await;
        match found {
            Ok(found) => {
                let given: Result<Vec<_>, _> = found.into_iter().map(given_rule).collect();
                rules.extend(given?);
            }
            // A kernel without this family, or without rules.
            Err(error) if has_none(&error) => rules.extend(default_rules(family)),
            Err(error) => return Err(refused("reading its rules")(error)),
        }
    }
    if rules.len() > MOST_RULES {
        return Err(NetworkError::TooLong { what: "rules", count: rules.len(), most: MOST_RULES });
    }
    let routes = routes.iter().map(given_route).collect::<Result<_, _>>()?;
    Ok(Routing { rules, routes, addresses: Vec::new() })
}

fn has_none(error: &Error) -> bool {
    let Error::NetlinkError(message) = error else { return false };
    matches!(message.to_io().raw_os_error(), Some(EAFNOSUPPORT | EOPNOTSUPP))
}

/// The rule with its attributes in order. An error: an attribute cannot be given to the guest.
fn given_rule(rule: RuleMessage) -> Result<NetlinkMessage, NetworkError> {
    use RuleAttribute as A;
    let refused = |what: String| Err(NetworkError::Rule { rule: name_of_rule(&rule), what });
    use RuleAction::{Blackhole, Goto, Nop, Prohibit, ToTable, Unreachable};
    let action = rule.header.action;
    if !matches!(action, ToTable | Goto | Nop | Blackhole | Unreachable | Prohibit) {
        return refused(format!("the action {action:?}"));
    }
    let mut given = RuleMessage::default();
    given.header = rule.header.clone();
    given.header.flags &= RuleFlags::Invert;
    for attribute in &rule.attributes {
        match attribute {
            A::SuppressPrefixLen(NOTHING) | A::SuppressIfGroup(NOTHING) => {}
            A::Destination(_)
            | A::Source(_)
            | A::Iifname(_)
            | A::Oifname(_)
            | A::Goto(_)
            | A::Priority(_)
            | A::FwMark(_)
            | A::FwMask(_)
            | A::SuppressPrefixLen(_)
            | A::Table(_)
            | A::UidRange(_)
            | A::Protocol(_)
            | A::IpProtocol(_)
            | A::SourcePortRange(_)
            | A::DestinationPortRange(_) => given.attributes.push(attribute.clone()),
            // The groups of the host's interfaces are not the guest's.
            A::SuppressIfGroup(group) => return refused(format!("suppress_ifgroup {group}")),
            A::Realm(_) => return refused("realms".into()),
            A::TunId(number) => return refused(format!("tun_id {number}")),
            A::L3MDev(_) => return refused("l3mdev".into()),
            // Of a newer kernel, such as FRA_DSCP.
            other => return refused(format!("the attribute {}", other.kind())),
        }
    }
    // Without this, the kernel chooses one.
    if priority_of(&rule).is_none() {
        given.attributes.push(A::Priority(0));
    }
    given.attributes.sort_by_key(Nla::kind);
    Ok(message(name_of_rule(&rule), &given))
}

fn priority_of(rule: &RuleMessage) -> Option<u32> {
    rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Priority(priority) => Some(*priority),
        _ => None,
    })
}

/// As ip-rule(8) writes it.
fn name_of_rule(rule: &RuleMessage) -> String {
    use RuleAttribute as A;
    let source = rule.attributes.iter().find_map(|attribute| match attribute {
        A::Source(ip) => Some(format!("{ip}/{}", rule.header.src_len)),
        _ => None,
    });
    let mut from = source.unwrap_or_else(|| "all".into());
    let (mut selectors, mut end) = (String::new(), String::new());
    let mut table = rule.header.table.into();
    let mut target = 0;
    for attribute in &rule.attributes {
        match attribute {
            A::Destination(ip) => from += &format!(" to {ip}/{}", rule.header.dst_len),
            A::FwMark(mark) => selectors += &format!(" fwmark {mark:#x}"),
            A::Iifname(name) => selectors += &format!(" iif {name}"),
            A::Oifname(name) => selectors += &format!(" oif {name}"),
            A::Table(number) => table = *number,
            A::Goto(priority) => target = *priority,
            A::SuppressPrefixLen(length) if *length != NOTHING => {
                end = format!(" suppress_prefixlength {length}");
            }
            _ => {}
        }
    }
    let action = match rule.header.action {
        RuleAction::ToTable => format!("lookup {table}"),
        RuleAction::Goto => format!("goto {target}"),
        other => format!("{other:?}").to_lowercase(),
    };
    let not = if rule.header.flags.contains(RuleFlags::Invert) { "not " } else { "" };
    format!("{}: {not}from {from}{selectors} {action}{end}", priority_of(rule).unwrap_or_default())
}

/// Whether a route belongs to the pod, and to none of its interfaces.
pub(super) fn is_of_no_interface(route: &RouteMessage) -> bool {
    use RouteType::{BlackHole, Local, Prohibit, Throw, Unreachable};
    let has_none = interface_of(route).is_none_or(|index| index == LOOPBACK);
    let is_whole = !route
        .attributes
        .iter()
        .any(|it| matches!(it, RouteAttribute::MultiPath(_) | RouteAttribute::NhId(_)));
    has_none && is_whole && matches!(route.header.kind, BlackHole | Local | Prohibit | Throw | Unreachable)
}

/// One of these as the guest shall have it. An error: an attribute cannot be given to the guest.
fn given_route(route: &RouteMessage) -> Result<NetlinkMessage, NetworkError> {
    use RouteAttribute as A;
    let mut given = RouteMessage::default();
    given.header = route.header.clone();
    given.header.flags = RouteFlags::empty();
    for attribute in &route.attributes {
        match attribute {
            A::Destination(_) | A::PrefSource(_) | A::Priority(_) | A::Table(_) | A::Oif(_) => {
                given.attributes.push(attribute.clone());
            }
            A::CacheInfo(_) | A::Metrics(_) | A::Preference(_) => {}
            other => {
                let (interface, route) = ("lo".into(), name_of_route(route));
                return Err(NetworkError::Route { interface, route, what: format!("{other:?}") });
            }
        }
    }
    given.attributes.sort_by_key(Nla::kind);
    Ok(message(format!("{:?} {}", route.header.kind, name_of_route(route)).to_lowercase(), &given))
}
