//! The network of a pod: which network card of the guest is which interface on the host. It is set up when the pod's
//! first container starts, and follows the host from then on.

use std::{
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use bulkhead_agent_api::{
    agent::{ChangeNetworkRequest, ConfigureNetworkRequest, KernelParameter},
    relay,
};
use tokio::time::{Instant, timeout};
use tracing::Instrument;

mod cards;
mod changes;

pub(super) use cards::Network;
use cards::{Card, Follows};
use changes::{add_all, change_of_rules, local_addresses, without_foreign_sources};

use super::{PodVm, host_resources::HostResources};
use crate::{
    guest::agent::AgentError,
    host::{
        network::{
            self, CardNumber, Connection, FirstScan, Found, MOST, NetworkError, OfInterface, Routing, Scan,
            Watch, name_server::NameServer,
        },
        pending_operations::Operation,
    },
    process::{error::TaskError, running_guest::Guest},
    types::{
        error::chain,
        log_limit::{LogLimit, Logged},
    },
    vm::control_socket::AttachError,
};

/// Lines in a window of the log.
const LOGGED: u32 = 20;
const LOG_WINDOW: Duration = Duration::from_secs(600);

/// How long the host may take to read its network. For that the kernel takes a lock (rtnl) that another process may
/// hold. Meanwhile other work on the pod's resources waits.
const SCAN: Duration = Duration::from_secs(10);
/// The first scan is a part of Start, which would fail without it, and may take as long as that.
const FIRST_SCAN: Duration = Duration::from_secs(60);
const SCAN_OF: &str = "scan of the pod's network";

/// How long after a failure it is tried again: twice as long each time, up to the longest. While an agent that does not
/// answer is waited for, the shim does no other work on the pod's resources.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const PAUSE_AFTER_SILENCE: Duration = Duration::from_secs(64);
const LONGEST_PAUSE: Duration = Duration::from_secs(256);

impl PodVm {
    /// Gives the guest the network that the host has for the pod by now, once, and what becomes of it later. `id` is a
    /// container that is in the pod's network namespace.
    pub(crate) async fn connect_network(self: &Arc<Self>, guest: &Guest, id: &str) -> Result<(), TaskError> {
        let mut host = self.host.lock().await;
        let Some(host) = host.as_mut().filter(|host| host.network.is_none()) else { return Ok(()) };
        let mut work = Work { pod: self, guest, network: Network::new(id), host };
        let scan = async |turn| network::scan_and_watch(guest.vm.process(), (work.operation(), turn)).await;
        let FirstScan { scan, parameters, mut watch } =
            work.network.scans.read(SCAN_OF, FIRST_SCAN, scan).await?;
        work.network.parameters = parameters;
        let connected = work.connect_all(scan).await;
        let Work { mut network, host, .. } = work;
        if connected.is_ok() {
            watch.expect(network.neighbours());
            network.follows = Some(self.follow_network(guest, watch));
        }
        host.network = Some(network);
        connected
    }

    fn follow_network(self: &Arc<Self>, guest: &Guest, watch: Watch) -> Follows {
        let (pod, guest) = (Arc::downgrade(self), guest.clone());
        let task = async move {
            tokio::select! {
                Err(error) = follow(pod, &guest, watch) => {
                    tracing::error!(
                        error = chain(&error),
                        "the guest is not told any more what changes of the pod's network"
                    );
                }
                _ = guest.vm.exited() => {}
            }
        };
        Follows(tokio::spawn(task.in_current_span()).abort_handle())
    }

    /// Has the guest follow what has changed of the pod's network. Returns what cannot be done. None: the pod ends.
    async fn update_network(&self, guest: &Guest, watch: &mut Watch) -> Option<Vec<TaskError>> {
        let mut host = self.host.lock().await;
        let host = host.as_mut()?;
        let network = host.network.take()?;
        let mut work = Work { pod: self, guest, network, host };
        let scan = async |turn| network::scan(guest.vm.process(), (work.operation(), turn)).await;
        let failed = match work.network.scans.read(SCAN_OF, SCAN, scan).await {
            Ok(scan) => work.follow(scan).await,
            Err(error) => vec![error],
        };
        let Work { network, host, .. } = work;
        watch.expect(network.neighbours());
        host.network = Some(network);
        Some(failed)
    }
}

/// Follows the host's changes until the watch fails or the pod is no more. What cannot be done is logged and tried
/// again: with the next change, and after a pause.
async fn follow(pod: Weak<PodVm>, guest: &Guest, mut watch: Watch) -> io::Result<()> {
    let mut log = LogLimit::new(LOGGED, LOG_WINDOW);
    let (mut last, mut pause) = (Vec::new(), None);
    loop {
        let waited = match pause {
            None => Ok(watch.changed().await),
            Some(pause) => timeout(pause, watch.changed()).await,
        };
        if let Ok(changed) = waited {
            changed?;
            pause = None;
        }
        let Some(pod) = pod.upgrade() else { return Ok(()) };
        let Some(failed) = pod.update_network(guest, &mut watch).await else { return Ok(()) };
        pause = pause_after(pause, &failed);
        let failed: Vec<_> = failed.iter().map(|error| chain(error)).collect();
        if failed.is_empty() && !last.is_empty() {
            tracing::info!("the guest has all of the pod's network again");
        }
        for error in failed.iter().filter(|error| !last.contains(*error)) {
            if log.count(Instant::now()) != Logged::No {
                tracing::warn!(error, "the guest does not have all of the pod's network that changed");
            }
        }
        last = failed;
    }
}

/// How long to wait until all is tried again, after the pause before. None: until something changes.
fn pause_after(before: Option<Duration>, failed: &[TaskError]) -> Option<Duration> {
    let first = if failed.iter().any(is_silent) { PAUSE_AFTER_SILENCE } else { FIRST_PAUSE };
    let next = before.map_or(first, |before| (before * 2).clamp(first, LONGEST_PAUSE));
    (!failed.is_empty()).then_some(next)
}

/// Work on the network of a pod.
struct Work<'p> {
    pod: &'p PodVm,
    guest: &'p Guest,
    network: Network,
    host: &'p mut HostResources,
}

