//! Executed commands, attached streams and statistics.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ExecSyncRequest {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(string, repeated, tag = "2")]
    pub(crate) cmd: Vec<String>,
    /// Seconds; 0: none.
    #[prost(int64, tag = "3")]
    pub(crate) timeout: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ExecSyncResponse {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    pub(crate) exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ExecRequest {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(string, repeated, tag = "2")]
    pub(crate) cmd: Vec<String>,
    #[prost(bool, tag = "3")]
    pub(crate) tty: bool,
    #[prost(bool, tag = "4")]
    pub(crate) stdin: bool,
    #[prost(bool, tag = "5")]
    pub(crate) stdout: bool,
    #[prost(bool, tag = "6")]
    pub(crate) stderr: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AttachRequest {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(bool, tag = "2")]
    pub(crate) stdin: bool,
    #[prost(bool, tag = "3")]
    pub(crate) tty: bool,
    #[prost(bool, tag = "4")]
    pub(crate) stdout: bool,
    #[prost(bool, tag = "5")]
    pub(crate) stderr: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PortForwardRequest {
    #[prost(string, tag = "1")]
    pub(crate) pod_sandbox_id: String,
    #[prost(int32, repeated, tag = "2")]
    pub(crate) port: Vec<i32>,
}

/// The answer of Exec, Attach and PortForward.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct StreamingUrl {
    #[prost(string, tag = "1")]
    pub(crate) url: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct UInt64Value {
    #[prost(uint64, tag = "1")]
    pub(crate) value: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerStatsResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) stats: Option<ContainerStats>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerStats {
    #[prost(message, optional, tag = "2")]
    pub(crate) cpu: Option<CpuUsage>,
    #[prost(message, optional, tag = "3")]
    pub(crate) memory: Option<MemoryUsage>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CpuUsage {
    #[prost(message, optional, tag = "2")]
    pub(crate) usage_core_nano_seconds: Option<UInt64Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct MemoryUsage {
    #[prost(message, optional, tag = "2")]
    pub(crate) working_set_bytes: Option<UInt64Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PodSandboxStatsResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) stats: Option<PodSandboxStats>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PodSandboxStats {
    #[prost(message, optional, tag = "2")]
    pub(crate) linux: Option<LinuxPodSandboxStats>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxPodSandboxStats {
    #[prost(message, optional, tag = "1")]
    pub(crate) cpu: Option<CpuUsage>,
    #[prost(message, optional, tag = "2")]
    pub(crate) memory: Option<MemoryUsage>,
    #[prost(message, optional, tag = "4")]
    pub(crate) process: Option<ProcessUsage>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) containers: Vec<ContainerStats>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ProcessUsage {
    #[prost(message, optional, tag = "2")]
    pub(crate) process_count: Option<UInt64Value>,
}
