//! Whether the guest answers. All that ask it share what one of them has found, so that a guest that does not answer
//! costs whoever asks for all containers of the node one deadline, and not one for each container.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bulkhead_agent_api::agent_ttrpc::AgentClient;
use tokio::time::{Instant, timeout};
use ttrpc::context::Context;

use super::{Agent, AgentError};
use crate::types::lock::lock;

/// What is known of one guest.
#[derive(Debug, Default)]
pub(super) struct Silence(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// When a query was made that was not answered in time. None: something was answered since.
    since: Option<Instant>,
    /// When the guest answered last.
    heard: Option<Instant>,
    /// Whether a query whose deadline has passed is still open. There is one at most, whatever the guest answers
    /// meanwhile.
    is_probed: bool,
}

impl Silence {
    fn check(&self, call: &'static str) -> Result<(), AgentError> {
        match lock(&self.0).since {
            Some(since) => Err(AgentError::Silent { call, seconds: since.elapsed().as_secs() }),
            None => Ok(()),
        }
    }

    /// A query was not answered in time. Returns whether it stays open, so that its answer ends the silence.
    fn begin(&self, asked: Instant) -> bool {
        let mut state = lock(&self.0);
        if state.heard.is_some_and(|heard| heard > asked) {
            return false;
        }
        state.since.get_or_insert(asked);
        !std::mem::replace(&mut state.is_probed, true)
    }

    /// The guest has answered.
    pub(super) fn end(&self) {
        let mut state = lock(&self.0);
        (state.since, state.heard) = (None, Some(Instant::now()));
    }

    fn probe_ended(&self) {
        lock(&self.0).is_probed = false;
        self.end();
    }
}

impl Agent {
    /// Makes a call that only reads. From the time when such a call was not answered within its deadline until the
    /// guest answers any call, these calls fail at once.
    pub(super) async fn query<T, F>(
        &self,
        call: &'static str,
        within: Duration,
        ask: impl FnOnce(AgentClient, Context) -> F,
    ) -> Result<T, AgentError>
    where
        F: Future<Output = ttrpc::Result<T>> + Send + 'static,
    {
        self.silence.check(call)?;
        let asked = Instant::now();
        let mut asking = Box::pin(ask(self.client.clone(), Context::default()));
        match timeout(within, &mut asking).await {
            Ok(answer) => self.heard(call, answer),
            Err(_) => {
                if self.silence.begin(asked) {
                    // Its answer may come late. A guest that only answers other queries is not asked this one all the
                    // time.
                    let silence = Arc::clone(&self.silence);
                    tokio::spawn(async move {
                        // Whatever it is. It is an error at the latest when the VM ends.
                        drop(asking.await);
                        silence.probe_ended();
                    });
                }
                Err(AgentError::Timeout { call })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_has_answered_another_query_meanwhile_is_not_silent() {
        let silence = Silence::default();
        let asked = Instant::now();
        std::thread::sleep(Duration::from_millis(1));
        silence.end();
        assert!(!silence.begin(asked));
        silence.check("Stats").unwrap();
        assert!(silence.begin(Instant::now()));
        silence.check("Stats").unwrap_err();
        // There is one open query at most.
        assert!(!silence.begin(Instant::now()));
        silence.probe_ended();
        silence.check("Stats").unwrap();
    }
}
