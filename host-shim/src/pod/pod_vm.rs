//! The VM of a pod, and what the pod has on the host (`host_resources`). The VM starts with the
//! pod's first container. All containers of the pod run in it. It ends with the pod.

mod cpu_limits;
mod datagrams;
mod disks;
mod host_reads;
mod host_resources;
mod host_sockets;
mod host_watch;
mod memory_demand;
mod memory_size;
mod network;
mod oom_score;
mod port_forward;
mod single_container_limits;
mod socket_directories;
mod starts;
mod volume_copies;

pub(crate) use cpu_limits::PodLimit;
use disks::Disks;
use host_resources::{HostRequest, HostResources};
pub(crate) use host_sockets::{Connections, HostSockets};
pub(crate) use memory_size::MemoryLimits;
use port_forward::PortForward;
pub(crate) use socket_directories::Mounted as MountedDirectories;
use socket_directories::SocketDirectories;
use starts::Starts;
pub(crate) use volume_copies::{Followed as FollowedVolume, VolumeCopies};

use std::{
    collections::HashMap,
    iter,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use bulkhead_agent_api::agent::JoinedNamespace;
use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
};
use tracing::Instrument;

use crate::{
    guest::clock_sync::{Followed, HostClock},
    host::{
        blocking,
        event_log::EventLog,
        failure_counts,
        journal::{Effect, UndoError},
        pending_operations::PendingOperations,
        pod_volumes::PodVolumes,
        sandbox_files, state_dir,
        undo::UNDO,
    },
    pod::{
        container_role::{Joined, Owner, Role},
        create_request::CreatePlan,
        huge_pages,
    },
    process::{error::TaskError, failure::cause_of, running_guest::Guest},
    types::{
        config::Config, error::chain, event::PodEvent, lock::lock, request_error::RequestError, spec::Cpu,
        timeline::Step,
    },
};

/// How long a guest may take to end what runs in it before its VMM is killed. What it has written is in files of the
/// host.
const POWER_OFF: Duration = Duration::from_secs(5);
/// The same if it writes to disks: then it has data that nobody else has.
const POWER_OFF_WITH_DISKS: Duration = Duration::from_secs(60);

/// For how many containers a guest is asked again at the same time.
const MOST_ASKED_AGAIN: usize = 16;

/// The pauses before a guest is asked again to give something back. The last one repeats until the guest ends: a server
/// of NFS that a process waits for may answer after a day.
fn ask_again() -> impl Iterator<Item = Duration> {
    [1, 5, 15, 60, 300].into_iter().chain(iter::repeat(900)).map(Duration::from_secs)
}

/// Where a pod is: its names, and the paths of its host.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The address of the containerd that the pod belongs to.
    pub(crate) containerd: String,
    pub(crate) namespace: String,
    pub(crate) id: String,
    /// [`state_dir::STATE_ROOT`].
    pub(crate) state_root: PathBuf,
    /// [`crate::types::config::CONFIG_PATH`].
    pub(crate) config: PathBuf,
    /// This program.
    pub(crate) shim: PathBuf,
    /// The socket on which it serves.
    pub(crate) socket: Option<PathBuf>,
}

impl Settings {
    /// The pod's state directory.
    pub(crate) fn state_path(&self) -> PathBuf {
        state_dir::path_of(&self.state_root, &self.containerd, &self.namespace, &self.id)
    }
}

/// The VM of a pod, before, while and after it runs.
#[derive(Debug)]
pub(crate) struct PodVm {
    pub(crate) settings: Settings,
    /// Locked while the VM is started, connected or ended.
    host: tokio::sync::Mutex<Option<HostResources>>,
    running: Mutex<Option<Running>>,
    /// The end of the guest that was begun.
    end: Mutex<Option<Shared<BoxFuture<'static, ()>>>>,
    /// Operations on the host whose requests may have given them up.
    pub(crate) pending: PendingOperations,
    /// Places for containers that the guest is asked again to delete.
    asked_again: Arc<Semaphore>,
    /// Those of its containers to services of the host.
    pub(crate) host_connections: Connections,
    pub(crate) socket_directories: SocketDirectories,
    disks: Disks,
    pub(crate) volume_copies: VolumeCopies,
    /// Directories of the host that its containers have in common.
    pub(crate) pod_volumes: Arc<PodVolumes>,
    containers: Mutex<HashMap<String, Registered>>,
    /// The huge pages of a pod of Kubernetes, bytes. Those of its containers are a part of them.
    huge_pages: AtomicU64,
    /// What the configuration says of the roots of its containers.
    exclusive_roots: AtomicBool,
    /// Tells when containers come and go, or their memory limits change.
    limits_changed: watch::Sender<()>,
    starts: Starts,
    /// What happens to the pod.
    events: EventLog,
}

