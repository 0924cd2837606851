use std::{
    fs::{self, File},
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    process::{Child, Command},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use futures::TryStreamExt;
use nix::sched::{CloneFlags, unshare};
use rtnetlink::{
    Handle, IpVersion, LinkBridge, LinkMacVlan, LinkUnspec, LinkVeth, RouteMessageBuilder,
    packet_core::Parseable,
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage, CacheInfo},
        link::{LinkAttribute, LinkMessage, MacVlanMode},
        neighbour::NeighbourState,
        route::{RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteScope, RouteType},
        rule::{RuleAction, RuleAttribute, RuleMessage},
        tc::{TcAttribute, TcHandle, TcMessage},
    },
};

use rustix::net::{
    AddressFamily as AF, SocketType,
    sockopt::{Timeout, set_socket_timeout},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::{name_server::NameServer, *};
use crate::host::process_id::ProcessId;
use bulkhead_agent_api::{
    agent::{Ipv6, NetlinkMessage},
    name_server::{ADDRESS, MAX_ANSWER, MAX_QUESTIONS, Message, with_length},
    network_parameters::{DIRECTORY, FAMILIES},
    nftables::Protocol,
};
use bulkhead_vmm_api::tap;

const MAC: [u8; 6] = [2, 0, 0, 9, 8, 7];
const PEER_MAC: [u8; 6] = [2, 0, 0, 9, 8, 6];

/// A process in a network namespace of its own, as a VMM is.
struct Pod(Child);

impl Pod {
    fn new() -> Self {
        let spawn = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("these tests make network namespaces: run them as root");
            Command::new("sleep").arg("1000").spawn().unwrap()
        };
        Self(thread::scope(|scope| scope.spawn(spawn).join().unwrap()))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.pid()).into()
    }

    fn netns(&self) -> File {
        netns::of_process(self.pid()).unwrap()
    }

    fn inside<T: Send>(&self, work: impl AsyncFnOnce(Handle) -> T + Send) -> T {
        netns::inside(&self.netns(), async |handle| Ok(work(handle).await)).unwrap()
    }

    /// A veth called `name`, whose other end is `peer` in another pod; both are up.
    fn veth(&self, name: &str, other: &Self, peer: &str) {
        self.inside(async |handle| {
            handle.link().add(LinkVeth::new(name, peer).build()).execute().await.unwrap();
            let moved = LinkUnspec::new_with_name(peer).setns_by_pid(other.pid()).build();
            handle.link().set(moved).execute().await.unwrap();
        });
        for (pod, name, mac) in [(other, peer, PEER_MAC), (self, name, MAC)] {
            let link = LinkUnspec::new_with_name(name).address(mac.to_vec()).mtu(1400).up().build();
            pod.inside(async |handle| handle.link().set(link).execute().await.unwrap());
        }
    }

    fn bring_loopback_up(&self) {
        self.inside(async |handle| {
            let up = LinkUnspec::new_with_name("lo").up().build();
            handle.link().set(up).execute().await.unwrap();
        });
    }

    fn process(&self) -> ProcessId {
        ProcessId::of(self.pid()).unwrap()
    }

    fn scan(&self) -> Result<Scan, NetworkError> {
        scan::scan(&self.netns())
    }

    /// Adds a rule that leads to a table, for addresses of 64 bits if it names one of IPv6.
    fn rule(&self, family: AddressFamily, priority: u32, table: u32, attributes: Vec<RuleAttribute>) {
        let added = self.inside(async |handle| {
            let mut rule = RuleMessage::default();
            rule.header.family = family;
            (rule.header.action, rule.header.table) = (RuleAction::ToTable, 0);
            let len = if family == AddressFamily::Inet { 32 } else { 64 };
            for attribute in &attributes {
                match attribute {
                    RuleAttribute::Source(_) => rule.header.src_len = len,
                    RuleAttribute::Destination(_) => rule.header.dst_len = len,
                    _ => {}
                }
            }
            rule.attributes = attributes;
            rule.attributes.extend([RuleAttribute::Priority(priority), RuleAttribute::Table(table)]);
            let mut request = handle.rule().add();
            *request.message_mut() = rule;
            request.execute().await
        });
        added.unwrap();
    }

    /// Removes an interface.
    fn remove(&self, name: &str) {
        self.inside(async |handle| handle.link().del(index(&handle, name).await).execute().await.unwrap());
    }

    /// The descriptions of its interfaces.
    fn descriptions(&self) -> Vec<ConfigureNetworkRequest> {
        self.scan().unwrap().interfaces.into_iter().map(|found| found.described.unwrap()).collect()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

async fn link(handle: &Handle, name: &str) -> LinkMessage {
    handle.link().get().match_name(name).execute().try_next().await.unwrap().unwrap()
}

async fn index(handle: &Handle, name: &str) -> u32 {
    link(handle, name).await.header.index
}

fn names(messages: &[NetlinkMessage]) -> Vec<&str> {
    messages.iter().map(|message| message.what.as_str()).collect()
}

#[test]
fn a_pod_without_an_interface_has_none() {
    let scan = Pod::new().scan().unwrap();
    assert!(scan.interfaces.is_empty() && !scan.has_name_server);
}

#[test]
fn an_interface_is_described_with_all_that_is_its_own() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    pod.inside(async |handle| {
        let index = index(&handle, "eth0").await;
        let addresses = handle.address();
        addresses.add(index, Ipv4Addr::new(10, 1, 2, 3).into(), 24).execute().await.unwrap();
        addresses.add(index, Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 5).into(), 64).execute().await.unwrap();
        let (gateway, remote) = (Ipv4Addr::new(10, 1, 2, 1), Ipv4Addr::new(169, 254, 1, 1));
        let route = || RouteMessageBuilder::<Ipv4Addr>::new().output_interface(index);
        let last =
            route().destination_prefix(Ipv4Addr::new(10, 9, 0, 0), 16).gateway(remote).onlink().priority(7);
        for route in
            [route().gateway(gateway), route().destination_prefix(remote, 32).scope(RouteScope::Link)]
        {
            handle.route().add(route.build()).execute().await.unwrap();
        }
        let mut limited = last.build();
        limited.attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(1300)]));
        handle.route().add(limited).execute().await.unwrap();
        let neighbours = handle.neighbours();
        neighbours.add(index, remote.into()).link_layer_address(&PEER_MAC).execute().await.unwrap();
    });
    let [interface] = &pod.descriptions()[..] else { panic!("not one interface") };
    assert_eq!((interface.name.as_str(), interface.mtu, interface.up), ("eth0", 1400, true));
    assert_eq!(interface.mac, MAC);
    assert_eq!(interface.ipv6.enum_value(), Ok(Ipv6::IPV6_GIVEN));
    assert_eq!(names(&interface.addresses), ["10.1.2.3/24", "fd00::5/64", "fe80::ff:fe09:807/64"]);
    // What has no gateway comes first.
    let routes = ["169.254.1.1/32", "default via 10.1.2.1", "10.9.0.0/16 via 169.254.1.1"];
    assert_eq!(names(&interface.routes), routes);
    let last = RouteMessage::parse(&interface.routes[2].body).unwrap();
    assert_eq!((last.header.scope, last.header.flags), (RouteScope::Universe, RouteFlags::Onlink));
    assert!(last.attributes.contains(&RouteAttribute::Priority(7)), "{last:?}");
    assert!(last.attributes.contains(&RouteAttribute::Metrics(vec![RouteMetric::Mtu(1300)])), "{last:?}");
    assert!(!last.attributes.iter().any(|attribute| matches!(attribute, RouteAttribute::Oif(_))), "{last:?}");
    assert_eq!(names(&interface.neighbours), ["169.254.1.1"]);
}

