//! The limits of the pod's cgroup on the host while its only container runs.

use std::sync::{Arc, Mutex};

use super::{MemoryLimits, PodVm, lock};
use crate::{
    host::{
        cgroup::Cgroup,
        cgroup_io::{self, Former, IoLimit},
        cgroup_limits::{self, limit_cpu},
    },
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

    /// Limits what the pod's cgroup reads from block devices and writes to them. Returns what the limits replace. None:
    /// there are none, or the pod has no cgroup. After an error it has the limits that it had.
    pub(crate) async fn limit_io(&self, limits: &[IoLimit]) -> Result<Option<Former>, TaskError> {
        if limits.is_empty() {
            return Ok(None);
        }
        let host = self.host.lock().await;
        let Some(cgroup) = host.as_ref().and_then(|host| host.cgroup.as_ref()) else { return Ok(None) };
        let (limits, former) = (limits.to_vec(), Arc::new(Mutex::new(Former::default())));
        let (replaced, made) = (Arc::clone(&former), Arc::clone(&former));
        let set = move |cgroup: &_| cgroup_io::set(cgroup, &limits, &replaced);
        let put_back = move |cgroup: &_| {
            let replaced = lock(&made).clone();
            write_back_io(cgroup, &replaced);
        };
        cgroup.change(set, put_back).await?;
        let former = lock(&former).clone();
        Ok(Some(former))
    }

    /// Gives the pod's cgroup the limits on block devices that it had before an update.
    pub(crate) async fn put_back_io(&self, before: Former) {
        let host = self.host.lock().await;
        let Some(cgroup) = host.as_ref().and_then(|host| host.cgroup.as_ref()) else { return };
        let write_back = move |cgroup: &_| {
            write_back_io(cgroup, &before);
            Ok(())
        };
        if let Err(error) = cgroup.change(write_back, |_| ()).await {
            tracing::warn!(error = chain(&error), "the pod's cgroup keeps the new limits on block devices");
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

fn write_back_io(cgroup: &Cgroup, former: &Former) {
    if let Err(error) = cgroup_io::write_back(cgroup, former) {
        tracing::warn!(error = chain(&error), "a part of the new limits on block devices stays");
    }
}
