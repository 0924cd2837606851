//! The processors of a pod's VM follow what the pod's containers may use.

use std::borrow::Cow;

use bulkhead_agent_api::cpu_list::{self, CpuNumbers};
use serde_json::Value;

use super::{HostSide, PodVm, Registered, lock};
use crate::{
    host::{
        blocking,
        cgroup_limits::{self, Cpuset},
        processors,
    },
    pod::{
        create_request::Plan,
        processors::{Demand, check},
    },
    process::{error::TaskError, running_guest::Guest},
    types::spec::Cpu,
};

/// Whether vCPUs may go offline, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    Grow,
    Exactly,
}

impl PodVm {
    /// Records the limits of processor time of a container. None for one that uses none. Returns those that it had.
    pub(crate) fn register_cpu(&self, id: &str, cpu: Option<Cpu>) -> Option<Cpu> {
        let mut containers = lock(&self.containers);
        std::mem::replace(&mut containers.entry(id.into()).or_default().cpu, cpu)
    }

    /// The limits of processor time that a container has.
    pub(crate) fn cpu_of(&self, id: &str) -> Option<Cpu> {
        lock(&self.containers).get(id)?.cpu.clone()
    }

    /// Brings the vCPUs online that the containers need by now.
    pub(crate) async fn grow_processors(&self, guest: &Guest) -> Result<(), TaskError> {
        self.fit(guest, Fit::Grow).await
    }

    /// The same, and takes those offline that the containers cannot use.
    pub(crate) async fn fit_processors(&self, guest: &Guest) -> Result<(), TaskError> {
        self.fit(guest, Fit::Exactly).await
    }

    /// From now on only the limits of the containers count, as one of them was changed, or `limit` was given for all.
    pub(crate) async fn set_pod_cpu_limit(&self, limit: Option<u64>) {
        if let Some(host) = self.host.lock().await.as_mut() {
            host.pod_cpu_limit = limit;
        }
    }

    /// Refuses limits that name processors which the host does not have.
    pub(crate) fn check_cpu(&self, cpu: &Cpu) -> Result<(), TaskError> {
        Ok(check(cpu, &processors::online()?)?)
    }

    /// The spec of a container as its guest is to get it.
    pub(crate) async fn spec_for_guest<'p>(&self, plan: &'p Plan) -> Result<Cow<'p, [u8]>, TaskError> {
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
                json.insert("cpus".into(), cpu_list::format(&host.processors.vcpus_of(&cpus)).into());
            }
        }
        Ok(Cow::Owned(serde_json::to_vec(&document).map_err(damaged)?))
    }

    async fn fit(&self, guest: &Guest, fit: Fit) -> Result<(), TaskError> {
        let mut host = self.host.lock().await;
        let Some(host) = host.as_mut() else { return Ok(()) };
        let limits = self.cpu_limits();
        host.processors.host = processors::online()?;
        let demands: Vec<_> = limits.iter().map(|cpu| Demand::of(cpu, &host.processors.host)).collect();
        let was_assigned = host.processors.are_assigned();
        host.processors.assign(&demands);
        let (online, wanted) = (host.processors.online, host.processors.wanted(host.pod_cpu_limit, &demands));
        if wanted > online || (wanted < online && fit == Fit::Exactly) {
            let now = guest.agent.set_processors(wanted).await?;
            host.processors.online = wanted;
            tracing::info!(vcpus = wanted, now, "vCPUs are online");
        }
        host.follow_cpuset(cpuset_of(&limits))?;
        if was_assigned || host.processors.are_assigned() {
            let (vmm, affinities) = (guest.vm.process(), host.processors.affinities(&demands));
            blocking::run(move || processors::pin(vmm, &affinities), drop).await??;
        }
        Ok(())
    }

    /// The limits of all containers that use processors.
    fn cpu_limits(&self) -> Vec<Cpu> {
        lock(&self.containers).values().filter_map(|Registered { cpu, .. }| cpu.clone()).collect()
    }
}

impl HostSide {
    /// Whether the VM is to begin with one vCPU online, as its containers need fewer than there are. `cpu` are the
    /// limits of a single container.
    pub(super) fn begins_with_one_vcpu(&mut self, cpu: Option<&Cpu>) -> bool {
        let demands: Vec<_> = cpu.iter().map(|cpu| Demand::of(cpu, &self.processors.host)).collect();
        let all = self.processors.vcpus();
        if self.processors.wanted(self.pod_cpu_limit, &demands) < all {
            self.processors.online = 1;
        }
        self.processors.online < all
    }

    fn follow_cpuset(&mut self, wanted: Cpuset) -> Result<(), TaskError> {
        if let Some(cgroup) = self.cgroup.as_ref().filter(|_| wanted != self.cpuset) {
            cgroup_limits::limit_cpuset(cgroup, &self.cpuset, &wanted)?;
            self.cpuset = wanted;
        }
        Ok(())
    }
}

/// The processors and NUMA nodes that containers with these limits may use together. All, if one of them may use all.
pub(super) fn cpuset_of<'c>(limits: impl IntoIterator<Item = &'c Cpu> + Clone) -> Cpuset {
    let union = |list: fn(&Cpu) -> Option<&str>| {
        let lists = limits.clone().into_iter().map(|cpu| list(cpu).filter(|list| !list.is_empty()));
        let lists = lists.collect::<Option<Vec<_>>>().filter(|lists| !lists.is_empty())?;
        let numbers = lists.into_iter().map(cpu_list::parse).collect::<Option<Vec<CpuNumbers>>>()?;
        Some(cpu_list::format(&numbers.into_iter().flatten().collect()))
    };
    Cpuset { cpus: union(|cpu| cpu.cpus.as_deref()), mems: union(|cpu| cpu.mems.as_deref()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_may_use_what_one_of_its_containers_may() {
        let cpu = |cpus: &str, mems: &str| Cpu {
            cpus: Some(cpus.into()),
            mems: Some(mems.into()),
            ..Cpu::default()
        };
        let set = |cpus: Option<&str>, mems: Option<&str>| Cpuset {
            cpus: cpus.map(str::to_owned),
            mems: mems.map(str::to_owned),
        };
        assert_eq!(cpuset_of(&[cpu("2-3", "0"), cpu("0,3", "0")]), set(Some("0,2-3"), Some("0")));
        assert_eq!(cpuset_of(&[cpu("2-3", ""), cpu("0,3", "0")]), set(Some("0,2-3"), None));
        assert_eq!(cpuset_of(&[cpu("2", ""), Cpu::default()]), set(None, None));
        assert_eq!(cpuset_of(&[]), set(None, None));
    }
}