#[test]
fn an_ipv6_address_that_is_deprecated_stays_so() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    pod.inside(async |handle| {
        let index = index(&handle, "eth0").await;
        for (last, preferred) in [(5, 0), (6, 1000)] {
            let mut times = CacheInfo::default();
            (times.ifa_preferred, times.ifa_valid) = (preferred, u32::MAX);
            let ip = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last);
            let mut request = handle.address().add(index, ip.into(), 64);
            request.message_mut().attributes.push(AddressAttribute::CacheInfo(times));
            request.execute().await.unwrap();
        }
    });
    let addresses = pod.descriptions().remove(0).addresses;
    let times = |name: &str| {
        let found = addresses.iter().find(|address| address.what == name).unwrap();
        let attributes = AddressMessage::parse(&found.body[..]).unwrap().attributes.into_iter();
        let mut times = attributes.filter_map(|attribute| match attribute {
            AddressAttribute::CacheInfo(times) => Some((times.ifa_preferred, times.ifa_valid, times.cstamp)),
            _ => None,
        });
        times.next()
    };
    assert_eq!((times("fd00::5/64"), times("fd00::6/64")), (Some((0, u32::MAX, 0)), None));
}

#[test]
fn a_route_belongs_to_its_interface() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    pod.veth("eth1", &outside, "other");
    // The taps are the VMM's.
    pod.veth(TAP, &outside, "guest");
    pod.veth(&CardNumber(3).tap(), &outside, "guest3");
    pod.inside(async |handle| {
        for (name, third) in [("eth0", 9), ("eth1", 8)] {
            let route = RouteMessageBuilder::<Ipv4Addr>::new().output_interface(index(&handle, name).await);
            let route = route.destination_prefix(Ipv4Addr::new(10, third, 0, 0), 16);
            handle.route().add(route.build()).execute().await.unwrap();
        }
    });
    let descriptions = pod.descriptions();
    let names = descriptions.iter().map(|interface| (interface.name.as_str(), names(&interface.routes)));
    assert_eq!(names.collect::<Vec<_>>(), [("eth0", vec!["10.9.0.0/16"]), ("eth1", vec!["10.8.0.0/16"])]);
}

#[test]
fn what_a_pod_cannot_have_yet_is_refused_by_name() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    let route = |change: fn(&mut RouteMessage)| {
        pod.inside(async |handle| {
            let route = RouteMessageBuilder::<Ipv4Addr>::new().output_interface(index(&handle, "eth0").await);
            let mut route = route.destination_prefix(Ipv4Addr::new(10, 9, 0, 0), 16).build();
            change(&mut route);
            handle.route().add(route).execute().await.unwrap();
        });
    };
    route(|route| route.header.kind = RouteType::Multicast);
    let refused = pod.scan().unwrap().interfaces.remove(0).described.unwrap_err();
    let expected = "interface eth0: route 10.9.0.0/16: the type Multicast is not implemented";
    assert_eq!(refused.to_string(), expected);
    let refused = |attribute: RuleAttribute| {
        pod.rule(AddressFamily::Inet, 77, 7, vec![attribute]);
        let refused = pod.scan().unwrap().routing.unwrap_err().to_string();
        pod.inside(async |handle| {
            let rules: Vec<_> = handle.rule().get(IpVersion::V4).execute().try_collect().await.unwrap();
            let rule = rules.into_iter().find(|rule| rule.attributes.contains(&RuleAttribute::Table(7)));
            handle.rule().del(rule.unwrap()).execute().await.unwrap();
        });
        refused
    };
    let expected =
        "the pod's network namespace: rule 77: from all lookup 7: suppress_ifgroup 5 is not implemented";
    assert_eq!(refused(RuleAttribute::SuppressIfGroup(5)), expected);
    let expected = "the pod's network namespace: rule 77: from all lookup 7: tun_id 9 is not implemented";
    assert_eq!(refused(RuleAttribute::TunId(9)), expected);
    for number in 1..=MOST {
        pod.veth(&format!("eth{number}"), &outside, &format!("lan{number}"));
    }
    let expected = "the pod's network namespace has the interfaces eth0, eth1, eth2, eth3, eth4, eth5, eth6, \
                    eth7, eth8; at most 8 are supported";
    assert_eq!(pod.scan().unwrap_err().to_string(), expected);
}

/// Makes a macvlan of `parent` in `at` that is in `pod`.
fn macvlan(at: &Pod, parent: &str, pod: &Pod, name: &str) {
    at.inside(async |handle| {
        let link = LinkMacVlan::new(name, index(&handle, parent).await, MacVlanMode::Bridge);
        let added = handle.link().add(link.setns_by_pid(pod.pid()).build()).execute().await;
        added.expect("this test needs macvlan interfaces: modprobe macvlan");
    });
}

