//! containerd's Sandbox service: a pod for which containerd makes no container of its own (`sandboxer = "shim"`).
//!
//! The pod's sandbox container is made from the CRI's description of the pod. From then on the pod is like any other.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use containerd_shim_protos::{
    sandbox_api as api,
    sandbox_async::{Sandbox as SandboxApi, create_sandbox},
    types::platform::Platform,
};
use futures::future::join_all;
use protobuf::well_known_types::any::Any;
use tokio::{sync::watch, time::timeout};
use ttrpc::r#async::{Service, TtrpcContext};

use crate::{
    guest::agent::SIGKILL,
    pod::{container::Container, create_request::CreateRequest, pod::Pod},
    process::{
        error::TaskError,
        process::detached,
        state::{Refusal, State},
    },
    service::{caller, rpc_status},
    types::{
        exit::{Exit, timestamp},
        traceparent::Traceparent,
    },
};

/// States, as the CRI calls them.
const READY: &str = "SANDBOX_READY";
const NOT_READY: &str = "SANDBOX_NOTREADY";

/// How long the containers of a pod whose VM was killed may take to end.
const AFTER_KILL: Duration = Duration::from_secs(10);

/// How long a pod may take to stop if nobody says.
const STOP: Duration = Duration::from_secs(10);

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct SandboxService {
    pod: Pod,
    /// Set when the shim's work is done.
    done: watch::Sender<bool>,
}

impl SandboxService {
    /// `done` becomes true when containerd no longer needs the shim.
    pub(crate) fn new(pod: Pod, done: watch::Sender<bool>) -> Self {
        Self { pod, done }
    }

    /// The service under its name.
    pub(crate) fn services(&self) -> HashMap<String, Service> {
        create_sandbox(Arc::new(self.clone()))
    }

    /// The pod's sandbox container. No other has a sandbox id.
    fn container(&self, id: &str) -> Result<Arc<Container>, TaskError> {
        self.check_id(id)?;
        Ok(self.pod.container(id)?)
    }

    fn check_id(&self, id: &str) -> Result<(), TaskError> {
        match id == self.pod.id() {
            true => Ok(()),
            false => Err(TaskError::OtherPod { pod_id: self.pod.id().into() }),
        }
    }

    async fn create(
        &self,
        caller: Option<Traceparent>,
        request: &api::CreateSandboxRequest,
    ) -> Result<(), TaskError> {
        self.check_id(&request.sandbox_id)?;
        let refused = |error: &TaskError| self.pod.vm().count_failure(&request.sandbox_id, error);
        let creation = CreateRequest::sandbox(request).map_err(TaskError::from).inspect_err(refused)?;
        self.pod.create_for(caller, creation).await.map(drop)
    }

    /// Stops every process of the pod. The guest runs until Shutdown.
    async fn stop(&self, id: &str, within: Duration) -> Result<(), TaskError> {
        let sandbox = self.container(id)?;
        // The sandbox container ends last: it holds the namespaces of the others.
        let ended = async {
            self.pod.kill_members().await;
            join_all(self.pod.members().iter().map(|member| member.init.wait())).await;
            match sandbox.kill(SIGKILL, false).await {
                Ok(()) | Err(TaskError::Refused(Refusal::Ended)) => {}
                Err(error) => return Err(error),
            }
            sandbox.init.wait().await;
            Ok(())
        };
        match timeout(within, ended).await {
            Ok(ended) => ended,
            Err(_) => {
                tracing::error!("the VM is killed: the pod does not stop in time");
                self.pod.vm().kill().await;
                let all = self.pod.all();
                let ends = join_all(all.iter().map(|container| container.init.wait()));
                let what = "last container of the pod";
                let late = |_| TaskError::Timeout { what, seconds: AFTER_KILL.as_secs() };
                timeout(AFTER_KILL, ends).await.map(drop).map_err(late)
            }
        }
    }

    fn status(&self, id: &str) -> Result<api::SandboxStatusResponse, TaskError> {
        let container = self.container(id)?;
        let state = container.init.state();
        let mut response = api::SandboxStatusResponse::new();
        response.sandbox_id = id.into();
        response.pid = container.pid();
        response.state = if state == State::Running { READY } else { NOT_READY }.into();
        response.created_at = Some(timestamp(container.created_at)).into();
        if let Some(exit) = state.exit() {
            response.exited_at = Some(timestamp(exit.at)).into();
        }
        Ok(response)
    }

    async fn start(&self, caller: Option<Traceparent>, id: &str) -> Result<Arc<Container>, TaskError> {
        let container = self.container(id)?;
        let starting = Arc::clone(&container);
        detached(async move { starting.start_for(caller).await }).await?;
        Ok(container)
    }

