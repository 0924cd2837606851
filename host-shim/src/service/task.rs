//! containerd's Task service: what it asks of the tasks of this shim, which are the containers of one sandbox.

use std::collections::HashMap;

use async_trait::async_trait;
use containerd_shim_protos::{
    api,
    shim_async::{Task, create_task},
    types::task::{ProcessInfo, Status as ApiStatus},
};
use protobuf::{
    EnumOrUnknown,
    well_known_types::{any::Any, empty::Empty},
};
use tokio::sync::watch;
use ttrpc::r#async::{Service, TtrpcContext};

use crate::{
    pod::{
        container::{Container, Phase},
        lifecycle::Sandbox,
        request::Creation,
    },
    process::{
        error::TaskError,
        exec::{Exec, ExecPhase},
        state::{Action, Refusal, Status},
    },
    service::status,
    types::{exit::timestamp, request_error, terminal::WindowSize},
};

/// The name under which containerd 2 knows the service, and that of all before it: the same messages.
const SERVICES: [&str; 2] = ["containerd.task.v3.Task", "containerd.task.v2.Task"];

/// containerd's namespace of docker's containers. docker asks for pids to look them up among the host's processes
/// (`docker top`), and would show as the container's those of the host that happen to have the guest's pids.
const DOCKER: &str = "moby";

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct TaskService {
    sandbox: Sandbox,
    /// Set when the shim's work is done.
    done: watch::Sender<bool>,
}

impl TaskService {
    /// `done` becomes true when containerd says that it needs the shim no more.
    pub(crate) fn new(sandbox: Sandbox, done: watch::Sender<bool>) -> Self {
        Self { sandbox, done }
    }

    /// The service under each of its names.
    pub(crate) fn services(&self) -> HashMap<String, Service> {
        SERVICES
            .iter()
            .flat_map(|name| {
                create_task(std::sync::Arc::new(self.clone()))
                    .into_values()
                    .map(|service| ((*name).to_owned(), service))
            })
            .collect()
    }

    fn phase(&self, id: &str) -> Result<Phase, Refusal> {
        Ok(self.sandbox.container(id)?.phase())
    }

    async fn start_process(&self, request: &api::StartRequest) -> Result<api::StartResponse, TaskError> {
        let container = if request.exec_id.is_empty() {
            self.sandbox.container(&request.id)?.start_process().await?
        } else {
            let container = self.phase(&request.id)?.container_for(Action::Exec)?;
            container.execs.start(&request.exec_id, container.pid).await?;
            container
        };
        let mut response = api::StartResponse::new();
        response.pid = container.pid;
        Ok(response)
    }

    async fn delete_process(&self, request: &api::DeleteRequest) -> Result<api::DeleteResponse, TaskError> {
        let (pid, exit) = if request.exec_id.is_empty() {
            let deleted = self.sandbox.delete(&request.id).await?;
            (deleted.pid, Some(deleted.exit))
        } else {
            let container = self.phase(&request.id)?.container_for(Action::Query)?;
            (container.pid, container.execs.delete(&request.exec_id).await?)
        };
        let mut response = api::DeleteResponse::new();
        response.pid = pid;
        if let Some(exit) = exit {
            response.exit_status = exit.status;
            response.exited_at = Some(timestamp(exit.at)).into();
        }
        Ok(response)
    }

    async fn wait_process(&self, request: &api::WaitRequest) -> Result<api::WaitResponse, TaskError> {
        let exit = if request.exec_id.is_empty() {
            self.sandbox.container(&request.id)?.wait().await?
        } else {
            let container = self.phase(&request.id)?.container_for(Action::Query)?;
            container.execs.get(&request.exec_id)?.wait().await?
        };
        let mut response = api::WaitResponse::new();
        response.exit_status = exit.status;
        response.exited_at = Some(timestamp(exit.at)).into();
        Ok(response)
    }

    fn state_of(&self, request: &api::StateRequest) -> Result<api::StateResponse, TaskError> {
        let phase = self.phase(&request.id)?;
        let container = phase.container_for(Action::Query)?;
        if !request.exec_id.is_empty() {
            return Ok(state_of_exec(&phase, &container, &*container.execs.get(&request.exec_id)?));
        }
        let mut response = api::StateResponse::new();
        response.id = container.id.clone();
        response.bundle = container.request.bundle.clone();
        response.pid = container.pid;
        response.status = EnumOrUnknown::new(api_status(&phase));
        response.stdin = container.request.stdin.clone();
        response.stdout = container.request.stdout.clone();
        response.stderr = container.request.stderr.clone();
        response.terminal = container.request.terminal;
        if let Some(exit) = phase.exit() {
            response.exit_status = exit.status;
            response.exited_at = Some(timestamp(exit.at)).into();
        }
        Ok(response)
    }

