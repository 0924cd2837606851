//! What the shim of a pod is asked, by a shim that only plays.

use std::{
    fs::OpenOptions,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use async_trait::async_trait;
use bulkhead_host_shim::operator::ContainerPlace;
use containerd_shim_protos::{
    api,
    shim_async::{Task, create_task},
};
use protobuf::well_known_types::empty::Empty;
use serde_json::{Value, json};
use tokio::{
    sync::mpsc::Sender,
    time::{Instant, sleep},
};
use ttrpc::r#async::{Server, TtrpcContext};

use super::*;
use crate::process::{options, signals::TOGETHER};

const SIGHUP: i32 = 1;
const SIGTERM: i32 = 15;

/// A shim with one container.
#[derive(Debug)]
struct FakeShim {
    pid: u32,
    status: Status,
    /// Why nothing can be started.
    refusal: Option<&'static str>,
    /// Whether a child of the program writes on after the end of the program, until the shim forgets the program.
    has_child: bool,
    is_forgotten: Arc<AtomicBool>,
    /// What this command gets while it waits for the start, which takes some time then: signals, and when they come.
    signals: &'static [(i32, Duration)],
    sender: Mutex<Option<Sender<(i32, Instant)>>>,
    /// Whether the program runs until it is killed.
    has_to_be_killed: bool,
    is_killed: AtomicBool,
    /// Whether there is no answer to the request to forget the program, but another event.
    is_silent: bool,
    /// Each request, in its order.
    asked: Mutex<Vec<String>>,
    added: Mutex<Option<api::ExecProcessRequest>>,
}

impl FakeShim {
    fn note(&self, request: &str, exec_id: &str) {
        let kind = if exec_id.starts_with("bulkhead-exec-") { "process" } else { "container" };
        self.asked.lock().unwrap().push(format!("{request} {kind}"));
    }
}

#[async_trait]
impl Task for FakeShim {
    async fn connect(&self, _: &TtrpcContext, _: api::ConnectRequest) -> ttrpc::Result<api::ConnectResponse> {
        Ok(api::ConnectResponse { shim_pid: self.pid, ..Default::default() })
    }

    async fn state(&self, _: &TtrpcContext, request: api::StateRequest) -> ttrpc::Result<api::StateResponse> {
        self.note("state", &request.exec_id);
        Ok(api::StateResponse { status: self.status.into(), ..Default::default() })
    }

    async fn exec(&self, _: &TtrpcContext, request: api::ExecProcessRequest) -> ttrpc::Result<Empty> {
        self.note("exec", &request.exec_id);
        *self.added.lock().unwrap() = Some(request);
        Ok(Empty::new())
    }

    async fn start(&self, _: &TtrpcContext, request: api::StartRequest) -> ttrpc::Result<api::StartResponse> {
        self.note("start", &request.exec_id);
        if let Some(words) = self.refusal {
            return Err(ttrpc::Error::RpcStatus(ttrpc::get_status(ttrpc::Code::UNKNOWN, words)));
        }
        let added = self.added.lock().unwrap().clone().unwrap();
        // Nothing is printed.
        for stream in [&added.stdout, &added.stderr] {
            drop(OpenOptions::new().read(true).write(true).open(stream).unwrap());
        }
        let sender = self.sender.lock().unwrap().clone().unwrap();
        for (signal, after) in self.signals {
            sender.send((*signal, Instant::now() + *after)).await.unwrap();
            sleep(Duration::from_millis(50)).await;
        }
        if self.has_child {
            let mut output = OpenOptions::new().write(true).open(&added.stdout).unwrap();
            let is_forgotten = self.is_forgotten.clone();
            thread::spawn(move || {
                while !is_forgotten.load(Ordering::SeqCst) && output.write_all(b"y").is_ok() {
                    thread::sleep(Duration::from_millis(5));
                }
            });
        }
        Ok(api::StartResponse::new())
    }

    async fn wait(&self, _: &TtrpcContext, request: api::WaitRequest) -> ttrpc::Result<api::WaitResponse> {
        self.note("wait", &request.exec_id);
        Ok(api::WaitResponse { exit_status: 7, ..Default::default() })
    }

    async fn kill(&self, _: &TtrpcContext, request: api::KillRequest) -> ttrpc::Result<Empty> {
        self.note("kill", &request.exec_id);
        self.is_killed.store(true, Ordering::SeqCst);
        Ok(Empty::new())
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: api::DeleteRequest,
    ) -> ttrpc::Result<api::DeleteResponse> {
        self.note("delete", &request.exec_id);
        if self.is_silent {
            let sender = self.sender.lock().unwrap().clone().unwrap();
            sender.send((SIGTERM, Instant::now() + TOGETHER)).await.unwrap();
            std::future::pending().await
        }
        if self.has_to_be_killed && !self.is_killed.load(Ordering::SeqCst) {
            let status = ttrpc::get_status(ttrpc::Code::FAILED_PRECONDITION, "it runs");
            return Err(ttrpc::Error::RpcStatus(status));
        }
        self.is_forgotten.store(true, Ordering::SeqCst);
        Ok(api::DeleteResponse::new())
    }
}

/// How `bulkhead exec` ends with this shim, and what it has asked.
struct Played {
    status: Result<u8, String>,
    /// Of this command.
    exit: u8,
    asked: Vec<String>,
    added: Option<api::ExecProcessRequest>,
    is_left: bool,
}

async fn play(mut shim: FakeShim) -> Played {
    let dir = tempfile::tempdir().unwrap();
    let (sender, mut signals) = Signals::of_test();
    shim.sender = Mutex::new(Some(sender));
    let socket = dir.path().join("socket");
    let shim = Arc::new(shim);
    let services = create_task(shim.clone());
    let mut server =
        Server::new().bind(&format!("unix://{}", socket.display())).unwrap().register_service(services);
    server.start().await.unwrap();
    let place = ContainerPlace { id: "web".into(), bundle: "/b".into(), root: "/r".into() };
    let spec = json!({ "process": { "args": ["own"], "env": ["A=1"], "cwd": "/" } });
    let (state, shim_pid) = (dir.path().join("state"), 77);
    let target = Target { pod: "pod".into(), state, shim_pid, socket, place, spec };
    let options = options(&["pod", "--", "id"]).unwrap();
    let directory = ExecDirectory::create_in(&dir.path().join("execs"), shim_pid).unwrap();
    let status = exec_in(&directory, &target, &options, &mut signals).await;
    Played {
        exit: status.as_ref().map_or_else(ExecError::status, |status| *status),
        status: status.map_err(|error| error.to_string()),
        asked: shim.asked.lock().unwrap().clone(),
        added: shim.added.lock().unwrap().clone(),
        is_left: directory.path().exists(),
    }
}

fn shim() -> FakeShim {
    FakeShim {
        pid: 77,
        status: Status::RUNNING,
        refusal: None,
        has_child: false,
        is_forgotten: Arc::default(),
        signals: &[],
        sender: Mutex::default(),
        has_to_be_killed: false,
        is_killed: AtomicBool::default(),
        is_silent: false,
        asked: Mutex::default(),
        added: Mutex::default(),
    }
}

#[tokio::test]
async fn a_process_is_added_followed_and_forgotten() {
    let Played { status, asked, added, is_left, .. } = play(shim()).await;
    assert_eq!(status, Ok(7));
    let expected = ["state container", "exec process", "start process", "wait process", "delete process"]
        .map(str::to_owned);
    assert_eq!(asked, expected);
    let added = added.unwrap();
    assert_eq!((added.id.as_str(), added.terminal, added.stdin.as_str()), ("web", false, ""));
    let process: Value = serde_json::from_slice(&added.spec.value).unwrap();
    assert_eq!(process, json!({ "args": ["id"], "env": ["A=1"], "cwd": "/", "terminal": false }));
    assert!(!is_left);
}

#[tokio::test]
async fn a_child_that_writes_on_and_on_does_not_keep_the_command() {
    let played = timeout(Duration::from_secs(60), play(FakeShim { has_child: true, ..shim() })).await;
    let Played { status, is_left, .. } = played.unwrap();
    assert_eq!((status, is_left), (Ok(7), false));
}

#[tokio::test]
async fn a_program_that_is_not_there_leaves_nothing() {
    let refusal = Some("container web: exec: \"id\": executable file not found in $PATH");
    let played = play(FakeShim { refusal, ..shim() }).await;
    assert!(played.status.unwrap_err().contains("executable file not found"));
    assert_eq!(played.asked.last().map(String::as_str), Some("delete process"));
    assert!(!played.is_left);
}

#[tokio::test]
async fn nothing_is_added_to_a_container_that_does_not_run_or_to_another_pod() {
    for (status, words) in [
        (Status::CREATED, "the container web was created and not started"),
        (Status::PAUSED, "the container web is paused"),
        (Status::STOPPED, "the container web has ended"),
    ] {
        let played = play(FakeShim { status, ..shim() }).await;
        let error = played.status.unwrap_err();
        assert!(error.contains(words), "{error}");
        assert!(played.added.is_none() && !played.is_left);
    }
    let played = play(FakeShim { pid: 78, ..shim() }).await;
    assert!(played.status.unwrap_err().contains("another pod with the id pod"));
    assert!(played.added.is_none() && played.asked.is_empty() && !played.is_left);
}

#[tokio::test]
async fn a_program_whose_start_was_interrupted_is_killed_whatever_signals_the_event_has() {
    let signals = &[(SIGTERM, Duration::ZERO), (SIGHUP, Duration::ZERO)];
    let played = play(FakeShim { signals, has_to_be_killed: true, ..shim() }).await;
    let error = played.status.unwrap_err();
    assert!(error.ends_with("while the program was being started; it may have run"), "{error}");
    assert_eq!(played.exit, 143);
    let asked = ["delete process", "kill process", "wait process", "delete process"];
    assert!(played.asked.ends_with(&asked.map(str::to_owned)), "{:?}", played.asked);
    assert!(!played.is_left);
}

#[tokio::test]
async fn a_program_whose_start_was_interrupted_twice_is_killed() {
    let signals = &[(SIGTERM, Duration::ZERO), (SIGTERM, TOGETHER)];
    let played = play(FakeShim { signals, has_to_be_killed: true, ..shim() }).await;
    assert_eq!(played.exit, 143);
    assert!(played.asked.contains(&"kill process".to_owned()), "{:?}", played.asked);
    assert!(!played.is_left);
}

#[tokio::test]
async fn a_second_event_ends_a_removal_that_hangs() {
    let signals = &[(SIGTERM, Duration::ZERO)];
    let played = timeout(Duration::from_secs(30), play(FakeShim { signals, is_silent: true, ..shim() }));
    assert_eq!(played.await.unwrap().exit, 143);
}
