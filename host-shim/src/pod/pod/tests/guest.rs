//! A guest for the tests: an agent behind the sockets of a VMM. Its processes do what their arguments say.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bulkhead_agent_api::{
    API_VERSION, READY_PORT, RPC_PORT, STREAM_PORT,
    agent::*,
    agent_ttrpc::{Agent as AgentService, create_agent},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::watch,
};
use ttrpc::{
    Code,
    r#async::{Server, TtrpcContext},
};

use crate::host::{journal::Journal, process_id::ProcessId};

/// Of a process whose end came with word of a kill for want of memory.
pub(super) const OOM_STATUS: u32 = 200;

/// What the guest knows. Its processes do what `process.args` says: `exit N`, `sleep`, or `missing`.
#[derive(Clone)]
pub(super) struct Guest {
    pub(super) state: PathBuf,
    pub(super) processes: Arc<std::sync::Mutex<HashMap<ProcessKey, Process>>>,
    /// The sizes that terminals were given: columns and rows.
    pub(super) windows: Arc<std::sync::Mutex<Vec<[u64; 2]>>>,
    pub(super) stdout: Arc<tokio::sync::Mutex<Option<UnixStream>>>,
    /// Standard output of the containers after the first, which stays open.
    pub(super) others: Arc<tokio::sync::Mutex<Vec<UnixStream>>>,
    /// Containers whose signals and deletion are never answered.
    pub(super) stuck: Arc<std::sync::Mutex<HashSet<String>>>,
    /// Containers that were deleted.
    pub(super) deleted: Arc<std::sync::Mutex<HashSet<String>>>,
    /// How many processors were to be online.
    pub(super) online: Arc<std::sync::Mutex<Vec<u32>>>,
    /// The calls that tell how the guest ends.
    pub(super) calls: Arc<std::sync::Mutex<Vec<&'static str>>>,
}

/// A container's id, and that of a process added to it.
pub(super) type ProcessKey = (String, String);

pub(super) struct Process {
    pub(super) args: Vec<String>,
    pub(super) exit: watch::Sender<Option<u32>>,
}

fn refused<T>(code: Code, text: &str) -> ttrpc::Result<T> {
    Err(ttrpc::Error::RpcStatus(ttrpc::get_status(code, text)))
}

impl Guest {
    pub(super) fn vmm(&self) -> ProcessId {
        Journal::open(&self.state.join("journal")).unwrap().vmm().unwrap()
    }

    pub(super) fn add(&self, id: &str, exec_id: &str, args: Vec<String>) {
        let process = Process { args, exit: watch::Sender::new(None) };
        self.processes.lock().unwrap().insert((id.into(), exec_id.into()), process);
    }

    pub(super) fn exit_of(&self, id: &str, exec_id: &str) -> watch::Sender<Option<u32>> {
        self.processes.lock().unwrap()[&(id.into(), exec_id.into())].exit.clone()
    }

