//! The ttrpc service of `agent.proto`: requests in, errors out, nothing else.

use std::{ffi::OsString, future::Future, os::unix::ffi::OsStringExt, sync::Arc};

use async_trait::async_trait;
use bulkhead_agent_api::{
    MAX_ERROR, MAX_PIDS,
    agent::{
        self, AcceptHostSocketRequest, AcceptHostSocketResponse, AdjustClockRequest, ChangeNetworkRequest,
        ChangeRoutingRequest, CloseHostSocketRequest, ConfigureNetworkRequest, ConnectLoopbackRequest,
        CreateContainerRequest, CreateContainerResponse, DeleteContainerRequest, DiskRequest, Empty,
        ExecProcessRequest, ExecProcessResponse, FindDiskRequest, FindDiskResponse, FollowMemoryRequest,
        ListPidsRequest, ListPidsResponse, ListenHostSocketRequest, LoadAppArmorPolicyRequest,
        MakeVolumeRequest, MountDiskRequest, OomCounts, PauseContainerRequest, ReadClockResponse,
        RemoveNetworkRequest, ResizeTerminalRequest, ResumeContainerRequest, ServeNameServerRequest,
        SetProcessorsRequest, SetProcessorsResponse, SignalProcessRequest, StartContainerRequest,
        StartSandboxRequest, StartSandboxResponse, StatsRequest, StatsResponse, Stdio, UndoUpdateRequest,
        UpdateContainerRequest, VolumeEntry as VolumeEntryMessage, WaitMemoryDemandRequest, WaitOomRequest,
        WaitProcessRequest, WaitProcessResponse, WriteVolumeRequest, volume_entry,
    },
    agent_ttrpc::Agent,
    synchronization::Synchronization,
};
use bulkhead_vmm_api::SharedSocket;
use ttrpc::{Code, r#async::TtrpcContext};

use crate::{
    cgroup::CgroupError,
    clock::{self, Correction},
    container::{self, ContainerError, ExecRequest, Request, StreamIds},
    disks::FileSystem,
    guest_reserve::HugePagesError,
    host_sockets::{HostSocket, Peer, in_directories::DirectorySocket},
    network::{Change, Interface, NetworkError, loopback::Port},
    sandbox::{Identity, Sandbox, SandboxError, Volume, VolumeEntry, VolumeEntryKind},
    spec::SpecError,
    stage::launcher::ProcessError,
    stage_config::WindowSize,
};

/// The service.
pub struct Service {
    sandbox: Arc<Sandbox>,
}

impl Service {
    /// Serves this pod.
    pub fn new(sandbox: Sandbox) -> Self {
        Self { sandbox: Arc::new(sandbox) }
    }

    /// Runs to its end even if the caller does not wait for it: half a container would be left otherwise.
    async fn to_its_end<T, F>(&self, work: impl FnOnce(Arc<Sandbox>) -> F) -> ttrpc::Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, SandboxError>> + Send + 'static,
    {
        match tokio::spawn(work(Arc::clone(&self.sandbox))).await {
            Ok(result) => result.map_err(status),
            Err(error) => Err(ttrpc::Error::RpcStatus(ttrpc::get_status(Code::INTERNAL, error))),
        }
    }
}

#[async_trait]
impl Agent for Service {
    async fn start_sandbox(
        &self,
        _: &TtrpcContext,
        request: StartSandboxRequest,
    ) -> ttrpc::Result<StartSandboxResponse> {
        let identity = Identity {
            api_version: request.api_version,
            sandbox_id: request.sandbox_id,
            hostname: request.hostname,
            clock_unix_ns: request.clock_unix_ns,
            entropy: request.entropy,
            share_tag: request.share_tag,
            roots_tag: request.roots_tag,
            kernel_parameters: request.kernel_parameters,
            tasks: request.tasks,
        };
        let kernel_release = self.sandbox.start(&identity).map_err(status)?;
        Ok(StartSandboxResponse { kernel_release, ..Default::default() })
    }

    async fn read_clock(&self, _: &TtrpcContext, _: Empty) -> ttrpc::Result<ReadClockResponse> {
        let action = "reading the clock";
        let unix_ns = clock::read().map_err(|source| status(SandboxError::Io { action, source }))?;
        Ok(ReadClockResponse { unix_ns, ..Default::default() })
    }

    async fn adjust_clock(&self, _: &TtrpcContext, request: AdjustClockRequest) -> ttrpc::Result<Empty> {
        let AdjustClockRequest { step_ns, rate_ppb, tai_offset_s, .. } = request;
        let synchronization = Synchronization {
            is_synchronized: request.is_synchronized,
            max_error_us: request.max_error_us,
            estimated_error_us: request.estimated_error_us,
        };
        let correction = Correction { step_ns, rate_ppb, tai_offset_s, synchronization };
        self.sandbox.adjust_clock(correction).map_err(status)?;
        Ok(Empty::new())
    }

    async fn follow_memory(&self, _: &TtrpcContext, request: FollowMemoryRequest) -> ttrpc::Result<Empty> {
        self.sandbox.follow_memory(request.added_mib).await.map_err(status)?;
        Ok(Empty::new())
    }

    async fn wait_memory_demand(
        &self,
        _: &TtrpcContext,
        request: WaitMemoryDemandRequest,
    ) -> ttrpc::Result<Empty> {
        self.sandbox.wait_memory_demand(request.can_grow).await.map_err(status)?;
        Ok(Empty::new())
    }

    async fn make_volume(&self, _: &TtrpcContext, request: MakeVolumeRequest) -> ttrpc::Result<Empty> {
        let MakeVolumeRequest { name, bytes, mode, uid, gid, huge_pages, .. } = request;
        self.sandbox.make_volume(&Volume { name, bytes, mode, uid, gid, huge_pages }).map_err(status)?;
        Ok(Empty::new())
    }

    async fn write_volume(&self, _: &TtrpcContext, request: WriteVolumeRequest) -> ttrpc::Result<Empty> {
        let WriteVolumeRequest { name, entries, .. } = request;
        let entries: Option<Vec<_>> = entries.into_iter().map(volume_entry).collect();
        let entries = entries.ok_or_else(|| {
            let what = format!("volume {name}: an entry is neither a directory nor a file nor a link");
            ttrpc::Error::RpcStatus(ttrpc::get_status(Code::INVALID_ARGUMENT, what))
        })?;
        let write = move |sandbox: Arc<Sandbox>| async move { sandbox.write_volume(name, entries).await };
        self.to_its_end(write).await?;
        Ok(Empty::new())
    }

    async fn load_app_armor_policy(
        &self,
        _: &TtrpcContext,
        request: LoadAppArmorPolicyRequest,
    ) -> ttrpc::Result<Empty> {
        let LoadAppArmorPolicyRequest { profile, policy, .. } = request;
        let load =
            move |sandbox: Arc<Sandbox>| async move { sandbox.load_apparmor_policy(profile, policy).await };
        self.to_its_end(load).await?;
        Ok(Empty::new())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: CreateContainerRequest,
    ) -> ttrpc::Result<CreateContainerResponse> {
        let joined =
            request.joined.iter().map(|joined| self.sandbox.join(&joined.kind, &joined.container_id));
        let request = Request {
            id: request.container_id,
            spec_json: request.spec_json,
            stdio: stream_ids(request.stdio.unwrap_or_default()),
            joined: joined.collect::<Result<_, _>>().map_err(status)?,
            is_pause: request.pause,
            no_new_keyring: request.no_new_keyring,
            host_sockets: request.host_sockets.iter().map(host_socket).collect(),
        };
        let pid = self.to_its_end(|sandbox| async move { sandbox.create(request).await }).await?;
        Ok(CreateContainerResponse { pid: pid as u32, ..Default::default() })
    }

    async fn configure_network(
        &self,
        _: &TtrpcContext,
        request: ConfigureNetworkRequest,
    ) -> ttrpc::Result<Empty> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        let interface =
            Interface::try_from(request).map_err(|error| status(ContainerError::from(error).into()))?;
        self.to_its_end(|_| async move { Ok(container.configure_network(interface).await?) }).await?;
        Ok(Empty::new())
    }

    async fn change_network(&self, _: &TtrpcContext, request: ChangeNetworkRequest) -> ttrpc::Result<Empty> {
        let container = self.sandbox.container(&request.interface.container_id).map_err(status)?;
        let change = Change::try_from(request).map_err(|error| status(ContainerError::from(error).into()))?;
        self.to_its_end(|_| async move { Ok(container.change_network(change).await?) }).await?;
        Ok(Empty::new())
    }

    async fn remove_network(&self, _: &TtrpcContext, request: RemoveNetworkRequest) -> ttrpc::Result<Empty> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        self.to_its_end(|_| async move { Ok(container.remove_network(request.card).await?) }).await?;
        Ok(Empty::new())
    }

    async fn change_routing(&self, _: &TtrpcContext, request: ChangeRoutingRequest) -> ttrpc::Result<Empty> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        self.to_its_end(|_| async move { Ok(container.change_routing(request).await?) }).await?;
        Ok(Empty::new())
    }

    async fn connect_loopback(
        &self,
        _: &TtrpcContext,
        request: ConnectLoopbackRequest,
    ) -> ttrpc::Result<Empty> {
        let number = u16::try_from(request.port).map_err(|_| {
            let what = format!("{} is not a TCP port", request.port);
            ttrpc::Error::RpcStatus(ttrpc::get_status(Code::INVALID_ARGUMENT, what))
        })?;
        let port = Port { number, ipv6_first: request.ipv6 };
        self.sandbox.connect_loopback(&request.container_id, port, request.stream).await.map_err(status)?;
        Ok(Empty::new())
    }

    async fn serve_name_server(
        &self,
        _: &TtrpcContext,
        request: ServeNameServerRequest,
    ) -> ttrpc::Result<Empty> {
        self.sandbox.serve_name_server(&request.container_id, request.stream).await.map_err(status)?;
        Ok(Empty::new())
    }

    async fn listen_host_socket(
        &self,
        _: &TtrpcContext,
        request: ListenHostSocketRequest,
    ) -> ttrpc::Result<Empty> {
        let ListenHostSocketRequest { index, path, major, minor, inode, datagrams, .. } = request;
        let path = OsString::from_vec(path).into();
        let socket = DirectorySocket { index, path, socket: SharedSocket { major, minor, inode }, datagrams };
        // At once: a CloseHostSocket that comes later finds it.
        self.sandbox.begin_host_socket(index).map_err(status)?;
        let listen = move |sandbox: Arc<Sandbox>| async move { sandbox.listen_host_socket(socket).await };
        self.to_its_end(listen).await?;
        Ok(Empty::new())
    }

    async fn close_host_socket(
        &self,
        _: &TtrpcContext,
        request: CloseHostSocketRequest,
    ) -> ttrpc::Result<Empty> {
        self.sandbox.close_host_socket(request.index);
        Ok(Empty::new())
    }

    async fn accept_host_socket(
        &self,
        _: &TtrpcContext,
        request: AcceptHostSocketRequest,
    ) -> ttrpc::Result<AcceptHostSocketResponse> {
        let AcceptHostSocketRequest { container_id, index, stream, .. } = request;
        let accepted = match container_id.is_empty() {
            true => self.sandbox.accept_in_directory(index, stream).await,
            false => self.sandbox.accept_host_socket(&container_id, index, stream).await,
        };
        let Peer { uid, gid } = accepted.map_err(status)?;
        Ok(AcceptHostSocketResponse { uid, gid, ..Default::default() })
    }

    async fn start_container(
        &self,
        _: &TtrpcContext,
        request: StartContainerRequest,
    ) -> ttrpc::Result<Empty> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        self.to_its_end(|_| async move { Ok(container.start().await?) }).await?;
        Ok(Empty::new())
    }

    async fn exec_process(
        &self,
        _: &TtrpcContext,
        request: ExecProcessRequest,
    ) -> ttrpc::Result<ExecProcessResponse> {
        let container_id = request.container_id;
        let request = ExecRequest {
            id: request.exec_id,
            process_json: request.process_json,
            stdio: stream_ids(request.stdio.unwrap_or_default()),
        };
        let work = |sandbox: Arc<Sandbox>| async move { sandbox.exec(&container_id, request).await };
        let pid = self.to_its_end(work).await?;
        Ok(ExecProcessResponse { pid: pid as u32, ..Default::default() })
    }

    async fn wait_process(
        &self,
        _: &TtrpcContext,
        request: WaitProcessRequest,
    ) -> ttrpc::Result<WaitProcessResponse> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        let process = container.process(&request.exec_id).map_err(|error| status(error.into()))?;
        let exit = process.wait().await.map_err(|error| status(error.into()))?;
        container.forget_exec(&request.exec_id);
        Ok(WaitProcessResponse {
            exit_status: exit.status,
            exited_at_unix_ns: exit.at_unix_ns,
            // Gone if the container was deleted meanwhile: then nobody asks any more.
            oom: Some(oom_counts(container.oom().unwrap_or_default())).into(),
            ..Default::default()
        })
    }

    async fn signal_process(&self, _: &TtrpcContext, request: SignalProcessRequest) -> ttrpc::Result<Empty> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        let signalled = container.signal(&request.exec_id, request.signal, request.all);
        signalled.map_err(|error| status(error.into()))?;
        Ok(Empty::new())
    }

    async fn list_pids(&self, _: &TtrpcContext, request: ListPidsRequest) -> ttrpc::Result<ListPidsResponse> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        let mut pids = container.pids().map_err(|error| status(ContainerError::from(error).into()))?;
        pids.truncate(MAX_PIDS);
        Ok(ListPidsResponse { pids, ..Default::default() })
    }

    async fn resize_terminal(
        &self,
        _: &TtrpcContext,
        request: ResizeTerminalRequest,
    ) -> ttrpc::Result<Empty> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        let resized = window_size(request.width, request.height)
            .and_then(|size| container.process(&request.exec_id)?.resize(size));
        resized.map_err(|error| status(error.into()))?;
        Ok(Empty::new())
    }

    async fn pause_container(
        &self,
        _: &TtrpcContext,
        request: PauseContainerRequest,
    ) -> ttrpc::Result<Empty> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        self.to_its_end(|sandbox| async move {
            container.pause().await?;
            sandbox.write_back().await;
            Ok(())
        })
        .await?;
        Ok(Empty::new())
    }

    async fn resume_container(
        &self,
        _: &TtrpcContext,
        request: ResumeContainerRequest,
    ) -> ttrpc::Result<Empty> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        self.to_its_end(|_| async move { Ok(container.resume().await?) }).await?;
        Ok(Empty::new())
    }

    async fn update_container(
        &self,
        _: &TtrpcContext,
        request: UpdateContainerRequest,
    ) -> ttrpc::Result<Empty> {
        let UpdateContainerRequest { container_id, resources_json, number, .. } = request;
        self.sandbox.update(&container_id, number, &resources_json).await.map_err(status)?;
        Ok(Empty::new())
    }

    async fn undo_update(&self, _: &TtrpcContext, request: UndoUpdateRequest) -> ttrpc::Result<Empty> {
        let UndoUpdateRequest { container_id, number, .. } = request;
        self.sandbox.undo_update(&container_id, number).await.map_err(status)?;
        Ok(Empty::new())
    }

    async fn set_processors(
        &self,
        _: &TtrpcContext,
        request: SetProcessorsRequest,
    ) -> ttrpc::Result<SetProcessorsResponse> {
        let set = move |sandbox: Arc<Sandbox>| async move { sandbox.set_processors(request.online).await };
        let online = self.to_its_end(set).await?;
        Ok(SetProcessorsResponse { online, ..Default::default() })
    }

    async fn find_disk(&self, _: &TtrpcContext, request: FindDiskRequest) -> ttrpc::Result<FindDiskResponse> {
        let find = move |sandbox: Arc<Sandbox>| async move { sandbox.find_disk(request.serial).await };
        let (major, minor) = self.to_its_end(find).await?;
        Ok(FindDiskResponse { major, minor, ..Default::default() })
    }

    async fn mount_disk(&self, _: &TtrpcContext, request: MountDiskRequest) -> ttrpc::Result<Empty> {
        let MountDiskRequest { serial, fs_type, flags, options, .. } = request;
        let wanted = FileSystem { serial, fs_type, flags, options };
        self.to_its_end(move |sandbox: Arc<Sandbox>| async move { sandbox.mount_disk(wanted).await }).await?;
        Ok(Empty::new())
    }

    async fn unmount_disk(&self, _: &TtrpcContext, request: DiskRequest) -> ttrpc::Result<Empty> {
        let unmount = move |sandbox: Arc<Sandbox>| async move { sandbox.unmount_disk(request.serial).await };
        self.to_its_end(unmount).await?;
        Ok(Empty::new())
    }

    async fn remove_disk(&self, _: &TtrpcContext, request: DiskRequest) -> ttrpc::Result<Empty> {
        let remove = move |sandbox: Arc<Sandbox>| async move { sandbox.remove_disk(request.serial).await };
        self.to_its_end(remove).await?;
        Ok(Empty::new())
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        container.stats().map_err(|error| status(ContainerError::from(error).into()))
    }

    async fn wait_oom(&self, _: &TtrpcContext, request: WaitOomRequest) -> ttrpc::Result<OomCounts> {
        let container = self.sandbox.container(&request.container_id).map_err(status)?;
        let counts = container.wait_oom(request.kills_seen).await.map_err(|error| status(error.into()))?;
        Ok(oom_counts(counts))
    }

    async fn delete_container(
        &self,
        _: &TtrpcContext,
        request: DeleteContainerRequest,
    ) -> ttrpc::Result<Empty> {
        let id = request.container_id;
        self.to_its_end(|sandbox| async move { sandbox.delete(&id).await }).await?;
        Ok(Empty::new())
    }

    async fn shutdown(&self, _: &TtrpcContext, _: Empty) -> ttrpc::Result<Empty> {
        self.sandbox.shut_down().await;
        Ok(Empty::new())
    }
}

