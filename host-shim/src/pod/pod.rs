//! A pod: the containers in its VM. The Task and the Sandbox service act on the same object.
//!
//! The container that has the pod's own id comes first, and the VM with it. The pod ends when that one is deleted.
//!
//! The order of Create ([`Pod::create`]; steps in brackets are for the first container only):
//!
//! 1. Read the bundle and its spec. \[Make the state directory, the share and the pod's cgroup.\]
//! 2. Put the container's files into the share.
//! 3. \[Start the VM, and send StartSandbox to its agent.\] Add the memory and the vCPUs that the container needs.
//! 4. Spawn the placeholder process of a further container. Run the prestart and createRuntime hooks. Open the streams.
//! 5. Send CreateContainer: the agent makes the cgroup and the init, which makes the root file system and waits.
//!
//! The order of Start ([`Container::start`]):
//!
//! 1. Limit the VM's processor time, if it is a single container (of ctr or docker). Connect the pod's network, once.
//! 2. Send StartContainer: the agent sets the sysctls of the network and lets the init execute its program.
//! 3. Begin to forward ports, once. Run the poststart hooks.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future::join_all;
use protobuf::well_known_types::any::Any;
use tokio::{
    runtime::Handle,
    sync::{OwnedMutexGuard, watch},
    time::timeout,
};

use crate::{
    guest::{
        agent::{SIGKILL, SIGTERM},
        stats,
    },
    host::{
        blocking,
        hooks::{Hooks, POSTSTOP},
        pending_operations::Operation,
    },
    io::events::Publisher,
    pod::{
        container::{Container, Deleted, Environment},
        container_files,
        container_role::Role,
        create_request::{CreatePlan, CreateRequest},
        guest_spec::MovedSources,
        pod_vm::{PodVm, Settings},
    },
    process::{
        error::TaskError,
        process::detached,
        state::{Refusal, Status},
    },
    types::{
        config::Config, error::chain, exit::Exit, lock::lock, log, timeline::Step, traceparent::Traceparent,
    },
};

/// How long Delete waits until a creation that it has cancelled is undone.
const CANCEL: Duration = Duration::from_secs(30);

/// The same if the host shuts down. With what programs and the guest may take then, it is within the time that systemd
/// gives (`service/server.rs`).
const CANCEL_IN_A_HURRY: Duration = Duration::from_secs(8);

/// How long a step on the host may continue after its creation was cancelled. After that the step counts as hung.
const HOST_STEP: Duration = Duration::from_secs(2);

/// A handle to a pod. Clones are the same pod.
#[derive(Debug, Clone)]
pub(crate) struct Pod(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    vm: Arc<PodVm>,
    events: Publisher,
    containers: Mutex<HashMap<String, Entry>>,
    /// Nothing is created any more.
    stopping: AtomicBool,
    /// The host shuts down, and what is left must end within a time.
    is_hurried: AtomicBool,
}

/// A place in the table of containers.
#[derive(Debug, Clone)]
enum Entry {
    Creating(Arc<Creating>),
    Exists(Arc<Container>),
}

/// A creation that is under way.
#[derive(Debug, Default)]
struct Creating {
    cancelled: watch::Sender<bool>,
    done: watch::Sender<bool>,
    /// Locked by the thread that makes something on the host.
    host_step: Arc<tokio::sync::Mutex<()>>,
    /// Whether there may be something on the host to undo.
    may_need_undo: AtomicBool,
    /// Of a container whose creation has come as far as to have any.
    hooks: Mutex<Option<Arc<Hooks>>>,
}

/// A step on the host, until its thread has ended.
#[derive(Debug)]
struct HostStep {
    _operation: Operation,
    _lock: OwnedMutexGuard<()>,
}

impl Creating {
    /// Begins a step on the host for the container `id`.
    async fn begin_step(&self, vm: &PodVm, id: &str) -> HostStep {
        let lock = Arc::clone(&self.host_step).lock_owned().await;
        HostStep { _operation: vm.pending.begin(id), _lock: lock }
    }

    fn cancel(&self) {
        self.cancelled.send_replace(true);
    }

    async fn wait(&self) {
        // The sender is this value's own.
        _ = self.done.subscribe().wait_for(|done| *done).await;
    }
}

