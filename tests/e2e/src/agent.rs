//! The agent's interface, as far as these programs speak it without the agent's crate, which needs a code generator:
//! the constants have the names that they have there.

pub(crate) const API_VERSION: u32 = 23;
pub(crate) const RPC_PORT: u32 = 1024;
pub(crate) const STREAM_PORT: u32 = 1025;
pub(crate) const READY_PORT: u32 = 1026;
/// The ttrpc service on [`RPC_PORT`].
pub(crate) const SERVICE: &str = "bulkhead.agent.v1.Agent";

#[cfg(test)]
mod tests {
    use bulkhead_agent_api as api;

    use super::*;

    #[test]
    fn the_constants_are_those_of_the_agents_crate() {
        let own = [API_VERSION, RPC_PORT, STREAM_PORT, READY_PORT];
        assert_eq!(own, [api::API_VERSION, api::RPC_PORT, api::STREAM_PORT, api::READY_PORT]);
    }
}
