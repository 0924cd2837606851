//! The client of the agent in the guest.

pub(crate) mod agent;
pub(crate) mod stats;
