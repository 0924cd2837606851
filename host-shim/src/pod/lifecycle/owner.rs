//! The life of one container. One task owns it and carries out what changes it, in order; everybody else sees its
//! state through a watch channel and never waits for the owner.

mod pause;
mod prepare;

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

use self::prepare::{Prepared, prepare_member, prepare_own};
use crate::{
    guest::agent::{AgentError, NewContainer, SIGKILL},
    host::{journal::Journal, stand_in::StandIn},
    io::{
        events::Publisher,
        logger::Source,
        streams::{self, DRAIN, OpenStdio, StdinGate, Streams},
    },
    pod::{
        container::{Container, Killed, Phase},
        lifecycle::Sandbox,
        machine::{Guest, Machine, blocking},
        request::{Creation, Plan},
        role::Role,
    },
    process::{
        error::TaskError,
        exec::Execs,
        oom::OomReports,
        state::{Action, Refusal, Status, next},
        vm_end::{alive, last_words},
    },
    types::{endpoint::StdioPlan, error::chain, exit::Exit},
    vm::{start::VmFiles, vmm::Vm},
};

/// How long the end of a container's init waits for word of the processes that ended with it.
const SETTLE: Duration = Duration::from_secs(1);

/// Requests that wait for the owner. containerd sends one at a time.
const QUEUE: usize = 16;

/// A handle to a container. Clones are the same container.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    phase: watch::Receiver<Phase>,
    stopping: watch::Sender<bool>,
}

type Reply<T> = oneshot::Sender<Result<T, TaskError>>;

#[derive(Debug)]
enum Command {
    Create(Box<Creation>, Reply<Arc<Container>>),
    Start(Reply<Arc<Container>>),
    Delete(Reply<Deleted>),
    Pause(Reply<()>),
    Resume(Reply<()>),
    /// The process ended, or its VM did.
    Exited(Exit),
    /// The sandbox is about to end: give back what is on the host.
    Release(oneshot::Sender<()>),
    /// End whatever there is, and leave nothing.
    Stop(oneshot::Sender<()>),
}

/// A container that is no more.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deleted {
    pub(crate) pid: u32,
    pub(crate) exit: Exit,
}

impl Handle {
    /// Starts the owner of a container that is not created yet.
    pub(crate) fn start(sandbox: Sandbox, id: &str) -> Self {
        let (commands, queue) = mpsc::channel(QUEUE);
        let (set_phase, phase) = watch::channel(Phase::Absent);
        let (stopping, stopped) = watch::channel(false);
        let owner = Owner {
            id: id.into(),
            sandbox,
            phase: set_phase,
            stopping: stopped,
            commands: commands.downgrade(),
            live: None,
        };
        tokio::spawn(owner.run(queue));
        Self { commands, phase, stopping }
    }

    /// The state now.
    pub(crate) fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// Creates the container. Asked again for the same (containerd was restarted), answers as the first time.
    pub(crate) async fn create(&self, creation: Creation) -> Result<Arc<Container>, TaskError> {
        let mut phase = self.phase.clone();
        let settled = phase.wait_for(|phase| !matches!(phase, Phase::Creating)).await;
        let settled = settled.map(|phase| phase.clone()).map_err(|_| TaskError::Stopping)?;
        if let Phase::Created(container) = settled
            && container.request == creation.request
        {
            return Ok(container);
        }
        self.ask(|reply| Command::Create(Box::new(creation), reply)).await
    }

    /// Starts the container's process.
    pub(crate) async fn start_process(&self) -> Result<Arc<Container>, TaskError> {
        self.ask(Command::Start).await
    }

    /// Deletes the container; with that of the sandbox itself the VM goes, too.
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
        self.end(Command::Stop).await;
    }

    /// The sandbox ends: the container ends with it, has nothing on the host any more, and waits to be deleted.
    pub(crate) async fn release(&self) {
        self.end(Command::Release).await;
    }

    async fn end(&self, command: impl FnOnce(oneshot::Sender<()>) -> Command) {
        self.stopping.send_replace(true);
        let (reply, done) = oneshot::channel();
        if self.commands.send(command(reply)).await.is_ok() {
            // An owner that is gone has nothing left to end.
            _ = done.await;
        }
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, TaskError> {
        let (reply, answer) = oneshot::channel();
        // An owner ends with its container.
        self.commands.send(command(reply)).await.map_err(|_| Refusal::NotFound)?;
        answer.await.map_err(|_| Refusal::NotFound)?
    }
}

