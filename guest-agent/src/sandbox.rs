//! The pod: what the guest is told about itself, and its containers.

mod directory_sockets;
mod volume_files;
mod volumes;

pub use volume_files::{Entry as VolumeEntry, Kind as VolumeEntryKind};
pub use volumes::Volume;

use std::{
    collections::{HashMap, hash_map::Entry},
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bulkhead_agent_api::{API_VERSION, ROOTS_DIR, SHARE_DIR, SHM_DIR};
use nix::{
    mount::{MsFlags, mount},
    sys::utsname::uname,
    unistd::sethostname,
};

use crate::{
    clock::Correction,
    container::{Container, ContainerError, Environment, ExecRequest, Joined, Request},
    disks::FileSystem,
    host_sockets::{Peer, in_directories::DirectorySockets},
    machine::Machine,
    network::loopback::Port,
    shutdown, spec, syscall,
};

/// How long it may take to write back what containers have changed.
const WRITE_BACK: Duration = Duration::from_secs(3);

/// Minimum of entropy for StartSandbox, bytes.
const MIN_ENTROPY: usize = 32;

/// Why a request about the pod or one of its containers failed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Another release on the other side.
    #[error(
        "the caller speaks version {theirs} of the agent's interface, this agent version {API_VERSION}: shim and guest \
         image must come from one release"
    )]
    Version {
        /// The caller's.
        theirs: u32,
    },
    /// StartSandbox must come first.
    #[error("the sandbox is not started")]
    NotStarted,
    /// StartSandbox comes once.
    #[error("the sandbox has been started already")]
    AlreadyStarted,
    /// Too little entropy.
    #[error("StartSandbox needs at least {MIN_ENTROPY} bytes of entropy, not {0}")]
    Entropy(usize),
    /// The guest's kernel refused.
    #[error("{action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The VMM has attached no such disk.
    #[error(transparent)]
    NoDisk(io::Error),
    /// No such container.
    #[error("container {0} does not exist")]
    NoContainer(String),
    /// There is one of this id.
    #[error("container {0} already exists")]
    Exists(String),
    /// It is still being created.
    #[error("container {0} is being created")]
    BeingCreated(String),
    /// A later call waits instead.
    #[error("a later call waits for the same")]
    Superseded,
    /// The guest's kernel does not take a policy.
    #[error(
        "process.apparmorProfile {profile:?}: the policy cannot be loaded into the guest's kernel: {source}"
    )]
    AppArmor {
        /// The profile that was wanted.
        profile: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The agent does not listen there.
    #[error("there is no socket of the host with the number {0}")]
    NoHostSocket(u32),
    /// About one container.
    #[error(transparent)]
    Container(#[from] ContainerError),
}

/// What StartSandbox tells the guest.
pub struct Identity {
    /// Version of the interface that the caller speaks.
    pub api_version: u32,
    /// The pod's id, which is only logged.
    pub sandbox_id: String,
    /// Empty: the kernel's.
    pub hostname: String,
    /// Wall clock, nanoseconds since 1970.
    pub clock_unix_ns: i64,
    /// From the host's random generator.
    pub entropy: Vec<u8>,
    /// virtio-fs tag; empty: no share.
    pub share_tag: String,
    /// virtio-fs tag of the exclusive share; empty: none.
    pub roots_tag: String,
    /// Kernel parameters of the host, by their names below /proc/sys.
    pub kernel_parameters: HashMap<String, String>,
    /// Processes and threads that the host allows the pod; 0: it has no limit.
    pub tasks: u64,
}

/// The pod.
pub struct Sandbox {
    environment: Environment,
    machine: Arc<dyn Machine>,
    state: Mutex<State>,
    /// The bytes that volumes take whose files the agent has written. Locked by whoever writes some, in the order in
    /// which the shim has asked.
    written: Arc<tokio::sync::Mutex<HashMap<String, u64>>>,
    directory_sockets: DirectorySockets,
    /// Locked while dirty data are written back.
    writing_back: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Default)]
struct State {
    is_started: bool,
    containers: HashMap<String, Slot>,
}

enum Slot {
    /// The id is taken. A container that is deleted while it is created is not wanted any more.
    Creating {
        is_wanted: bool,
    },
    Present(Arc<Container>),
}

