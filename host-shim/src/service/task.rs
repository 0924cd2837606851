//! containerd's Task service. The tasks of this shim are the containers of one pod.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

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
    pod::{container::Container, container_role::is_dockers, create_request::CreateRequest, pod::Pod},
    process::{
        error::TaskError,
        exec::Exec,
        process::detached,
        state::{Action, Refusal, State, Status},
    },
    service::{caller, rpc_status},
    types::{exit::timestamp, terminal::WindowSize, traceparent::Traceparent},
};

/// The names of the service in containerd 2 and in older versions. The messages are the same.
const SERVICES: [&str; 2] = ["containerd.task.v3.Task", "containerd.task.v2.Task"];

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct TaskService {
    pod: Pod,
    /// Set when the shim's work is done.
    done: watch::Sender<bool>,
    /// containerd has called Shutdown. The shim still serves the containers of its pod that were not deleted yet.
    is_unwanted: Arc<AtomicBool>,
}

impl TaskService {
    /// `done` becomes true when containerd no longer needs the shim.
    pub(crate) fn new(pod: Pod, done: watch::Sender<bool>) -> Self {
        Self { pod, done, is_unwanted: Arc::default() }
    }

    /// The service under each of its names.
    pub(crate) fn services(&self) -> HashMap<String, Service> {
        SERVICES
            .iter()
            .flat_map(|name| {
                create_task(Arc::new(self.clone())).into_values().map(|service| ((*name).to_owned(), service))
            })
            .collect()
    }

    /// The container of this id, if `action` is possible on it.
    fn container(&self, id: &str, action: Action) -> Result<Arc<Container>, Refusal> {
        let container = self.pod.container(id)?;
        container.allow(action)?;
        Ok(container)
    }

    async fn start_process(
        &self,
        caller: Option<Traceparent>,
        request: &api::StartRequest,
    ) -> Result<api::StartResponse, TaskError> {
        let container = self.pod.container(&request.id)?;
        if request.exec_id.is_empty() {
            let starting = Arc::clone(&container);
            detached(async move { starting.start_for(caller).await }).await?;
        } else {
            container.allow(Action::Exec)?;
            container.execs.start(&request.exec_id).await?;
        }
        let mut response = api::StartResponse::new();
        response.pid = container.pid();
        Ok(response)
    }

    async fn delete_process(&self, request: &api::DeleteRequest) -> Result<api::DeleteResponse, TaskError> {
        let (pid, exit) = if request.exec_id.is_empty() {
            let deleted = self.pod.delete(&request.id).await;
            // An earlier Delete may have ended the pod after its client had given up.
            self.end_if_unwanted();
            let deleted = deleted?;
            (deleted.pid, Some(deleted.exit))
        } else {
            let container = self.container(&request.id, Action::Query)?;
            (container.pid(), container.execs.delete(&request.exec_id).await?)
        };
        let mut response = api::DeleteResponse::new();
        response.pid = pid;
        if let Some(exit) = exit {
            response.exit_status = exit.status;
            response.exited_at = Some(timestamp(exit.at)).into();
        }
        Ok(response)
    }

    /// Ends the shim after the last Delete, if containerd has called Shutdown before. containerd calls Shutdown after
    /// the Delete of the pod's first container. Only some versions call it again after the Delete of another one.
    fn end_if_unwanted(&self) {
        if self.is_unwanted.load(Ordering::Relaxed) && self.pod.has_ended() && self.pod.is_idle() {
            let (pod, done) = (self.pod.clone(), self.done.clone());
            // The answer to Delete does not wait for this.
            tokio::spawn(async move { pod.end_shim(&done).await });
        }
    }

    async fn wait_process(&self, request: &api::WaitRequest) -> Result<api::WaitResponse, TaskError> {
        let exit = if request.exec_id.is_empty() {
            self.pod.wait(&request.id).await?
        } else {
            let container = self.container(&request.id, Action::Query)?;
            container.execs.get(&request.exec_id)?.wait().await?
        };
        let mut response = api::WaitResponse::new();
        response.exit_status = exit.status;
        response.exited_at = Some(timestamp(exit.at)).into();
        Ok(response)
    }

    fn state_of(&self, request: &api::StateRequest) -> Result<api::StateResponse, TaskError> {
        let container = self.container(&request.id, Action::Query)?;
        let mut response = if request.exec_id.is_empty() {
            state_of_init(&container)
        } else {
            state_of_exec(&container, &*container.execs.get(&request.exec_id)?)
        };
        response.bundle = container.bundle().display().to_string();
        Ok(response)
    }

