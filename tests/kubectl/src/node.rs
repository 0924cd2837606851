//! What kubelet does for a pod of one container, through containerd's CRI.

#[path = "../../e2e/src/cri/messages/mod.rs"]
#[allow(dead_code, unused_imports)]
mod messages;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use messages::*;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use crate::store::{Class, Pod};

const SOCKET: &str = "unix:///run/containerd/containerd.sock";
/// How long a call may take. The first pod may make a template.
const LIMIT: Duration = Duration::from_secs(150);
/// Between two looks at a container.
const PAUSE: Duration = Duration::from_millis(100);
const LOGS: &str = "/var/log/pods";
const CGROUPS: &str = "/sys/fs/cgroup";
const PODS: &str = "/kubepods";

/// Runs the pod, as the class says.
pub(crate) fn run(name: &str, image: &str, class_name: &str, class: &Class, command: &[&str]) -> Result<Pod> {
    let cgroup = format!("{PODS}/pod-{name}");
    make_cgroup(&cgroup)?;
    let options = NamespaceOption { pid: NamespaceMode::Container.into(), ..Default::default() };
    let overhead = LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: class.quantity("cpu", "m")? * 100,
        memory_limit_in_bytes: class.quantity("memory", "Mi")? << 20,
        ..Default::default()
    };
    let linux = LinuxPodSandboxConfig {
        cgroup_parent: cgroup.clone(),
        security_context: Some(LinuxSandboxSecurityContext {
            namespace_options: Some(options.clone()),
            ..Default::default()
        }),
        overhead: Some(overhead),
        ..Default::default()
    };
    let metadata =
        PodSandboxMetadata { name: name.into(), uid: name.into(), namespace: "default".into(), attempt: 0 };
    let sandbox_config = PodSandboxConfig {
        metadata: Some(metadata),
        hostname: name.into(),
        log_directory: format!("{LOGS}/default_{name}_{name}"),
        linux: Some(linux),
        ..Default::default()
    };
    let config = Some(sandbox_config.clone());
    let request = RunPodSandboxRequest { config, runtime_handler: class.handler.clone() };
    let sandbox = call(request)?.pod_sandbox_id;
    let security_context =
        LinuxContainerSecurityContext { namespace_options: Some(options), ..Default::default() };
    let config = ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(ImageSpec { image: image.into() }),
        // `kubectl run NAME -- WORDS` gives the image's entry point these arguments.
        args: command.iter().map(|&word| word.to_owned()).collect(),
        log_path: format!("{name}.log"),
        linux: Some(LinuxContainerConfig { resources: None, security_context: Some(security_context) }),
        ..Default::default()
    };
    let request = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(config),
        sandbox_config: Some(sandbox_config),
    };
    let container = call(request)?.container_id;
    call(StartContainerRequest::from(container.as_str()))?;
    Ok(Pod { class: class_name.into(), sandbox, container, cgroup })
}

/// Waits until the container runs.
pub(crate) fn wait(pod: &Pod, seconds: u64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(seconds);
    loop {
        let status = call(ContainerStatusRequest::from(pod.container.as_str()))?.status;
        if status.is_some_and(|status| status.state == i32::from(ContainerState::Running)) {
            return Ok(());
        }
        ensure!(Instant::now() < end, "timed out waiting for the condition");
        thread::sleep(PAUSE);
    }
}

/// Executes a command in the container.
pub(crate) fn exec(pod: &Pod, command: &[&str]) -> Result<ExecSyncResponse> {
    let cmd = command.iter().map(|&word| word.to_owned()).collect();
    call(ExecSyncRequest { container_id: pod.container.clone(), cmd, timeout: 0 })
}

/// Ends the pod and removes it. The container has `seconds` to end by itself.
pub(crate) fn remove(pod: &Pod, seconds: i64) -> Result<()> {
    call(StopContainerRequest { container_id: pod.container.clone(), timeout: seconds })?;
    call(StopPodSandboxRequest::from(pod.sandbox.as_str()))?;
    call(RemoveContainerRequest::from(pod.container.as_str()))?;
    call(RemovePodSandboxRequest::from(pod.sandbox.as_str()))?;
    // This fails if the runtime has left a process or a cgroup in it.
    let cgroup = directory(&pod.cgroup);
    fs::remove_dir(&cgroup).with_context(|| format!("cannot remove {cgroup}"))
}

fn directory(cgroup: &str) -> String {
    format!("{CGROUPS}{cgroup}")
}

/// Makes the cgroup of a pod, with each controller that the host has.
fn make_cgroup(cgroup: &str) -> Result<()> {
    let path = directory(cgroup);
    fs::create_dir_all(&path).with_context(|| format!("cannot make {path}"))?;
    let controllers = fs::read_to_string(Path::new(CGROUPS).join("cgroup.controllers"))?;
    let all: Vec<_> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
    for parent in [CGROUPS.to_owned(), directory(PODS)] {
        fs::write(Path::new(&parent).join("cgroup.subtree_control"), all.join(" "))
            .with_context(|| format!("cannot enable controllers in {parent}"))?;
    }
    Ok(())
}

/// Makes a call that must succeed.
fn call<R: Request>(request: R) -> Result<R::Answer> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let path = PathAndQuery::from_maybe_shared(format!("/{}/{}", R::SERVICE, R::METHOD))?;
    let call = async {
        let mut grpc = Grpc::new(Endpoint::from_static(SOCKET).connect().await?);
        grpc.ready().await?;
        let answer = grpc.unary(tonic::Request::new(request), path, ProstCodec::<R, R::Answer>::default());
        answer.await.map_err(|status| anyhow!("{}: {}", R::METHOD, status.message()))
    };
    let limited = async { tokio::time::timeout(LIMIT, call).await };
    let answer = runtime.block_on(limited).with_context(|| format!("{} takes too long", R::METHOD))?;
    Ok(answer?.into_inner())
}
