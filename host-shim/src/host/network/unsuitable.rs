//! Interfaces of the pod's network namespace that no network card of the guest can stand for. They would start, and
//! then pass no packet, so they are refused by name. So are those that another program has connected with something:
//! a redirect to the guest would take its place.

use rtnetlink::packet_route::link::{
    InfoData, InfoIpVlan, InfoKind, IpVlanMode, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage,
};

use super::{
    NetworkError,
    redirect::{info, name_of},
};

/// Refuses an interface that cannot be connected. `all` are those of the same network namespace. `filtered`: another
/// program filters what arrives at it.
pub(super) fn refuse(link: &LinkMessage, all: &[LinkMessage], filtered: bool) -> Result<(), NetworkError> {
    let name = || name_of(link).to_owned();
    if link.header.link_layer_type != LinkLayerType::Ether {
        return Err(NetworkError::NoEthernet { name: name() });
    }
    let address = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Address(address) => Some(address.as_slice()),
        _ => None,
    });
    if !address.is_some_and(is_of_one_card) {
        return Err(NetworkError::NoAddress { name: name() });
    }
    if info(link).any(is_l3s) {
        return Err(NetworkError::L3s { name: name() });
    }
    if filtered {
        return Err(NetworkError::Filtered { name: name() });
    }
    match lower(link, all) {
        Some(lower) => Err(NetworkError::Stacked { name: name(), lower: name_of(lower).into() }),
        None => Ok(()),
    }
}

/// Whether this says that an interface is an ipvlan whose packets pass through the IP stack of another network
/// namespace, and so never arrive at it.
fn is_l3s(info: &LinkInfo) -> bool {
    match info {
        LinkInfo::Data(InfoData::IpVlan(data)) => data.contains(&InfoIpVlan::Mode(IpVlanMode::L3S)),
        _ => false,
    }
}

/// Whether a card can have this address on the Ethernet: not all zeros, and not that of a group.
fn is_of_one_card(address: &[u8]) -> bool {
    matches!(address, [first, _, _, _, _, _] if first & 1 == 0) && address.iter().any(|byte| *byte != 0)
}

/// The interface of the same network namespace at which the packets of this one arrive. There they are redirected to
/// the guest, before the host's kernel would give them to this one.
fn lower<'l>(link: &LinkMessage, all: &'l [LinkMessage]) -> Option<&'l LinkMessage> {
    // A bond, a team, a bridge: the others name it.
    let port = all.iter().find(|other| {
        other
            .attributes
            .iter()
            .any(|it| matches!(it, LinkAttribute::Controller(of) if *of == link.header.index))
    });
    if port.is_some() {
        return port;
    }
    // The other end of a pair is not below it.
    let is_pair =
        |info: &LinkInfo| matches!(info, LinkInfo::Kind(InfoKind::Veth | InfoKind::Netkit | InfoKind::Vxcan));
    // What it is stacked on is in another network namespace, as for a macvlan of docker.
    let is_elsewhere = |attribute: &LinkAttribute| matches!(attribute, LinkAttribute::LinkNetNsId(_));
    if info(link).any(is_pair) || link.attributes.iter().any(is_elsewhere) {
        return None;
    }
    let below = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Link(index) if *index != link.header.index => Some(*index),
        _ => None,
    })?;
    all.iter().find(|other| other.header.index == below)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEX: u32 = 7;

    fn link(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
        let mut link = LinkMessage::default();
        (link.header.index, link.header.link_layer_type) = (index, LinkLayerType::Ether);
        link.attributes = vec![LinkAttribute::IfName(format!("eth{index}"))];
        link.attributes.push(LinkAttribute::Address(vec![2, 0, 0, 9, 8, 7]));
        link.attributes.extend(attributes);
        link
    }

    fn refused(link: &LinkMessage) -> Option<String> {
        let others = [self::link(3, Vec::new()), link.clone()];
        refuse(link, &others, false).err().map(|error| error.to_string())
    }

    #[test]
    fn an_address_is_that_of_one_card() {
        for address in [&[0; 6][..], &[1, 0, 0, 9, 8, 7], &[0xff; 6], &[2; 5], &[]] {
            let mut link = link(INDEX, Vec::new());
            link.attributes[1] = LinkAttribute::Address(address.into());
            let refused = refused(&link).unwrap();
            assert!(refused.starts_with("interface eth7 has no Ethernet address"), "{refused}");
            assert!(refused.contains("netkit-l2"), "{refused}");
        }
        assert!(is_of_one_card(&[0, 0, 0, 0, 0, 1]));
        let mut without = link(INDEX, Vec::new());
        without.attributes.truncate(1);
        assert!(refused(&without).is_some());
    }

    #[test]
    fn an_ipvlan_is_refused_in_one_mode_only() {
        let of = |mode| {
            let info = vec![
                LinkInfo::Kind(InfoKind::IpVlan),
                LinkInfo::Data(InfoData::IpVlan(vec![InfoIpVlan::Mode(mode)])),
            ];
            refused(&link(INDEX, vec![LinkAttribute::LinkInfo(info)]))
        };
        assert!(of(IpVlanMode::L3S).unwrap().starts_with("interface eth7 is an ipvlan in mode l3s"));
        assert_eq!((of(IpVlanMode::L2), of(IpVlanMode::L3)), (None, None));
    }

    #[test]
    fn what_is_below_an_interface_is_in_its_namespace() {
        let of = |attributes| refused(&link(INDEX, attributes));
        let kind = |kind| LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]);
        for stacked in [InfoKind::Vlan, InfoKind::MacVlan, InfoKind::IpVlan, InfoKind::MacSec] {
            let refused = of(vec![LinkAttribute::Link(3), kind(stacked.clone())]).unwrap();
            assert!(refused.starts_with("interface eth7 is stacked on eth3"), "{refused}");
            // docker's: the same number in another namespace.
            let elsewhere = LinkAttribute::LinkNetNsId(0);
            assert_eq!(of(vec![LinkAttribute::Link(3), elsewhere, kind(stacked)]), None);
        }
        for pair in [InfoKind::Veth, InfoKind::Netkit] {
            assert_eq!(of(vec![LinkAttribute::Link(3), kind(pair)]), None);
        }
        // Itself, or nothing, as a tunnel has it.
        assert_eq!((of(vec![LinkAttribute::Link(INDEX)]), of(vec![LinkAttribute::Link(0)])), (None, None));
    }
}
