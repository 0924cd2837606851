//! Changes the limits of a container.

use super::{error::ContainerError, instance::Container};
use crate::{
    cgroup::CgroupError,
    spec::{self, Present},
};

impl Container {
    /// Changes all limits that a `linux.resources` object gives, or none.
    pub fn update(&self, resources_json: &[u8]) -> Result<(), ContainerError> {
        let update = spec::resolve_update(resources_json, &self.present()?)?;
        Ok(self.cgroup.update(&update.settings, update.device_program.as_deref())?)
    }

    fn present(&self) -> Result<Present, CgroupError> {
        Ok(Present {
            cpu_max: self.cgroup.read("cpu.max")?.unwrap_or_default(),
            memory_max: self.cgroup.number("memory.max")?,
            memory_current: self.cgroup.number("memory.current")?,
        })
    }
}
