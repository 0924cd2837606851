//! Tells when interfaces, addresses, routes, rules or permanent neighbours of a pod's network namespace change
//! (rtnetlink(7)).

use std::{collections::HashSet, io, net::IpAddr, time::Duration};

use nix::libc::ENOBUFS;
use rtnetlink::{
    packet_core::{NetlinkMessage, NetlinkPayload},
    packet_route::{RouteNetlinkMessage, neighbour::NeighbourState},
    sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE},
};
use tokio::{
    runtime::Handle,
    time::{Instant, timeout, timeout_at},
};

use super::{is_tap, redirect, scan};
use crate::types::pace::Pace;

/// RTMGRP_LINK, RTMGRP_NEIGH, RTMGRP_IPV4_IFADDR, RTMGRP_IPV4_ROUTE, RTMGRP_IPV4_RULE, RTMGRP_IPV6_IFADDR and
/// RTMGRP_IPV6_ROUTE of linux/rtnetlink.h, and the bit of RTNLGRP_IPV6_RULE, which is 19.
const GROUPS: u32 = 0x1 | 0x4 | 0x10 | 0x40 | 0x80 | 0x100 | 0x400 | 1 << 18;

/// Permanent neighbours whose end is noticed. That of more is noticed with the next other change.
const MOST_NEIGHBOURS: usize = 8192;

/// What belongs together comes within this time of what came before.
const QUIET: Duration = Duration::from_millis(100);
/// No more is waited for after this time.
const LONGEST: Duration = Duration::from_secs(1);

/// A guest that has taken over its VMM can have the kernel tell of its taps without end. So only so many messages are
/// read in each of these times. The kernel drops those for which it has no room then.
const MOST_READ: u32 = 1024;
const READ_WINDOW: Duration = Duration::from_millis(100);
/// If messages were lost and no other tells of a change, the namespace is scanned again this long after the last time.
pub(super) const AFTER_LOSS: Duration = Duration::from_secs(5);

/// Follows the changes, by a socket that stays in the namespace in which it was made, and keeps it.
pub(crate) struct Watch {
    socket: TokioSocket,
    pace: Pace,
    /// The permanent neighbours that the guest has, by interface and address.
    permanent: HashSet<(u32, IpAddr)>,
    /// Not before, if all that is known is that messages were lost.
    next: Instant,
}

/// What was read.
#[derive(PartialEq, Eq)]
enum Read {
    /// A message of the pod.
    Change,
    /// A message of a tap, or of a neighbour that the guest discovers itself.
    Other,
    /// The kernel had no room for some.
    Lost,
}

impl Watch {
    /// Watches the network namespace of this thread, in this runtime.
    pub(super) fn here(runtime: &Handle) -> io::Result<Self> {
        let _entered = runtime.enter();
        let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
        socket.socket_mut().bind(&SocketAddr::new(0, GROUPS))?;
        Ok(Self {
            socket,
            permanent: HashSet::new(),
            pace: Pace::new(MOST_READ, READ_WINDOW),
            next: Instant::now(),
        })
    }

    /// Tells which permanent neighbours the guest has. A message about one of them is a change, whatever it has become.
    pub(crate) fn expect(&mut self, permanent: impl Iterator<Item = (u32, IpAddr)>) {
        self.permanent = permanent.take(MOST_NEIGHBOURS).collect();
    }

    /// Waits for a change, and until what belongs to it is over. There may be a change if messages were lost.
    pub(crate) async fn changed(&mut self) -> io::Result<()> {
        let mut is_lost = false;
        while !(is_lost && Instant::now() >= self.next) {
            let read = match is_lost {
                false => self.read().await?,
                true => match timeout_at(self.next, self.read()).await {
                    Ok(read) => read?,
                    Err(_) => break,
                },
            };
            match read {
                Read::Change => break,
                Read::Lost => is_lost = true,
                Read::Other => {}
            }
        }
        let end = Instant::now() + LONGEST;
        while Instant::now() < end {
            match timeout(QUIET, self.read()).await {
                Ok(read) => _ = read?,
                Err(_) => break,
            }
        }
        // What was lost until now is found by the scan that follows.
        self.next = Instant::now() + AFTER_LOSS;
        Ok(())
    }

    async fn read(&mut self) -> io::Result<Read> {
        self.pace.turn().await;
        match self.socket.recv_from_full().await {
            Ok((message, _)) => Ok(if self.is_other(&message) { Read::Other } else { Read::Change }),
            Err(error) if error.raw_os_error() == Some(ENOBUFS) => Ok(Read::Lost),
            Err(error) => Err(error),
        }
    }

    /// Whether a message is about a tap of the VMM, which the shim itself changes, or about a neighbour that is not
    /// permanent and was not. The host's kernel tells of these again and again.
    fn is_other(&self, bytes: &[u8]) -> bool {
        use RouteNetlinkMessage::{DelLink, DelNeighbour, NewLink, NewNeighbour};
        match NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes).map(|message| message.payload) {
            Ok(NetlinkPayload::InnerMessage(NewLink(link) | DelLink(link))) => {
                is_tap(redirect::name_of(&link))
            }
            // That one was removed is said with another state.
            Ok(NetlinkPayload::InnerMessage(NewNeighbour(found) | DelNeighbour(found))) => {
                let was_permanent = scan::address_of_neighbour(&found)
                    .is_some_and(|ip| self.permanent.contains(&(found.header.ifindex, ip)));
                found.header.state != NeighbourState::Permanent && !was_permanent
            }
            _ => false,
        }
    }
}
