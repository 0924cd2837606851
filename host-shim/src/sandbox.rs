//! One sandbox: a VM and the container in it. One task owns it and carries out what changes it, in order; everybody
//! else sees its state through a watch channel and never waits for the owner.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use containerd_shim_protos::api;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{JoinHandle, spawn_blocking},
};

use crate::{
    agent::Agent,
    cgroup,
    config::Config,
    container::{Action, Container, Exit, Phase, Refusal, next},
    error::{TaskError, chain},
    events::Publisher,
    execs::Execs,
    journal::Journal,
    network,
    request::Plan,
    rootfs::{bind_source, make_share, mount_rootfs},
    statedir::{self, StateDir},
    stdio::{self, Streams},
    vm::{self, SHARE, Vm, VmExit, VmFiles, VmShape},
};

/// How long the output of a process that ended may take to be read, before Delete drops it.
const DRAIN: Duration = Duration::from_secs(10);

/// How long the end of a container's init waits for word of the processes that ended with it.
const SETTLE: Duration = Duration::from_secs(1);

/// How long the VMM of an agent that has failed may take to end by itself.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// How long a guest may take to power off before its VMM is killed.
const POWER_OFF: Duration = Duration::from_secs(5);

/// Requests that wait for the owner. containerd sends one at a time.
const QUEUE: usize = 16;

/// What a sandbox is told about itself and its host.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) namespace: String,
    pub(crate) id: String,
    /// [`statedir::STATE_ROOT`].
    pub(crate) state_root: PathBuf,
    /// [`crate::config::CONFIG_PATH`].
    pub(crate) config: PathBuf,
}

/// A handle to a sandbox. Clones are the same sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    id: String,
    commands: mpsc::Sender<Command>,
    phase: watch::Receiver<Phase>,
    stopping: watch::Sender<bool>,
}

type Reply<T> = oneshot::Sender<Result<T, TaskError>>;

#[derive(Debug)]
enum Command {
    Create(Box<api::CreateTaskRequest>, Reply<Arc<Container>>),
    Start(Reply<Arc<Container>>),
    Delete(Reply<Deleted>),
    /// The process ended, or its VM did.
    Exited(Exit),
    /// End whatever there is, and leave nothing.
    Stop(oneshot::Sender<()>),
}

/// A container that is no more.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deleted {
    pub(crate) pid: u32,
    pub(crate) exit: Exit,
}

impl Sandbox {
    /// Starts the owner of a sandbox that has nothing yet.
    pub(crate) fn start(settings: Settings, events: Publisher) -> Self {
        let (commands, queue) = mpsc::channel(QUEUE);
        let (set_phase, phase) = watch::channel(Phase::Absent);
        let (stopping, stopped) = watch::channel(false);
        let id = settings.id.clone();
        let owner = Owner {
            settings,
            events,
            phase: set_phase,
            stopping: stopped,
            commands: commands.clone(),
            live: None,
        };
        tokio::spawn(owner.run(queue));
        Self { id, commands, phase, stopping }
    }

    /// The state now.
    pub(crate) fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// Creates the container. Asked again for the same (containerd was restarted), answers as the first time.
    pub(crate) async fn create(&self, request: api::CreateTaskRequest) -> Result<Arc<Container>, TaskError> {
        if request.id != self.id {
            return Err(TaskError::Pod { own: self.id.clone() });
        }
        let mut phase = self.phase.clone();
        let settled = phase.wait_for(|phase| !matches!(phase, Phase::Creating)).await;
        let settled = settled.map(|phase| phase.clone()).map_err(|_| TaskError::Stopping)?;
        if let Phase::Created(container) = settled
            && container.request == request
        {
            return Ok(container);
        }
        self.ask(|reply| Command::Create(Box::new(request), reply)).await
    }

    /// Starts the container's process.
    pub(crate) async fn start_process(&self) -> Result<Arc<Container>, TaskError> {
        self.ask(Command::Start).await
    }

    /// Deletes the container, and with it the VM.
    pub(crate) async fn delete(&self) -> Result<Deleted, TaskError> {
        self.ask(Command::Delete).await
    }

    /// Waits for the end of the process.
    pub(crate) async fn wait(&self) -> Result<Exit, TaskError> {
        next(self.phase().status(), Action::Wait)?;
        let mut phase = self.phase.clone();
        let ended = phase.wait_for(|phase| phase.exit().is_some() || matches!(phase, Phase::Absent)).await;
        let exit = ended.map_err(|_| TaskError::Stopping)?.exit();
        Ok(exit.ok_or(Refusal::NotFound)?)
    }

