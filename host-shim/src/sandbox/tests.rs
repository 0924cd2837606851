//! A sandbox from create to delete, with a guest that is played by the test: the VMM is `sleep`, the agent a ttrpc
//! service behind the VMM's socket.

use std::{collections::HashMap, fs, os::unix::fs::PermissionsExt, time::SystemTime};

use async_trait::async_trait;
use bulkhead_agent_api::{
    API_VERSION, READY_PORT, RPC_PORT, STREAM_PORT,
    agent::*,
    agent_ttrpc::{Agent as AgentService, create_agent},
};
use nix::{
    sys::stat::Mode,
    unistd::{Pid, mkfifo},
};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream, unix::pipe},
    time::timeout,
};
use ttrpc::{
    Code,
    r#async::{Server, TtrpcContext},
};

use super::*;
use crate::{
    container::Status, events::tests::Heard, execs::ExecPhase, process::ProcessId, testing::private_mounts,
};

const WAIT: Duration = Duration::from_secs(5);

/// What the guest knows. Its processes do what `process.args` says: `exit N`, `sleep`, or `missing`.
#[derive(Clone)]
struct Guest {
    state: PathBuf,
    /// The ends of the processes added.
    execs: Arc<std::sync::Mutex<HashMap<String, watch::Sender<Option<u32>>>>>,
    args: Arc<std::sync::Mutex<Vec<String>>>,
    exit: watch::Sender<Option<u32>>,
    stdout: Arc<tokio::sync::Mutex<Option<UnixStream>>>,
}

fn refused<T>(code: Code, text: &str) -> ttrpc::Result<T> {
    Err(ttrpc::Error::RpcStatus(ttrpc::get_status(code, text)))
}

impl Guest {
    fn vmm(&self) -> ProcessId {
        Journal::open(&self.state).unwrap().vmm().unwrap()
    }

    async fn end(&self, status: u32) {
        if let Some(mut stdout) = self.stdout.lock().await.take() {
            stdout.write_all(b"bye").await.unwrap();
        }
        self.exit.send_replace(Some(status));
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
        // What the guest is told of is what the share has.
        assert!(self.state.join("share/demo/rootfs/marker").exists());
        let spec: serde_json::Value = serde_json::from_slice(&request.spec_json).unwrap();
        let args: Vec<String> = serde_json::from_value(spec["process"]["args"].clone()).unwrap();
        if args[0] == "refused" {
            return refused(Code::UNIMPLEMENTED, "linux.rdma is not implemented");
        }
        *self.args.lock().unwrap() = args;
        Ok(CreateContainerResponse::new())
    }

    async fn start_container(&self, _: &TtrpcContext, _: StartContainerRequest) -> ttrpc::Result<Empty> {
        let args = self.args.lock().unwrap().clone();
        match args[0].as_str() {
            "missing" => return refused(Code::NOT_FOUND, "exec \"missing\": No such file or directory"),
            "exit" => self.end(args[1].parse().unwrap()).await,
            _ => {}
        }
        Ok(Empty::new())
    }

    async fn wait_process(
        &self,
        _: &TtrpcContext,
        request: WaitProcessRequest,
    ) -> ttrpc::Result<WaitProcessResponse> {
        let mut exit = match request.exec_id.as_str() {
            "" => self.exit.subscribe(),
            id => self.execs.lock().unwrap()[id].subscribe(),
        };
        let status = exit.wait_for(Option::is_some).await.unwrap().unwrap();
        let mut response = WaitProcessResponse::new();
        response.exit_status = status;
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
        self.execs.lock().unwrap().insert(request.exec_id, watch::Sender::new(exit));
        Ok(ExecProcessResponse::new())
    }

    async fn delete_process(&self, _: &TtrpcContext, request: DeleteProcessRequest) -> ttrpc::Result<Empty> {
        assert!(self.execs.lock().unwrap().remove(&request.exec_id).is_some());
        Ok(Empty::new())
    }

