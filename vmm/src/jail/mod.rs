//! The jail: what is left to a VMM process that its guest has taken over.
//!
//! Its walls do not rely on one another. They are put up in this order, each as soon as what it forbids is no longer
//! needed, and all before the guest's first instruction:
//!
//! 1. [`process`]: the process as a whole gains nothing by executing a program, leaves no core, has no descriptor that
//!    it was not given.

use std::io;

mod process;
#[cfg(test)]
pub(crate) mod testing;

/// Why a wall does not stand. There is no VM without it.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error("cannot enter the jail: cannot close the descriptors that the VMM was started with")]
    Descriptors(#[source] io::Error),
    #[error("cannot enter the jail: cannot set {what}")]
    Process { what: &'static str, source: io::Error },
}

pub use process::harden;