#[test]
fn an_interface_on_top_of_another_one_of_the_namespace_is_refused_by_name() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    // Both ends are the pod's. Neither is below the other.
    pod.veth("one", &pod, "two");
    macvlan(&outside, "lan", &pod, "given");
    pod.inside(async |handle| handle.link().add(LinkBridge::new("alone").build()).execute().await.unwrap());
    assert_eq!(pod.descriptions().len(), 5);
    macvlan(&pod, "eth0", &pod, "upper");
    pod.inside(async |handle| {
        let port = LinkUnspec::new_with_name("one").controller(index(&handle, "alone").await).build();
        handle.link().set(port).execute().await.unwrap();
    });
    let interfaces = pod.scan().unwrap().interfaces.into_iter();
    let refused = interfaces.filter_map(|found| Some(found.described.err()?.to_string()));
    let mut refused: Vec<_> = refused.collect();
    refused.sort();
    assert_eq!(refused.len(), 2, "{refused:?}");
    let begin = |text: &str| format!("interface {text} of the same network namespace");
    assert!(refused[0].starts_with(&begin("alone is stacked on one")), "{refused:?}");
    assert!(refused[1].starts_with(&begin("upper is stacked on eth0")), "{refused:?}");
}

#[test]
fn rules_are_those_of_the_namespace_in_one_form() {
    use RuleAttribute as A;
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    assert_eq!(pod.scan().unwrap().routing.unwrap(), Routing::default());
    let source = Ipv4Addr::new(10, 1, 2, 3);
    pod.rule(AddressFamily::Inet, 100, 1000, vec![A::Source(source.into())]);
    pod.rule(AddressFamily::Inet, 101, 254, vec![A::FwMark(0x10), A::FwMask(0xf0), A::SuppressPrefixLen(0)]);
    let prefix = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0);
    pod.rule(AddressFamily::Inet6, 102, 9, vec![A::Destination(prefix.into()), A::Iifname("eth0".into())]);
    // The rule for addresses of the host itself moves behind them, as Cilium has it.
    pod.rule(AddressFamily::Inet, 200, 255, Vec::new());
    pod.inside(async |handle| {
        let rules: Vec<_> = handle.rule().get(IpVersion::V4).execute().try_collect().await.unwrap();
        handle.rule().del(rules[0].clone()).execute().await.unwrap();
    });
    let routing = pod.scan().unwrap().routing.unwrap();
    let expected = [
        "100: from 10.1.2.3/32 lookup 1000",
        "101: from all fwmark 0x10 lookup 254 suppress_prefixlength 0",
        "200: from all lookup 255",
        "32766: from all lookup 254",
        "32767: from all lookup 253",
        "0: from all lookup 255",
        "102: from all to fd00::/64 iif eth0 lookup 9",
        "32766: from all lookup 254",
    ];
    assert_eq!(names(&routing.rules), expected);
    // Those of a new namespace are not in the way of a comparison.
    let defaults = Routing::default().rules;
    assert!(routing.rules[3..6].iter().chain(&routing.rules[7..]).all(|rule| defaults.contains(rule)));
    let marked = RuleMessage::parse(&routing.rules[1].body[..]).unwrap();
    for attribute in [A::FwMark(0x10), A::FwMask(0xf0), A::SuppressPrefixLen(0), A::Priority(101)] {
        assert!(marked.attributes.contains(&attribute), "{marked:?}");
    }
}

#[test]
fn routes_of_other_tables_and_of_no_interface_are_there() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    pod.inside(async |handle| {
        let index = index(&handle, "eth0").await;
        let address = Ipv4Addr::new(10, 1, 2, 3);
        handle.address().add(index, address.into(), 24).execute().await.unwrap();
        let ipv6 = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 5);
        handle.address().add(index, ipv6.into(), 64).execute().await.unwrap();
        // What the CNI plugin sbr does: the kernel's own routes go to another table, with the protocol that they have.
        let routes: Vec<_> =
            handle.route().get(RouteMessage::default()).execute().try_collect().await.unwrap();
        let moved = |route: &&RouteMessage| {
            let name = scan::name_of_route(route);
            route.header.table == 254 && ["10.1.2.0/24", "fd00::/64"].contains(&name.as_str())
        };
        let moved: Vec<_> = routes.iter().filter(moved).collect();
        assert_eq!(moved.len(), 2, "{routes:?}");
        for route in moved {
            handle.route().del(route.clone()).execute().await.unwrap();
            let mut route = route.clone();
            route
                .attributes
                .retain(|it| !matches!(it, RouteAttribute::Table(_) | RouteAttribute::CacheInfo(_)));
            route.header.table = 100;
            handle.route().add(route).execute().await.unwrap();
        }
        let gateway = RouteMessageBuilder::<Ipv4Addr>::new().output_interface(index);
        let gateway = gateway.gateway(Ipv4Addr::new(10, 1, 2, 1)).table_id(100).build();
        handle.route().add(gateway).execute().await.unwrap();
        let mut dropped = RouteMessageBuilder::<Ipv4Addr>::new().table_id(1000).build();
        dropped.header.kind = RouteType::Unreachable;
        handle.route().add(dropped).execute().await.unwrap();
    });
    let Scan { mut interfaces, routing, .. } = pod.scan().unwrap();
    let interface = interfaces.remove(0).described.unwrap();
    let routes: Vec<_> =
        interface.routes.iter().map(|route| RouteMessage::parse(&route.body[..]).unwrap()).collect();
    assert_eq!(names(&interface.routes), ["10.1.2.0/24", "fd00::/64", "default via 10.1.2.1"]);
    assert!(routes.iter().all(|route| route.header.table == 100), "{routes:?}");
    assert_eq!(names(&interface.absent_routes), ["10.1.2.0/24", "fd00::/64"]);
    assert_eq!(names(&routing.unwrap().routes), ["unreachable default"]);
    // An address that is there tells which route the kernel has added for it.
    let kernels: Vec<_> = interface.addresses.iter().filter_map(connected_route).collect();
    assert_eq!(kernels[..2], interface.absent_routes[..]);
}

#[test]
fn addresses_of_the_loopback_interface_are_those_that_were_added() {
    let pod = Pod::new();
    pod.bring_loopback_up();
    assert_eq!(pod.scan().unwrap().routing.unwrap(), Routing::default());
    let loopback = pod.inside(async |handle| {
        let loopback = index(&handle, "lo").await;
        let ips = [
            (IpAddr::from(Ipv4Addr::new(10, 9, 9, 9)), 32),
            (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9).into(), 128),
        ];
        for (ip, prefix) in ips {
            handle.address().add(loopback, ip, prefix).execute().await.unwrap();
        }
        loopback
    });
    let alone = pod.scan().unwrap().routing.unwrap();
    assert_eq!(names(&alone.addresses), ["10.9.9.9/32", "fd00::9/128"]);
    let given = AddressMessage::parse(&alone.addresses[0].body[..]).unwrap();
    assert_eq!(given.header.index, loopback);
    let outside = Pod::new();
    pod.veth("eth0", &outside, "lan");
    assert_eq!(pod.scan().unwrap().routing.unwrap(), alone);
}

