//! What a privileged container asks of the kernel: links, tunnels, traffic control, packet filters, protocols, file
//! systems, block devices, accounting. On runc the host's kernel loads modules for most of that, and so does the
//! guest's.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::json;

use super::Case;
use crate::command::Finished;
use crate::ctr::{Container, Host};
use crate::fixtures::scratch;
use crate::probe::{self, Bits};

pub(super) const CASES: &[Case] = &[
    Case::both("links_of_every_kind_are_made", links),
    Case::both("an_overlay_carries_packets", overlays),
    Case::bulkhead("ip_tunnels_carry_packets", ip_tunnels),
    Case::bulkhead("no_tunnel_is_there_that_nobody_made", no_tunnels),
    Case::both("ipsec_encrypts_packets", ipsec),
    Case::both("a_link_delays_packets", delay),
    Case::both("every_queueing_discipline_and_filter_is_taken", traffic_control),
    Case::both("the_rules_of_service_meshes_and_proxies_are_taken", rules),
    Case::both("sets_of_addresses_and_virtual_servers_are_there", sets_and_servers),
    Case::both("streams_go_by_sctp_and_mptcp", protocols),
    Case::both("a_socket_encrypts_by_tls", tls),
    Case::both("a_socket_chooses_its_congestion_control", congestion),
    Case::both("file_systems_are_known", file_systems),
    Case::both("a_file_is_a_disk", disk),
    Case::both("a_disk_is_encrypted", encrypted_disk),
    Case::both("pressure_and_use_are_accounted", accounting),
    Case::both("a_system_call_that_is_to_be_logged_is_in_the_kernels_log", logged_call),
    Case::both("memory_policies_are_taken", memory_policies),
    Case::both("a_process_chooses_the_next_process_id", next_process_id),
    Case::both("a_container_without_privileges_loads_what_any_user_may", without_privileges),
    Case::bulkhead("what_loads_a_module_is_limited", limited_loaders),
    Case::bulkhead("a_module_of_another_build_is_refused", foreign_module),
];

/// A privileged container with the programs of the host, which has more of them than the image.
fn container(host: &Host) -> Container<'_> {
    with_programs(host.container().flags(["--privileged"]))
}

