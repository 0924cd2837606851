//! The size of the VM's memory: it follows from the containers' limits, and grows on demand of those without a limit.

use tokio::sync::MutexGuard;

use super::{Vm, VmError};
use crate::{
    types::error::chain,
    vm::{
        control_socket::ResizeError,
        memory::{Needs, Present},
    },
};

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

/// The memory that the guest was requested to have last, and what it had then as far as is known. It may get what was
/// requested after the shim has given up waiting.
#[derive(Debug, Clone, Copy)]
pub(super) struct Requested {
    pub(super) mib: u32,
    pub(super) reached_mib: u32,
    /// The part that was added for huge pages. It stays, for a container that is made anew.
    pub(super) huge_pages_mib: u32,
}

impl Requested {
    fn present(self) -> Present {
        Present { mib: self.mib, huge_pages_mib: self.huge_pages_mib }
    }
}

impl Vm {
    /// Changes the size of the guest's memory, if needed, for what containers may use together, in a cgroup of the host
    /// that allows `allowed` bytes. Returns what the guest has beyond the memory that it began with, MiB, if that has
    /// changed; 0 even if the guest keeps more than it should, and may still give it back.
    pub(crate) async fn fit_memory(
        &self,
        needs: Needs,
        allowed: Option<u64>,
    ) -> Result<Option<u32>, VmError> {
        let Needs { limits, huge_pages } = needs;
        if !self.memory.holds_huge_pages(needs) {
            return Err(VmError::HugePages { wanted_mib: huge_pages >> 20, most_mib: self.memory.most });
        }
        if let Some(allowed) = allowed
            && let usable = self.charged.usable(allowed)
            && usable < limits.saturating_add(huge_pages)
        {
            tracing::warn!(
                allowed_mib = allowed >> 20,
                limits_mib = limits >> 20,
                huge_pages_mib = huge_pages >> 20,
                usable_mib = usable >> 20,
                "the pod's cgroup allows less than its containers' limits, their huge pages and the VM take, so \
                 containers are killed below their limits; give the RuntimeClass an overhead"
            );
        }
        let mut requested = self.requested.lock().await;
        let before = *requested;
        let pages_mib = needs.huge_pages_mib();
        let huge_pages_mib = pages_mib.max(before.huge_pages_mib);
        let wanted_mib = self.memory.fit(before.present(), limits, huge_pages_mib, allowed, self.charged);
        // What the VM was requested to have for another reason may be more, and may come later or never.
        let needed_mib = self.memory.fit(Present::default(), limits, pages_mib, allowed, self.charged);
        let needed_mib = needed_mib.min(wanted_mib);
        if wanted_mib == before.mib && (needed_mib..=wanted_mib).contains(&before.reached_mib) {
            requested.huge_pages_mib = huge_pages_mib;
            return Ok(None);
        }
        let wanted = Present { mib: wanted_mib, huge_pages_mib };
        match self.resize(requested, wanted, needed_mib).await {
            Ok(()) => {
                tracing::debug!(before_mib = before.mib, wanted_mib, "the guest's memory has another size")
            }
            Err(source) if source.reached_mib().unwrap_or(before.reached_mib) < needed_mib => {
                return Err(VmError::Grow { wanted_mib: needed_mib, source });
            }
            Err(error) => {
                tracing::warn!(
                    wanted_mib,
                    error = chain(&error),
                    "the guest keeps more memory than the pod's cgroup allows, so the host may kill the VM"
                );
                // Nothing is to be waited for.
                return Ok(Some(0));
            }
        }
        Ok(Some(self.added_mib().await))
    }

    /// What the guest has beyond the memory that it began with, MiB.
    async fn added_mib(&self) -> u32 {
        self.added_by(self.requested.lock().await.reached_mib)
    }

    /// What a guest with this much memory has beyond what it began with, MiB.
    pub(crate) fn added_by(&self, mib: u32) -> u32 {
        mib.saturating_sub(self.memory.least)
    }

    /// The size to which the VM grows on demand, MiB. None: there is no room.
    pub(crate) async fn size_on_demand(&self, room: Room) -> Option<u32> {
        if !self.grows_on_demand {
            return None;
        }
        let present_mib = self.requested.lock().await.mib;
        let size = self.memory.on_demand(present_mib, room.available, room.allowed, self.charged);
        (size > present_mib).then_some(size)
    }

    /// Grows on demand of containers without a limit.
    pub(crate) async fn grow_on_demand(&self, wanted_mib: u32) -> Result<(), VmError> {
        let requested = self.requested.lock().await;
        let before_mib = requested.mib;
        if wanted_mib <= before_mib {
            return Ok(());
        }
        let wanted = Present { mib: wanted_mib, huge_pages_mib: requested.huge_pages_mib };
        self.resize(requested, wanted, wanted_mib)
            .await
            .map_err(|source| VmError::GrowOnDemand { wanted_mib, source })?;
        tracing::info!(before_mib, wanted_mib, "the VM grew for containers without a memory limit");
        Ok(())
    }

    /// Requests that the guest has what is `wanted`, and waits until it has `needed_mib` or more of that. Others may
    /// request something else meanwhile.
    async fn resize(
        &self,
        mut requested: MutexGuard<'_, Requested>,
        wanted: Present,
        needed_mib: u32,
    ) -> Result<(), ResizeError> {
        let before = *requested;
        let wanted_mib = wanted.mib;
        // If this is given up, the VMM may have heard of it.
        (requested.mib, requested.huge_pages_mib) = (wanted_mib, wanted.huge_pages_mib);
        let resizing = match self.control.resize(wanted_mib).await {
            Err(error @ ResizeError::Refused(_)) => {
                *requested = before;
                return Err(error);
            }
            other => other?,
        };
        drop(requested);
        let reached = resizing.reach(needed_mib..=wanted_mib).await;
        let mut requested = self.requested.lock().await;
        let reached_mib =
            reached.as_ref().map_or_else(ResizeError::reached_mib, |reached_mib| Some(*reached_mib));
        // Otherwise somebody else has requested something else, and knows more.
        if let Some(reached_mib) = reached_mib.filter(|_| requested.mib == wanted_mib) {
            requested.reached_mib = reached_mib;
        }
        reached.map(drop)
    }
}

impl VmError {
    /// Whether a guest may still get the memory that it was given.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::GrowOnDemand { source: ResizeError::Late { .. }, .. })
    }
}

impl ResizeError {
    /// What the guest has, MiB, if the VMM has said that.
    fn reached_mib(&self) -> Option<u32> {
        match self {
            Self::Late { reached_mib } => Some(*reached_mib),
            Self::Io(_) | Self::Refused(_) | Self::Silent => None,
        }
    }
}
