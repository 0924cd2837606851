//! The network that a CNI, or whoever else, has made for the container before it starts.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Case;
use crate::command::{Cmd, Finished, wait_until};
use crate::ctr::{Container, Host, Task};
use crate::fixtures::{Replaced, digest, noise, scratch};
use crate::network::{
    Bridge, GATEWAY, GATEWAY6, MTU, Namespace, address, address_in, address6, gateway, ip, mac,
};

/// Of the agent's interface: its crate needs a code generator, and this file nothing.
#[path = "../../../../guest-agent/api/src/network_parameters.rs"]
#[expect(dead_code, unreachable_pub, reason = "it is a module of another crate")]
mod guest_parameters;

use self::guest_parameters::{DIRECTORY, FAMILIES, OF_NAMESPACE, OfInterfaces};

pub(super) const CASES: &[Case] = &[
    Case::both("the_interface_is_the_one_of_the_namespace", interface),
    Case::both("the_routes_are_those_of_the_namespace", routes),
    Case::both("an_interface_of_another_name_keeps_it_with_ipv6_alone", another_name),
    Case::both("a_gateway_outside_of_every_subnet_is_reached", gateway_on_link),
    Case::both("ipv6_stays_off_where_it_is_off", ipv6_off),
    Case::both("a_namespace_without_an_interface_is_a_loopback", no_interface),
    Case::both("host_and_container_ping_each_other", ping),
    Case::both("packets_larger_than_the_mtu_come_through", large_pings),
    Case::both("ten_mib_go_to_the_container_whole", upload),
    Case::both("ten_mib_come_from_the_container_whole", download),
    Case::both("ten_mib_go_both_ways_by_ipv6_whole", both_ways_ipv6),
    Case::both("ten_mib_go_from_container_to_container_whole", neighbours),
    Case::both("datagrams_come_back", datagrams),
    Case::both("a_refused_connection_is_refused", refused),
    Case::both("a_cni_sets_the_network_up_after_create", cni),
    Case::both("nothing_is_left_in_the_namespace", nothing_left),
    Case::bulkhead("nothing_is_left_in_the_namespace_by_a_killed_shim", nothing_left_by_killed_shim),
    Case::both("three_interfaces_are_those_of_the_namespace", three_interfaces),
    Case::both("interfaces_come_and_go_while_it_runs", come_and_go),
    Case::both("a_macvlan_passes_the_groups_that_a_container_joins", multicast),
    Case::both("an_ipvlan_of_layer_3_reaches_others", ipvlan_l3),
    Case::bulkhead("an_interface_on_top_of_another_one_is_refused_by_name", stacked),
    Case::both("a_source_of_a_route_is_an_address_of_another_interface", foreign_source),
    Case::bulkhead("an_interface_whose_name_is_taken_comes_when_the_name_is_free", name_taken),
    Case::bulkhead("nine_interfaces_are_refused_by_name", nine_interfaces),
    Case::both("rules_and_tables_of_routes_are_those_of_the_namespace", policy_routing),
    Case::bulkhead("a_rule_that_a_guest_cannot_have_is_refused_by_name", refused_rule),
    Case::both("kernel_parameters_are_those_of_the_namespace", parameters),
    Case::bulkhead("kernel_parameters_begin_as_the_shim_supposes", defaults),
    Case::both("an_interface_that_comes_later_has_its_kernel_parameters", later_parameters),
    Case::bulkhead("an_answer_to_a_dhcp_client_is_not_for_the_hosts_ip_stack", dhcp_answer),
    Case::bulkhead("two_vms_cannot_share_a_namespace", shared_namespace),
];

const MIB: usize = 1024 * 1024;
const PORT: u16 = 7000;
/// How long what is on its way may take on an ordinary machine.
const ARRIVES: Duration = Duration::from_secs(20);

/// Runs a script in a namespace's container to its end.
fn sh(host: &Host, namespace: &Namespace, script: &str) -> Result<Finished> {
    namespace.container(host).run(&["sh", "-c", script])
}

fn interface(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let script = "ls /sys/class/net; cd /sys/class/net/eth0; echo mac=$(cat address); echo mtu=$(cat mtu); \
                  ip -4 addr show eth0 | grep inet; ip -6 addr show eth0 | grep inet; ip addr show lo | grep inet";
    let finished = sh(host, &namespace, script)?;
    finished.succeeds()?.says("mac", &mac(2))?.says("mtu", &MTU.to_string())?;
    let text = finished.text();
    let interfaces: Vec<_> = text.lines().take_while(|line| !line.contains('=')).collect();
    finished.check("the interfaces eth0 and lo", interfaces == ["eth0", "lo"])?;
    let addresses: Vec<_> = text.lines().filter_map(|line| line.trim().strip_prefix("inet")).collect();
    let expected = [
        format!(" {}/24 scope global eth0", address(2)),
        format!("6 {}/64 scope global", address6(2)),
        // Made of the MAC (RFC 4291, appendix A).
        "6 fe80::ff:fe00:7702/64 scope link".to_owned(),
        " 127.0.0.1/8 scope host lo".to_owned(),
        "6 ::1/128 scope host".to_owned(),
    ];
    let same = addresses.len() == expected.len()
        && addresses.iter().zip(&expected).all(|(came, expected)| came.starts_with(expected));
    finished.check(&format!("the addresses {expected:?}"), same)?;
    Ok(())
}