fn stream_ids(stdio: Stdio) -> StreamIds {
    StreamIds { stdin: stdio.stdin, stdout: stdio.stdout, stderr: stdio.stderr }
}

/// None: it says not what it is.
fn volume_entry(entry: VolumeEntryMessage) -> Option<VolumeEntry> {
    let kind = match entry.kind? {
        volume_entry::Kind::Directory(_) => VolumeEntryKind::Directory,
        volume_entry::Kind::File(content) => VolumeEntryKind::File(content),
        volume_entry::Kind::Link(target) => VolumeEntryKind::Link(target.into()),
        _ => return None,
    };
    let VolumeEntryMessage { path, mode, uid, gid, modified_unix_ns, .. } = entry;
    Some(VolumeEntry { path: path.into(), mode, uid, gid, modified_unix_ns, kind })
}

fn host_socket(socket: &agent::HostSocket) -> HostSocket {
    let agent::HostSocket { index, mode, uid, gid, datagrams, .. } = *socket;
    HostSocket { index, mode, uid, gid, datagrams }
}

fn window_size(width: u32, height: u32) -> Result<WindowSize, ContainerError> {
    match (u16::try_from(width), u16::try_from(height)) {
        (Ok(width), Ok(height)) => Ok(WindowSize { width, height }),
        _ => Err(ContainerError::WindowSize { width, height }),
    }
}

