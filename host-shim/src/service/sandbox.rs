//! containerd's Sandbox service: a pod for which containerd makes no container of its own (`sandboxer = "shim"`).
//!
//! The pod's pause is then made here, out of what the CRI says of the pod; from there on it is the same pod.

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
use protobuf::well_known_types::any::Any;
use tokio::sync::watch;
use ttrpc::r#async::{Service, TtrpcContext};

use crate::{
    guest::agent::SIGKILL,
    pod::{container::Container, lifecycle::Sandbox, request::Creation},
    process::{
        error::TaskError,
        state::{Action, Refusal, Status},
    },
    service::status,
    types::exit::{Exit, timestamp},
};

/// States, as the CRI calls them.
const READY: &str = "SANDBOX_READY";
const NOT_READY: &str = "SANDBOX_NOTREADY";

/// How long a pod may take to stop if nobody says.
const STOP: Duration = Duration::from_secs(10);

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct SandboxService {
    sandbox: Sandbox,
    /// Set when the shim's work is done.
    done: watch::Sender<bool>,
}

impl SandboxService {
    /// `done` becomes true when containerd says that it needs the shim no more.
    pub(crate) fn new(sandbox: Sandbox, done: watch::Sender<bool>) -> Self {
        Self { sandbox, done }
    }

    /// The service under its name.
    pub(crate) fn services(&self) -> HashMap<String, Service> {
        create_sandbox(Arc::new(self.clone()))
    }

    fn own(&self, id: &str) -> Result<(), TaskError> {
        if id != self.sandbox.id() {
            return Err(TaskError::Pod { own: self.sandbox.id().into() });
        }
        Ok(())
    }

    async fn create(&self, request: &api::CreateSandboxRequest) -> Result<(), TaskError> {
        self.own(&request.sandbox_id)?;
        self.sandbox.create(Creation::pod(request)?).await.map(drop)
    }

    /// Stops every process of the pod; the guest goes on until Shutdown.
    async fn stop(&self, id: &str, within: Duration) -> Result<(), TaskError> {
        let handle = self.sandbox.container(id)?;
        let container = match handle.phase().container_for(Action::Kill) {
            Err(Refusal::Ended) => return Ok(()),
            other => other?,
        };
        let stopped = async {
            // Its members end with it.
            container.agent.signal(id, SIGKILL, false).await?;
            handle.wait().await
        };
        match tokio::time::timeout(within, stopped).await {
            Ok(Ok(_)) => Ok(()),
            // The guest does not do what it is told.
            Ok(Err(_)) | Err(_) => {
                self.sandbox.guest()?.vm.kill().await;
                handle.wait().await.map(drop)
            }
        }
    }

    fn status(&self, id: &str) -> Result<api::SandboxStatusResponse, Refusal> {
        let phase = self.sandbox.container(id)?.phase();
        let container = phase.container_for(Action::Query)?;
        let mut response = api::SandboxStatusResponse::new();
        response.sandbox_id = id.into();
        response.pid = container.pid;
        response.state = if phase.status() == Status::Running { READY } else { NOT_READY }.into();
        response.created_at = Some(timestamp(container.created_at)).into();
        if let Some(exit) = phase.exit() {
            response.exited_at = Some(timestamp(exit.at)).into();
        }
        Ok(response)
    }

    async fn start(&self, id: &str) -> Result<Arc<Container>, TaskError> {
        self.sandbox.container(id)?.start_process().await
    }

    async fn wait(&self, id: &str) -> Result<Exit, TaskError> {
        self.sandbox.container(id)?.wait().await
    }

    async fn metrics(&self, id: &str) -> Result<Any, TaskError> {
        self.own(id)?;
        self.sandbox.stats().await
    }

    /// Whether the guest answers.
    async fn ping(&self, id: &str) -> Result<(), TaskError> {
        let container = self.sandbox.container(id)?.phase().container_for(Action::Query)?;
        container.agent.list_pids(id).await.map(drop)?;
        Ok(())
    }
}

#[async_trait]
impl SandboxApi for SandboxService {
    async fn create_sandbox(
        &self,
        _: &TtrpcContext,
        request: api::CreateSandboxRequest,
    ) -> ttrpc::Result<api::CreateSandboxResponse> {
        self.create(&request).await.map_err(|e| status::of(&request.sandbox_id, &e))?;
        Ok(api::CreateSandboxResponse::new())
    }

    async fn start_sandbox(
        &self,
        _: &TtrpcContext,
        request: api::StartSandboxRequest,
    ) -> ttrpc::Result<api::StartSandboxResponse> {
        let id = request.sandbox_id;
        let container = self.start(&id).await.map_err(|e| status::of(&id, &e))?;
        let mut response = api::StartSandboxResponse::new();
        response.pid = container.pid;
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
        self.stop(&id, within).await.map_err(|e| status::of(&id, &e))?;
        Ok(api::StopSandboxResponse::new())
    }

    async fn wait_sandbox(
        &self,
        _: &TtrpcContext,
        request: api::WaitSandboxRequest,
    ) -> ttrpc::Result<api::WaitSandboxResponse> {
        let id = request.sandbox_id;
        let exit = self.wait(&id).await.map_err(|e| status::of(&id, &e))?;
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
        self.status(&id).map_err(|e| status::of(&id, &e.into()))
    }

    async fn ping_sandbox(
        &self,
        _: &TtrpcContext,
        request: api::PingRequest,
    ) -> ttrpc::Result<api::PingResponse> {
        let id = request.sandbox_id;
        self.ping(&id).await.map_err(|e| status::of(&id, &e))?;
        Ok(api::PingResponse::new())
    }

    /// Also where there is nothing any more: containerd says so after each failure.
    async fn shutdown_sandbox(
        &self,
        _: &TtrpcContext,
        _: api::ShutdownSandboxRequest,
    ) -> ttrpc::Result<api::ShutdownSandboxResponse> {
        self.sandbox.stop().await;
        self.done.send_replace(true);
        Ok(api::ShutdownSandboxResponse::new())
    }

    async fn sandbox_metrics(
        &self,
        _: &TtrpcContext,
        request: api::SandboxMetricsRequest,
    ) -> ttrpc::Result<api::SandboxMetricsResponse> {
        let id = request.sandbox_id;
        let data = self.metrics(&id).await.map_err(|e| status::of(&id, &e))?;
        let mut response = api::SandboxMetricsResponse::new();
        let metric = response.metrics.mut_or_insert_default();
        metric.timestamp = Some(timestamp(SystemTime::now())).into();
        metric.id = id;
        metric.data = Some(data).into();
        Ok(response)
    }
}
