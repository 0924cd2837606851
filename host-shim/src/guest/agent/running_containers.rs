//! The agent's calls while containers exist: pause and resume, limits, processors, statistics, and out-of-memory kills.

use std::time::Duration;

use bulkhead_agent_api::{agent, agent_ttrpc::AgentClient};
use ttrpc::context::Context;

use super::{Agent, AgentError, QUICK, SETUP, STATS};
use crate::host::rootfs::DiskRoot;

/// How long a guest may take to write back what it has changed on a disk.
const UNMOUNT: Duration = Duration::from_secs(60);

impl Agent {
    /// Stops every process of the container; returns when they have stopped.
    pub(crate) async fn pause(&self, id: &str) -> Result<(), AgentError> {
        let mut request = agent::PauseContainerRequest::new();
        request.container_id = id.into();
        self.call("PauseContainer", QUICK, |context| self.client.pause_container(context, &request))
            .await
            .map(drop)
    }

    /// Resumes the container's processes.
    pub(crate) async fn resume(&self, id: &str) -> Result<(), AgentError> {
        let request = resume_request(id);
        self.call("ResumeContainer", QUICK, |context| self.client.resume_container(context, &request))
            .await
            .map(drop)
    }

    /// Resumes them when the agent answers again, without a deadline.
    pub(crate) async fn resume_at_last(&self, id: &str) -> Result<(), AgentError> {
        let answer = self.client.resume_container(Context::default(), &resume_request(id)).await;
        self.heard("ResumeContainer", answer).map(drop)
    }

    /// Changes limits of the container: `linux.resources` of the OCI runtime-spec. The number is that of the update
    /// (agent.proto, UpdateContainerRequest).
    pub(crate) async fn update(
        &self,
        id: &str,
        number: u64,
        resources_json: Vec<u8>,
    ) -> Result<(), AgentError> {
        let mut request = agent::UpdateContainerRequest::new();
        request.container_id = id.into();
        request.resources_json = resources_json;
        request.number = number;
        self.call("UpdateContainer", QUICK, |context| self.client.update_container(context, &request))
            .await
            .map(drop)
    }

    /// Undoes an update that was not answered in time, when the agent answers again: without a deadline.
    pub(crate) async fn undo_update_without_deadline(&self, id: &str, number: u64) -> Result<(), AgentError> {
        let mut request = agent::UndoUpdateRequest::new();
        request.container_id = id.into();
        request.number = number;
        let answer = self.client.undo_update(Context::default(), &request).await;
        self.heard("UndoUpdate", answer).map(drop)
    }

    /// Waits until the guest's kernel has the memory online that was added to what it began with, and the limits of its
    /// containers follow.
    pub(crate) async fn follow_memory(&self, added_mib: u32) -> Result<(), AgentError> {
        let mut request = agent::FollowMemoryRequest::new();
        request.added_mib = added_mib;
        self.call("FollowMemory", SETUP, |context| self.client.follow_memory(context, &request))
            .await
            .map(drop)
    }

    /// Waits, without a deadline, until the containers need more memory than the guest has. `can_grow`: it gets more
    /// then. Otherwise this waits until another call is made.
    pub(crate) async fn wait_memory_demand(&self, can_grow: bool) -> Result<(), AgentError> {
        let mut request = agent::WaitMemoryDemandRequest::new();
        request.can_grow = can_grow;
        let answer = self.client.wait_memory_demand(Context::default(), &request).await;
        self.heard("WaitMemoryDemand", answer).map(drop)
    }

    /// Brings the first `count` processors of the guest online, and the others offline. Returns how many are online.
    pub(crate) async fn set_processors(&self, count: u8) -> Result<u32, AgentError> {
        let mut request = agent::SetProcessorsRequest::new();
        request.online = count.into();
        let answer = self
            .call("SetProcessors", SETUP, |context| self.client.set_processors(context, &request))
            .await?;
        Ok(answer.online)
    }

    /// The numbers, major and minor, of the block device with this serial number that the VMM has attached.
    pub(crate) async fn find_disk(&self, serial: &str) -> Result<(u32, u32), AgentError> {
        let mut request = agent::FindDiskRequest::new();
        request.serial = serial.into();
        let answer = self.call("FindDisk", SETUP, |context| self.client.find_disk(context, &request)).await?;
        Ok((answer.major, answer.minor))
    }

    /// Mounts the file system of such a device at its place in the guest.
    pub(crate) async fn mount_disk(&self, serial: &str, root: &DiskRoot) -> Result<(), AgentError> {
        let mut request = agent::MountDiskRequest::new();
        request.serial = serial.into();
        request.fs_type.clone_from(&root.fs_type);
        request.flags = root.flags.bits();
        request.options.clone_from(&root.options);
        self.call("MountDisk", SETUP, |context| self.client.mount_disk(context, &request)).await.map(drop)
    }

    /// Writes back what is dirty, unmounts it, and waits until nobody uses the device.
    pub(crate) async fn unmount_disk(&self, serial: &str) -> Result<(), AgentError> {
        let request = disk_request(serial);
        self.call("UnmountDisk", UNMOUNT, |context| self.client.unmount_disk(context, &request))
            .await
            .map(drop)
    }

    /// Forgets the device, which the VMM has taken away.
    pub(crate) async fn remove_disk(&self, serial: &str) -> Result<(), AgentError> {
        let request = disk_request(serial);
        self.call("RemoveDisk", SETUP, |context| self.client.remove_disk(context, &request)).await.map(drop)
    }

    /// What the container uses.
    pub(crate) async fn stats(&self, id: &str) -> Result<agent::StatsResponse, AgentError> {
        let mut request = agent::StatsRequest::new();
        request.container_id = id.into();
        let ask = |client: AgentClient, context| async move { client.stats(context, &request).await };
        self.query("Stats", STATS, ask).await
    }

    /// Waits, without a deadline, until more than `seen` processes were killed by the out-of-memory killer, or the
    /// container's init has ended.
    pub(crate) async fn wait_oom(&self, id: &str, seen: u64) -> Result<agent::OomCounts, AgentError> {
        let mut request = agent::WaitOomRequest::new();
        request.container_id = id.into();
        request.kills_seen = seen;
        let answer = self.client.wait_oom(Context::default(), &request).await;
        self.heard("WaitOom", answer)
    }
}

fn disk_request(serial: &str) -> agent::DiskRequest {
    let mut request = agent::DiskRequest::new();
    request.serial = serial.into();
    request
}

fn resume_request(id: &str) -> agent::ResumeContainerRequest {
    let mut request = agent::ResumeContainerRequest::new();
    request.container_id = id.into();
    request
}
