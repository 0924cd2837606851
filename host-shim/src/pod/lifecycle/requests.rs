//! What may be asked of a container in any state that it is in, beside its life: Kill, Pids, Stats, Update; and the
//! stats of the whole sandbox. Nothing here waits for the container's owner, and a guest that does not answer holds up
//! nobody but who asked.

use bulkhead_agent_api::agent::StatsResponse;
use containerd_shim_protos::api;
use protobuf::well_known_types::any::Any;

use crate::{
    guest::{
        agent::{AgentError, SIGKILL},
        stats,
    },
    pod::lifecycle::{Sandbox, owner::Handle},
    process::{
        error::TaskError,
        state::{Action, Refusal, Status},
        vm_end::alive,
    },
    types::{error::chain, spec::Resources},
};

impl Handle {
    /// Signals the container's init, one of its processes, or all of them.
    pub(crate) async fn kill(&self, request: &api::KillRequest) -> Result<(), TaskError> {
        if !request.exec_id.is_empty() && !request.all {
            let container = self.phase().container_for(Action::Query)?;
            return container.execs.kill(&request.exec_id, request.signal).await;
        }
        let container = self.phase().container_for(Action::Kill)?;
        match container.agent.signal(&container.id, request.signal, request.all).await {
            // The process, or its VM, ended while the signal was on its way.
            Err(_) if self.phase().status() == Status::Stopped => Err(Refusal::Ended.into()),
            // What the guest does not do, the end of the VM does.
            Err(e @ AgentError::Broken { .. }) if request.signal == SIGKILL => {
                tracing::error!("container {}: the VM is killed: {}", container.id, chain(&e));
                container.vm.kill().await;
                Ok(())
            }
            Ok(()) if request.signal == SIGKILL => {
                container.killed.is_told();
                Ok(())
            }
            other => Ok(other?),
        }
    }

    /// By their ids in the guest: none of the host's processes belongs to the container. One that ended has none left, as
    /// its VM may be gone too, and a guest that does not answer tells of none; both go by the one of the host,
    /// because containerd, when it is restarted, ends a shim whose list is empty or late.
    pub(crate) async fn pids(&self) -> Result<Vec<u32>, TaskError> {
        let container = self.phase().container_for(Action::Query)?;
        match container.agent.list_pids(&container.id).await {
            Ok(pids) if !pids.is_empty() => Ok(pids),
            Err(e @ AgentError::Refused { .. }) if self.phase().status() != Status::Stopped => Err(e.into()),
            Err(e) => {
                tracing::warn!("container {}: {}", container.id, chain(&e));
                Ok(vec![container.pid])
            }
            Ok(_) => Ok(vec![container.pid]),
        }
    }

    /// What the container uses.
    pub(crate) async fn stats(&self) -> Result<Any, TaskError> {
        Ok(stats::metrics(&self.usage().await?)?)
    }

    async fn usage(&self) -> Result<StatsResponse, TaskError> {
        let container = self.phase().container_for(Action::Query)?;
        match container.agent.stats(&container.id).await {
            // Its VM may be gone.
            Err(_) if self.phase().status() == Status::Stopped => Err(Refusal::Ended.into()),
            other => Ok(other?),
        }
    }

    /// Changes the container's limits. A VM that is too small for them gets larger first.
    pub(crate) async fn update(
        &self,
        sandbox: &Sandbox,
        request: api::UpdateTaskRequest,
    ) -> Result<(), TaskError> {
        let container = self.phase().container_for(Action::Update)?;
        let resources = request.resources.into_option().unwrap_or_default().value;
        // What cannot be read is the agent's to refuse. 0 stands for a limit that stays.
        let memory = serde_json::from_slice::<Resources>(&resources).unwrap_or_default().memory;
        if memory.limit.unwrap_or(0) == 0 {
            container.agent.update(&container.id, resources).await?;
        } else {
            let before = sandbox.set_memory_limit(&container.id, memory.bytes());
            let updated = async {
                container.vm.make_room(sandbox.memory_limits()).await?;
                Ok(container.agent.update(&container.id, resources).await?)
            };
            if let Err(e) = alive(&container.vm, updated).await {
                sandbox.set_memory_limit(&container.id, before);
                return Err(e);
            }
        }
        tracing::info!("container {}: limits updated", container.id);
        Ok(())
    }
}

impl Sandbox {
    /// What the containers use together. What the VM itself takes of the host is in the pod's cgroup there.
    pub(crate) async fn stats(&self) -> Result<Any, TaskError> {
        let mut used = vec![self.container(self.id())?.usage().await?];
        for member in self.members() {
            match member.usage().await {
                Ok(usage) => used.push(usage),
                // One that ended, or is not there yet, uses nothing.
                Err(TaskError::Refused(_)) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(stats::metrics(&stats::sum(&used))?)
    }
}
