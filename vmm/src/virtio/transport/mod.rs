//! How a driver reaches a device: the registers and the lifecycle of a device, which are the same for each transport.
//!
//! [`registers`] knows the registers and which writes are legal, and [`lifecycle`] starts and stops the device.
//! [`Core`] connects them. [`super::mmio`] and [`super::pci`] give the registers their addresses. A device does not
//! know which transport it has.

use std::io;

use vmm_sys_util::eventfd::EventFd;

use crate::jail::ThreadError;

mod core;
mod lifecycle;
pub(crate) mod registers;

pub use self::core::Core;
pub(super) use self::core::event;

/// A write to this address signals the event, and does not exit to the VMM.
pub struct IoEventFd<'d> {
    pub address: u64,
    /// Only if it writes this value. None: any.
    pub value: Option<u32>,
    pub event: &'d EventFd,
}

/// Why a device could not be connected to its guest.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    #[error("cannot make the eventfds of a device")]
    Events(#[source] io::Error),
    #[error("a device has more queues than the transport has interrupts for")]
    Queues,
    #[error(transparent)]
    Thread(#[from] ThreadError),
}