#[derive(Debug)]
struct Running {
    guest: Guest,
    /// The role of the pod's first container.
    role: Role,
    /// The guest's clock follows the host's while this exists.
    _clock: Followed,
    /// The VM grows on demand while this exists.
    _growth: JoinSet<()>,
    /// The pod follows changes of its host while this exists.
    _host_changes: JoinSet<()>,
}

/// A container that is being created or exists.
#[derive(Debug)]
struct Registered {
    /// Bytes that it may use.
    memory_limit: Option<u64>,
    /// Bytes of huge pages that it may use.
    huge_pages: u64,
    /// Its limits of processor time. None for a sandbox container, which uses none.
    cpu: Option<Cpu>,
    /// The pid that containerd got for it.
    pid: Option<u32>,
    /// Its `process.oomScoreAdj`. None: it has ended.
    oom_score_adj: Option<i32>,
}

impl PodVm {
    /// A pod that has nothing yet.
    pub(crate) fn new(settings: Settings, events: EventLog) -> Self {
        let host_connections = Connections::default();
        Self {
            settings,
            host: Default::default(),
            running: Mutex::default(),
            end: Mutex::default(),
            pending: PendingOperations::default(),
            asked_again: Arc::new(Semaphore::new(MOST_ASKED_AGAIN)),
            socket_directories: SocketDirectories::new(&host_connections),
            host_connections,
            disks: Disks::default(),
            volume_copies: VolumeCopies::default(),
            pod_volumes: Arc::default(),
            containers: Mutex::default(),
            huge_pages: AtomicU64::default(),
            exclusive_roots: AtomicBool::default(),
            limits_changed: watch::Sender::default(),
            starts: Starts::default(),
            events,
        }
    }

    /// Whether `id` is the pod's own id, and so that of its first container.
    pub(crate) fn is_first(&self, id: &str) -> bool {
        id == self.settings.id
    }

    /// Whether nobody but the pod's containers changes their roots, as the configuration says. Known when the host is
    /// prepared.
    pub(crate) fn has_exclusive_roots(&self) -> bool {
        self.exclusive_roots.load(Ordering::Relaxed)
    }

    /// Records that a container could not be created or started, and counts it for the host.
    pub(crate) fn count_failure(&self, id: &str, error: &TaskError) {
        let Some(cause) = cause_of(error) else { return };
        self.events.record(PodEvent::ContainerFailed { container: id.into(), cause });
        failure_counts::count(&self.settings.state_root, cause);
    }

    /// The guest, while it runs.
    pub(crate) fn guest(&self) -> Result<Guest, TaskError> {
        match &*lock(&self.running) {
            Some(running) => Ok(running.guest.clone()),
            None => Err(TaskError::PodNotRunning { pod_id: self.settings.id.clone() }),
        }
    }

    /// Refuses a container that does not belong to this pod, or that is to run on processors that the host lacks.
    pub(crate) fn admit(&self, plan: &CreatePlan) -> Result<(), TaskError> {
        self.check_cpu(&plan.resources.cpu)?;
        if let Some(mount) = plan.hugetlbfs.as_ref().filter(|_| self.huge_pages() == 0) {
            return Err(huge_pages::none_in_pod(mount).into());
        }
        let pod_id = || self.settings.id.clone();
        match (&plan.role, self.is_first(&plan.id)) {
            (Role::Single | Role::Sandbox, true) => Ok(()),
            (Role::Member { sandbox_id }, true) => {
                Err(TaskError::PodNotRunning { pod_id: sandbox_id.clone() })
            }
            (Role::Member { sandbox_id }, false) if *sandbox_id == pod_id() => Ok(()),
            (_, false) => Err(TaskError::OtherPod { pod_id: pod_id() }),
        }
    }

