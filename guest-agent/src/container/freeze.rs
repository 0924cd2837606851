//! Stops a container's processes, and lets them go on.

use std::time::Duration;

use tokio::time::timeout;

use super::{error::ContainerError, instance::Container};

/// How long the processes may take to stop. One that waits for a device or a file system stops afterwards.
const PATIENCE: Duration = Duration::from_secs(5);

impl Container {
    /// Returns when all processes have stopped. If they do not in time, they go on.
    pub async fn pause(&self) -> Result<(), ContainerError> {
        let paused = timeout(PATIENCE, async {
            // Not while a process joins, which would stop half-way.
            let mut is_paused = self.is_paused.write().await;
            self.cgroup.freeze().await?;
            *is_paused = true;
            Ok(())
        });
        let result = paused.await.unwrap_or(Err(ContainerError::NotPaused(PATIENCE)));
        if result.is_err() {
            self.cgroup.thaw()?;
        }
        result
    }

    /// Lets the processes go on.
    pub async fn resume(&self) -> Result<(), ContainerError> {
        let mut is_paused = self.is_paused.write().await;
        self.cgroup.thaw()?;
        *is_paused = false;
        Ok(())
    }
}
