//! The targets are in the shim itself, `host-shim/src/fuzz.rs`: what they attack is nobody else's to use.

pub use bulkhead_host_shim::fuzz::TARGETS;