    /// Ends whatever there is, also a creation under way, and leaves nothing on the host.
    pub(crate) async fn stop(&self) {
        self.stopping.send_replace(true);
        let (reply, done) = oneshot::channel();
        if self.commands.send(Command::Stop(reply)).await.is_ok() {
            // An owner that is gone has nothing left to stop.
            _ = done.await;
        }
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, TaskError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| TaskError::Stopping)?;
        answer.await.map_err(|_| TaskError::Stopping)?
    }
}

/// The owner's part of a container that exists.
#[derive(Debug)]
struct Live {
    vm: Vm,
    journal: Journal,
    streams: Streams,
    /// The network namespace that was given, which outlives the VM.
    netns: Option<PathBuf>,
    /// Waits for the end of the process or the VM, and tells the owner.
    watcher: JoinHandle<()>,
    /// Open while the VM's sockets are needed.
    _state: StateDir,
}

struct Owner {
    settings: Settings,
    events: Publisher,
    phase: watch::Sender<Phase>,
    stopping: watch::Receiver<bool>,
    commands: mpsc::Sender<Command>,
    live: Option<Live>,
}

/// The host, prepared for one VM.
#[derive(Debug)]
struct Host {
    plan: Plan,
    state: StateDir,
    journal: Journal,
    files: VmFiles,
}

/// A guest with the container in it.
#[derive(Debug)]
struct Guest {
    vm: Vm,
    agent: Agent,
    stdio: stdio::OpenStdio,
}

impl Owner {
    async fn run(mut self, mut queue: mpsc::Receiver<Command>) {
        while let Some(command) = queue.recv().await {
            // A reply that nobody waits for any more is dropped: what was asked for is done all the same.
            match command {
                Command::Create(request, reply) => _ = reply.send(self.create(*request).await),
                Command::Start(reply) => _ = reply.send(self.start().await),
                Command::Delete(reply) => _ = reply.send(self.delete().await),
                Command::Exited(exit) => self.exited(exit),
                Command::Stop(reply) => {
                    self.stop().await;
                    _ = reply.send(());
                }
            }
        }
    }

    async fn create(&mut self, request: api::CreateTaskRequest) -> Result<Arc<Container>, TaskError> {
        self.advance(Action::Create, Phase::Creating)?;
        match self.create_container(request).await {
            Ok(container) => {
                tracing::info!("created, VMM {}", container.pid);
                self.advance(Action::Ready, Phase::Created(Arc::clone(&container)))?;
                self.events.created(&container);
                Ok(container)
            }
            Err(e) => {
                tracing::error!("not created: {}", chain(&e));
                self.advance(Action::Fail, Phase::Absent)?;
                Err(e)
            }
        }
    }

    async fn create_container(
        &mut self,
        request: api::CreateTaskRequest,
    ) -> Result<Arc<Container>, TaskError> {
        let settings = self.settings.clone();
        let preparing = request.clone();
        let host = spawn_blocking(move || prepare(&settings, &preparing)).await.map_err(internal)??;
        let Host { plan, state, mut journal, files } = host;
        let mut stopping = self.stopping.clone();
        let booted = tokio::select! {
            booted = boot(&plan, &state, &mut journal, files) => booted,
            _ = stopping.wait_for(|stopping| *stopping) => Err(TaskError::Stopping),
        };
        let Guest { vm, agent, stdio } = match booted {
            Ok(guest) => guest,
            Err(e) => {
                if let Err(e) = self.undo(journal).await {
                    tracing::error!("{}", chain(&e));
                }
                return Err(e);
            }
        };
        let execs = Execs::new(&plan.id, vm.clone(), agent.clone(), self.events.clone());
        let container = Arc::new(Container {
            id: plan.id,
            bundle: plan.bundle,
            request,
            pid: vm.pid(),
            agent,
            stdin: stdio.gate,
            execs: Arc::new(execs),
        });
        let watcher = tokio::spawn(watch_end(Arc::clone(&container), vm.clone(), self.commands.clone()));
        let netns = plan.netns;
        self.live = Some(Live { vm, journal, streams: stdio.streams, netns, watcher, _state: state });
        Ok(container)
    }

