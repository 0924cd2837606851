//! The memory of a pod's VM follows the limits of the pod's containers, and those of the cgroups of the host.
//!
//! kubelet limits the cgroup above the pod's to the sum of the containers' limits and the overhead of the RuntimeClass.
//! All memory of the guest counts there, and so does that of the VMM. If the VM were larger, the host would kill the
//! VMM, and all containers with it. So the VM gets as much as the cgroup allows. Then the guest kills a process that
//! takes too much.

use std::{sync::atomic::Ordering, time::Duration};

use tokio::time::Instant;

use super::{PodVm, Registered, host_resources::HostResources, lock};
use crate::{
    host::memory::{self, Above},
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

/// How long after an update of a container kubelet may take to update the others and to change the limit of the pod's
/// cgroup. An update may take 90 seconds.
const KUBELET: Duration = Duration::from_secs(300);

/// How often the agent is told of the VM's size for a limit if it does not answer.
const MOST_UNHEARD: u32 = 3;

/// The lowest memory limit of the cgroups above the pod's, bytes.
///
/// kubelet resizes a pod by one update for each container, and then changes the limit of the pod's cgroup by the sum.
/// The shim does not hear of that. By then the VM must be as small as the new limit, or the host would kill the VMM. So
/// the shim expects that limit from the updates on.
#[derive(Debug, Default)]
pub(super) struct LimitAbove {
    /// The limit that the VM's size was made for. None: the VM has none yet.
    followed: Option<Option<u64>>,
    /// The limit that was seen last.
    seen: Option<u64>,
    /// By how much the limit was raised before the updates that it was raised for.
    risen: u64,
    expected: Option<ExpectedChange>,
    /// How often in a row the agent has not heard of the VM's size for a limit.
    unheard: u32,
}

/// By how much a limit is about to be changed.
#[derive(Debug)]
struct ExpectedChange {
    /// The limit before.
    limit: u64,
    /// The sum of the updates, but for the rises that the limit has already. kubelet raises it before it raises those
    /// of containers, so only a fall is to come.
    bytes: i64,
    /// When the last update was made.
    since: Instant,
}

impl LimitAbove {
    /// A container's limit was changed while the limit above was `limit`. Returns whether that is to become another one
    /// now than before.
    fn expect_change(&mut self, limit: u64, before: u64, new: u64, now: Instant) -> bool {
        self.see(Some(limit));
        let expected = self.about_to_be(limit, now);
        let due = self.expected.take_if(|expected| expected.is_due(limit, now));
        let included = self.risen.min(new.saturating_sub(before));
        self.risen -= included;
        let change = new.cast_signed().saturating_sub(before.saturating_add(included).cast_signed());
        let bytes = due.map_or(0, |due| due.bytes).saturating_add(change);
        self.expected = Some(ExpectedChange { limit, bytes, since: now });
        self.about_to_be(limit, now) != expected
    }

    fn see(&mut self, limit: Option<u64>) {
        self.risen = match (self.seen, limit) {
            (Some(seen), Some(limit)) if limit == seen => self.risen,
            (Some(seen), Some(limit)) => limit.saturating_sub(seen),
            _ => 0,
        };
        self.seen = limit;
    }

    /// What `limit` is about to be.
    fn about_to_be(&self, limit: u64, now: Instant) -> u64 {
        let due = self.expected.as_ref().filter(|expected| expected.is_due(limit, now));
        limit.saturating_add_signed(due.map_or(0, |due| due.bytes.min(0)))
    }

    /// Whether the VM's size is to be made for `limit` now: it has changed, or did not as it was expected to.
    pub(super) fn needs_fit(&self, limit: Option<u64>, now: Instant) -> bool {
        let is_over = |expected: &ExpectedChange| now >= expected.since + KUBELET;
        self.followed != Some(limit) || self.expected.as_ref().is_some_and(is_over)
    }

    /// The VM's size was made for `limit`.
    pub(super) fn set_followed(&mut self, limit: Option<u64>, now: Instant) {
        self.see(limit);
        self.followed = Some(limit);
        self.unheard = 0;
        self.expected.take_if(|expected| limit.is_none_or(|limit| !expected.is_due(limit, now)));
    }

    /// The VM has the size for a limit, and the agent did not hear of it. Returns whether it is not told again.
    pub(super) fn was_not_heard(&mut self) -> bool {
        self.unheard += 1;
        self.unheard >= MOST_UNHEARD
    }
}

impl ExpectedChange {
    /// Whether the limit is still the one that is to change, and may still do.
    fn is_due(&self, limit: u64, now: Instant) -> bool {
        self.limit == limit && now < self.since + KUBELET
    }
}

impl PodVm {
    /// Gives the VM the memory for the limits of its containers, as far as the host's cgroups allow.
    pub(crate) async fn grow_memory(&self, guest: &Guest) -> Result<(), TaskError> {
        match self.fit_memory(guest).await? {
            Some(added_mib) => Ok(guest.agent.follow_memory(added_mib).await?),
            None => Ok(()),
        }
    }

    /// Follows a change of a container's memory limit in bytes, after the container has its new one. If it is lower,
    /// memory is taken from the VM.
    pub(crate) async fn follow_update(&self, guest: &Guest, before: u64, new: u64) -> Result<(), TaskError> {
        let mut is_other = false;
        if let Some(host) = self.host.lock().await.as_mut()
            && let Some(limit) = host.memory_limit_above()?
        {
            is_other = host.limit_above.expect_change(limit, before, new, Instant::now());
        }
        if is_other || new < before { self.fit_memory_to_limit(guest).await } else { Ok(()) }
    }

    /// Changes the VM's memory after the limit of the host's cgroups was lowered, or is about to be.
    pub(super) async fn fit_memory_to_limit(&self, guest: &Guest) -> Result<(), TaskError> {
        let added_mib = self.fit_memory(guest).await?;
        // Also if nothing is to change now: the guest may have given memory back after an earlier change had no more
        // waited for it.
        Ok(guest.agent.follow_memory(added_mib.unwrap_or(0)).await?)
    }

    /// Changes the VM's memory to what its containers need and the host's cgroups allow. Returns what the guest has
    /// beyond the memory that it began with, MiB, if that has changed.
    async fn fit_memory(&self, guest: &Guest) -> Result<Option<u32>, TaskError> {
        let allowed = match self.host.lock().await.as_ref() {
            // kubelet lowers it to the sum of the containers' limits at least. This limit may be another one.
            Some(host) => host.memory_above().await?.limit.map(|limit| {
                host.limit_above.about_to_be(limit, Instant::now()).max(limit.min(self.memory_limits()))
            }),
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

    /// The lowest memory limit of the cgroups above the pod's, bytes.
    pub(super) fn memory_limit_above(&self) -> Result<Option<u64>, TaskError> {
        match &self.cgroup {
            Some(cgroup) => Ok(memory::limit_above(cgroup.as_read())?),
            None => Ok(None),
        }
    }

    /// What the cgroups above the pod's allow it. The pod's own limit, if it has one, follows from the VM's size.
    pub(super) async fn memory_above(&self) -> Result<Above, TaskError> {
        match &self.cgroup {
            Some(cgroup) => Ok(cgroup.change(Above::of, |_| ()).await?),
            None => Ok(Above::default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_expected_to_fall_by_what_the_updates_of_all_containers_took() {
        let now = Instant::now();
        let mut above = LimitAbove::default();
        assert!(above.needs_fit(Some(1000), now));
        above.set_followed(Some(1000), now);
        assert!(!above.needs_fit(Some(1000), now));
        assert!(above.expect_change(1000, 300, 200, now));
        assert!(above.expect_change(1000, 400, 100, now));
        assert_eq!(above.about_to_be(1000, now), 600);
        assert!(above.expect_change(1000, 100, 150, now));
        assert_eq!(above.about_to_be(1000, now), 650);
        // kubelet has made it what was expected.
        assert_eq!(above.about_to_be(650, now), 650);
        assert!(above.needs_fit(Some(650), now));
        above.set_followed(Some(650), now);
        assert!(!above.needs_fit(Some(650), now + 2 * KUBELET));
    }

    #[test]
    fn memory_that_moves_from_one_container_to_another_stays_in_the_vm() {
        let now = Instant::now();
        for order in [[(500, 400), (100, 200)], [(100, 200), (500, 400)]] {
            let mut above = LimitAbove::default();
            above.set_followed(Some(1000), now);
            let changes = order.map(|(before, new)| above.expect_change(1000, before, new, now));
            assert_eq!(above.about_to_be(1000, now), 1000);
            // The fall that came first is taken back.
            assert_eq!(changes, [order[0].1 < order[0].0; 2]);
        }
        // The limit is raised first, and that is no reason to keep memory when it falls again.
        let mut above = LimitAbove::default();
        above.set_followed(Some(1000), now);
        above.expect_change(1384, 128, 512, now);
        above.set_followed(Some(1384), now);
        above.expect_change(1384, 512, 128, now);
        assert_eq!(above.about_to_be(1384, now), 1000);
        // One up by 300, another down by 100, after the limit was raised by 200.
        let mut above = LimitAbove::default();
        above.set_followed(Some(1000), now);
        above.expect_change(1200, 200, 100, now);
        above.expect_change(1200, 500, 800, now);
        assert_eq!(above.about_to_be(1200, now), 1200);
        above.expect_change(1200, 800, 700, now);
        assert_eq!(above.about_to_be(1200, now), 1100);
        // Down, and up again before anybody has looked.
        let mut above = LimitAbove::default();
        above.set_followed(Some(1000), now);
        assert!(above.expect_change(1000, 500, 400, now));
        assert_eq!(above.about_to_be(900, now), 900);
        assert!(above.expect_change(1000, 400, 500, now));
        assert_eq!(above.about_to_be(1000, now), 1000);
    }

    #[test]
    fn a_limit_that_nobody_lowers_is_expected_to_stay_after_five_minutes() {
        let (now, later) = (Instant::now(), Instant::now() + 2 * KUBELET);
        let mut above = LimitAbove::default();
        above.set_followed(Some(1000), now);
        assert!(above.expect_change(1000, 300, 200, now));
        assert!(!above.needs_fit(Some(1000), now) && above.needs_fit(Some(1000), later));
        assert_eq!((above.about_to_be(1000, now), above.about_to_be(1000, later)), (900, 1000));
        above.set_followed(Some(1000), later);
        assert!(!above.needs_fit(Some(1000), later));
    }
}