/// The owner's part of a container that exists.
#[derive(Debug)]
struct Live {
    guest: Guest,
    files: Journal,
    /// Of the sandbox's own container.
    machine: Option<Machine>,
    streams: Streams,
    /// Waits for the end of the process or the VM, and tells the owner.
    watcher: JoinHandle<()>,
}

struct Owner {
    id: String,
    sandbox: Sandbox,
    phase: watch::Sender<Phase>,
    stopping: watch::Receiver<bool>,
    /// For what happens by itself. Weak, so that the owner ends with the last handle.
    commands: mpsc::WeakSender<Command>,
    live: Option<Live>,
}

/// A container in its guest.
#[derive(Debug)]
struct Made {
    guest: Guest,
    stdio: OpenStdio,
    stand_in: Option<StandIn>,
}

impl Owner {
    async fn run(mut self, mut queue: mpsc::Receiver<Command>) {
        while let Some(command) = queue.recv().await {
            // A reply that nobody waits for any more is dropped: what was asked for is done all the same.
            match command {
                Command::Create(creation, reply) => _ = reply.send(self.create(*creation).await),
                Command::Start(reply) => _ = reply.send(self.start().await),
                Command::Delete(reply) => _ = reply.send(self.delete().await),
                Command::Pause(reply) => _ = reply.send(self.pause().await),
                Command::Resume(reply) => _ = reply.send(self.resume().await),
                Command::Exited(exit) => self.exited(exit),
                Command::Release(reply) => {
                    self.release().await;
                    _ = reply.send(());
                }
                Command::Stop(reply) => {
                    self.stop().await;
                    _ = reply.send(());
                }
            }
        }
    }

    async fn create(&mut self, creation: Creation) -> Result<Arc<Container>, TaskError> {
        self.advance(Action::Create, Phase::Creating)?;
        match self.create_container(creation).await {
            Ok(container) => {
                tracing::info!("container {} created, pid {}", self.id, container.pid);
                self.advance(Action::Ready, Phase::Created(Arc::clone(&container)))?;
                self.publish(&container, |events| events.created(&container.request, container.pid));
                Ok(container)
            }
            Err(e) => {
                tracing::error!("container {} not created: {}", self.id, chain(&e));
                self.advance(Action::Fail, Phase::Absent)?;
                Err(e)
            }
        }
    }

    async fn create_container(&mut self, creation: Creation) -> Result<Arc<Container>, TaskError> {
        let Prepared { plan, files, own } = self.prepare(&creation).await?;
        let (mut machine, vm_files) = own.map(|own| (own.machine, own.files)).unzip();
        let mut stopping = self.stopping.clone();
        let made = tokio::select! {
            made = make(&self.sandbox, &plan, machine.as_mut().zip(vm_files)) => made,
            _ = stopping.wait_for(|stopping| *stopping) => Err(TaskError::Stopping),
        };
        match made {
            Ok(made) => {
                let Made { guest, stdio: OpenStdio { streams, gate }, stand_in } = made;
                let container = self.assemble(creation, plan, &guest, gate, stand_in.as_ref());
                if machine.is_some() {
                    self.sandbox.set_guest(Some(guest.clone()));
                }
                let watching =
                    watch_end(Arc::clone(&container), guest.vm.clone(), stand_in, self.commands.clone());
                let watcher = tokio::spawn(watching);
                self.live = Some(Live { guest, files, machine, streams, watcher });
                Ok(container)
            }
            Err(e) => {
                if let Err(e) = remove(files, machine).await {
                    tracing::error!("{}", chain(&e));
                }
                plan.hooks.stopped().await;
                Err(e)
            }
        }
    }

    async fn prepare(&self, creation: &Creation) -> Result<Prepared, TaskError> {
        let (config, state) = (self.sandbox.config_path().to_owned(), self.sandbox.state_path());
        if !self.is_own() {
            // Without it there is no place for the container's files.
            self.sandbox.guest()?;
            // Annotations are anybody's to write: they open no container to another that was not made to have company.
            let own = self.sandbox.container(self.sandbox.id())?.phase().container_for(Action::Query)?;
            if own.role != Role::Pause {
                return Err(TaskError::NoPod { id: self.sandbox.id().into() });
            }
        }
        let (creation, is_own, own) = (creation.clone(), self.is_own(), self.sandbox.id().to_owned());
        blocking(move || match is_own {
            true => prepare_own(&config, &state, &creation),
            false => prepare_member(&own, &state, &creation),
        })
        .await
    }

