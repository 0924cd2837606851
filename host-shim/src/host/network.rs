//! The pod's network on the host: the network namespace of the VMM, with redirects between the pod's interfaces and
//! the VMM's taps.
//!
//! A CNI or docker sets the network up as for a container: before Create in a namespace that has a path, or before
//! Start in the namespace of the process that Create answered, which is the VMM. At Start the interfaces in it are
//! [scanned](scan), and each is connected with a tap ([`redirect`]). The guest's agent gives a network card the same
//! name, addresses, routes and neighbours, and the namespace there the same rules ([`routing`]) and kernel parameters
//! ([`parameters`]). The namespace is [watched](watch), so that the guest follows what changes later. All of it but the
//! parameters is rtnetlink(7); no program is executed.

mod dhcp;
pub(crate) mod loopback;
pub(crate) mod name_server;
mod netns;
mod parameters;
mod redirect;
mod replies;
mod routing;
mod scan;
mod unsuitable;
mod watch;

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use bulkhead_agent_api::agent::ConfigureNetworkRequest;
use bulkhead_vmm_api::ATTACHABLE_DEVICES;

pub(crate) use self::{
    parameters::{OfInterface, Parameters},
    redirect::remove as remove_redirect,
    routing::Routing,
    scan::{connected_route, local_address, source_of_message as source_of},
    watch::Watch,
};
use crate::{
    host::{
        blocking::{self, BlockingError},
        journal::{Effect, Journal},
        process_id::ProcessId,
    },
    types::error::chain,
};

/// The tap of the guest's first network card, in the network namespace that the VMM is in. The names of the others
/// begin with it. cAdvisor, which kubelet has in it, adds up the bytes of all interfaces of a pod but those whose names
/// begin with `lo`, `veth`, `docker` or `nerdctl`. With another name, each byte of the pod would count twice.
pub(crate) const TAP: &str = "veth-bulkhead";
/// The same, of a pod that an older version has started.
pub(crate) const FORMER_TAP: &str = "tap-bulkhead";

/// The most interfaces that a pod can have. The guest has one network card from the start. Three places remain for
/// block devices.
pub(crate) const MOST: usize = 1 + ATTACHABLE_DEVICES - 3;

/// A network card of the guest: 0 is the one that it has from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CardNumber(pub(crate) u8);

impl CardNumber {
    /// The name of its tap.
    pub(crate) fn tap(self) -> String {
        if self.0 == 0 { TAP.into() } else { format!("{TAP}{}", self.0) }
    }

    /// The MAC address of the card until the agent sets the pod's. The guest's kernel keeps it as the permanent one.
    pub(crate) fn address(self) -> [u8; 6] {
        [2, 0, 0, 0, 0, self.0 + 1]
    }

    /// The same, as text.
    pub(crate) fn mac(self) -> String {
        self.address().map(|byte| format!("{byte:02x}")).join(":")
    }
}

/// Whether an interface is a tap of a VMM.
fn is_tap(name: &str) -> bool {
    is_tap_of(name, TAP) || is_former_tap(name)
}

/// Whether it is one of a VMM that an older version has started.
fn is_former_tap(name: &str) -> bool {
    is_tap_of(name, FORMER_TAP)
}

fn is_tap_of(name: &str, first: &str) -> bool {
    let number = name.strip_prefix(first);
    number.is_some_and(|number| number.is_empty() || number.parse::<usize>().is_ok())
}