    async fn kill_process(&self, request: &api::KillRequest) -> Result<(), TaskError> {
        let container = self.pod.container(&request.id)?;
        if !request.exec_id.is_empty() && !request.all {
            container.allow(Action::Query)?;
            return container.execs.kill(&request.exec_id, request.signal).await;
        }
        let (signal, all) = (request.signal, request.all);
        // It takes longer to kill a guest that does not answer than some clients wait.
        detached(async move { container.kill(signal, all).await }).await
    }

    async fn list_pids(&self, id: &str) -> Result<Vec<u32>, TaskError> {
        let container = self.pod.container(id)?;
        // docker does not count them, so the guest need not be asked.
        if is_dockers(self.pod.namespace()) {
            return Ok(vec![container.pid()]);
        }
        container.pids().await
    }

    async fn pause_task(&self, id: &str) -> Result<(), TaskError> {
        let container = self.pod.container(id)?;
        detached(async move { container.pause().await }).await
    }

    async fn resume_task(&self, id: &str) -> Result<(), TaskError> {
        let container = self.pod.container(id)?;
        detached(async move { container.resume().await }).await
    }

    async fn update_task(&self, request: api::UpdateTaskRequest) -> Result<(), TaskError> {
        let (pod, container) = (self.pod.clone(), self.pod.container(&request.id)?);
        detached(async move { container.update(pod.vm(), request).await }).await
    }

    async fn stats_of(&self, id: &str) -> Result<Any, TaskError> {
        self.pod.container(id)?.stats().await
    }

    fn close_stdin(&self, request: &api::CloseIORequest) -> Result<(), TaskError> {
        let container = self.container(&request.id, Action::CloseIo)?;
        if !request.stdin {
            return Ok(());
        }
        if request.exec_id.is_empty() {
            container.init.close_stdin();
        } else {
            container.execs.get(&request.exec_id)?.process.close_stdin();
        }
        Ok(())
    }

    async fn resize(&self, request: &api::ResizePtyRequest) -> Result<(), TaskError> {
        let size = WindowSize::read(request)?;
        let container = self.container(&request.id, Action::Query)?;
        if !request.exec_id.is_empty() {
            return container.execs.resize(&request.exec_id, size).await;
        }
        // Without a terminal there is nothing to do, as in runc's shim.
        match container.task().is_some_and(|task| task.terminal) {
            true => container.init.resize(&container.guest, size).await,
            false if container.init.state().exit().is_some() => Err(TaskError::ResizeStopped),
            false => Ok(()),
        }
    }

    fn add_process(&self, request: api::ExecProcessRequest) -> Result<(), TaskError> {
        self.container(&request.id, Action::Exec)?.execs.add(request)
    }
}

fn state_of_init(container: &Container) -> api::StateResponse {
    let state = container.init.state();
    let mut response = api::StateResponse::new();
    response.id = container.id.clone();
    response.pid = container.pid();
    response.status = EnumOrUnknown::new(match state {
        State::Created | State::Starting => ApiStatus::CREATED,
        State::Running => ApiStatus::RUNNING,
        State::Paused => ApiStatus::PAUSED,
        State::Stopped(_) | State::Deleted(_) => ApiStatus::STOPPED,
    });
    if let Some(task) = container.task() {
        response.stdin = task.stdin.clone();
        response.stdout = task.stdout.clone();
        response.stderr = task.stderr.clone();
        response.terminal = task.terminal;
    }
    set_exit(&mut response, state);
    response
}

fn state_of_exec(container: &Container, exec: &Exec) -> api::StateResponse {
    let state = exec.process.state();
    let mut response = api::StateResponse::new();
    response.id = exec.request.exec_id.clone();
    response.stdin = exec.request.stdin.clone();
    response.stdout = exec.request.stdout.clone();
    response.stderr = exec.request.stderr.clone();
    response.terminal = exec.request.terminal;
    response.status = EnumOrUnknown::new(match state {
        State::Created | State::Starting => ApiStatus::CREATED,
        State::Running if container.init.status() == Status::Paused => ApiStatus::PAUSED,
        State::Running => ApiStatus::RUNNING,
        State::Paused => ApiStatus::PAUSED,
        State::Stopped(_) | State::Deleted(_) => ApiStatus::STOPPED,
    });
    if !matches!(state, State::Created | State::Starting) {
        response.pid = container.pid();
    }
    set_exit(&mut response, state);
    response
}

fn set_exit(response: &mut api::StateResponse, state: State) {
    if let Some(exit) = state.exit() {
        response.exit_status = exit.status;
        response.exited_at = Some(timestamp(exit.at)).into();
    }
}

fn unimplemented<T>(id: &str, what: &'static str) -> ttrpc::Result<T> {
    Err(rpc_status::of(id, &TaskError::Unimplemented { what }))
}