    async fn wait(&self, id: &str) -> Result<Exit, TaskError> {
        self.check_id(id)?;
        self.pod.wait(id).await
    }

    async fn metrics(&self, id: &str) -> Result<Any, TaskError> {
        self.check_id(id)?;
        self.pod.stats().await
    }

    /// Whether the guest answers.
    async fn ping(&self, id: &str) -> Result<(), TaskError> {
        let container = self.container(id)?;
        Ok(container.guest.agent.ping().await?)
    }
}

#[async_trait]
impl SandboxApi for SandboxService {
    async fn create_sandbox(
        &self,
        context: &TtrpcContext,
        request: api::CreateSandboxRequest,
    ) -> ttrpc::Result<api::CreateSandboxResponse> {
        let created = self.create(caller::of(&context.metadata), &request).await;
        created.map_err(|e| rpc_status::of(&request.sandbox_id, &e))?;
        Ok(api::CreateSandboxResponse::new())
    }

    async fn start_sandbox(
        &self,
        context: &TtrpcContext,
        request: api::StartSandboxRequest,
    ) -> ttrpc::Result<api::StartSandboxResponse> {
        let id = request.sandbox_id;
        let started = self.start(caller::of(&context.metadata), &id).await;
        let container = started.map_err(|e| rpc_status::of(&id, &e))?;
        let mut response = api::StartSandboxResponse::new();
        response.pid = container.pid();
        response.created_at = Some(timestamp(container.created_at)).into();
        Ok(response)
    }

    async fn platform(
        &self,
        _: &TtrpcContext,
        _: api::PlatformRequest,
    ) -> ttrpc::Result<api::PlatformResponse> {
        let mut platform = Platform::new();
        platform.os = "linux".into();
        platform.architecture = "amd64".into();
        let mut response = api::PlatformResponse::new();
        response.platform = Some(platform).into();
        Ok(response)
    }

    async fn stop_sandbox(
        &self,
        _: &TtrpcContext,
        request: api::StopSandboxRequest,
    ) -> ttrpc::Result<api::StopSandboxResponse> {
        let within = match request.timeout_secs {
            0 => STOP,
            seconds => Duration::from_secs(seconds.into()),
        };
        let id = request.sandbox_id;
        self.stop(&id, within).await.map_err(|e| rpc_status::of(&id, &e))?;
        Ok(api::StopSandboxResponse::new())
    }

    async fn wait_sandbox(
        &self,
        _: &TtrpcContext,
        request: api::WaitSandboxRequest,
    ) -> ttrpc::Result<api::WaitSandboxResponse> {
        let id = request.sandbox_id;
        let exit = self.wait(&id).await.map_err(|e| rpc_status::of(&id, &e))?;
        let mut response = api::WaitSandboxResponse::new();
        response.exit_status = exit.status;
        response.exited_at = Some(timestamp(exit.at)).into();
        Ok(response)
    }

    async fn sandbox_status(
        &self,
        _: &TtrpcContext,
        request: api::SandboxStatusRequest,
    ) -> ttrpc::Result<api::SandboxStatusResponse> {
        let id = request.sandbox_id;
        self.status(&id).map_err(|e| rpc_status::of(&id, &e))
    }

    async fn ping_sandbox(
        &self,
        _: &TtrpcContext,
        request: api::PingRequest,
    ) -> ttrpc::Result<api::PingResponse> {
        let id = request.sandbox_id;
        self.ping(&id).await.map_err(|e| rpc_status::of(&id, &e))?;
        Ok(api::PingResponse::new())
    }

    /// Ends the shim. containerd calls this after each failure too, when there may be nothing left.
    async fn shutdown_sandbox(
        &self,
        _: &TtrpcContext,
        _: api::ShutdownSandboxRequest,
    ) -> ttrpc::Result<api::ShutdownSandboxResponse> {
        self.pod.end_shim(&self.done).await;
        Ok(api::ShutdownSandboxResponse::new())
    }

    async fn sandbox_metrics(
        &self,
        _: &TtrpcContext,
        request: api::SandboxMetricsRequest,
    ) -> ttrpc::Result<api::SandboxMetricsResponse> {
        let id = request.sandbox_id;
        let data = self.metrics(&id).await.map_err(|e| rpc_status::of(&id, &e))?;
        let mut response = api::SandboxMetricsResponse::new();
        let metric = response.metrics.mut_or_insert_default();
        metric.timestamp = Some(timestamp(SystemTime::now())).into();
        metric.id = id;
        metric.data = Some(data).into();
        Ok(response)
    }
}
