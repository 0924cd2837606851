//! Lets answers to docker's name server through to the host's IP stack, although all other packets that arrive at the
//! pod's interface go to the guest.
//!
//! For the names that docker does not know, its name server asks others, from a socket in the pod's network namespace
//! on the host. Their answers come to the pod's interface, with the addresses that the guest's packets have too. The
//! host's connection tracking knows which are answers to the host: the guest's packets do not pass through the host's
//! IP stack, so it does not track them. It is asked about packets from port 53 only, so nothing else becomes slower.

use futures::StreamExt;
use nix::errno::Errno::EEXIST;
use nix::libc::{ETH_P_ARP, ETH_P_IP, ETH_P_IPV6, IPPROTO_ICMPV6, IPPROTO_TCP, IPPROTO_UDP};
use rtnetlink::{
    Error, Handle,
    packet_core::{
        DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
    },
    packet_route::{
        RouteNetlinkMessage,
        tc::{
            TcAction, TcActionAttribute, TcActionGeneric, TcActionMirror, TcActionMirrorOption,
            TcActionOption, TcActionType, TcAttribute, TcFilterFlower, TcFilterFlowerOption as Flower,
            TcHandle, TcMessage, TcMirror, TcMirrorActionType, TcOption,
        },
    },
};

use super::redirect::{INGRESS, is};

const DNS: u16 = 53;
/// ARP: the operation of an answer (RFC 826).
const ARP_REPLY: u8 = 2;
/// Neighbour Discovery: the type of an answer (RFC 4861, 4.4).
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;

/// TCA_FLOWER_KEY_CT_FLAGS_ESTABLISHED and _TRACKED of linux/pkt_cls.h.
const OF_A_KNOWN_CONNECTION: u16 = 1 << 1 | 1 << 3;
/// TCA_CT_PARMS of linux/tc_act/tc_ct.h.
const CT_PARAMETERS: u16 = 1;

/// Adds the filters to the interface `index`, which has an ingress qdisc. They come before the one that redirects to
/// `tap`.
pub(super) async fn pass(handle: &Handle, index: u32, tap: u32) -> Result<(), Error> {
    let ip = [ETH_P_IP as u16, ETH_P_IPV6 as u16];
    let mut filters = Vec::new();
    for family in ip {
        let from = |protocol: i32, port| vec![Flower::IpProto(protocol as u8), port];
        filters.push((family, from(IPPROTO_UDP, Flower::UdpSrc(DNS)), Some(look_up())));
        filters.push((family, from(IPPROTO_TCP, Flower::TcpSrc(DNS)), Some(look_up())));
        let is_known =
            vec![Flower::CtState(OF_A_KNOWN_CONNECTION), Flower::CtStateMask(OF_A_KNOWN_CONNECTION)];
        // A filter without an action lets the packet pass.
        filters.push((family, is_known, None));
    }
    // Who asked for these is not known, so that both get them.
    filters.push((ETH_P_ARP as u16, vec![Flower::ArpOp(ARP_REPLY)], Some(copy(tap, TcActionType::Ok))));
    let advertisement =
        vec![Flower::IpProto(IPPROTO_ICMPV6 as u8), Flower::Icmpv6Type(NEIGHBOUR_ADVERTISEMENT)];
    filters.push((ETH_P_IPV6 as u16, advertisement, Some(copy(tap, TcActionType::Ok))));
    for (priority, (protocol, keys, action)) in (1..).zip(filters) {
        add(handle, filter(index, priority, protocol, keys, action)).await?;
    }
    Ok(())
}

/// Looks the packet up in the table of tracked connections, and goes on with the next filter.
fn look_up() -> TcAction {
    // `struct tc_ct`: index, capab, action, refcnt, bindcnt. TC_ACT_UNSPEC is what tc(8) calls `continue`.
    const UNSPEC: i32 = -1;
    let parameters = [0, 0, UNSPEC, 0, 0].map(i32::to_ne_bytes).concat();
    let mut action = TcAction::default();
    action.attributes = vec![
        TcActionAttribute::Kind("ct".into()),
        TcActionAttribute::Options(vec![TcActionOption::Other(DefaultNla::new(CT_PARAMETERS, parameters))]),
    ];
    action
}

/// Sends a copy of the packet to this interface. `then`: what becomes of the packet.
pub(super) fn copy(to: u32, then: TcActionType) -> TcAction {
    let mut mirror = TcMirror::default();
    mirror.generic = TcActionGeneric::default();
    mirror.generic.action = then;
    mirror.eaction = TcMirrorActionType::EgressMirror;
    mirror.ifindex = to;
    let mut action = TcAction::default();
    action.attributes = vec![
        TcActionAttribute::Kind(TcActionMirror::KIND.into()),
        TcActionAttribute::Options(vec![TcActionOption::Mirror(TcActionMirrorOption::Parms(mirror))]),
    ];
    action
}

/// A filter of packets with this protocol of the Ethernet and these keys.
fn filter(
    index: u32,
    priority: u16,
    protocol: u16,
    keys: Vec<Flower>,
    action: Option<TcAction>,
) -> TcMessage {
    let mut message = TcMessage::with_index(index as i32);
    message.header.parent = INGRESS.into();
    message.header.info = u32::from(TcHandle { major: priority, minor: protocol.to_be() });
    let options = [Flower::EthType(protocol)].into_iter().chain(keys);
    let options = options.chain(action.map(|action| Flower::Actions(vec![action])));
    message.attributes = vec![
        TcAttribute::Kind(TcFilterFlower::KIND.into()),
        TcAttribute::Options(options.map(TcOption::Flower).collect()),
    ];
    message
}

/// Adds a filter, unless it is there from an earlier attempt.
pub(super) async fn add(handle: &Handle, filter: TcMessage) -> Result<(), Error> {
    match create(handle, RouteNetlinkMessage::NewTrafficFilter(filter)).await {
        Err(error) if is(&error, EEXIST) => Ok(()),
        other => other,
    }
}

/// Creates what the message describes, which must not exist yet.
pub(super) async fn create(handle: &Handle, message: RouteNetlinkMessage) -> Result<(), Error> {
    let mut request = NetlinkMessage::from(message);
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_EXCL | NLM_F_CREATE;
    let mut answers = handle.clone().request(request)?;
    while let Some(answer) = answers.next().await {
        if let NetlinkPayload::Error(error) = answer.payload
            && error.code.is_some()
        {
            return Err(Error::NetlinkError(error));
        }
    }
    Ok(())
}