    async fn start(&mut self) -> Result<Arc<Container>, TaskError> {
        let container = self.phase.borrow().container_for(Action::Start)?;
        let started = match self.connect(&container).await {
            Ok(()) => container.agent.start_container(&container.id).await.map_err(TaskError::from),
            Err(e) => Err(e),
        };
        match started {
            Ok(()) => {
                tracing::info!("started");
                self.advance(Action::Start, Phase::Running(Arc::clone(&container)))?;
                self.events.started(&container);
                Ok(container)
            }
            Err(e) => {
                tracing::error!("not started: {}", chain(&e));
                self.exited(Exit::not_started());
                Err(e)
            }
        }
    }

    /// Gives the container the network that the host has for it by now.
    async fn connect(&mut self, container: &Container) -> Result<(), TaskError> {
        let Some(live) = &mut self.live else { return Err(Refusal::NotFound.into()) };
        let found = network::connect(container.pid, live.netns.as_deref(), &mut live.journal).await?;
        if let Some(interface) = found {
            container.agent.configure_network(&container.id, interface.description).await?;
        }
        Ok(())
    }

    fn exited(&mut self, exit: Exit) {
        // What ended before, or was deleted meanwhile, does not end again.
        let Ok(container) = self.phase.borrow().container_for(Action::Exit) else { return };
        if self.advance(Action::Exit, Phase::Stopped(Arc::clone(&container), exit)).is_ok() {
            tracing::info!("exited with status {}", exit.status);
            self.events.exited(&container, exit);
        }
    }

    async fn delete(&mut self) -> Result<Deleted, TaskError> {
        let container = self.phase.borrow().container_for(Action::Delete)?;
        let Some(mut live) = self.live.take() else { return Err(Refusal::NotFound.into()) };
        live.watcher.abort();
        if !live.vm.has_exited()
            && let Err(e) = container.agent.delete_container(&container.id).await
        {
            tracing::warn!("DeleteContainer: {}", chain(&e));
        }
        live.streams.drain(DRAIN).await;
        power_off(&live.vm, &container.agent).await;
        Ok(Deleted { pid: container.pid, exit: self.remove(&container, live).await? })
    }

    async fn stop(&mut self) {
        let Some(mut live) = self.live.take() else { return };
        let Ok(container) = self.phase.borrow().container_for(Action::Query) else { return };
        live.watcher.abort();
        live.vm.kill().await;
        live.streams.drain(DRAIN).await;
        if let Err(e) = self.remove(&container, live).await {
            tracing::error!("{}", chain(&e));
        }
    }

    /// The end of every container: undoes what it had on the host, and says so.
    async fn remove(&mut self, container: &Container, live: Live) -> Result<Exit, TaskError> {
        let undone = self.undo(live.journal).await;
        self.exited(Exit::killed());
        let exit = self.phase.borrow().exit().unwrap_or_else(Exit::killed);
        self.advance(Action::Delete, Phase::Deleted(exit))?;
        self.events.deleted(container, exit);
        tracing::info!("deleted");
        undone.map(|()| exit)
    }

    /// The one place where the state changes, and only as [`next`] allows.
    fn advance(&self, action: Action, to: Phase) -> Result<(), Refusal> {
        let status = self.phase.borrow().status();
        if next(status, action)? != to.status() {
            return Err(Refusal::Precondition { action, status });
        }
        self.phase.send_replace(to);
        Ok(())
    }

    async fn undo(&self, journal: Journal) -> Result<(), TaskError> {
        let path = self.settings.state_path();
        spawn_blocking(move || statedir::remove(&path, journal)).await.map_err(internal)?.map_err(Into::into)
    }
}

impl Settings {
    /// The sandbox's directory.
    pub(crate) fn state_path(&self) -> PathBuf {
        statedir::path_of(&self.state_root, &self.namespace, &self.id)
    }
}

fn internal(error: tokio::task::JoinError) -> TaskError {
    TaskError::Internal(error.to_string())
}

/// Reads and checks the request and does to the host what it takes, or nothing. Blocks.
fn prepare(settings: &Settings, request: &api::CreateTaskRequest) -> Result<Host, TaskError> {
    let config = Config::load(&settings.config)?;
    config.check_files()?;
    let plan = Plan::read(request)?;
    plan.netns.as_deref().map_or(Ok(()), network::check)?;
    let path = settings.state_path();
    let (state, mut journal) = StateDir::create(&path)?;
    match prepare_in(&state, &mut journal, &config, &plan) {
        Ok(files) => Ok(Host { plan, state, journal, files }),
        Err(e) => {
            if let Err(e) = statedir::remove(&path, journal) {
                tracing::error!("{}", chain(&e));
            }
            Err(e)
        }
    }
}