impl Pod {
    /// A pod that has nothing yet.
    pub(crate) fn new(settings: Settings, events: Publisher) -> Self {
        let vm = Arc::new(PodVm::new(settings, events.log().clone()));
        Self(Arc::new(Shared {
            vm,
            events,
            containers: Mutex::default(),
            stopping: AtomicBool::new(false),
            is_hurried: AtomicBool::new(false),
        }))
    }

    pub(crate) fn id(&self) -> &str {
        &self.0.vm.settings.id
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.0.vm.settings.namespace
    }

    /// The pod's VM.
    pub(crate) fn vm(&self) -> &Arc<PodVm> {
        &self.0.vm
    }

    /// The container of this id.
    pub(crate) fn container(&self, id: &str) -> Result<Arc<Container>, Refusal> {
        match self.containers().get(id) {
            Some(Entry::Exists(container)) => Ok(Arc::clone(container)),
            Some(Entry::Creating(_)) => Err(Refusal::Creating),
            None => Err(Refusal::NotFound),
        }
    }

    /// All containers that exist.
    pub(crate) fn all(&self) -> Vec<Arc<Container>> {
        let containers = self.containers();
        let exists = |entry: &Entry| match entry {
            Entry::Exists(container) => Some(Arc::clone(container)),
            Entry::Creating(_) => None,
        };
        containers.values().filter_map(exists).collect()
    }

    /// Whether there is no container, and none is being created.
    pub(crate) fn is_empty(&self) -> bool {
        self.containers().is_empty()
    }

    /// All containers but the pod's first.
    pub(crate) fn members(&self) -> Vec<Arc<Container>> {
        self.all().into_iter().filter(|container| !self.0.vm.is_first(&container.id)).collect()
    }

    /// Creates a container. If the same request comes again, because containerd was restarted, returns the container
    /// that exists. If another creation of this id is running, waits for it first. `caller` is the span of containerd
    /// that the request belongs to.
    pub(crate) async fn create_for(
        &self,
        caller: Option<Traceparent>,
        creation: CreateRequest,
    ) -> Result<Arc<Container>, TaskError> {
        let id = creation.id().to_owned();
        let creating = loop {
            if self.0.stopping.load(Ordering::Relaxed) {
                return Err(TaskError::Cancelled);
            }
            match self.entry_or_begin(&id) {
                Ok(creating) => break creating,
                Err(Entry::Creating(creating)) => creating.wait().await,
                Err(Entry::Exists(container)) => {
                    let is_same = container.creation == creation;
                    return match container.init.status() {
                        Status::Created if is_same => Ok(container),
                        _ => Err(Refusal::Exists.into()),
                    };
                }
            }
        };
        let pod = self.clone();
        detached(async move {
            let vm = &pod.0.vm;
            vm.begin_start(&id);
            let step = vm.time(&id, Step::Create).map(|step| step.called_by(caller));
            let created = pod.make_or_undo(creation, &creating).await;
            drop(step);
            match &created {
                Ok(container) => {
                    vm.note_created(&id);
                    pod.report_creation(container);
                    pod.containers().insert(id.clone(), Entry::Exists(Arc::clone(container)));
                }
                Err(_) => {
                    vm.note_not_created(&id);
                    pod.containers().remove(&id);
                }
            }
            creating.done.send_replace(true);
            created
        })
        .await
    }

    /// Takes the place of this id in the table. If it is taken, returns the entry that is there.
    fn entry_or_begin(&self, id: &str) -> Result<Arc<Creating>, Entry> {
        let mut containers = self.containers();
        if let Some(entry) = containers.get(id) {
            return Err(entry.clone());
        }
        let creating = Arc::<Creating>::default();
        containers.insert(id.into(), Entry::Creating(Arc::clone(&creating)));
        Ok(creating)
    }

    fn report_creation(&self, container: &Arc<Container>) {
        tracing::info!(container = container.id, pid = container.pid(), "the container is created");
        if let Some(request) = container.task() {
            self.0.events.created(request, container.pid());
        }
        if container.role == Role::Sandbox {
            let (pod, sandbox) = (self.clone(), Arc::clone(container));
            tokio::spawn(async move {
                sandbox.init.wait().await;
                pod.kill_members().await;
            });
        }
    }