impl Sandbox {
    /// A pod without containers that waits for [`Sandbox::start`].
    pub fn new(environment: Environment, machine: impl Machine + 'static) -> Self {
        Self {
            environment,
            machine: Arc::new(machine),
            state: Mutex::default(),
            written: Arc::default(),
            directory_sockets: DirectorySockets::default(),
            writing_back: Arc::default(),
        }
    }

    /// Gives the guest its identity, its clock, its entropy and the pod's share. Returns `uname -r`.
    pub fn start(&self, identity: &Identity) -> Result<String, SandboxError> {
        if identity.api_version != API_VERSION {
            return Err(SandboxError::Version { theirs: identity.api_version });
        }
        if identity.entropy.len() < MIN_ENTROPY {
            return Err(SandboxError::Entropy(identity.entropy.len()));
        }
        let mut state = self.lock();
        if state.is_started {
            return Err(SandboxError::AlreadyStarted);
        }
        let release = take_identity(&*self.machine, identity)?;
        let tasks = (identity.tasks > 0).then_some(identity.tasks);
        self.environment
            .reserve
            .follow_host(&identity.kernel_parameters, tasks)
            .map_err(|source| SandboxError::Io { action: "limiting the pod as on the host", source })?;
        state.is_started = true;
        eprintln!("bulkhead-agent: sandbox {} started", identity.sandbox_id);
        Ok(release)
    }

    /// Sets the limits that follow from the guest's memory, which has another size: `added_mib` more than it began
    /// with. The kernel may have to bring memory online first, or to reclaim some.
    pub async fn follow_memory(&self, added_mib: u32) -> Result<(), SandboxError> {
        let reserve = Arc::clone(&self.environment.reserve);
        let late = |source| SandboxError::Io { action: "waiting for the memory that was added", source };
        let online = reserve.wait_online(added_mib).await.map_err(late);
        // Also if memory is late: the guest may have less than before, and its limits must not be above that.
        let scaled = tokio::task::spawn_blocking(move || reserve.scale_to_memory()).await;
        let failed = |source| SandboxError::Io { action: "setting limits that go by the memory", source };
        scaled.map_err(io::Error::other).and_then(|scaled| scaled).map_err(failed)?;
        online
    }

    /// Waits until the containers need more memory than the guest has, see
    /// [`crate::guest_reserve::Reserve::wait_demand`].
    pub async fn wait_memory_demand(&self, can_grow: bool) -> Result<(), SandboxError> {
        drop(self.started()?);
        let failed = |source| SandboxError::Io { action: "watching the containers' memory", source };
        match self.environment.reserve.wait_demand(can_grow).await.map_err(failed)? {
            true => Ok(()),
            false => Err(SandboxError::Superseded),
        }
    }

    /// Changes limits of a container, see [`Container::update`].
    pub async fn update(
        &self,
        container_id: &str,
        number: u64,
        resources_json: &[u8],
    ) -> Result<(), SandboxError> {
        let container = self.container(container_id)?;
        Ok(container.update(&self.environment.reserve, number, resources_json).await?)
    }

    /// Undoes such a change, see [`Container::undo_update`].
    pub async fn undo_update(&self, container_id: &str, number: u64) -> Result<(), SandboxError> {
        Ok(self.container(container_id)?.undo_update(&self.environment.reserve, number).await?)
    }

    /// Connects a stream to a loopback interface, see [`Container::connect_loopback`].
    pub async fn connect_loopback(
        &self,
        container_id: &str,
        port: Port,
        stream: u32,
    ) -> Result<(), SandboxError> {
        Ok(self.container(container_id)?.connect_loopback(&self.environment, port, stream).await?)
    }

    /// Waits for a connection to a service of the host, see [`Container::accept_host_socket`].
    pub async fn accept_host_socket(
        &self,
        container_id: &str,
        index: u32,
        stream: u32,
    ) -> Result<Peer, SandboxError> {
        let container = self.container(container_id)?;
        Ok(container.accept_host_socket(&self.environment, index, stream).await?)
    }

    /// Serves docker's name server in a container's network namespace, see [`Container::serve_name_server`].
    pub async fn serve_name_server(&self, container_id: &str, stream: u32) -> Result<(), SandboxError> {
        Ok(self.container(container_id)?.serve_name_server(&self.environment, stream).await?)
    }

    /// Corrects the guest's clock.
    pub fn adjust_clock(&self, correction: Correction) -> Result<(), SandboxError> {
        let action = "correcting the clock";
        self.machine.adjust_clock(correction).map_err(|source| SandboxError::Io { action, source })
    }

