//! The control queue (virtio 1.3, 5.1.6.5). It has one command: how many pairs of queues are in use.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_ERR, VIRTIO_NET_F_MQ, VIRTIO_NET_OK,
};

use super::{pairs::Pairs, tap::Tap};
use crate::virtio::{chain::Chain, queue::Outcome};

/// Why the device stops serving its driver.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error("a command has fewer than 2 bytes")]
    NoCommand,
    #[error("a command has no room for its answer")]
    NoAnswer,
}

/// What a command changes.
pub(super) struct Controlled<'d> {
    pub(super) tap: &'d Tap,
    pub(super) pairs: &'d Pairs,
    /// Those that the driver has negotiated.
    pub(super) features: u64,
}

impl Controlled<'_> {
    /// Carries out a command, and answers.
    pub(super) fn command(&self, chain: Chain) -> Result<Outcome, CommandError> {
        let Chain { mut readable, mut writable, .. } = chain;
        if writable.is_empty() {
            return Err(CommandError::NoAnswer);
        }
        let is_known = match readable.read_array().map(|head: [u8; 2]| head.map(u32::from)) {
            Some([VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET]) => {
                self.features & 1 << VIRTIO_NET_F_MQ != 0
            }
            Some(_) => false,
            None => return Err(CommandError::NoCommand),
        };
        let count = readable.read_array().map(u16::from_le_bytes).filter(|_| readable.is_empty());
        let is_done = is_known && count.is_some_and(|count| self.pairs.set(count, self.tap).is_ok());
        let answer = if is_done { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
        writable.write(&[answer as u8]);
        Ok(Outcome::Used(1))
    }
}
