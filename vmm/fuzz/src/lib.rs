//! Fuzz targets: what a hostile guest can do to the VMM, and a client to its control socket.
//!
//! Each target interprets its input as a program ([`input`]) and runs it on a real device behind its real transport
//! ([`guest`]). A crash, a panic, a hang, or a violated promise is a bug. `cargo fuzz` searches for such programs.
//! The plain tests run the saved programs, and many that a simple generator makes.

pub mod balloon;
pub mod block;
pub mod control_socket;
pub mod fetch;
pub mod fs;
pub mod guest;
pub mod meddle;
pub mod mem;
pub mod net;
pub mod pci;
pub mod queue;
pub mod registers;
pub mod restore;
pub mod vsock;

pub use bulkhead_fuzz::{check, input};

/// All targets, with their names for `cargo fuzz`.
pub const TARGETS: &[bulkhead_fuzz::Named] = &[
    ("queue", queue::run),
    ("registers", registers::run),
    ("pci", pci::run),
    ("vsock", vsock::run),
    ("fs", fs::run),
    ("net", net::run),
    ("control_socket", control_socket::run),
    ("balloon", balloon::run),
    ("mem", mem::run),
    ("block", block::run),
    ("fetch", fetch::run),
    ("restore", restore::run),
];
