//! Changes the limits of a container.

use std::sync::Arc;

use super::{error::ContainerError, instance::Container};
use crate::{
    cgroup::{Cgroup, CgroupError},
    guest_reserve::Reserve,
    spec::{self, Present},
};

/// Limits what a container of a pod with a sandbox container may use of the guest. A single container has no such
/// limit. Call this again after the container's own limits have changed.
pub(super) fn set_member_ceiling(
    cgroup: &Cgroup,
    may_have_neighbours: bool,
    reserve: &Reserve,
) -> Result<(), ContainerError> {
    if let Some(ceiling) = reserve.of_member().filter(|_| may_have_neighbours) {
        cgroup.hold(ceiling)?;
    }
    reserve.set().map_err(|source| ContainerError::Io { action: "limiting all containers", source })
}

impl Container {
    /// Changes all limits that a `linux.resources` object gives, or none. If that takes too long, it may be done later.
    pub async fn update(&self, reserve: &Arc<Reserve>, resources_json: &[u8]) -> Result<(), ContainerError> {
        let (reserve, json, may_have_neighbours) =
            (Arc::clone(reserve), resources_json.to_owned(), self.may_have_neighbours);
        let update = move |cgroup: &Cgroup| {
            scale_to_memory(&reserve)?;
            let update = spec::resolve_update(&json, &present(cgroup)?)?;
            cgroup.update(&update.settings, update.device_program.as_deref())?;
            set_member_ceiling(cgroup, may_have_neighbours, &reserve)
        };
        self.cgroup.change(update).await
    }
}

/// The guest may have got memory, for a container that is to be made or may use more.
pub(super) fn scale_to_memory(reserve: &Reserve) -> Result<(), ContainerError> {
    let failed = |source| ContainerError::Io { action: "setting limits that go by the memory", source };
    reserve.scale_to_memory().map_err(failed)
}

fn present(cgroup: &Cgroup) -> Result<Present, CgroupError> {
    Ok(Present {
        cpu_max: cgroup.read("cpu.max")?.unwrap_or_default(),
        memory_max: cgroup.number("memory.max")?,
        memory_current: cgroup.number("memory.current")?,
    })
}
