use std::{
    net::{Ipv4Addr, UdpSocket},
    thread,
    time::Duration,
};

use bulkhead_agent_api::agent::{KernelParameter, NetlinkMessage};
use nix::{net::if_::if_nametoindex, sched::unshare};

use super::*;

/// Does this in a network namespace of its own that has an interface of this name, which is down.
fn apart<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> T {
    let work = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests make network namespaces: run them as root");
        let socket = Socket::open().unwrap();
        socket.add_veth(name).expect("these tests need veth interfaces: modprobe veth");
        socket.set_link(&LinkMessage::new(index_of("veth0")).up(true)).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(work).join().unwrap())
}

fn index_of(name: &str) -> u32 {
    if_nametoindex(name).unwrap()
}

/// Sets up the interface of this name here, in the place of a card.
fn set_up_here(interface: &Interface) -> Result<(), NetworkError> {
    set_up(&Socket::open().unwrap(), index_of(&interface.name), interface)
}

fn message(what: &str, parts: &[&[u8]]) -> NetlinkMessage {
    let mut message = NetlinkMessage::new();
    message.what = what.into();
    message.body = parts.concat();
    message
}

/// 10.1.2.3/24, by 169.254.1.1 to the world.
fn request() -> ConfigureNetworkRequest {
    let mut request = ConfigureNetworkRequest::new();
    request.name = "eth0".into();
    request.card = vec![2, 0, 0, 0, 0, 1];
    request.mac = vec![2, 0, 0, 9, 8, 7];
    request.mtu = 1400;
    request.up = true;
    request.ipv6 = Ipv6::IPV6_AUTOMATIC.into();
    let (ours, gateway): (&[u8], &[u8]) = (&[10, 1, 2, 3], &[169, 254, 1, 1]);
    // struct ifaddrmsg, IFA_ADDRESS, IFA_LOCAL.
    let header = [2, 24, 0, 0, 0, 0, 0, 0];
    request.addresses = vec![message("10.1.2.3/24", &[&header, &[8, 0, 1, 0], ours, &[8, 0, 2, 0], ours])];
    // struct rtmsg of the main table, protocol boot, scope link and universe, unicast; RTA_DST, RTA_GATEWAY.
    let link = [2, 32, 0, 0, 254, 3, 253, 1, 0, 0, 0, 0];
    let default = [2, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0];
    request.routes = vec![
        message("169.254.1.1/32", &[&link, &[8, 0, 1, 0], gateway]),
        message("default via 169.254.1.1", &[&default, &[8, 0, 5, 0], gateway]),
    ];
    // struct ndmsg, NUD_PERMANENT; NDA_DST, NDA_LLADDR.
    let header = [2, 0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 0];
    let mac: &[u8] = &[2, 0, 0, 9, 8, 6, 0, 0];
    request.neighbours =
        vec![message("169.254.1.1", &[&header, &[8, 0, 1, 0], gateway, &[10, 0, 2, 0], mac])];
    request
}

fn interface(change: impl FnOnce(&mut ConfigureNetworkRequest)) -> Result<Interface, NetworkError> {
    let mut request = request();
    change(&mut request);
    Interface::try_from(request)
}

/// A table of the kernel's, of this thread's network namespace.
fn table(name: &str) -> String {
    fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap()
}

