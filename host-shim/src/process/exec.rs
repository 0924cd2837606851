//! The processes that exec adds to a container. None of them waits for another, nor for the container's own operations.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use containerd_shim_protos::api;

use crate::{
    guest::agent::{AgentError, SIGKILL},
    host::{apparmor::Policy, blocking},
    io::{
        events::Publisher,
        logger::Source,
        streams::{self, DRAIN},
    },
    process::{
        error::TaskError,
        exec_request::ExecPlan,
        oom::OomReports,
        process::{Process, ProcessKey, detached},
        running_guest::Guest,
        state::{Action, Refusal, State},
    },
    types::{error::chain, exit::Exit, lock::lock, terminal::WindowSize},
};

/// The processes added to one container.
#[derive(Debug)]
pub(crate) struct Execs {
    container_id: String,
    /// The pid that containerd gets for each of them: the container's.
    pid: u32,
    guest: Guest,
    events: Publisher,
    oom: Arc<OomReports>,
    table: Mutex<HashMap<String, Arc<Exec>>>,
}

/// One process.
#[derive(Debug)]
pub(crate) struct Exec {
    /// As containerd wrote it.
    pub(crate) request: api::ExecProcessRequest,
    plan: ExecPlan,
    pub(crate) process: Process,
}

impl Execs {
    /// The processes of a container that has none yet.
    pub(crate) fn new(
        container_id: &str,
        pid: u32,
        guest: Guest,
        events: Publisher,
        oom: Arc<OomReports>,
    ) -> Self {
        Self { container_id: container_id.into(), pid, guest, events, oom, table: Mutex::default() }
    }

    /// Adds a process, which is not started.
    pub(crate) fn add(&self, request: api::ExecProcessRequest) -> Result<(), TaskError> {
        let id = request.exec_id.clone();
        let plan = ExecPlan::read(&request)?;
        let key = ProcessKey { container_id: self.container_id.clone(), exec_id: id.clone() };
        let process = Process::new(key, self.pid, Some(self.events.clone()));
        {
            let mut table = self.table();
            if table.contains_key(&id) {
                return Err(TaskError::ExecExists { exec_id: id });
            }
            table.insert(id.clone(), Arc::new(Exec { request, plan, process }));
        }
        self.events.exec_added(&self.container_id, &id);
        Ok(())
    }

    /// The process of this id.
    pub(crate) fn get(&self, id: &str) -> Result<Arc<Exec>, TaskError> {
        self.table().get(id).cloned().ok_or_else(|| TaskError::NoExec { exec_id: id.into() })
    }

    /// Runs the process.
    pub(crate) async fn start(self: &Arc<Self>, id: &str) -> Result<(), TaskError> {
        let exec = self.get(id)?;
        exec.advance(Action::Start, State::Starting)?;
        let execs = Arc::clone(self);
        detached(async move {
            let result = execs.run(&exec).await;
            if let Err(error) = &result {
                tracing::error!(
                    container = execs.container_id,
                    exec = exec.request.exec_id,
                    error = chain(error),
                    "the process was not started"
                );
                // Refused if the process has run meanwhile.
                _ = exec.process.advance(Action::NotStarted, State::Created);
            }
            result
        })
        .await
    }

    async fn run(self: &Arc<Self>, exec: &Arc<Exec>) -> Result<(), TaskError> {
        let id = &exec.request.exec_id;
        let window = exec.process.window();
        let process_json = exec.plan.process_json(window)?;
        let Guest { vm, agent, profiles } = &self.guest;
        let policy = match exec.plan.apparmor_profile() {
            // As the host has it now.
            Some(name) => blocking::run(move || Policy::of_host(Some(&name)), drop).await??,
            None => None,
        };
        let setup = async {
            let stdio = &exec.plan.stdio;
            let source = Source { namespace: self.events.namespace(), id };
            let ends =
                streams::open(vm.vsock(), [&stdio.stdin, &stdio.stdout, &stdio.stderr], source).await?;
            if let Some(policy) = &policy {
                profiles.load(agent, policy).await?;
            }
            let executed = agent.exec_process(&self.container_id, id, process_json, ends.ids());
            ends.connect_while(vm.vsock(), executed).await
        };
        let open = match self.guest.run(setup).await {
            Err(error @ TaskError::Agent(AgentError::Timeout { .. })) => {
                // It may run by now, or soon.
                _ = agent.signal_exec(&self.container_id, id, SIGKILL).await;
                return Err(error);
            }
            other => other?,
        };
        exec.process.attach(open).await;
        exec.process.started()?;
        if let Some(size) = exec.process.window()
            && Some(size) != window
            && let Err(error) = agent.resize(&self.container_id, id, size).await
        {
            tracing::warn!(container = self.container_id, exec = id, error = chain(&error), "no resize");
        }
        let (execs, exec) = (Arc::clone(self), Arc::clone(exec));
        tokio::spawn(async move { exec.process.exited(execs.exit_of(&exec).await) });
        Ok(())
    }