impl Work<'_> {
    fn operation(&self) -> Operation {
        self.pod.pending.begin(&self.pod.settings.id)
    }

    /// Connects all interfaces, or fails with the first that cannot be.
    async fn connect_all(&mut self, scan: Scan) -> Result<(), TaskError> {
        let has_name_server = scan.has_name_server && !scan.interfaces.is_empty();
        let routing = scan.routing?;
        // Nothing is connected if one of them is refused.
        let described = scan.interfaces.into_iter();
        let described = described.map(|found| Ok((found.index, found.described?, found.parameters)));
        let described = described.collect::<Result<Vec<_>, NetworkError>>()?;
        // The first interface brings the parameters of the namespace. That saves a request.
        let alone = described.is_empty().then(|| self.network.parameters.take_those_of_namespace());
        // So no packet goes a way that the rules forbid.
        self.change_rules(routing, alone.unwrap_or_default()).await?;
        let mut later = Vec::new();
        for (index, description, parameters) in described {
            self.connect_early(index, description, &parameters, has_name_server, &mut later).await?;
        }
        for (index, description) in later {
            self.change(index, Ok(description)).await?;
        }
        if has_name_server { self.start_name_server().await } else { Ok(()) }
    }

    /// Does what has changed since the last scan, and returns what cannot be done. Ends with the first request that the
    /// agent does not answer.
    async fn follow(&mut self, scan: Scan) -> Vec<TaskError> {
        let mut failed = Vec::new();
        if let Err(error) = self.try_to_follow(scan, &mut failed).await {
            failed.push(error);
        }
        failed
    }

    /// An error: the agent does not answer.
    async fn try_to_follow(&mut self, scan: Scan, failed: &mut Vec<TaskError>) -> Result<(), TaskError> {
        for (number, index) in self.network.lost() {
            failed.extend(unless_silent(self.remove(number, index).await)?);
        }
        for (number, index) in self.network.vanished(&scan) {
            failed.extend(unless_silent(self.remove(number, Some(index)).await)?);
        }
        let changed = match scan.routing {
            Ok(routing) => self.change_rules(routing, Vec::new()).await,
            Err(error) => Err(error.into()),
        };
        failed.extend(unless_silent(changed)?);
        let had_name_server = self.network.name_server.is_some();
        let has_name_server = had_name_server || scan.has_name_server;
        // A route that moves from one interface to another is removed before it is added.
        let (old, new): (Vec<_>, Vec<_>) =
            scan.interfaces.into_iter().partition(|found| self.network.has(found.index));
        if has_name_server && !had_name_server {
            failed.extend(unless_silent(self.pass_replies().await)?);
        }
        for Found { index, described, .. } in old {
            failed.extend(unless_silent(self.change(index, described).await)?);
        }
        let mut later = Vec::new();
        for Found { index, described, parameters, .. } in new {
            let connected = match described {
                Ok(description) => {
                    self.connect_early(index, description, &parameters, has_name_server, &mut later).await
                }
                Err(error) => Err(error.into()),
            };
            failed.extend(unless_silent(connected)?);
        }
        for (index, description) in later {
            failed.extend(unless_silent(self.change(index, Ok(description)).await)?);
        }
        for (card, renewal) in self.network.renewals() {
            failed.extend(unless_silent(self.renew(card, renewal).await)?);
        }
        if has_name_server && !had_name_server && self.network.used().next().is_some() {
            failed.extend(unless_silent(self.start_name_server().await)?);
        }
        Ok(())
    }

    /// [`Self::connect`], but without the routes that may need the address of an interface that comes after it: a
    /// source is an address that must be there before the route. If there are some, the whole interface is added to
    /// `later`.
    async fn connect_early(
        &mut self,
        index: u32,
        description: ConfigureNetworkRequest,
        parameters: &OfInterface,
        passes_replies: bool,
        later: &mut Vec<(u32, ConfigureNetworkRequest)>,
    ) -> Result<(), TaskError> {
        let early = without_foreign_sources(&description);
        let is_whole = early == description;
        self.connect(index, early, parameters, passes_replies).await?;
        if !is_whole {
            later.push((index, description));
        }
        Ok(())
    }

    /// Has the guest do again what it has lost.
    async fn renew(&mut self, card: CardNumber, renewal: ChangeNetworkRequest) -> Result<(), TaskError> {
        self.guest.agent.change_network(&self.network.container, renewal).await?;
        self.network.end_renewal(card);
        Ok(())
    }

    /// Makes a network card the interface of this index.
    async fn connect(
        &mut self,
        index: u32,
        mut description: ConfigureNetworkRequest,
        parameters: &OfInterface,
        passes_replies: bool,
    ) -> Result<(), TaskError> {
        let card = self.free_card(&description.name).await?;
        let connection = Connection {
            index,
            name: description.name.clone(),
            card,
            netns: self.host.netns.as_deref(),
            passes_replies,
        };
        // Nobody waits for this any more if the VM ends. Then the card is of no use to anybody.
        self.network.set(card, Card::Lost { index: None });
        let vmm = self.guest.vm.process();
        let operation = self.pod.pending.begin(&self.pod.settings.id);
        let connected = network::connect(vmm, connection, &mut self.host.journal, operation).await;
        if let Err(error) = connected {
            // What another program has at the interface stays there.
            if self.disconnect(None, card).await.is_ok() {
                self.network.set(card, Card::Free);
            }
            return Err(error.into());
        }
        description.card = card.address().into();
        let mut request = description.clone();
        request.parameters = self.network.parameters.take_those_of_namespace();
        request.parameters.extend(self.network.parameters.of_interface(&description.name, parameters));
        let configured = self.guest.agent.configure_network(&self.network.container, request).await;
        if let Err(error) = configured {
            // The container may have the card or not.
            _ = self.remove(card, Some(index)).await;
            return Err(error.into());
        }
        // Last: this changes the interface, which is a message of the host, and so leads to the next scan.
        let vmm = self.guest.vm.process();
        let multicast = network::pass_multicast(vmm, index, self.operation()).await.unwrap_or_else(|error| {
            tracing::warn!(error = chain(&error), "multicast groups that the guest joins may reach nobody");
            None
        });
        let description = Box::new(description);
        self.network.set(
            card,
            Card::Used { index, description, failed: None, lost: Vec::new(), _multicast: multicast },
        );
        Ok(())
    }

    /// A card for an interface of this name: one that is free, or a new one.
    async fn free_card(&mut self, name: &str) -> Result<CardNumber, TaskError> {
        if let Some((number, _)) = (0..).zip(&self.network.cards).find(|(_, card)| matches!(card, Card::Free))
        {
            return Ok(CardNumber(number));
        }
        let count = self.network.cards.len();
        let Some(number) = u8::try_from(count).ok().filter(|_| count < MOST) else {
            let lost = self.network.cards.iter().filter(|card| matches!(card, Card::Lost { .. })).count();
            return Err(NetworkError::CardsLost { name: name.into(), lost }.into());
        };
        let card = CardNumber(number);
        let queues = bulkhead_vmm_api::queues(self.host.vcpus.count());
        let tap = network::make_tap(self.guest.vm.process(), card, queues, self.operation()).await?;
        // If nobody waits for this any more, the VMM may have it.
        self.network.cards.push(Card::Lost { index: None });
        let attached = self.guest.vm.control().attach_nic(card.mac(), &tap).await;
        if matches!(attached, Err(AttachError::Refused(_) | AttachError::Connect(_))) {
            self.network.cards.pop();
        }
        attached?;
        self.network.set(card, Card::Free);
        Ok(card)
    }

    /// Has the guest change the interface of this index.
    async fn change(
        &mut self,
        index: u32,
        described: Result<ConfigureNetworkRequest, NetworkError>,
    ) -> Result<(), TaskError> {
        let mut description = described?;
        let card = self.network.used().find(|(_, used, _)| *used == index).map(|(card, ..)| card);
        description.card = card.map(|card| card.address().into()).unwrap_or_default();
        let Some((card, change)) = self.network.begin_change(index, &description) else { return Ok(()) };
        self.guest.agent.change_network(&self.network.container, change).await?;
        self.network.end_change(card, description);
        Ok(())
    }

    /// Has the guest have the host's rules, and these kernel parameters.
    async fn change_rules(
        &mut self,
        routing: Routing,
        parameters: Vec<KernelParameter>,
    ) -> Result<(), TaskError> {
        let Network { routing: before, is_routing_known, .. } = &mut self.network;
        if *is_routing_known && routing == *before && parameters.is_empty() {
            return Ok(());
        }
        let mut change = change_of_rules(before, *is_routing_known, &routing);
        change.parameters = parameters;
        let lost = local_addresses(&change.removed_addresses);
        // Until the guest has answered, it may have any of both.
        *is_routing_known = false;
        add_all(&mut before.rules, &routing.rules);
        add_all(&mut before.routes, &routing.routes);
        add_all(&mut before.addresses, &routing.addresses);
        self.network.lose(&lost);
        self.guest.agent.change_routing(&self.network.container, change).await?;
        (self.network.routing, self.network.is_routing_known) = (routing, true);
        Ok(())
    }

    /// Disconnects a card, and the interface of this index, which may be gone, and takes the card from the container.
    async fn remove(&mut self, card: CardNumber, index: Option<u32>) -> Result<(), TaskError> {
        let addresses = self.network.used().find(|(used, ..)| *used == card);
        let addresses = addresses.map(|(.., description)| local_addresses(&description.addresses));
        self.network.set(card, Card::Lost { index });
        self.network.lose(&addresses.unwrap_or_default());
        self.disconnect(index, card).await?;
        self.network.set(card, Card::Lost { index: None });
        self.guest.agent.remove_network(&self.network.container, card.address()).await?;
        self.network.set(card, Card::Free);
        Ok(())
    }

    async fn disconnect(&self, index: Option<u32>, card: CardNumber) -> Result<(), TaskError> {
        let vmm = self.guest.vm.process();
        Ok(network::disconnect(vmm, index, card, self.operation()).await?)
    }

    /// Lets the answers to docker's name server through at the interfaces that are connected.
    async fn pass_replies(&self) -> Result<(), TaskError> {
        let connected = self.network.used().map(|(card, index, _)| (index, card)).collect();
        Ok(network::pass_replies(self.guest.vm.process(), connected, self.operation()).await?)
    }

    async fn start_name_server(&mut self) -> Result<(), TaskError> {
        let vsock = self.guest.vm.vsock();
        let stream = vsock.stream_ids(1);
        let connection = vsock.connect_stream(stream, relay::BUFFER).await.map_err(AgentError::from)?;
        self.guest.agent.serve_name_server(&self.network.container, stream).await?;
        self.network.name_server = Some(NameServer::start(self.guest.vm.process(), connection)?);
        Ok(())
    }
}