#[test]
fn too_many_rules_are_refused_with_their_number() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    for number in 0..u32::try_from(routing::MOST_RULES).unwrap() {
        pod.rule(AddressFamily::Inet, 1000 + number, 7, Vec::new());
    }
    let refused = pod.scan().unwrap().routing.unwrap_err().to_string();
    assert_eq!(refused, "the pod's network namespace has 1029 rules; at most 1024 are supported");
}

/// Where the kernel says of a parameter what it is in the namespace of this thread.
fn place_of(name: &str) -> String {
    format!("{DIRECTORY}/{name}")
}

/// Sets kernel parameters in a namespace.
fn set(pod: &Pod, parameters: &[(&str, &str)]) {
    pod.inside(async |_| {
        parameters.iter().for_each(|(name, value)| fs::write(place_of(name), value).unwrap())
    });
}

/// The parameters that a guest would get of the namespace and of an interface, and those of the interface itself.
async fn parameters_of(pod: &Pod, interface: &str) -> Vec<(String, String)> {
    let FirstScan { scan, mut parameters, .. } = scan_and_watch(pod.process(), ()).await.unwrap();
    let mut all = parameters.take_those_of_namespace();
    if let Some(found) = scan.interfaces.iter().find(|found| found.name == interface) {
        all.extend(parameters.of_interface(interface, &found.parameters));
    }
    assert!(parameters.take_those_of_namespace().is_empty());
    all.into_iter().map(|parameter| (parameter.name, parameter.value)).collect()
}

fn owned(parameters: &[(&str, &str)]) -> Vec<(String, String)> {
    parameters.iter().map(|(name, value)| (String::from(*name), String::from(*value))).collect()
}

#[tokio::test]
async fn parameters_of_the_namespace_and_its_interfaces_are_those_that_were_set() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0.7", &outside, "lan");
    let before = parameters_of(&pod, "eth0.7").await;
    let ports: Vec<_> = (0..60).map(|number| (20000 + 2 * number).to_string()).collect();
    let wanted = [
        ("core/somaxconn", "77"),
        ("ipv4/ip_local_port_range", "2000\t3000"),
        ("ipv4/ip_local_reserved_ports", &ports.join(",")),
        ("ipv4/conf/all/arp_announce", "1"),
        ("ipv4/conf/default/rp_filter", "2"),
        ("ipv4/conf/lo/log_martians", "1"),
        ("ipv4/conf/eth0.7/arp_notify", "1"),
        ("ipv6/conf/eth0.7/accept_ra", "0"),
        ("ipv6/conf/eth0.7/keep_addr_on_down", "1"),
    ];
    set(&pod, &wanted);
    let found = parameters_of(&pod, "eth0.7").await;
    let new: Vec<_> = found.into_iter().filter(|parameter| !before.contains(parameter)).collect();
    // The kernel also changes interfaces that have no address. A guest's interface begins with the new value.
    let mut expected = owned(&wanted);
    expected.insert(6, ("ipv4/conf/lo/rp_filter".into(), "2".into()));
    assert_eq!(new, expected);
}

#[tokio::test]
async fn forwarding_is_one_parameter_where_the_kernel_makes_the_others_of_it() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    set(&pod, &[("ipv4/ip_forward", "0"), ("ipv4/conf/all/accept_redirects", "1")]);
    let before = parameters_of(&pod, "eth0").await;
    set(&pod, &[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")]);
    let new = async || {
        let found = parameters_of(&pod, "eth0").await;
        found.into_iter().filter(|parameter| !before.contains(parameter)).collect::<Vec<_>>()
    };
    let both = [("ipv4/conf/all/forwarding", "1"), ("ipv6/conf/all/forwarding", "1")];
    assert_eq!(new().await, owned(&both));
    let others = [
        ("ipv4/conf/all/accept_redirects", "1"),
        ("ipv4/conf/default/forwarding", "0"),
        ("ipv4/conf/lo/forwarding", "0"),
    ];
    set(&pod, &others);
    let [ipv4, ipv6] = both;
    let [redirects, default, loopback] = others;
    let eth0 = ("ipv4/conf/eth0/forwarding", "1");
    assert_eq!(new().await, owned(&[ipv4, redirects, default, loopback, ipv6, eth0]));
}

#[tokio::test]
async fn a_list_that_is_too_long_is_left_out() {
    let pod = Pod::new();
    let name = "ipv4/ip_local_reserved_ports";
    let ports: Vec<_> = (0..300).map(|number| (20000 + 2 * number).to_string()).collect();
    set(&pod, &[(name, &ports.join(","))]);
    assert!(parameters_of(&pod, "").await.iter().all(|(found, _)| found != name));
}

#[test]
fn parameters_of_interfaces_are_where_the_kernel_sends_them() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    pod.inside(async |handle| {
        for (family, list) in FAMILIES {
            for parameter in list {
                let name = place_of(&format!("{family}/conf/eth0/{}", parameter.name));
                let other = if parameter.name == "hop_limit" { "2" } else { "0" };
                for number in ["1", other, "1"] {
                    fs::write(&name, number).unwrap();
                    let found = OfInterface::of(&link(&handle, "eth0").await);
                    let found = found.value(family, parameter).unwrap();
                    assert_eq!(found, number, "{family} {}", parameter.name);
                }
            }
        }
    });
}

#[tokio::test]
async fn what_changes_later_is_noticed() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    let FirstScan { scan, mut watch, .. } = scan_and_watch(pod.process(), ()).await.unwrap();
    let eth0 = scan.interfaces[0].index;
    let patience = Duration::from_secs(20);
    let address = || {
        pod.inside(async |handle| {
            let addresses = handle.address();
            addresses.add(eth0, Ipv4Addr::new(10, 1, 2, 3).into(), 24).execute().await.unwrap();
        });
    };
    let added = || pod.veth("eth1", &outside, "other");
    let removed = || {
        pod.inside(async |handle| {
            handle.link().del(index(&handle, "eth1").await).execute().await.unwrap();
        });
    };
    let rule = || pod.rule(AddressFamily::Inet6, 77, 7, Vec::new());
    let gateway = IpAddr::from(Ipv4Addr::new(10, 1, 2, 1));
    let neighbour = |state| {
        pod.inside(async |handle| {
            let neighbour = handle.neighbours().add(eth0, gateway).link_layer_address(&PEER_MAC);
            neighbour.state(state).replace().execute().await.unwrap();
        });
    };
    let permanent = || neighbour(NeighbourState::Permanent);
    let changes: [&dyn Fn(); 5] = [&address, &added, &removed, &rule, &permanent];
    for change in changes {
        change();
        tokio::time::timeout(patience, watch.changed()).await.unwrap().unwrap();
    }
    // The guest has it, until it is permanent no more.
    watch.expect([(eth0, gateway)].into_iter());
    neighbour(NeighbourState::Stale);
    tokio::time::timeout(patience, watch.changed()).await.unwrap().unwrap();
    watch.expect([].into_iter());
    while tokio::time::timeout(Duration::from_secs(3), watch.changed()).await.is_ok() {}
    // The kernel tells of these all the time.
    for _ in 0..3 {
        neighbour(NeighbourState::Reachable);
        neighbour(NeighbourState::Stale);
    }
    assert!(tokio::time::timeout(Duration::from_secs(3), watch.changed()).await.is_err());
    // An interface comes with several messages, and IPv6 addresses some time later. Then there is nothing more.
    while tokio::time::timeout(Duration::from_secs(3), watch.changed()).await.is_ok() {}
    pod.veth(TAP, &outside, "guest");
    pod.remove(TAP);
}

