//! Changes the limits of a container.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{error::ContainerError, instance::Container, update_record::Made};
use crate::{
    cgroup::{Cgroup, CgroupError},
    guest_reserve::{Reserve, huge_pages::HugePages},
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

/// Before the container's own limits change: by the old ceiling the kernel would kill what the new limits allow.
/// [`set_member_ceiling`] sets the new one.
fn lift_member_ceiling(
    cgroup: &Cgroup,
    may_have_neighbours: bool,
    reserve: &Reserve,
) -> Result<(), ContainerError> {
    match reserve.of_member() {
        Some(_) if may_have_neighbours => Ok(cgroup.lift_memory()?),
        _ => Ok(()),
    }
}

impl Container {
    /// Changes all limits that a `linux.resources` object gives, or none. If that takes too long, it may be done later,
    /// unless [`Container::undo_update`] is called.
    pub async fn update(
        &self,
        reserve: &Arc<Reserve>,
        number: u64,
        resources_json: &[u8],
    ) -> Result<(), ContainerError> {
        let (reserve, json, may_have_neighbours) =
            (Arc::clone(reserve), resources_json.to_owned(), self.may_have_neighbours);
        let (updates, huge_pages) = (Arc::clone(&self.updates), Arc::clone(&self.huge_pages));
        let update = move |cgroup: &Cgroup| {
            let mut updates = lock(&updates);
            updates.begin(number)?;
            let update = spec::resolve_update(&json, &present(cgroup)?)?;
            let mut huge_pages = lock(&huge_pages);
            let before = huge_pages.count();
            let wanted = update.huge_pages.unwrap_or(before);
            // The pages come before the limit, and go after it.
            huge_pages.set(wanted.max(before))?;
            let updated = scale_to_memory(&reserve)
                .and_then(|()| lift_member_ceiling(cgroup, may_have_neighbours, &reserve))
                .and_then(|()| Ok(cgroup.update(&update.settings, update.device_program.as_deref())?));
            let held = set_member_ceiling(cgroup, may_have_neighbours, &reserve);
            give_up(&mut huge_pages, if updated.is_ok() { wanted } else { before });
            updates.last = Some((number, Made { limits: updated?, huge_pages: before }));
            held
        };
        self.cgroup.change(update).await
    }

    /// Undoes the update of this number, if it was made, and there was no later one. Otherwise it is not made any more.
    /// Waits for its end, however long that takes.
    pub async fn undo_update(&self, reserve: &Arc<Reserve>, number: u64) -> Result<(), ContainerError> {
        let (reserve, may_have_neighbours) = (Arc::clone(reserve), self.may_have_neighbours);
        let (updates, huge_pages) = (Arc::clone(&self.updates), Arc::clone(&self.huge_pages));
        let undo = move |cgroup: &Cgroup| {
            let Some(made) = lock(&updates).undo(number) else { return Ok(()) };
            let mut huge_pages = lock(&huge_pages);
            let there = huge_pages.count();
            huge_pages.set(made.huge_pages.max(there))?;
            let put_back = lift_member_ceiling(cgroup, may_have_neighbours, &reserve)
                .and_then(|()| Ok(cgroup.put_back(made.limits)?));
            let held = set_member_ceiling(cgroup, may_have_neighbours, &reserve);
            give_up(&mut huge_pages, made.huge_pages);
            put_back?;
            held
        };
        self.cgroup.change_without_deadline(undo).await
    }
}

/// Gives up huge pages after an update, whether it was made or not. Pages that cannot be given up are no reason to
/// fail.
fn give_up(huge_pages: &mut HugePages, left: u64) {
    if let Err(error) = huge_pages.set(left) {
        eprintln!("bulkhead-agent: giving up huge pages after an update: {error}");
    }
}

/// Gives up the huge pages of a container that is no more.
pub(super) async fn release(huge_pages: Arc<Mutex<HugePages>>) {
    let given_up = tokio::task::spawn_blocking(move || lock(&huge_pages).set(0)).await;
    if let Ok(Err(error)) = given_up {
        eprintln!("bulkhead-agent: giving up huge pages: {error}");
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
