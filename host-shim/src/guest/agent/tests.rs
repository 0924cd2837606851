//! The client and the agent's own service, in a guest without a VM (`testing/guest.rs`): which answer comes when.

mod silence;

use std::{fs, os::unix::fs::PermissionsExt, pin::Pin, time::Duration};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, timeout},
};
use ttrpc::Code;

use super::*;
use crate::{
    guest::profiles::Profiles,
    host::{
        apparmor::{Part, Policy},
        journal::Journal,
        state_dir::StateDir,
    },
    testing::{
        guest::{self, make_root, mounts, process},
        private_mounts,
    },
    types::config::Config,
    vm::{
        start::{VmRequest, prepare},
        vmm::Vm,
    },
};

/// Longer than anything takes on a machine that has much else to do.
const WAIT: Duration = Duration::from_secs(15);

/// The directory that the guest sees, in the state directory.
const SHARE: &str = "share";

/// Reads nothing, and prints nothing.
const NO_STDIO: fn() -> agent::Stdio = agent::Stdio::new;

/// A guest whose agent is ready.
struct Booted {
    dir: tempfile::TempDir,
    guest: guest::Guest,
    vm: Vm,
    agent: Agent,
    _state: StateDir,
    _journal: Journal,
}

/// A guest that is told nothing yet.
async fn boot() -> Booted {
    private_mounts();
    let dir = tempfile::tempdir().unwrap();
    let (state, mut journal) = StateDir::create(&dir.path().join("run/c/ns/demo"), &[]).unwrap();
    fs::create_dir(state.path().join(SHARE)).unwrap();
    let guest = guest::Guest::new(state.path().to_owned());
    let vmm = dir.path().join("vmm");
    guest.write_vmm(&vmm);
    let config = Config { vmm, templates: false, ..Config::default() };
    let request = VmRequest::of_one_vcpu(&config);
    let plan = prepare(&mut journal, &state, &config, request).unwrap();
    let vm = timeout(WAIT, Vm::start(&mut journal, &state, plan)).await.unwrap().unwrap();
    let agent = Agent::connect(vm.vsock()).await.unwrap();
    Booted { dir, guest, vm, agent, _state: state, _journal: journal }
}

/// A guest that knows its pod.
async fn started() -> Booted {
    let booted = boot().await;
    booted.agent.start_sandbox("demo", "guest", HostSettings::default()).await.unwrap();
    booted
}

impl Booted {
    /// A spec, and the container's root in the share.
    fn spec(&self, id: &str, args: &[&str]) -> Value {
        let root = self.guest.state.join(SHARE).join(id).join("rootfs");
        make_root(&root);
        json!({
            "ociVersion": "1.1.0",
            "process": process(args),
            "root": {"path": format!("{}/{id}/rootfs", bulkhead_agent_api::SHARE_DIR)},
            "mounts": mounts(),
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "network"}]},
        })
    }

    async fn create(&self, id: &str, args: &[&str]) -> Result<(), AgentError> {
        self.create_with(id, &self.spec(id, args), NO_STDIO()).await
    }

    async fn create_with(&self, id: &str, spec: &Value, stdio: agent::Stdio) -> Result<(), AgentError> {
        let spec_json = spec.to_string().into_bytes();
        let new = NewContainer {
            id,
            spec_json: &spec_json,
            joined: &[],
            pause: false,
            no_new_keyring: false,
            host_sockets: &[],
        };
        self.agent.create_container(new, stdio).await
    }

    async fn run(&self, id: &str, args: &[&str]) {
        self.create(id, args).await.unwrap();
        self.agent.start_container(id).await.unwrap();
    }

    async fn exec(&self, id: &str, exec_id: &str, args: &[&str]) -> Result<(), AgentError> {
        let process = process(args).to_string().into_bytes();
        self.agent.exec_process(id, exec_id, process, NO_STDIO()).await
    }

    async fn status(&self, id: &str, exec_id: &str) -> u32 {
        let end = timeout(WAIT, self.agent.wait_exec(id, exec_id)).await.unwrap();
        end.unwrap().exit.status
    }
}

