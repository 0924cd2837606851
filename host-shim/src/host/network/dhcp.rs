//! Lets the answers of a DHCP server through to packet sockets of the host too, although packets that arrive at the
//! pod's interface go to the guest.
//!
//! The CNI plugin `dhcp` renews the lease of the interface on the host, by a packet socket in the pod's network
//! namespace. Without the answers it takes the interface down when the lease ends. Who asked is not known: a program
//! in the guest may have, so the guest gets them too.
//!
//! The host's IP stack is to have none of them: it would forward a packet to another address, or say that nobody
//! listens. So they are marked as packets for another host (tc-skbedit(8)), which only packet sockets get. A kernel
//! without `act_skbedit` gives them to its IP stack.

use nix::{
    errno::Errno::{ENOENT, EOPNOTSUPP},
    libc::{ETH_P_IP, IPPROTO_UDP},
};
use rtnetlink::{
    Error, Handle,
    packet_core::DefaultNla,
    packet_route::tc::{
        TcAction, TcActionAttribute, TcActionOption, TcActionType, TcAttribute, TcFilterU32,
        TcFilterU32Option, TcHandle, TcMessage, TcOption, TcU32Key, TcU32Selector, TcU32SelectorFlags,
    },
};

use super::{
    redirect::{INGRESS, is},
    replies::{add, copy},
};

/// After those of [`super::replies`], and before the redirect, to which the kernel gives a larger one.
const PRIORITY: u16 = 100;

/// What the words of an IPv4 packet are if it is one from the port of a DHCP server to that of a client: offset, mask
/// and value. The header has no options, so that the place of the ports is known, and the packet is no later fragment.
const TO_CLIENT: [(i32, u32, u32); 4] = [
    (0, 0x0f00_0000, 0x0500_0000),
    (4, 0x0000_1fff, 0),
    (8, 0x00ff_0000, (IPPROTO_UDP as u32) << 16),
    (20, 0xffff_ffff, 67 << 16 | 68),
];

/// TCA_SKBEDIT_PARMS and TCA_SKBEDIT_PTYPE of linux/tc_act/tc_skbedit.h.
const EDIT_PARAMETERS: u16 = 2;
const EDIT_TYPE: u16 = 7;
/// PACKET_OTHERHOST of linux/if_packet.h.
const OF_ANOTHER_HOST: u16 = 3;

/// Adds the filter to the interface `index`, which has an ingress qdisc. It uses the classifier u32, as the redirect
/// does: each kernel that can redirect has it.
pub(super) async fn pass(handle: &Handle, index: u32, tap: u32) -> Result<(), Error> {
    let marked = vec![copy(tap, TcActionType::Pipe), mark()];
    match add(handle, filter(index, marked)).await {
        Err(error) if [ENOENT, EOPNOTSUPP].iter().any(|errno| is(&error, *errno)) => {
            add(handle, filter(index, vec![copy(tap, TcActionType::Ok)])).await
        }
        other => other,
    }
}

fn filter(index: u32, actions: Vec<TcAction>) -> TcMessage {
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
    let options = [TcFilterU32Option::Selector(selector), TcFilterU32Option::Action(actions)];
    filter.attributes = vec![
        TcAttribute::Kind(TcFilterU32::KIND.into()),
        TcAttribute::Options(options.into_iter().map(TcOption::U32).collect()),
    ];
    filter
}

/// Marks the packet as one of another host, and lets it pass. It comes after another action.
fn mark() -> TcAction {
    // `struct tc_skbedit`: index, capab, action, refcnt, bindcnt. TC_ACT_OK is 0.
    let parameters = vec![0; 5 * size_of::<u32>()];
    let options = [
        DefaultNla::new(EDIT_PARAMETERS, parameters),
        DefaultNla::new(EDIT_TYPE, OF_ANOTHER_HOST.to_ne_bytes().into()),
    ];
    let mut action = TcAction::default();
    // The place in the list, from 1.
    action.tab = 2;
    action.attributes = vec![
        TcActionAttribute::Kind("skbedit".into()),
        TcActionAttribute::Options(options.into_iter().map(TcActionOption::Other).collect()),
    ];
    action
}
