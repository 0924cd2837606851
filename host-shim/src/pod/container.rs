//! A container that exists in the guest, from its creation to its deletion.

use std::{
    convert::Infallible,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use containerd_shim_protos::api;
use tokio::{
    sync::{MutexGuard, Notify, watch},
    task::AbortHandle,
    time::timeout,
};

use tracing::Instrument;

use crate::{
    guest::agent::{AgentError, NewContainer, SIGKILL},
    host::{
        hooks::{Hooks, POSTSTOP},
        host_socket::Confinement,
        placeholder_process::PlaceholderProcess,
        rootfs::Rootfs,
    },
    io::{
        events::Publisher,
        logger::Source,
        streams::{self, DRAIN, OpenStdio},
    },
    pod::{
        container_role::Role,
        create_request::{CreatePlan, CreateRequest},
        devices::{Disk, Numbers},
        guest_spec::{MovedSources, with_disks, with_moved_sources, with_root},
        huge_pages,
        pod_vm::{FollowedVolume, HostSockets, MountedDirectories, PodVm},
    },
    process::{
        error::TaskError,
        exec::Execs,
        oom::OomReports,
        process::{Process, ProcessKey},
        running_guest::{Guest, exit_of},
        state::{Action, Refusal, State},
    },
    types::{
        error::chain, exit::Exit, lock::lock, stdio_endpoint::StdioPlan, timeline::Step,
        traceparent::Traceparent,
    },
    vm::vmm::VmExit,
};

/// How long the exit of a container's init may be held back: for the exits of the processes that ended with it, and for
/// the answer to a start that is under way.
const EXIT_ORDER: Duration = Duration::from_secs(1);

/// How long after SIGKILL a container must have ended. Its kernel ends it at once unless it waits for a disk, and its
/// agent reports that within a few seconds on the slowest host. Clients wait for 2 minutes (containerd's CRI), or
/// without limit.
const KILLED_WITHIN: Duration = Duration::from_secs(20);

/// The same for one of several containers of a pod. If it expires, the VM is killed, and all containers with it. It is
/// half of that if the guest then gets time for its disks (POWER_OFF_WITH_DISKS).
const MEMBER_KILLED_WITHIN: Duration = Duration::from_secs(100);

/// How long the guest may take to get its network and to start the container's program. kubelet waits 2 minutes for a
/// start, in which a failed one must be cleaned up too.
const START: Duration = Duration::from_secs(60);

/// When SIGKILL is sent again to a container whose guest has not taken it: after each of these times, in seconds, and
/// then always after the last one.
const KILL_AGAIN: [u64; 4] = [1, 5, 15, 60];

/// How long a container may take to end that is killed because its start failed.
const FAILED_START: Duration = Duration::from_secs(5);

/// A container in the guest. Requests share it, and do not wait for one another unless they change its state.
#[derive(Debug)]
pub(crate) struct Container {
    pub(crate) id: String,
    /// What it was created from.
    pub(crate) creation: CreateRequest,
    pub(crate) role: Role,
    pub(crate) created_at: SystemTime,
    pub(crate) guest: Guest,
    pub(crate) init: Process,
    /// The processes added to it.
    pub(crate) execs: Arc<Execs>,
    pub(super) pod: Arc<PodVm>,
    events: Publisher,
    hooks: Arc<Hooks>,
    oom: Arc<OomReports>,
    killed: Killed,
    /// How many updates of its limits there have been. Held by whoever changes them, and after an update that the guest
    /// has not answered in time until that is undone.
    pub(super) updates: Arc<tokio::sync::Mutex<u64>>,
    /// Held by whoever starts, pauses, resumes or deletes the container.
    operation: tokio::sync::Mutex<()>,
    /// True: such an operation is to be given up.
    cancelled: watch::Sender<bool>,
    /// Waits for the end of the init.
    watcher: Mutex<Option<AbortHandle>>,
    /// Until it is deleted.
    host_sockets: Mutex<Option<HostSockets>>,
    /// Until then.
    directories: Mutex<Option<MountedDirectories>>,
    /// Until then its volumes that kubelet keeps up to date are followed.
    volumes: Mutex<Vec<Arc<FollowedVolume>>>,
    /// Block devices of the host, with their numbers in the guest.
    pub(super) disks: Vec<(Disk, Numbers)>,
}

/// What a container is created in.
#[derive(Debug, Clone)]
pub(crate) struct Environment {
    pub(crate) pod: Arc<PodVm>,
    pub(crate) guest: Guest,
    pub(crate) events: Publisher,
    pub(crate) moved_sources: MovedSources,
}

/// What a container has when it is created.
struct Ready {
    placeholder: Option<PlaceholderProcess>,
    stdio: OpenStdio,
    volumes: Vec<Arc<FollowedVolume>>,
    directories: Option<MountedDirectories>,
    disks: Vec<(Disk, Numbers)>,
}

/// Whether the guest has taken SIGKILL for a container.
#[derive(Debug, Default)]
struct Killed(Notify);

impl Killed {
    fn note(&self) {
        self.0.notify_one();
    }

    /// Waits until the guest took SIGKILL so long ago that the container must have ended.
    async fn overdue(&self, role: &Role, pod: &PodVm) {
        self.0.notified().await;
        let within = match role {
            Role::Single | Role::Sandbox => KILLED_WITHIN,
            Role::Member { .. } if pod.may_have_dirty_disks() => MEMBER_KILLED_WITHIN / 2,
            Role::Member { .. } => MEMBER_KILLED_WITHIN,
        };
        tokio::time::sleep(within).await;
    }
}

/// A container that is no more.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deleted {
    pub(crate) pid: u32,
    pub(crate) exit: Exit,
}

