//! No thread of the VMM opens a file when it frees memory: its system call filter would kill the process.

#![allow(clippy::unwrap_used)]

use bulkhead_vmm::jail::{ThreadRole, harden, spawn};

fn main() {
    harden().unwrap();
    for role in ThreadRole::ALL {
        // Each is too small for a mapping of its own.
        let body = || drop((0..64).map(|_| vec![1_u8; 100 << 10]).collect::<Vec<_>>());
        spawn(format!("{role:?}"), role, body).unwrap().join().unwrap();
    }
}
