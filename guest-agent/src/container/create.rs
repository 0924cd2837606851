//! Creates a container, up to the point before its program is executed.

use std::{mem, os::fd::AsFd, path::Path, sync::Arc};

use tokio::sync::{Mutex, RwLock, watch};

use super::{
    error::ContainerError,
    exec_table::ExecTable,
    id::check_id,
    instance::Container,
    proc_mount::ProcMount,
    process::Process,
    stdio::{self, AgentStreams, StreamIds},
    update::{lock, release, scale_to_memory, set_member_ceiling},
};
use crate::{
    cgroup::Cgroup,
    guest_reserve::{HugePagesOwner, Reserve, huge_pages::HugePages},
    host_sockets::{HostSocket, HostSockets},
    spec::{self, PodSharing, Resolved},
    stage::launcher::{ChildStdio, CreatedInit, Launcher, NamespaceOwner},
    stage_config::CommonConfig,
    streams::StreamTable,
};

/// What all containers of the guest use together.
pub struct Environment {
    /// Starts the processes of containers.
    pub launcher: Launcher,
    /// Connections that no process has claimed yet.
    pub streams: Arc<StreamTable>,
    /// Memory and tasks that are kept for the guest's kernel and agent.
    pub reserve: Arc<Reserve>,
}

/// What is asked for.
pub struct Request {
    /// A plain name.
    pub id: String,
    /// The OCI runtime spec.
    pub spec_json: Vec<u8>,
    /// Its standard streams.
    pub stdio: StreamIds,
    /// Namespaces of other containers that it lives in.
    pub joined: Vec<Joined>,
    /// Whether this is the sandbox container of the pod, which runs pause.
    pub is_pause: bool,
    /// Whether its processes keep the session keyring of the agent, rather than get one of their own.
    pub no_new_keyring: bool,
    /// Sockets of the host that it mounts.
    pub host_sockets: Vec<HostSocket>,
}

/// Namespaces of another container.
pub struct Joined {
    /// That container.
    pub container: Arc<Container>,
    /// `CLONE_NEW*` bits.
    pub namespaces: u64,
}

impl Container {
    /// Creates a container. If that fails, nothing is left of it.
    pub async fn create(environment: &Environment, request: Request) -> Result<Self, ContainerError> {
        check_id(&request.id)?;
        let joined = request.joined.iter().fold(0, |bits, joined| bits | joined.namespaces);
        let session_keyring = (!request.no_new_keyring).then(|| format!("_ses.{}", request.id));
        let sharing = PodSharing { joined, is_pause: request.is_pause, session_keyring };
        let mut resolved = spec::resolve(&request.spec_json, &Cgroup::path_of(&request.id), sharing)?;
        if let Some(ended) = request.joined.iter().find(|joined| joined.container.init.is_leaving()) {
            return Err(ContainerError::JoinedEnded(ended.container.id.clone()));
        }
        let has_terminal = resolved.init.process.terminal.is_some();
        let stdio = stdio::open(&environment.streams, request.stdio, has_terminal).await?;
        let host_sockets = HostSockets::make(&request.id, &request.host_sockets).map_err(|source| {
            ContainerError::Io { action: "making sockets for services of the host", source }
        })?;

        let cgroup = Arc::new(Cgroup::for_container(&request.id)?);
        let may_have_neighbours = request.is_pause || !request.joined.is_empty();
        let own_pid_namespace = resolved.own_pid_namespace;
        let common = resolved.init.process.common.clone();
        let interface_sysctls = resolved.interface_sysctls.clone();
        let sysctls = resolved.init.sysctls.iter().map(|(path, _)| path.clone()).collect();
        let settings = mem::take(&mut resolved.settings);
        let devices = mem::take(&mut resolved.device_program);
        let reserve = Arc::clone(&environment.reserve);
        let owner = if request.is_pause { HugePagesOwner::Pod } else { HugePagesOwner::Container };
        let huge_pages = HugePages::none(&reserve, owner);
        let (wanted, set_aside) = (resolved.huge_pages, Arc::clone(&huge_pages));
        let limit = move |cgroup: &Cgroup| {
            lock(&set_aside).set(wanted)?;
            scale_to_memory(&reserve)?;
            cgroup.configure(&settings, &devices)?;
            set_member_ceiling(cgroup, may_have_neighbours, &reserve)
        };
        let created = async {
            cgroup.change(limit).await?;
            create_init(environment, resolved, &request.joined, stdio.child).await
        };
        match created.await {
            Ok(init) => {
                let container = assemble(request.id, init, cgroup, stdio.agent, own_pid_namespace, common);
                Ok(Self {
                    sysctls,
                    interface_sysctls,
                    may_have_neighbours,
                    host_sockets,
                    huge_pages,
                    ..container
                })
            }
            Err(error) => {
                if let Err(left) = cgroup.remove().await {
                    eprintln!("bulkhead-agent: container {}: {left}", request.id);
                }
                release(huge_pages).await;
                Err(error)
            }
        }
    }
}

async fn create_init(
    environment: &Environment,
    mut resolved: Resolved,
    joined: &[Joined],
    stdio: ChildStdio,
) -> Result<CreatedInit, ContainerError> {
    let pid_owner = joined.iter().find(|joined| joined.namespaces & libc::CLONE_NEWPID as u64 != 0);
    if let (Some(owner), Some(rootfs)) = (pid_owner, &mut resolved.init.rootfs)
        && rootfs.has_plain_proc()
    {
        let place = owner.container.proc.place();
        let place =
            place.map_err(|source| ContainerError::Io { action: "mounting a proc file system", source })?;
        rootfs.proc = place.map(Path::to_owned);
    }
    let joined: Vec<NamespaceOwner<'_>> = joined
        .iter()
        .map(|joined| NamespaceOwner {
            init: joined.container.init_pidfd.as_fd(),
            namespaces: joined.namespaces,
        })
        .collect();
    Ok(environment.launcher.create(resolved.init, &joined, stdio).await?)
}

fn assemble(
    id: String,
    init: CreatedInit,
    cgroup: Arc<Cgroup>,
    streams: AgentStreams,
    own_pid_namespace: bool,
    common: CommonConfig,
) -> Container {
    // The processes of a pid namespace end with its init; those of a shared one have to be ended.
    let left_behind = (!own_pid_namespace).then(|| Arc::clone(&cgroup));
    let execs = Arc::new(ExecTable::default());
    let ending = Arc::clone(&execs);
    let epilogue = async move {
        if let Some(Err(error)) = left_behind.map(|cgroup| cgroup.kill()) {
            eprintln!("bulkhead-agent: {error}");
        }
        ending.ended().await;
    };
    let CreatedInit { child, pidfd, proc, control } = init;
    let proc = ProcMount::new(&id, proc);
    let (deletion, is_deleted) = watch::channel(false);
    let init = Arc::new(Process::watch(child, streams, &id, &is_deleted, epilogue));
    Container {
        id,
        cgroup,
        may_have_neighbours: false,
        init,
        init_pidfd: pidfd,
        proc,
        control: Mutex::new(Some(control)),
        is_paused: RwLock::new(false),
        common,
        sysctls: Vec::new(),
        interface_sysctls: Vec::new(),
        cards: Default::default(),
        host_sockets: HostSockets::default(),
        huge_pages: Arc::default(),
        updates: Arc::default(),
        execs,
        deletion,
    }
}
