//! The limits of the pod's cgroup on the host while its only container runs.

use super::{MemoryLimits, PodVm};
use crate::{
    host::cgroup_limits::{self, limit_cpu},
    process::error::TaskError,
    types::{error::chain, spec::Cpu},
    vm::memory::Needs,
};

impl PodVm {
    /// Limits the processor time of the pod's cgroup, as its only container asks. Returns the limits that it had. None:
    /// the pod has no cgroup. After an error it has the limits that it had.
    pub(crate) async fn limit_cpu(&self, cpu: &Cpu) -> Result<Option<Cpu>, TaskError> {
        let mut host = self.host.lock().await;
        let Some(host) = host.as_mut() else { return Ok(None) };
        let Some(cgroup) = &host.cgroup else { return Ok(None) };
        let before = host.cpu.clone();
        let limits = before.updated(cpu);
        let (make, back) = (limits.clone(), before.instead_of(&limits));
        let put_back = move |cgroup: &_| {
            if let Err(error) = limit_cpu(cgroup, &back) {
                tracing::warn!(
                    error = chain(&error),
                    "a part of the new CPU limits of the pod's cgroup stays"
                );
            }
        };
        cgroup.change(move |cgroup| limit_cpu(cgroup, &make), put_back).await?;
        host.cpu = limits;
        Ok(Some(before))
    }

    /// Gives the pod's cgroup the limits of processor time that it had before an update.
    pub(crate) async fn put_back_cpu(&self, before: Cpu) {
        let mut host = self.host.lock().await;
        let Some(host) = host.as_mut() else { return };
        let Some(cgroup) = &host.cgroup else { return };
        let limits = before.instead_of(&host.cpu);
        match cgroup.change(move |cgroup| limit_cpu(cgroup, &limits), |_| ()).await {
            Ok(()) => host.cpu = before,
            Err(error) => tracing::warn!(error = chain(&error), "the pod's cgroup keeps the new CPU limits"),
        }
    }

    /// Raises the memory limit of the pod's cgroup for new limits of its only container. It is never lowered: a VM
    /// keeps its size, and the kernel would kill the VMM.
    pub(crate) async fn raise_memory_limit(&self, limits: MemoryLimits) -> Result<(), TaskError> {
        let mut host = self.host.lock().await;
        let Some(host) = host.as_mut() else { return Ok(()) };
        let huge_pages = limits.huge_pages.max(host.most_huge_pages);
        host.most_huge_pages = huge_pages;
        let (Some(cgroup), Some(current)) = (&host.cgroup, host.limit_mib) else { return Ok(()) };
        let wanted = limits.memory.map(|limits| host.vm_mib(Needs { limits, huge_pages }));
        if wanted.is_some_and(|wanted| wanted <= current) {
            return Ok(());
        }
        let files = host.root_bytes_in_memory;
        let raise = move |cgroup: &_| match wanted {
            None => cgroup_limits::unlimit_memory(cgroup),
            Some(mib) => cgroup_limits::limit_memory(cgroup, mib, files),
        };
        // A limit that is raised later than expected does no harm.
        cgroup.change(raise, |_| ()).await?;
        host.limit_mib = wanted;
        Ok(())
    }
}
