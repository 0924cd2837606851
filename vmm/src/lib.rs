//! Bulkhead's VMM: one process runs one VM.
//!
//! In the order of a start: [`config`] reads and checks the configuration, [`cgroup`] joins the pod's cgroup, [`netns`]
//! enters the pod's network namespace, and [`builder`] builds the VM from [`kvm`], [`memory`], [`arch`] and the
//! [`virtio`] devices on a [`bus`]. The VM boots a kernel or continues from a [`snapshot`]. [`vm`] runs it until the
//! guest, a client of the [`control_socket`] or a signal ends it. Meanwhile the [`jail`] restricts the process more and
//! more.

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod arch;
pub mod builder;
pub mod bus;
pub mod cgroup;
pub mod config;
pub mod control_socket;
pub mod io_ports;
pub mod jail;
pub mod kvm;
pub mod layout;
pub mod memory;
pub mod netns;
pub mod plug;
pub mod rate_limited_log;
pub mod snapshot;
pub mod vcpu;
pub mod virtio;
pub mod vm;

pub use memory::GuestMemory;

/// Locks a mutex. A thread that panics while it holds a lock aborts the process (`panic = "abort"`). So only tests
/// see a poisoned mutex, and its content is valid.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The error and its causes in one line.
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
