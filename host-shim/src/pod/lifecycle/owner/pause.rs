//! Pause and Resume: the owner's, since they change the state.

use std::sync::Arc;

use super::{Command, Handle, Owner};
use crate::{
    guest::agent::AgentError,
    pod::container::{Container, Phase},
    process::{error::TaskError, state::Action},
    types::error::chain,
};

impl Handle {
    /// Stops the container's processes.
    pub(crate) async fn pause(&self) -> Result<(), TaskError> {
        self.ask(Command::Pause).await
    }

    /// Lets them go on.
    pub(crate) async fn resume(&self) -> Result<(), TaskError> {
        self.ask(Command::Resume).await
    }
}

impl Owner {
    pub(super) async fn pause(&mut self) -> Result<(), TaskError> {
        let container = self.phase.borrow().container_for(Action::Pause)?;
        if let Err(e) = container.agent.pause(&container.id).await {
            if matches!(e, AgentError::Broken { .. }) {
                tokio::spawn(take_back(container));
            }
            return Err(e.into());
        }
        tracing::info!("container {} paused", container.id);
        self.advance(Action::Pause, Phase::Paused(Arc::clone(&container)))?;
        self.publish(&container, |events| events.paused(&container.id));
        Ok(())
    }

    pub(super) async fn resume(&mut self) -> Result<(), TaskError> {
        let container = self.phase.borrow().container_for(Action::Resume)?;
        container.agent.resume(&container.id).await?;
        tracing::info!("container {} resumed", container.id);
        self.advance(Action::Resume, Phase::Running(Arc::clone(&container)))?;
        self.publish(&container, |events| events.resumed(&container.id));
        Ok(())
    }
}

/// A guest that answers again may pause, late, what has been reported as not paused.
async fn take_back(container: Arc<Container>) {
    if let Err(e) = container.agent.resume_at_last(&container.id).await {
        tracing::debug!("container {}: {}", container.id, chain(&e));
    }
}