    /// Waits for the end of the process.
    async fn exit_of(&self, exec: &Exec) -> Exit {
        let id = &exec.request.exec_id;
        tokio::select! {
            biased;
            end = self.guest.agent.wait_exec(&self.container_id, id) => match end {
                Ok(end) => {
                    self.oom.hear(&end.oom);
                    end.exit
                }
                Err(error) => {
                    tracing::error!(container = self.container_id, exec = id, error = chain(&error), "no exit status");
                    Exit::killed()
                }
            },
            _ = self.guest.vm.exited() => Exit::killed(),
        }
    }

    /// Sends a signal to the process.
    pub(crate) async fn kill(&self, id: &str, signal: u32) -> Result<(), TaskError> {
        let exec = self.get(id)?;
        match exec.process.state() {
            State::Running | State::Paused => {}
            State::Stopped(_) => return Err(Refusal::Ended.into()),
            state @ (State::Created | State::Starting | State::Deleted(_)) => {
                return Err(
                    exec.refuse(Refusal::Precondition { action: Action::Kill, status: state.status() })
                );
            }
        }
        match self.guest.agent.signal_exec(&self.container_id, id, signal).await {
            // It ended while the signal was on its way.
            Err(_) if exec.process.state().exit().is_some() => Err(Refusal::Ended.into()),
            other => Ok(other?),
        }
    }

    /// Sets the size of the process's terminal. If the process is not started yet, the terminal starts with this size.
    pub(crate) async fn resize(&self, id: &str, size: WindowSize) -> Result<(), TaskError> {
        let exec = self.get(id)?;
        // Without a terminal there is nothing to do, as in runc's shim.
        if !exec.request.terminal {
            return Ok(());
        }
        exec.process.resize(&self.guest, size).await
    }

    /// Removes the process. Returns how it ended, if it ever ran.
    pub(crate) async fn delete(&self, id: &str) -> Result<Option<Exit>, TaskError> {
        let exec = self.get(id)?;
        let exit = exec.process.state().exit();
        if exit.is_none() {
            exec.advance(Action::Delete, State::Deleted(None))?;
        }
        exec.process.drain(DRAIN).await;
        self.table().remove(id);
        Ok(exit)
    }

    /// Waits until none of them runs, at most `within`.
    pub(crate) async fn wait_idle(&self, within: Duration) {
        let all: Vec<_> = self.table().values().cloned().collect();
        let idle = async {
            for exec in all {
                exec.process.wait_idle().await;
            }
        };
        // Those of a container that shares a pid namespace may outlive its init.
        _ = tokio::time::timeout(within, idle).await;
    }

    /// Drops what their streams still hold after `within`.
    pub(crate) async fn drain(&self, within: Duration) {
        let all: Vec<_> = self.table().values().cloned().collect();
        futures::future::join_all(all.iter().map(|exec| exec.process.drain(within))).await;
    }

    fn table(&self) -> MutexGuard<'_, HashMap<String, Arc<Exec>>> {
        lock(&self.table)
    }
}

impl Exec {
    /// Waits for its end.
    pub(crate) async fn wait(&self) -> Result<Exit, TaskError> {
        let exit = self.process.wait().await;
        exit.ok_or_else(|| TaskError::NoExec { exec_id: self.request.exec_id.clone() })
    }

    fn advance(&self, action: Action, to: State) -> Result<(), TaskError> {
        self.process.advance(action, to).map_err(|refusal| self.refuse(refusal))
    }

    fn refuse(&self, source: Refusal) -> TaskError {
        TaskError::Exec { exec_id: self.request.exec_id.clone(), source }
    }
}