    /// Refuses a further container unless the pod's first container is a sandbox. Any client can write annotations, so
    /// they alone must not give access to another client's container.
    pub(crate) fn check_accepts_members(&self) -> Result<(), TaskError> {
        let pod_id = || self.settings.id.clone();
        match &*lock(&self.running) {
            Some(Running { role: Role::Sandbox, .. }) => Ok(()),
            Some(_) => Err(TaskError::NoPod { pod_id: pod_id() }),
            None => Err(TaskError::PodNotRunning { pod_id: pod_id() }),
        }
    }

    /// Makes what the host needs for the VM, or nothing. `bundle` is that of the pod's first container.
    /// `step` is dropped when nothing more is done, even if the caller gives up waiting.
    pub(crate) async fn prepare(
        &self,
        config: Config,
        plan: &CreatePlan,
        bundle: &Path,
        step: impl Send + 'static,
    ) -> Result<(), TaskError> {
        let mut host = self.host.lock().await;
        self.exclusive_roots.store(config.exclusive_roots, Ordering::Relaxed);
        if !config.directory_sockets {
            self.socket_directories.turn_off();
        }
        let path = self.settings.state_path();
        let bundle = Effect::Bundle { path: bundle.to_owned() };
        let socket = self.settings.socket.clone().map(|path| Effect::ShimSocket { path });
        let wanted = HostRequest {
            netns: plan.netns.clone(),
            cgroup: plan.cgroup.clone(),
            // Those of a pod are set by kubelet, on the cgroup above.
            resources: (plan.role == Role::Single).then(|| plan.resources.clone()),
            pod_cpu_limit: plan.pod_cpu_limit,
            rootfs: plan.rootfs.clone(),
            pending: (self.pending.clone(), self.settings.id.clone()),
            owners: socket.into_iter().chain([bundle]).collect(),
            timeline: self.starts.first.clone(),
            events: self.events.clone(),
        };
        let prepared = blocking::run(
            move || (HostResources::prepare(&path, &config, &wanted), step),
            |(prepared, step)| {
                drop(prepared.map(HostResources::remove_logged));
                drop(step);
            },
        );
        let (prepared, _step) = prepared.await?;
        let prepared = prepared?;
        // The request for a pod may have its limit too.
        let asked = plan.resources.huge_pages().filter(|_| plan.role == Role::Sandbox);
        self.huge_pages.store(prepared.huge_pages.max(asked.unwrap_or(0)), Ordering::Relaxed);
        *host = Some(prepared);
        Ok(())
    }

    /// The guest, with memory for the container of this plan: the one that runs, or for the pod's first container a new
    /// one.
    pub(crate) async fn guest_for(self: &Arc<Self>, plan: &CreatePlan) -> Result<Guest, TaskError> {
        self.register(plan);
        let guest = if self.is_first(&plan.id) {
            self.start(plan).await?
        } else {
            let guest = self.guest()?;
            let _step = self.time(&plan.id, Step::FitMemory);
            guest.run(self.grow_memory(&guest)).await?;
            guest
        };
        self.follow_oom_scores();
        let _step = self.time(&plan.id, Step::FitProcessors);
        guest.run(self.grow_processors(&guest, PodLimit::Apply)).await?;
        Ok(guest)
    }

    /// Starts the VM.
    async fn start(self: &Arc<Self>, plan: &CreatePlan) -> Result<Guest, TaskError> {
        let mut host = self.host.lock().await;
        let pod_id = || self.settings.id.clone();
        let host = host.as_mut().ok_or_else(|| TaskError::PodNotRunning { pod_id: pod_id() })?;
        let clock = HostClock::watch();
        let guest = host.start_vm(plan, self.memory_needs()).await?;
        oom_score::set(guest.vm.process(), plan.oom_score_adj);
        let clock = clock.follow(guest.agent.clone());
        let (growth, host_changes) = (self.grow_on_demand(&guest), self.follow_host(&guest));
        let role = plan.role.clone();
        let running = Running {
            guest: guest.clone(),
            role,
            _clock: clock,
            _growth: growth,
            _host_changes: host_changes,
        };
        *lock(&self.running) = Some(running);
        self.events.record(PodEvent::VmUp { vm: self.starts.first.record().vm });
        Ok(guest)
    }