fn with_programs(mut container: Container<'_>) -> Container<'_> {
    for (source, destination) in [("/usr", "/usr"), ("/usr/lib", "/lib"), ("/usr/lib64", "/lib64")] {
        container = container.bind(Path::new(source), destination, "rbind:ro");
    }
    container
}

/// Runs a script in such a container, up to the first command that fails.
fn sh(host: &Host, script: &str) -> Result<Finished> {
    container(host).run(&["sh", "-ec", script])
}

/// Runs a program of Perl, which Debian always has, for system calls that no tool makes.
fn perl(host: &Host, program: &str) -> Result<Finished> {
    container(host).run(&["perl", "-e", program])
}

/// What is to be given to a batch of `ip` or `tc`, or to iptables-restore: a line for each.
fn batch(lines: &[&str]) -> String {
    format!("<<'END'\n{}\nEND\n", lines.join("\n"))
}

/// Two network namespaces, a and b, whose links ea and eb are connected.
const TWO_NAMESPACES: &str =
    "mkdir -p /run/netns; mount -t tmpfs tmpfs /run/netns; ip netns add a; ip netns add b
    ip link add ea netns a type veth peer name eb netns b
    ip -n a addr add 10.8.0.1/24 dev ea; ip -n a link set ea up
    ip -n b addr add 10.8.0.2/24 dev eb; ip -n b link set eb up
    ";

const LINKS: &[&str] = &[
    "vlan0 link d0 type vlan id 7",
    "vxlan0 type vxlan id 7 dstport 4789 dev d0",
    "geneve0 type geneve id 7 remote 10.9.0.2",
    "macvlan0 link d0 type macvlan",
    "macvtap0 link d0 type macvtap",
    "ipvlan0 link d1 type ipvlan mode l2",
    "ipvtap0 link d2 type ipvtap mode l2",
    "wg0 type wireguard",
    "vrf0 type vrf table 7",
    "ifb0 type ifb",
    "xfrm0 type xfrm dev d0 if_id 7",
    "netkit0 type netkit peer name netkit1",
    "nlmon0 type nlmon",
    "veth0 type veth peer name veth1",
    "br0 type bridge vlan_filtering 1",
];

fn links(host: &Host) -> Result<()> {
    let adds: Vec<_> = LINKS.iter().map(|link| format!("link add {link}")).collect();
    let adds = batch(&adds.iter().map(String::as_str).collect::<Vec<_>>());
    let script = format!(
        "for n in 0 1 2; do ip link add d$n type dummy; ip link set d$n up; done; ip -batch - {adds}
        ls /sys/class/net"
    );
    let finished = sh(host, &script)?;
    let text = finished.succeeds()?.text();
    for link in LINKS {
        let name = link.split(' ').next().unwrap_or_default();
        finished.check(&format!("the link {name}"), text.lines().any(|line| line == name))?;
    }
    Ok(())
}

/// Makes a tunnel between the two namespaces, sends a packet through it, and removes it.
const TRY_TUNNEL: &str = "try() {
        ip -n a link add tun0 type $1 remote 10.8.0.2 $2
        ip -n b link add tun0 type $1 remote 10.8.0.1 $2
        ip -n a addr add 10.7.0.1/24 dev tun0; ip -n a link set tun0 up
        ip -n b addr add 10.7.0.2/24 dev tun0; ip -n b link set tun0 up
        ip netns exec a ping -q -c 1 -W 10 10.7.0.2 >/dev/null && echo ${1% id 9}
        ip -n a link del tun0; ip -n b link del tun0
    }
    ";

fn overlays(host: &Host) -> Result<()> {
    let script = format!(
        "{TWO_NAMESPACES}{TRY_TUNNEL} try 'vxlan id 9' 'dstport 4789'; try 'geneve id 9' 'dstport 6081'"
    );
    sh(host, &script)?.succeeds()?.prints("vxlan\ngeneve\n")?;
    Ok(())
}

/// Not on runc: as soon as the host has loaded these modules, each new network namespace has a tunnel of each kind, and
/// other cases count the links.
fn ip_tunnels(host: &Host) -> Result<()> {
    let script = format!(
        "{TWO_NAMESPACES}{TRY_TUNNEL} try gre; try ipip
        ip -batch - {}
        ls /sys/class/net | grep -E '1$'",
        batch(&[
            "link add sit1 type sit remote 10.9.0.2",
            "link add six1 type ip6tnl remote fd00::2",
            "link add sixgre1 type ip6gre remote fd00::2",
            "link add vti1 type vti remote 10.9.0.2 key 7",
        ])
    );
    sh(host, &script)?.succeeds()?.prints("gre\nipip\nsit1\nsix1\nsixgre1\nvti1\n")?;
    Ok(())
}

/// When the kernel loads the module of a kind of tunnels, it makes one in each network namespace.
fn no_tunnels(host: &Host) -> Result<()> {
    host.sh("ls /sys/class/net")?.succeeds()?.prints("lo\n")?;
    Ok(())
}

fn ipsec(host: &Host) -> Result<()> {
    let script = format!(
        "{TWO_NAMESPACES}
        way() {{
            key=0x0102030405060708090a0b0c0d0e0f1011121314
            for n in a b; do
                ip -n $n xfrm state add src $1 dst $2 proto esp spi $3 mode transport aead 'rfc4106(gcm(aes))' $key 128
                test $n = $4 && direction=out || direction=in
                ip -n $n xfrm policy add src $1 dst $2 dir $direction tmpl src $1 dst $2 proto esp mode transport
            done
        }}
        way 10.8.0.1 10.8.0.2 1 a; way 10.8.0.2 10.8.0.1 2 b
        ip netns exec a ping -q -c 1 -W 10 10.8.0.2 >/dev/null
        ip -n a -s xfrm state | grep -c ' 1(packets)'"
    );
    sh(host, &script)?.succeeds()?.prints("2\n")?;
    Ok(())
}

