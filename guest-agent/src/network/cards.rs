//! The guest's network cards. One is there from the start. The VMM attaches others later.

use std::io;

use super::netlink::Socket;
use crate::attached_devices;

/// The card that has this permanent address, among the interfaces of the network namespace of `guest`, which is the
/// agent's own.
pub(super) fn find(guest: &Socket, card: &[u8; 6]) -> io::Result<Option<u32>> {
    if let Some(index) = guest.find(card)? {
        return Ok(Some(index));
    }
    attached_devices::probe()?;
    guest.find(card)
}
