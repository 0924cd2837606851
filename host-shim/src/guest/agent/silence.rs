//! Whether the guest answers. All that ask it share what one of them has found, so that a guest that does not answer
//! costs whoever asks for all containers of the node one deadline, and not one for each container.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bulkhead_agent_api::agent_ttrpc::AgentClient;
use tokio::time::{Instant, timeout};
use ttrpc::context::{Context, with_duration};

use super::{AGENT_DEADLINE, Agent, AgentError};
use crate::types::lock::lock;

/// What is known of one guest.
#[derive(Debug, Default)]
pub(super) struct Silence(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// When a query was made that was not answered in time. None: something was answered since.
    since: Option<Instant>,
    /// Whether a question without a deadline is open. There is one at most, whatever the guest answers meanwhile.
    is_probed: bool,
}

impl Silence {
    fn check(&self, call: &'static str) -> Result<(), AgentError> {
        match lock(&self.0).since {
            Some(since) => Err(AgentError::Silent { call, seconds: since.elapsed().as_secs() }),
            None => Ok(()),
        }
    }

    /// Returns whether the caller is to ask without a deadline.
    fn begin(&self, asked: Instant) -> bool {
        let mut state = lock(&self.0);
        state.since.get_or_insert(asked);
        !std::mem::replace(&mut state.is_probed, true)
    }

    /// The guest has answered.
    pub(super) fn end(&self) {
        lock(&self.0).since = None;
    }

    fn probe_ended(&self) {
        *lock(&self.0) = State::default();
    }
}

impl Agent {
    /// Makes a call that only reads. From the time when such a call was not answered within its deadline until the
    /// guest answers any call, these calls fail at once.
    pub(super) async fn query<T, F>(
        &self,
        call: &'static str,
        within: Duration,
        ask: impl Fn(AgentClient, Context) -> F,
    ) -> Result<T, AgentError>
    where
        F: Future<Output = ttrpc::Result<T>> + Send + 'static,
    {
        self.silence.check(call)?;
        let asked = Instant::now();
        let answer = ask(self.client.clone(), with_duration(within + AGENT_DEADLINE));
        match timeout(within, answer).await {
            Ok(answer) => self.heard(call, answer),
            Err(_) => {
                if self.silence.begin(asked) {
                    // The same again: a guest that only answers other questions is not asked this one all the time.
                    let (silence, probe) =
                        (Arc::clone(&self.silence), ask(self.client.clone(), Context::default()));
                    tokio::spawn(async move {
                        // Whatever it is. It is an error at the latest when the VM ends.
                        drop(probe.await);
                        silence.probe_ended();
                    });
                }
                Err(AgentError::Timeout { call })
            }
        }
    }
}