    fn assemble(
        &self,
        creation: Creation,
        plan: Plan,
        guest: &Guest,
        stdin: StdinGate,
        stand_in: Option<&StandIn>,
    ) -> Arc<Container> {
        let events = self.sandbox.events().clone();
        let oom = OomReports::watch(&plan.id, guest.agent.clone(), events.clone());
        let execs = Execs::new(&plan.id, guest.vm.clone(), guest.agent.clone(), events, Arc::clone(&oom));
        Arc::new(Container {
            id: plan.id,
            is_task: creation.pod.is_none(),
            request: creation.request,
            created_at: SystemTime::now(),
            role: plan.role,
            pid: stand_in.map_or(guest.vm.pid(), StandIn::pid),
            vm: guest.vm.clone(),
            agent: guest.agent.clone(),
            stdin,
            hooks: plan.hooks,
            execs: Arc::new(execs),
            oom,
            killed: Killed::default(),
        })
    }

    async fn start(&mut self) -> Result<Arc<Container>, TaskError> {
        let container = self.phase.borrow().container_for(Action::Start)?;
        let mut stopping = self.stopping.clone();
        let machine = self.live.as_mut().and_then(|live| live.machine.as_mut());
        let started = tokio::select! {
            started = start_process(&container, machine) => started,
            _ = stopping.wait_for(|stopping| *stopping) => Err(TaskError::Stopping),
        };
        match started {
            Ok(()) => {
                tracing::info!("container {} started", self.id);
                self.advance(Action::Start, Phase::Running(Arc::clone(&container)))?;
                self.publish(&container, |events| events.started(&container.id, container.pid));
                Ok(container)
            }
            Err(e) => {
                tracing::error!("container {} not started: {}", self.id, chain(&e));
                self.exited(Exit::not_started());
                Err(e)
            }
        }
    }

    fn exited(&mut self, exit: Exit) {
        // What ended before, or was deleted meanwhile, does not end again.
        let Ok(container) = self.phase.borrow().container_for(Action::Exit) else { return };
        if self.advance(Action::Exit, Phase::Stopped(Arc::clone(&container), exit)).is_ok() {
            tracing::info!("container {} exited with status {}", self.id, exit.status);
            self.publish(&container, |events| events.exited(&container.id, container.pid, exit));
            if container.role == Role::Pause {
                // The pod ends when its pause does.
                tokio::spawn(self.sandbox.clone().kill_members());
            }
        }
    }

    async fn delete(&mut self) -> Result<Deleted, TaskError> {
        let container = self.phase.borrow().container_for(Action::Delete)?;
        let mut removed = Ok(());
        // None if the sandbox has ended before.
        if let Some(mut live) = self.live.take() {
            live.watcher.abort();
            if self.phase.borrow().status() == Status::Stopped {
                // The guest drops with the container what was not read yet.
                live.streams.drain(DRAIN).await;
            }
            if !live.guest.vm.has_exited()
                && let Err(e) = container.agent.delete_container(&container.id).await
            {
                tracing::warn!("DeleteContainer: {}", chain(&e));
                if matches!(e, AgentError::Broken { .. }) {
                    tracing::error!("the VM is killed: its agent does not answer");
                    live.guest.vm.kill().await;
                }
            }
            live.streams.drain(DRAIN).await;
            if live.machine.is_some() {
                self.sandbox.set_guest(None);
                live.guest.power_off().await;
                self.sandbox.release_members().await;
            }
            removed = remove(live.files, live.machine).await;
        }
        let exit = self.deleted(&container).await?;
        removed.map(|()| Deleted { pid: container.pid, exit })
    }

    async fn stop(&mut self) {
        self.release().await;
        let Ok(container) = self.phase.borrow().container_for(Action::Query) else { return };
        if let Err(e) = self.deleted(&container).await {
            tracing::error!("{}", chain(&e));
        }
    }

    async fn release(&mut self) {
        let Some(mut live) = self.live.take() else { return };
        live.watcher.abort();
        if live.machine.is_some() {
            self.sandbox.set_guest(None);
            live.guest.vm.kill().await;
            self.sandbox.release_members().await;
        }
        live.streams.drain(DRAIN).await;
        if let Err(e) = remove(live.files, live.machine).await {
            tracing::error!("{}", chain(&e));
        }
        self.exited(Exit::killed());
    }

    /// The end of every container.
    async fn deleted(&mut self, container: &Container) -> Result<Exit, TaskError> {
        container.hooks.stopped().await;
        self.exited(Exit::killed());
        let exit = self.phase.borrow().exit().unwrap_or_else(Exit::killed);
        self.advance(Action::Delete, Phase::Deleted(exit))?;
        self.publish(container, |events| events.deleted(&container.id, container.pid, exit));
        tracing::info!("container {} deleted", self.id);
        Ok(exit)
    }