    /// The stream that was connected last, as soon as there is one.
    pub(super) async fn taken(&self) -> UnixStream {
        loop {
            if let Some(stream) = self.stdout.lock().await.take() {
                return stream;
            }
            if let Some(stream) = self.others.lock().await.pop() {
                return stream;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    async fn unless_stuck(&self, id: &str) {
        let is_stuck = self.stuck.lock().unwrap().contains(id);
        if is_stuck {
            std::future::pending().await
        }
    }

    /// A container's init ends.
    pub(super) async fn end(&self, id: &str, status: u32) {
        if let Some(mut stdout) = self.stdout.lock().await.take() {
            stdout.write_all(b"bye").await.unwrap();
        }
        self.exit_of(id, "").send_replace(Some(status));
    }
}

#[async_trait]
impl AgentService for Guest {
    async fn start_sandbox(
        &self,
        _: &TtrpcContext,
        request: StartSandboxRequest,
    ) -> ttrpc::Result<StartSandboxResponse> {
        assert_eq!((request.api_version, request.share_tag.as_str()), (API_VERSION, "share"));
        assert_eq!((request.hostname.as_str(), request.entropy.len()), ("guest", 64));
        Ok(StartSandboxResponse::new())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: CreateContainerRequest,
    ) -> ttrpc::Result<CreateContainerResponse> {
        let id = &request.container_id;
        let spec: serde_json::Value = serde_json::from_slice(&request.spec_json).unwrap();
        // The share has the files of each container but the sandbox container.
        assert_eq!(self.state.join("share").join(id).join("rootfs/marker").exists(), !request.pause);
        let joined: Vec<_> = request.joined.iter().map(|joined| joined.container_id.as_str()).collect();
        assert_eq!(joined, if id == "demo" { vec![] } else { vec!["demo", "demo"] });
        let args: Vec<String> = serde_json::from_value(spec["process"]["args"].clone()).unwrap();
        if args[0] == "refused" {
            return refused(Code::UNIMPLEMENTED, "linux.rdma is not implemented");
        }
        self.add(id, "", args);
        Ok(CreateContainerResponse::new())
    }

    async fn start_container(
        &self,
        _: &TtrpcContext,
        request: StartContainerRequest,
    ) -> ttrpc::Result<Empty> {
        let id = request.container_id;
        let args = self.processes.lock().unwrap()[&(id.clone(), String::new())].args.clone();
        match args[0].as_str() {
            "missing" => return refused(Code::NOT_FOUND, "exec \"missing\": No such file or directory"),
            "exit" => self.end(&id, args[1].parse().unwrap()).await,
            _ => {}
        }
        Ok(Empty::new())
    }

    async fn wait_process(
        &self,
        _: &TtrpcContext,
        request: WaitProcessRequest,
    ) -> ttrpc::Result<WaitProcessResponse> {
        let mut exit = self.exit_of(&request.container_id, &request.exec_id).subscribe();
        let status = exit.wait_for(Option::is_some).await.unwrap().unwrap();
        if !request.exec_id.is_empty() {
            self.processes.lock().unwrap().remove(&(request.container_id, request.exec_id));
        }
        let mut response = WaitProcessResponse::new();
        response.exit_status = status;
        // As if the kernel had killed it at its memory limit.
        if status == OOM_STATUS {
            let oom = response.oom.mut_or_insert_default();
            (oom.kills, oom.limit_hits) = (1, 1);
        }
        Ok(response)
    }

    async fn exec_process(
        &self,
        _: &TtrpcContext,
        request: ExecProcessRequest,
    ) -> ttrpc::Result<ExecProcessResponse> {
        let process: serde_json::Value = serde_json::from_slice(&request.process_json).unwrap();
        let args: Vec<String> = serde_json::from_value(process["args"].clone()).unwrap();
        let exit = match args[0].as_str() {
            "missing" => return refused(Code::UNKNOWN, "exec \"missing\": No such file or directory"),
            "exit" => Some(args[1].parse().unwrap()),
            _ => None,
        };
        if let Some(size) = process.get("consoleSize") {
            let side = |name| size[name].as_u64().unwrap();
            self.windows.lock().unwrap().push([side("width"), side("height")]);
        }
        self.add(&request.container_id, &request.exec_id, args);
        self.exit_of(&request.container_id, &request.exec_id).send_replace(exit);
        Ok(ExecProcessResponse::new())
    }

    async fn resize_terminal(
        &self,
        _: &TtrpcContext,
        request: ResizeTerminalRequest,
    ) -> ttrpc::Result<Empty> {
        self.windows.lock().unwrap().push([request.width.into(), request.height.into()]);
        Ok(Empty::new())
    }

    async fn signal_process(&self, _: &TtrpcContext, request: SignalProcessRequest) -> ttrpc::Result<Empty> {
        self.unless_stuck(&request.container_id).await;
        let status = 128 + request.signal;
        match request.exec_id.as_str() {
            "" => self.end(&request.container_id, status).await,
            id => _ = self.exit_of(&request.container_id, id).send_replace(Some(status)),
        }
        Ok(Empty::new())
    }

    async fn pause_container(&self, _: &TtrpcContext, _: PauseContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::new())
    }

    async fn resume_container(&self, _: &TtrpcContext, _: ResumeContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::new())
    }

    async fn update_container(&self, _: &TtrpcContext, _: UpdateContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::new())
    }