#[test]
fn an_interface_becomes_what_it_is_on_the_host() {
    apart("eth0", || {
        set_up_here(&interface(|_| {}).unwrap()).unwrap();
        let (local, remote) = (Ipv4Addr::new(10, 1, 2, 3), Ipv4Addr::new(1, 1, 1, 1));
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect((remote, 7)).unwrap();
        assert_eq!(socket.local_addr().unwrap().ip(), local);
        // Destination, gateway, flags (3: up, by a gateway), mask.
        let routes: Vec<Vec<String>> = table("route")
            .lines()
            .skip(1)
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect();
        assert!(routes.iter().any(|route| route[1..4] == ["00000000", "0101FEA9", "0003"]), "{routes:?}");
        let arp = table("arp");
        let neighbour = arp.lines().find(|line| line.starts_with("169.254.1.1 ")).unwrap();
        assert!(neighbour.contains("02:00:00:09:08:06"), "{neighbour}");
        assert_eq!(fs::read_to_string("/proc/sys/net/ipv6/conf/eth0/mtu").unwrap(), "1400\n");
        // Made of the card's address (RFC 4291, appendix A), when the kernel has seen that the link is up.
        while !table("if_inet6").contains("fe80000000000000000000fffe090807") {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn a_route_that_the_host_has_not_for_an_address_is_removed() {
    apart("eth0", || {
        // struct rtmsg of 10.1.2.0/24 in table main, protocol kernel, scope link; RTA_DST, RTA_PREFSRC.
        let header = [2, 24, 0, 0, 254, 2, 253, 1, 0, 0, 0, 0];
        let absent: &[&[u8]] = &[&header, &[8, 0, 1, 0, 10, 1, 2, 0], &[8, 0, 7, 0, 10, 1, 2, 3]];
        let request = |request: &mut ConfigureNetworkRequest| {
            request.absent_routes = vec![message("10.1.2.0/24", absent)];
        };
        set_up_here(&interface(request).unwrap()).unwrap();
        let routes = table("route");
        let destinations: Vec<_> =
            routes.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
        assert_eq!(destinations, ["00000000", "0101FEA9"]);
    });
}

#[test]
fn ipv6_is_as_on_the_host() {
    for ipv6 in [Ipv6::IPV6_DISABLED, Ipv6::IPV6_GIVEN] {
        apart("eth0", || {
            set_up_here(&interface(|request| request.ipv6 = ipv6.into()).unwrap()).unwrap();
            // Its other end is veth0, which may have an address by now.
            assert!(!table("if_inet6").contains(" eth0\n"), "{}", table("if_inet6"));
        });
    }
}

#[test]
fn an_interface_asks_for_addresses_as_the_one_on_the_host() {
    apart("eth0", || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        // Without ARP a neighbour is there at once, with the state NUD_NOARP, which is not in this table.
        let asks = || {
            socket.send_to(b"text", ("10.1.2.9", 7)).unwrap();
            table("arp").contains("10.1.2.9 ")
        };
        let with = |noarp| interface(|request| request.noarp = noarp).unwrap();
        set_up_here(&with(true)).unwrap();
        assert!(!asks());
        set_up_here(&with(false)).unwrap();
        assert!(asks());
    });
}

#[test]
fn an_interface_that_is_down_stays_down() {
    apart("eth0", || {
        let down = |request: &mut ConfigureNetworkRequest| {
            request.up = false;
            request.routes.clear();
        };
        set_up_here(&interface(down).unwrap()).unwrap();
        assert!(!table("route").contains("eth0"));
    });
}

#[test]
fn what_changes_of_an_interface_changes_alone() {
    apart("eth0", || {
        set_up_here(&interface(|_| {}).unwrap()).unwrap();
        let mut wanted = ChangeNetworkRequest::new();
        wanted.interface = Some(request()).into();
        let interface = wanted.interface.as_mut().unwrap();
        interface.mtu = 1300;
        wanted.removed_routes = std::mem::take(&mut interface.routes);
        wanted.removed_neighbours = std::mem::take(&mut interface.neighbours);
        wanted.removed_addresses = std::mem::take(&mut interface.addresses);
        let ours: &[u8] = &[10, 7, 7, 7];
        let header = [2, 16, 0, 0, 0, 0, 0, 0];
        interface.addresses =
            vec![message("10.7.7.7/16", &[&header, &[8, 0, 1, 0], ours, &[8, 0, 2, 0], ours])];
        let wanted = Change::try_from(wanted).unwrap();
        let socket = Socket::open().unwrap();
        // What is gone already is no error.
        for _ in 0..2 {
            apply(&socket, index_of("eth0"), &wanted).unwrap();
            let routes = table("route");
            let destinations: Vec<_> =
                routes.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
            assert_eq!(destinations, ["0000070A"]);
            assert!(!table("arp").contains("169.254.1.1"));
        }
        assert_eq!(fs::read_to_string("/proc/sys/net/ipv6/conf/eth0/mtu").unwrap(), "1300\n");
        let mut short = ChangeNetworkRequest::new();
        short.interface = Some(request()).into();
        short.removed_addresses = vec![message("x", &[&[0; 7]])];
        assert!(matches!(Change::try_from(short), Err(NetworkError::Invalid { .. })));
    });
}

#[test]
fn what_fails_is_named() {
    let error = apart("eth0", || {
        set_up_here(&interface(|request| drop(request.routes.remove(0))).unwrap()).unwrap_err().to_string()
    });
    let expected =
        "interface eth0: adding the route default via 169.254.1.1: Network is unreachable (os error 101)";
    assert_eq!(error, expected);
    let error = apart("eth0", || card_here(&interface(|_| {}).unwrap()).unwrap_err().to_string());
    let expected =
        "interface \"eth0\": there is no network card with the permanent address [02, 00, 00, 00, 00, 01]";
    assert_eq!(error, expected);
}

#[test]
fn kernel_parameters_are_set_in_their_order() {
    let wanted = [
        ("ipv4/conf/all/forwarding", "1"),
        ("ipv4/conf/default/arp_ignore", "1"),
        ("ipv6/conf/eth0/accept_ra", "0"),
        ("ipv4/conf/eth0/no_such_parameter", "1"),
        ("ipv4/conf/eth0/forwarding", "0"),
    ];
    let parameter = |(name, value): &(&str, &str)| {
        let (name, value) = (String::from(*name), String::from(*value));
        KernelParameter { name, value, ..Default::default() }
    };
    let interface = interface(|request| request.parameters = wanted.iter().map(parameter).collect()).unwrap();
    apart("eth0", || {
        set_up_here(&interface).unwrap();
        for (name, value) in wanted.iter().filter(|(name, _)| !name.ends_with("no_such_parameter")) {
            let found = fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap();
            assert_eq!(found.trim_end(), *value, "{name}");
        }
    });
}

#[test]
fn what_makes_no_sense_is_refused() {
    let parameter = KernelParameter { name: "../kernel/x".into(), ..Default::default() };
    let outside = interface(|request| request.parameters = vec![parameter]);
    assert!(matches!(outside, Err(NetworkError::Parameter(_))));
    let changes: [fn(&mut ConfigureNetworkRequest); 6] = [
        |request| request.card.clear(),
        |request| request.name = String::new(),
        |request| request.name = "../eth0".into(),
        |request| request.mac.truncate(5),
        |request| request.addresses[0].body.truncate(7),
        |request| request.ipv6 = protobuf::EnumOrUnknown::from_i32(3),
    ];
    for change in changes {
        assert!(matches!(interface(change), Err(NetworkError::Invalid { .. })));
    }
}