impl Container {
    /// Creates the container in its guest.
    pub(crate) async fn create(
        creation: CreateRequest,
        plan: &CreatePlan,
        environment: Environment,
    ) -> Result<Arc<Self>, TaskError> {
        let Environment { pod, guest, events, moved_sources } = &environment;
        let joined = pod.resolve(&plan.joined)?;
        let placeholder = match plan.role {
            Role::Member { .. } => {
                let placeholder = PlaceholderProcess::spawn(&pod.settings.shim, guest.vm.pid()).await;
                Some(placeholder.map_err(TaskError::PlaceholderProcess)?)
            }
            Role::Single | Role::Sandbox => None,
        };
        let pid = placeholder.as_ref().map_or(guest.vm.pid(), PlaceholderProcess::pid);
        let (mut volumes, mut directories) = (Vec::new(), None);
        let created = async {
            plan.hooks.creating(pid).await?;
            let StdioPlan { stdin, stdout, stderr } = &plan.stdio;
            let source = Source { namespace: events.namespace(), id: &plan.id };
            let ends = streams::open(guest.vm.vsock(), [stdin, stdout, stderr], source).await?;
            let spec = pod.spec_for_guest(plan).await?;
            let damaged = |error: serde_json::Error| TaskError::Internal(error.to_string());
            let spec = with_moved_sources(spec, &plan.id, moved_sources).map_err(damaged)?;
            let disks = pod.attach_disks(guest, &plan.disks).await?;
            let spec = with_disks(spec, &disks).map_err(damaged)?;
            let root = match &plan.rootfs {
                Some(Rootfs::Disk(root)) => Some(pod.mount_root(guest, &plan.id, root).await?),
                _ => None,
            };
            let spec = with_root(spec, root).map_err(damaged)?;
            let spec = match plan.role {
                Role::Sandbox if pod.huge_pages() > 0 => {
                    huge_pages::with_pod_limit(spec, pod.huge_pages()).map_err(damaged)?
                }
                _ => spec,
            };
            for volume in &plan.volumes {
                guest.agent.make_volume(volume).await?;
            }
            for volume in &plan.copied {
                volumes.push(pod.volume_copies.follow(guest, volume).await?);
            }
            let confinement = confinement(plan);
            let followed = pod.socket_directories.follow(guest, &moved_sources.directories, &confinement);
            directories = followed.await;
            if let Some(policy) = &plan.apparmor {
                guest.profiles.load(&guest.agent, policy).await?;
            }
            // Not before: they would slow down the boot.
            pod.limit_io(&plan.io_limits).await?;
            let new = NewContainer {
                id: &plan.id,
                spec_json: &spec,
                joined: &joined,
                pause: plan.role == Role::Sandbox,
                no_new_keyring: plan.no_new_keyring,
                host_sockets: &moved_sources.sockets,
            };
            let made = guest.agent.create_container(new, ends.ids());
            let stdio: Result<_, TaskError> = ends.connect_while(guest.vm.vsock(), made).await;
            let stdio = stdio?;
            // Disks and huge pages have the kernel touch much that other pods do not need, and disks may contain
            // anything.
            let is_plain = disks.is_empty() && pod.huge_pages() == 0;
            if pod.is_first(&plan.id) && is_plain && !matches!(plan.rootfs, Some(Rootfs::Disk(_))) {
                guest.vm.record_working_set().await;
            }
            Ok((stdio, disks))
        };
        let (stdio, disks) = guest.run(created).await?;
        let ready = Ready { placeholder, stdio, volumes, directories, disks };
        Ok(Self::assemble(creation, plan, environment, ready).await)
    }

