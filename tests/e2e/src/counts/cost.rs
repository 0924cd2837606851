//! What a unit of work costs. `bulkhead-e2e counts` writes it as JSON, and `cargo xtask bench counts` reads that.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a unit of work costs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cost {
    /// FUSE requests by opcode.
    pub(crate) requests: BTreeMap<String, f64>,
    /// Exits of the vCPU.
    pub(crate) exits: f64,
    /// Of them, those in which the VMM emulates an access to a register.
    pub(crate) mmio_exits: f64,
    /// Interrupts that KVM has injected.
    pub(crate) interrupts: f64,
    /// Bytes that the VMM has read and written by system calls.
    pub(crate) copied_bytes: f64,
    /// Packets that left the container, and packets that reached it.
    pub(crate) packets_out: f64,
    pub(crate) packets_in: f64,
}

/// The costs by the name of the row.
pub(crate) type Costs = BTreeMap<String, Cost>;

impl Cost {
    /// All requests.
    pub(crate) fn all_requests(&self) -> f64 {
        self.requests.values().fold(0.0, |sum, count| sum + count)
    }
}