#[tokio::test]
async fn a_guest_that_changes_its_tap_without_end_hides_nothing_and_has_scans_made_now_and_then() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.inside(async |_| fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap());
    pod.veth("eth0", &outside, "lan");
    pod.veth(TAP, &outside, "guest");
    let FirstScan { scan, mut watch, .. } = scan_and_watch(pod.process(), ()).await.unwrap();
    let eth0 = scan.interfaces[0].index;
    let address = |last| {
        pod.inside(async |handle| {
            let addresses = handle.address();
            addresses.add(eth0, Ipv4Addr::new(10, 1, 2, last).into(), 24).execute().await.unwrap();
        });
    };
    // More than the kernel keeps while nobody reads.
    let flood = || {
        pod.inside(async |handle| {
            let tap = index(&handle, TAP).await;
            for mtu in 1000..1400 {
                let changed = LinkUnspec::new_with_index(tap).mtu(mtu).build();
                handle.link().set(changed).execute().await.unwrap();
            }
        });
    };
    let patience = Duration::from_secs(20);
    flood();
    // The kernel tells nobody of it.
    address(3);
    tokio::time::timeout(patience, watch.changed()).await.unwrap().unwrap();
    let begun = Instant::now();
    flood();
    address(4);
    tokio::time::timeout(patience, watch.changed()).await.unwrap().unwrap();
    assert!(begun.elapsed() >= watch::AFTER_LOSS, "{:?}", begun.elapsed());
    // What the kernel does tell of meanwhile does not wait.
    let begun = Instant::now();
    flood();
    let others = async {
        for last in 5..250 {
            address(last);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        changed = watch.changed() => changed.unwrap(),
        () = others => panic!("nothing was noticed"),
    }
    assert!(begun.elapsed() < watch::AFTER_LOSS, "{:?}", begun.elapsed());
}

#[test]
fn a_card_has_a_tap_and_an_address_of_its_own() {
    assert_eq!((CardNumber(0).tap(), CardNumber(0).mac()), (TAP.into(), "02:00:00:00:00:01".into()));
    assert_eq!((CardNumber(7).tap(), CardNumber(7).mac()), (format!("{TAP}7"), "02:00:00:00:00:08".into()));
    assert!(is_tap(TAP) && is_tap(&CardNumber(7).tap()) && !is_tap("veth-bulkhead-x") && !is_tap("eth0"));
    assert!(is_tap("tap-bulkhead") && is_tap("tap-bulkhead3") && !is_tap("veth0"));
    // The kernel's limit, IFNAMSIZ, is 16 with a zero at the end.
    assert!(CardNumber(MOST as u8 - 1).tap().len() < 16);
}

#[test]
fn the_hosts_own_network_is_not_taken() {
    let own = check(Path::new("/proc/self/ns/net")).unwrap_err();
    assert!(own.to_string().contains("/proc/self/ns/net is the host's own network namespace"), "{own}");
    check(&Pod::new().path()).unwrap();
    assert!(matches!(check(Path::new("/no/such/netns")), Err(NetworkError::Namespace { .. })));
}

/// Bytes that came in at an interface.
async fn received(handle: &Handle, name: &str) -> u64 {
    let link = link(handle, name).await;
    let bytes = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Stats64(stats) => Some(stats.rx_bytes),
        _ => None,
    });
    bytes.unwrap()
}

