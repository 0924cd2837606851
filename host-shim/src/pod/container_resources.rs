//! What a container uses, and its limits: the requests Pids, Stats and Update, which do not change its state. If the
//! guest does not answer, only the caller waits.

use std::{sync::Arc, time::Duration};

use bulkhead_agent_api::agent::StatsResponse;
use containerd_shim_protos::api;
use protobuf::well_known_types::any::Any;
use serde_json::Value;
use tokio::{
    sync::OwnedMutexGuard,
    time::{Instant, timeout_at},
};
use tracing::Instrument;

use crate::{
    guest::{agent::AgentError, stats},
    host::cgroup_io::IoLimit,
    pod::{
        block_io,
        container::Container,
        container_role::Role,
        devices,
        pod_vm::{MemoryLimits, PodLimit, PodVm},
    },
    process::{
        error::TaskError,
        state::{Action, Refusal, Status},
    },
    types::{
        error::chain,
        request_error::RequestError,
        spec::{Cpu, Resources},
    },
};

/// How long an update may take, with all that it waits for. kubelet gives up after two minutes. What is still to be
/// done then, such as putting back what it changed, takes another 20 s at most.
const UPDATE: Duration = Duration::from_secs(90);

/// An update of limits.
struct Update {
    /// Its own among those of the container.
    number: u64,
    resources: Resources,
    /// For the guest.
    json: Vec<u8>,
    /// For the host.
    io: Vec<IoLimit>,
    /// When it must have ended.
    deadline: Instant,
}

/// Gives up a part of an update when the whole takes too long.
async fn by<T>(deadline: Instant, part: impl Future<Output = Result<T, TaskError>>) -> Result<T, TaskError> {
    let late = TaskError::Timeout { what: "update of the container's limits", seconds: UPDATE.as_secs() };
    timeout_at(deadline, part).await.unwrap_or(Err(late))
}

/// The limits have changed. A vCPU more or less than they need is no reason to say that they have not.
fn warn_of_vcpus(container: &str, fitted: Result<(), TaskError>) {
    if let Err(error) = fitted {
        tracing::warn!(container, error = chain(&error), "the vCPUs do not follow the limits");
    }
}

impl Container {
    /// The process of the host that stands for the container, once for each process of the container. The numbers in
    /// the guest are those of other processes on the host, where clients would look for them (`nerdctl top`,
    /// containerd's metrics). But clients also count them.
    ///
    /// When containerd is restarted, it asks each shim without a sandbox for this list. It gives up a shim whose list
    /// is empty or late, or whose answer is an error. So if the guest does not answer, the list has one entry.
    pub(crate) async fn pids(&self) -> Result<Vec<u32>, TaskError> {
        self.allow(Action::Query)?;
        let count = match self.guest.agent.list_pids(&self.id).await {
            Ok(pids) => pids.len().max(1),
            Err(AgentError::Silent { .. }) => 1,
            Err(error) => {
                tracing::warn!(container = self.id, error = chain(&error), "no list of processes");
                1
            }
        };
        Ok(vec![self.pid(); count])
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
        // One after the other: one that fails puts back what it found.
        let deadline = Instant::now() + UPDATE;
        let mut updates = by(deadline, async { Ok(Arc::clone(&self.updates).lock_owned().await) }).await?;
        self.allow(Action::Update)?;
        *updates += 1;
        let json = self.with_disks(request.resources.into_option().unwrap_or_default().value)?;
        // If the resources cannot be read, the agent refuses them. 0 stands for a limit that stays.
        let resources = serde_json::from_slice::<Resources>(&json).unwrap_or_default();
        let (json, io) = match self.role {
            Role::Single => block_io::take_from(json, &resources)?,
            Role::Sandbox | Role::Member { .. } => (json, Vec::new()),
        };
        let update = Update { number: *updates, resources, json, io, deadline };
        let updated = self.update_in_turn(pod, update).await;
        if matches!(updated, Err(TaskError::Agent(AgentError::Timeout { .. }))) {
            self.undo_late_update(updates);
        }
        updated
    }

