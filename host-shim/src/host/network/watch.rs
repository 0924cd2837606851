//! Tells when interfaces, addresses, routes or rules of a pod's network namespace change (rtnetlink(7)).

use std::{io, time::Duration};

use nix::libc::ENOBUFS;
use rtnetlink::{
    packet_core::{NetlinkMessage, NetlinkPayload},
    packet_route::RouteNetlinkMessage,
    sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE},
};
use tokio::{
    runtime::Handle,
    time::{Instant, timeout},
};

use super::{is_tap, scan};

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV4_ROUTE, RTMGRP_IPV4_RULE, RTMGRP_IPV6_IFADDR and RTMGRP_IPV6_ROUTE of
/// linux/rtnetlink.h, and the bit of RTNLGRP_IPV6_RULE, which is 19.
const GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x80 | 0x100 | 0x400 | 1 << 18;

/// What belongs together comes within this time of what came before.
const QUIET: Duration = Duration::from_millis(100);
/// No more is waited for after this time.
const LONGEST: Duration = Duration::from_secs(1);

/// Follows the changes, by a socket that stays in the namespace in which it was made, and keeps it.
pub(crate) struct Watch(TokioSocket);

impl Watch {
    /// Watches the network namespace of this thread, in this runtime.
    pub(super) fn here(runtime: &Handle) -> io::Result<Self> {
        let _entered = runtime.enter();
        let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
        socket.socket_mut().bind(&SocketAddr::new(0, GROUPS))?;
        Ok(Self(socket))
    }

    /// Waits for a change, and until what belongs to it is over.
    pub(crate) async fn changed(&mut self) -> io::Result<()> {
        while !self.read().await? {}
        let end = Instant::now() + LONGEST;
        while Instant::now() < end {
            match timeout(QUIET, self.read()).await {
                Ok(read) => drop(read?),
                Err(_) => break,
            }
        }
        Ok(())
    }

    /// Waits for a message, and says whether it is of the pod.
    async fn read(&mut self) -> io::Result<bool> {
        match self.0.recv_from_full().await {
            Ok((message, _)) => Ok(!is_of_tap(&message)),
            // The kernel had no room for some.
            Err(error) if error.raw_os_error() == Some(ENOBUFS) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// Whether a message is about a tap of the VMM, which the shim itself changes.
fn is_of_tap(bytes: &[u8]) -> bool {
    use RouteNetlinkMessage::{DelLink, NewLink};
    match NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes).map(|message| message.payload) {
        Ok(NetlinkPayload::InnerMessage(NewLink(link) | DelLink(link))) => is_tap(scan::name_of(&link)),
        _ => false,
    }
}