fn delay(host: &Host) -> Result<()> {
    let script = format!(
        "{TWO_NAMESPACES}
        tc -n a qdisc add dev ea root netem delay 2s
        ip netns exec a ping -q -c 1 -W 30 10.8.0.2 | sed -n 's:^rtt.* = \\([0-9]*\\).*:ms=\\1:p'"
    );
    let finished = sh(host, &script)?;
    let took: u64 = finished.succeeds()?.value("ms")?.parse()?;
    finished.check("an answer after 2 to 20 s", (2000..20_000).contains(&took))?;
    Ok(())
}

const DISCIPLINES: &[&str] = &[
    "htb",
    "hfsc",
    "prio",
    "red limit 100000 avpkt 1000 min 10000 max 30000",
    "sfq",
    "tbf rate 1mbit burst 10k latency 50ms",
    "drr",
    "qfq",
    "codel",
    "fq_codel",
    "cake",
    "fq",
    "pie",
    "fq_pie",
    "hhf",
    "ets bands 3",
    "choke limit 1000 bandwidth 10mbit",
    "plug limit 10",
];

const FILTERS: &[&str] = &[
    "u32 match ip dst 10.8.0.9/32 action drop",
    "flower dst_ip 10.8.0.9 ip_proto tcp dst_port 80 action gact drop",
    "basic match meta(priority eq 6) action ok",
    "matchall action police rate 100mbit burst 100k conform-exceed pass",
    "matchall action skbedit mark 5",
    "matchall action pedit ex munge ip ttl set 9",
    "matchall action mirred egress mirror dev lo",
    "matchall action vlan push id 5",
    "matchall action ct zone 1",
    "matchall action tunnel_key unset",
    "matchall action sample rate 100 group 1",
    "matchall action nat egress 10.1.1.1/32 10.2.2.2",
    "matchall action connmark",
    "matchall action csum ip",
];