/// A refusal's code, and its text.
fn refusal<T>(result: Result<T, AgentError>) -> (Code, String) {
    match result {
        Err(AgentError::Refused { code, message }) => (code, message),
        Err(other) => panic!("no refusal, but {other:?}"),
        Ok(_) => panic!("it is not refused"),
    }
}

fn code<T>(result: Result<T, AgentError>) -> Code {
    refusal(result).0
}

#[tokio::test]
async fn the_sandbox_is_started_first_and_once() {
    let booted = boot().await;
    let early = refusal(booted.agent.list_pids("demo").await);
    assert_eq!(early, (Code::FAILED_PRECONDITION, "the sandbox is not started".into()));
    assert_eq!(code(booted.create("demo", &["true"]).await), Code::FAILED_PRECONDITION);
    let release = booted.agent.start_sandbox("demo", "guest", HostSettings::default()).await.unwrap();
    assert_eq!(release, fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim_end());
    let again = refusal(booted.agent.start_sandbox("demo", "guest", HostSettings::default()).await);
    assert_eq!(again, (Code::FAILED_PRECONDITION, "the sandbox has been started already".into()));
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<(), AgentError>> + 'a>>;

/// Each call for a container that has a deadline, its name and its deadline. None is made before it is awaited.
fn calls_with_deadlines<'a>(agent: &'a Agent, id: &'a str) -> Vec<(&'static str, Duration, Answer<'a>)> {
    let size = WindowSize { width: 80, height: 24 };
    let process = process(&["true"]).to_string().into_bytes();
    let exec = agent.exec_process(id, "e", process, NO_STDIO());
    vec![
        ("ConfigureNetwork", SETUP, Box::pin(agent.configure_network(id, interface("eth0")))),
        ("ChangeNetwork", SETUP, Box::pin(agent.change_network(id, agent::ChangeNetworkRequest::new()))),
        ("ChangeRouting", SETUP, Box::pin(agent.change_routing(id, agent::ChangeRoutingRequest::new()))),
        ("RemoveNetwork", SETUP, Box::pin(agent.remove_network(id, [2, 0, 0, 0, 0, 1]))),
        ("StartContainer", SETUP, Box::pin(agent.start_container(id))),
        ("ExecProcess", SETUP, Box::pin(exec)),
        ("SignalProcess", QUICK, Box::pin(agent.signal(id, 9, false))),
        ("SignalProcess", QUICK, Box::pin(agent.signal(id, 9, true))),
        ("SignalProcess", QUICK, Box::pin(agent.signal_exec(id, "e", 9))),
        ("ListPids", LIST, Box::pin(async { agent.list_pids(id).await.map(drop) })),
        ("ResizeTerminal", QUICK, Box::pin(agent.resize(id, "", size))),
        ("PauseContainer", QUICK, Box::pin(agent.pause(id))),
        ("ResumeContainer", QUICK, Box::pin(agent.resume(id))),
        ("UpdateContainer", QUICK, Box::pin(agent.update(id, 1, b"{}".to_vec()))),
        ("Stats", STATS, Box::pin(async { agent.stats(id).await.map(drop) })),
        ("DeleteContainer", QUICK, Box::pin(agent.delete_container(id))),
    ]
}

fn interface(name: &str) -> agent::ConfigureNetworkRequest {
    let mut interface = agent::ConfigureNetworkRequest::new();
    (interface.name, interface.mac, interface.mtu) = (name.into(), vec![2, 0, 0, 0, 0, 1], 1500);
    interface.card = vec![2, 0, 0, 0, 0, 1];
    interface
}

#[tokio::test]
async fn a_container_that_does_not_exist_is_not_found() {
    let booted = started().await;
    for (call, _, answer) in calls_with_deadlines(&booted.agent, "nobody") {
        assert_eq!(code(answer.await), Code::NOT_FOUND, "{call}");
    }
    assert_eq!(code(booted.agent.wait("nobody").await), Code::NOT_FOUND);
    assert_eq!(code(booted.agent.wait_oom("nobody", 0).await), Code::NOT_FOUND);
    let text = refusal(booted.agent.stats("nobody").await).1;
    assert_eq!(text, "container nobody does not exist");
    booted.run("demo", &["sleep", "1000"]).await;
    let unknown = [
        refusal(booted.agent.wait_exec("demo", "e").await),
        refusal(booted.agent.signal_exec("demo", "e", 9).await),
        refusal(booted.agent.resize("demo", "e", WindowSize { width: 80, height: 24 }).await),
    ];
    for unknown in unknown {
        assert_eq!(unknown, (Code::NOT_FOUND, "exec e not found".into()));
    }
}