/// Why a pod has no network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    #[error(
        "{path} is the host's own network namespace, which is not implemented in a microVM; give another"
    )]
    HostNamespace { path: PathBuf },
    #[error("cannot open the network namespace {path}")]
    Namespace { path: PathBuf, source: io::Error },
    #[error("the pod's network namespace has the interfaces {names}; at most {MOST} are supported")]
    TooMany { names: String },
    #[error(
        "interface {name}: no network card is left for it: {lost} could not be taken back from the guest"
    )]
    CardsLost { name: String, lost: usize },
    #[error("interface {name} is not an Ethernet interface; only Ethernet is supported")]
    NoEthernet { name: String },
    #[error(
        "interface {name} has no Ethernet address, which a network card needs; give the pod a veth, or a netkit of \
         layer 2 (of Cilium: bpf.datapathMode=netkit-l2)"
    )]
    NoAddress { name: String },
    #[error(
        "interface {name} is an ipvlan in mode l3s, whose packets bypass the redirect to the microVM; use mode l2 or \
         l3"
    )]
    L3s { name: String },
    #[error(
        "interface {name} is stacked on {lower} of the same network namespace, where its packets go to the guest \
         before they reach {name}; make {name} in a container of the pod, or outside of this namespace"
    )]
    Stacked { name: String, lower: String },
    #[error(
        "interface {name} already has an ingress or clsact qdisc (`tc qdisc show dev {name}` in the pod's network \
         namespace), which takes the place of the redirect to the microVM; remove the qdisc, or give the pod another \
         network namespace; `bulkhead gc` removes what a pod that has ended has left"
    )]
    Filtered { name: String },
    #[error(
        "another microVM is in the pod's network namespace, and its interface is {tap}; give each pod a namespace of \
         its own"
    )]
    Shared { tap: String },
    #[error("interface {interface}: route {route}: {what} is not implemented")]
    Route { interface: String, route: String, what: String },
    #[error("the pod's network namespace: rule {rule}: {what} is not implemented")]
    Rule { rule: String, what: String },
    #[error("the pod's network namespace has {count} {what}; at most {most} are supported")]
    TooLong { what: &'static str, count: usize, most: usize },
    #[error("the pod's network namespace: {action}")]
    Kernel { action: String, source: io::Error },
}

/// What was found in the pod's network namespace.
#[derive(Debug)]
pub(crate) struct Scan {
    /// In the order of their indices.
    pub(crate) interfaces: Vec<Found>,
    /// An error: it cannot be given to the guest.
    pub(crate) routing: Result<Routing, NetworkError>,
    /// Whether docker's name server listens in the namespace.
    pub(crate) has_name_server: bool,
}

/// What was found first.
pub(crate) struct FirstScan {
    pub(crate) scan: Scan,
    pub(crate) parameters: Parameters,
    /// Tells of the changes since.
    pub(crate) watch: Watch,
}

/// An interface as it was found on the host.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) index: u32,
    pub(crate) name: String,
    /// The request to the agent, without the container's id and the card. An error: it cannot be given to the guest.
    pub(crate) described: Result<ConfigureNetworkRequest, NetworkError>,
    pub(crate) parameters: OfInterface,
}

/// Refuses a network namespace that does not exist, or that is the host's own.
pub(crate) fn check(path: &Path) -> Result<(), NetworkError> {
    netns::open(path).map(drop)
}

/// The network namespace that the VMM is in.
fn inside(vmm: ProcessId) -> Result<File, NetworkError> {
    let netns = netns::of_process(vmm.pid)?;
    // Otherwise this may be the namespace of a process that has its pid now.
    if !vmm.may_live() {
        return Err(failed("looking for it")(io::Error::other("the VMM has ended")));
    }
    Ok(netns)
}

/// Scans the network namespace of the VMM, and watches it from before that. `operation` is dropped when nothing more is
/// done, here and below.
pub(crate) async fn scan_and_watch(
    vmm: ProcessId,
    operation: impl Send + 'static,
) -> Result<FirstScan, NetworkError> {
    let runtime = tokio::runtime::Handle::current();
    let scan = move || (inside(vmm).and_then(|netns| scan::scan_and_watch(&netns, &runtime)), operation).0;
    blocking::run(scan, drop).await.map_err(broken)?
}

/// Scans the network namespace of the VMM.
pub(crate) async fn scan(vmm: ProcessId, operation: impl Send + 'static) -> Result<Scan, NetworkError> {
    let scan = move || (inside(vmm).and_then(|netns| scan::scan(&netns)), operation).0;
    blocking::run(scan, drop).await.map_err(broken)?
}

