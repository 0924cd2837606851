//! The agent's calls on a container that exists: pause and resume, limits, numbers, and word of killed processes.

use bulkhead_agent_api::agent;
use ttrpc::context::{Context, with_duration};

use super::{Agent, AgentError, QUICK, failed};

impl Agent {
    /// Stops every process of the container; returns when they have stopped.
    pub(crate) async fn pause(&self, id: &str) -> Result<(), AgentError> {
        let mut request = agent::PauseContainerRequest::new();
        request.container_id = id.into();
        let answer = self.client.pause_container(with_duration(QUICK), &request).await;
        answer.map(drop).map_err(|e| failed("PauseContainer", e))
    }

    /// Lets them go on.
    pub(crate) async fn resume(&self, id: &str) -> Result<(), AgentError> {
        self.resume_within(with_duration(QUICK), id).await
    }

    /// The same as soon as the agent answers again, however long that takes.
    pub(crate) async fn resume_at_last(&self, id: &str) -> Result<(), AgentError> {
        self.resume_within(Context::default(), id).await
    }

    async fn resume_within(&self, context: Context, id: &str) -> Result<(), AgentError> {
        let mut request = agent::ResumeContainerRequest::new();
        request.container_id = id.into();
        let answer = self.client.resume_container(context, &request).await;
        answer.map(drop).map_err(|e| failed("ResumeContainer", e))
    }

    /// Changes limits of the container: `linux.resources` of the OCI runtime-spec.
    pub(crate) async fn update(&self, id: &str, resources_json: Vec<u8>) -> Result<(), AgentError> {
        let mut request = agent::UpdateContainerRequest::new();
        request.container_id = id.into();
        request.resources_json = resources_json;
        let answer = self.client.update_container(with_duration(QUICK), &request).await;
        answer.map(drop).map_err(|e| failed("UpdateContainer", e))
    }

    /// What the container uses.
    pub(crate) async fn stats(&self, id: &str) -> Result<agent::StatsResponse, AgentError> {
        let mut request = agent::StatsRequest::new();
        request.container_id = id.into();
        self.client.stats(with_duration(QUICK), &request).await.map_err(|e| failed("Stats", e))
    }

    /// Waits, for as long as it takes, until more than `seen` processes were killed for want of memory, or the
    /// container's init has ended.
    pub(crate) async fn wait_oom(&self, id: &str, seen: u64) -> Result<agent::OomCounts, AgentError> {
        let mut request = agent::WaitOomRequest::new();
        request.container_id = id.into();
        request.kills_seen = seen;
        self.client.wait_oom(Context::default(), &request).await.map_err(|e| failed("WaitOom", e))
    }
}