/// Lines of `ip route`, as busybox writes them, without blanks at their ends.
fn lines(finished: &Finished) -> Vec<String> {
    finished.text().lines().map(|line| line.trim().to_owned()).collect()
}

fn routes(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let name = namespace.name();
    ip(&format!("-n {name} route add 10.88.0.0/16 via {} metric 42", address(9)))?;
    ip(&format!("-n {name} route add 10.99.0.0/16 dev eth0 scope link src {}", address(2)))?;
    ip(&format!("-n {name} route add fd88::/32 via fe80::9 dev eth0"))?;
    let finished = sh(host, &namespace, "ip route; ip -6 route | grep -v '^ff00'")?;
    let mut came = lines(finished.succeeds()?);
    came.sort();
    let expected = [
        "10.77.0.0/24 dev eth0 scope link  src 10.77.0.2".to_owned(),
        "10.88.0.0/16 via 10.77.0.9 dev eth0  metric 42".to_owned(),
        "10.99.0.0/16 dev eth0 scope link  src 10.77.0.2".to_owned(),
        format!("default via {GATEWAY} dev eth0"),
        format!("default via {GATEWAY6} dev eth0  metric 1024"),
        "fd77::/64 dev eth0  metric 256".to_owned(),
        "fd88::/32 via fe80::9 dev eth0  metric 1024".to_owned(),
        "fe80::/64 dev eth0  metric 256".to_owned(),
    ];
    finished.check(&format!("the routes {expected:#?}"), came == expected)?;
    Ok(())
}

fn another_name(host: &Host) -> Result<()> {
    let namespace = Namespace::new("uplink-1", &mac(3))?;
    ip(&format!("-n {} link set uplink-1 mtu 9000 up", namespace.name()))?;
    ip(&format!("link set {} mtu 9000 up", namespace.host_end()))?;
    // It has addresses of IPv6 alone.
    ip(&format!("-n {} addr add fd66::3/64 dev uplink-1 nodad", namespace.name()))?;
    ip(&format!("-n {} route add default via fd66::1", namespace.name()))?;
    ip(&format!("addr add fd66::1/64 dev {} nodad", namespace.host_end()))?;
    let script = "cd /sys/class/net/uplink-1; cat address mtu; ping -c 1 -W 10 fd66::1 | grep 'bytes from'; \
                  ip -6 route; ip -4 addr show uplink-1";
    let finished = sh(host, &namespace, script)?;
    finished.check("an answer by IPv6", finished.text().contains("bytes from fd66::1"))?;
    finished.check("its route", finished.text().contains("default via fd66::1 dev uplink-1"))?;
    finished
        .succeeds()?
        .check("its MAC and MTU", finished.text().starts_with(&format!("{}\n9000\n", mac(3))))?;
    finished.check("no IPv4 address", !finished.text().contains("inet "))?;
    Ok(())
}

/// As Calico does it: a gateway that answers for everything, and a permanent neighbour instead of asking for it.
fn gateway_on_link(host: &Host) -> Result<()> {
    let namespace = Namespace::new("eth0", &mac(4))?;
    let (name, host_end) = (namespace.name(), namespace.host_end());
    ip(&format!("link set {host_end} address 02:00:00:00:77:ee up"))?;
    ip(&format!("addr add 169.254.77.1/32 dev {host_end}"))?;
    ip(&format!("route add 10.78.0.4/32 dev {host_end}"))?;
    ip(&format!("-n {name} addr add 10.78.0.4/32 dev eth0"))?;
    ip(&format!("-n {name} link set eth0 up"))?;
    ip(&format!("-n {name} route add 169.254.77.1 dev eth0 scope link"))?;
    ip(&format!("-n {name} route add default via 169.254.77.1 dev eth0"))?;
    ip(&format!("-n {name} neigh add 169.254.77.1 lladdr 02:00:00:00:77:ee dev eth0 nud permanent"))?;
    let finished = sh(host, &namespace, "ip neigh; ping -c 1 -W 5 169.254.77.1")?;
    finished.succeeds()?.check(
        "a permanent neighbour",
        finished.text().contains("169.254.77.1 dev eth0 lladdr 02:00:00:00:77:ee")
            && finished.text().contains("PERMANENT"),
    )?;
    Ok(())
}

fn ipv6_off(host: &Host) -> Result<()> {
    let namespace = Namespace::new("eth0", &mac(5))?;
    let name = namespace.name();
    let knob = "net.ipv6.conf.eth0.disable_ipv6=1";
    Cmd::new("ip").args(["netns", "exec", name, "sysctl", "-q", "-w", knob]).run()?.succeeds()?;
    ip(&format!("-n {name} link set eth0 up"))?;
    ip(&format!("link set {} up", namespace.host_end()))?;
    sh(host, &namespace, "ip -6 addr show eth0")?.succeeds()?.prints("")?;
    Ok(())
}

fn no_interface(host: &Host) -> Result<()> {
    let namespace = Namespace::new("eth0", &mac(6))?;
    ip(&format!("link del {}", namespace.host_end()))?;
    let finished =
        sh(host, &namespace, "ls /sys/class/net; ping -c 1 -W 5 127.0.0.1 > /dev/null && echo up")?;
    finished.succeeds()?.prints("lo\nup\n")?;
    Ok(())
}

