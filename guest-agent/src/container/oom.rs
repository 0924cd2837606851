//! Counts the container's processes that the kernel's out-of-memory killer has killed.

use super::{error::ContainerError, instance::Container};
use crate::cgroup::{CgroupError, files::Numbers};

/// What happened for lack of memory since the container was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OomCounts {
    /// Processes killed, whether for the container's limit or for the guest's memory.
    pub kills: u64,
    /// How often the container reached its limit and could not reclaim memory (`oom` of memory.events).
    pub limit_hits: u64,
}

const FILE: &str = "memory.events";

impl OomCounts {
    fn of(events: &Numbers) -> Self {
        let count = |key| events.get(key).copied().unwrap_or(0);
        Self { kills: count("oom_kill"), limit_hits: count("oom") }
    }
}

impl Container {
    /// The current counts.
    pub fn oom(&self) -> Result<OomCounts, CgroupError> {
        Ok(OomCounts::of(&self.cgroup.numbers(FILE)?))
    }

    /// Waits until there are more kills than `seen`, or until the container's init has ended.
    pub async fn wait_oom(&self, seen: u64) -> Result<OomCounts, ContainerError> {
        let more = self.cgroup.watch(FILE, |events| {
            let counts = OomCounts::of(events);
            (counts.kills > seen).then_some(counts)
        });
        tokio::select! {
            biased;
            counts = more => Ok(counts?),
            ended = self.init.wait() => {
                ended?;
                Ok(self.oom()?)
            }
        }
    }
}
