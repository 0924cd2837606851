//! Networks of the host for the cases: a bridge, and network namespaces with an interface on it, as a CNI makes them.
//! All are gone when they are dropped.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow};
use nix::sched::{CloneFlags, setns};

use crate::command::{Cmd, Finished};
use crate::ctr::{Container, Host};

/// The bridge's addresses.
pub(crate) const GATEWAY: &str = "10.77.0.1";
pub(crate) const GATEWAY6: &str = "fd77::1";
/// Of everything on the bridge: smaller than an Ethernet's, as for what goes on through a tunnel.
pub(crate) const MTU: u32 = 1400;

/// Distinguishes what one run of the tests makes: names of interfaces are short.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// `ip` with these words (ip(8)).
pub(crate) fn ip(words: &str) -> Result<Finished> {
    let finished = Cmd::new("ip").args(words.split_whitespace()).run()?;
    finished.succeeds()?;
    Ok(finished)
}

fn unique(prefix: &str) -> String {
    format!("{prefix}{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A bridge of the host's, with [`GATEWAY`] and [`GATEWAY6`].
pub(crate) struct Bridge {
    name: String,
}

impl Bridge {
    pub(crate) fn new() -> Result<Self> {
        let bridge = Self { name: unique("e2e-br") };
        let name = &bridge.name;
        ip(&format!("link add {name} mtu {MTU} type bridge"))?;
        ip(&format!("addr add {GATEWAY}/24 dev {name}"))?;
        ip(&format!("addr add {GATEWAY6}/64 dev {name} nodad"))?;
        ip(&format!("link set {name} up"))?;
        Ok(bridge)
    }

    /// A network namespace with `eth0` on the bridge, whose addresses end with this number.
    pub(crate) fn namespace(&self, number: u8) -> Result<Namespace> {
        let namespace = Namespace::new("eth0", &mac(number))?;
        let Namespace { name, host_end } = &namespace;
        ip(&format!("link set {host_end} mtu {MTU} master {} up", self.name))?;
        ip(&format!("-n {name} addr add {}/24 dev eth0", address(number)))?;
        ip(&format!("-n {name} addr add {}/64 dev eth0 nodad", address6(number)))?;
        ip(&format!("-n {name} link set eth0 mtu {MTU} up"))?;
        ip(&format!("-n {name} route add default via {GATEWAY}"))?;
        ip(&format!("-n {name} route add default via {GATEWAY6}"))?;
        Ok(namespace)
    }

    /// A tap device on the bridge, for a VM.
    pub(crate) fn tap(&self) -> Result<Tap> {
        let tap = Tap { name: unique("e2e-tap") };
        let name = &tap.name;
        ip(&format!("tuntap add {name} mode tap"))?;
        ip(&format!("link set {name} mtu {MTU} master {} up", self.name))?;
        Ok(tap)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        let _ = ip(&format!("link del {}", self.name));
    }
}

/// What [`Bridge::tap`] gives.
pub(crate) struct Tap {
    name: String,
}

impl Tap {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = ip(&format!("link del {}", self.name));
    }
}

/// What [`Bridge::namespace`] gives.
pub(crate) fn mac(number: u8) -> String {
    format!("02:00:00:00:77:{number:02x}")
}

pub(crate) fn address(number: u8) -> String {
    format!("10.77.0.{number}")
}

pub(crate) fn address6(number: u8) -> String {
    format!("fd77::{number:x}")
}

/// The addresses in the network of [`Namespace::add`].
pub(crate) fn address_in(number: u8) -> String {
    format!("10.76.{number}.2")
}

pub(crate) fn gateway(number: u8) -> String {
    format!("10.76.{number}.1")
}

/// A network namespace of the host, named below /run/netns.
pub(crate) struct Namespace {
    name: String,
    /// The end outside of the interface that it was made with.
    host_end: String,
}

impl Namespace {
    /// Makes one with an interface, which is down and has no address but this one on the Ethernet.
    pub(crate) fn new(interface: &str, mac: &str) -> Result<Self> {
        let namespace = Self { name: unique("e2e-ns"), host_end: unique("e2e-veth") };
        let Self { name, host_end } = &namespace;
        ip(&format!("netns add {name}"))?;
        ip(&format!("-n {name} link set lo up"))?;
        ip(&format!("link add {host_end} type veth peer name {interface} address {mac} netns {name}"))?;
        Ok(namespace)
    }

    /// For `ip -n` and `tc -n`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The end outside of its interface.
    pub(crate) fn host_end(&self) -> &str {
        &self.host_end
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    /// Adds another interface of this name, in a network of its own with this number: its address is [`address_in`],
    /// and that of the host's end is [`gateway`].
    pub(crate) fn add(&self, interface: &str, number: u8) -> Result<()> {
        let (name, host_end) = (&self.name, unique("e2e-veth"));
        let veth = format!("{host_end} type veth peer name {interface} address {}", mac(number));
        ip(&format!("link add {veth} netns {name}"))?;
        ip(&format!("addr add {}/24 dev {host_end}", gateway(number)))?;
        ip(&format!("link set {host_end} up"))?;
        ip(&format!("-n {name} addr add {}/24 dev {interface}", address_in(number)))?;
        ip(&format!("-n {name} link set {interface} mtu {MTU} up"))?;
        Ok(())
    }

    /// Does something in it, on the host.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let netns = File::open(self.path()).context("the network namespace is gone")?;
        let visit = || {
            setns(netns, CloneFlags::CLONE_NEWNET).context("cannot enter the network namespace")?;
            work()
        };
        // In a thread of its own, which is nowhere else afterwards.
        thread::scope(|scope| scope.spawn(visit).join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))))
    }

    /// A container in it.
    pub(crate) fn container<'h>(&self, host: &'h Host) -> Container<'h> {
        host.container().flags(["--with-ns", &format!("network:{}", self.path().display())])
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The interface goes with it, though not at once: the next namespace gets other names.
        let _ = ip(&format!("netns del {}", self.name));
        let _ = Cmd::new("ip").args(["link", "del", &self.host_end]).run();
    }
}