    async fn make_or_undo(
        &self,
        creation: CreateRequest,
        creating: &Creating,
    ) -> Result<Arc<Container>, TaskError> {
        let id = creation.id().to_owned();
        if self.0.vm.pending.contains(&id) {
            // Nothing is begun, so there is nothing to undo.
            return Err(TaskError::Unfinished);
        }
        let mut cancelled = creating.cancelled.subscribe();
        // The cancellation is checked first: Delete then answers that there is no container, and that must be true.
        let made = tokio::select! {
            biased;
            _ = cancelled.wait_for(|cancelled| *cancelled) => Err(TaskError::Cancelled),
            made = self.make(creation, creating) => made,
        };
        if let Err(error) = &made {
            tracing::error!(container = id, error = chain(error), "the container was not created");
            self.0.vm.count_failure(&id, error);
            if let Err(error) = self.undo_creation(&id, creating).await {
                tracing::error!(container = id, error = chain(&error), "the container left something behind");
            }
        }
        made
    }

    /// Creates the container. After an error or a cancellation the caller calls [`Pod::undo_creation`].
    async fn make(&self, creation: CreateRequest, creating: &Creating) -> Result<Arc<Container>, TaskError> {
        let vm = &self.0.vm;
        let is_first = vm.is_first(creation.id());
        if !is_first {
            vm.check_accepts_members()?;
            self.check_sandbox()?;
        }
        let (config, sandbox_files) = (vm.settings.config.clone(), vm.sandbox_files());
        let (namespace, reading) = (vm.settings.namespace.clone(), creation.clone());
        let (budget, exclusive_roots) = (vm.volume_copies.budget.clone(), vm.has_exclusive_roots());
        let read = move || -> Result<_, TaskError> {
            let config = if is_first { Some(Config::load(&config)?) } else { None };
            config.as_ref().map_or(Ok(()), Config::check_files)?;
            let plan = CreatePlan::read(&namespace, &reading, sandbox_files.as_deref(), &budget)?;
            let config = config.map(|config| config.with_annotations(&plan.annotations)).transpose()?;
            let plan = match config.as_ref().map_or(exclusive_roots, |config| config.exclusive_roots) {
                true => plan.with_exclusive_root(reading.bundle())?,
                false => plan,
            };
            Ok((config, plan))
        };
        let step = vm.time(creation.id(), Step::ReadRequest);
        let (config, plan) = blocking::run(read, drop).await??;
        drop(step);
        vm.admit(&plan)?;
        if let Some(config) = config {
            if plan.annotations.contains_key("log_level") {
                log::set_level(config.log_level.into());
            }
            let _timed = vm.time(&plan.id, Step::PrepareHost);
            let step = creating.begin_step(vm, creation.id()).await;
            vm.prepare(config, &plan, creation.bundle(), step).await?;
        }
        creating.may_need_undo.store(true, Ordering::Relaxed);
        let plan = Arc::new(plan);
        let timed = vm.time(&plan.id, Step::MountFiles);
        let step = creating.begin_step(vm, creation.id()).await;
        let moved_sources = self.prepare_files(&creation, &plan, step).await?;
        drop(timed);
        *lock(&creating.hooks) = Some(Arc::clone(&plan.hooks));
        let guest = vm.guest_for(&plan).await?;
        let environment =
            Environment { pod: Arc::clone(vm), guest, events: self.0.events.clone(), moved_sources };
        let _timed = vm.time(&plan.id, Step::CreateContainer);
        Container::create(creation, &plan, environment).await
    }

    /// Puts the container's files into the share. If the caller gives up while a mount source hangs, the thread undoes
    /// its mounts when it continues.
    async fn prepare_files(
        &self,
        creation: &CreateRequest,
        plan: &Arc<CreatePlan>,
        step: HostStep,
    ) -> Result<MovedSources, TaskError> {
        let (state, creation, plan) = (self.0.vm.settings.state_path(), creation.clone(), Arc::clone(plan));
        let (undo_state, id) = (state.clone(), plan.id.clone());
        let (vm, runtime) = (Arc::clone(&self.0.vm), Handle::current());
        let abandoned = move |(made, step): (Result<MovedSources, TaskError>, HostStep)| {
            if made.is_ok()
                && let Err(error) = vm.pod_volumes.undo_container(&undo_state, &id)
            {
                tracing::error!(container = id, error = chain(&error), "the container left something behind");
            }
            // The guest may have seen some of the container's files already.
            runtime.block_on(vm.close_unmounted(&id));
            drop(step);
        };
        let volumes = Arc::clone(&self.0.vm.pod_volumes);
        let prepare = move || (container_files::prepare(&state, &volumes, &plan, &creation), step);
        let (made, _step) = blocking::run(prepare, abandoned).await?;
        made
    }