    /// Undoes an update that the guest may still make, although the client was told that it has failed. No other update
    /// begins before the guest has answered, because the agent can undo the last one only.
    fn undo_late_update(&self, updates: OwnedMutexGuard<u64>) {
        let (pod, guest, id) = (Arc::clone(&self.pod), self.guest.clone(), self.id.clone());
        let undo = async move {
            match guest.agent.undo_update_without_deadline(&id, *updates).await {
                Ok(()) => {
                    tracing::info!(
                        container = id,
                        "the limits are those from before an update that was late"
                    );
                    // On the host too: the update has changed the vCPUs before it asked the guest.
                    warn_of_vcpus(&id, pod.fit_processors(&guest).await);
                }
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(
                        container = id,
                        error,
                        "an update that was late is not undone in the guest"
                    );
                }
            }
        };
        tokio::spawn(undo.in_current_span());
    }

    async fn update_in_turn(&self, pod: &PodVm, update: Update) -> Result<(), TaskError> {
        let Update { resources, deadline, .. } = &update;
        pod.check_cpu(&resources.cpu)?;
        if self.role == Role::Sandbox {
            // A negative quota ends the limit.
            if resources.cpu.quota.is_some_and(|quota| quota != 0) {
                pod.set_pod_cpu_limit(resources.cpu.limit()).await;
                by(*deadline, pod.fit_processors(&self.guest)).await?;
            }
        } else if resources.cpu != Cpu::default() {
            return self.update_cpu(pod, update).await;
        }
        self.update_guest(pod, update).await
    }

    /// Resources in which device rules are about the devices of the guest.
    fn with_disks(&self, json: Vec<u8>) -> Result<Vec<u8>, RequestError> {
        let has_rules = |rules: &Value| rules.as_array().is_some_and(|rules| !rules.is_empty());
        match serde_json::from_slice::<Value>(&json) {
            Ok(mut resources) if has_rules(&resources["devices"]) => {
                devices::translate_rules(&mut resources["devices"], &self.disks)?;
                Ok(serde_json::to_vec(&resources).unwrap_or(json))
            }
            _ => Ok(json),
        }
    }

    /// Makes an update that changes limits of processor time.
    async fn update_cpu(&self, pod: &PodVm, update: Update) -> Result<(), TaskError> {
        let deadline = update.deadline;
        let before = pod.cpu_of(&self.id).unwrap_or_default();
        let cpu = before.updated(&update.resources.cpu);
        let limit = match cpu.limit() == before.limit() {
            true => PodLimit::Apply,
            false => PodLimit::Ignore,
        };
        pod.change_cpu(&self.id, cpu);
        let updated = async {
            by(deadline, pod.grow_processors(&self.guest, limit)).await?;
            let json =
                by(deadline, pod.update_for_guest(&update.json, &update.resources.cpu)).await?.into_owned();
            self.update_guest(pod, Update { json, ..update }).await
        };
        let updated = self.guest.run(updated).await;
        if updated.is_err() {
            if self.is_recorded() {
                pod.change_cpu(&self.id, before);
            }
        } else if limit == PodLimit::Ignore {
            pod.set_pod_cpu_limit(None).await;
        }
        // A guest that did not answer is asked by the next change.
        if matches!(updated, Err(TaskError::Agent(AgentError::Timeout { .. }))) {
            return updated;
        }
        // The update is made. A vCPU that stays online takes nothing from anybody.
        warn_of_vcpus(&self.id, by(deadline, pod.fit_processors(&self.guest)).await);
        updated
    }

    /// Whether what the pod has recorded of this id is still of this container. Delete does not wait for an update, and
    /// after it another container may have the id.
    fn is_recorded(&self) -> bool {
        self.init.status() != Status::Deleted
    }

    async fn update_guest(&self, pod: &PodVm, update: Update) -> Result<(), TaskError> {
        // The host's limits first: they can be put back without the guest.
        let before = by(update.deadline, pod.limit_io(&update.io)).await?;
        let updated = self.update_cpu_and_guest(pod, update).await;
        if updated.is_err()
            && self.is_recorded()
            && let Some(before) = before
        {
            pod.put_back_io(before).await;
        }
        updated
    }

    async fn update_cpu_and_guest(&self, pod: &PodVm, update: Update) -> Result<(), TaskError> {
        let Update { number, resources, deadline, .. } = &update;
        let before = match self.role {
            Role::Single if resources.cpu != Cpu::default() => {
                by(*deadline, pod.limit_cpu(&resources.cpu)).await?
            }
            _ => None,
        };
        let updated = match (resources.memory.limit.unwrap_or(0), resources.huge_pages()) {
            (0, None) => {
                self.guest.agent.update(&self.id, *number, update.json).await.map_err(TaskError::from)
            }
            _ => self.update_memory(pod, update).await,
        };
        match (&updated, before) {
            (Ok(()), _) => tracing::info!(container = self.id, "limits updated"),
            (Err(_), Some(before)) if self.is_recorded() => pod.put_back_cpu(before).await,
            (Err(_), _) => {}
        }
        updated
    }

    async fn update_memory(&self, pod: &PodVm, update: Update) -> Result<(), TaskError> {
        let Update { number, resources, json, deadline, .. } = update;
        self.allow(Action::Update)?;
        let before = pod.memory_of(&self.id).unwrap_or_default();
        let new = MemoryLimits {
            memory: match resources.memory.limit.unwrap_or(0) {
                0 => before.memory,
                _ => resources.memory.bytes(),
            },
            huge_pages: resources.huge_pages().unwrap_or(before.huge_pages),
        };
        pod.change_memory_limits(&self.id, new);
        let updated = async {
            if self.role == Role::Single {
                // Before the guest's limit, which it stays above.
                by(deadline, pod.raise_memory_limit(new)).await?;
            }
            by(deadline, pod.grow_memory(&self.guest)).await?;
            Ok(self.guest.agent.update(&self.id, number, json).await?)
        };
        if let Err(error) = self.guest.run(updated).await {
            if self.is_recorded() {
                pod.change_memory_limits(&self.id, before);
            }
            return Err(error);
        }
        if let (Some(before), Some(new)) = (before.memory, new.memory)
            && let followed = by(deadline, pod.follow_update(&self.guest, before, new))
            && let Err(error) = self.guest.run(followed).await
        {
            // The update is made: the container has its new limit.
            tracing::warn!(
                container = self.id,
                error = chain(&error),
                "the VM keeps the memory of a lowered limit"
            );
        }
        Ok(())
    }
}
