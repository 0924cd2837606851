//! Kernel parameters of network namespaces that a container has from the pod's namespace on the host, as files below
//! [`DIRECTORY`], and what they are in a new namespace of the guest's kernel (Linux 6.12). The shim sends what is
//! different on the host.
//!
//! A parameter is in these lists if all of this is true:
//!
//! - The kernel has one for each network namespace, and not one for all.
//! - It says what the kernel does with the pod's packets and sockets, and administrators or CNI plugins change it.
//! - Its value in a new namespace does not follow from the memory of the machine.
//! - It is no secret and no statistics, and the agent sets it in no other way (`disable_ipv6`, the MTU).
//!
//! Each costs the start of a pod some microseconds. The end-to-end case
//! `network/kernel_parameters_begin_as_the_shim_supposes` compares the values with those of a guest.

/// Where the files are.
pub const DIRECTORY: &str = "/proc/sys/net";

/// Bytes of a value at most.
pub const MAX_VALUE: usize = 1023;

/// Those of a namespace, in the order in which they are set: the range of local ports cannot begin below the first
/// port that every user can have.
pub const OF_NAMESPACE: [(&str, &str); 33] = [
    ("core/somaxconn", "4096"),
    ("ipv4/icmp_echo_ignore_all", "0"),
    ("ipv4/ip_default_ttl", "64"),
    ("ipv4/ip_unprivileged_port_start", "1024"),
    ("ipv4/ip_local_port_range", "32768\t60999"),
    ("ipv4/ip_local_reserved_ports", ""),
    ("ipv4/ip_no_pmtu_disc", "0"),
    ("ipv4/ip_nonlocal_bind", "0"),
    ("ipv4/ping_group_range", "1\t0"),
    ("ipv4/tcp_abort_on_overflow", "0"),
    ("ipv4/tcp_congestion_control", "cubic"),
    ("ipv4/tcp_ecn", "2"),
    ("ipv4/tcp_fastopen", "1"),
    ("ipv4/tcp_fin_timeout", "60"),
    ("ipv4/tcp_keepalive_intvl", "75"),
    ("ipv4/tcp_keepalive_probes", "9"),
    ("ipv4/tcp_keepalive_time", "7200"),
    ("ipv4/tcp_mtu_probing", "0"),
    ("ipv4/tcp_no_metrics_save", "0"),
    ("ipv4/tcp_notsent_lowat", "4294967295"),
    ("ipv4/tcp_retries2", "15"),
    ("ipv4/tcp_rfc1337", "0"),
    ("ipv4/tcp_sack", "1"),
    ("ipv4/tcp_slow_start_after_idle", "1"),
    ("ipv4/tcp_syn_retries", "6"),
    ("ipv4/tcp_synack_retries", "5"),
    ("ipv4/tcp_syncookies", "1"),
    ("ipv4/tcp_timestamps", "1"),
    ("ipv4/tcp_tw_reuse", "2"),
    ("ipv4/tcp_window_scaling", "1"),
    ("ipv6/bindv6only", "0"),
    ("ipv6/icmp/echo_ignore_all", "0"),
    ("ipv6/ip_nonlocal_bind", "0"),
];

/// A parameter of interfaces: a file in `conf/all`, `conf/default` and `conf/NAME` of IPv4 or IPv6. The kernel sends
/// those of an interface with it. The files of the other two have to be read.
#[derive(Debug, Clone, Copy)]
pub struct OfInterfaces {
    pub name: &'static str,
    /// Its place in the array of IFLA_INET_CONF or IFLA_INET6_CONF: `DEVCONF_*` of linux/ipv6.h, or
    /// `IPV4_DEVCONF_*` of linux/ip.h, less one.
    pub place: usize,
    /// For all interfaces. None: it is set for single interfaces only, so `conf/all` and `conf/default` are not read.
    pub all: Option<&'static str>,
    /// What a new interface begins with.
    pub default: &'static str,
    /// Of the loopback interface.
    pub loopback: &'static str,
}

const fn same(name: &'static str, place: usize, value: &'static str) -> OfInterfaces {
    OfInterfaces { name, place, all: Some(value), default: value, loopback: value }
}

const fn single(name: &'static str, place: usize, value: &'static str) -> OfInterfaces {
    OfInterfaces { name, place, all: None, default: value, loopback: value }
}

/// Those of interfaces for IPv4, in the order in which they are set. `forwarding` of `all`, which `ip_forward` is
/// another name for, changes `forwarding` of all others and `accept_redirects` of `all`. So it is the first.
pub const IPV4: [OfInterfaces; 18] = [
    same("forwarding", 0, "0"),
    same("accept_local", 22, "0"),
    same("accept_redirects", 3, "1"),
    OfInterfaces { name: "accept_source_route", place: 8, all: Some("0"), default: "1", loopback: "1" },
    same("arp_accept", 20, "0"),
    same("arp_announce", 17, "0"),
    same("arp_filter", 12, "0"),
    same("arp_ignore", 18, "0"),
    same("arp_notify", 21, "0"),
    single("ignore_routes_with_linkdown", 28, "0"),
    same("log_martians", 10, "0"),
    single("promote_secondaries", 19, "0"),
    same("proxy_arp", 2, "0"),
    same("route_localnet", 25, "0"),
    same("rp_filter", 7, "0"),
    same("secure_redirects", 4, "1"),
    same("send_redirects", 5, "1"),
    same("src_valid_mark", 23, "0"),
];

/// The same for IPv6. `forwarding` of `all` changes that of all others.
pub const IPV6: [OfInterfaces; 16] = [
    same("forwarding", 0, "0"),
    OfInterfaces { name: "accept_dad", place: 27, all: None, default: "1", loopback: "-1" },
    same("accept_ra", 3, "1"),
    single("accept_ra_defrtr", 17, "1"),
    single("accept_ra_pinfo", 18, "1"),
    single("accept_ra_rtr_pref", 19, "1"),
    same("accept_redirects", 4, "1"),
    same("accept_source_route", 24, "0"),
    same("autoconf", 5, "1"),
    single("dad_transmits", 6, "1"),
    single("hop_limit", 1, "64"),
    single("keep_addr_on_down", 42, "0"),
    single("ndisc_notify", 29, "0"),
    same("proxy_ndp", 22, "0"),
    single("router_solicitations", 7, "-1"),
    OfInterfaces { name: "use_tempaddr", place: 10, all: Some("0"), default: "0", loopback: "-1" },
];

/// The names of both families below [`DIRECTORY`], and their lists.
pub const FAMILIES: [(&str, &[OfInterfaces]); 2] = [("ipv4", &IPV4), ("ipv6", &IPV6)];