fn traffic_control(host: &Host) -> Result<()> {
    let mut lines = Vec::new();
    for discipline in DISCIPLINES {
        lines.push(format!("qdisc add dev d0 root {discipline}"));
        lines.push("qdisc del dev d0 root".to_owned());
    }
    lines.push("qdisc add dev d0 clsact".to_owned());
    for (index, filter) in FILTERS.iter().enumerate() {
        lines.push(format!("filter add dev d0 egress protocol ip prio {} {filter}", index + 1));
    }
    let lines = batch(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    let script = format!(
        "ip link add d0 type dummy; ip link set d0 up; tc -batch - {lines}
        tc filter show dev d0 egress | sed -n 's:.* pref \\([0-9]*\\) .*:\\1:p' | sort -un | wc -l"
    );
    sh(host, &script)?.succeeds()?.prints(&format!("{}\n", FILTERS.len()))?;
    Ok(())
}

/// In the form of iptables-save(8): rules as kube-proxy, Istio, docker, Calico and Cilium make them, and one of each
/// other match and target that Debian's kernel has.
const RULES: &[&str] = &[
    "*raw",
    "-A PREROUTING -p udp --dport 53 -j CT --notrack",
    "-A PREROUTING -p tcp --dport 1 -j TRACE",
    "-A PREROUTING -m rpfilter --invert -j DROP",
    "COMMIT",
    "*mangle",
    "-A PREROUTING -p tcp -m socket --transparent -j MARK --set-mark 1",
    "-A PREROUTING -p tcp --dport 80 -j TPROXY --tproxy-mark 0x1/0x1 --on-port 15001",
    "-A PREROUTING -m ttl --ttl-lt 2 -j TTL --ttl-set 64",
    "-A PREROUTING -j DSCP --set-dscp 10",
    "-A PREROUTING -j CONNMARK --restore-mark",
    "-A PREROUTING -j TEE --gateway 10.8.0.1",
    "-A POSTROUTING -j CHECKSUM --checksum-fill",
    "-A POSTROUTING -j CLASSIFY --set-class 1:1",
    "COMMIT",
    "*nat",
    "-A PREROUTING -m addrtype --dst-type LOCAL -j RETURN",
    "-A PREROUTING -p tcp --dport 81 -m statistic --mode random --probability 0.5 -j DNAT --to-destination 10.8.0.2:82",
    "-A PREROUTING -d 10.5.0.0/24 -j NETMAP --to 10.6.0.0/24",
    "-A OUTPUT -m owner --uid-owner 1337 -j RETURN",
    "-A OUTPUT -p tcp -j REDIRECT --to-ports 15001",
    "-A POSTROUTING -m policy --pol ipsec --dir out -j ACCEPT",
    "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully",
    "COMMIT",
    "*filter",
    "-A INPUT -m recent --name a --rcheck --seconds 10 --reap -j ACCEPT",
    "-A INPUT -m recent --name a --set",
    "-A INPUT -m hashlimit --hashlimit-above 10/sec --hashlimit-mode srcip --hashlimit-name h -j DROP",
    "-A INPUT -p tcp -m connlimit --connlimit-above 100 -j REJECT",
    "-A INPUT -m conntrack --ctstate INVALID -j LOG --log-prefix invalid",
    "-A INPUT -m limit --limit 5/min -j NFLOG --nflog-group 1",
    "-A INPUT -p tcp --dport 99 -j NFQUEUE --queue-num 1 --queue-bypass",
    "-A INPUT -m iprange --src-range 10.0.0.1-10.0.0.9 -j DROP",
    "-A INPUT -m mac --mac-source 02:00:00:00:00:01 -j DROP",
    "-A INPUT -m pkttype --pkt-type multicast -j ACCEPT",
    "-A INPUT -m length --length 0:1500 -j ACCEPT",
    "-A INPUT -m string --string evil --algo bm -j DROP",
    "-A INPUT -m u32 --u32 6&0xFF=1 -j ACCEPT",
    "-A INPUT -m time --timestart 00:00 --timestop 23:59 -j ACCEPT",
    "-A INPUT -m connbytes --connbytes 1: --connbytes-dir both --connbytes-mode packets -j ACCEPT",
    "-A INPUT -m helper --helper ftp -j ACCEPT",
    "-A INPUT -m physdev --physdev-in eb -j ACCEPT",
    "-A INPUT -m devgroup --src-group 1 -j ACCEPT",
    "-A INPUT -m ipvs --vproto tcp -j ACCEPT",
    "-A INPUT -p sctp -m sctp --dport 9 -j ACCEPT",
    "-A INPUT -m dscp --dscp 10 -j ACCEPT",
    "-A INPUT -p tcp -m tcpmss --mss 1:100 -j DROP",
    "-A INPUT -m quota --quota 1000000 -j ACCEPT",
    "-A INPUT -m connlabel --label 1 -j ACCEPT",
    "-A INPUT -m bpf --bytecode \"1,6 0 0 0\" -j ACCEPT",
    "-A INPUT -p ah -m ah --ahspi 1 -j DROP",
    "-A INPUT -p esp -m esp --espspi 1 -j DROP",
    "COMMIT",
];

fn rules(host: &Host) -> Result<()> {
    let input = batch(RULES);
    let script = format!(
        "for kind in nft legacy; do
            iptables-$kind-restore {input}
            echo $kind $(iptables-$kind-save | grep -c '^-A')
        done"
    );
    let count = RULES.iter().filter(|rule| rule.starts_with("-A")).count();
    sh(host, &script)?.succeeds()?.prints(&format!("nft {count}\nlegacy {count}\n"))?;
    Ok(())
}

fn sets_and_servers(host: &Host) -> Result<()> {
    let script =
        "iptables-legacy -A INPUT -m set --match-set none src 2>&1 | grep -o 'Set none doesn.t exist'
        genl ctrl get name IPVS | grep -o 'Name: IPVS'; head -n 1 /proc/net/ip_vs | cut -d ' ' -f 1-3";
    sh(host, script)?.succeeds()?.prints("Set none doesn't exist\nName: IPVS\nIP Virtual Server\n")?;
    Ok(())
}

/// A server and a client of this protocol, in one process.
fn protocols(host: &Host) -> Result<()> {
    let program = "use Socket; system('ip link set lo up');
        for (['sctp', 132], ['mptcp', 262]) {
            my ($name, $protocol) = @$_;
            socket(my $server, AF_INET, SOCK_STREAM, $protocol) or die qq($name: $!);
            bind($server, sockaddr_in(7000, INADDR_LOOPBACK)) && listen($server, 1) or die qq($name: $!);
            socket(my $client, AF_INET, SOCK_STREAM, $protocol) or die qq($name: $!);
            connect($client, sockaddr_in(7000, INADDR_LOOPBACK)) or die qq($name: $!);
            accept(my $accepted, $server) or die qq($name: $!);
            syswrite($client, qq(by $name\\n)); sysread($accepted, my $text, 100); print $text;
        }";
    perl(host, program)?.succeeds()?.prints("by sctp\nby mptcp\n")?;
    Ok(())
}

/// The kernel sends a record of TLS 1.3: what is read on the other side is 22 bytes longer, and is not the text
/// (RFC 8446, 5.2: a header of 5 bytes, the type of the content, and a tag of 16 bytes).
fn tls(host: &Host) -> Result<()> {
    let program = "use Socket; system('ip link set lo up');
        socket(my $server, AF_INET, SOCK_STREAM, 0); bind($server, sockaddr_in(7000, INADDR_LOOPBACK)) or die $!;
        listen($server, 1); socket(my $client, AF_INET, SOCK_STREAM, 0);
        connect($client, sockaddr_in(7000, INADDR_LOOPBACK)) or die $!; accept(my $accepted, $server);
        my ($TCP, $ULP, $TLS, $TX, $AES_GCM_128) = (6, 31, 282, 1, 51);
        setsockopt($client, $TCP, $ULP, 'tls') or die qq(ULP: $!);
        setsockopt($client, $TLS, $TX, pack('SS', 0x0304, $AES_GCM_128) . 'k' x 36) or die qq(TX: $!);
        syswrite($client, 'secret'); sysread($accepted, my $record, 100);
        print length($record) - 6, ' ', index($record, 'secret'), qq(\\n)";
    perl(host, program)?.succeeds()?.prints("22 -1\n")?;
    Ok(())
}

fn congestion(host: &Host) -> Result<()> {
    let program = "use Socket; socket(my $socket, AF_INET, SOCK_STREAM, 0);
        for my $name ('bbr', 'dctcp', 'cubic') {
            setsockopt($socket, 6, 13, $name) or die qq($name: $!);
            print unpack('Z*', getsockopt($socket, 6, 13)), qq(\\n);
        }";
    perl(host, program)?.succeeds()?.prints("bbr\ndctcp\ncubic\n")?;
    Ok(())
}

/// By fsopen(2), whose number is 430. It fails with ENODEV for a file system that the kernel does not have.
fn file_systems(host: &Host) -> Result<()> {
    let program = "for (qw(xfs btrfs squashfs nfs nfs4 cifs autofs iso9660 udf vfat exfat ext4 erofs)) {
            my $name = $_; syscall(430, $name, 0) >= 0 or die qq($name: $!);
        }";
    perl(host, program)?.succeeds()?;
    Ok(())
}

