//! Memory for containers without a memory limit: the VM grows when they need more. On runc they would have the host's.
//!
//! The agent says that memory is needed, and nothing else. How much the VM gets, and how often, is decided here. A
//! guest that always needs more reaches the end of what a pod may have, like a container on runc that takes all that it
//! can.

use std::{
    io,
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tracing::Instrument;

use super::{PodVm, host_resources::HostResources};
use crate::{
    guest::agent::AgentError,
    host::{blocking, memory, memory_promises},
    process::{error::TaskError, running_guest::Guest},
    types::{
        error::chain,
        log_limit::{LogLimit, Logged},
    },
    vm::vmm::{Room, VmError},
};

/// How often the host's memory and its cgroups are looked at, which decide whether the VM can grow. After there was no
/// room, it does not grow for this long.
const LOOK: Duration = Duration::from_secs(10);
/// The pause after an answer, and the longest one after several errors. After the VM could not grow, it does not grow
/// for this long.
const REST: Duration = Duration::from_millis(10);
const LONGEST_REST: Duration = Duration::from_secs(60);
/// How long the other pods wait for this one at most when it has its turn to grow.
const IN_TURN: Duration = Duration::from_millis(500);
/// The pause until the next try to have a turn.
const BUSY: Duration = Duration::from_millis(100);
/// The number of failures that are logged in a window, and its length.
const LOGGED: u32 = 3;
const LOG_AGAIN: Duration = Duration::from_secs(3600);

/// Has a VM grow.
struct Growth {
    pod: Weak<PodVm>,
    pod_id: String,
    guest: Guest,
    limits_changed: watch::Receiver<()>,
    /// The VM could not grow, and is not asked to before this moment.
    resting_until: Option<Instant>,
    failures: LogLimit,
}

/// What followed from an answer of the guest.
enum Answered {
    Grown,
    NoRoom,
    /// Other pods grow, and this one has to wait for its turn.
    Busy,
    /// The guest was told that it gets no memory.
    Unasked,
}

/// What a VM that needs more memory gets.
enum Promised {
    /// A size, MiB.
    Size(u32),
    NoRoom,
    /// See [`Answered::Busy`].
    Busy,
}

impl PodVm {
    /// Has the VM grow when containers without a limit need memory, until the result is dropped or the guest ends.
    pub(super) fn grow_on_demand(self: &Arc<Self>, guest: &Guest) -> JoinSet<()> {
        let growth = Growth {
            pod: Arc::downgrade(self),
            pod_id: self.settings.id.clone(),
            guest: guest.clone(),
            limits_changed: self.limits_changed.subscribe(),
            resting_until: None,
            failures: LogLimit::new(LOGGED, LOG_AGAIN),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(growth.run().in_current_span());
        tasks
    }

    /// What the host has for more memory.
    async fn room(&self) -> Result<Room, TaskError> {
        self.room_beside(self.host.lock().await.as_ref()).await
    }

    /// The same, for a pod with these resources of the host.
    async fn room_beside(&self, host: Option<&HostResources>) -> Result<Room, TaskError> {
        let above = match host {
            Some(host) => host.memory_above().await?,
            None => return Err(self.ended()),
        };
        let spare = memory::spare().unwrap_or_else(|error| {
            tracing::debug!(
                error = chain(&error),
                "the host's free memory is not known, so the VM does not grow"
            );
            0
        });
        let spare = above.room.map_or(spare, |room| room.min(spare));
        let used = self.guest()?.vm.process().anonymous_memory().unwrap_or(0);
        Ok(Room { allowed: above.limit, available: used.saturating_add(spare) })
    }

    /// Finds the size to which the VM can grow now, and promises it to the VM.
    async fn promise_growth(&self, guest: &Guest) -> Result<Promised, TaskError> {
        let (root, own, vmm) =
            (self.settings.state_root.clone(), self.settings.state_path(), guest.vm.process());
        let state = own.clone();
        // The guest and the VMM can keep this waiting, and the size below. All other pods wait for this one's turn, to
        // grow and to be created. So the turn comes last, and little is waited for in it.
        let host = self.host.lock().await;
        let turn = move || {
            let turn = memory_promises::turn(&root)?;
            Ok::<_, io::Error>((turn, memory_promises::to_others(&root, &own)))
        };
        let (turn, promised) = match blocking::run(turn, drop).await? {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(Promised::Busy),
            other => other.map_err(TaskError::Promise)?,
        };
        let size = async {
            let mut room = self.room_beside(host.as_ref()).await?;
            room.available = room.available.saturating_sub(promised);
            Ok::<_, TaskError>(guest.vm.size_on_demand(room).await)
        };
        let Ok(size) = timeout(IN_TURN, size).await else { return Ok(Promised::NoRoom) };
        let Some(wanted_mib) = size? else { return Ok(Promised::NoRoom) };
        let make = move || {
            let made = memory_promises::make(&state, vmm, u64::from(wanted_mib) << 20);
            drop(turn);
            made
        };
        blocking::run(make, drop).await?.map_err(TaskError::Promise)?;
        Ok(Promised::Size(wanted_mib))
    }

    fn ended(&self) -> TaskError {
        TaskError::PodNotRunning { pod_id: self.settings.id.clone() }
    }
}

impl Growth {
    async fn run(mut self) {
        let mut pause = REST;
        loop {
            pause = match self.round().await {
                Ok(Answered::Grown) => REST,
                // The guest is told at once that it gets no memory for some time. Otherwise its containers would be
                // slowed down for nothing.
                Ok(Answered::NoRoom) => self.rest(LOOK),
                // The guest still waits, and asks again.
                Ok(Answered::Busy) => BUSY,
                // An agent does not answer then.
                Ok(Answered::Unasked) => LONGEST_REST,
                // The guest has ended, or the pod.
                Err(TaskError::Agent(AgentError::Disconnected { .. }) | TaskError::PodNotRunning { .. }) => {
                    return;
                }
                Err(error) => {
                    if self.failures.count(Instant::now()) != Logged::No {
                        tracing::warn!(error = chain(&error), "the VM does not grow on demand");
                    }
                    match error {
                        TaskError::Agent(_) => LONGEST_REST.min(2 * pause),
                        _ => self.rest(LONGEST_REST),
                    }
                }
            };
            sleep(pause).await;
        }
    }

    /// The VM does not grow for some time. Returns the pause until the guest is told that.
    fn rest(&mut self, time: Duration) -> Duration {
        self.resting_until = Some(Instant::now() + time);
        REST
    }

    /// Waits until memory is needed, and has the VM grow.
    async fn round(&mut self) -> Result<Answered, TaskError> {
        if !self.wait_for_demand().await? {
            return Ok(Answered::Unasked);
        }
        // A limit may have changed since.
        let Some(pod) = self.growing_pod()? else { return Ok(Answered::NoRoom) };
        match pod.promise_growth(&self.guest).await? {
            Promised::Size(wanted_mib) => {
                let Guest { vm, agent, .. } = &self.guest;
                let grown = vm.grow_on_demand(wanted_mib).await;
                // The guest may get late what it was given, and its agent looks further. Otherwise the memory could not
                // be used.
                if grown.as_ref().err().is_none_or(VmError::is_late) {
                    agent.follow_memory(vm.added_by(wanted_mib)).await?;
                }
                grown?;
                Ok(Answered::Grown)
            }
            Promised::NoRoom => Ok(Answered::NoRoom),
            Promised::Busy => Ok(Answered::Busy),
        }
    }

    /// Waits until the guest says that it needs memory. Tells it whether it can have some, each time when that changes.
    /// Returns what it was told last.
    async fn wait_for_demand(&mut self) -> Result<bool, TaskError> {
        loop {
            let can_grow = self.can_grow().await?;
            let agent = self.guest.agent.clone();
            let mut demand = pin!(agent.wait_memory_demand(can_grow));
            loop {
                tokio::select! {
                    demanded = &mut demand => return Ok(demanded.map(|()| can_grow)?),
                    changed = self.limits_changed.changed() => {
                        if changed.is_err() {
                            return Err(self.ended());
                        }
                    }
                    () = sleep(LOOK) => {}
                }
                if self.can_grow().await? != can_grow {
                    break;
                }
            }
        }
    }

    async fn can_grow(&self) -> Result<bool, TaskError> {
        match self.growing_pod()? {
            Some(pod) => Ok(self.guest.vm.size_on_demand(pod.room().await?).await.is_some()),
            None => Ok(false),
        }
    }

    /// The pod, if its VM may grow. None: all containers have a limit, or the VM could not grow a short time ago.
    fn growing_pod(&self) -> Result<Option<Arc<PodVm>>, TaskError> {
        let pod = self.pod.upgrade().ok_or_else(|| self.ended())?;
        let is_resting = self.resting_until.is_some_and(|until| Instant::now() < until);
        Ok(Some(pod).filter(|pod| !is_resting && pod.has_unlimited()))
    }

    fn ended(&self) -> TaskError {
        TaskError::PodNotRunning { pod_id: self.pod_id.clone() }
    }
}
