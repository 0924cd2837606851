//! A sandbox from create to delete, with a guest that is played by the test: the VMM is `sleep`, the agent a ttrpc
//! service behind the VMM's socket.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::PermissionsExt,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bulkhead_agent_api::{
    API_VERSION, READY_PORT, RPC_PORT, STREAM_PORT,
    agent::*,
    agent_ttrpc::{Agent as AgentService, create_agent},
};
use containerd_shim_protos::{api, cgroups, cgroups_v2, sandbox_api, sandbox_async::Sandbox as SandboxApi};
use nix::{
    sys::stat::Mode,
    unistd::{Pid, mkfifo},
};
use protobuf::{Message, well_known_types::any::Any};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream, unix::pipe},
    sync::watch,
    time::timeout,
};
use ttrpc::{
    Code,
    r#async::{Server, TtrpcContext},
};

use super::*;
use crate::{
    events::tests::Heard, execs::ExecPhase, journal::Journal, process::ProcessId, sandboxer::SandboxService,
    terminal::WindowSize, testing::private_mounts,
};

const WAIT: Duration = Duration::from_secs(5);

/// Of a process whose end came with word of a kill for want of memory.
const OOM_STATUS: u32 = 200;

/// What the guest knows. Its processes do what `process.args` says: `exit N`, `sleep`, or `missing`.
#[derive(Clone)]
struct Guest {
    state: PathBuf,
    processes: Arc<std::sync::Mutex<HashMap<ProcessKey, Process>>>,
    /// The sizes that terminals were given: columns and rows.
    windows: Arc<std::sync::Mutex<Vec<[u64; 2]>>>,
    stdout: Arc<tokio::sync::Mutex<Option<UnixStream>>>,
}

/// A container's id, and that of a process added to it.
type ProcessKey = (String, String);

struct Process {
    args: Vec<String>,
    exit: watch::Sender<Option<u32>>,
}

fn refused<T>(code: Code, text: &str) -> ttrpc::Result<T> {
    Err(ttrpc::Error::RpcStatus(ttrpc::get_status(code, text)))
}

impl Guest {
    fn vmm(&self) -> ProcessId {
        Journal::open(&self.state.join("journal")).unwrap().vmm().unwrap()
    }

    fn add(&self, id: &str, exec_id: &str, args: Vec<String>) {
        let process = Process { args, exit: watch::Sender::new(None) };
        self.processes.lock().unwrap().insert((id.into(), exec_id.into()), process);
    }

    fn exit_of(&self, id: &str, exec_id: &str) -> watch::Sender<Option<u32>> {
        self.processes.lock().unwrap()[&(id.into(), exec_id.into())].exit.clone()
    }