/// A file becomes a loop device, DISK. It is let go of when the shell ends.
const LOOP: &str = "for n in 0 1 2 3 4 5 6 7; do test -e /dev/loop$n || mknod /dev/loop$n b 7 $n; done
    truncate -s 8M /tmp/file; DISK=$(/usr/sbin/losetup --find --show /tmp/file)
    trap '/usr/sbin/losetup --detach $DISK' EXIT
    ";

fn disk(host: &Host) -> Result<()> {
    let script = format!(
        "{LOOP} mke2fs -q $DISK >/dev/null; mkdir /tmp/mounted; mount -t ext4 $DISK /tmp/mounted
        echo text > /tmp/mounted/file; umount /tmp/mounted
        mount -t ext4 -o ro $DISK /tmp/mounted; cat /tmp/mounted/file; umount /tmp/mounted"
    );
    sh(host, &script)?.succeeds()?.prints("text\n")?;
    Ok(())
}

/// By the requests of device mapper (linux/dm-ioctl.h): make a device, load its table, resume it, and remove it.
const DEVICE_MAPPER: &str = "
    my ($disk, $name) = (shift, qq(bulkhead-e2e-$$-) . time);
    open(my $control, '+<', '/dev/mapper/control') or die $!;
    sub request {
        my ($number, $targets, $data) = @_;
        my $header = pack('L3LLLlLLLQa128a129a7', 4, 0, 0, 312 + length $data, 312, $targets, 0, 0, 0, 0, 0, $name);
        my $buffer = $header . $data;
        ioctl($control, 0xc138fd00 | $number, $buffer) or die qq(request $number: $!);
        return unpack('Q', substr($buffer, 40, 8));
    }
    my $number = request(3, 0, '');
    my $key = '0123456789abcdef' x 4;
    my $words = qq(aes-xts-plain64 $key 0 $disk 0);
    request(9, 1, pack('QQlLa16Z*', 0, 2048, 0, 0, 'crypt', $words) . qq(\\0) x 8);
    request(6, 0, '');
    system('mknod', '/tmp/plain', 'b', $number >> 8, $number & 0xff) == 0 or die;
    open(my $plain, '+<', '/tmp/plain') or die qq(plain: $!);
    syswrite($plain, 'secret' x 1024) == 6144 or die $!; $plain->sync or die $!;
    sysseek($plain, 0, 0); sysread($plain, my $read, 6144); print index($read, 'secret'), ' ';
    close($plain); request(4, 0, '');
    open(my $raw, '<', $disk) or die $!; sysread($raw, my $there, 6144); print index($there, 'secret'), qq(\\n)";