/// Why something failed, if it did; an error if the agent does not answer.
fn unless_silent(done: Result<(), TaskError>) -> Result<Option<TaskError>, TaskError> {
    match done {
        Err(error) if is_silent(&error) => Err(error),
        other => Ok(other.err()),
    }
}

/// Whether the agent has not answered.
fn is_silent(error: &TaskError) -> bool {
    matches!(error, TaskError::Agent(error) if !matches!(error, AgentError::Refused { .. }))
}

#[cfg(test)]
mod tests {
    use bulkhead_agent_api::agent::{Ipv6, NetlinkMessage};

    use super::{
        changes::{FailedChange, change},
        *,
    };

    fn message(what: &str) -> NetlinkMessage {
        NetlinkMessage { what: what.into(), body: what.as_bytes().to_vec(), ..Default::default() }
    }

    fn description(name: &str, routes: &[&str]) -> ConfigureNetworkRequest {
        let mut description = ConfigureNetworkRequest::new();
        description.name = name.into();
        description.mac = vec![2, 0, 0, 0, 7, 7];
        description.routes = routes.iter().map(|what| message(what)).collect();
        description
    }

    fn used(index: u32, description: &ConfigureNetworkRequest) -> Card {
        Card::Used {
            index,
            description: Box::new(description.clone()),
            failed: None,
            lost: Vec::new(),
            _multicast: None,
        }
    }