#[tokio::test]
async fn a_container_lives_from_create_to_delete() {
    let booted = started().await;
    let agent = &booted.agent;
    booted.create("demo", &["sleep", "1000"]).await.unwrap();
    assert_eq!(code(booted.create("demo", &["true"]).await), Code::ALREADY_EXISTS);
    assert_eq!(agent.list_pids("demo").await.unwrap().len(), 1);
    booted.exec("demo", "before", &["true"]).await.unwrap();
    assert_eq!(booted.status("demo", "before").await, 0);
    agent.start_container("demo").await.unwrap();
    let again = refusal(agent.start_container("demo").await);
    assert_eq!(again, (Code::FAILED_PRECONDITION, "container demo has been started already".into()));
    let early = refusal(agent.delete_container("demo").await);
    assert_eq!(early, (Code::FAILED_PRECONDITION, "container demo is still running".into()));
    let size = WindowSize { width: 80, height: 24 };
    assert_eq!(code(agent.resize("demo", "", size).await), Code::FAILED_PRECONDITION);
    let stats = agent.stats("demo").await.unwrap();
    assert!(stats.cpu.usage_usec > 0);
    agent.signal("demo", 9, false).await.unwrap();
    // The end is reported as often as it is asked for.
    assert_eq!([booted.status("demo", "").await, booted.status("demo", "").await], [137, 137]);
    let late = refusal(agent.signal("demo", 9, false).await);
    assert_eq!(late, (Code::NOT_FOUND, "process already finished".into()));
    // Nobody is left, and everybody got the signal.
    agent.signal("demo", 15, true).await.unwrap();
    agent.signal("demo", 9, true).await.unwrap();
    let late = refusal(booted.exec("demo", "late", &["true"]).await);
    assert_eq!(late, (Code::FAILED_PRECONDITION, "cannot exec in a stopped container".into()));
    assert_eq!(agent.list_pids("demo").await.unwrap(), [0; 0]);
    agent.delete_container("demo").await.unwrap();
    assert_eq!(code(agent.delete_container("demo").await), Code::NOT_FOUND);
    assert_eq!(code(agent.wait("demo").await), Code::NOT_FOUND);
    // The id is free, and a container that was never started is deleted at once.
    booted.create("demo", &["sleep", "1000"]).await.unwrap();
    agent.delete_container("demo").await.unwrap();
}

#[tokio::test]
async fn a_paused_container_takes_no_process_and_can_be_killed() {
    let booted = started().await;
    let agent = &booted.agent;
    booted.run("demo", &["sleep", "1000"]).await;
    agent.pause("demo").await.unwrap();
    // Each of them can be repeated.
    agent.pause("demo").await.unwrap();
    let paused = refusal(booted.exec("demo", "e", &["true"]).await);
    assert_eq!(paused, (Code::FAILED_PRECONDITION, "cannot exec in a paused container".into()));
    agent.resume("demo").await.unwrap();
    agent.resume("demo").await.unwrap();
    booted.exec("demo", "e", &["true"]).await.unwrap();
    agent.pause("demo").await.unwrap();
    agent.signal("demo", 9, false).await.unwrap();
    assert_eq!(booted.status("demo", "").await, 137);
    agent.delete_container("demo").await.unwrap();
}

