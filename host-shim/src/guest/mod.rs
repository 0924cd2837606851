//! The client of the agent in the guest.

pub(crate) mod agent;
pub(crate) mod clock_discipline;
pub(crate) mod clock_sync;
pub(crate) mod profiles;
pub(crate) mod stats;