    fn found(index: u32, name: &str) -> Found {
        Found {
            index,
            name: name.into(),
            described: Ok(description(name, &[])),
            parameters: OfInterface::default(),
        }
    }

    #[test]
    fn only_what_differs_is_changed() {
        let (before, now) = (description("eth0", &["a", "b"]), description("eth0", &["b", "c"]));
        let mut network = Network::new("demo");
        network.cards = vec![Card::Free, used(7, &before)];
        assert_eq!(network.begin_change(7, &before), None);
        assert_eq!(network.begin_change(8, &now), None);
        let (card, change) = network.begin_change(7, &now).unwrap();
        assert_eq!(card, CardNumber(1));
        let routes = |change: &ChangeNetworkRequest| {
            let what = |messages: &[NetlinkMessage]| -> Vec<_> {
                messages.iter().map(|message| message.what.clone()).collect()
            };
            (what(&change.removed_routes), what(&change.interface.routes), change.switches_ipv6)
        };
        assert_eq!(routes(&change), (vec!["a".into()], vec!["c".into()], false));
        // It has failed: the guest may have what was tried, or not, or a part of it.
        let again = network.begin_change(7, &now).unwrap().1;
        assert_eq!(routes(&again), (vec!["a".into()], vec!["b".into(), "c".into()], false));
        // Also if the host has changed it back.
        let back = network.begin_change(7, &before).unwrap().1;
        assert_eq!(routes(&back), (vec!["c".into()], vec!["a".into(), "b".into()], false));
        network.end_change(card, before.clone());
        assert_eq!(network.begin_change(7, &before), None);
        // IPv6 is switched until that has succeeded, and not by any change that fails.
        let with = ConfigureNetworkRequest { ipv6: Ipv6::IPV6_GIVEN.into(), ..before.clone() };
        for now in [&with, &with, &before, &before] {
            assert!(network.begin_change(7, now).unwrap().1.switches_ipv6);
        }
        network.end_change(card, before.clone());
        assert_eq!(network.begin_change(7, &before), None);
    }