    /// Brings the first `count` processors online and the others offline. Returns how many are online.
    pub async fn set_processors(&self, count: u32) -> Result<u32, SandboxError> {
        drop(self.started()?);
        let machine = Arc::clone(&self.machine);
        let set = tokio::task::spawn_blocking(move || machine.set_processors(count)).await;
        let online = set
            .map_err(io::Error::other)
            .and_then(|online| online)
            .map_err(|source| SandboxError::Io { action: "bringing processors online", source })?;
        for container in self.present()? {
            let id = container.id().to_owned();
            if let Err(error) = container.spread_network().await {
                eprintln!("bulkhead-agent: the network cards of {id} use the processors of before: {error}");
            }
        }
        Ok(online)
    }

    /// The containers that exist.
    fn present(&self) -> Result<Vec<Arc<Container>>, SandboxError> {
        let slots = &self.started()?.containers;
        let present = slots.values().filter_map(|slot| match slot {
            Slot::Present(container) => Some(Arc::clone(container)),
            Slot::Creating { .. } => None,
        });
        Ok(present.collect())
    }

    /// The major and the minor number of the disk with this serial number that the VMM has attached.
    pub async fn find_disk(&self, serial: String) -> Result<(u32, u32), SandboxError> {
        self.with_disks("finding a disk", move |machine| machine.find_disk(&serial)).await
    }

    /// Mounts the file system of such a disk.
    pub async fn mount_disk(&self, wanted: FileSystem) -> Result<(), SandboxError> {
        self.with_disks("mounting a disk", move |machine| machine.mount_disk(&wanted)).await
    }

    /// Unmounts it, and waits until nobody uses the disk.
    pub async fn unmount_disk(&self, serial: String) -> Result<(), SandboxError> {
        self.with_disks("unmounting a disk", move |machine| machine.unmount_disk(&serial)).await
    }

    /// Forgets a disk that the VMM has taken away.
    pub async fn remove_disk(&self, serial: String) -> Result<(), SandboxError> {
        self.with_disks("removing a disk", move |machine| machine.remove_disk(&serial)).await
    }