    async fn assemble(
        creation: CreateRequest,
        plan: &CreatePlan,
        Environment { pod, guest, events, moved_sources }: Environment,
        Ready { placeholder, stdio, volumes, directories, disks }: Ready,
    ) -> Arc<Self> {
        let pid = placeholder.as_ref().map_or(guest.vm.pid(), PlaceholderProcess::pid);
        pod.register_pid(&plan.id, pid);
        let oom = OomReports::watch(&plan.id, guest.agent.clone(), events.clone());
        let execs = Execs::new(&plan.id, pid, guest.clone(), events.clone(), Arc::clone(&oom));
        let confinement = confinement(plan);
        let sockets = &moved_sources.sockets;
        let host_sockets = HostSockets::serve(&guest, &plan.id, &confinement, sockets, &pod.host_connections);
        let key = ProcessKey { container_id: plan.id.clone(), exec_id: String::new() };
        let task_events = creation.task().is_some().then(|| events.clone());
        let container = Arc::new(Self {
            id: plan.id.clone(),
            creation,
            role: plan.role.clone(),
            created_at: SystemTime::now(),
            guest,
            init: Process::new(key, pid, task_events),
            execs: Arc::new(execs),
            pod,
            events,
            hooks: Arc::clone(&plan.hooks),
            oom,
            killed: Killed::default(),
            operation: tokio::sync::Mutex::default(),
            updates: Arc::default(),
            cancelled: watch::Sender::new(false),
            watcher: Mutex::default(),
            host_sockets: Mutex::new(Some(host_sockets)),
            directories: Mutex::new(directories),
            volumes: Mutex::new(volumes),
            disks,
        });
        container.init.attach(stdio).await;
        let watcher = tokio::spawn(Arc::clone(&container).watch_exit(placeholder));
        *lock(&container.watcher) = Some(watcher.abort_handle());
        container
    }

    /// The request for its task, if containerd has one.
    pub(crate) fn task(&self) -> Option<&api::CreateTaskRequest> {
        self.creation.task()
    }

    pub(crate) fn bundle(&self) -> &Path {
        self.creation.bundle()
    }

    /// The pid that containerd has for the container: that of the VMM, or of the container's placeholder process.
    pub(crate) fn pid(&self) -> u32 {
        self.init.pid
    }

    /// Fails unless `action` is possible now.
    pub(crate) fn allow(&self, action: Action) -> Result<(), Refusal> {
        self.init.state().allow(action)
    }

