//! The agent's interface, as far as these programs speak it without the agent's crate, which needs a code generator:
//! the constants have the names that they have there.

pub(crate) const API_VERSION: u32 = 5;
pub(crate) const RPC_PORT: u32 = 1024;
pub(crate) const STREAM_PORT: u32 = 1025;
pub(crate) const READY_PORT: u32 = 1026;
/// The ttrpc service on [`RPC_PORT`].
pub(crate) const SERVICE: &str = "bulkhead.agent.v1.Agent";
