//! The memory of a pod's VM follows the limits of the pod's containers, and those of the cgroups of the host.
//!
//! kubelet limits the cgroup above the pod's to the sum of the containers' limits and the overhead of the RuntimeClass.
//! All memory of the guest counts there, and so does that of the VMM. If the VM were larger, the host would kill the
//! VMM, and all containers with it. So the VM gets as much as the cgroup allows. Then the guest kills a process that
//! takes too much.

use std::sync::atomic::Ordering;

use super::{PodVm, Registered, host_resources::HostResources, lock};
use crate::{
    host::memory::Above,
    process::{error::TaskError, running_guest::Guest},
    vm::memory::Needs,
};

/// What a container may use of the guest's memory, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MemoryLimits {
    /// None: no limit.
    pub(crate) memory: Option<u64>,
    /// Beside that.
    pub(crate) huge_pages: u64,
}

impl PodVm {
    /// Gives the VM the memory for the limits of its containers, as far as the host's cgroups allow.
    pub(crate) async fn grow_memory(&self, guest: &Guest) -> Result<(), TaskError> {
        match self.fit_memory(guest, 0).await? {
            Some(added_mib) => Ok(guest.agent.follow_memory(added_mib).await?),
            None => Ok(()),
        }
    }

    /// Takes memory from the VM after a limit was lowered by `fallen` bytes. kubelet lowers the limit of the pod's
    /// cgroup by as much, but later, and the shim does not hear of it.
    pub(crate) async fn shrink_memory(&self, guest: &Guest, fallen: u64) -> Result<(), TaskError> {
        // kubelet does not limit the cgroup of a pod with such a container, so it lowers nothing.
        let fallen = if self.has_unlimited() { 0 } else { fallen };
        let added_mib = self.fit_memory(guest, fallen).await?;
        // Also if nothing is to change now: the guest may have given memory back after an earlier change had no more
        // waited for it.
        Ok(guest.agent.follow_memory(added_mib.unwrap_or(0)).await?)
    }

    /// Changes the VM's memory to what its containers need and the host's cgroups allow. `fallen`: the bytes by which
    /// the limit of the pod's cgroup is about to be lowered. Returns what the guest has beyond the memory that it began
    /// with, MiB, if that has changed.
    async fn fit_memory(&self, guest: &Guest, fallen: u64) -> Result<Option<u32>, TaskError> {
        let allowed = match self.host.lock().await.as_ref() {
            Some(host) => host.memory_above().await?.limit.map(|limit| limit.saturating_sub(fallen)),
            None => return Ok(None),
        };
        Ok(guest.vm.fit_memory(self.memory_needs(), allowed).await?)
    }

    /// What a container may use of the guest's memory. None: it is deleted.
    pub(crate) fn memory_of(&self, id: &str) -> Option<MemoryLimits> {
        lock(&self.containers).get(id).map(|registered| MemoryLimits {
            memory: registered.memory_limit,
            huge_pages: registered.huge_pages,
        })
    }

    /// Replaces what a container may use of the guest's memory, unless it is deleted.
    pub(crate) fn change_memory_limits(&self, id: &str, limits: MemoryLimits) {
        if let Some(registered) = lock(&self.containers).get_mut(id) {
            (registered.memory_limit, registered.huge_pages) = (limits.memory, limits.huge_pages);
        }
        self.limits_changed.send_replace(());
    }

    /// Whether a container has no memory limit. A sandbox container uses no memory, and neither does a container that
    /// has ended. These have no limits of processor time.
    pub(super) fn has_unlimited(&self) -> bool {
        lock(&self.containers).values().any(|one| one.cpu.is_some() && one.memory_limit.is_none())
    }

    /// What the containers may use together.
    pub(crate) fn memory_needs(&self) -> Needs {
        let pages = |sum: u64, registered: &Registered| sum.saturating_add(registered.huge_pages);
        let of_containers = lock(&self.containers).values().fold(0, pages);
        Needs { limits: self.memory_limits(), huge_pages: of_containers.max(self.huge_pages()) }
    }

    /// The huge pages of a pod of Kubernetes, bytes.
    pub(crate) fn huge_pages(&self) -> u64 {
        self.huge_pages.load(Ordering::Relaxed)
    }

    /// Bytes that the containers with a limit may use together. The limit of the pod's sandbox holds for them all.
    pub(crate) fn memory_limits(&self) -> u64 {
        let containers = lock(&self.containers);
        let limit = |registered: &Registered| registered.memory_limit.unwrap_or(0);
        let (first, others): (Vec<_>, Vec<_>) = containers.iter().partition(|(id, _)| self.is_first(id));
        let sum = others.iter().fold(0u64, |sum, (_, registered)| sum.saturating_add(limit(registered)));
        first.first().map_or(0, |(_, registered)| limit(registered)).max(sum)
    }
}

impl HostResources {
    /// The memory of a VM whose containers may use this together.
    pub(super) fn vm_mib(&self, needs: Needs) -> u32 {
        self.memory.map_or(u32::MAX, |memory| memory.for_needs(needs))
    }

    /// What the cgroups above the pod's allow it. The pod's own limit, if it has one, follows from the VM's size.
    pub(super) async fn memory_above(&self) -> Result<Above, TaskError> {
        match &self.cgroup {
            Some(cgroup) => Ok(cgroup.change(Above::of, |_| ()).await?),
            None => Ok(Above::default()),
        }
    }
}
