//! Bulkhead's VMM: one process, one VM.
//!
//! The story, in the order it happens: [`config`] reads what the VM shall be, [`netns`] leaves the host's network,
//! [`builder`] makes it ([`kvm`], [`memory`], [`arch`], the [`virtio`] devices on a [`bus`]), of a kernel or of what was
//! saved of another VM ([`snapshot`]), [`vm`] runs it until its guest, an operator ([`control`]) or a signal ends it. All the while the walls of the [`jail`] close around it.

#![deny(unsafe_code)]

pub mod arch;
pub mod builder;
pub mod bus;
pub mod config;
pub mod control;
pub mod guest_log;
pub mod jail;
pub mod kvm;
pub mod memory;
pub mod netns;
pub mod ports;
pub mod snapshot;
pub mod vcpu;
pub mod virtio;
pub mod vm;

pub use memory::GuestMemory;

/// Takes a lock. A thread that panicked while it held it has ended the process (`panic = "abort"`), so a
/// poisoned lock is only met in tests, where its content is as good as ever.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The error and its causes, on one line whatever they say.
pub fn one_line(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line.replace('\n', " ")
}
