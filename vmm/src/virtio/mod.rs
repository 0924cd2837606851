//! Virtio devices (virtio 1.3) behind a [transport].
//!
//! The transport owns a device and the thread that serves it, which is in a jail of its own. When the driver sets
//! DRIVER_OK, the transport passes the queues to the device in an [`Activation`]. The device returns a job, and its
//! thread runs the job until the driver resets the device or the device is dropped.
//!
//! Guest memory is hostile. A device copies each structure once and validates the copy. It never panics. It answers an
//! illegal act of the driver with [`Interrupt::needs_reset`].

pub mod balloon;
pub mod block;
pub mod chain;
mod config_space;
mod device;
pub mod device_threads;
pub mod event_loop;
pub mod fs;
mod interrupt;
#[allow(unsafe_code)]
mod iovecs;
pub mod mem;
pub mod mmio;
pub mod msix;
pub mod net;
pub mod pci;
pub mod pci_bus;
pub mod queue;
mod queue_threads;
pub mod rng;
mod shared_thread;
pub mod slot;
#[cfg(test)]
mod testing;
pub mod transport;
pub mod vsock;

pub use device::{Activation, VirtioDevice};
pub(crate) use interrupt::InterruptState;
pub use interrupt::{INTERRUPT_CONFIG, INTERRUPT_USED, Interrupt};
pub use queue::ActiveQueue;
