//! What may be asked of a container beside its life: Pids, Stats, Update. A guest that does not answer holds up nobody
//! but who asked.

use bulkhead_agent_api::agent::StatsResponse;
use containerd_shim_protos::api;
use protobuf::well_known_types::any::Any;

use crate::{
    guest::{agent::AgentError, stats},
    pod::{container::Container, pod_vm::PodVm},
    process::{
        error::TaskError,
        state::{Action, Refusal},
    },
    types::{error::chain, spec::Resources},
};

impl Container {
    /// The processes by their ids in the guest: none of the host's processes belongs to the container. containerd, when it
    /// is restarted, ends a shim whose list is empty or late. So a container that has ended, or whose guest does not
    /// answer, has the one process of the host that stands for it.
    pub(crate) async fn pids(&self) -> Result<Vec<u32>, TaskError> {
        self.allow(Action::Query)?;
        match self.guest.agent.list_pids(&self.id).await {
            Ok(pids) if !pids.is_empty() => Ok(pids),
            Err(error @ AgentError::Refused { .. }) if self.init.state().exit().is_none() => {
                Err(error.into())
            }
            Err(error) => {
                tracing::warn!(container = self.id, error = chain(&error), "no list of processes");
                Ok(vec![self.pid()])
            }
            Ok(_) => Ok(vec![self.pid()]),
        }
    }

    /// What the container uses, as containerd's clients expect it.
    pub(crate) async fn stats(&self) -> Result<Any, TaskError> {
        Ok(stats::metrics(&self.usage().await?)?)
    }

    /// What the container uses.
    pub(crate) async fn usage(&self) -> Result<StatsResponse, TaskError> {
        self.allow(Action::Query)?;
        match self.guest.agent.stats(&self.id).await {
            // Its VM may be gone.
            Err(_) if self.init.state().exit().is_some() => Err(Refusal::Ended.into()),
            other => Ok(other?),
        }
    }

    /// Changes the container's limits. A VM that is too small for them gets larger first.
    pub(crate) async fn update(&self, pod: &PodVm, request: api::UpdateTaskRequest) -> Result<(), TaskError> {
        self.allow(Action::Update)?;
        let resources = request.resources.into_option().unwrap_or_default().value;
        // What cannot be read is the agent's to refuse. 0 stands for a limit that stays.
        let memory = serde_json::from_slice::<Resources>(&resources).unwrap_or_default().memory;
        if memory.limit.unwrap_or(0) == 0 {
            self.guest.agent.update(&self.id, resources).await?;
        } else {
            let before = pod.register(&self.id, memory.bytes());
            let updated = async {
                self.guest.vm.make_room(pod.memory_limits()).await?;
                Ok(self.guest.agent.update(&self.id, resources).await?)
            };
            if let Err(error) = self.guest.run(updated).await {
                pod.register(&self.id, before);
                return Err(error);
            }
        }
        tracing::info!(container = self.id, "limits updated");
        Ok(())
    }
}