    /// Starts the container's program. `caller` is the span of containerd that the request belongs to.
    pub(crate) async fn start_for(&self, caller: Option<Traceparent>) -> Result<(), TaskError> {
        let _operation = self.operation.lock().await;
        self.init.advance(Action::Start, State::Starting)?;
        let mut cancelled = self.cancelled.subscribe();
        let step = self.pod.time(&self.id, Step::Start).map(|step| step.called_by(caller));
        let started = tokio::select! {
            started = self.start_in_guest() => started,
            _ = cancelled.wait_for(|cancelled| *cancelled) => Err(TaskError::Cancelled),
        };
        drop(step);
        if let Err(error) = &started {
            tracing::error!(container = self.id, error = chain(error), "the container was not started");
            self.pod.count_failure(&self.id, error);
            self.end_failed_start().await;
        } else {
            self.pod.note_started(&self.id);
        }
        started
    }

    async fn start_in_guest(&self) -> Result<(), TaskError> {
        let Guest { agent, .. } = &self.guest;
        let started = self.guest.run(async {
            if self.role == Role::Single {
                // Those of now: an update may have come since the container was created.
                self.pod.limit_cpu(&self.pod.cpu_of(&self.id).unwrap_or_default()).await?;
            }
            let step = self.pod.time(&self.id, Step::ConnectNetwork);
            self.pod.connect_network(&self.guest, &self.id).await?;
            drop(step);
            let _step = self.pod.time(&self.id, Step::StartContainer);
            Ok(agent.start_container(&self.id).await?)
        });
        // All of it together. Each step has a deadline of its own, and may wait for that of another request first.
        let late =
            TaskError::Timeout { what: "start of the container in the guest", seconds: START.as_secs() };
        timeout(START, started).await.unwrap_or(Err(late))?;
        self.init.started()?;
        // It may wait for another request that waits for the guest. No start needs it.
        let (pod, guest, id) = (Arc::clone(&self.pod), self.guest.clone(), self.id.clone());
        tokio::spawn(async move { pod.forward_ports(&guest, &id).await }.in_current_span());
        tracing::info!(container = self.id, "the container started");
        Ok(self.hooks.started(self.pid()).await?)
    }

    /// Kills what the failed start has left running.
    async fn end_failed_start(&self) {
        let has_run = self.init.state() == State::Running;
        match self.guest.agent.signal(&self.id, SIGKILL, true).await {
            Ok(()) => self.killed.note(),
            Err(error) => {
                tracing::debug!(container = self.id, error = chain(&error), "the container cannot be killed");
            }
        }
        if has_run && timeout(FAILED_START, self.init.wait()).await.is_ok() {
            return;
        }
        self.exited(Exit::not_started());
        self.pod.give_back_processors().await;
    }

    /// Stops the container's processes until Resume.
    pub(crate) async fn pause(&self) -> Result<(), TaskError> {
        let _operation = self.operation.lock().await;
        self.allow(Action::Pause)?;
        if let Err(error) = self.guest.agent.pause(&self.id).await {
            if matches!(error, AgentError::Timeout { .. }) {
                // The guest may pause the container later, although the client was told that it is not paused.
                let (agent, id) = (self.guest.agent.clone(), self.id.clone());
                tokio::spawn(async move { _ = agent.resume_at_last(&id).await });
            }
            return Err(error.into());
        }
        self.init.advance(Action::Pause, State::Paused)?;
        tracing::info!(container = self.id, "the container is paused");
        self.publish(|events| events.paused(&self.id));
        Ok(())
    }

    /// Lets the container's processes continue.
    pub(crate) async fn resume(&self) -> Result<(), TaskError> {
        let _operation = self.operation.lock().await;
        self.allow(Action::Resume)?;
        self.guest.agent.resume(&self.id).await?;
        self.init.advance(Action::Resume, State::Running)?;
        tracing::info!(container = self.id, "the container is resumed");
        self.publish(|events| events.resumed(&self.id));
        Ok(())
    }