    /// A container's init ends.
    async fn end(&self, id: &str, status: u32) {
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
        // What the guest is told of is what the share has.
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

    async fn delete_process(&self, _: &TtrpcContext, request: DeleteProcessRequest) -> ttrpc::Result<Empty> {
        let key = (request.container_id, request.exec_id);
        assert!(self.processes.lock().unwrap().remove(&key).is_some());
        Ok(Empty::new())
    }

    async fn signal_process(&self, _: &TtrpcContext, request: SignalProcessRequest) -> ttrpc::Result<Empty> {
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

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let mut response = StatsResponse::new();
        response.cpu.mut_or_insert_default().usage_usec = if request.container_id == "demo" { 1 } else { 30 };
        Ok(response)
    }

    async fn delete_container(&self, _: &TtrpcContext, _: DeleteContainerRequest) -> ttrpc::Result<Empty> {
        self.stdout.lock().await.take();
        Ok(Empty::new())
    }

    async fn shutdown(&self, _: &TtrpcContext, _: Empty) -> ttrpc::Result<Empty> {
        nix::sys::signal::kill(Pid::from_raw(self.vmm().pid as i32), nix::sys::signal::Signal::SIGTERM)
            .unwrap();
        Ok(Empty::new())
    }
}

/// Plays the VMM's sockets and the agent behind them, once a VMM is spawned.
async fn play(guest: Guest) {
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
            assert_eq!(line, format!("CONNECT {STREAM_PORT}\n"));
            assert_eq!(stream.read_u64_le().await.unwrap(), 2);
            *guest.stdout.lock().await = Some(stream);
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

/// A bundle as containerd makes it.
fn make_bundle(dir: &Path, id: &str, args: &[&str], change: impl FnOnce(&mut serde_json::Value)) {
    let bundle = dir.join(id);
    fs::create_dir_all(bundle.join("rootfs")).unwrap();
    fs::write(bundle.join("rootfs/marker"), "").unwrap();
    let group = format!("/bulkhead-test-{}", std::process::id());
    let mut spec = json!({
        "ociVersion": "1.1.0",
        "process": {"user": {"uid": 0, "gid": 0}, "args": args, "cwd": "/"},
        "root": {"path": "rootfs"},
        "hostname": "guest",
        "linux": {
            "cgroupsPath": format!("{group}/{}", bundle.display().to_string().replace('/', "-")),
            "namespaces": [
                {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}
            ],
        },
    });
    change(&mut spec);
    fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
}

/// A host with containerd on it, and one sandbox.
struct Story {
    dir: tempfile::TempDir,
    sandbox: Sandbox,
    guest: Guest,
    heard: Heard,
    events: Publisher,
    _server: Server,
}

impl Story {
    async fn begin(args: &[&str]) -> Self {
        let story = Self::without_guest(args).await;
        tokio::spawn(play(story.guest.clone()));
        story
    }

    async fn without_guest(args: &[&str]) -> Self {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        make_bundle(dir.path(), "demo", args, |_| {});
        for (program, script) in [("vmm", "exec unshare --net sleep 60"), ("shim", "read line")] {
            fs::write(at(program), format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(at(program), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let config = format!("kernel={0:?}\ninitramfs={0:?}\nvmm={0:?}\n", at("vmm"));
        fs::write(at("config.toml"), config).unwrap();
        let heard = Heard::default();
        let server = heard.serve(&at("events.sock")).await;
        let events = Publisher::start(at("events.sock").to_str(), "default");
        let settings = Settings {
            namespace: "default".into(),
            id: "demo".into(),
            state_root: at("run"),
            config: at("config.toml"),
            shim: at("shim"),
        };
        let guest = Guest {
            state: settings.state_path(),
            processes: Arc::default(),
            windows: Arc::default(),
            stdout: Arc::default(),
        };
        let sandbox = Sandbox::new(settings, events.clone());
        Self { dir, sandbox, guest, heard, events, _server: server }
    }

    fn request(&self) -> api::CreateTaskRequest {
        self.request_of("demo")
    }

    fn request_of(&self, id: &str) -> api::CreateTaskRequest {
        let mut request = api::CreateTaskRequest::new();
        request.id = id.into();
        request.bundle = self.dir.path().join(id).display().to_string();
        request
    }

    async fn create(&self) -> Arc<Container> {
        timeout(WAIT, self.sandbox.create(Creation::task(self.request()))).await.unwrap().unwrap()
    }

    /// The sandbox's own container.
    fn own(&self) -> Handle {
        self.sandbox.container("demo").unwrap()
    }

    fn status(&self) -> Status {
        self.own().phase().status()
    }

    /// Nothing is left on the host, and containerd was told everything.
    async fn end(self, topics: &[&str]) {
        self.events.flush(WAIT).await;
        assert_eq!(self.heard.topics(), topics);
        assert!(!self.dir.path().join("run").exists());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(self.dir.path().to_str().unwrap()));
    }
}

const WHOLE_LIFE: [&str; 4] = ["/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete"];

#[tokio::test]
async fn a_process_runs_and_its_status_comes_back() {
    let story = Story::begin(&["exit", "7"]).await;
    let container = story.create().await;
    assert_eq!(container.pid, story.guest.vmm().pid);
    assert_eq!(story.status(), Status::Created);
    story.own().start_process().await.unwrap();
    let exit = timeout(WAIT, story.own().wait()).await.unwrap().unwrap();
    assert_eq!(exit.status, 7);
    assert!(exit.at <= SystemTime::now());
    let deleted = timeout(WAIT, story.sandbox.delete("demo")).await.unwrap().unwrap();
    assert_eq!((deleted.pid, deleted.exit.status), (container.pid, 7));
    assert!(matches!(story.sandbox.delete("demo").await, Err(TaskError::Refused(Refusal::NotFound))));
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn the_output_arrives_before_the_end() {
    let story = Story::begin(&["exit", "0"]).await;
    let fifo = story.dir.path().join("stdout");
    mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
    let mut request = story.request();
    request.stdout = fifo.display().to_string();
    let mut client = pipe::OpenOptions::new().open_receiver(&fifo).unwrap();
    story.sandbox.create(Creation::task(request)).await.unwrap();
    story.own().start_process().await.unwrap();
    let mut output = String::new();
    timeout(WAIT, client.read_to_string(&mut output)).await.unwrap().unwrap();
    assert_eq!(output, "bye");
    story.sandbox.delete("demo").await.unwrap();
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn create_asked_again_answers_the_same() {
    let story = Story::begin(&["sleep"]).await;
    let request = story.request();
    let (one, two) = tokio::join!(
        story.sandbox.create(Creation::task(request.clone())),
        story.sandbox.create(Creation::task(request.clone()))
    );
    // The one that came second finds it made, or making.
    let pids: Vec<_> = [one, two].into_iter().filter_map(Result::ok).map(|container| container.pid).collect();
    assert!(!pids.is_empty() && pids.iter().all(|pid| *pid == story.guest.vmm().pid));
    assert_eq!(story.sandbox.create(Creation::task(request.clone())).await.unwrap().pid, pids[0]);
    let mut other = request;
    other.stdout = "/elsewhere".into();
    assert!(matches!(
        story.sandbox.create(Creation::task(other)).await,
        Err(TaskError::Refused(Refusal::Exists))
    ));
    story.sandbox.delete("demo").await.unwrap();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn the_vmms_death_is_the_process_s_death() {
    let story = Story::begin(&["sleep"]).await;
    story.create().await;
    story.own().start_process().await.unwrap();
    assert!(story.sandbox.delete("demo").await.is_err());
    story.guest.vmm().kill(WAIT).unwrap();
    let exit = timeout(Duration::from_secs(1), story.own().wait()).await.unwrap().unwrap();
    assert_eq!(exit.status, 137);
    assert_eq!(timeout(WAIT, story.sandbox.delete("demo")).await.unwrap().unwrap().exit.status, 137);
    story.end(&WHOLE_LIFE).await;
}

fn exec(id: &str, args: &[&str]) -> api::ExecProcessRequest {
    let mut request = api::ExecProcessRequest::new();
    request.id = "demo".into();
    request.exec_id = id.into();
    request.spec.mut_or_insert_default().value = json!({"args": args}).to_string().into_bytes();
    request
}

#[tokio::test]
async fn a_process_is_added_runs_and_is_deleted() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    story.own().start_process().await.unwrap();
    let execs = &container.execs;
    execs.add(exec("one", &["exit", "7"])).unwrap();
    assert!(matches!(execs.add(exec("one", &["sleep"])), Err(TaskError::ExecExists { .. })));
    assert!(matches!(execs.kill("one", 9).await, Err(TaskError::ExecNotStarted { .. })));
    execs.start("one", container.pid).await.unwrap();
    assert!(matches!(execs.start("one", container.pid).await, Err(TaskError::ExecStarted { .. })));
    let one = execs.get("one").unwrap();
    assert_eq!(timeout(WAIT, one.wait()).await.unwrap().unwrap().status, 7);
    assert_eq!(timeout(WAIT, execs.delete("one")).await.unwrap().unwrap().unwrap().status, 7);
    assert!(matches!(execs.get("one"), Err(TaskError::NoExec { .. })));
    assert_eq!(story.status(), Status::Running);
    story.guest.end("demo", 0).await;
    timeout(WAIT, story.own().wait()).await.unwrap().unwrap();
    story.sandbox.delete("demo").await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_terminal_begins_with_the_size_that_it_had_before_its_start() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    let execs = &container.execs;
    let mut request = exec("one", &["sleep"]);
    request.terminal = true;
    request.spec.mut_or_insert_default().value = br#"{"terminal": true, "args": ["sleep"]}"#.to_vec();
    execs.add(request).unwrap();
    execs.add(exec("plain", &["sleep"])).unwrap();
    for (id, width) in [("one", 10), ("one", 20), ("plain", 30)] {
        execs.resize(id, WindowSize { width, height: 5 }).await.unwrap();
    }
    execs.start("one", container.pid).await.unwrap();
    execs.resize("one", WindowSize { width: 40, height: 5 }).await.unwrap();
    assert_eq!(*story.guest.windows.lock().unwrap(), [[20, 5], [40, 5]]);
    execs.kill("one", 9).await.unwrap();
    timeout(WAIT, execs.get("one").unwrap().wait()).await.unwrap().unwrap();
    let late = execs.resize("one", WindowSize { width: 50, height: 5 }).await;
    assert!(matches!(late, Err(TaskError::ResizeStopped)));
    story.sandbox.delete("demo").await.unwrap();
    let topics =
        ["/tasks/create", "/tasks/exec-added", "/tasks/exec-added", "/tasks/exec-started", "/tasks/exit"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_process_that_cannot_be_started_is_only_deleted() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    container.execs.add(exec("none", &["missing"])).unwrap();
    let error = container.execs.start("none", container.pid).await.unwrap_err();
    assert_eq!(chain(&error), "exec \"missing\": No such file or directory");
    assert_eq!(container.execs.get("none").unwrap().phase(), ExecPhase::Added);
    assert_eq!(container.execs.delete("none").await.unwrap(), None);
    story.sandbox.delete("demo").await.unwrap();
    story.end(&["/tasks/create", "/tasks/exec-added", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn the_vmms_death_is_heard_of_each_process_before_the_container() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    story.own().start_process().await.unwrap();
    container.execs.add(exec("one", &["sleep"])).unwrap();
    container.execs.start("one", container.pid).await.unwrap();
    assert!(matches!(container.execs.delete("one").await, Err(TaskError::ExecRuns { .. })));
    story.guest.vmm().kill(WAIT).unwrap();
    timeout(WAIT, story.own().wait()).await.unwrap().unwrap();
    let one = container.execs.get("one").unwrap();
    assert!(matches!(one.phase(), ExecPhase::Stopped(exit) if exit.status == 137));
    story.sandbox.delete("demo").await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_signal_ends_the_process() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    story.own().start_process().await.unwrap();
    container.agent.signal("demo", 9, false).await.unwrap();
    assert_eq!(timeout(WAIT, story.own().wait()).await.unwrap().unwrap().status, 137);
    story.sandbox.delete("demo").await.unwrap();
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_paused_process_is_resumed_or_killed() {
    let story = Story::begin(&["sleep"]).await;
    story.create().await;
    assert!(matches!(story.own().pause().await, Err(TaskError::Refused(Refusal::Precondition { .. }))));
    let container = story.own().start_process().await.unwrap();
    story.own().pause().await.unwrap();
    assert_eq!(story.status(), Status::Paused);
    assert!(story.sandbox.delete("demo").await.is_err());
    story.own().resume().await.unwrap();
    assert_eq!(story.status(), Status::Running);
    story.own().pause().await.unwrap();
    container.agent.signal("demo", 9, false).await.unwrap();
    assert_eq!(timeout(WAIT, story.own().wait()).await.unwrap().unwrap().status, 137);
    story.sandbox.delete("demo").await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/paused", "/tasks/resumed", "/tasks/paused"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_kill_for_want_of_memory_is_heard_of_before_the_end() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    story.own().start_process().await.unwrap();
    container.execs.add(exec("one", &["exit", "200"])).unwrap();
    container.execs.start("one", container.pid).await.unwrap();
    timeout(WAIT, container.execs.get("one").unwrap().wait()).await.unwrap().unwrap();
    // The same kill, which the container's own end tells of as well.
    story.guest.end("demo", OOM_STATUS).await;
    timeout(WAIT, story.own().wait()).await.unwrap().unwrap();
    story.sandbox.delete("demo").await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started", "/tasks/oom"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_command_that_is_missing_is_named_and_can_be_deleted() {
    let story = Story::begin(&["missing"]).await;
    story.create().await;
    let error = story.own().start_process().await.unwrap_err();
    assert_eq!(chain(&error), "exec \"missing\": No such file or directory");
    assert_eq!(story.status(), Status::Stopped);
    assert_eq!(story.own().wait().await.unwrap().status, 255);
    story.sandbox.delete("demo").await.unwrap();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn what_the_guest_refuses_leaves_nothing() {
    let story = Story::begin(&["refused"]).await;
    let error = story.sandbox.create(Creation::task(story.request())).await.unwrap_err();
    assert_eq!(chain(&error), "linux.rdma is not implemented");
    assert_eq!(story.sandbox.container("demo").unwrap_err(), Refusal::NotFound);
    assert!(story.sandbox.is_idle());
    story.end(&[]).await;
}

#[tokio::test]
async fn what_is_missing_on_the_host_leaves_nothing() {
    let story = Story::without_guest(&["sleep"]).await;
    fs::remove_dir_all(story.dir.path().join("demo/rootfs")).unwrap();
    let error = story.sandbox.create(Creation::task(story.request())).await.unwrap_err();
    assert!(chain(&error).contains("demo/rootfs: no such file or directory"), "{}", chain(&error));
    fs::write(story.dir.path().join("config.toml"), "kernel = \"/nonexistent/vmlinux\"\n").unwrap();
    let error = story.sandbox.create(Creation::task(story.request())).await.unwrap_err();
    assert!(chain(&error).starts_with("kernel /nonexistent/vmlinux: No such file"), "{}", chain(&error));
    story.end(&[]).await;
}

#[tokio::test]
async fn a_vmm_that_fails_says_why() {
    let story = Story::without_guest(&["sleep"]).await;
    fs::write(story.dir.path().join("vmm"), "#!/bin/sh\necho 'no /dev/kvm' >&2\nexit 1\n").unwrap();
    let error =
        timeout(WAIT, story.sandbox.create(Creation::task(story.request()))).await.unwrap().unwrap_err();
    assert_eq!(chain(&error), "the VM ended: no /dev/kvm");
    story.end(&[]).await;
}

#[tokio::test]
async fn the_end_of_the_shim_ends_everything() {
    let story = Story::begin(&["sleep"]).await;
    story.create().await;
    story.own().start_process().await.unwrap();
    let waiting = story.own();
    let waiting = tokio::spawn(async move { waiting.wait().await });
    tokio::task::yield_now().await;
    timeout(WAIT, story.sandbox.stop()).await.unwrap();
    assert_eq!(timeout(WAIT, waiting).await.unwrap().unwrap().unwrap().status, 137);
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn the_end_of_the_shim_ends_a_creation_under_way() {
    let story = Story::without_guest(&["sleep"]).await;
    let creating = story.sandbox.clone();
    let request = story.request();
    let creating = tokio::spawn(async move { creating.create(Creation::task(request)).await });
    while story.sandbox.container("demo").is_err() || story.status() != Status::Creating {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    timeout(WAIT, story.sandbox.stop()).await.unwrap();
    assert!(creating.await.unwrap().is_err());
    story.end(&[]).await;
}

impl Story {
    /// A pod without containers.
    async fn pod() -> Self {
        let story = Self::begin(&["of-the-image"]).await;
        make_bundle(story.dir.path(), "demo", &["of-the-image"], |spec| {
            spec["annotations"] = json!({"io.kubernetes.cri.container-type": "sandbox"});
        });
        story.create().await;
        story.own().start_process().await.unwrap();
        story
    }

    /// Creates a container of the pod.
    async fn add(&self, id: &str, args: &[&str]) -> Result<Arc<Container>, TaskError> {
        let vmm = self.guest.vmm().pid;
        make_bundle(self.dir.path(), id, args, |spec| {
            spec["annotations"] = json!({
                "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "demo",
            });
            let namespaces = &mut spec["linux"]["namespaces"];
            namespaces[1]["path"] = json!(format!("/proc/{vmm}/ns/ipc"));
            namespaces[2]["path"] = json!(format!("/proc/{vmm}/ns/uts"));
        });
        timeout(WAIT, self.sandbox.create(Creation::task(self.request_of(id)))).await.unwrap()
    }

    async fn run(&self, id: &str, args: &[&str]) -> Arc<Container> {
        let container = self.add(id, args).await.unwrap();
        self.sandbox.container(id).unwrap().start_process().await.unwrap();
        container
    }

    async fn wait(&self, id: &str) -> u32 {
        let container = self.sandbox.container(id).unwrap();
        timeout(WAIT, container.wait()).await.unwrap().unwrap().status
    }

    async fn delete(&self, id: &str) -> u32 {
        timeout(WAIT, self.sandbox.delete(id)).await.unwrap().unwrap().exit.status
    }

    fn has_files(&self, id: &str) -> bool {
        self.guest.state.join("share").join(id).exists()
    }
}

fn lives(lives: usize) -> Vec<&'static str> {
    (0..lives).flat_map(|_| WHOLE_LIFE).collect()
}

#[tokio::test]
async fn containers_come_and_go_in_a_living_pod() {
    let story = Story::pod().await;
    for _ in 0..2 {
        let container = story.add("one", &["exit", "3"]).await.unwrap();
        assert_ne!(container.pid, story.guest.vmm().pid);
        assert!(Path::new(&format!("/proc/{}", container.pid)).exists());
        story.sandbox.container("one").unwrap().start_process().await.unwrap();
        assert_eq!((story.wait("one").await, story.delete("one").await), (3, 3));
        assert!(!story.has_files("one"));
        assert_eq!(story.sandbox.container("one").unwrap_err(), Refusal::NotFound);
    }
    assert_eq!(story.status(), Status::Running);
    assert!(!story.sandbox.is_idle());
    story.guest.end("demo", 0).await;
    assert_eq!((story.wait("demo").await, story.delete("demo").await), (0, 0));
    let topics = [&["/tasks/create", "/tasks/start"][..], &lives(2), &["/tasks/exit", "/tasks/delete"]];
    story.end(&topics.concat()).await;
}

#[tokio::test]
async fn the_pod_ends_with_its_pause() {
    let story = Story::pod().await;
    story.run("one", &["sleep"]).await;
    story.guest.end("demo", 0).await;
    assert_eq!(story.wait("one").await, 137);
    assert_eq!((story.delete("one").await, story.delete("demo").await), (137, 0));
    let begin = ["/tasks/create", "/tasks/start", "/tasks/create", "/tasks/start"];
    let end = ["/tasks/exit", "/tasks/exit", "/tasks/delete", "/tasks/delete"];
    story.end(&[begin, end].concat()).await;
}

#[tokio::test]
async fn a_pod_that_is_deleted_first_leaves_its_containers_to_be_deleted() {
    let story = Story::pod().await;
    story.run("one", &["sleep"]).await;
    story.guest.vmm().kill(WAIT).unwrap();
    assert_eq!((story.wait("one").await, story.wait("demo").await), (137, 137));
    assert_eq!(story.delete("demo").await, 137);
    assert!(!story.dir.path().join("run").exists());
    let error = story.add_after_the_end().await;
    assert_eq!(chain(&error), "the sandbox demo does not run");
    assert_eq!(story.delete("one").await, 137);
    assert!(story.sandbox.is_idle());
}

impl Story {
    async fn add_after_the_end(&self) -> TaskError {
        make_bundle(self.dir.path(), "two", &["sleep"], |spec| {
            spec["annotations"] = json!({
                "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "demo",
            });
        });
        self.sandbox.create(Creation::task(self.request_of("two"))).await.unwrap_err()
    }
}

#[tokio::test]
async fn a_container_that_the_guest_refuses_leaves_its_pod_alone() {
    let story = Story::pod().await;
    let error = story.add("one", &["refused"]).await.unwrap_err();
    assert_eq!(chain(&error), "linux.rdma is not implemented");
    assert!(!story.has_files("one"));
    assert_eq!(story.run("one", &["exit", "0"]).await.id, "one");
    timeout(WAIT, story.sandbox.stop()).await.unwrap();
    assert!(story.sandbox.is_idle());
    assert!(!story.dir.path().join("run").exists());
}

#[tokio::test]
async fn who_kills_the_stand_in_means_the_container() {
    let story = Story::pod().await;
    let container = story.run("one", &["sleep"]).await;
    ProcessId::of(container.pid).unwrap().kill(WAIT).unwrap();
    assert_eq!(story.wait("one").await, 137);
    assert_eq!(story.status(), Status::Running);
    timeout(WAIT, story.sandbox.stop()).await.unwrap();
}

#[tokio::test]
async fn a_namespace_of_a_stranger_is_not_joined() {
    let story = Story::pod().await;
    make_bundle(story.dir.path(), "one", &["sleep"], |spec| {
        spec["annotations"] = json!({
            "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "demo",
        });
        spec["linux"]["namespaces"][0]["path"] = json!("/proc/1/ns/pid");
    });
    let error = story.sandbox.create(Creation::task(story.request_of("one"))).await.unwrap_err();
    let expected =
        "linux.namespaces: process 1 is of no container of this pod, so its pid namespace cannot be joined";
    assert_eq!(chain(&error), expected);
    timeout(WAIT, story.sandbox.stop()).await.unwrap();
}

#[tokio::test]
async fn a_pod_without_a_container_of_its_own() {
    let story = Story::begin(&["no-image"]).await;
    fs::remove_dir_all(story.dir.path().join("demo")).unwrap();
    let (done, is_done) = watch::channel(false);
    let service = SandboxService::new(story.sandbox.clone(), done);
    let id = || "demo".to_owned();
    let mut create = sandbox_api::CreateSandboxRequest::new();
    create.sandbox_id = id();
    create.options.mut_or_insert_default().type_url = "runtime.v1.PodSandboxConfig".into();
    // Field 2, the hostname.
    create.options.mut_or_insert_default().value = b"\x12\x05guest".to_vec();
    timeout(WAIT, service.create_sandbox(&TtrpcContext::default(), create.clone())).await.unwrap().unwrap();
    let status = sandbox_api::SandboxStatusRequest { sandbox_id: id(), ..Default::default() };
    let state =
        async || service.sandbox_status(&TtrpcContext::default(), status.clone()).await.unwrap().state;
    assert_eq!(state().await, "SANDBOX_NOTREADY");
    let start = sandbox_api::StartSandboxRequest { sandbox_id: id(), ..Default::default() };
    let started = service.start_sandbox(&TtrpcContext::default(), start).await.unwrap();
    assert_eq!((started.pid, state().await.as_str()), (story.guest.vmm().pid, "SANDBOX_READY"));

    story.run("one", &["sleep"]).await;
    // The pod's files, which nobody else has made: /etc/hostname is the second.
    let hostname = story.guest.state.join("share/one/mounts/1");
    assert_eq!(fs::read_to_string(hostname).unwrap(), "guest\n");
    let metrics = sandbox_api::SandboxMetricsRequest { sandbox_id: id(), ..Default::default() };
    let metrics = service.sandbox_metrics(&TtrpcContext::default(), metrics).await.unwrap().metrics;
    assert_eq!((metrics.id.as_str(), usage_usec(&metrics.data)), ("demo", 31));
    let stop = sandbox_api::StopSandboxRequest { sandbox_id: id(), ..Default::default() };
    timeout(WAIT, service.stop_sandbox(&TtrpcContext::default(), stop)).await.unwrap().unwrap();
    assert_eq!((story.wait("one").await, story.delete("one").await), (137, 137));
    assert_eq!(state().await, "SANDBOX_NOTREADY");
    let wait = sandbox_api::WaitSandboxRequest { sandbox_id: id(), ..Default::default() };
    assert_eq!(service.wait_sandbox(&TtrpcContext::default(), wait).await.unwrap().exit_status, 137);
    timeout(WAIT, service.shutdown_sandbox(&TtrpcContext::default(), Default::default()))
        .await
        .unwrap()
        .unwrap();
    assert!(*is_done.borrow());
    // containerd knows no task of the sandbox's id.
    story.end(&WHOLE_LIFE).await;
}

/// In the form that this host has for it.
fn usage_usec(metrics: &Any) -> u64 {
    match metrics.type_url.as_str() {
        "io.containerd.cgroups.v2.Metrics" => {
            cgroups_v2::metrics::Metrics::parse_from_bytes(&metrics.value).unwrap().cpu.usage_usec
        }
        "io.containerd.cgroups.v1.Metrics" => {
            cgroups::metrics::Metrics::parse_from_bytes(&metrics.value).unwrap().cpu.usage.total / 1000
        }
        other => panic!("metrics of the type {other}"),
    }
}

#[tokio::test]
async fn another_tasks_container_is_refused() {
    let story = Story::pod().await;
    make_bundle(story.dir.path(), "other", &["sleep"], |_| {});
    let error = story.sandbox.create(Creation::task(story.request_of("other"))).await.unwrap_err();
    assert_eq!(chain(&error), "this shim serves sandbox demo, to which the container does not belong");
    timeout(WAIT, story.sandbox.stop()).await.unwrap();
}

impl Story {
    /// Gives the container one hook of each of these kinds, which notes its kind and then runs the script.
    fn hooks(&self, hooks: &[(&str, &str)]) {
        let path = self.dir.path().join("demo/config.json");
        let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for (kind, script) in hooks {
            let script = format!("echo {kind} >> noted; {script}");
            spec["hooks"][kind] = json!([{"path": "/bin/sh", "args": ["sh", "-c", script]}]);
        }
        fs::write(&path, spec.to_string()).unwrap();
    }

    /// The kinds in the order in which they were run.
    fn noted(&self) -> String {
        fs::read_to_string(self.dir.path().join("demo/noted")).unwrap()
    }
}

#[tokio::test]
async fn hooks_are_run_along_the_life() {
    let story = Story::begin(&["exit", "7"]).await;
    story.hooks(&[("prestart", ""), ("createRuntime", ""), ("poststart", ""), ("poststop", "")]);
    story.create().await;
    assert_eq!(story.noted(), "prestart\ncreateRuntime\n");
    story.own().start_process().await.unwrap();
    assert_eq!(story.noted(), "prestart\ncreateRuntime\npoststart\n");
    timeout(WAIT, story.own().wait()).await.unwrap().unwrap();
    story.sandbox.delete("demo").await.unwrap();
    assert_eq!(story.noted(), "prestart\ncreateRuntime\npoststart\npoststop\n");
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_hook_that_fails_before_the_start_undoes_the_creation() {
    let story = Story::begin(&["sleep"]).await;
    story.hooks(&[("createRuntime", "echo why >&2; exit 3"), ("poststop", "")]);
    let error =
        timeout(WAIT, story.sandbox.create(Creation::task(story.request()))).await.unwrap().unwrap_err();
    assert_eq!(chain(&error), "hooks.createRuntime[0] (/bin/sh) failed (exit status 3): why");
    assert!(story.guest.processes.lock().unwrap().is_empty(), "the container was made");
    assert_eq!(story.noted(), "createRuntime\npoststop\n");
    story.end(&[]).await;
}

#[tokio::test]
async fn a_hook_that_fails_after_the_start_ends_the_process() {
    let story = Story::begin(&["sleep"]).await;
    story.hooks(&[("poststart", "exit 3")]);
    story.create().await;
    let error = timeout(WAIT, story.own().start_process()).await.unwrap().unwrap_err();
    assert_eq!(chain(&error), "hooks.poststart[0] (/bin/sh) failed (exit status 3): it does not say why");
    assert_eq!(*story.guest.exit_of("demo", "").borrow(), Some(137));
    assert_eq!(story.status(), Status::Stopped);
    story.sandbox.delete("demo").await.unwrap();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

/// The shim is told to end while a hook of this kind hangs.
async fn stop_during(kind: &str, topics: &[&str]) {
    let story = Story::begin(&["sleep"]).await;
    story.hooks(&[(kind, "exec sleep 1000")]);
    let (sandbox, request) = (story.sandbox.clone(), story.request());
    let life = tokio::spawn(async move {
        sandbox.create(Creation::task(request)).await?;
        sandbox.container("demo")?.start_process().await
    });
    let noted = story.dir.path().join("demo/noted");
    let waiting = async {
        while !noted.exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(WAIT, waiting).await.unwrap();
    timeout(WAIT, story.sandbox.stop()).await.unwrap();
    assert!(matches!(life.await.unwrap(), Err(TaskError::Stopping)));
    story.end(topics).await;
}

#[tokio::test]
async fn a_hook_that_hangs_before_the_start_does_not_keep_the_shim() {
    stop_during("createRuntime", &[]).await;
}

#[tokio::test]
async fn a_hook_that_hangs_after_the_start_does_not_keep_the_shim() {
    stop_during("poststart", &["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}
