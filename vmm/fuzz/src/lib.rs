//! What a hostile guest may do to the VMM, and a client to its control socket, as functions of bytes.
//!
//! Each target reads the bytes as a program of acts ([`input`]) and performs them on a real device behind its real
//! transport ([`guest`]). A crash, a panic, a hang, or a broken promise that a target checks is a bug. `cargo fuzz`
//! searches for programs; the plain tests run those that were saved, and many that a simple generator makes up.

pub mod balloon;
pub mod control_socket;
pub mod fetch;
pub mod fs;
pub mod guest;
pub mod meddle;
pub mod mem;
pub mod net;
pub mod queue;
pub mod registers;
pub mod restore;
pub mod vsock;

pub use bulkhead_fuzz::{check, input};

/// All targets, by their names for `cargo fuzz`.
pub const TARGETS: &[bulkhead_fuzz::Named] = &[
    ("queue", queue::run),
    ("registers", registers::run),
    ("vsock", vsock::run),
    ("fs", fs::run),
    ("net", net::run),
    ("control_socket", control_socket::run),
    ("balloon", balloon::run),
    ("mem", mem::run),
    ("fetch", fetch::run),
    ("restore", restore::run),
];
