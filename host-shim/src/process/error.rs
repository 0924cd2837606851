//! Why a request to a task failed.

use std::{io, path::PathBuf};

use crate::{
    guest::agent::AgentError,
    host::{
        block_device::BlockDeviceError, blocking::BlockingError, cgroup::CgroupError, hooks::HookError,
        journal::UndoError, kubelet_volumes::VolumeError, network::NetworkError, processors::ProcessorError,
        rootfs::RootfsError, state_dir::StateDirError,
    },
    io::streams::StdioError,
    process::state::Refusal,
    types::{config::ConfigError, request_error::RequestError, terminal::TerminalError},
    vm::{control_socket::AttachError, vmm::VmError},
};

/// Why a container does not get a block device of the host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiskError {
    #[error(transparent)]
    Host(#[from] BlockDeviceError),
    #[error(transparent)]
    Vmm(#[from] AttachError),
    #[error(transparent)]
    Guest(#[from] AgentError),
    #[error(
        "another container of the pod has the block device {major}:{minor} without permission to write: create the \
         container that writes to it first"
    )]
    ReadOnlyBefore { major: u32, minor: u32 },
    #[error(
        "another container of the pod has waited for the block device {major}:{minor} for {seconds} s, and waits still"
    )]
    Waits { major: u32, minor: u32, seconds: u64 },
}

/// Why a request to a task failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TaskError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Processor(#[from] ProcessorError),
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error(transparent)]
    Stdio(#[from] StdioError),
    #[error(transparent)]
    Hook(#[from] HookError),
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    #[error("{field}")]
    Disk { field: String, source: DiskError },
    #[error("cannot remove everything of the container from the host; delete it again")]
    Undo(#[from] UndoError),
    #[error("cannot encode the metrics")]
    Metrics(#[from] protobuf::Error),
    #[error("{what} is not implemented")]
    Unimplemented { what: &'static str },
    #[error("exec {exec_id} does not exist")]
    NoExec { exec_id: String },
    #[error("exec {exec_id} already exists")]
    ExecExists { exec_id: String },
    #[error("exec {exec_id}")]
    Exec { exec_id: String, source: Refusal },
    /// As runc's shim words it, of any process.
    #[error("cannot resize a stopped container")]
    ResizeStopped,
    #[error("this shim serves pod {pod_id}, to which the container does not belong")]
    OtherPod { pod_id: String },
    #[error("container {pod_id} is not a pod sandbox, so no other container can be added to it")]
    NoPod { pod_id: String },
    #[error("pod {pod_id} does not run")]
    PodNotRunning { pod_id: String },
    #[error("the {what} did not end within {seconds} s")]
    Timeout { what: &'static str, seconds: u64 },
    #[error(transparent)]
    Blocking(#[from] BlockingError),
    #[error(
        "an operation on the host for an earlier container of this id has not ended; its storage or network hangs"
    )]
    Unfinished,
    #[error("cannot start the container's placeholder process")]
    PlaceholderProcess(#[source] io::Error),
    #[error("mounts: cannot copy the volume {path} into the guest")]
    Volume { path: PathBuf, source: VolumeError },
    #[error("cannot record that the VM grows")]
    Promise(#[source] io::Error),
    #[error("the request was given up, because the container is being deleted or the shim is shutting down")]
    Cancelled,
    #[error("the shim is broken: {0}")]
    Internal(String),
}
