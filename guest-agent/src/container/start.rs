//! Starts a created container.

use super::{Container, ContainerError};

impl Container {
    /// Lets the container's program be executed; returns when it was.
    pub async fn start(&self) -> Result<(), ContainerError> {
        let Some(control) = self.control.lock().await.take() else {
            return Err(ContainerError::AlreadyStarted(self.id.clone()));
        };
        Ok(control.start().await?)
    }
}
