//! The processes that are added to a container: exec.
//!
//! Each goes its own way, from [`Execs::add`] over [`Exec::start`] to [`Execs::delete`]: none waits for another, nor for
//! the container's owner. Its state is in a watch channel, and only [`Exec::advance`] changes it.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use containerd_shim_protos::api;
use tokio::sync::watch;

use crate::{
    guest::agent::Agent,
    io::{
        events::Publisher,
        logger::Source,
        streams::{self, DRAIN, StdinGate, Streams},
    },
    process::{error::TaskError, exec_request::ExecPlan, oom::OomReports, state::Refusal, vm_end::alive},
    types::{error::chain, exit::Exit, terminal::WindowSize},
    vm::vmm::Vm,
};

/// The processes added to one container.
#[derive(Debug)]
pub(crate) struct Execs {
    container_id: String,
    vm: Vm,
    agent: Agent,
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
    phase: watch::Sender<ExecPhase>,
    flow: Mutex<Flow>,
    /// The last size that its terminal was given.
    window: Mutex<Option<WindowSize>>,
}

/// The streams of a process that was started.
#[derive(Default)]
struct Flow {
    gate: Option<StdinGate>,
    streams: Option<Streams>,
}

/// The states of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExecPhase {
    /// Not started, or the start failed.
    Added,
    Starting,
    Running,
    Stopped(Exit),
    /// It was deleted without having run.
    Deleted,
}

impl Execs {
    /// None yet.
    pub(crate) fn new(
        container_id: &str,
        vm: Vm,
        agent: Agent,
        events: Publisher,
        oom: Arc<OomReports>,
    ) -> Self {
        Self { container_id: container_id.into(), vm, agent, events, oom, table: Mutex::default() }
    }

    /// Takes note of a process.
    pub(crate) fn add(&self, request: api::ExecProcessRequest) -> Result<(), TaskError> {
        let id = request.exec_id.clone();
        let plan = ExecPlan::read(&request)?;
        let (phase, _) = watch::channel(ExecPhase::Added);
        let exec = Exec { request, plan, phase, flow: Mutex::default(), window: Mutex::default() };
        {
            let mut table = self.table();
            if table.contains_key(&id) {
                return Err(TaskError::ExecExists { exec_id: id });
            }
            table.insert(id.clone(), Arc::new(exec));
        }
        self.events.exec_added(&self.container_id, &id);
        Ok(())
    }

    /// The process of this id.
    pub(crate) fn get(&self, id: &str) -> Result<Arc<Exec>, TaskError> {
        self.table().get(id).cloned().ok_or_else(|| TaskError::NoExec { exec_id: id.into() })
    }

    /// Runs the process; `pid` is what containerd is told.
    pub(crate) async fn start(self: &Arc<Self>, id: &str, pid: u32) -> Result<(), TaskError> {
        let exec = self.get(id)?;
        exec.advance(ExecPhase::Added, ExecPhase::Starting)?;
        // Once begun it goes on without whoever asked: the process may run already.
        let (execs, started) = (Arc::clone(self), Arc::clone(&exec));
        let starting = tokio::spawn(async move {
            let result = execs.run(&started, pid).await;
            if let Err(e) = &result {
                tracing::error!("exec {} not started: {}", started.request.exec_id, chain(e));
                started.phase.send_replace(ExecPhase::Added);
            }
            result
        });
        starting.await.map_err(|e| TaskError::Internal(e.to_string()))?
    }

    async fn run(self: &Arc<Self>, exec: &Arc<Exec>, pid: u32) -> Result<(), TaskError> {
        let id = &exec.request.exec_id;
        let ExecPlan { stdio, .. } = &exec.plan;
        let window = *exec.window();
        let process_json = exec.plan.process_json(window)?;
        let setup = async {
            let endpoints = [&stdio.stdin, &stdio.stdout, &stdio.stderr];
            let source = Source { namespace: self.events.namespace(), id };
            let ends = streams::open(self.vm.vsock(), endpoints, source).await?;
            let executed = self.agent.exec_process(&self.container_id, id, process_json, ends.ids());
            ends.connect_while(self.vm.vsock(), executed).await
        };
        let open = alive(&self.vm, setup).await?;
        *exec.flow() = Flow { gate: Some(open.gate), streams: Some(open.streams) };
        exec.advance(ExecPhase::Starting, ExecPhase::Running)?;
        let latest = *exec.window();
        if let Some(size) = latest
            && latest != window
            && let Err(e) = self.agent.resize(&self.container_id, id, size).await
        {
            tracing::warn!("exec {id}: {}", chain(&e));
        }
        tracing::debug!("exec {id} started");
        self.events.exec_started(&self.container_id, id, pid);
        let (execs, exec) = (Arc::clone(self), Arc::clone(exec));
        tokio::spawn(async move { execs.watch_end(&exec, pid).await });
        Ok(())
    }

