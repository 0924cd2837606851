//! Lets the answers of a DHCP server through to the host's IP stack too, although packets that arrive at the pod's
//! interface go to the guest.
//!
//! The CNI plugin `dhcp` renews the lease of the interface on the host, by a packet socket in the pod's network
//! namespace. Without the answers it takes the interface down when the lease ends. Who asked is not known: a program
//! in the guest may have, so the guest gets them too.

use nix::libc::{ETH_P_IP, IPPROTO_UDP};
use rtnetlink::{
    Error, Handle,
    packet_route::tc::{
        TcAttribute, TcFilterU32, TcFilterU32Option, TcHandle, TcMessage, TcOption, TcU32Key, TcU32Selector,
        TcU32SelectorFlags,
    },
};

use super::{
    redirect::INGRESS,
    replies::{add, copy},
};

/// After those of [`super::replies`], and before the redirect, to which the kernel gives a larger one.
const PRIORITY: u16 = 100;

/// What the words of an IPv4 packet are if it is one to the port of a DHCP client: offset, mask and value. The header
/// has no options, so that the place of the port is known, and the packet is no later fragment.
const TO_CLIENT: [(i32, u32, u32); 4] = [
    (0, 0x0f00_0000, 0x0500_0000),
    (4, 0x0000_1fff, 0),
    (8, 0x00ff_0000, (IPPROTO_UDP as u32) << 16),
    (20, 0x0000_ffff, 68),
];

/// Adds the filter to the interface `index`, which has an ingress qdisc. It is of u32, as the redirect, which every
/// kernel has that can redirect.
pub(super) async fn pass(handle: &Handle, index: u32, tap: u32) -> Result<(), Error> {
    let key = |(off, mask, val)| {
        let mut key = TcU32Key::default();
        (key.off, key.mask, key.val) = (off, mask, val);
        key
    };
    let mut selector = TcU32Selector::default();
    selector.flags = TcU32SelectorFlags::Terminal;
    selector.nkeys = TO_CLIENT.len() as u8;
    selector.keys = TO_CLIENT.into_iter().map(key).collect();
    let mut filter = TcMessage::with_index(index as i32);
    filter.header.parent = INGRESS.into();
    filter.header.info = u32::from(TcHandle { major: PRIORITY, minor: (ETH_P_IP as u16).to_be() });
    let options = [TcFilterU32Option::Selector(selector), TcFilterU32Option::Action(vec![copy(tap)])];
    filter.attributes = vec![
        TcAttribute::Kind(TcFilterU32::KIND.into()),
        TcAttribute::Options(options.into_iter().map(TcOption::U32).collect()),
    ];
    add(handle, filter).await
}
