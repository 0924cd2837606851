//! Deletes a container that has ended, or that was never started.

use std::sync::Arc;

use super::{error::ContainerError, instance::Container, update::release};

impl Container {
    /// Kills what is left of a container that has ended, and drops what the kernel has cached for it: pages, names and
    /// inodes of files, which keep memory of the guest, and descriptors of the VMM. What is charged to other containers
    /// stays.
    pub async fn kill_and_reclaim(&self) -> Result<(), ContainerError> {
        if self.init.has_ended() {
            self.cgroup.kill_and_reclaim().await?;
        }
        Ok(())
    }

    /// Frees what the container holds. Its own mounts went with its mount namespace.
    pub async fn delete(&self) -> Result<(), ContainerError> {
        let is_started = self.control.lock().await.is_none();
        if is_started && !self.init.has_ended() {
            return Err(ContainerError::Running(self.id.clone()));
        }
        // If the container was never started, this also kills its init.
        self.cgroup.remove().await?;
        release(Arc::clone(&self.huge_pages)).await;
        self.deletion.send_replace(true);
        self.host_sockets.remove_names();
        self.execs.clear();
        let failed =
            |source| ContainerError::Io { action: "removing the proc file system of the container", source };
        self.proc.remove().map_err(failed)
    }
}