#[tokio::test]
async fn a_process_of_exec_is_forgotten_when_its_end_was_told() {
    let booted = started().await;
    booted.run("demo", &["sleep", "1000"]).await;
    booted.exec("demo", "e", &["sh", "-c", "exit 7"]).await.unwrap();
    assert_eq!(code(booted.exec("demo", "e", &["true"]).await), Code::ALREADY_EXISTS);
    assert_eq!(booted.status("demo", "e").await, 7);
    assert_eq!(code(booted.agent.wait_exec("demo", "e").await), Code::NOT_FOUND);
    booted.exec("demo", "e", &["sleep", "1000"]).await.unwrap();
    booted.agent.signal_exec("demo", "e", 9).await.unwrap();
    assert_eq!(booted.status("demo", "e").await, 137);
    // What could not be executed leaves its id free.
    let error = refusal(booted.exec("demo", "e", &["missing"]).await);
    assert_eq!(error, (Code::UNKNOWN, "exec: \"missing\": executable file not found in $PATH".into()));
    booted.exec("demo", "e", &["sleep", "1000"]).await.unwrap();
    // The processes end with their init, and their ends are told first.
    booted.agent.signal("demo", 9, false).await.unwrap();
    assert_eq!((booted.status("demo", "").await, booted.status("demo", "e").await), (137, 137));
}

#[tokio::test]
async fn a_program_that_cannot_be_executed_fails_the_start_and_ends_the_init() {
    let booted = started().await;
    let spec = booted.spec("demo", &["/text"]);
    let text = booted.guest.state.join("share/demo/rootfs/text");
    fs::write(&text, "no program").unwrap();
    fs::set_permissions(&text, fs::Permissions::from_mode(0o755)).unwrap();
    booted.create_with("demo", &spec, NO_STDIO()).await.unwrap();
    let error = refusal(booted.agent.start_container("demo").await);
    assert_eq!(error, (Code::UNKNOWN, "exec /text: exec format error".into()));
    assert_eq!(booted.status("demo", "").await, 127);
    booted.agent.delete_container("demo").await.unwrap();
}

#[tokio::test]
async fn what_is_wrong_is_refused_with_its_code() {
    let booted = started().await;
    let agent = &booted.agent;
    booted.run("demo", &["sleep", "1000"]).await;
    let mut with_label = booted.spec("other", &["true"]);
    with_label["linux"]["mountLabel"] = json!("label");
    let spec = booted.spec("other", &["true"]);
    let joined = |kind: &str, id: &str| agent::JoinedNamespace {
        kind: kind.into(),
        container_id: id.into(),
        ..Default::default()
    };
    let spec_json = spec.to_string().into_bytes();
    let joining = async |kind, id| {
        let joined = [joined(kind, id)];
        let new = NewContainer {
            id: "other",
            spec_json: &spec_json,
            joined: &joined,
            pause: false,
            no_new_keyring: false,
            host_sockets: &[],
        };
        code(agent.create_container(new, NO_STDIO()).await)
    };
    // The machine has no such processor.
    let cpus = json!({"cpu": {"cpus": "99999"}});
    let cases = [
        (code(booted.create_with("other", &with_label, NO_STDIO()).await), Code::UNIMPLEMENTED),
        (code(booted.create_with("../other", &spec, NO_STDIO()).await), Code::INVALID_ARGUMENT),
        (code(booted.create_with("other", &json!([]), NO_STDIO()).await), Code::INVALID_ARGUMENT),
        (joining("network", "nobody").await, Code::NOT_FOUND),
        (joining("colour", "demo").await, Code::UNIMPLEMENTED),
        (code(agent.exec_process("demo", "e", b"{".to_vec(), NO_STDIO()).await), Code::INVALID_ARGUMENT),
        (code(booted.exec("demo", "", &["true"]).await), Code::INVALID_ARGUMENT),
        (code(agent.signal("demo", 65, false).await), Code::INVALID_ARGUMENT),
        (code(agent.update("demo", 1, b"{".to_vec()).await), Code::INVALID_ARGUMENT),
        (code(agent.update("demo", 1, cpus.to_string().into_bytes()).await), Code::INVALID_ARGUMENT),
        (code(agent.configure_network("demo", interface("../x")).await), Code::INVALID_ARGUMENT),
    ];
    for (at, (code, expected)) in cases.into_iter().enumerate() {
        assert_eq!(code, expected, "case {at}");
    }
    // Nothing is left of those that were refused.
    booted.create("other", &["true"]).await.unwrap();
    agent.update("demo", 1, b"{}".to_vec()).await.unwrap();
}

