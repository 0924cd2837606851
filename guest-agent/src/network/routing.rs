//! Rules of policy routing, routes that belong to no interface, and addresses of the loopback interface, in a
//! container's network namespace.

use std::{io, os::fd::BorrowedFd};

use bulkhead_agent_api::agent::{ChangeRoutingRequest, NetlinkMessage};
use nix::sched::{CloneFlags, setns};

use super::{NetworkError, netlink::Socket};

/// Changes them in the network namespace of the process `pidfd`, and leaves this thread in it.
pub fn change(pidfd: BorrowedFd<'_>, request: &ChangeRoutingRequest) -> Result<(), NetworkError> {
    setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(|errno| NetworkError::Namespace(errno.into()))?;
    apply(request)
}

/// Changes them in the network namespace of this thread. New rules are added before old ones are removed, so that a
/// packet always finds a table. Old routes and addresses are removed before new ones are added: the kernel has one
/// route for each destination and metric, and each IPv6 address only once. If the kernel refuses a message, the others
/// are sent all the same. The first error is returned.
fn apply(request: &ChangeRoutingRequest) -> Result<(), NetworkError> {
    let failed = |action: String| |source| NetworkError::Routing { action, source };
    let socket = Socket::open().map_err(failed("opening a netlink socket".into()))?;
    type Act = fn(&Socket, &[u8]) -> io::Result<()>;
    let steps: [(&str, &[NetlinkMessage], Act); 6] = [
        ("removing the address of lo", &request.removed_addresses, Socket::remove_address),
        ("adding the address of lo", &request.addresses, Socket::add_address),
        ("removing the route", &request.removed_routes, Socket::remove_other_route),
        ("adding the route", &request.routes, Socket::add_other_route),
        ("adding the rule", &request.rules, Socket::add_rule),
        ("removing the rule", &request.removed_rules, Socket::remove_rule),
    ];
    let mut result = Ok(());
    for (action, messages, act) in steps {
        for NetlinkMessage { what, body, .. } in messages {
            let done = act(&socket, body).map_err(failed(format!("{action} {what}")));
            result = result.and(done);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use std::{process::Command, thread};

    use nix::sched::unshare;

    use super::*;

    /// Does this in a network namespace of its own.
    fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        let work = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("these tests make network namespaces: run them as root");
            work()
        };
        thread::scope(|scope| scope.spawn(work).join().unwrap())
    }

    fn message(what: &str, parts: &[&[u8]]) -> NetlinkMessage {
        NetlinkMessage { what: what.into(), body: parts.concat(), ..Default::default() }
    }

    /// `from 10.1.2.3 lookup 100` of this priority: a struct fib_rule_hdr, FRA_SRC, FRA_PRIORITY and FRA_TABLE.
    fn rule(priority: u8) -> NetlinkMessage {
        let header = [2, 0, 32, 0, 100, 0, 0, 1, 0, 0, 0, 0];
        let (source, table) = ([8, 0, 2, 0, 10, 1, 2, 3], [8, 0, 15, 0, 100, 0, 0, 0]);
        message("77: from 10.1.2.3", &[&header, &source, &[8, 0, 6, 0, priority, 0, 0, 0], &table])
    }

    /// `blackhole default table 100`: a struct rtmsg of protocol boot.
    fn route() -> NetlinkMessage {
        message("blackhole default", &[&[2, 0, 0, 0, 100, 3, 0, 6, 0, 0, 0, 0]])
    }

    /// What `ip` says, if this machine has it.
    fn ip(words: &str) -> Option<String> {
        let said = Command::new("ip").args(words.split(' ')).output().ok()?;
        Some(String::from_utf8(said.stdout).unwrap())
    }

    #[test]
    fn rules_and_routes_come_and_go_and_again_is_no_error() {
        apart(|| {
            let mut wanted = ChangeRoutingRequest::new();
            (wanted.rules, wanted.routes) = (vec![rule(77)], vec![route()]);
            for _ in 0..2 {
                apply(&wanted).unwrap();
                let Some(rules) = ip("rule") else { return };
                assert_eq!(rules.matches("77:\tfrom 10.1.2.3 lookup 100").count(), 1, "{rules}");
                assert_eq!(ip("route show table 100").unwrap().trim(), "blackhole default");
            }
            let mut wanted = ChangeRoutingRequest::new();
            (wanted.removed_rules, wanted.removed_routes) = (vec![rule(77)], vec![route()]);
            for _ in 0..2 {
                apply(&wanted).unwrap();
                assert!(!ip("rule").unwrap().contains("10.1.2.3"));
                assert_eq!(ip("route show table 100").unwrap(), "");
            }
        });
    }

    #[test]
    fn an_address_of_the_loopback_interface_can_be_the_source_of_a_route() {
        apart(|| {
            // 10.9.9.9/32 of interface 1: a struct ifaddrmsg, IFA_ADDRESS, IFA_LOCAL.
            let (header, ip) = ([2, 32, 0, 0, 1, 0, 0, 0], [10, 9, 9, 9]);
            let parts: [&[u8]; 5] = [&header, &[8, 0, 1, 0], &ip, &[8, 0, 2, 0], &ip];
            let address = message("10.9.9.9/32", &parts);
            crate::syscall::loopback_up().unwrap();
            let bound = || std::net::UdpSocket::bind("10.9.9.9:0");
            assert!(bound().is_err());
            let mut wanted = ChangeRoutingRequest::new();
            wanted.addresses = vec![address.clone()];
            for _ in 0..2 {
                apply(&wanted).unwrap();
                bound().unwrap();
            }
            let mut wanted = ChangeRoutingRequest::new();
            wanted.removed_addresses = vec![address];
            for _ in 0..2 {
                apply(&wanted).unwrap();
                assert!(bound().is_err());
            }
        });
    }

    /// IFA_F_NODAD, without which an address has another flag at first.
    const NODAD: u8 = 2;

    /// fd00::9 of interface 1 with this prefix length: a struct ifaddrmsg, IFA_ADDRESS, IFA_CACHEINFO.
    fn ipv6_address(prefix: u8, preferred: u32) -> NetlinkMessage {
        let mut ip = [0; 16];
        (ip[0], ip[15]) = (0xfd, 9);
        let times = [preferred, u32::MAX, 0, 0].map(u32::to_ne_bytes).concat();
        let parts: [&[u8]; 5] =
            [&[10, prefix, NODAD, 0, 1, 0, 0, 0], &[20, 0, 1, 0], &ip, &[20, 0, 6, 0], &times];
        message(&format!("fd00::9/{prefix}"), &parts)
    }

    #[test]
    fn an_ipv6_address_of_the_loopback_interface_takes_the_place_of_another_form() {
        apart(|| {
            crate::syscall::loopback_up().unwrap();
            // The address, an index, the prefix length, the scope and the flags (0x20: deprecated) of each.
            let found = || {
                let table = std::fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap();
                let line = table.lines().find(|line| line.starts_with("fd00")).unwrap_or_default().to_owned();
                line.split_whitespace().skip(2).map(str::to_owned).collect::<Vec<_>>()
            };
            let mut wanted = ChangeRoutingRequest::new();
            wanted.addresses = vec![ipv6_address(128, u32::MAX)];
            apply(&wanted).unwrap();
            assert_eq!(found(), ["80", "00", "82", "lo"]);
            wanted.addresses = vec![ipv6_address(128, 0)];
            apply(&wanted).unwrap();
            assert_eq!(found(), ["80", "00", "a2", "lo"]);
            wanted.removed_addresses = wanted.addresses;
            wanted.addresses = vec![ipv6_address(64, u32::MAX)];
            apply(&wanted).unwrap();
            assert_eq!(found(), ["40", "00", "82", "lo"]);
        });
    }

    #[test]
    fn what_the_kernel_refuses_keeps_nothing_else_away() {
        apart(|| {
            let mut wanted = ChangeRoutingRequest::new();
            wanted.addresses =
                vec![message("10.9.9.9/33", &[&[2, 33, 0, 0, 1, 0, 0, 0]]), ipv6_address(128, 7)];
            (wanted.rules, wanted.routes) = (vec![rule(77)], vec![route()]);
            let error = apply(&wanted).unwrap_err().to_string();
            assert!(error.starts_with("adding the address of lo 10.9.9.9/33: "), "{error}");
            let table = std::fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap();
            assert!(table.starts_with("fd00"), "{table}");
            let Some(rules) = ip("rule") else { return };
            assert!(rules.contains("77:\tfrom 10.1.2.3 lookup 100"), "{rules}");
            assert_eq!(ip("route show table 100").unwrap().trim(), "blackhole default");
        });
    }

    #[test]
    fn what_fails_is_named() {
        let mut wanted = ChangeRoutingRequest::new();
        wanted.rules = vec![message("77: from all lookup 0", &[&[2, 0, 0, 0, 0, 0, 0, 0]])];
        let error = apart(|| apply(&wanted).unwrap_err().to_string());
        assert!(error.starts_with("adding the rule 77: from all lookup 0: "), "{error}");
    }
}
