//! The client of the agent in the guest.

pub(crate) mod agent;
pub(crate) mod clock;
pub(crate) mod clock_discipline;
pub(crate) mod stats;