fn encrypted_disk(host: &Host) -> Result<()> {
    let script = format!("{LOOP} perl -MIO::Handle -e \"$PROGRAM\" $DISK");
    let program = format!("PROGRAM={DEVICE_MAPPER}");
    container(host).flags(["--env", &program]).run(&["sh", "-ec", &script])?.succeeds()?.prints("0 -1\n")?;
    Ok(())
}

fn accounting(host: &Host) -> Result<()> {
    let script = "for it in cpu io memory; do grep -o '^some avg10=' /proc/pressure/$it; done
        grep -o '^rchar' /proc/self/io; test $(wc -w < /proc/self/schedstat) = 3 && echo schedstat
        genl ctrl get name TASKSTATS | grep -o 'Name: TASKSTATS'";
    let expected = "some avg10=\nsome avg10=\nsome avg10=\nrchar\nschedstat\nName: TASKSTATS\n";
    sh(host, script)?.succeeds()?.prints(expected)?;
    Ok(())
}

/// The log action of a system call filter writes an audit message of type 1326 (SECCOMP).
fn logged_call(host: &Host) -> Result<()> {
    const GETPID: u32 = 39;
    let directory = scratch()?;
    let profile = directory.path().join("profile.json");
    let rules = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["getpid"], "action": "SCMP_ACT_LOG"}],
    });
    fs::write(&profile, rules.to_string()).context("cannot write the profile")?;
    // The log has the name of the program: on runc it is the host's log.
    let id = host.new_id();
    probe::write(&directory.path().join(&id), Bits::B64, GETPID, [0; 3])?;
    let flags = ["--privileged", "--seccomp", "--seccomp-profile", &profile.display().to_string()];
    let container = host.container().flags(flags).bind(directory.path(), "/probes", "rbind:ro");
    let name = &id[..id.len().min(15)];
    let script =
        format!("/probes/{id}; dmesg | grep 'type=1326.* comm=\"{name}\".* syscall={GETPID} ' | wc -l");
    container.run(&["sh", "-c", &script])?.succeeds()?.prints("1\n")?;
    Ok(())
}