    async fn kill_process(&self, request: &api::KillRequest) -> Result<(), TaskError> {
        self.sandbox.container(&request.id)?.kill(request).await
    }

    async fn list_pids(&self, id: &str) -> Result<Vec<u32>, TaskError> {
        let container = self.sandbox.container(id)?;
        if self.sandbox.events().namespace() == DOCKER {
            let hint = "; run ps in the container by docker exec";
            return Err(request_error::unimplemented("docker top of the processes of a microVM", hint).into());
        }
        container.pids().await
    }

    async fn pause_task(&self, id: &str) -> Result<(), TaskError> {
        self.sandbox.container(id)?.pause().await
    }

    async fn resume_task(&self, id: &str) -> Result<(), TaskError> {
        self.sandbox.container(id)?.resume().await
    }

    async fn update_task(&self, request: api::UpdateTaskRequest) -> Result<(), TaskError> {
        self.sandbox.container(&request.id)?.update(&self.sandbox, request).await
    }

    async fn stats_of(&self, id: &str) -> Result<Any, TaskError> {
        self.sandbox.container(id)?.stats().await
    }

    fn close_stdin(&self, request: api::CloseIORequest) -> Result<(), TaskError> {
        let container = self.phase(&request.id)?.container_for(Action::CloseIo)?;
        if !request.stdin {
            return Ok(());
        }
        if request.exec_id.is_empty() {
            container.stdin.close();
        } else {
            container.execs.get(&request.exec_id)?.close_stdin();
        }
        Ok(())
    }

    async fn resize(&self, request: &api::ResizePtyRequest) -> Result<(), TaskError> {
        let size = WindowSize::read(request)?;
        if !request.exec_id.is_empty() {
            let container = self.phase(&request.id)?.container_for(Action::Query)?;
            return container.execs.resize(&request.exec_id, size).await;
        }
        let container = match self.phase(&request.id)?.container_for(Action::Resize) {
            Err(Refusal::Precondition { status: Status::Stopped, .. }) => {
                return Err(TaskError::ResizeStopped);
            }
            other => other?,
        };
        // Nobody minds that there is nothing to resize: so does runc's shim.
        if container.request.terminal {
            container.agent.resize(&container.id, "", size).await?;
        }
        Ok(())
    }

    fn add_process(&self, request: api::ExecProcessRequest) -> Result<(), TaskError> {
        self.phase(&request.id)?.container_for(Action::Exec)?.execs.add(request)
    }
}

fn state_of_exec(task: &Phase, container: &Container, exec: &Exec) -> api::StateResponse {
    let phase = exec.phase();
    let mut response = api::StateResponse::new();
    response.id = exec.request.exec_id.clone();
    response.bundle = container.request.bundle.clone();
    response.stdin = exec.request.stdin.clone();
    response.stdout = exec.request.stdout.clone();
    response.stderr = exec.request.stderr.clone();
    response.terminal = exec.request.terminal;
    let status = match phase {
        ExecPhase::Added | ExecPhase::Starting => ApiStatus::CREATED,
        ExecPhase::Running if task.status() == Status::Paused => ApiStatus::PAUSED,
        ExecPhase::Running => ApiStatus::RUNNING,
        ExecPhase::Stopped(_) | ExecPhase::Deleted => ApiStatus::STOPPED,
    };
    response.status = EnumOrUnknown::new(status);
    if !matches!(phase, ExecPhase::Added | ExecPhase::Starting) {
        response.pid = container.pid;
    }
    if let ExecPhase::Stopped(exit) = phase {
        response.exit_status = exit.status;
        response.exited_at = Some(timestamp(exit.at)).into();
    }
    response
}

fn unimplemented<T>(id: &str, what: &'static str) -> ttrpc::Result<T> {
    Err(status::of(id, &TaskError::Unimplemented { what }))
}

fn api_status(phase: &Phase) -> ApiStatus {
    match phase.status() {
        Status::Created => ApiStatus::CREATED,
        Status::Running => ApiStatus::RUNNING,
        Status::Paused => ApiStatus::PAUSED,
        Status::Stopped | Status::Deleted => ApiStatus::STOPPED,
        Status::Absent | Status::Creating => ApiStatus::UNKNOWN,
    }
}