/// `ping` on the host.
fn ping_from_host(words: &str) -> Result<()> {
    Cmd::new("ping").args(["-c", "2", "-W", "10"]).args(words.split_whitespace()).run()?.succeeds()?;
    Ok(())
}

fn ping(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    for gateway in [GATEWAY, GATEWAY6] {
        sh(host, &namespace, &format!("ping -c 2 -W 10 {gateway}"))?.succeeds()?;
    }
    let _task = namespace.container(host).detach(&["sleep", "1000"])?;
    ping_from_host(&address(2))?;
    ping_from_host(&address6(2))
}

fn large_pings(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let _task = namespace.container(host).detach(&["sleep", "1000"])?;
    for size in [MTU - 28, MTU, 5000, 20000] {
        ping_from_host(&format!("-s {size} {}", address(2)))?;
        ping_from_host(&format!("-s {size} {}", address6(2)))?;
    }
    Ok(())
}

/// Connects to a server that is about to listen.
fn connect(host: &Host, to: SocketAddr) -> Result<TcpStream> {
    let mut connected = None;
    wait_until(&format!("a listener at {to}"), host.patience(ARRIVES), || {
        connected = TcpStream::connect_timeout(&to, host.patience(ARRIVES)).ok();
        Ok(connected.is_some())
    })?;
    let stream = connected.context("no connection")?;
    stream.set_read_timeout(Some(host.patience(ARRIVES)))?;
    stream.set_write_timeout(Some(host.patience(ARRIVES)))?;
    Ok(stream)
}

/// Sends 10 MiB to the container at this address.
fn send_to(host: &Host, namespace: &Namespace, to: &str) -> Result<()> {
    let script = format!("nc -l -p {PORT} | sha256sum");
    let attached = namespace.container(host).start(&["sh", "-c", &script])?;
    let sent = noise(10 * MIB);
    let mut stream = connect(host, SocketAddr::new(to.parse()?, PORT))?;
    stream.write_all(&sent).context("cannot send 10 MiB")?;
    stream.shutdown(Shutdown::Write)?;
    // Its end comes when all was read.
    stream.read_to_end(&mut Vec::new())?;
    attached.finish()?.succeeds()?.prints(&format!("{}  -\n", digest(&sent)))?;
    Ok(())
}

/// Has the container send 10 MiB to this address of the host's.
fn receive_at(host: &Host, namespace: &Namespace, at: &str) -> Result<()> {
    let listener = TcpListener::bind(SocketAddr::new(at.parse()?, 0))?;
    let port = listener.local_addr()?.port();
    let length = 10 * MIB;
    let script =
        format!("head -c {length} /dev/urandom > /tmp/x; sha256sum < /tmp/x; nc {at} {port} < /tmp/x");
    let attached = namespace.container(host).start(&["sh", "-c", &script])?;
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(host.patience(ARRIVES)))?;
    let mut came = Vec::new();
    stream.read_to_end(&mut came).context("cannot receive 10 MiB")?;
    drop(stream);
    attached.finish()?.succeeds()?.prints(&format!("{}  -\n", digest(&came)))?;
    ensure!(came.len() == length, "expected  {length} bytes\ncame      {}", came.len());
    Ok(())
}

fn upload(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    send_to(host, &bridge.namespace(2)?, &address(2))
}

fn download(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    receive_at(host, &bridge.namespace(2)?, GATEWAY)
}

fn both_ways_ipv6(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    send_to(host, &namespace, &address6(2))?;
    receive_at(host, &namespace, GATEWAY6)
}

fn neighbours(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let (one, other) = (bridge.namespace(2)?, bridge.namespace(3)?);
    let server = format!("nc -l -p {PORT} | sha256sum");
    let server = one.container(host).start(&["sh", "-c", &server])?;
    let client = format!(
        "head -c {} /dev/urandom > /tmp/x; sha256sum < /tmp/x; until nc {} {PORT} < /tmp/x; do sleep 0.2; done",
        10 * MIB,
        address(2)
    );
    let sent = sh(host, &other, &client)?.succeeds()?.text();
    server.finish()?.succeeds()?.prints(&sent)?;
    Ok(())
}

/// The shortest of conversations by TFTP (RFC 1350): a request, one block of data, its acknowledgement.
fn datagrams(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let socket = UdpSocket::bind((GATEWAY, 0))?;
    socket.set_read_timeout(Some(host.patience(ARRIVES)))?;
    let port = socket.local_addr()?.port().to_string();
    let script = ["tftp", "-g", "-r", "wanted", "-l", "-", GATEWAY, &port];
    let attached = namespace.container(host).start(&script)?;
    let mut packet = [0; 1000];
    let (length, from) = socket.recv_from(&mut packet).context("no request came")?;
    ensure!(from.ip().to_string() == address(2), "expected  one from {}\ncame      {from}", address(2));
    let request = packet.get(..length).unwrap_or_default();
    ensure!(request.starts_with(b"\0\x01wanted\0octet\0"), "expected  a request\ncame      {request:?}");
    socket.send_to(b"\0\x03\0\x01what was wanted\n", from)?;
    loop {
        // The request may come again, when the answer takes long.
        let (length, _) = socket.recv_from(&mut packet).context("no acknowledgement came")?;
        if packet.get(..length) == Some(b"\0\x04\0\x01") {
            break;
        }
    }
    attached.finish()?.succeeds()?.prints("what was wanted\n")?;
    Ok(())
}

