//! The messages of Kubernetes' Container Runtime Interface, version `runtime.v1` (k8s.io/cri-api, api.proto), as far as
//! the cases speak it. What a message has beyond that is not sent, and skipped when it comes.

mod container;
mod pod;
mod process;
mod sandbox;

pub(crate) use container::*;
pub(crate) use pod::*;
pub(crate) use process::*;
use prost::Message;
pub(crate) use sandbox::*;

/// A request of a service and what answers it.
pub(crate) trait Request: Message + 'static {
    /// Name of the service.
    const SERVICE: &'static str;
    /// Name of the RPC.
    const METHOD: &'static str;
    /// Its answer.
    type Answer: Message + Default + std::fmt::Debug + 'static;
}

/// Requests of one service.
macro_rules! requests {
    ($service:literal: $($method:literal: $request:ty => $answer:ty;)*) => {
        $(impl Request for $request {
            const SERVICE: &'static str = $service;
            const METHOD: &'static str = $method;
            type Answer = $answer;
        })*
    };
}
pub(crate) use requests;

requests! {
    "runtime.v1.RuntimeService":
    "RunPodSandbox": RunPodSandboxRequest => PodSandboxId;
    "StopPodSandbox": StopPodSandboxRequest => Empty;
    "RemovePodSandbox": RemovePodSandboxRequest => Empty;
    "PodSandboxStatus": PodSandboxStatusRequest => PodSandboxStatusResponse;
    "ListPodSandbox": ListPodSandboxRequest => ListPodSandboxResponse;
    "CreateContainer": CreateContainerRequest => ContainerId;
    "StartContainer": StartContainerRequest => Empty;
    "StopContainer": StopContainerRequest => Empty;
    "RemoveContainer": RemoveContainerRequest => Empty;
    "ContainerStatus": ContainerStatusRequest => ContainerStatusResponse;
    "ListContainers": ListContainersRequest => ListContainersResponse;
    "UpdateContainerResources": UpdateContainerResourcesRequest => Empty;
    "ReopenContainerLog": ReopenContainerLogRequest => Empty;
    "ExecSync": ExecSyncRequest => ExecSyncResponse;
    "Exec": ExecRequest => StreamingUrl;
    "Attach": AttachRequest => StreamingUrl;
    "PortForward": PortForwardRequest => StreamingUrl;
    "ContainerStats": ContainerStatsRequest => ContainerStatsResponse;
    "PodSandboxStats": PodSandboxStatsRequest => PodSandboxStatsResponse;
}

requests! {
    "containerd.services.sandbox.v1.Controller":
    "Metrics": SandboxMetricsRequest => SandboxMetricsResponse;
}

/// Requests that say no more than which pod or container they are about.
macro_rules! requests_by_id {
    ($($name:ident),* $(,)?) => {
        $(#[derive(Clone, PartialEq, Message)]
        pub(crate) struct $name {
            #[prost(string, tag = "1")]
            pub(crate) id: String,
        }

        impl From<&str> for $name {
            fn from(id: &str) -> Self {
                Self { id: id.to_owned() }
            }
        })*
    };
}

requests_by_id! {
    StopPodSandboxRequest,
    RemovePodSandboxRequest,
    PodSandboxStatusRequest,
    PodSandboxStatsRequest,
    StartContainerRequest,
    RemoveContainerRequest,
    ContainerStatusRequest,
    ContainerStatsRequest,
    ReopenContainerLogRequest,
}

/// An answer that says no more than that it was done.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Empty {}