fn oom_counts(counts: container::OomCounts) -> OomCounts {
    OomCounts { kills: counts.kills, limit_hits: counts.limit_hits, ..Default::default() }
}

/// The one place where errors become ttrpc codes.
fn status(error: SandboxError) -> ttrpc::Error {
    let code = match &error {
        SandboxError::Version { .. }
        | SandboxError::NotStarted
        | SandboxError::AlreadyStarted
        | SandboxError::AppArmor { .. }
        | SandboxError::BeingCreated(_) => Code::FAILED_PRECONDITION,
        SandboxError::Entropy(_) => Code::INVALID_ARGUMENT,
        SandboxError::NoDisk(_) => Code::NOT_FOUND,
        SandboxError::Io { .. } => Code::INTERNAL,
        SandboxError::NoContainer(_) | SandboxError::NoHostSocket(_) => Code::NOT_FOUND,
        SandboxError::Exists(_) => Code::ALREADY_EXISTS,
        SandboxError::Superseded => Code::ABORTED,
        SandboxError::Container(error) => container_code(error),
    };
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, cut(error.to_string())))
}

/// An error may name what the request had, of any length; its answer must not.
fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_ERROR));
    text
}

fn container_code(error: &ContainerError) -> Code {
    match error {
        ContainerError::Spec(SpecError::Unimplemented { .. }) => Code::UNIMPLEMENTED,
        ContainerError::Id(_)
        | ContainerError::Spec(_)
        | ContainerError::Signal(_)
        | ContainerError::WindowSize { .. } => Code::INVALID_ARGUMENT,
        ContainerError::Stream(_)
        | ContainerError::AlreadyStarted(_)
        | ContainerError::Running(_)
        | ContainerError::Stopped
        | ContainerError::JoinedEnded(_)
        | ContainerError::Paused
        | ContainerError::NoTerminal => Code::FAILED_PRECONDITION,
        ContainerError::Network(NetworkError::Invalid { .. } | NetworkError::Parameter(_)) => {
            Code::INVALID_ARGUMENT
        }
        ContainerError::Network(NetworkError::Loopback { .. }) => Code::FAILED_PRECONDITION,
        ContainerError::Network(NetworkError::TooManyConnections)
        | ContainerError::HugePages(HugePagesError::TooFew { .. }) => Code::RESOURCE_EXHAUSTED,
        ContainerError::ExecExists(_) => Code::ALREADY_EXISTS,
        ContainerError::Finished | ContainerError::NoExec(_) | ContainerError::NoHostSocket(..) => {
            Code::NOT_FOUND
        }
        ContainerError::Process(ProcessError::Deadline { .. })
        | ContainerError::Cgroup(CgroupError::Slow { .. }) => Code::DEADLINE_EXCEEDED,
        ContainerError::Process(ProcessError::Ended(_))
        | ContainerError::NotPaused(_)
        | ContainerError::UpdateUndone(_) => Code::ABORTED,
        ContainerError::Cgroup(CgroupError::Setting { .. }) => Code::INVALID_ARGUMENT,
        ContainerError::Process(_) => Code::UNKNOWN,
        ContainerError::Network(_)
        | ContainerError::Cgroup(_)
        | ContainerError::HugePages(_)
        | ContainerError::Io { .. } => Code::INTERNAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_never_too_long_for_an_answer() {
        let error = SandboxError::NoContainer("\u{20ac}".repeat(1 << 20));
        let ttrpc::Error::RpcStatus(status) = status(error) else { panic!("no status") };
        assert!((MAX_ERROR - 3..=MAX_ERROR).contains(&status.message.len()));
        assert_eq!(cut("short".into()), "short");
    }
}