    /// Signals the init, or each process of the container.
    pub(crate) async fn kill(&self, signal: u32, all: bool) -> Result<(), TaskError> {
        self.allow(Action::Kill)?;
        match self.guest.agent.signal(&self.id, signal, all).await {
            // The process, or its VM, ended while the signal was on its way.
            Err(_) if self.init.state().exit().is_some() => Err(Refusal::Ended.into()),
            Err(error @ (AgentError::Timeout { .. } | AgentError::Disconnected { .. }))
                if signal == SIGKILL =>
            {
                self.kill_vm_for(error).await
            }
            Ok(()) if signal == SIGKILL => {
                self.killed.note();
                Ok(())
            }
            other => Ok(other?),
        }
    }

    /// Ends the VM, because the guest did not answer SIGKILL. If the container is a member of a pod with a sandbox
    /// container, and the guest still answers other requests, the VM continues and this is an error.
    async fn kill_vm_for(&self, error: AgentError) -> Result<(), TaskError> {
        let is_member = matches!(self.role, Role::Member { .. });
        if is_member && self.guest.agent.ping().await.is_ok() {
            return Err(error.into());
        }
        // A guest that writes back its disks has its time for that, however often it is killed.
        if self.pod.has_ended_in_order().await {
            return Ok(());
        }
        tracing::error!(container = self.id, error = chain(&error), "the VM is killed");
        self.events.log().vm_killed(&chain(&error));
        self.guest.vm.kill().await;
        // If not even the VMM ends, the exit is reported nevertheless.
        self.killed.note();
        Ok(())
    }