/// Sends packets out at one interface and expects them at the other.
fn crosses(pod: &Pod, from: &str, to: &str, remote: Ipv4Addr) {
    const PACKETS: u64 = 20;
    const LEN: usize = 1000;
    pod.inside(async |handle| {
        let out = index(&handle, from).await;
        let mut local = remote.octets();
        local[3] += 1;
        handle.address().add(out, IpAddr::from(local), 24).execute().await.unwrap();
        let neighbours = handle.neighbours();
        neighbours.add(out, remote.into()).link_layer_address(&MAC).execute().await.unwrap();
        let before = received(&handle, to).await;
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        for _ in 0..PACKETS {
            socket.send_to(&[0; LEN], (remote, 7)).unwrap();
        }
        while received(&handle, to).await - before < PACKETS * LEN as u64 {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn packets_cross_both_ways_until_the_redirects_are_removed() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    // Any interface will do as a tap.
    pod.veth(TAP, &outside, "guest");
    let eth0 = pod.inside(async |handle| index(&handle, "eth0").await);
    redirect::install(&pod.netns(), eth0, TAP, false).unwrap();
    crosses(&outside, "lan", "guest", Ipv4Addr::new(10, 1, 2, 3));
    crosses(&outside, "guest", "lan", Ipv4Addr::new(10, 3, 4, 5));

    assert!(redirect::install(&pod.netns(), eth0, TAP, false).is_err(), "installed twice");
    // The tap ends with its VMM.
    pod.remove(TAP);
    for _ in 0..2 {
        remove_redirect(&pod.path(), "eth0").unwrap();
    }
    pod.veth(TAP, &outside, "guest");
    redirect::install(&pod.netns(), eth0, TAP, false).unwrap();
    for _ in 0..2 {
        redirect::uninstall(&pod.netns(), Some(eth0), TAP).unwrap();
    }
    redirect::install(&pod.netns(), eth0, TAP, false).unwrap();
}

#[test]
fn an_answer_to_a_dhcp_client_of_the_host_reaches_it_and_the_guest() {
    const TEXT: &[u8] = b"this is the lease";
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    let eth0 = pod.inside(async |handle| index(&handle, "eth0").await);
    let make = || {
        let socket = rustix::net::socket(AF::PACKET, SocketType::DGRAM, Some(rustix::net::eth::IP)).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(20))).unwrap();
        let stack = UdpSocket::bind("0.0.0.0:68").unwrap();
        stack.set_nonblocking(true).unwrap();
        Ok((tap::create(TAP, 1).map_err(failed("making a tap"))?.remove(0), File::from(socket), stack))
    };
    let (mut guest, mut client, stack) = netns::visit(&pod.netns(), make).unwrap();
    redirect::install(&pod.netns(), eth0, TAP, false).unwrap();
    let remote = Ipv4Addr::new(10, 1, 2, 3);
    pod.inside(async |handle| handle.address().add(eth0, remote.into(), 24).execute().await.unwrap());
    outside.inside(async |handle| {
        let lan = index(&handle, "lan").await;
        handle.address().add(lan, Ipv4Addr::new(10, 1, 2, 4).into(), 24).execute().await.unwrap();
        handle.neighbours().add(lan, remote.into()).link_layer_address(&MAC).execute().await.unwrap();
        let server = UdpSocket::bind("0.0.0.0:67").unwrap();
        let other = UdpSocket::bind("0.0.0.0:66").unwrap();
        for (socket, text, port) in [
            (&server, &b"before"[..], 67),
            (&server, b"other", 69),
            (&other, b"foreign", 68),
            (&server, TEXT, 68),
        ] {
            socket.send_to(text, (remote, port)).unwrap();
        }
    });
    // What comes first is what was asked for.
    let mut packet = [0; 2000];
    let length = client.read(&mut packet).unwrap();
    assert!(packet[..length].ends_with(TEXT), "{:?}", &packet[..length]);
    let begun = Instant::now();
    let mut texts = Vec::new();
    while texts.len() < 4 {
        assert!(begun.elapsed() < Duration::from_secs(20), "{texts:?}");
        match guest.read(&mut packet) {
            Ok(length) => {
                let of_server = [&b"before"[..], b"other", b"foreign", TEXT].into_iter();
                texts.extend(of_server.filter(|text| packet[..length].ends_with(text)));
            }
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
    assert_eq!(texts, [&b"before"[..], b"other", b"foreign", TEXT]);
    // The IP stack of a host that can mark packets has none of them.
    let filters = pod.inside(async |handle| {
        handle.traffic_filter(eth0 as i32).get().ingress().execute().try_collect::<Vec<_>>().await.unwrap()
    });
    let is_marked = format!("{filters:?}").contains("skbedit");
    assert_eq!(stack.recv(&mut packet).is_err(), is_marked);
}

/// The kinds of the root qdiscs of an interface and of its queues.
fn qdiscs(pod: &Pod, name: &str) -> Vec<String> {
    all_qdiscs(pod, name).into_iter().filter(|kind| kind != "ingress").collect()
}

fn all_qdiscs(pod: &Pod, name: &str) -> Vec<String> {
    pod.inside(async |handle| {
        let index = index(&handle, name).await;
        let found: Vec<_> = handle.qdisc().get().execute().try_collect().await.unwrap();
        let of_it = found.into_iter().filter(|qdisc: &TcMessage| qdisc.header.index == index as i32);
        let kind = |qdisc: TcMessage| {
            qdisc.attributes.into_iter().find_map(|attribute| match attribute {
                TcAttribute::Kind(kind) => Some(kind),
                _ => None,
            })
        };
        of_it.filter_map(kind).collect()
    })
}

#[test]
fn a_tap_with_several_queues_has_no_qdisc_for_each() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    let eth0 = pod.inside(async |handle| index(&handle, "eth0").await);
    let create = |queues| tap::create(TAP, queues).map_err(failed("making a tap"));
    let tap = |queues| netns::visit(&pod.netns(), || create(queues)).unwrap();
    let two = tap(2);
    for _ in 0..2 {
        redirect::install(&pod.netns(), eth0, TAP, false).unwrap();
        assert_eq!(qdiscs(&pod, TAP), ["noqueue"]);
        redirect::uninstall(&pod.netns(), Some(eth0), TAP).unwrap();
    }
    drop(two);
    // With one queue it has what the kernel gives it.
    let _one = tap(1);
    redirect::install(&pod.netns(), eth0, TAP, false).unwrap();
    assert!(!qdiscs(&pod, TAP).contains(&"noqueue".to_owned()), "{:?}", qdiscs(&pod, TAP));
}

#[test]
fn a_tap_with_several_queues_holds_no_more_packets_than_one_with_a_single_queue() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    let eth0 = pod.inside(async |handle| index(&handle, "eth0").await);
    let remote = Ipv4Addr::new(10, 1, 2, 3);
    outside.inside(async |handle| {
        let lan = index(&handle, "lan").await;
        handle.address().add(lan, Ipv4Addr::new(10, 1, 2, 4).into(), 24).execute().await.unwrap();
        handle.neighbours().add(lan, remote.into()).link_layer_address(&MAC).execute().await.unwrap();
    });
    let held = |queues| {
        let create = || tap::create(TAP, queues).map_err(failed("making a tap"));
        let tap = netns::visit(&pod.netns(), create).unwrap();
        let has_last = |has| tap.get(3).is_none_or(|last| tap::set_attached(last, has).is_ok());
        // One of them is not used at that moment.
        assert!(has_last(false));
        redirect::install(&pod.netns(), eth0, TAP, false).unwrap();
        assert!(has_last(true));
        outside.inside(async |_| {
            for _ in 0..100 {
                let flow = UdpSocket::bind("0.0.0.0:0").unwrap();
                (0..60).for_each(|_| assert_eq!(flow.send_to(b"text", (remote, 7)).unwrap(), 4));
            }
        });
        let packets = |mut queue: &File| std::iter::from_fn(|| queue.read(&mut [0; 1000]).ok()).count();
        let held: Vec<_> = tap.iter().map(packets).collect();
        redirect::uninstall(&pod.netns(), Some(eth0), TAP).unwrap();
        held
    };
    let (one, several) = (held(1), held(4));
    assert!(several.iter().all(|held| (200..=250).contains(held)), "{several:?}");
    assert!(several.iter().sum::<usize>() <= one[0], "{several:?} {one:?}");
}

#[tokio::test]
async fn a_connection_that_is_given_up_is_cut_when_it_is_made() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    let eth0 = pod.inside(async |handle| index(&handle, "eth0").await);
    let dir = tempfile::tempdir().unwrap();
    let mut given_up = 0;
    // One of these times is between the journal's entry and the last redirect.
    for microseconds in (0..3_000).step_by(125) {
        pod.veth(TAP, &outside, "guest");
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let operation = Arc::new(());
        let path = pod.path();
        let connection = Connection {
            index: eth0,
            name: "eth0".into(),
            card: CardNumber(0),
            netns: Some(&path),
            passes_replies: false,
        };
        let connected = connect(pod.process(), connection, &mut journal, Arc::clone(&operation));
        // A timer of the runtime is coarser than this takes.
        let mut connected = Box::pin(connected);
        _ = futures::poll!(&mut connected);
        thread::sleep(Duration::from_micros(microseconds));
        if futures::poll!(&mut connected).is_pending() {
            given_up += 1;
        }
        drop(connected);
        // A tap ends with its VMM, which is ended first.
        pod.remove(TAP);
        journal.undo().unwrap();
        while Arc::strong_count(&operation) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        pod.veth(TAP, &outside, "guest");
        redirect::install(&pod.netns(), eth0, TAP, false)
            .unwrap_or_else(|e| panic!("{microseconds} us: {e}"));
        pod.remove(TAP);
        remove_redirect(&path, "eth0").unwrap();
    }
    assert!(given_up > 0);
}

