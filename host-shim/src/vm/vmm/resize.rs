//! The size of the VM's memory: it follows from the containers' limits, and grows on demand of those without a limit.

use super::{Vm, VmError};
use crate::types::error::chain;

/// What the host has for a VM that grows on demand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Bytes that the cgroups of the host allow the pod in all.
    pub(crate) allowed: Option<u64>,
    /// Bytes of the VM's memory for which the host has room. Those that the guest uses are among them. Those that it
    /// was given and has not touched are not: otherwise a guest could be given all of the host's memory step by step,
    /// and touch it afterwards.
    pub(crate) available: u64,
}

impl Vm {
    /// Changes the size of the guest's memory, if needed, for containers that may use `limits` bytes together, in a
    /// cgroup of the host that allows `allowed` bytes.
    pub(crate) async fn fit_memory(&self, limits: u64, allowed: Option<u64>) -> Result<(), VmError> {
        if let Some(allowed) = allowed
            && let usable = self.charged.usable(allowed)
            && usable < limits
        {
            tracing::warn!(
                allowed_mib = allowed >> 20,
                limits_mib = limits >> 20,
                usable_mib = usable >> 20,
                "the pod's cgroup allows less than its containers' limits and the VM take, so containers are killed \
                 below their limits; give the RuntimeClass an overhead"
            );
        }
        let mut memory_mib = self.memory_mib.lock().await;
        let present_mib = *memory_mib;
        let wanted_mib = self.memory.fit(present_mib, limits, allowed, self.charged);
        if wanted_mib == present_mib {
            return Ok(());
        }
        // If it fails, the guest may have a part of it, or get it later.
        let resized = self.control.resize(wanted_mib, present_mib).await;
        match resized {
            Ok(()) => *memory_mib = wanted_mib,
            Err(source) if wanted_mib > present_mib => return Err(VmError::Grow { wanted_mib, source }),
            Err(error) => tracing::warn!(
                wanted_mib,
                error = chain(&error),
                "the guest keeps more memory than the pod's cgroup allows, so the host may kill the VM"
            ),
        }
        tracing::debug!(present_mib, wanted_mib, "the guest's memory has another size");
        Ok(())
    }

    /// Whether the VM has room to grow on demand.
    pub(crate) async fn can_grow(&self, room: Room) -> bool {
        let present_mib = *self.memory_mib.lock().await;
        self.size_on_demand(present_mib, room) > present_mib
    }

    /// Grows on demand of containers without a limit. Returns whether the VM has grown.
    pub(crate) async fn grow_on_demand(&self, room: Room) -> Result<bool, VmError> {
        let mut memory_mib = self.memory_mib.lock().await;
        let present_mib = *memory_mib;
        let wanted_mib = self.size_on_demand(present_mib, room);
        if wanted_mib <= present_mib {
            return Ok(false);
        }
        let resized = self.control.resize(wanted_mib, present_mib).await;
        resized.map_err(|source| VmError::GrowOnDemand { wanted_mib, source })?;
        *memory_mib = wanted_mib;
        tracing::info!(present_mib, wanted_mib, "the VM grew for containers without a memory limit");
        Ok(true)
    }

    fn size_on_demand(&self, present_mib: u32, room: Room) -> u32 {
        if !self.grows_on_demand {
            return present_mib;
        }
        self.memory.on_demand(present_mib, room.available, room.allowed, self.charged)
    }
}