    async fn watch_end(&self, exec: &Exec, pid: u32) {
        let id = &exec.request.exec_id;
        let exit = tokio::select! {
            biased;
            end = self.agent.wait_exec(&self.container_id, id) => match end {
                Ok(end) => {
                    self.oom.hear(&end.oom);
                    end.exit
                }
                Err(e) => {
                    tracing::error!("exec {id}: {}", chain(&e));
                    Exit::killed()
                }
            },
            _ = self.vm.exited() => Exit::killed(),
        };
        tracing::debug!("exec {id} exited with status {}", exit.status);
        // Before the state says so: what containerd hears of an end by Wait has been an event already.
        self.events.exec_exited(&self.container_id, id, pid, exit);
        exec.phase.send_replace(ExecPhase::Stopped(exit));
    }

    /// Sends a signal to the process.
    pub(crate) async fn kill(&self, id: &str, signal: u32) -> Result<(), TaskError> {
        let exec = self.get(id)?;
        match exec.phase() {
            ExecPhase::Running => {}
            ExecPhase::Stopped(_) => return Err(Refusal::Ended.into()),
            ExecPhase::Added | ExecPhase::Starting | ExecPhase::Deleted => {
                return Err(TaskError::ExecNotStarted { exec_id: id.into() });
            }
        }
        match self.agent.signal_exec(&self.container_id, id, signal).await {
            // It ended while the signal was on its way.
            Err(_) if matches!(exec.phase(), ExecPhase::Stopped(_)) => Err(Refusal::Ended.into()),
            other => Ok(other?),
        }
    }

    /// Sets the size of the process's terminal: at once, or when it is started, as the one that it begins with.
    pub(crate) async fn resize(&self, id: &str, size: WindowSize) -> Result<(), TaskError> {
        let exec = self.get(id)?;
        // As for the container's own process.
        if !exec.request.terminal {
            return Ok(());
        }
        // Before a look at the state: who starts the process looks the other way round.
        exec.window().replace(size);
        match exec.phase() {
            ExecPhase::Added | ExecPhase::Starting => Ok(()),
            ExecPhase::Running => Ok(self.agent.resize(&self.container_id, id, size).await?),
            ExecPhase::Stopped(_) | ExecPhase::Deleted => Err(TaskError::ResizeStopped),
        }
    }

    /// Forgets the process, and says how it ended if it ever ran.
    pub(crate) async fn delete(&self, id: &str) -> Result<Option<Exit>, TaskError> {
        let exec = self.get(id)?;
        let exit = match exec.phase() {
            ExecPhase::Stopped(exit) => Some(exit),
            ExecPhase::Starting | ExecPhase::Running => {
                return Err(TaskError::ExecRuns { exec_id: id.into() });
            }
            // If nobody starts it at this moment.
            ExecPhase::Added | ExecPhase::Deleted => {
                exec.advance(ExecPhase::Added, ExecPhase::Deleted)?;
                None
            }
        };
        let streams = exec.flow().streams.take();
        if let Some(mut streams) = streams {
            streams.drain(DRAIN).await;
        }
        self.table().remove(id);
        Ok(exit)
    }

    /// Waits until none of them runs, at most `within`.
    pub(crate) async fn settle(&self, within: Duration) {
        let all: Vec<_> = self.table().values().cloned().collect();
        let settled = async {
            for exec in all {
                exec.settled().await;
            }
        };
        // What a container leaves running is in a pid namespace that it shares.
        _ = tokio::time::timeout(within, settled).await;
    }

    fn table(&self) -> MutexGuard<'_, HashMap<String, Arc<Exec>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exec {
    /// Its state now.
    pub(crate) fn phase(&self) -> ExecPhase {
        *self.phase.borrow()
    }

    /// Waits for its end.
    pub(crate) async fn wait(&self) -> Result<Exit, TaskError> {
        let mut phase = self.phase.subscribe();
        let ended = phase.wait_for(|phase| matches!(phase, ExecPhase::Stopped(_) | ExecPhase::Deleted)).await;
        match ended.as_deref() {
            Ok(ExecPhase::Stopped(exit)) => Ok(*exit),
            _ => Err(TaskError::NoExec { exec_id: self.request.exec_id.clone() }),
        }
    }

    /// Lets its standard input end with the other writers.
    pub(crate) fn close_stdin(&self) {
        if let Some(gate) = &self.flow().gate {
            gate.close();
        }
    }

    async fn settled(&self) {
        let mut phase = self.phase.subscribe();
        // The sender is `self`'s, so it is there.
        _ = phase.wait_for(|phase| !matches!(phase, ExecPhase::Starting | ExecPhase::Running)).await;
    }

    /// From one state to the next, if nobody was faster.
    fn advance(&self, from: ExecPhase, to: ExecPhase) -> Result<(), TaskError> {
        let is_done = self.phase.send_if_modified(|phase| {
            let is_due = *phase == from;
            if is_due {
                *phase = to;
            }
            is_due
        });
        if is_done { Ok(()) } else { Err(TaskError::ExecStarted { exec_id: self.request.exec_id.clone() }) }
    }

    fn window(&self) -> MutexGuard<'_, Option<WindowSize>> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn flow(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Flow")
    }
}