#[async_trait]
impl Task for TaskService {
    async fn create(
        &self,
        context: &TtrpcContext,
        request: api::CreateTaskRequest,
    ) -> ttrpc::Result<api::CreateTaskResponse> {
        let id = request.id.clone();
        let created = self.pod.create_for(caller::of(&context.metadata), CreateRequest::Task(request)).await;
        let container = created.map_err(|e| rpc_status::of(&id, &e))?;
        let mut response = api::CreateTaskResponse::new();
        response.pid = container.pid();
        Ok(response)
    }

    async fn start(
        &self,
        context: &TtrpcContext,
        request: api::StartRequest,
    ) -> ttrpc::Result<api::StartResponse> {
        let started = self.start_process(caller::of(&context.metadata), &request).await;
        started.map_err(|e| rpc_status::of(&request.id, &e))
    }

    async fn state(&self, _: &TtrpcContext, request: api::StateRequest) -> ttrpc::Result<api::StateResponse> {
        self.state_of(&request).map_err(|e| rpc_status::of(&request.id, &e))
    }

    async fn wait(&self, _: &TtrpcContext, request: api::WaitRequest) -> ttrpc::Result<api::WaitResponse> {
        self.wait_process(&request).await.map_err(|e| rpc_status::of(&request.id, &e))
    }

    async fn kill(&self, _: &TtrpcContext, request: api::KillRequest) -> ttrpc::Result<Empty> {
        self.kill_process(&request).await.map_err(|e| rpc_status::of(&request.id, &e))?;
        Ok(Empty::new())
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: api::DeleteRequest,
    ) -> ttrpc::Result<api::DeleteResponse> {
        self.delete_process(&request).await.map_err(|e| rpc_status::of(&request.id, &e))
    }

    async fn pids(&self, _: &TtrpcContext, request: api::PidsRequest) -> ttrpc::Result<api::PidsResponse> {
        let pids = self.list_pids(&request.id).await.map_err(|e| rpc_status::of(&request.id, &e))?;
        let mut response = api::PidsResponse::new();
        response.processes = pids.into_iter().map(|pid| ProcessInfo { pid, ..Default::default() }).collect();
        Ok(response)
    }

    async fn close_io(&self, _: &TtrpcContext, request: api::CloseIORequest) -> ttrpc::Result<Empty> {
        let id = request.id.clone();
        self.close_stdin(&request).map_err(|e| rpc_status::of(&id, &e))?;
        Ok(Empty::new())
    }

    async fn connect(
        &self,
        _: &TtrpcContext,
        request: api::ConnectRequest,
    ) -> ttrpc::Result<api::ConnectResponse> {
        let container = self.container(&request.id, Action::Query);
        let container = container.map_err(|e| rpc_status::of(&request.id, &e.into()))?;
        let mut response = api::ConnectResponse::new();
        response.shim_pid = std::process::id();
        response.task_pid = container.pid();
        Ok(response)
    }

    /// containerd calls this after each Delete and each failed Create. A shim that still has a task goes on.
    async fn shutdown(&self, _: &TtrpcContext, _: api::ShutdownRequest) -> ttrpc::Result<Empty> {
        if self.pod.is_idle() {
            self.pod.end_shim(&self.done).await;
        } else if self.pod.has_ended() {
            self.is_unwanted.store(true, Ordering::Relaxed);
        }
        Ok(Empty::new())
    }

    async fn pause(&self, _: &TtrpcContext, request: api::PauseRequest) -> ttrpc::Result<Empty> {
        self.pause_task(&request.id).await.map_err(|e| rpc_status::of(&request.id, &e))?;
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, request: api::ResumeRequest) -> ttrpc::Result<Empty> {
        self.resume_task(&request.id).await.map_err(|e| rpc_status::of(&request.id, &e))?;
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
        self.add_process(request).map_err(|e| rpc_status::of(&id, &e))?;
        Ok(Empty::new())
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: api::ResizePtyRequest) -> ttrpc::Result<Empty> {
        self.resize(&request).await.map_err(|e| rpc_status::of(&request.id, &e))?;
        Ok(Empty::new())
    }

    async fn update(&self, _: &TtrpcContext, request: api::UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let id = request.id.clone();
        self.update_task(request).await.map_err(|e| rpc_status::of(&id, &e))?;
        Ok(Empty::new())
    }

    async fn stats(&self, _: &TtrpcContext, request: api::StatsRequest) -> ttrpc::Result<api::StatsResponse> {
        let mut response = api::StatsResponse::new();
        let metrics = self.stats_of(&request.id).await.map_err(|e| rpc_status::of(&request.id, &e))?;
        response.stats = Some(metrics).into();
        Ok(response)
    }
}
