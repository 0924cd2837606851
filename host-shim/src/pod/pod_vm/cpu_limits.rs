//! The processors of a pod's VM follow what the pod's containers may use.

use std::{borrow::Cow, sync::Arc, time::Duration};

use bulkhead_agent_api::cpu_list;
use serde_json::Value;
use tokio::time::timeout;

use super::{PodVm, Registered, host_resources::Fit, lock};
use crate::{
    host::processors,
    pod::{create_request::CreatePlan, vcpus::check},
    process::{error::TaskError, running_guest::Guest},
    types::{error::chain, spec::Cpu},
};

/// How long the end of a container waits until the pod has given back its processors. It goes on after that.
const GIVE_BACK: Duration = Duration::from_secs(1);

/// Whether the pod's own limit of processor time applies, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PodLimit {
    Apply,
    /// A container gets another limit, which the limit of all does not include yet.
    Ignore,
}

impl PodVm {
    /// Replaces the limits of processor time of a container. Returns those that it had. None: it has none to replace,
    /// as it uses no processors, has ended or is deleted.
    pub(crate) fn change_cpu(&self, id: &str, cpu: Cpu) -> Option<Cpu> {
        let mut containers = lock(&self.containers);
        Some(std::mem::replace(containers.get_mut(id)?.cpu.as_mut()?, cpu))
    }

    /// The limits of processor time that a container has.
    pub(crate) fn cpu_of(&self, id: &str) -> Option<Cpu> {
        lock(&self.containers).get(id)?.cpu.clone()
    }

    /// Brings the vCPUs online that the containers need by now.
    pub(crate) async fn grow_processors(&self, guest: &Guest, limit: PodLimit) -> Result<(), TaskError> {
        self.fit(guest, Fit::Grow, limit).await
    }

    /// The same, and takes those offline that the containers cannot use.
    pub(crate) async fn fit_processors(&self, guest: &Guest) -> Result<(), TaskError> {
        self.fit(guest, Fit::Exactly, PodLimit::Apply).await
    }

    /// Removes the processors of a container that has ended from those that the VM may use, unless another container of
    /// the pod has them too. kubelet may be about to give them to another pod. This asks nothing of the guest, but an
    /// earlier request to the guest may have to end first.
    pub(crate) async fn give_back_processors(self: &Arc<Self>) {
        let Ok(guest) = self.guest() else { return };
        let pod = Arc::clone(self);
        let given_back = tokio::spawn(async move {
            if let Err(error) = pod.follow_on_host(&guest).await {
                tracing::warn!(
                    error = chain(&error),
                    "the VM keeps the processors of a container that has ended"
                );
            }
        });
        _ = timeout(GIVE_BACK, given_back).await;
    }

    /// Sets the pod's own limit of processor time. None: only the limits of its containers apply.
    pub(crate) async fn set_pod_cpu_limit(&self, limit: Option<u64>) {
        if let Some(host) = self.host.lock().await.as_mut() {
            host.pod_cpu_limit = limit;
        }
    }

    /// Refuses limits that name processors or NUMA nodes which the host does not have.
    pub(crate) fn check_cpu(&self, cpu: &Cpu) -> Result<(), TaskError> {
        Ok(check(cpu, &processors::processors()?, &processors::numa_nodes()?)?)
    }

    /// The spec of a container as its guest is to get it.
    pub(crate) async fn spec_for_guest<'p>(&self, plan: &'p CreatePlan) -> Result<Cow<'p, [u8]>, TaskError> {
        self.for_guest(&plan.spec_json, "/linux/resources/cpu", &plan.resources.cpu).await
    }

    /// The resources of an update, `linux.resources`, as the guest is to get them.
    pub(crate) async fn update_for_guest<'p>(
        &self,
        json: &'p [u8],
        cpu: &Cpu,
    ) -> Result<Cow<'p, [u8]>, TaskError> {
        self.for_guest(json, "/cpu", cpu).await
    }

    /// Replaces the processors of the host by the vCPUs that stand for them. Removes the NUMA nodes, which are the
    /// host's: a guest has one.
    async fn for_guest<'p>(
        &self,
        json: &'p [u8],
        place: &str,
        cpu: &Cpu,
    ) -> Result<Cow<'p, [u8]>, TaskError> {
        if !cpu.has_set() {
            return Ok(Cow::Borrowed(json));
        }
        let damaged = |error: serde_json::Error| TaskError::Internal(error.to_string());
        let mut document: Value = serde_json::from_slice(json).map_err(damaged)?;
        let host = self.host.lock().await;
        if let (Some(host), Some(json)) =
            (host.as_ref(), document.pointer_mut(place).and_then(Value::as_object_mut))
        {
            json.remove("mems");
            let named = cpu.cpus.as_deref().and_then(cpu_list::parse).filter(|cpus| !cpus.is_empty());
            if let Some(cpus) = named {
                let mut vcpus = host.vcpus.vcpus_of(&cpus);
                // None of them can be used now. Like the kernel, it has all that the pod may use. The list is not
                // empty, which would leave a container the set that it has.
                if vcpus.is_empty() {
                    vcpus = host.vcpus.all();
                }
                json.insert("cpus".into(), cpu_list::format(&vcpus).into());
            }
        }
        Ok(Cow::Owned(serde_json::to_vec(&document).map_err(damaged)?))
    }

    async fn fit(&self, guest: &Guest, fit: Fit, limit: PodLimit) -> Result<(), TaskError> {
        let mut host = self.host.lock().await;
        let Some(host) = host.as_mut() else { return Ok(()) };
        let limits = self.cpu_limits();
        let demands = host.assign(&limits)?;
        let pod_limit = host.pod_cpu_limit.filter(|_| limit == PodLimit::Apply);
        let asked = host.set_online(guest, host.vcpus.wanted(pod_limit, &demands), fit).await;
        // Also if the guest does not answer.
        host.apply_cpu_limits(guest, &limits, &demands).await.and(asked)
    }

    /// Lets the VM follow processors of the host that have gone offline or come back. The kernel does not pin a thread
    /// to its processor again when that comes back.
    pub(super) async fn follow_online(&self, guest: &Guest) -> Result<(), TaskError> {
        // Other threads run on whatever is online.
        if !self.cpu_limits().iter().any(Cpu::has_set) {
            return Ok(());
        }
        match self.host.lock().await.as_mut() {
            Some(host) if host.cpuset.is_none() || host.usable_processors()? != host.vcpus.host => {
                // v1 removes a processor that goes offline from the cpusets.
                host.cpuset = None;
            }
            _ => return Ok(()),
        }
        let followed = self.follow_on_host(guest).await;
        if followed.is_err()
            && let Some(host) = self.host.lock().await.as_mut()
        {
            // So that the next look tries again, although the same processors are online.
            host.cpuset = None;
        }
        followed
    }

    async fn follow_on_host(&self, guest: &Guest) -> Result<(), TaskError> {
        let mut host = self.host.lock().await;
        let Some(host) = host.as_mut() else { return Ok(()) };
        let limits = self.cpu_limits();
        let demands = host.assign(&limits)?;
        host.apply_cpu_limits(guest, &limits, &demands).await
    }

    /// The limits of all containers that use processors.
    fn cpu_limits(&self) -> Vec<Cpu> {
        lock(&self.containers).values().filter_map(|Registered { cpu, .. }| cpu.clone()).collect()
    }
}