    /// Refuses a further container if the pod's sandbox container has ended. [`Pod::kill_members`] would not see it.
    fn check_sandbox(&self) -> Result<(), TaskError> {
        match self.container(self.id()) {
            Ok(sandbox) if sandbox.init.state().exit().is_none() => Ok(()),
            _ => Err(TaskError::PodNotRunning { pod_id: self.id().into() }),
        }
    }

    /// Leaves nothing of a container that was not created: for the pod's first container nothing of the pod.
    async fn undo_creation(&self, id: &str, creating: &Creating) -> Result<(), TaskError> {
        // A step that does not hang ends first, so that it does not run while it is undone.
        _ = timeout(HOST_STEP, creating.host_step.lock()).await;
        let vm = &self.0.vm;
        vm.forget(id);
        if vm.is_first(id) {
            vm.kill().await;
        } else {
            vm.give_back_processors().await;
            if creating.may_need_undo.load(Ordering::Relaxed)
                && let Ok(guest) = vm.guest()
            {
                // If only the answer was lost, the guest has the container.
                vm.delete_in_guest(&guest, id).await;
                vm.release_root(&guest, id).await;
            }
        }
        let removed = match vm.is_first(id) || creating.may_need_undo.load(Ordering::Relaxed) {
            true => vm.remove_from_host(id).await,
            false => Ok(()),
        };
        let hooks = lock(&creating.hooks).take();
        if let Some(hooks) = hooks {
            hooks.stopped_within(POSTSTOP).await;
        }
        removed
    }

    /// Deletes a container that does not run. With the pod's first container the pod ends. What fails can be tried
    /// again.
    pub(crate) async fn delete(&self, id: &str) -> Result<Deleted, TaskError> {
        match self.entry_or_begin(id) {
            Ok(reserved) => {
                let (pod, id) = (self.clone(), id.to_owned());
                detached(async move {
                    // Its creation failed, and so did its undoing.
                    let removed = pod.0.vm.remove_from_host(&id).await;
                    pod.containers().remove(&id);
                    reserved.done.send_replace(true);
                    removed.and(Err(Refusal::NotFound.into()))
                })
                .await
            }
            Err(Entry::Creating(creating)) => {
                creating.cancel();
                match timeout(CANCEL, creating.wait()).await {
                    Ok(()) => Err(Refusal::NotFound.into()),
                    Err(_) => Err(TaskError::Timeout {
                        what: "creation of the container",
                        seconds: CANCEL.as_secs(),
                    }),
                }
            }
            Err(Entry::Exists(container)) => {
                let pod = self.clone();
                detached(async move { pod.delete_container(&container).await }).await
            }
        }
    }

    async fn delete_container(&self, container: &Container) -> Result<Deleted, TaskError> {
        // Held until the end: a second Delete at the same time finds nothing, and not a half-deleted container.
        let _operation = container.tear_down().await?;
        if self.0.vm.is_first(&container.id) {
            self.end_vm().await;
        }
        self.0.vm.remove_from_host(&container.id).await?;
        let deleted = container.finish().await?;
        self.remove_entry(&container.id);
        self.0.vm.give_back_processors().await;
        Ok(deleted)
    }

    fn remove_entry(&self, id: &str) {
        self.containers().remove(id);
        self.0.vm.forget(id);
    }

    /// Ends the VM, after the guest has written back its data. The pod's containers wait to be deleted.
    async fn end_vm(&self) {
        self.0.vm.power_off().await;
        join_all(self.all().iter().map(|container| container.release())).await;
    }

    /// Sends SIGTERM to all running programs, as a host does at its shutdown, and waits until they have ended or
    /// `within` has passed. Pause is left out: it holds the namespaces and has no data. Nothing is created any more.
    pub(crate) async fn terminate(&self, within: Duration) {
        self.0.stopping.store(true, Ordering::Relaxed);
        self.0.is_hurried.store(true, Ordering::Relaxed);
        let end = async |container: &Arc<Container>| {
            container.init.wait_started().await;
            if signal_all(container, SIGTERM).await {
                container.init.wait().await;
            }
        };
        let mut all = self.all();
        let runs = |status| matches!(status, Status::Starting | Status::Running);
        all.retain(|container| container.role != Role::Sandbox && runs(container.init.status()));
        let ended =
            async { tokio::join!(self.cancel_creations(|_| true, within), join_all(all.iter().map(end))) };
        if timeout(within, ended).await.is_err() {
            tracing::warn!("not all programs of the pod have ended");
        }
    }