/// The kinds of the qdiscs that filter what arrives at an interface.
fn ingress_qdiscs(pod: &Pod, name: &str) -> Vec<String> {
    let kinds = all_qdiscs(pod, name).into_iter();
    kinds.filter(|kind| ["ingress", "clsact"].contains(&kind.as_str())).collect()
}

#[test]
fn what_another_program_has_at_an_interface_is_refused_by_name_and_stays() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    pod.veth("other", &outside, "elsewhere");
    pod.veth(TAP, &outside, "guest");
    let eth0 = pod.inside(async |handle| index(&handle, "eth0").await);
    let other = pod.inside(async |handle| index(&handle, "other").await);
    let refused = || pod.scan().unwrap().interfaces.remove(0).described.err().map(|error| error.to_string());
    let is_refused = || {
        let refused = refused().unwrap();
        assert!(refused.starts_with("interface eth0 already has an ingress or clsact qdisc"), "{refused}");
    };
    for kind in ["ingress", "clsact"] {
        pod.inside(async |handle| {
            let mut message = TcMessage::with_index(eth0 as i32);
            (message.header.parent, message.header.handle) = (TcHandle::INGRESS, redirect::INGRESS.into());
            message.attributes = vec![TcAttribute::Kind(kind.into())];
            let message = RouteNetlinkMessage::NewQueueDiscipline(message);
            replies::create(&handle, message).await.expect("this test needs clsact: modprobe sch_ingress");
        });
        is_refused();
        pod.inside(async |handle| {
            let filter = handle.traffic_filter(eth0 as i32).add().parent(0xffff_fff2);
            filter.protocol(3_u16.to_be()).redirect(other).unwrap().execute().await.unwrap();
        });
        is_refused();
        // It may come after the scan, and before the interface is connected.
        assert!(redirect::install(&pod.netns(), eth0, TAP, false).is_err());
        redirect::uninstall(&pod.netns(), Some(eth0), TAP).unwrap();
        remove_redirect(&pod.path(), "eth0").unwrap();
        assert_eq!(ingress_qdiscs(&pod, "eth0"), [kind]);
        pod.inside(async |handle| redirect::remove_ingress(&handle, eth0).await.unwrap());
    }
    // What is the pod's own is not refused by the next scan, though another program adds to it.
    redirect::install(&pod.netns(), eth0, TAP, false).unwrap();
    assert_eq!(refused(), None);
    pod.inside(async |handle| {
        let filter = handle.traffic_filter(eth0 as i32).add().parent(0xffff_fff2);
        filter.protocol(0x0008).redirect(other).unwrap().execute().await.unwrap();
    });
    assert_eq!(refused(), None);
    pod.remove(TAP);
    is_refused();
    remove_redirect(&pod.path(), "eth0").unwrap();
    assert_eq!((refused(), ingress_qdiscs(&pod, "eth0")), (None, Vec::new()));
}

#[tokio::test]
async fn the_redirects_of_a_pod_that_runs_stay_when_a_former_one_is_removed_again() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    pod.veth(TAP, &outside, "guest");
    let eth0 = pod.inside(async |handle| index(&handle, "eth0").await);
    redirect::install(&pod.netns(), eth0, TAP, false).unwrap();
    remove_redirect(&pod.path(), "eth0").unwrap();
    crosses(&outside, "lan", "guest", Ipv4Addr::new(10, 1, 2, 3));
    // A failed attempt of another card.
    pod.veth("veth-bulkhead1", &outside, "guest1");
    redirect::uninstall(&pod.netns(), Some(eth0), "veth-bulkhead1").unwrap();
    assert_eq!(ingress_qdiscs(&pod, "eth0"), ["ingress"]);
    // One that was not made to the end.
    pod.remove(TAP);
    remove_redirect(&pod.path(), "eth0").unwrap();
    pod.inside(async |handle| handle.qdisc().add(eth0 as i32).ingress().execute().await.unwrap());
    remove_redirect(&pod.path(), "eth0").unwrap();
    assert!(ingress_qdiscs(&pod, "eth0").is_empty());
}

#[tokio::test]
async fn a_namespace_of_a_pod_that_an_older_version_has_started_is_refused() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    pod.veth(TAP, &outside, "guest");
    assert!(scan_and_watch(pod.process(), ()).await.is_ok());
    pod.veth("tap-bulkhead", &outside, "former");
    let refused = scan_and_watch(pod.process(), ()).await.err().unwrap().to_string();
    let begin = "another microVM is in the pod's network namespace, and its interface is tap-bulkhead";
    assert!(refused.starts_with(begin), "{refused}");
    // Programs that are not the VMM's may call theirs what they like.
    pod.remove("tap-bulkhead");
    pod.veth("tap-bulkhead-x", &outside, "former");
    assert!(scan_and_watch(pod.process(), ()).await.is_ok());
}

#[test]
fn nothing_to_cut_is_no_error() {
    let path = {
        let pod = Pod::new();
        remove_redirect(&pod.path(), "eth0").unwrap();
        pod.path()
    };
    remove_redirect(&path, "eth0").unwrap();
    // Where a network namespace was mounted once.
    let file = tempfile::NamedTempFile::new().unwrap();
    remove_redirect(file.path(), "eth0").unwrap();
}

