//! What others change on the host while the pod runs, and tell nobody: a processor goes offline, kubelet lowers the
//! limit of the pod's cgroup, systemd takes a controller away from it.

use std::{sync::Arc, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tracing::Instrument;

use super::{PodVm, host_resources::HostResources};
use crate::{
    host::{
        cgroup::Cgroup,
        cgroup_limits::{self, limit_cpu, limit_cpuset, limit_memory},
    },
    process::{error::TaskError, running_guest::Guest},
    types::{
        error::chain,
        log_limit::{LogLimit, Logged},
    },
};

/// How often it is looked. Until then a limit may be missing.
const LOOK: Duration = Duration::from_secs(10);
/// The number of lines that are logged in a window, and its length.
const LOGGED: u32 = 3;
const LOG_AGAIN: Duration = Duration::from_secs(3600);

impl PodVm {
    /// Lets the pod follow such changes until its guest ends or the result is dropped. What fails is tried again.
    pub(super) fn follow_host(self: &Arc<Self>, guest: &Guest) -> JoinSet<()> {
        let (pod, guest) = (Arc::downgrade(self), guest.clone());
        let follow = async move {
            let mut lines = LogLimit::new(LOGGED, LOG_AGAIN);
            loop {
                sleep(LOOK).await;
                let Some(pod) = pod.upgrade().filter(|_| !guest.vm.has_exited()) else { return };
                let renewed = pod.renew_limits().await;
                if let Ok(lost) = &renewed
                    && !lost.is_empty()
                    && lines.count(Instant::now()) != Logged::No
                {
                    tracing::warn!(
                        controllers = lost.join(" "),
                        "another program, most likely systemd, had disabled controllers of the pod's cgroup; the \
                         limits are set again"
                    );
                }
                let online = pod.follow_online(&guest).await;
                let memory = pod.follow_memory_limit(&guest).await;
                for error in [renewed.map(drop), online, memory].into_iter().filter_map(Result::err) {
                    if lines.count(Instant::now()) != Logged::No {
                        tracing::warn!(error = chain(&error), "the pod does not follow a change of its host");
                    }
                }
            }
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(follow.in_current_span());
        tasks
    }

    /// Sets the limits of the pod's cgroup again whose controllers were disabled. systemd does that when it changes a
    /// slice and no unit of its own there needs the controller. Returns these controllers.
    async fn renew_limits(&self) -> Result<Vec<&'static str>, TaskError> {
        let host = self.host.lock().await;
        let Some(host) = host.as_ref() else { return Ok(Vec::new()) };
        let Some(cgroup) = &host.cgroup else { return Ok(Vec::new()) };
        let lost = cgroup_limits::lost(cgroup.as_read(), host.limited())?;
        if lost.is_empty() {
            return Ok(lost);
        }
        let (mib, files, cpu) = (host.limit_mib, host.root_bytes_in_memory, host.cpu.clone());
        let (cpuset, again) = (host.cpuset.clone(), lost.clone());
        let set = move |cgroup: &Cgroup| {
            for controller in again {
                match (controller, mib, &cpuset) {
                    ("memory", Some(mib), _) => limit_memory(cgroup, mib, files)?,
                    ("cpu", ..) => limit_cpu(cgroup, &cpu)?,
                    ("cpuset", _, Some(cpuset)) => limit_cpuset(cgroup, &mut None, cpuset)?,
                    _ => {}
                }
            }
            Ok(())
        };
        cgroup.change(set, |_| ()).await?;
        Ok(lost)
    }

    /// Changes the VM's memory if the limit of the cgroups above has changed.
    async fn follow_memory_limit(&self, guest: &Guest) -> Result<(), TaskError> {
        let limit = {
            let host = self.host.lock().await;
            let Some(host) = host.as_ref() else { return Ok(()) };
            let limit = host.memory_limit_above()?;
            if !host.limit_above.needs_fit(limit, Instant::now()) {
                return Ok(());
            }
            limit
        };
        let fitted = self.fit_memory_to_limit(guest).await;
        if let Some(host) = self.host.lock().await.as_mut() {
            let is_done = match &fitted {
                Ok(()) => true,
                Err(TaskError::Agent(_)) => host.limit_above.was_not_heard(),
                Err(_) => false,
            };
            if is_done {
                host.limit_above.set_followed(limit, Instant::now());
            }
        }
        fitted
    }
}

impl HostResources {
    /// The controllers by which the pod's cgroup has limits. Those of block devices are left out.
    fn limited(&self) -> impl Iterator<Item = &'static str> {
        let has_cpuset = self.cpuset.as_ref().is_some_and(|cpuset| *cpuset != Default::default());
        let limited = [
            ("memory", self.limit_mib.is_some()),
            ("cpu", cgroup_limits::limits_cpu(&self.cpu)),
            ("cpuset", has_cpuset),
        ];
        limited.into_iter().filter(|(_, is_limited)| *is_limited).map(|(controller, _)| controller)
    }
}