    /// Forwards connections to the loopback interface of a pod's network namespace that has a path. Does nothing if it
    /// does so already. `id` is a container that has started and is in that namespace.
    pub(crate) async fn forward_ports(&self, guest: &Guest, id: &str) {
        if let Some(host) = self.host.lock().await.as_mut()
            && host.netns.is_some()
            && host.port_forward.is_none()
        {
            host.port_forward = Some(PortForward::start(guest.clone(), id.to_owned()));
        }
    }

    /// Ends the VM at once, so that all containers end.
    pub(crate) async fn kill(&self) {
        let guest = lock(&self.running).as_ref().map(|running| running.guest.clone());
        if let Some(guest) = guest {
            guest.vm.kill().await;
        }
    }

    /// Ends the guest, so that its data is written back, and then its VM. All callers wait for the same end, which goes
    /// on if they give up waiting.
    pub(crate) async fn power_off(&self) {
        let end = {
            let mut end = lock(&self.end);
            if let Some(Running { guest, .. }) = lock(&self.running).take() {
                let within = if self.may_have_dirty_disks() { POWER_OFF_WITH_DISKS } else { POWER_OFF };
                let ended = async move {
                    guest.power_off(within).await;
                    guest.vm.kill().await;
                };
                let task = tokio::spawn(ended.in_current_span());
                *end = Some(task.map(drop).boxed().shared());
            }
            end.clone()
        };
        if let Some(end) = end {
            end.await;
        }
    }

    /// If the guest is being ended, waits until it has ended, and returns true.
    pub(crate) async fn has_ended_in_order(&self) -> bool {
        let end = lock(&self.end).clone();
        let Some(end) = end else { return false };
        end.await;
        true
    }

    /// Ends the VM although a process in it does not end. Data for a disk gets a last chance to be written.
    pub(crate) async fn end_at_last(&self) {
        if self.may_have_dirty_disks() {
            self.power_off().await;
        } else {
            self.kill().await;
        }
    }

    /// Whether the guest may have data that it has not written to a disk yet.
    pub(crate) fn may_have_dirty_disks(&self) -> bool {
        self.disks.may_be_dirty()
    }

    /// Leaves nothing of the container `id` on the host: with the pod's first container nothing of the pod, the VM
    /// first. What fails is tried again by the next call. It is no error if nothing is left.
    pub(crate) async fn remove_from_host(&self, id: &str) -> Result<(), TaskError> {
        if self.is_first(id) { self.remove().await } else { self.undo_container(id).await }
    }

    async fn remove(&self) -> Result<(), TaskError> {
        lock(&self.running).take();
        let host = self.host.lock().await.take();
        // All of them are undone with the pod.
        self.pod_volumes.forget();
        let path = self.settings.state_path();
        let removed = self.undo(&self.settings.id, move || match host {
            Some(host) => host.remove(),
            None => state_dir::clean_own(&path).map(drop),
        });
        match removed.await {
            // Nothing of the pod runs any more, and another try would not do more.
            Err(TaskError::Undo(hangs @ UndoError::VmmHangs { .. })) => {
                tracing::error!("{hangs}");
                Ok(())
            }
            other => other,
        }
    }

    async fn undo_container(&self, id: &str) -> Result<(), TaskError> {
        let (state, container) = (self.settings.state_path(), id.to_owned());
        let volumes = Arc::clone(&self.pod_volumes);
        self.undo(id, move || volumes.undo_container(&state, &container)).await?;
        self.close_unmounted(id).await;
        Ok(())
    }

    /// Has the VMM close the files of the container `id`, which were unmounted. Otherwise the guest could keep the
    /// container's file systems busy on the host. The VM of the pod's first container ends instead.
    pub(super) async fn close_unmounted(&self, id: &str) {
        if !self.is_first(id)
            && let Ok(guest) = self.guest()
            && !guest.vm.has_exited()
            && let Err(error) = guest.vm.control().close_unmounted().await
        {
            tracing::debug!(container = id, error = chain(&error), "the VMM may keep files open");
        }
    }

