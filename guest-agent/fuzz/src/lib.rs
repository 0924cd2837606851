//! What may arrive at the agent's service, as functions of bytes: all that is read of a request before something is
//! done about it, so that nothing is done to the machine that runs this.

mod document;
pub mod requests;

/// All targets, by their names for `cargo fuzz`.
pub const TARGETS: &[bulkhead_fuzz::Named] = &[("requests", requests::run)];
