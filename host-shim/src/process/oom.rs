//! Reports of the guest's out-of-memory killer. Each kill is published as an event before the exit of the process.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bulkhead_agent_api::agent::OomCounts;

use tokio::time::Instant;

use crate::{
    guest::agent::Agent,
    io::events::Publisher,
    types::{error::chain, lock::lock},
};

/// Kills in quick succession are one event. The longer they go on, the fewer events they make, and lines of the log
/// with them: a guest can count kills as it likes.
const FIRST_REST: Duration = Duration::from_millis(100);
const LONGEST_REST: Duration = Duration::from_secs(60);

/// What one container's memory has come to.
#[derive(Debug)]
pub(crate) struct OomReports {
    container_id: String,
    events: Publisher,
    reported: Mutex<Reported>,
}

#[derive(Debug, Default)]
struct Reported {
    kills: u64,
    limit_hits: u64,
}

impl OomReports {
    /// None yet; those to come are waited for until the container ends.
    pub(crate) fn watch(container_id: &str, agent: Agent, events: Publisher) -> Arc<Self> {
        let reports =
            Arc::new(Self { container_id: container_id.into(), events, reported: Mutex::default() });
        tokio::spawn(Arc::clone(&reports).follow(agent));
        reports
    }

    async fn follow(self: Arc<Self>, agent: Agent) {
        let mut rest = FIRST_REST;
        loop {
            let (seen, asked) = (self.kills(), Instant::now());
            match agent.wait_oom(&self.container_id, seen).await {
                // The container has ended.
                Ok(counts) if counts.kills <= seen => return,
                Ok(counts) => self.hear(&counts),
                Err(e) => {
                    return tracing::debug!(
                        container = self.container_id,
                        error = chain(&e),
                        "no more out-of-memory reports"
                    );
                }
            }
            tokio::time::sleep(rest).await;
            rest = next_rest(rest, asked.elapsed());
        }
    }

    /// Reports what is new.
    pub(crate) fn hear(&self, counts: &OomCounts) {
        let mut reported = lock(&self.reported);
        if counts.kills <= reported.kills {
            return;
        }
        let (id, killed) = (&self.container_id, counts.kills - reported.kills);
        if counts.limit_hits > reported.limit_hits {
            tracing::warn!(container = id, killed, "the container reached its memory limit");
        } else {
            tracing::error!(
                container = id,
                killed,
                "the VM ran out of memory, and could not grow: max_memory_mib in {}, or in the file that the options \
                 of the runtime name, a cgroup above the pod's, or the host's free memory allows no more",
                crate::types::config::CONFIG_PATH
            );
        }
        *reported = Reported { kills: counts.kills, limit_hits: counts.limit_hits };
        self.events.oom(id, killed);
    }

    fn kills(&self) -> u64 {
        lock(&self.reported).kills
    }
}

/// The rest after the next kills, given that after the last ones and how long ago it was asked for them.
fn next_rest(rest: Duration, since: Duration) -> Duration {
    if since > 2 * LONGEST_REST { FIRST_REST } else { LONGEST_REST.min(2 * rest) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::events::tests::Heard;

    #[test]
    fn a_guest_that_never_stops_is_heard_once_a_minute() {
        let mut rest = FIRST_REST;
        let heard = (0..1000).map(|_| {
            rest = next_rest(rest, rest);
            rest
        });
        assert!(heard.sum::<Duration>() > 985 * LONGEST_REST);
        assert_eq!(next_rest(LONGEST_REST, 3 * LONGEST_REST), FIRST_REST);
    }

    #[tokio::test]
    async fn kills_are_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("containerd.sock.ttrpc");
        let heard = Heard::default();
        let _server = heard.serve(&path).await;
        let events = Publisher::start(Some(path.to_str().unwrap()), "default");
        let reports =
            OomReports { container_id: "demo".into(), events: events.clone(), reported: Mutex::default() };
        for (kills, limit_hits) in [(0, 0), (1, 1), (1, 1), (3, 2), (2, 9)] {
            reports.hear(&OomCounts { kills, limit_hits, ..OomCounts::default() });
        }
        events.flush(Duration::from_secs(5)).await;
        assert_eq!(heard.topics(), ["/tasks/oom", "/tasks/oom"]);
        assert_eq!(reports.kills(), 3);
    }
}