fn prepare_in(
    state: &StateDir,
    journal: &mut Journal,
    config: &Config,
    plan: &Plan,
) -> Result<VmFiles, TaskError> {
    let share = state.path().join(SHARE);
    make_share(journal, &share)?;
    let own = share.join(&plan.id);
    make_dir(journal, &own)?;
    mount_rootfs(journal, &plan.rootfs, &own.join("rootfs"))?;
    let mounts = own.join("mounts");
    make_dir(journal, &mounts)?;
    for bind in &plan.binds {
        bind_source(journal, bind, &mounts.join(bind.index.to_string()))?;
    }
    let cgroup_procs = cgroup::create(journal, &plan.cgroup)?;
    let memory_mib = plan.memory_mib(config.memory_mib, host_mib());
    let shape = VmShape { memory_mib, netns: plan.netns.clone(), cgroup_procs };
    Ok(vm::prepare(journal, state, config, shape)?)
}

fn make_dir(journal: &mut Journal, path: &Path) -> Result<(), TaskError> {
    let failed = |source| crate::rootfs::RootfsError::Share { path: path.into(), source };
    Ok(journal.make_dir(path).map_err(failed)?)
}

/// Memory of the host.
fn host_mib() -> u64 {
    let info = rustix::system::sysinfo();
    u64::from(info.mem_unit).saturating_mul(info.totalram) >> 20
}

/// Boots the VM and creates the container in it. Who gives up on it undoes the journal.
async fn boot(
    plan: &Plan,
    state: &StateDir,
    journal: &mut Journal,
    files: VmFiles,
) -> Result<Guest, TaskError> {
    let vm = Vm::boot(journal, state, files).await?;
    tracing::info!("the guest is ready, VMM {}", vm.pid());
    let setup = async {
        let agent = Agent::connect(vm.vsock()).await?;
        let release = agent.start_sandbox(&plan.id, &plan.hostname).await?;
        tracing::info!("guest kernel {release}");
        let endpoints = [&plan.stdio.stdin, &plan.stdio.stdout, &plan.stdio.stderr];
        let stdio = stdio::open(vm.vsock(), endpoints).await?;
        agent.create_container(&plan.id, plan.spec_json.clone(), stdio.ids.clone()).await?;
        Ok(Guest { vm: vm.clone(), agent, stdio })
    };
    tokio::select! {
        biased;
        exit = vm.exited() => Err(vm::VmError::Ended(exit.to_string()).into()),
        guest = setup => match guest {
            Ok(guest) => Ok(guest),
            Err(e) => Err(last_words(&vm).await.map_or(e, |exit| vm::VmError::Ended(exit.to_string()).into())),
        },
    }
}

/// How a VM ended whose agent has just failed. A guest that crashes takes its agent along, and the agent's silence may
/// be heard before the VMM has said what happened; None if the VMM lives on.
async fn last_words(vm: &Vm) -> Option<VmExit> {
    tokio::time::timeout(LAST_WORDS, vm.exited()).await.ok()
}

/// Waits for whatever ends the process first, and tells the owner.
async fn watch_end(container: Arc<Container>, vm: Vm, owner: mpsc::Sender<Command>) {
    let exit = tokio::select! {
        biased;
        exit = container.agent.wait(&container.id) => match exit {
            Ok(exit) => exit,
            Err(e) => {
                // Without its agent a VM is of no use, and nobody would ever hear of its end.
                match last_words(&vm).await {
                    Some(exit) => tracing::error!("the VM is gone: {exit}"),
                    None => {
                        tracing::error!("the VM is killed: {}", chain(&e));
                        vm.kill().await;
                    }
                }
                Exit::killed()
            }
        },
        exit = vm.exited() => {
            tracing::error!("the VM is gone: {exit}");
            Exit::killed()
        }
    };
    // They ended with it, or with the VM; containerd hears of that first.
    container.execs.settle(SETTLE).await;
    // An owner that is gone took the container along.
    _ = owner.send(Command::Exited(exit)).await;
}

/// Lets the guest end by itself; what does not is killed when the journal is undone.
async fn power_off(vm: &Vm, agent: &Agent) {
    if vm.has_exited() {
        return;
    }
    let ended = async { tokio::join!(agent.shutdown(), vm.exited()).1 };
    if tokio::time::timeout(POWER_OFF, ended).await.is_err() {
        tracing::warn!("the guest does not power off within {} s; its VMM is killed", POWER_OFF.as_secs());
    }
}

#[cfg(test)]
mod tests;
