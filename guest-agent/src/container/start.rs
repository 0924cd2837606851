//! Starts a created container.

use std::sync::Arc;

use super::{error::ContainerError, instance::Container};
use crate::stage::launcher::ProcessError;

impl Container {
    /// Lets the container's program be executed; returns when it was.
    pub async fn start(self: Arc<Self>) -> Result<(), ContainerError> {
        let Some(control) = self.control.lock().await.take() else {
            return Err(ContainerError::AlreadyStarted(self.id.clone()));
        };
        Arc::clone(&self).set_interface_sysctls().await?;
        let started = control.start().await;
        if matches!(started, Err(ProcessError::Deadline { .. })) {
            // Or it would execute the program later, when nobody counts on it.
            self.cgroup.kill()?;
        }
        Ok(started?)
    }
}