#[test]
fn an_interface_that_is_no_veth_passes_all_multicast_as_long_as_it_is_asked_to() {
    let (pod, outside) = (Pod::new(), Pod::new());
    pod.veth("eth0", &outside, "lan");
    let create = || Ok(tap::create("eth1", 1).expect("this test needs /dev/net/tun"));
    let _other = netns::visit(&pod.netns(), create).unwrap();
    let index = |name| pod.inside(async |handle| index(&handle, name).await);
    // IFLA_ALLMULTI counts those who ask.
    let count = |name| {
        let found = pod.inside(async |handle| link(&handle, name).await);
        let counts = found.attributes.iter().filter_map(|attribute| match attribute {
            LinkAttribute::AllMulticast(count) => Some(*count),
            _ => None,
        });
        counts.sum::<u32>()
    };
    assert!(redirect::pass_multicast(&pod.netns(), index("eth0")).unwrap().is_none());
    let asked = redirect::pass_multicast(&pod.netns(), index("eth1")).unwrap();
    assert!(asked.is_some());
    assert_eq!([count("eth0"), count("eth1")], [0, 1]);
    drop(asked);
    assert_eq!(count("eth1"), 0);
}

/// A name server at 127.0.0.11:53 in the pod: it answers a question with itself and `filling` bytes, and says nothing
/// to "silence".
fn serve_names(pod: &Pod, filling: usize) {
    pod.bring_loopback_up();
    let address = SocketAddr::from(ADDRESS);
    let bind = || Ok((UdpSocket::bind(address).unwrap(), TcpListener::bind(address).unwrap()));
    let (udp, tcp) = netns::visit(&pod.netns(), bind).unwrap();
    let answer = move |question: &[u8]| [question, &vec![7; filling]].concat();
    thread::spawn(move || {
        let mut buffer = [0; 100];
        while let Ok((length, asker)) = udp.recv_from(&mut buffer) {
            if buffer[..length] != *b"silence" {
                udp.send_to(&answer(&buffer[..length]), asker).unwrap();
            }
        }
    });
    thread::spawn(move || {
        while let Ok((mut connection, _)) = tcp.accept() {
            let mut length = [0; 2];
            connection.read_exact(&mut length).unwrap();
            let mut question = vec![0; u16::from_be_bytes(length).into()];
            connection.read_exact(&mut question).unwrap();
            connection.write_all(&with_length(&answer(&question)).unwrap()).unwrap();
        }
    });
}

fn question(number: u32, protocol: Protocol, text: &str) -> Message {
    Message { number, protocol, bytes: text.into() }
}

/// What the agent sees of a name server.
fn ask_in(pod: &Pod) -> (NameServer, DuplexStream) {
    let (agent, shim) = tokio::io::duplex(1 << 20);
    (NameServer::start(pod.process(), shim).unwrap(), agent)
}

async fn answer(agent: &mut DuplexStream) -> Message {
    tokio::time::timeout(Duration::from_secs(20), Message::read(agent, MAX_ANSWER)).await.unwrap().unwrap()
}

#[tokio::test]
async fn what_the_guest_asks_is_asked_in_the_pods_namespace() {
    let pod = Pod::new();
    let listens = |pod: &Pod| {
        let listens = || name_server::listens_here().map_err(failed("reading"));
        netns::visit(&pod.netns(), listens).unwrap()
    };
    assert!(!listens(&pod));
    serve_names(&pod, 60_000);
    assert!(listens(&pod));

    let (server, mut agent) = ask_in(&pod);
    for (number, protocol) in [(1, Protocol::Udp), (u32::MAX, Protocol::Tcp)] {
        question(number, protocol, "question").write(&mut agent).await.unwrap();
        let answer = answer(&mut agent).await;
        assert_eq!((answer.number, answer.protocol, answer.bytes.len()), (number, protocol, 60_008));
    }
    drop(server);
    assert_eq!(agent.read(&mut [0]).await.unwrap(), 0, "the thread ends");
}

#[tokio::test]
async fn a_guest_that_asks_too_much_is_answered_in_part() {
    let pod = Pod::new();
    serve_names(&pod, 0);
    let (_server, mut agent) = ask_in(&pod);
    let count = 2 * MAX_QUESTIONS as u32;
    for number in 0..count {
        question(number, Protocol::Udp, "silence").write(&mut agent).await.unwrap();
    }
    question(count, Protocol::Udp, "question").write(&mut agent).await.unwrap();
    assert_eq!(answer(&mut agent).await, question(count, Protocol::Udp, "question"));
    // Those that nobody answers, but not the ones that others took the places of.
    let mut silent = 0;
    loop {
        let answer = answer(&mut agent).await;
        assert!(answer.bytes.is_empty() && answer.number > MAX_QUESTIONS as u32, "{answer:?}");
        silent += 1;
        if answer.number == count - 1 {
            break;
        }
    }
    assert!(silent < MAX_QUESTIONS, "{silent}");
    // Longer than a question may be: 4,097 bytes.
    agent.write_all(&[0, 0, 0, 0, 0, 0x10, 0x01]).await.unwrap();
    assert_eq!(agent.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test]
async fn without_a_name_server_there_is_no_answer() {
    let pod = Pod::new();
    pod.bring_loopback_up();
    let (_server, mut agent) = ask_in(&pod);
    for protocol in [Protocol::Udp, Protocol::Tcp] {
        question(5, protocol, "question").write(&mut agent).await.unwrap();
        assert_eq!(answer(&mut agent).await, question(5, protocol, ""));
    }
}

#[tokio::test]
async fn connections_to_the_loopback_interface_arrive_with_the_port_that_was_meant() {
    let pod = Pod::new();
    pod.bring_loopback_up();
    let loopback = loopback::Loopback::redirect(pod.process()).await.unwrap();
    let connect = |address: &'static str| {
        let netns = pod.netns();
        tokio::task::spawn_blocking(move || {
            netns::visit(&netns, || std::net::TcpStream::connect(address).map_err(failed("connecting")))
        })
    };
    for address in ["127.0.0.1:7", "[::1]:65535"] {
        let (client, accepted) = tokio::join!(connect(address), loopback.accept());
        client.unwrap().unwrap();
        assert_eq!(accepted.unwrap().1, address.parse().unwrap());
    }
    // Another address of the interface.
    assert!(connect("127.0.0.11:7").await.unwrap().is_err());
    drop(loopback);
    // A thread removes the rules; there is no listener any more.
    assert!(connect("127.0.0.1:7").await.unwrap().is_err());
}