    async fn signal_process(&self, _: &TtrpcContext, request: SignalProcessRequest) -> ttrpc::Result<Empty> {
        let status = 128 + request.signal;
        match request.exec_id.as_str() {
            "" => self.end(status).await,
            id => _ = self.execs.lock().unwrap()[id].send_replace(Some(status)),
        }
        Ok(Empty::new())
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
        fs::create_dir_all(at("bundle/rootfs")).unwrap();
        fs::write(at("bundle/rootfs/marker"), "").unwrap();
        let spec = json!({
            "ociVersion": "1.1.0",
            "process": {"user": {"uid": 0, "gid": 0}, "args": args, "cwd": "/"},
            "root": {"path": "rootfs"},
            "hostname": "guest",
            "linux": {
                "cgroupsPath": format!("/bulkhead-test-{}/{}", std::process::id(), at("").display().to_string().replace('/', "-")),
                "namespaces": [
                    {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}
                ],
            },
        });
        fs::write(at("bundle/config.json"), spec.to_string()).unwrap();
        fs::write(at("vmm"), "#!/bin/sh\nexec unshare --net sleep 60\n").unwrap();
        fs::set_permissions(at("vmm"), fs::Permissions::from_mode(0o755)).unwrap();
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
        };
        let guest = Guest {
            state: settings.state_path(),
            execs: Arc::default(),
            args: Arc::default(),
            exit: watch::Sender::new(None),
            stdout: Arc::default(),
        };
        let sandbox = Sandbox::start(settings, events.clone());
        Self { dir, sandbox, guest, heard, events, _server: server }
    }

    fn request(&self) -> api::CreateTaskRequest {
        let mut request = api::CreateTaskRequest::new();
        request.id = "demo".into();
        request.bundle = self.dir.path().join("bundle").display().to_string();
        request
    }

    async fn create(&self) -> Arc<Container> {
        timeout(WAIT, self.sandbox.create(self.request())).await.unwrap().unwrap()
    }

    fn status(&self) -> Status {
        self.sandbox.phase().status()
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
    story.sandbox.start_process().await.unwrap();
    let exit = timeout(WAIT, story.sandbox.wait()).await.unwrap().unwrap();
    assert_eq!(exit.status, 7);
    assert!(exit.at <= SystemTime::now());
    let deleted = timeout(WAIT, story.sandbox.delete()).await.unwrap().unwrap();
    assert_eq!((deleted.pid, deleted.exit.status), (container.pid, 7));
    assert!(matches!(story.sandbox.delete().await, Err(TaskError::Refused(Refusal::NotFound))));
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
    story.sandbox.create(request).await.unwrap();
    story.sandbox.start_process().await.unwrap();
    let mut output = String::new();
    timeout(WAIT, client.read_to_string(&mut output)).await.unwrap().unwrap();
    assert_eq!(output, "bye");
    story.sandbox.delete().await.unwrap();
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn create_asked_again_answers_the_same() {
    let story = Story::begin(&["sleep"]).await;
    let request = story.request();
    let (one, two) =
        tokio::join!(story.sandbox.create(request.clone()), story.sandbox.create(request.clone()));
    // The one that came second finds it made, or making.
    let pids: Vec<_> = [one, two].into_iter().filter_map(Result::ok).map(|container| container.pid).collect();
    assert!(!pids.is_empty() && pids.iter().all(|pid| *pid == story.guest.vmm().pid));
    assert_eq!(story.sandbox.create(request.clone()).await.unwrap().pid, pids[0]);
    let mut other = request;
    other.stdout = "/elsewhere".into();
    assert!(matches!(story.sandbox.create(other).await, Err(TaskError::Refused(Refusal::Exists))));
    story.sandbox.delete().await.unwrap();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn the_vmms_death_is_the_process_s_death() {
    let story = Story::begin(&["sleep"]).await;
    story.create().await;
    story.sandbox.start_process().await.unwrap();
    assert!(story.sandbox.delete().await.is_err());
    story.guest.vmm().kill(WAIT).unwrap();
    let exit = timeout(Duration::from_secs(1), story.sandbox.wait()).await.unwrap().unwrap();
    assert_eq!(exit.status, 137);
    assert_eq!(timeout(WAIT, story.sandbox.delete()).await.unwrap().unwrap().exit.status, 137);
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
    story.sandbox.start_process().await.unwrap();
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
    story.guest.end(0).await;
    timeout(WAIT, story.sandbox.wait()).await.unwrap().unwrap();
    story.sandbox.delete().await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/exit", "/tasks/delete"]].concat()).await;
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
    story.sandbox.delete().await.unwrap();
    story.end(&["/tasks/create", "/tasks/exec-added", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn the_vmms_death_is_heard_of_each_process_before_the_container() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    story.sandbox.start_process().await.unwrap();
    container.execs.add(exec("one", &["sleep"])).unwrap();
    container.execs.start("one", container.pid).await.unwrap();
    assert!(matches!(container.execs.delete("one").await, Err(TaskError::ExecRuns { .. })));
    story.guest.vmm().kill(WAIT).unwrap();
    timeout(WAIT, story.sandbox.wait()).await.unwrap().unwrap();
    let one = container.execs.get("one").unwrap();
    assert!(matches!(one.phase(), ExecPhase::Stopped(exit) if exit.status == 137));
    story.sandbox.delete().await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_signal_ends_the_process() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    story.sandbox.start_process().await.unwrap();
    container.agent.signal("demo", 9, false).await.unwrap();
    assert_eq!(timeout(WAIT, story.sandbox.wait()).await.unwrap().unwrap().status, 137);
    story.sandbox.delete().await.unwrap();
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_command_that_is_missing_is_named_and_can_be_deleted() {
    let story = Story::begin(&["missing"]).await;
    story.create().await;
    let error = story.sandbox.start_process().await.unwrap_err();
    assert_eq!(chain(&error), "exec \"missing\": No such file or directory");
    assert_eq!(story.status(), Status::Stopped);
    assert_eq!(story.sandbox.wait().await.unwrap().status, 255);
    story.sandbox.delete().await.unwrap();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn what_the_guest_refuses_leaves_nothing() {
    let story = Story::begin(&["refused"]).await;
    let error = story.sandbox.create(story.request()).await.unwrap_err();
    assert_eq!(chain(&error), "linux.rdma is not implemented");
    assert_eq!(story.status(), Status::Absent);
    story.end(&[]).await;
}

#[tokio::test]
async fn what_is_missing_on_the_host_leaves_nothing() {
    let story = Story::begin(&["sleep"]).await;
    fs::remove_dir_all(story.dir.path().join("bundle/rootfs")).unwrap();
    let error = story.sandbox.create(story.request()).await.unwrap_err();
    assert!(chain(&error).contains("bundle/rootfs: no such file or directory"), "{}", chain(&error));
    fs::write(story.dir.path().join("config.toml"), "kernel = \"/nonexistent/vmlinux\"\n").unwrap();
    let error = story.sandbox.create(story.request()).await.unwrap_err();
    assert!(chain(&error).starts_with("kernel /nonexistent/vmlinux: No such file"), "{}", chain(&error));
    story.end(&[]).await;
}

#[tokio::test]
async fn a_vmm_that_fails_says_why() {
    let story = Story::without_guest(&["sleep"]).await;
    fs::write(story.dir.path().join("vmm"), "#!/bin/sh\necho 'no /dev/kvm' >&2\nexit 1\n").unwrap();
    let error = timeout(WAIT, story.sandbox.create(story.request())).await.unwrap().unwrap_err();
    assert_eq!(chain(&error), "the VM ended: no /dev/kvm");
    story.end(&[]).await;
}

#[tokio::test]
async fn the_end_of_the_shim_ends_everything() {
    let story = Story::begin(&["sleep"]).await;
    story.create().await;
    story.sandbox.start_process().await.unwrap();
    let waiting = story.sandbox.clone();
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
    let creating = tokio::spawn(async move { creating.create(request).await });
    let mut phase = story.sandbox.phase.clone();
    phase.wait_for(|phase| phase.status() == Status::Creating).await.unwrap();
    timeout(WAIT, story.sandbox.stop()).await.unwrap();
    assert!(creating.await.unwrap().is_err());
    story.end(&[]).await;
}

#[tokio::test]
async fn another_tasks_container_is_refused() {
    let story = Story::begin(&["sleep"]).await;
    let mut request = story.request();
    request.id = "other".into();
    let error = story.sandbox.create(request).await.unwrap_err();
    assert_eq!(chain(&error), "this shim serves task demo only; pods are not implemented");
    story.end(&[]).await;
}
