//! The messages of containerd's own services (github.com/containerd/containerd/api), as far as the tests speak them.
//! What a message has beyond that is not sent, and skipped when it comes.

use std::collections::HashMap;

use prost::Message;

use crate::cri::messages::{Any, Empty, Request, requests};

requests! {
    "containerd.services.containers.v1.Containers":
    "Get": GetContainer => ContainerAnswer;
    "Create": CreateContainer => ContainerAnswer;
    "Delete": DeleteContainer => Empty;
}

requests! {
    "containerd.services.snapshots.v1.Snapshots":
    "Stat": StatSnapshot => SnapshotInfo;
    "Prepare": PrepareSnapshot => Mounts;
    "Remove": RemoveSnapshot => Empty;
}

requests! {
    "containerd.services.leases.v1.Leases":
    "List": ListLeases => Leases;
}

requests! {
    "containerd.services.tasks.v1.Tasks":
    "Create": CreateTask => CreatedTask;
    "Start": StartProcess => StartedProcess;
    "Get": GetProcess => ProcessAnswer;
    "Exec": ExecProcess => Empty;
    "Kill": KillProcess => Empty;
    "Wait": WaitProcess => Exit;
    "Delete": DeleteTask => Deleted;
    "DeleteProcess": DeleteProcess => Deleted;
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Runtime {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) options: Option<Any>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Container {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(map = "string, string", tag = "2")]
    pub(crate) labels: HashMap<String, String>,
    #[prost(string, tag = "3")]
    pub(crate) image: String,
    #[prost(message, optional, tag = "4")]
    pub(crate) runtime: Option<Runtime>,
    #[prost(message, optional, tag = "5")]
    pub(crate) spec: Option<Any>,
    #[prost(string, tag = "6")]
    pub(crate) snapshotter: String,
    #[prost(string, tag = "7")]
    pub(crate) snapshot_key: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct GetContainer {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CreateContainer {
    #[prost(message, optional, tag = "1")]
    pub(crate) container: Option<Container>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerAnswer {
    #[prost(message, optional, tag = "1")]
    pub(crate) container: Option<Container>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeleteContainer {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StatSnapshot {
    #[prost(string, tag = "1")]
    pub(crate) snapshotter: String,
    #[prost(string, tag = "2")]
    pub(crate) key: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SnapshotInfo {
    #[prost(message, optional, tag = "1")]
    pub(crate) info: Option<Snapshot>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Snapshot {
    #[prost(string, tag = "2")]
    pub(crate) parent: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PrepareSnapshot {
    #[prost(string, tag = "1")]
    pub(crate) snapshotter: String,
    #[prost(string, tag = "2")]
    pub(crate) key: String,
    #[prost(string, tag = "3")]
    pub(crate) parent: String,
    #[prost(map = "string, string", tag = "4")]
    pub(crate) labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Mounts {
    #[prost(message, repeated, tag = "1")]
    pub(crate) mounts: Vec<Mount>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Mount {
    #[prost(string, tag = "1")]
    pub(crate) kind: String,
    #[prost(string, tag = "2")]
    pub(crate) source: String,
    #[prost(string, tag = "3")]
    pub(crate) target: String,
    #[prost(string, repeated, tag = "4")]
    pub(crate) options: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RemoveSnapshot {
    #[prost(string, tag = "1")]
    pub(crate) snapshotter: String,
    #[prost(string, tag = "2")]
    pub(crate) key: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListLeases {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Leases {
    #[prost(message, repeated, tag = "1")]
    pub(crate) leases: Vec<Lease>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Lease {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CreateTask {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(message, repeated, tag = "3")]
    pub(crate) rootfs: Vec<Mount>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CreatedTask {
    #[prost(uint32, tag = "2")]
    pub(crate) pid: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StartedProcess {
    #[prost(uint32, tag = "1")]
    pub(crate) pid: u32,
}

/// Requests that say no more than which process of which task they are about. Without `exec_id`, it is the first one.
macro_rules! requests_by_process {
    ($($name:ident),*) => {
        $(#[derive(Clone, PartialEq, Message)]
        pub(crate) struct $name {
            #[prost(string, tag = "1")]
            pub(crate) container_id: String,
            #[prost(string, tag = "2")]
            pub(crate) exec_id: String,
        })*
    };
}

requests_by_process! { StartProcess, GetProcess, WaitProcess, DeleteProcess }

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ProcessAnswer {
    #[prost(message, optional, tag = "1")]
    pub(crate) process: Option<Process>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Process {
    #[prost(uint32, tag = "3")]
    pub(crate) pid: u32,
    #[prost(enumeration = "Status", tag = "4")]
    pub(crate) status: i32,
    #[prost(string, tag = "5")]
    pub(crate) stdin: String,
    #[prost(string, tag = "6")]
    pub(crate) stdout: String,
    #[prost(string, tag = "7")]
    pub(crate) stderr: String,
    #[prost(uint32, tag = "9")]
    pub(crate) exit_status: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Status {
    Unknown = 0,
    Created = 1,
    Running = 2,
    Stopped = 3,
    Paused = 4,
    Pausing = 5,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ExecProcess {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(message, optional, tag = "6")]
    pub(crate) spec: Option<Any>,
    #[prost(string, tag = "7")]
    pub(crate) exec_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct KillProcess {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(string, tag = "2")]
    pub(crate) exec_id: String,
    #[prost(uint32, tag = "3")]
    pub(crate) signal: u32,
    /// Not only this process, but all of the container.
    #[prost(bool, tag = "4")]
    pub(crate) all: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Exit {
    #[prost(uint32, tag = "1")]
    pub(crate) exit_status: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeleteTask {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Deleted {
    #[prost(uint32, tag = "3")]
    pub(crate) exit_status: u32,
}