    /// Gives back what the container has in the guest. Its state stays as it is, so that this can be repeated when it
    /// fails. No other operation begins before the answer is dropped.
    pub(crate) async fn tear_down(&self) -> Result<MutexGuard<'_, ()>, TaskError> {
        // A start that hangs is given up. What runs is not disturbed.
        if self.init.state() != State::Starting {
            self.allow(Action::Delete)?;
        }
        self.cancelled.send_replace(true);
        let operation = self.operation.lock().await;
        self.allow(Action::Delete)?;
        self.stop_watching();
        self.stop_serving();
        if self.init.state().exit().is_some() {
            // The guest drops with the container what has not been read yet.
            tokio::join!(self.init.drain(DRAIN), self.execs.drain(DRAIN));
        }
        self.pod.delete_in_guest(&self.guest, &self.id).await;
        self.pod.release_root(&self.guest, &self.id).await;
        tokio::join!(self.init.drain(DRAIN), self.execs.drain(DRAIN));
        Ok(operation)
    }

    /// The VM is gone: the container has ended with it, and waits to be deleted.
    pub(crate) async fn release(&self) {
        self.cancelled.send_replace(true);
        self.stop_watching();
        self.stop_serving();
        self.exited(Exit::killed());
        tokio::join!(self.init.drain(DRAIN), self.execs.drain(DRAIN));
    }

    /// The last step of every container, when nothing of it is left.
    pub(crate) async fn finish(&self) -> Result<Deleted, TaskError> {
        self.hooks.stopped_within(POSTSTOP).await;
        self.exited(Exit::killed());
        let exit = self.init.state().exit().unwrap_or_else(Exit::killed);
        self.init.advance(Action::Delete, State::Deleted(Some(exit)))?;
        self.publish(|events| events.deleted(&self.id, self.pid(), exit));
        tracing::info!(container = self.id, "the container is deleted");
        Ok(Deleted { pid: self.pid(), exit })
    }

    fn exited(&self, exit: Exit) {
        self.init.exited(exit);
        self.pod.note_end(&self.id);
    }

    fn stop_watching(&self) {
        if let Some(watcher) = lock(&self.watcher).take() {
            watcher.abort();
        }
    }

    fn stop_serving(&self) {
        lock(&self.host_sockets).take();
        lock(&self.directories).take();
        lock(&self.volumes).clear();
    }

    fn publish(&self, event: impl FnOnce(&Publisher)) {
        if self.task().is_some() {
            event(&self.events);
        }
    }

    /// Waits for whatever ends the init first, and reports it.
    async fn watch_exit(self: Arc<Self>, placeholder: Option<PlaceholderProcess>) {
        let vm = &self.guest.vm;
        let exit = tokio::select! {
            biased;
            end = self.guest.agent.wait(&self.id) => match end {
                Ok(end) => {
                    self.oom.hear(&end.oom);
                    end.exit
                }
                Err(error) => {
                    self.end_without_status(error).await;
                    Exit::killed()
                }
            },
            exit = vm.exited() => {
                self.log_vm_exit(&exit);
                Exit::killed()
            }
            () = self.killed.overdue(&self.role, &self.pod) => {
                const WHY: &str = "the container has not ended by SIGKILL";
                tracing::error!(container = self.id, "the VM is killed: {WHY}");
                self.events.log().vm_killed(WHY);
                // A process that waits for a slow disk ends only when its data is written.
                self.pod.end_at_last().await;
                Exit::killed()
            }
            never = self.follow(placeholder) => match never {},
        };
        // containerd hears first of the start, and of the processes that ended with the init.
        _ = timeout(EXIT_ORDER, self.init.wait_started()).await;
        self.execs.wait_idle(EXIT_ORDER).await;
        self.exited(exit);
        self.pod.give_back_processors().await;
    }

    /// Ends a VM whose agent is gone. It is of no use, and nobody would hear of its end.
    async fn end_without_status(&self, error: AgentError) {
        if let AgentError::Refused { .. } = error {
            return tracing::error!(container = self.id, error = chain(&error), "there is no exit status");
        }
        match exit_of(&self.guest.vm).await {
            Some(exit) => self.log_vm_exit(&exit),
            None => {
                tracing::error!(container = self.id, error = chain(&error), "the VM is killed");
                self.events.log().vm_killed(&chain(&error));
                self.guest.vm.kill().await;
            }
        }
    }

    /// Logs the end of the VM, once for all containers of a pod.
    fn log_vm_exit(&self, exit: &VmExit) {
        if !matches!(self.role, Role::Member { .. }) {
            tracing::error!(container = self.id, reason = %exit, "the VM ended");
            self.events.log().vm_ended(&exit.to_string());
        }
    }

    /// Kills the container when its placeholder process on the host is killed. Never returns.
    async fn follow(&self, placeholder: Option<PlaceholderProcess>) -> Infallible {
        if let Some(mut placeholder) = placeholder {
            placeholder.ended().await;
            tracing::info!(
                container = self.id,
                pid = placeholder.pid(),
                "the container's process was killed"
            );
            self.kill_at_last().await;
        }
        std::future::pending().await
    }

    /// Sends SIGKILL to the init, as Kill does, and again until the guest has taken it. Nobody else would repeat it:
    /// the process that stood for the container is gone. The end of the container cancels this.
    async fn kill_at_last(&self) {
        let mut pauses = KILL_AGAIN.into_iter();
        let mut pause = Duration::ZERO;
        while let Err(error) = self.kill(SIGKILL, false).await {
            if self.init.state().exit().is_some() {
                return;
            }
            pause = pauses.next().map_or(pause, Duration::from_secs);
            let (again_in, error) = (pause.as_secs(), chain(&error));
            tracing::warn!(container = self.id, error, again_in, "the guest has not taken SIGKILL");
            tokio::time::sleep(pause).await;
        }
    }
}

/// What decides to which services of the host a container may connect.
fn confinement(plan: &CreatePlan) -> Confinement {
    let profile = plan.apparmor.as_ref().map(|policy| policy.profile.clone());
    Confinement { profile, ids: plan.own_ids.clone() }
}