#[tokio::test]
async fn a_policy_is_loaded_if_the_guest_does_not_have_it() {
    let booted = started().await;
    let profiles = Arc::new(Profiles::default());
    let load = async |profile: &str, revision: u64, binary: &str| {
        let parts = vec![Part { revision, policy: binary.as_bytes().into() }];
        profiles.load(&booted.agent, &Policy { profile: profile.into(), parts }).await
    };
    for _ in 0..2 {
        load("a", 1, "a1,").await.unwrap();
    }
    assert_eq!(booted.guest.policy(), "a1,");
    // A second profile does not replace the first one.
    for (profile, revision, binary) in [("b", 2, "b2,"), ("a", 1, "a1,"), ("a", 3, "a3,"), ("a", 3, "a3,")] {
        load(profile, revision, binary).await.unwrap();
    }
    assert_eq!(booted.guest.policy(), "a1,b2,a3,");
    for number in 2..64 {
        load(&number.to_string(), 2 + number, "").await.unwrap();
    }
    let (code, text) = refusal(load("one too many", 100, "").await);
    assert_eq!(code, Code::RESOURCE_EXHAUSTED);
    assert!(text.contains("\"one too many\""), "{text}");
    load("a", 101, "a101,").await.unwrap();
    assert!(booted.guest.policy().ends_with("a3,a101,"));
}