/// Makes a tap with this many queues for a network card, in the network namespace of the VMM.
pub(crate) async fn make_tap(
    vmm: ProcessId,
    card: CardNumber,
    queues: usize,
    operation: impl Send + 'static,
) -> Result<Vec<File>, NetworkError> {
    let make = move || {
        let tap = card.tap();
        let create = || {
            bulkhead_vmm_api::tap::create(&tap, queues)
                .map_err(failed(format!("making the tap device {tap}")))
        };
        (inside(vmm).and_then(|netns| netns::visit(&netns, create)), operation).0
    };
    blocking::run(make, drop).await.map_err(broken)?
}

/// An interface that is to be connected with a network card.
pub(crate) struct Connection<'n> {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) card: CardNumber,
    /// The path of the network namespace, if it has one and so outlives the VMM.
    pub(crate) netns: Option<&'n Path>,
    /// Whether docker's name server is to get the answers to what it asks.
    pub(crate) passes_replies: bool,
}

/// Connects an interface in the network namespace of the VMM with the tap of a card. If the caller gives up waiting,
/// the interface is disconnected again, at the latest when the pod is removed.
pub(crate) async fn connect(
    vmm: ProcessId,
    connection: Connection<'_>,
    journal: &mut Journal,
    operation: impl Send + 'static,
) -> Result<(), NetworkError> {
    let Connection { index, name, card, netns, passes_replies } = connection;
    if let Some(netns) = netns {
        let effect = Effect::Redirect { netns: netns.into(), interface: name.clone() };
        if !journal.effects.contains(&effect) {
            journal.record(effect).map_err(failed("writing the journal"))?;
        }
    }
    let netns = netns.map(Path::to_owned);
    let tie = move || {
        let tied =
            inside(vmm).and_then(|inside| redirect::install(&inside, index, &card.tap(), passes_replies));
        (tied, operation)
    };
    let abandoned = move |(_, operation)| {
        // The journal may have been undone before.
        if let Some(netns) = netns
            && let Err(error) = remove_redirect(&netns, &name)
        {
            tracing::error!(error = chain(&error), "the pod's interface stays connected");
        }
        drop(operation);
    };
    let (tied, _operation) = blocking::run(tie, abandoned).await.map_err(broken)?;
    tied
}

/// Disconnects the tap of a card, and the interface that was connected with it, if that is given. It may be gone.
pub(crate) async fn disconnect(
    vmm: ProcessId,
    index: Option<u32>,
    card: CardNumber,
    operation: impl Send + 'static,
) -> Result<(), NetworkError> {
    let cut = move || {
        let cut = inside(vmm).and_then(|inside| redirect::uninstall(&inside, index, &card.tap()));
        (cut, operation).0
    };
    blocking::run(cut, drop).await.map_err(broken)?
}

/// Has an interface pass on packets to all multicast groups until the socket is closed. None: it does so anyway.
pub(crate) async fn pass_multicast(
    vmm: ProcessId,
    index: u32,
    operation: impl Send + 'static,
) -> Result<Option<OwnedFd>, NetworkError> {
    let pass = move || (inside(vmm).and_then(|inside| redirect::pass_multicast(&inside, index)), operation).0;
    blocking::run(pass, drop).await.map_err(broken)?
}

/// Lets the answers to docker's name server through, which was started after these interfaces were connected.
pub(crate) async fn pass_replies(
    vmm: ProcessId,
    connected: Vec<(u32, CardNumber)>,
    operation: impl Send + 'static,
) -> Result<(), NetworkError> {
    let pass = move || {
        let connected: Vec<_> = connected.into_iter().map(|(index, card)| (index, card.tap())).collect();
        (inside(vmm).and_then(|inside| redirect::pass_replies(&inside, &connected)), operation).0
    };
    blocking::run(pass, drop).await.map_err(broken)?
}

fn failed(action: impl Into<String>) -> impl FnOnce(io::Error) -> NetworkError {
    let action = action.into();
    move |source| NetworkError::Kernel { action, source }
}

fn broken(error: BlockingError) -> NetworkError {
    failed("working in it")(io::Error::other(error))
}

/// What the kernel said, or why it could not be asked.
fn refused(action: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> NetworkError {
    let failed = failed(action);
    move |error| match error {
        rtnetlink::Error::NetlinkError(message) => failed(message.to_io()),
        other => failed(io::Error::other(other)),
    }
}

#[cfg(test)]
mod tests;