    async fn with_disks<T: Send + 'static>(
        &self,
        action: &'static str,
        work: impl FnOnce(&dyn Machine) -> io::Result<T> + Send + 'static,
    ) -> Result<T, SandboxError> {
        drop(self.started()?);
        let machine = Arc::clone(&self.machine);
        let done = tokio::task::spawn_blocking(move || work(&*machine)).await;
        done.map_err(io::Error::other).and_then(|done| done).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => SandboxError::NoDisk(source),
            _ => SandboxError::Io { action, source },
        })
    }

    /// Loads a binary policy of AppArmor, for this profile in it, into the guest's kernel.
    pub async fn load_apparmor_policy(&self, profile: String, policy: Vec<u8>) -> Result<(), SandboxError> {
        drop(self.started()?);
        let machine = Arc::clone(&self.machine);
        let loaded = tokio::task::spawn_blocking(move || machine.load_apparmor_policy(&policy)).await;
        loaded
            .map_err(io::Error::other)
            .and_then(|loaded| loaded)
            .map_err(|source| SandboxError::AppArmor { profile, source })
    }

    /// The namespace of another container that a new one joins. `kind` is the runtime-spec's name for it.
    pub fn join(&self, kind: &str, container_id: &str) -> Result<Joined, SandboxError> {
        let namespaces = spec::shared_namespace(kind).map_err(ContainerError::from)?;
        Ok(Joined { container: self.container(container_id)?, namespaces })
    }

    /// Makes a volume in memory, unless there is one of this name.
    pub fn make_volume(&self, volume: &Volume) -> Result<(), SandboxError> {
        let _one_at_a_time = self.started()?;
        volume.make().map_err(|source| SandboxError::Io { action: "making a volume in memory", source })
    }

    /// Brings the files of a volume in memory to these. Containers have that much less memory: the agent's own is
    /// charged to nobody.
    pub async fn write_volume(&self, name: String, entries: Vec<VolumeEntry>) -> Result<(), SandboxError> {
        drop(self.started()?);
        let mut written = Arc::clone(&self.written).lock_owned().await;
        let reserve = Arc::clone(&self.environment.reserve);
        let write = move || {
            let done = volumes::write(&name, &entries);
            // Also after a failure: what it has left takes memory too.
            let held = volumes::size(&name).and_then(|bytes| {
                written.insert(name, bytes);
                reserve.hold(written.values().sum())
            });
            done.and(held)
        };
        let done = tokio::task::spawn_blocking(write).await;
        done.map_err(io::Error::other)
            .and_then(|done| done)
            .map_err(|source| SandboxError::Io { action: "writing the files of a volume", source })
    }

    /// Creates a container. Returns the process id of its init.
    pub async fn create(&self, request: Request) -> Result<i32, SandboxError> {
        drop(self.started()?);
        let id = request.id.clone();
        if request.is_pause {
            mount_shm()
                .map_err(|source| SandboxError::Io { action: "mounting the pod's /dev/shm", source })?;
        }
        {
            let mut state = self.started()?;
            match state.containers.entry(id.clone()) {
                Entry::Vacant(slot) => slot.insert(Slot::Creating { is_wanted: true }),
                Entry::Occupied(_) => return Err(SandboxError::Exists(id)),
            };
        }
        let created = Container::create(&self.environment, request).await;
        let (pid, is_wanted) = self.fill_slot(&id, created)?;
        if !is_wanted {
            self.delete(&id).await?;
            return Err(SandboxError::NoContainer(id));
        }
        eprintln!("bulkhead-agent: container {id} created, pid {pid}");
        Ok(pid)
    }

    /// Puts a created container in its place in the table. If the creation failed, frees the place. Returns the process
    /// id of the init, and whether the container is still wanted.
    fn fill_slot(
        &self,
        id: &str,
        created: Result<Container, ContainerError>,
    ) -> Result<(i32, bool), SandboxError> {
        let mut state = self.lock();
        let slot = state.containers.remove(id);
        let container = created?;
        let pid = container.pid();
        state.containers.insert(id.to_owned(), Slot::Present(Arc::new(container)));
        Ok((pid, !matches!(slot, Some(Slot::Creating { is_wanted: false }))))
    }

    /// The container of this id.
    pub fn container(&self, id: &str) -> Result<Arc<Container>, SandboxError> {
        match self.started()?.containers.get(id) {
            Some(Slot::Present(container)) => Ok(Arc::clone(container)),
            Some(Slot::Creating { .. }) => Err(SandboxError::BeingCreated(id.to_owned())),
            None => Err(SandboxError::NoContainer(id.to_owned())),
        }
    }

    /// Runs a process in a container. Returns its process id.
    pub async fn exec(&self, container_id: &str, request: ExecRequest) -> Result<i32, SandboxError> {
        Ok(self.container(container_id)?.exec(&self.environment, request).await?)
    }

    /// Deletes a container. One that is still being created is deleted afterwards. The caller gets an error and tries
    /// again, because nobody would learn if the later deletion failed.
    pub async fn delete(&self, id: &str) -> Result<(), SandboxError> {
        if let Some(Slot::Creating { is_wanted }) = self.started()?.containers.get_mut(id) {
            *is_wanted = false;
            return Err(SandboxError::BeingCreated(id.to_owned()));
        }
        let container = self.container(id)?;
        // The caches of the last one go with the guest.
        if self.lock().containers.len() > 1 {
            container.kill_and_reclaim().await?;
        }
        container.delete().await?;
        self.free_slot(id, &container);
        eprintln!("bulkhead-agent: container {id} deleted");
        Ok(())
    }

    /// Removes a deleted container from the table, unless another request has done so: a later container may have its
    /// id by now.
    fn free_slot(&self, id: &str, deleted: &Arc<Container>) {
        let mut state = self.lock();
        let is_it = |slot: &Slot| matches!(slot, Slot::Present(present) if Arc::ptr_eq(present, deleted));
        if state.containers.get(id).is_some_and(is_it) {
            state.containers.remove(id);
        }
    }

    /// Kills what runs, and writes back what is dirty: nothing is lost if the guest ends now.
    pub async fn shut_down(&self) {
        eprintln!("bulkhead-agent: shutting down");
        shutdown::kill_all().await;
        // A disk may be slow, and the shim may ask for something meanwhile. An error: the write-back has panicked.
        let machine = Arc::clone(&self.machine);
        _ = tokio::task::spawn_blocking(move || machine.write_back()).await;
    }

    /// Writes back what containers have changed by shared mappings, so that the host can copy their files: `docker
    /// commit` pauses a container for that. A file system may not respond. So this waits for 3 seconds at most,
    /// and only one write-back runs at a time.
    pub async fn write_back(&self) {
        let (machine, only) = (Arc::clone(&self.machine), Arc::clone(&self.writing_back));
        let written = async move {
            let only = only.lock_owned().await;
            let write_back = move || {
                machine.write_back();
                drop(only);
            };
            tokio::task::spawn_blocking(write_back).await
        };
        if tokio::time::timeout(WRITE_BACK, written).await.is_err() {
            eprintln!("bulkhead-agent: not all that containers have changed is with the host");
        }
    }

    fn started(&self) -> Result<MutexGuard<'_, State>, SandboxError> {
        let state = self.lock();
        if state.is_started { Ok(state) } else { Err(SandboxError::NotStarted) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For all containers of the pod, as large as containerd makes it.
fn mount_shm() -> io::Result<()> {
    match fs::create_dir_all(SHM_DIR).and_then(|()| fs::metadata(SHM_DIR)) {
        // As made below.
        Ok(metadata) if metadata.mode() & 0o1000 != 0 => return Ok(()),
        other => other.map(drop)?,
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    Ok(mount(Some("shm"), SHM_DIR, Some("tmpfs"), flags, Some("mode=1777,size=65536k"))?)
}

/// Reads what the driver of the VM's random number generator has asked for in advance, and the kernel has kept: a clone
/// would return the same bytes from /dev/hwrng. There may be neither a device nor bytes.
fn discard_hardware_entropy() {
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/hwrng");
    _ = opened.and_then(|mut device| device.read(&mut [0; 256]));
}

fn take_identity(machine: &dyn Machine, identity: &Identity) -> Result<String, SandboxError> {
    let failed = |action| move |source: io::Error| SandboxError::Io { action, source };
    // First of all: whatever asks for random numbers from here on gets other ones than a clone of this guest would.
    File::open("/dev/urandom")
        .and_then(|random| syscall::add_entropy(random.as_fd(), &identity.entropy))
        .map_err(failed("adding entropy"))?;
    discard_hardware_entropy();
    let since_1970 = Duration::from_nanos(identity.clock_unix_ns.max(0) as u64);
    machine.set_clock(since_1970).map_err(failed("setting the clock"))?;
    if !identity.hostname.is_empty() {
        sethostname(&identity.hostname).map_err(io::Error::from).map_err(failed("setting the host name"))?;
    }
    for (tag, place) in [(&identity.share_tag, SHARE_DIR), (&identity.roots_tag, ROOTS_DIR)] {
        if !tag.is_empty() {
            machine.mount_share(tag, Path::new(place)).map_err(failed("mounting the share"))?;
        }
    }
    let name = uname().map_err(io::Error::from).map_err(failed("uname"))?;
    Ok(name.release().to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::{
        container::StreamIds,
        machine::GuestMachine,
        reaper::Reaper,
        stage::launcher::{DEADLINE, Launcher},
        streams::StreamTable,
    };

    #[tokio::test(start_paused = true)]
    async fn a_container_is_deleted_while_it_is_created() {
        let launcher =
            Launcher { program: PathBuf::new(), reaper: Arc::new(Reaper::default()), deadline: DEADLINE };
        let streams = Arc::new(StreamTable::default());
        let sandbox =
            Sandbox::new(Environment { launcher, streams, reserve: Arc::default() }, GuestMachine::default());
        sandbox.lock().is_started = true;
        let spec = serde_json::json!({
            "ociVersion": "1.1.0",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "cwd": "/"},
            "root": {"path": "/run/share/one/rootfs"},
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]},
        });
        let request = || Request {
            id: "one".into(),
            spec_json: spec.to_string().into_bytes(),
            // Nobody connects it.
            stdio: StreamIds { stdin: 0, stdout: 42, stderr: 0 },
            joined: Vec::new(),
            is_pause: false,
            no_new_keyring: false,
            host_sockets: Vec::new(),
        };
        let (created, deleted) = tokio::join!(sandbox.create(request()), sandbox.delete("one"));
        // Whoever asks for it asks again.
        assert!(matches!(deleted, Err(SandboxError::BeingCreated(_))));
        assert!(created.unwrap_err().to_string().contains("stream 42"));
        assert!(matches!(sandbox.delete("one").await, Err(SandboxError::NoContainer(_))));
    }
}