#[async_trait]
impl Task for TaskService {
    async fn create(
        &self,
        _: &TtrpcContext,
        request: api::CreateTaskRequest,
    ) -> ttrpc::Result<api::CreateTaskResponse> {
        let id = request.id.clone();
        let container =
            self.sandbox.create(Creation::task(request)).await.map_err(|e| status::of(&id, &e))?;
        let mut response = api::CreateTaskResponse::new();
        response.pid = container.pid;
        Ok(response)
    }

    async fn start(&self, _: &TtrpcContext, request: api::StartRequest) -> ttrpc::Result<api::StartResponse> {
        self.start_process(&request).await.map_err(|e| status::of(&request.id, &e))
    }

    async fn state(&self, _: &TtrpcContext, request: api::StateRequest) -> ttrpc::Result<api::StateResponse> {
        self.state_of(&request).map_err(|e| status::of(&request.id, &e))
    }

    async fn wait(&self, _: &TtrpcContext, request: api::WaitRequest) -> ttrpc::Result<api::WaitResponse> {
        self.wait_process(&request).await.map_err(|e| status::of(&request.id, &e))
    }

    async fn kill(&self, _: &TtrpcContext, request: api::KillRequest) -> ttrpc::Result<Empty> {
        self.kill_process(&request).await.map_err(|e| status::of(&request.id, &e))?;
        Ok(Empty::new())
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: api::DeleteRequest,
    ) -> ttrpc::Result<api::DeleteResponse> {
        self.delete_process(&request).await.map_err(|e| status::of(&request.id, &e))
    }

    async fn pids(&self, _: &TtrpcContext, request: api::PidsRequest) -> ttrpc::Result<api::PidsResponse> {
        let pids = self.list_pids(&request.id).await.map_err(|e| status::of(&request.id, &e))?;
        let mut response = api::PidsResponse::new();
        response.processes = pids.into_iter().map(|pid| ProcessInfo { pid, ..Default::default() }).collect();
        Ok(response)
    }

    async fn close_io(&self, _: &TtrpcContext, request: api::CloseIORequest) -> ttrpc::Result<Empty> {
        let id = request.id.clone();
        self.close_stdin(request).map_err(|e| status::of(&id, &e))?;
        Ok(Empty::new())
    }

    async fn connect(
        &self,
        _: &TtrpcContext,
        request: api::ConnectRequest,
    ) -> ttrpc::Result<api::ConnectResponse> {
        let container = self.phase(&request.id).and_then(|phase| phase.container_for(Action::Query));
        let container = container.map_err(|e| status::of(&request.id, &e.into()))?;
        let mut response = api::ConnectResponse::new();
        response.shim_pid = std::process::id();
        response.task_pid = container.pid;
        Ok(response)
    }

    /// containerd says so after each Delete and each failed Create; a shim that still has a task stays.
    async fn shutdown(&self, _: &TtrpcContext, _: api::ShutdownRequest) -> ttrpc::Result<Empty> {
        if self.sandbox.is_idle() {
            self.sandbox.stop().await;
            self.done.send_replace(true);
        }
        Ok(Empty::new())
    }

    async fn pause(&self, _: &TtrpcContext, request: api::PauseRequest) -> ttrpc::Result<Empty> {
        self.pause_task(&request.id).await.map_err(|e| status::of(&request.id, &e))?;
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, request: api::ResumeRequest) -> ttrpc::Result<Empty> {
        self.resume_task(&request.id).await.map_err(|e| status::of(&request.id, &e))?;
        Ok(Empty::new())
    }

    async fn checkpoint(
        &self,
        _: &TtrpcContext,
        request: api::CheckpointTaskRequest,
    ) -> ttrpc::Result<Empty> {
        unimplemented(&request.id, "checkpoint")
    }

    async fn exec(&self, _: &TtrpcContext, request: api::ExecProcessRequest) -> ttrpc::Result<Empty> {
        let id = request.id.clone();
        self.add_process(request).map_err(|e| status::of(&id, &e))?;
        Ok(Empty::new())
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: api::ResizePtyRequest) -> ttrpc::Result<Empty> {
        self.resize(&request).await.map_err(|e| status::of(&request.id, &e))?;
        Ok(Empty::new())
    }

    async fn update(&self, _: &TtrpcContext, request: api::UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let id = request.id.clone();
        self.update_task(request).await.map_err(|e| status::of(&id, &e))?;
        Ok(Empty::new())
    }

    async fn stats(&self, _: &TtrpcContext, request: api::StatsRequest) -> ttrpc::Result<api::StatsResponse> {
        let mut response = api::StatsResponse::new();
        let metrics = self.stats_of(&request.id).await.map_err(|e| status::of(&request.id, &e))?;
        response.stats = Some(metrics).into();
        Ok(response)
    }
}
