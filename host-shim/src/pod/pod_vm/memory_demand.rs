//! Memory for containers without a memory limit: the VM grows when they need more. On runc they would have the host's.
//!
//! The agent says that memory is needed, and nothing else. How much the VM gets, and how often, is decided here. A
//! guest that always needs more reaches the end of what a pod may have, like a container on runc that takes all that it
//! can.

use std::{
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep},
};
use tracing::Instrument;

use super::PodVm;
use crate::{
    guest::agent::AgentError,
    host::memory,
    process::{error::TaskError, running_guest::Guest},
    types::{
        error::chain,
        log_limit::{LogLimit, Logged},
    },
    vm::vmm::Room,
};

/// How often the host's memory and its cgroups are looked at, which decide whether the VM can grow.
const LOOK: Duration = Duration::from_secs(10);
/// The pause after the VM has grown, and the longest one after several answers that made it no larger.
const REST: Duration = Duration::from_millis(10);
const LONGEST_REST: Duration = Duration::from_secs(60);
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
        let above = match self.host.lock().await.as_ref() {
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

    fn ended(&self) -> TaskError {
        TaskError::PodNotRunning { pod_id: self.settings.id.clone() }
    }
}

impl Growth {
    async fn run(mut self) {
        let mut rest = REST;
        loop {
            rest = match self.round().await {
                Ok(true) => REST,
                Ok(false) => LONGEST_REST.min(2 * rest),
                // The guest has ended, or the pod.
                Err(TaskError::Agent(AgentError::Disconnected { .. }) | TaskError::PodNotRunning { .. }) => {
                    return;
                }
                Err(error) => {
                    if self.failures.count(Instant::now()) != Logged::No {
                        tracing::warn!(error = chain(&error), "the VM does not grow on demand");
                    }
                    match error {
                        TaskError::Agent(_) => LONGEST_REST.min(2 * rest),
                        // The guest is told at once that it gets no memory for some time. Otherwise its containers
                        // would be slowed down for nothing.
                        _ => {
                            self.resting_until = Some(Instant::now() + LONGEST_REST);
                            rest
                        }
                    }
                }
            };
            sleep(rest).await;
        }
    }

    /// Waits until memory is needed, and has the VM grow. Returns whether it has grown.
    async fn round(&mut self) -> Result<bool, TaskError> {
        self.wait_for_demand().await?;
        match self.room().await? {
            Some(room) => Ok(self.guest.vm.grow_on_demand(room).await?),
            None => Ok(false),
        }
    }

    /// Waits until the guest needs memory. Tells it whether it can have some, each time when that changes.
    async fn wait_for_demand(&mut self) -> Result<(), TaskError> {
        loop {
            let can_grow = self.can_grow().await?;
            let agent = self.guest.agent.clone();
            let mut demand = pin!(agent.wait_memory_demand(can_grow));
            loop {
                tokio::select! {
                    demanded = &mut demand => return Ok(demanded?),
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
        match self.room().await? {
            Some(room) => Ok(self.guest.vm.can_grow(room).await),
            None => Ok(false),
        }
    }

    /// What the host has for more memory. None: all containers have a limit, or the VM could not grow a short time ago.
    async fn room(&self) -> Result<Option<Room>, TaskError> {
        if self.resting_until.is_some_and(|until| Instant::now() < until) {
            return Ok(None);
        }
        let Some(pod) = self.pod.upgrade() else { return Err(self.ended()) };
        if pod.has_unlimited() { pod.room().await.map(Some) } else { Ok(None) }
    }

    fn ended(&self) -> TaskError {
        TaskError::PodNotRunning { pod_id: self.pod_id.clone() }
    }
}