    /// Ends whatever there is, including creations under way, and leaves nothing.
    pub(crate) async fn stop(&self) {
        self.0.stopping.store(true, Ordering::Relaxed);
        let is_hurried = self.0.is_hurried.load(Ordering::Relaxed);
        self.cancel_creations(|_| true, if is_hurried { CANCEL_IN_A_HURRY } else { CANCEL }).await;
        self.end_vm().await;
        if let Err(error) = self.0.vm.remove_from_host(self.id()).await {
            tracing::error!(error = chain(&error), "the pod left something on the host");
        }
        let all = self.all();
        for finished in join_all(all.iter().map(|container| container.finish())).await {
            if let Err(error) = finished {
                tracing::error!(error = chain(&error), "a container did not end");
            }
        }
        self.containers().clear();
    }

    /// Does the same, and then sets `done`, even if the caller gives up waiting. containerd waits for a few seconds
    /// only, and then forgets the shim.
    pub(crate) async fn end_shim(&self, done: &watch::Sender<bool>) {
        let (pod, done) = (self.clone(), done.clone());
        let ended = tokio::spawn(async move {
            pod.stop().await;
            done.send_replace(true);
        });
        if let Err(error) = ended.await {
            tracing::error!(error = chain(&error), "the shim cannot end");
        }
    }

    /// Cancels the creations of the containers with these ids, and waits until they are undone, or for this time.
    async fn cancel_creations(&self, are_wanted: impl Fn(&str) -> bool, within: Duration) {
        let creating = |(id, entry): (&String, &Entry)| match entry {
            Entry::Creating(creating) if are_wanted(id) => Some(Arc::clone(creating)),
            Entry::Creating(_) | Entry::Exists(_) => None,
        };
        let creating: Vec<_> = self.containers().iter().filter_map(creating).collect();
        creating.iter().for_each(|creating| creating.cancel());
        _ = timeout(within, join_all(creating.iter().map(|creating| creating.wait()))).await;
    }

    /// Whether the pod's first container neither exists nor is being created.
    pub(crate) fn has_ended(&self) -> bool {
        !self.containers().contains_key(self.id())
    }

    /// Whether there is nothing that a client could ask for.
    pub(crate) fn is_idle(&self) -> bool {
        self.all().is_empty()
    }

    /// Waits for the end of a container's init.
    pub(crate) async fn wait(&self, id: &str) -> Result<Exit, TaskError> {
        let container = loop {
            let entry = self.containers().get(id).cloned();
            match entry {
                None => return Err(Refusal::NotFound.into()),
                Some(Entry::Creating(creating)) => creating.wait().await,
                Some(Entry::Exists(container)) => break container,
            }
        };
        Ok(container.init.wait().await.ok_or(Refusal::NotFound)?)
    }

    /// Kills the processes of all containers but the pod's first, and cancels creations.
    pub(crate) async fn kill_members(&self) {
        self.cancel_creations(|id| !self.0.vm.is_first(id), CANCEL).await;
        let members = self.members();
        join_all(members.iter().map(|member| signal_all(member, SIGKILL))).await;
    }

    /// What the containers use together. What the VM itself takes of the host is in the pod's cgroup there.
    pub(crate) async fn stats(&self) -> Result<Any, TaskError> {
        let (own, members) = (self.container(self.id())?, self.members());
        // All at once: if the guest does not answer, this takes as long as for one container.
        let members = join_all(members.iter().map(|member| member.usage()));
        let (own, members) = tokio::join!(own.usage(), members);
        let mut used = vec![own?];
        for usage in members {
            match usage {
                Ok(usage) => used.push(usage),
                // A container that has ended uses nothing.
                Err(TaskError::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(stats::metrics(&stats::sum(&used))?)
    }

    fn containers(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        lock(&self.0.containers)
    }
}

/// Signals each process of a container. Returns whether the guest has taken the signal: it does not if the container
/// does not run, which is no error.
async fn signal_all(container: &Container, signal: u32) -> bool {
    match container.kill(signal, true).await {
        Ok(()) => true,
        Err(TaskError::Refused(_)) => false,
        Err(error) => {
            tracing::warn!(container = container.id, error = chain(&error), "cannot signal the container");
            false
        }
    }
}

#[cfg(test)]
mod tests;