    /// Tells containerd of a task; of what is none it would not know what to make.
    fn publish(&self, container: &Container, event: impl FnOnce(&Publisher)) {
        if container.is_task {
            event(self.sandbox.events());
        }
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

    /// Whether this is the container that the sandbox is named after.
    fn is_own(&self) -> bool {
        self.id == self.sandbox.id()
    }
}

/// Undoes what a container had on the host, after the VM has ended if it was the sandbox's own.
async fn remove(files: Journal, machine: Option<Machine>) -> Result<(), TaskError> {
    blocking(move || match machine {
        // With the files of every container.
        Some(machine) => machine.remove(),
        None => files.undo(),
    })
    .await
}

/// Creates the container in its guest, which is booted for the sandbox's own.
async fn make(
    sandbox: &Sandbox,
    plan: &Plan,
    boot: Option<(&mut Machine, VmFiles)>,
) -> Result<Made, TaskError> {
    sandbox.set_memory_limit(&plan.id, plan.memory_limit);
    let limits = sandbox.memory_limits();
    let guest = match boot {
        Some((machine, files)) => machine.boot(plan, files, limits).await?,
        None => {
            let guest = sandbox.guest()?;
            alive(&guest.vm, async { Ok(guest.vm.make_room(limits).await?) }).await?;
            guest
        }
    };
    let joined = sandbox.resolve(&plan.joined)?;
    let stand_in = match plan.role {
        Role::Member { .. } => {
            let stand_in = StandIn::spawn(sandbox.shim(), guest.vm.pid()).await;
            Some(stand_in.map_err(TaskError::StandIn)?)
        }
        Role::Single | Role::Pause => None,
    };
    let pid = stand_in.as_ref().map_or(guest.vm.pid(), StandIn::pid);
    let created = async {
        plan.hooks.creating(pid).await?;
        let StdioPlan { stdin, stdout, stderr } = &plan.stdio;
        let source = Source { namespace: sandbox.events().namespace(), id: &plan.id };
        let ends = streams::open(guest.vm.vsock(), [stdin, stdout, stderr], source).await?;
        let new = NewContainer {
            id: &plan.id,
            spec_json: &plan.spec_json,
            joined: &joined,
            pause: plan.role == Role::Pause,
        };
        let made = guest.agent.create_container(new, ends.ids());
        ends.connect_while(guest.vm.vsock(), made).await
    };
    let stdio = alive(&guest.vm, created).await?;
    Ok(Made { guest, stdio, stand_in })
}

/// Starts the container's process. With a hook that fails afterwards it is not to run on, as with runc.
async fn start_process(container: &Container, machine: Option<&mut Machine>) -> Result<(), TaskError> {
    if let Some(machine) = machine {
        machine.connect(container.pid, &container.agent, &container.id).await?;
    }
    container.agent.start_container(&container.id).await?;
    let Err(e) = container.hooks.started(container.pid).await else { return Ok(()) };
    match container.agent.signal(&container.id, SIGKILL, true).await {
        Ok(()) => container.killed.is_told(),
        Err(e) => tracing::warn!("killing the container: {}", chain(&e)),
    }
    Err(e.into())
}

/// Waits for whatever ends the process first, and tells the owner.
async fn watch_end(
    container: Arc<Container>,
    vm: Vm,
    stand_in: Option<StandIn>,
    owner: mpsc::WeakSender<Command>,
) {
    let exit = tokio::select! {
        biased;
        exit = container.agent.wait(&container.id) => match exit {
            Ok(end) => {
                container.oom.hear(&end.oom);
                end.exit
            }
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
        () = container.killed.is_overdue() => {
            tracing::error!("the VM is killed: container {} has not ended by SIGKILL", container.id);
            vm.kill().await;
            Exit::killed()
        }
        never = follow(stand_in, &container) => match never {},
    };
    // They ended with it, or with the VM; containerd hears of that first.
    container.execs.settle(SETTLE).await;
    // An owner that is gone took the container along.
    if let Some(owner) = owner.upgrade() {
        _ = owner.send(Command::Exited(exit)).await;
    }
}

/// Whoever kills the process that stands for the container on the host means the container. Never ends.
async fn follow(stand_in: Option<StandIn>, container: &Container) -> Infallible {
    if let Some(mut stand_in) = stand_in {
        stand_in.ended().await;
        tracing::info!("container {}: process {} was killed", container.id, stand_in.pid());
        match container.agent.signal(&container.id, SIGKILL, false).await {
            Ok(()) => container.killed.is_told(),
            Err(e) => tracing::warn!("container {}: {}", container.id, chain(&e)),
        }
    }
    std::future::pending().await
}
