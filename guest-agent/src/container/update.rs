//! Changes the limits of a container.

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
    is_of_pod: bool,
    reserve: &Reserve,
) -> Result<(), ContainerError> {
    if let Some(ceiling) = reserve.of_member().filter(|_| is_of_pod) {
        cgroup.hold(ceiling)?;
    }
    reserve.set().map_err(|source| ContainerError::Io { action: "limiting all containers", source })
}

impl Container {
    /// Changes all limits that a `linux.resources` object gives, or none.
    pub fn update(&self, reserve: &Reserve, resources_json: &[u8]) -> Result<(), ContainerError> {
        let update = spec::resolve_update(resources_json, &self.present()?)?;
        self.cgroup.update(&update.settings, update.device_program.as_deref())?;
        set_member_ceiling(&self.cgroup, self.is_of_pod, reserve)
    }

    fn present(&self) -> Result<Present, CgroupError> {
        Ok(Present {
            cpu_max: self.cgroup.read("cpu.max")?.unwrap_or_default(),
            memory_max: self.cgroup.number("memory.max")?,
            memory_current: self.cgroup.number("memory.current")?,
        })
    }
}