fn refused(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let _task = namespace.container(host).detach(&["sleep", "1000"])?;
    ping_from_host(&address(2))?;
    let error = TcpStream::connect((address(2), PORT)).err().context("somebody listens")?;
    let kind = error.kind();
    ensure!(
        kind == std::io::ErrorKind::ConnectionRefused,
        "expected  a refused connection\ncame      {error}"
    );
    sh(host, &bridge.namespace(3)?, &format!("nc {GATEWAY} 1"))?.fails_with("refused")?;
    Ok(())
}

/// Of the plugins bridge, host-local, portmap and loopback.
const CNI: &str = r#"{
  "cniVersion": "1.0.0",
  "name": "bulkhead-e2e",
  "plugins": [
    {
      "type": "bridge", "bridge": "e2e-cni", "isGateway": true, "ipMasq": false,
      "ipam": {
        "type": "host-local", "dataDir": "/run/bulkhead-e2e-cni",
        "ranges": [[{"subnet": "10.79.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}"#;

/// The bridge and the leases, which CNI plugins leave for the next container.
struct CniState;

impl Drop for CniState {
    fn drop(&mut self) {
        let _ = Cmd::new("ip").args(["link", "del", "e2e-cni"]).run();
        let _ = fs::remove_dir_all("/run/bulkhead-e2e-cni");
    }
}

fn cni(host: &Host) -> Result<()> {
    let _state = CniState;
    let _configuration = Replaced::file(Path::new("/etc/cni/net.d/10-bulkhead-e2e.conflist"), CNI)?;
    let script = "ip -4 addr show eth0; ip route; ping -c 2 -W 10 10.79.0.1";
    let finished = host.container().flags(["--cni"]).run(&["sh", "-c", script])?;
    let text = finished.succeeds()?.text();
    finished.check("an address of the subnet", text.contains("inet 10.79.0."))?;
    finished.check("a default route", text.contains("default via 10.79.0.1 dev eth0"))?;
    Ok(())
}

/// Interfaces and queueing disciplines of a namespace.
fn state_of(namespace: &Namespace) -> Result<String> {
    let links = ip(&format!("-n {} -brief link", namespace.name()))?.text();
    let qdiscs = Cmd::new("tc").args(["-n", namespace.name(), "qdisc"]).run()?.succeeds()?.text();
    Ok(format!("{links}{qdiscs}"))
}

fn expect_same_state(namespace: &Namespace, before: &str) -> Result<()> {
    let after = state_of(namespace)?;
    ensure!(before == after, "expected  the namespace as before\n{before}came\n{after}");
    Ok(())
}

fn nothing_left(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    host.leaves_nothing(|| {
        let before = state_of(&namespace)?;
        // The second one finds what the first one found.
        for _ in 0..2 {
            sh(host, &namespace, &format!("ping -c 1 -W 10 {GATEWAY}"))?.succeeds()?;
            expect_same_state(&namespace, &before)?;
        }
        // The host has its address back.
        ping_from_host(&address(2))
    })
}

fn nothing_left_by_killed_shim(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let before = state_of(&namespace)?;
    let task = namespace.container(host).flags(["--null-io"]).detach(&["sleep", "1000"])?;
    super::crash::kill_shim(host, &task)?;
    expect_same_state(&namespace, &before)?;
    task.remove_container()
}

/// Expects that a container in this namespace does not start, for a reason with these words.
fn does_not_start(host: &Host, namespace: &Namespace, words: &[&str]) -> Result<()> {
    let finished = namespace.container(host).run(&["true"])?;
    words.iter().try_for_each(|word| finished.fails_with(word).map(drop))?;
    finished.says_one_line()?;
    Ok(())
}

fn three_interfaces(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let name = namespace.name();
    for (interface, number) in [("net1", 21), ("net2", 22)] {
        namespace.add(interface, number)?;
        let to = format!("10.{}.0.0/16 via {}", 100 + number, gateway(number));
        ip(&format!("-n {name} route add {to} dev {interface}"))?;
    }
    host.leaves_nothing(|| {
        let before = state_of(&namespace)?;
        let script = format!(
            "cd /sys/class/net; for i in *; do echo $i $(cat $i/address) $(cat $i/mtu); done; ip route | sort; \
             for i in {GATEWAY} {} {}; do ping -c 1 -W 10 $i > /dev/null && echo $i; done",
            gateway(21),
            gateway(22)
        );
        let finished = sh(host, &namespace, &script)?;
        let expected = [
            format!("eth0 {} {MTU}", mac(2)),
            "lo 00:00:00:00:00:00 65536".into(),
            format!("net1 {} {MTU}", mac(21)),
            format!("net2 {} {MTU}", mac(22)),
            "10.121.0.0/16 via 10.76.21.1 dev net1".into(),
            "10.122.0.0/16 via 10.76.22.1 dev net2".into(),
            "10.76.21.0/24 dev net1 scope link  src 10.76.21.2".into(),
            "10.76.22.0/24 dev net2 scope link  src 10.76.22.2".into(),
            "10.77.0.0/24 dev eth0 scope link  src 10.77.0.2".into(),
            format!("default via {GATEWAY} dev eth0"),
            GATEWAY.into(),
            gateway(21),
            gateway(22),
        ];
        finished.succeeds()?.check(&format!("{expected:#?}"), lines(&finished) == expected)?;
        expect_same_state(&namespace, &before)
    })
}

/// Waits until a script in the container prints this.
fn settles(host: &Host, task: &Task<'_>, script: &str, expected: &str) -> Result<()> {
    wait_until(&format!("{expected:?} of {script}"), host.patience(ARRIVES), || {
        Ok(task.exec(&["sh", "-c", script])?.text() == expected)
    })
}

fn come_and_go(host: &Host) -> Result<()> {
    const INTERFACES: &str = "cd /sys/class/net; echo *";
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let name = namespace.name();
    let before = state_of(&namespace)?;
    let task = namespace.container(host).flags(["--null-io"]).detach(&["sleep", "1000"])?;
    // The second one has the place of the first.
    for (interface, number) in [("net1", 23), ("net2", 24)] {
        namespace.add(interface, number)?;
        settles(host, &task, INTERFACES, &format!("eth0 lo {interface}\n"))?;
        ping_from_host(&address_in(number))?;
        let reach = format!("cat /sys/class/net/{interface}/address; ping -c 1 -W 10 {}", gateway(number));
        let reached = task.exec(&["sh", "-c", &reach])?;
        reached.succeeds()?.check("its MAC", reached.text().starts_with(&mac(number)))?;
        ip(&format!("-n {name} link del {interface}"))?;
        settles(host, &task, INTERFACES, "eth0 lo\n")?;
    }
    // What changes of one that stays.
    ip(&format!("-n {name} addr add 10.75.0.2/24 dev eth0"))?;
    ip(&format!("-n {name} route del default"))?;
    ip(&format!("-n {name} route add default via 10.75.0.1"))?;
    settles(host, &task, "ip route | grep default", "default via 10.75.0.1 dev eth0 \n")?;
    ip(&format!("-n {name} route del default"))?;
    ip(&format!("-n {name} addr del 10.75.0.2/24 dev eth0"))?;
    ip(&format!("-n {name} link set eth0 mtu 1300"))?;
    let script =
        "cat /sys/class/net/eth0/mtu; ip -4 addr show eth0 | grep -c inet; ip route | grep -c default";
    settles(host, &task, script, "1300\n1\n0\n")?;
    ping_from_host(&address(2))?;
    ip(&format!("-n {name} link set eth0 mtu {MTU}"))?;
    drop(task);
    expect_same_state(&namespace, &before)
}

/// A container with the host's programs.
fn with_hosts_programs<'h>(host: &'h Host, namespace: &Namespace) -> Container<'h> {
    let mut container = namespace.container(host).flags(["--null-io"]);
    for (source, place) in [("/usr", "/usr"), ("/usr/lib", "/lib"), ("/usr/lib64", "/lib64")] {
        container = container.bind(Path::new(source), place, "rbind:ro");
    }
    container
}

/// Unlike a veth, a macvlan filters what is sent to groups.
fn multicast(host: &Host) -> Result<()> {
    const GROUP: &str = "239.77.1.2";
    let outside = Namespace::new("eth0", &mac(31))?;
    let namespace = Namespace::new("gone", &mac(32))?;
    ip(&format!("-n {} link del gone", namespace.name()))?;
    let parent = outside.host_end();
    ip(&format!("link set {parent} up"))?;
    ip(&format!("link add link {parent} name eth0 netns {} type macvlan mode bridge", namespace.name()))?;
    for (namespace, number) in [(&outside, 1), (&namespace, 2)] {
        ip(&format!("-n {} addr add 10.79.0.{number}/24 dev eth0", namespace.name()))?;
        ip(&format!("-n {} link set eth0 up", namespace.name()))?;
        ip(&format!("-n {} route add 239.0.0.0/8 dev eth0", namespace.name()))?;
    }
    let receive = format!(
        "use Socket qw(:all); socket(S, PF_INET, SOCK_DGRAM, 0) and bind(S, sockaddr_in({PORT}, INADDR_ANY)) \
         and setsockopt(S, IPPROTO_IP, IP_ADD_MEMBERSHIP, pack_ip_mreq(inet_aton('{GROUP}'))) or die; \
         recv(S, $text, 100, 0); open(F, '>', '/tmp/text'); print F $text; close F; sleep 1000"
    );
    let send = format!(
        "use Socket; socket(S, PF_INET, SOCK_DGRAM, 0); \
         send(S, 'hello', 0, sockaddr_in({PORT}, inet_aton('{GROUP}'))) or die"
    );
    let task = with_hosts_programs(host, &namespace).detach(&["/usr/bin/perl", "-e", &receive])?;
    wait_until("a datagram to the group", host.patience(ARRIVES), || {
        let in_namespace = ["netns", "exec", outside.name(), "perl", "-e", &send];
        Cmd::new("ip").args(in_namespace).run()?.succeeds()?;
        Ok(task.exec(&["cat", "/tmp/text"])?.text() == "hello")
    })
}

/// Nobody answers to ARP there: the host's kernel finds its way by the addresses of IP alone.
fn ipvlan_l3(host: &Host) -> Result<()> {
    const HOST: &str = "10.80.0.1";
    let outside = Namespace::new("eth0", &mac(33))?;
    let namespace = Namespace::new("gone", &mac(34))?;
    let (parent, name) = (outside.host_end(), namespace.name());
    ip(&format!("-n {name} link del gone"))?;
    ip(&format!("addr add 10.80.0.254/24 dev {parent}"))?;
    ip(&format!("link set {parent} up"))?;
    ip(&format!("link add link {parent} name eth0 netns {name} type ipvlan mode l3"))?;
    ip(&format!("-n {name} addr add 10.81.0.2/24 dev eth0"))?;
    ip(&format!("-n {name} link set eth0 up"))?;
    ip(&format!("-n {name} route add default dev eth0"))?;
    let at_parent = std::fs::read_to_string(format!("/sys/class/net/{parent}/address"))?;
    let outside = outside.name();
    ip(&format!("-n {outside} addr add {HOST}/24 dev eth0"))?;
    ip(&format!("-n {outside} link set eth0 up"))?;
    ip(&format!("-n {outside} route add 10.81.0.0/24 dev eth0"))?;
    ip(&format!("-n {outside} neigh add 10.81.0.2 lladdr {} dev eth0", at_parent.trim()))?;
    sh(host, &namespace, &format!("ping -c 1 -W 10 {HOST}"))?.succeeds()?;
    Ok(())
}

/// Each of them would start, and get none of its packets.
fn stacked(host: &Host) -> Result<()> {
    let refused = |below: &str, kind: &str, words: &str| {
        let namespace = Namespace::new("eth0", &mac(35))?;
        ip(&format!("-n {} link add {below} name upper type {kind}", namespace.name()))?;
        if below.is_empty() {
            ip(&format!("-n {} link set eth0 down master upper", namespace.name()))?;
        }
        does_not_start(host, &namespace, &[words, "not implemented"])
    };
    let on_top = "interface upper is stacked on eth0";
    for kind in ["vlan id 5", "macvlan mode bridge", "ipvlan mode l2"] {
        refused("link eth0", kind, on_top)?;
    }
    for kind in ["bridge", "bond"] {
        refused("", kind, on_top)?;
    }
    // This one is on top of an interface of the host.
    let outside = Namespace::new("eth0", &mac(36))?;
    let namespace = Namespace::new("gone", &mac(37))?;
    ip(&format!("-n {} link del gone", namespace.name()))?;
    let eth0 = format!("name eth0 netns {} type ipvlan mode l3s", namespace.name());
    ip(&format!("link add link {} {eth0}", outside.host_end()))?;
    does_not_start(host, &namespace, &["interface eth0 is an ipvlan in mode l3s", "not implemented"])
}

/// A route may have an address of an interface that comes after its own, or of the loopback interface.
fn foreign_source(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let name = namespace.name();
    namespace.add("net1", 29)?;
    ip(&format!("-n {name} addr add 10.82.0.1/32 dev lo"))?;
    ip(&format!("-n {name} route add 192.0.2.0/24 via {GATEWAY} dev eth0 src {}", address_in(29)))?;
    ip(&format!("-n {name} route add 198.51.100.0/24 via {GATEWAY} dev eth0 src 10.82.0.1"))?;
    let task = with_hosts_programs(host, &namespace).detach(&["sleep", "1000"])?;
    let routes = task.exec(&["/usr/bin/ip", "-o", "-4", "route", "show"])?;
    let sources = [
        format!("192.0.2.0/24 via {GATEWAY} dev eth0 src {}", address_in(29)),
        format!("198.51.100.0/24 via {GATEWAY} dev eth0 src 10.82.0.1"),
    ];
    for source in sources {
        routes.check(&source, routes.text().contains(&source))?;
    }
    let shown = task.exec(&["/usr/bin/ip", "-o", "-4", "addr", "show", "dev", "lo"])?;
    shown.check("the address of lo", shown.text().contains("10.82.0.1/32"))?;
    // What becomes of it while the pod runs.
    ip(&format!("-n {name} addr add 10.82.0.2/32 dev lo"))?;
    settles(host, &task, "/usr/bin/ip -o -4 addr show dev lo | grep -c 10.82.0.2/32", "1\n")
}

/// The container has a network namespace of its own in the guest, so a name can be free on the host and taken there.
fn name_taken(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let name = namespace.name();
    let before = state_of(&namespace)?;
    let task = namespace.container(host).flags(["--null-io", "--privileged"]).detach(&["sleep", "1000"])?;
    task.exec(&["ip", "link", "add", "net1", "type", "dummy"])?.succeeds()?;
    // More often than a guest has network cards. Each time eth0 shows that the guest has been told.
    for mtu in 1290..1300 {
        namespace.add("net1", 26)?;
        ip(&format!("-n {name} link set eth0 mtu {mtu}"))?;
        settles(host, &task, "cat /sys/class/net/eth0/mtu", &format!("{mtu}\n"))?;
        ip(&format!("-n {name} link del net1"))?;
    }
    ip(&format!("-n {name} link set eth0 mtu {MTU}"))?;
    namespace.add("net1", 26)?;
    task.exec(&["ip", "link", "del", "net1"])?.succeeds()?;
    // Nothing changes on the host from now on.
    settles(host, &task, "cat /sys/class/net/net1/address", &format!("{}\n", mac(26)))?;
    ping_from_host(&address_in(26))?;
    ip(&format!("-n {name} link del net1"))?;
    drop(task);
    expect_same_state(&namespace, &before)
}

fn nine_interfaces(host: &Host) -> Result<()> {
    let namespace = Namespace::new("eth0", &mac(7))?;
    for number in 1..9 {
        ip(&format!("-n {} link add eth{number} type dummy", namespace.name()))?;
    }
    let names = "eth0, eth1, eth2, eth3, eth4, eth5, eth6, eth7, eth8";
    does_not_start(host, &namespace, &[names, "at most 8", "not implemented"])
}

/// What is compared of a namespace and of the container in it, as ip(8) shows it.
const ROUTING: [&str; 7] = [
    "rule",
    "-6 rule",
    "route",
    "-6 route",
    "route show table 100",
    "-6 route show table 100",
    "route show table 1000",
];

/// Waits until a container with the host's ip(8) shows what the namespace has on the host. Returns it.
fn same_routing(host: &Host, namespace: &Namespace, task: &Task<'_>) -> Result<String> {
    let mut expected = String::new();
    for words in ROUTING {
        expected += &ip(&format!("-n {} {words}", namespace.name()))?.text();
    }
    let script = ROUTING.map(|words| format!("/usr/bin/ip {words}")).join("; ");
    settles(host, task, &script, &expected)?;
    Ok(expected)
}

/// As the CNI plugin `sbr` has it: what has the address of an interface leaves by this interface. Its routes are in a
/// table of their own, those of its subnet among them, and not in table main.
fn policy_routing(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let name = namespace.name();
    namespace.add("net1", 25)?;
    let (subnet, own) = ("10.76.25.0/24", address_in(25));
    for words in [
        format!("route del {subnet} dev net1"),
        format!("route add {subnet} dev net1 proto kernel scope link src {own} table 100"),
        format!("route add default via {} dev net1 table 100", gateway(25)),
        format!("rule add from {own} lookup 100 priority 100"),
        "rule add fwmark 0x10/0xf0 iif lo lookup 1000 priority 101".into(),
        "route add unreachable default metric 9 table 1000".into(),
        "rule add to 192.0.2.0/24 lookup main suppress_prefixlength 0 priority 102".into(),
        "-6 route add default via fd77::9 dev eth0 table 100".into(),
        "-6 rule add from fd77::/64 oif eth0 lookup 100 priority 103".into(),
    ] {
        ip(&format!("-n {name} {words}"))?;
    }
    let task = with_hosts_programs(host, &namespace).detach(&["sleep", "1000"])?;
    let seen = same_routing(host, &namespace, &task)?;
    ensure!(seen.contains(&format!("100:\tfrom {own} lookup 100")), "no such rule in {seen}");
    let way = ["/usr/bin/ip", "route", "get", "198.51.100.7", "from", &own];
    let way = task.exec(&way)?;
    way.check("the way by net1", way.text().contains(&format!("via {} dev net1", gateway(25))))?;
    // What changes while it runs. Nothing of the interfaces does, so that this is seen by itself.
    ip(&format!("-n {name} rule del priority 101"))?;
    ip(&format!("-n {name} rule add not to 192.0.2.0/24 prohibit priority 104"))?;
    same_routing(host, &namespace, &task)?;
    ip(&format!("-n {name} route del unreachable default metric 9 table 1000"))?;
    ip(&format!("-n {name} route add {subnet} dev net1 proto kernel scope link src {own}"))?;
    same_routing(host, &namespace, &task).map(drop)
}

fn refused_rule(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    ip(&format!("-n {} rule add from all lookup 77 suppress_ifgroup 5 priority 100", namespace.name()))?;
    let words = ["rule 100: from all lookup 77", "suppress_ifgroup 5", "not implemented"];
    does_not_start(host, &namespace, &words)
}

/// Has this shell command executed in the namespace on the host.
fn in_namespace(namespace: &Namespace, script: &str) -> Result<String> {
    let words = ["netns", "exec", namespace.name(), "sh", "-c", script];
    Ok(Cmd::new("ip").args(words).run()?.succeeds()?.text())
}

/// Sets kernel parameters, files below /proc/sys/net, in the namespace on the host.
fn set_parameters(namespace: &Namespace, parameters: &[(&str, &str)]) -> Result<()> {
    parameters.iter().try_for_each(|(name, value)| {
        in_namespace(namespace, &format!("echo '{value}' > /proc/sys/net/{name}")).map(drop)
    })
}

/// A command that prints these kernel parameters, one a line.
fn shown(parameters: &[(&str, &str)]) -> String {
    let names: Vec<_> = parameters.iter().map(|(name, _)| *name).collect();
    format!("cd /proc/sys/net && cat {}", names.join(" "))
}

/// What that prints.
fn values(parameters: &[(&str, &str)]) -> String {
    parameters.iter().map(|(_, value)| format!("{value}\n")).collect()
}

/// What a CNI plugin such as `tuning` sets.
fn parameters(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    // Its name has a dot.
    namespace.add("eth0.7", 27)?;
    let set = [
        ("ipv4/ip_forward", "1"),
        // The kernel has set it to 0 with that.
        ("ipv4/conf/all/accept_redirects", "1"),
        ("ipv6/conf/all/forwarding", "1"),
        ("core/somaxconn", "77"),
        ("ipv4/tcp_keepalive_time", "1234"),
        // The range is only possible with the new start of it.
        ("ipv4/ip_unprivileged_port_start", "80"),
        ("ipv4/ip_local_port_range", "100\t60000"),
        ("ipv4/ip_local_reserved_ports", "8080,9000-9100,20000,20002,20004,20006,20008,20010"),
        ("ipv4/ping_group_range", "0\t1000"),
        ("ipv4/conf/all/arp_announce", "1"),
        ("ipv4/conf/default/arp_ignore", "1"),
        ("ipv4/conf/lo/log_martians", "1"),
        ("ipv4/conf/eth0/arp_notify", "1"),
        ("ipv4/conf/eth0/rp_filter", "2"),
        ("ipv4/conf/eth0.7/forwarding", "0"),
        ("ipv4/conf/eth0.7/send_redirects", "0"),
        ("ipv6/conf/eth0/accept_ra", "0"),
        ("ipv6/conf/eth0.7/forwarding", "0"),
    ];
    set_parameters(&namespace, &set)?;
    sh(host, &namespace, &shown(&set))?.succeeds()?.prints(&values(&set))?;
    // Also in a namespace that has no interface but that of the loopback.
    let namespace = Namespace::new("eth0", &mac(6))?;
    ip(&format!("link del {}", namespace.host_end()))?;
    let set = [("ipv4/ip_forward", "1"), ("core/somaxconn", "77"), ("ipv4/conf/lo/rp_filter", "1")];
    set_parameters(&namespace, &set)?;
    sh(host, &namespace, &shown(&set))?.succeeds()?.prints(&values(&set))?;
    Ok(())
}

/// What a new namespace of the guest's kernel has, that of the loopback interface included. An interface begins with
/// `conf/default`.
fn defaults(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let container = with_hosts_programs(host, &namespace).flags(["--privileged"]);
    let task = container.detach(&["sleep", "1000"])?;
    let mut expected: Vec<_> =
        OF_NAMESPACE.iter().map(|(name, value)| (String::from(*name), *value)).collect();
    for (family, list) in FAMILIES {
        for OfInterfaces { name, all, default, loopback, .. } in list {
            let places =
                all.iter().map(|all| ("all", *all)).chain([("default", *default), ("lo", *loopback)]);
            expected.extend(places.map(|(place, value)| (format!("{family}/conf/{place}/{name}"), value)));
        }
    }
    let expected: String = expected.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    let names: Vec<_> = expected.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
    let script = format!("cd {DIRECTORY} && for i in {}; do echo \"$i=$(cat $i)\"; done", names.join(" "));
    task.exec(&["/usr/bin/unshare", "--net", "sh", "-c", &script])?.succeeds()?.prints(&expected)?;
    Ok(())
}

fn later_parameters(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let task = namespace.container(host).flags(["--null-io"]).detach(&["sleep", "1000"])?;
    // Whatever a new interface begins with on the host from now on.
    set_parameters(
        &namespace,
        &[("ipv4/conf/default/arp_ignore", "2"), ("ipv6/conf/default/accept_ra", "0")],
    )?;
    namespace.add("net1", 28)?;
    let script = "cd /proc/sys/net && cat ipv4/conf/net1/arp_ignore ipv6/conf/net1/accept_ra \
                  ipv4/conf/eth0/arp_ignore";
    settles(host, &task, script, "2\n0\n0\n")
}

fn shared_namespace(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let directory = scratch()?;
    let file = directory.path().join("two.toml");
    // So the taps have several queues, whatever the host has. Another VMM could add its own to them.
    fs::write(&file, "vcpus = 2\n").context("cannot write a configuration")?;
    let file = file.display().to_string();
    let two_vcpus = || namespace.container(host).flags(["--runtime-config-path", &file]);
    let _task = two_vcpus().detach(&["sleep", "1000"])?;
    let refused = two_vcpus().run(&["true"])?;
    for word in ["veth-bulkhead", "an unused name"] {
        refused.fails_with(word)?;
    }
    refused.says_one_line()?;
    // The first one has its network still.
    ping_from_host(&address(2))
}

/// The plugin `dhcp` has a packet socket, and nobody else on the host is to get the answer.
fn dhcp_answer(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let _task = namespace.container(host).detach(&["sleep", "1000"])?;
    let stack = namespace.inside(|| Ok(UdpSocket::bind("0.0.0.0:68")?))?;
    stack.set_nonblocking(true)?;
    let server = UdpSocket::bind((GATEWAY, 67)).context("cannot be a server of DHCP")?;
    let mark = "ptype otherhost";
    wait_until("a packet that is marked", ARRIVES, || {
        server.send_to(b"lease", (address(2), 68))?;
        let words = ["-s", "-n", namespace.name(), "filter", "show", "dev", "eth0", "ingress"];
        let filters = Cmd::new("tc").args(words).run()?.succeeds()?.text();
        let (_, marks) = filters.split_once(mark).with_context(|| format!("no {mark} in\n{filters}"))?;
        let sent = marks.lines().find(|line| line.trim_start().starts_with("Sent "));
        Ok(sent.is_some_and(|sent| !sent.contains(" 0 pkt")))
    })?;
    ensure!(stack.recv(&mut [0; 100]).is_err(), "the host's IP stack has got an answer of DHCP");
    Ok(())
}