    async fn set_processors(
        &self,
        _: &TtrpcContext,
        request: SetProcessorsRequest,
    ) -> ttrpc::Result<SetProcessorsResponse> {
        self.online.lock().unwrap().push(request.online);
        Ok(SetProcessorsResponse { online: request.online, ..Default::default() })
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let mut response = StatsResponse::new();
        response.cpu.mut_or_insert_default().usage_usec = if request.container_id == "demo" { 1 } else { 30 };
        Ok(response)
    }

    async fn list_pids(&self, _: &TtrpcContext, _: ListPidsRequest) -> ttrpc::Result<ListPidsResponse> {
        refused(Code::NOT_FOUND, "no such container")
    }

    async fn delete_container(
        &self,
        _: &TtrpcContext,
        request: DeleteContainerRequest,
    ) -> ttrpc::Result<Empty> {
        self.unless_stuck(&request.container_id).await;
        self.stdout.lock().await.take();
        self.deleted.lock().unwrap().insert(request.container_id);
        Ok(Empty::new())
    }

    async fn shutdown(&self, _: &TtrpcContext, _: Empty) -> ttrpc::Result<Empty> {
        self.calls.lock().unwrap().push("Shutdown");
        Ok(Empty::new())
    }
}

/// Plays the VMM's sockets and the agent behind them, once a VMM is spawned.
pub(super) async fn play(guest: Guest) {
    let ready = guest.state.join(format!("vsock.sock_{READY_PORT}"));
    while !ready.exists() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let rpc = guest.state.join("rpc");
    let mut server = Server::new()
        .bind(&format!("unix://{}", rpc.display()))
        .unwrap()
        .register_service(create_agent(Arc::new(guest.clone())));
    server.start().await.unwrap();
    let listener = UnixListener::bind(guest.state.join("vsock.sock")).unwrap();
    let mut ready = loop {
        // The socket is there a moment before anybody listens.
        match UnixStream::connect(&ready).await {
            Ok(stream) => break stream,
            Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
        }
    };
    ready.write_u32_le(API_VERSION).await.unwrap();
    let agent = UnixStream::connect(&rpc).await.unwrap();
    fs::remove_file(&rpc).unwrap();
    let mut agent = Some(agent);
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let mut reader = BufReader::with_capacity(1, stream);
        let mut line = String::new();
        reader.read_line(&mut line).await.unwrap();
        let mut stream = reader.into_inner();
        stream.write_all(b"OK 1\n").await.unwrap();
        if line == format!("CONNECT {RPC_PORT}\n") {
            let mut agent = agent.take().unwrap();
            // The VMM's death breaks the connection, as the VMM's own would.
            let vmm = guest.vmm();
            left_the_network(vmm).await;
            tokio::spawn(async move {
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut stream, &mut agent) => {}
                    () = ended(vmm) => {}
                }
            });
        } else {
            let id = line.strip_prefix(&format!("CONNECT {STREAM_PORT} ")).unwrap().trim_end();
            match id {
                "2" => *guest.stdout.lock().await = Some(stream),
                _ => guest.others.lock().await.push(stream),
            }
        }
    }
}

/// A VMM that has booted its guest is in another network namespace by then.
async fn left_the_network(process: ProcessId) {
    let netns = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
    while netns(&process.pid.to_string()) == netns("self") {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn ended(process: ProcessId) {
    while ProcessId::of(process.pid).is_ok_and(|now| now == process) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