    /// Undoes something that the container `id` has on the host, within a time. If an earlier undo hangs, no second one
    /// begins.
    pub(super) async fn undo(
        &self,
        id: &str,
        work: impl FnOnce() -> Result<(), UndoError> + Send + 'static,
    ) -> Result<(), TaskError> {
        let undone = async {
            let undo = self.pending.begin_undo(id).await;
            let work = move || {
                let undone = work();
                drop(undo);
                undone
            };
            blocking::run_undo(work).await
        };
        match tokio::time::timeout(UNDO, undone).await {
            Ok(done) => Ok(done??),
            Err(_) => Err(TaskError::Timeout { what: "cleanup of the host", seconds: UNDO.as_secs() }),
        }
    }

    /// Has the guest delete a container. If it does not do that now, it is asked again later: the container would keep
    /// its memory and its files in the guest until the pod ends.
    pub(crate) async fn delete_in_guest(self: &Arc<Self>, guest: &Guest, id: &str) {
        if guest.try_delete(id).await {
            return;
        }
        let Ok(place) = Arc::clone(&self.asked_again).try_acquire_owned() else {
            return tracing::error!(container = id, "the guest keeps too many containers, and this one too");
        };
        let (pod, guest, id) = (Arc::clone(self), guest.clone(), id.to_owned());
        tokio::spawn(async move {
            let _place = place;
            for pause in ask_again() {
                tokio::time::sleep(pause).await;
                // Another one of this id: the guest has it only after the old one is deleted.
                if pod.is_registered(&id) {
                    continue;
                }
                if guest.try_delete(&id).await {
                    return;
                }
            }
        });
    }

    /// Where the pod's files for its containers are, if the shim made them.
    pub(crate) fn sandbox_files(&self) -> Option<PathBuf> {
        let state = self.settings.state_path();
        sandbox_files::are_made(&state).then_some(state)
    }

    /// Records a container that is being created.
    fn register(&self, plan: &CreatePlan) {
        let cpu = (plan.role != Role::Sandbox).then(|| plan.resources.cpu.clone());
        let oom_score_adj = Some(plan.oom_score_adj);
        // The huge pages of a sandbox container are those of the pod.
        let own = plan.resources.huge_pages().filter(|_| plan.role != Role::Sandbox);
        let (memory_limit, huge_pages) = (plan.memory_limit, own.unwrap_or(0));
        let registered = Registered { memory_limit, huge_pages, cpu, pid: None, oom_score_adj };
        lock(&self.containers).insert(plan.id.clone(), registered);
        self.limits_changed.send_replace(());
    }

    fn is_registered(&self, id: &str) -> bool {
        lock(&self.containers).contains_key(id)
    }

    /// Notes the pid of a container, by which others name its namespaces.
    pub(crate) fn register_pid(&self, id: &str, pid: u32) {
        if let Some(registered) = lock(&self.containers).get_mut(id) {
            registered.pid = Some(pid);
        }
    }

    /// The container has ended: its namespaces can no longer be joined, and it uses no processors. The pod's first
    /// container keeps its limits until the VM ends: a guest that lies about its end gets no more processors.
    pub(crate) fn note_end(&self, id: &str) {
        if let Some(registered) = lock(&self.containers).get_mut(id) {
            registered.pid = None;
            registered.oom_score_adj = None;
            registered.cpu.take_if(|_| !self.is_first(id));
        }
        self.limits_changed.send_replace(());
        self.follow_oom_scores();
    }

    /// The container is no more.
    pub(crate) fn forget(&self, id: &str) {
        lock(&self.containers).remove(id);
        self.limits_changed.send_replace(());
    }

    /// Finds the containers whose namespaces are to be joined. The spec names most by the pid that containerd got.
    pub(crate) fn resolve(&self, joined: &[Joined]) -> Result<Vec<JoinedNamespace>, TaskError> {
        let containers = lock(&self.containers);
        let resolve = |joined: &Joined| {
            let mut namespace = JoinedNamespace::new();
            namespace.kind = joined.kind.into();
            namespace.container_id = match &joined.of {
                Owner::Sandbox(id) => id.clone(),
                Owner::Pid(pid) => {
                    let found = containers.iter().find(|(_, registered)| registered.pid == Some(*pid));
                    let foreign = RequestError::ForeignNamespace { kind: joined.kind, pid: *pid };
                    found.ok_or(foreign)?.0.clone()
                }
            };
            Ok(namespace)
        };
        joined.iter().map(resolve).collect()
    }
}