/// By get_mempolicy(2) and set_mempolicy(2), whose numbers are 239 and 238. 1 is MPOL_PREFERRED, of node 0.
fn memory_policies(host: &Host) -> Result<()> {
    let program = "my $nodes = pack('Q', 1); syscall(238, 1, $nodes, 64) == 0 or die qq(set: $!);
        my $mode = pack('l', 0); syscall(239, $mode, 0, 0, 0, 0) == 0 or die qq(get: $!);
        print unpack('l', $mode), qq(\\n)";
    perl(host, program)?.succeeds()?.prints("1\n")?;
    Ok(())
}

/// As CRIU does, before it makes a process again.
fn next_process_id(host: &Host) -> Result<()> {
    let script = "echo 4999 > /proc/sys/kernel/ns_last_pid; sh -c 'echo $$; true'";
    sh(host, script)?.succeeds()?.prints("5000\n")?;
    Ok(())
}

/// Without CAP_NET_ADMIN, a process causes the kernel to load a protocol for its socket, but no congestion control.
fn without_privileges(host: &Host) -> Result<()> {
    let program = "use Socket; use Errno; socket(my $sctp, AF_INET, SOCK_STREAM, 132) or die qq(sctp: $!); print qq(sctp\\n);
        socket(my $tcp, AF_INET, SOCK_STREAM, 0) or die $!;
        setsockopt($tcp, 6, 13, 'vegas') and die 'vegas was loaded'; print $!{ENOENT} ? qq(no vegas\\n) : qq($!\\n)";
    let container = with_programs(host.container());
    container.run(&["perl", "-e", program])?.succeeds()?.prints("sctp\nno vegas\n")?;
    Ok(())
}

/// The programs that the kernel executes for containers are in a cgroup with limits, and nothing else is.
fn limited_loaders(host: &Host) -> Result<()> {
    let program =
        "use Socket; for my $number (132, 200 .. 240) { socket(my $any, AF_INET, SOCK_STREAM, $number) }";
    let script = format!(
        "cd /sys/fs/cgroup/modules; cat memory.max pids.max; perl -e '{program}'
        grep -q '^sctp ' /proc/modules && test $(cat memory.peak) -gt 0 && cat pids.current cgroup.procs"
    );
    let cgroups = ["--mount", "type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=ro"];
    let container = with_programs(host.container().flags(cgroups));
    container.run(&["sh", "-ec", &script])?.succeeds()?.prints("33554432\n64\n0\n")?;
    Ok(())
}

/// The host's kernel has modules too, with signatures of Debian. A privileged container may ask for one to be loaded.
fn foreign_module(host: &Host) -> Result<()> {
    let script = "file=$(find /usr/lib/modules -name 'ifb.ko*' | head -n 1); test -f \"$file\"
        /usr/sbin/insmod \"$file\" 2>&1 || grep -c '^ifb ' /proc/modules || true";
    let finished = sh(host, script)?;
    finished.succeeds()?.check("it is refused", finished.text().contains("Key was rejected by service"))?;
    finished.check("it is not loaded", finished.text().lines().any(|line| line == "0"))?;
    Ok(())
}