    #[test]
    fn a_lost_card_is_not_taken_from_the_interface_of_another() {
        let mut network = Network::new("demo");
        let lost = |index| Card::Lost { index };
        network.cards =
            vec![Card::Free, lost(Some(5)), lost(Some(6)), used(6, &description("eth0", &[])), lost(None)];
        let expected = [(CardNumber(1), Some(5)), (CardNumber(2), None), (CardNumber(4), None)];
        assert_eq!(network.lost(), expected);
    }

    #[test]
    fn pauses_grow_and_end_with_success() {
        let refused = || TaskError::from(NetworkError::NoEthernet { name: "eth0".into() });
        let mut pauses = vec![None];
        for _ in 0..10 {
            pauses.push(pause_after(*pauses.last().unwrap(), &[refused()]));
        }
        let seconds: Vec<_> = pauses.iter().flatten().map(Duration::as_secs).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 128, 256, 256]);
        assert_eq!(pause_after(Some(LONGEST_PAUSE), &[]), None);
        let silent = || TaskError::from(AgentError::Timeout { call: "ChangeNetwork" });
        assert_eq!(pause_after(None, &[refused(), silent()]), Some(PAUSE_AFTER_SILENCE));
        assert_eq!(pause_after(Some(FIRST_PAUSE), &[silent()]), Some(PAUSE_AFTER_SILENCE));
    }

    #[test]
    fn rules_that_differ_are_added_and_removed() {
        let routing = |rules: [&str; 2]| Routing { rules: rules.map(message).to_vec(), ..Routing::default() };
        let change = change_of_rules(&routing(["a", "b"]), true, &routing(["b", "c"]));
        assert_eq!((change.rules, change.removed_rules), (vec![message("c")], vec![message("a")]));
        // The guest may have what was tried, or not, or a part of it.
        let possible = Routing { rules: ["a", "b", "c", "d"].map(message).to_vec(), ..Routing::default() };
        let change = change_of_rules(&possible, false, &routing(["a", "c"]));
        assert_eq!(change.rules, [message("a"), message("c")]);
        assert_eq!(change.removed_rules, [message("b"), message("d")]);
    }

    #[test]
    fn the_kernels_route_comes_back_for_an_address_that_stays() {
        // 10.1.2.3/24: struct ifaddrmsg, IFA_ADDRESS, IFA_LOCAL.
        let body = [2, 24, 0, 0, 0, 0, 0, 0, 8, 0, 1, 0, 10, 1, 2, 3, 8, 0, 2, 0, 10, 1, 2, 3];
        let address = NetlinkMessage { body: body.to_vec(), ..message("10.1.2.3/24") };
        let route = network::connected_route(&address).unwrap();
        assert_eq!(route.what, "10.1.2.0/24");
        let mut now = description("eth0", &[]);
        (now.addresses, now.up) = (vec![address.clone()], true);
        let before = ConfigureNetworkRequest { absent_routes: vec![route.clone()], ..now.clone() };
        assert_eq!(change(&before, None, &now, &[]).interface.routes, std::slice::from_ref(&route));
        // While it is down there are none, and the kernel adds them when it comes up.
        let down = ConfigureNetworkRequest { absent_routes: Vec::new(), up: false, ..now.clone() };
        assert!(change(&before, None, &down, &[]).interface.routes.is_empty());
        assert!(change(&down, None, &now, &[]).interface.routes.is_empty());
        // It may be up already if a change failed.
        let failed = Some(FailedChange { switched_ipv6: false });
        let absent = ConfigureNetworkRequest { absent_routes: vec![route.clone()], ..down.clone() };
        assert_eq!(change(&absent, failed, &now, &[]).interface.routes, std::slice::from_ref(&route));
        // It goes again, and the agent removes what is absent.
        assert!(change(&now, None, &before, &[]).interface.routes.is_empty());
        assert_eq!(change(&now, None, &before, &[]).interface.absent_routes, [route]);
        // The guest's kernel adds that of an address that is new, and none for one that has gone.
        let without = ConfigureNetworkRequest { addresses: Vec::new(), ..before.clone() };
        assert!(change(&without, None, &now, &[]).interface.routes.is_empty());
        assert!(change(&before, None, &description("eth0", &[]), &[]).interface.routes.is_empty());
    }

    /// fd00::LAST/128 with these flags: struct ifaddrmsg, IFA_ADDRESS, IFA_FLAGS.
    fn ipv6_address(last: u8, flags: u8) -> NetlinkMessage {
        let mut body = vec![10, 128, 0, 0, 0, 0, 0, 0, 20, 0, 1, 0, 0xfd, 0];
        body.resize(body.len() + 13, 0);
        body.extend([last, 8, 0, 8, 0, flags, 0, 0, 0]);
        NetlinkMessage { body, ..message(&format!("fd00::{last:x}/128")) }
    }

    /// 10.1.2.LAST/24 with this label: struct ifaddrmsg, IFA_ADDRESS, IFA_LOCAL, IFA_LABEL.
    fn ipv4_address(last: u8, label: u8) -> NetlinkMessage {
        let body = [2, 24, 0, 0, 0, 0, 0, 0, 8, 0, 1, 0, 10, 1, 2, last, 8, 0, 2, 0, 10, 1, 2, last];
        let body = [&body[..], &[6, 0, 3, 0, label, 0, 0, 0]].concat();
        NetlinkMessage { body, ..message(&format!("10.1.2.{last}/24")) }
    }

    /// A route of IPv4 from 10.1.2.LAST: a struct rtmsg, RTA_PREFSRC.
    fn route_from(what: &str, last: u8) -> NetlinkMessage {
        let body = vec![2, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0, 8, 0, 7, 0, 10, 1, 2, last];
        NetlinkMessage { body, ..message(what) }
    }

    #[test]
    fn an_address_that_changes_its_flags_or_times_is_not_removed() {
        let (before, now) = (ipv6_address(5, 0x80), ipv6_address(5, 0xa0));
        let of = |address: &NetlinkMessage| Routing {
            addresses: vec![address.clone(), ipv4_address(3, 0)],
            ..Routing::default()
        };
        let change_of_lo = change_of_rules(&of(&before), true, &of(&now));
        assert_eq!((change_of_lo.addresses, change_of_lo.removed_addresses), (vec![now.clone()], Vec::new()));
        let change_of_lo = change_of_rules(&of(&before), true, &of(&ipv6_address(6, 0x80)));
        assert_eq!(change_of_lo.removed_addresses, std::slice::from_ref(&before));
        let with = |addresses: [&NetlinkMessage; 2]| ConfigureNetworkRequest {
            addresses: addresses.map(Clone::clone).to_vec(),
            ..description("eth0", &[])
        };
        // The guest's kernel does not replace the label of an address of IPv4.
        let (old, new) = (ipv4_address(3, 0), ipv4_address(3, 7));
        let change = change(&with([&before, &old]), None, &with([&now, &new]), &[]);
        assert_eq!(change.interface.addresses, [now, new]);
        assert_eq!(change.removed_addresses, [old]);
    }

    #[test]
    fn what_an_interface_loses_with_an_address_of_ipv4_is_sent_again() {
        let mut before = description("eth0", &["of IPv6"]);
        before.addresses = vec![ipv4_address(3, 0), ipv4_address(5, 0), ipv6_address(3, 0x80)];
        let default =
            NetlinkMessage { body: vec![2, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0], ..message("default") };
        before.routes.push(default.clone());
        let neighbour = NetlinkMessage { body: vec![2; 12], ..message("10.1.2.1") };
        before.neighbours = vec![neighbour.clone()];
        let mut now = before.clone();
        now.addresses = vec![ipv4_address(4, 0), ipv4_address(5, 0)];
        let change = |now: &ConfigureNetworkRequest| change(&before, None, now, &[]);
        let changed = change(&now);
        assert_eq!(changed.removed_addresses, [ipv4_address(3, 0), ipv6_address(3, 0x80)]);
        let interface = changed.interface.unwrap();
        assert_eq!(interface.addresses, now.addresses);
        assert_eq!((interface.routes, interface.neighbours), (vec![default], vec![neighbour]));
        // Those of IPv6 take nothing with them that has no such source.
        now.addresses = before.addresses[..2].to_vec();
        let interface = change(&now).interface.unwrap();
        assert!(interface.addresses.is_empty() && interface.routes.is_empty());
        assert!(interface.neighbours.is_empty());
    }

    #[test]
    fn routes_are_there_again_after_their_source_was_away() {
        let (before, now) = (ipv4_address(3, 0), ipv4_address(3, 7));
        let mut eth0 = description("eth0", &["a"]);
        eth0.addresses = vec![before];
        eth0.routes.extend([route_from("b", 3), route_from("c", 4)]);
        let mut eth1 = description("eth1", &["d"]);
        eth1.routes.push(route_from("e", 3));
        let mut network = Network::new("demo");
        network.cards = vec![used(5, &eth0), used(6, &eth1)];
        assert!(network.renewals().is_empty());
        // The address is removed and added. With the same request the interface's own routes come back.
        let relabelled = ConfigureNetworkRequest { addresses: vec![now], ..eth0.clone() };
        let (card, change) = network.begin_change(5, &relabelled).unwrap();
        assert_eq!(change.removed_routes, [route_from("b", 3)]);
        assert_eq!(change.interface.routes, [route_from("b", 3), route_from("c", 4)]);
        // Those of the other interface come later.
        assert_eq!(network.begin_change(6, &eth1), None);
        network.end_change(card, relabelled);
        for _ in 0..2 {
            let [(card, renewal)] = &network.renewals()[..] else { panic!("not one renewal") };
            assert_eq!(*card, CardNumber(1));
            assert_eq!(
                (&renewal.removed_routes, &renewal.interface.routes),
                (&vec![route_from("e", 3)], &vec![route_from("e", 3)])
            );
            assert!(renewal.removed_addresses.is_empty() && renewal.interface.addresses.is_empty());
        }
        network.end_renewal(CardNumber(1));
        assert!(network.renewals().is_empty());
        // An address that no route has is no reason, and neither is one whose routes are gone.
        network.lose(&["10.1.2.9".parse().unwrap()]);
        assert!(network.renewals().is_empty());
        network.lose(&["10.1.2.4".parse().unwrap()]);
        assert_eq!(network.renewals().len(), 1);
        let (card, _) = network.begin_change(5, &description("eth0", &["a"])).unwrap();
        network.end_change(card, description("eth0", &["a"]));
        network.end_renewal(CardNumber(1));
        assert!(network.renewals().is_empty());
    }

    #[test]
    fn routes_from_the_address_of_another_interface_come_later() {
        // 10.1.2.3/24: struct ifaddrmsg, IFA_ADDRESS, IFA_LOCAL.
        let body = [2, 24, 0, 0, 0, 0, 0, 0, 8, 0, 1, 0, 10, 1, 2, 3, 8, 0, 2, 0, 10, 1, 2, 3];
        let route = route_from;
        let mut whole = description("eth0", &[]);
        whole.addresses = vec![NetlinkMessage { body: body.to_vec(), ..message("10.1.2.3/24") }];
        whole.routes = vec![route("own", 3), route("foreign", 4), route("own too", 3)];
        let early = without_foreign_sources(&whole);
        assert_eq!((&early.routes[..], &early.addresses), (&whole.routes[..1], &whole.addresses));
        let later = change(&early, None, &whole, &[]);
        assert_eq!(later.interface.routes, whole.routes[1..]);
        whole.routes.truncate(1);
        assert_eq!(without_foreign_sources(&whole), whole);
    }

    #[test]
    fn an_interface_of_another_name_is_another() {
        let mut network = Network::new("demo");
        let used = |index, name| used(index, &description(name, &[]));
        network.cards = vec![used(5, "eth0"), Card::Lost { index: None }, used(6, "eth1"), used(7, "eth2")];
        let mut refused = found(5, "eth0");
        refused.described = Err(NetworkError::NoEthernet { name: "eth0".into() });
        let interfaces = vec![refused, found(7, "renamed")];
        let scan = Scan { interfaces, routing: Ok(Routing::default()), has_name_server: false };
        assert_eq!(network.vanished(&scan), [(CardNumber(2), 6), (CardNumber(3), 7)]);
        assert!(network.has(7) && !network.has(8));
    }
}