#[tokio::test]
async fn newer_policy_follows_that_of_a_request_that_was_given_up() {
    let booted = started().await;
    let profiles = Arc::new(Profiles::default());
    let load = async |profile: &str, revision: u64, binary: &str| {
        let parts = vec![Part { revision, policy: binary.as_bytes().into() }];
        profiles.load(&booted.agent, &Policy { profile: profile.into(), parts }).await
    };
    load("b", 3, "b3,").await.unwrap();
    booted.guest.stop();
    assert!(timeout(Duration::from_millis(200), load("a", 1, "a1,b1,")).await.is_err());
    booted.guest.go_on();
    let followed = async {
        while booted.guest.policy() != "b3,a1,b1,b3," {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(WAIT, followed).await.unwrap_or_else(|_| panic!("{}", booted.guest.policy()));
}

#[tokio::test]
async fn the_longest_policy_fits_into_a_message() {
    let booted = started().await;
    let policy = "x".repeat(bulkhead_agent_api::MAX_APPARMOR_POLICY);
    booted.agent.load_apparmor_policy("long", policy.as_bytes()).await.unwrap();
    assert_eq!(booted.guest.policy().len(), policy.len());
    let error = refusal(boot().await.agent.load_apparmor_policy("early", b"").await);
    assert_eq!(error.0, Code::FAILED_PRECONDITION);
}

#[tokio::test]
async fn an_error_is_no_longer_than_an_answer_may_be() {
    let booted = started().await;
    let long = "x".repeat(1 << 20);
    let (code, text) = refusal(booted.agent.stats(&long).await);
    assert_eq!((code, text.len()), (Code::NOT_FOUND, crate::types::text::LINE));
    // The connection is as good as before.
    booted.create("demo", &["true"]).await.unwrap();
}

#[tokio::test]
async fn an_exit_is_told_before_its_output_is_read() {
    // More than a pipe holds, and less than the pipe and the connection hold together.
    const WRITTEN: usize = 100_000;
    let booted = started().await;
    let mut stream = booted.vm.vsock().connect_stream(7, 4096).await.unwrap();
    let stdio = agent::Stdio { stdout: 7, ..Default::default() };
    let spec = booted.spec("demo", &["sh", "-c", &format!("head -c {WRITTEN} /dev/zero; exit 5")]);
    booted.create_with("demo", &spec, stdio).await.unwrap();
    booted.agent.start_container("demo").await.unwrap();
    assert_eq!(booted.status("demo", "").await, 5);
    let mut output = Vec::new();
    timeout(WAIT, stream.read_to_end(&mut output)).await.unwrap().unwrap();
    assert_eq!(output.len(), WRITTEN);
    booted.agent.delete_container("demo").await.unwrap();
}

#[tokio::test]
async fn streams_wait_until_they_are_named_and_their_number_is_limited() {
    let booted = started().await;
    let spec = booted.spec("demo", &["cat"]);
    let mut stdio = agent::Stdio { stdin: 1000, ..Default::default() };
    let missing = refusal(booted.create_with("demo", &spec, stdio.clone()).await);
    assert_eq!(missing.0, Code::FAILED_PRECONDITION);
    assert!(missing.1.contains("stream 1000"), "{}", missing.1);
    let mut streams = Vec::new();
    for id in 1..=256 {
        streams.push(booted.vm.vsock().connect_stream(id, 64).await.unwrap());
    }
    // One more, and one whose id is taken: they are closed.
    for id in [257, 1] {
        let mut refused = booted.vm.vsock().connect_stream(id, 64).await.unwrap();
        assert_eq!(timeout(WAIT, refused.read(&mut [0])).await.unwrap().unwrap(), 0);
    }
    (stdio.stdin, stdio.stdout) = (1, 2);
    booted.create_with("demo", &spec, stdio).await.unwrap();
    booted.agent.start_container("demo").await.unwrap();
    let mut echoed = [0; 5];
    streams[0].write_all(b"hello").await.unwrap();
    timeout(WAIT, streams[1].read_exact(&mut echoed)).await.unwrap().unwrap();
    assert_eq!(echoed, *b"hello");
    streams[0].shutdown().await.unwrap();
    assert_eq!(booted.status("demo", "").await, 0);
}

#[tokio::test]
async fn a_call_that_is_given_up_is_carried_out() {
    let booted = started().await;
    let agent = &booted.agent;
    // Long enough for the request to be sent, and too short for its answer: nobody connects the stream.
    let spec = booted.spec("demo", &["sleep", "1000"]);
    let stdio = agent::Stdio { stdout: 7, ..Default::default() };
    let given_up = timeout(Duration::from_millis(200), booted.create_with("demo", &spec, stdio)).await;
    assert!(given_up.is_err());
    let creating = refusal(agent.stats("demo").await);
    assert_eq!(creating, (Code::FAILED_PRECONDITION, "container demo is being created".into()));
    let _stream = booted.vm.vsock().connect_stream(7, 64).await.unwrap();
    let created = async {
        while code_or_ok(agent.stats("demo").await) == Some(Code::FAILED_PRECONDITION) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WAIT, created).await.unwrap();
    agent.start_container("demo").await.unwrap();
    // Whoever waits gives up, and asks again.
    assert!(timeout(Duration::from_millis(50), agent.wait("demo")).await.is_err());
    agent.signal("demo", 9, false).await.unwrap();
    assert_eq!(booted.status("demo", "").await, 137);
}

fn code_or_ok<T>(result: Result<T, AgentError>) -> Option<Code> {
    result.err().map(|error| refusal::<()>(Err(error)).0)
}

#[tokio::test]
async fn a_container_is_deleted_while_it_is_created() {
    let booted = started().await;
    let agent = &booted.agent;
    let spec = booted.spec("demo", &["sleep", "1000"]);
    let stdio = agent::Stdio { stdout: 7, ..Default::default() };
    let delete = async {
        while code_or_ok(agent.stats("demo").await) != Some(Code::FAILED_PRECONDITION) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let deleted = agent.delete_container("demo").await;
        (deleted, booted.vm.vsock().connect_stream(7, 64).await.unwrap())
    };
    let (created, (deleted, _stream)) = tokio::join!(booted.create_with("demo", &spec, stdio), delete);
    assert_eq!(code(deleted), Code::FAILED_PRECONDITION);
    assert_eq!(code(created), Code::NOT_FOUND);
    assert_eq!(code(agent.delete_container("demo").await), Code::NOT_FOUND);
    booted.create("demo", &["true"]).await.unwrap();
}

#[tokio::test]
async fn an_agent_that_is_slow_is_a_timeout_and_its_late_answers_do_no_harm() {
    let booted = started().await;
    let agent = &booted.agent;
    booted.run("demo", &["sleep", "1000"]).await;
    booted.guest.stop();
    let begun = Instant::now();
    let (stats, pids) = tokio::join!(agent.stats("demo"), agent.list_pids("demo"));
    assert!(matches!(stats, Err(AgentError::Timeout { call: "Stats" })), "{stats:?}");
    assert!(matches!(pids, Err(AgentError::Timeout { call: "ListPids" })), "{pids:?}");
    assert!(begun.elapsed() < STATS + LIST);
    booted.guest.go_on();
    // The answers of those come first, and are nobody's.
    timeout(WAIT, agent.wait_for_answer()).await.unwrap().unwrap();
    assert_eq!(timeout(WAIT, agent.list_pids("demo")).await.unwrap().unwrap().len(), 1);
    agent.signal("demo", 9, false).await.unwrap();
    assert_eq!(booted.status("demo", "").await, 137);
    agent.delete_container("demo").await.unwrap();
}

#[tokio::test]
async fn each_call_ends_by_its_deadline() {
    let booted = started().await;
    let agent = &booted.agent;
    booted.run("demo", &["sleep", "1000"]).await;
    let spec = booted.spec("other", &["true"]);
    let mut calls = calls_with_deadlines(agent, "demo");
    calls.push(("CreateContainer", SETUP, Box::pin(booted.create_with("other", &spec, NO_STDIO()))));
    calls.push((
        "StartSandbox",
        SETUP,
        Box::pin(async { agent.start_sandbox("demo", "", HostSettings::default()).await.map(drop) }),
    ));
    calls.push(("RemoveDisk", SETUP, Box::pin(agent.remove_disk("root-1"))));
    calls.push(("Shutdown", SETUP, Box::pin(agent.shutdown(SETUP))));
    booted.guest.stop();
    // Nothing else is under way: the time passes at once.
    tokio::time::pause();
    for (name, deadline, answer) in calls {
        // Each query is made as if it was the first one.
        agent.silence.end();
        let begun = Instant::now();
        let error = answer.await.unwrap_err();
        assert!(matches!(error, AgentError::Timeout { call } if call == name), "{name}: {error:?}");
        let took = begun.elapsed();
        assert!((deadline..deadline + AGENT_DEADLINE).contains(&took), "{name}: {took:?}");
    }
    // An end may be long in coming.
    let waiting = async { tokio::join!(agent.wait("demo"), agent.wait_oom("demo", 0)) };
    assert!(timeout(1000 * SETUP, waiting).await.is_err());
}

#[tokio::test]
async fn an_agent_that_ends_in_the_middle_of_a_call_is_disconnected() {
    let booted = started().await;
    let agent = &booted.agent;
    booted.run("demo", &["sleep", "1000"]).await;
    // Nobody connects the stream: this is under way for some seconds.
    let spec = booted.spec("other", &["true"]);
    let stdio = agent::Stdio { stdout: 7, ..Default::default() };
    let end = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        booted.vm.kill().await;
    };
    let calls = async { tokio::join!(booted.create_with("other", &spec, stdio), agent.wait("demo"), end) };
    let (created, waited, ()) = timeout(WAIT, calls).await.unwrap();
    let gone =
        |error: &AgentError, name| matches!(error, AgentError::Disconnected { call, .. } if *call == name);
    assert!(created.as_ref().is_err_and(|error| gone(error, "CreateContainer")), "{created:?}");
    assert!(waited.as_ref().is_err_and(|error| gone(error, "WaitProcess")), "{waited:?}");
    let later = timeout(WAIT, agent.stats("demo")).await.unwrap();
    assert!(later.as_ref().is_err_and(|error| gone(error, "Stats")), "{later:?}");
    let connected = Agent::connect(booted.vm.vsock()).await;
    assert!(matches!(connected, Err(AgentError::Connect(_))), "{connected:?}");
}

#[tokio::test]
async fn a_shutdown_ends_all_processes_and_is_answered() {
    let booted = started().await;
    booted.run("one", &["sleep", "1000"]).await;
    booted.run("two", &["sleep", "1000"]).await;
    let (one, two, shut_down) = timeout(WAIT, async {
        tokio::join!(booted.agent.wait("one"), booted.agent.wait("two"), booted.agent.shutdown(SETUP))
    })
    .await
    .unwrap();
    shut_down.unwrap();
    assert_eq!([one, two].map(|end| end.unwrap().exit.status), [137, 137]);
    booted.agent.shutdown(SETUP).await.unwrap();
    drop(booted.dir);
}

#[test]
fn seeds_the_guest_well() {
    let (one, two) = (entropy().unwrap(), entropy().unwrap());
    assert_eq!(one.len(), 64);
    assert_ne!(one, two);
}
