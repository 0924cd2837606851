//! The agent's calls about the guest's clock.

use bulkhead_agent_api::{agent, synchronization::Synchronization};
use ttrpc::context::Context;

use super::{Agent, AgentError, QUICK};
use crate::guest::clock_discipline::Correction;

impl Agent {
    /// The guest's clock, nanoseconds since 1970. It may be anything.
    pub(crate) async fn read_clock(&self) -> Result<i64, AgentError> {
        let nothing = agent::Empty::new();
        let answer =
            self.call("ReadClock", QUICK, |context| self.client.read_clock(context, &nothing)).await?;
        Ok(answer.unix_ns)
    }

    /// Waits, without a deadline, until the agent answers again.
    pub(crate) async fn wait_for_answer(&self) -> Result<(), AgentError> {
        let answer = self.client.read_clock(Context::default(), &agent::Empty::new()).await;
        self.heard("ReadClock", answer).map(drop)
    }

    /// Corrects the guest's clock. The guest's programs are told that it has the quality `synchronization` then.
    pub(crate) async fn adjust_clock(
        &self,
        correction: &Correction,
        tai_offset_s: i32,
        synchronization: Synchronization,
    ) -> Result<(), AgentError> {
        let mut request = agent::AdjustClockRequest::new();
        request.step_ns = correction.step_ns;
        request.rate_ppb = correction.rate_ppb;
        request.tai_offset_s = tai_offset_s;
        request.is_synchronized = synchronization.is_synchronized;
        request.max_error_us = synchronization.max_error_us;
        request.estimated_error_us = synchronization.estimated_error_us;
        self.call("AdjustClock", QUICK, |context| self.client.adjust_clock(context, &request)).await.map(drop)
    }
}
