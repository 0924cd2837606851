//! The jail limits what a guest can do on the host after it has taken control of its VMM.
//!
//! The parts of the jail do not rely on one another. The VMM sets them up in this order, each as soon as it no longer
//! needs what the part forbids, and all of them before the guest executes its first instruction:
//!
//! 1. [`harden`] runs first. The process gains no privilege by execve(2), leaves no core dump, and closes the file
//!    descriptors that it inherited.
//! 2. [`enter`] runs when everything that the VM needs from the host is open. The process keeps access to the files
//!    that it serves and to no others. The mount namespace and Landlock enforce this independently. The process keeps
//!    the capabilities that it needs to serve files.
//! 3. [`enter_thread`] runs in each thread ([`spawn`]) before the thread reads anything that the guest wrote. The
//!    thread keeps the user, the capabilities, the files and the [system calls](syscalls) that its role needs.

pub(crate) mod capabilities;
mod credentials;
mod enter;
mod error;
mod hardening;
mod jailed_thread;
pub(crate) mod landlock;
mod root;
mod seccomp;
mod syscalls;
#[cfg(test)]
pub(crate) mod testing;
mod thread_role;

pub use enter::{enter, enter_thread};
pub use error::JailError;
pub use hardening::harden;
pub use jailed_thread::{StartedThread, ThreadError, spawn, start};
pub use landlock::{LandlockError, landlock_warning};
pub use root::Root;
pub use seccomp::FilterError;
pub use thread_role::ThreadRole;
