//! Freezes and thaws the processes of a container (the API calls it pause and resume).

use std::time::Duration;

use tokio::time::timeout;

use super::{error::ContainerError, instance::Container};

/// How long the processes may take to freeze. A process that waits for a device or a file system freezes after that.
const PATIENCE: Duration = Duration::from_secs(5);

impl Container {
    /// Returns when all processes are frozen. If one is not in time, all are thawed.
    pub async fn pause(&self) -> Result<(), ContainerError> {
        let paused = timeout(PATIENCE, async {
            // Waits for a process that is joining, which would freeze half-way.
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

    /// Thaws the processes.
    pub async fn resume(&self) -> Result<(), ContainerError> {
        let mut is_paused = self.is_paused.write().await;
        self.cgroup.thaw()?;
        *is_paused = false;
        Ok(())
    }
}
