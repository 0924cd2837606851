//! A pod from create to delete, in a guest without a VM (`testing/guest.rs`): the agent and the containers are real.

mod cancel;
mod cpu;
mod disks;
mod execs;
mod growth;
mod hooks;
mod host_sockets;
mod hung_vmm;
mod late;
mod members;
mod start;
mod volumes;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    time::{Duration, SystemTime},
};

use containerd_shim_protos::api;
use nix::{sys::stat::Mode, unistd::mkfifo};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, unix::pipe},
    time::timeout,
};
use ttrpc::r#async::Server;

use super::*;
use crate::{
    host::failure_counts,
    io::events::tests::Heard,
    pod::container_role::CRI_NAMESPACE,
    testing::{
        guest::{Guest, make_root, mounts, process},
        private_mounts,
    },
    types::failure::Cause,
};

/// Longer than anything takes on a machine that has much else to do.
const WAIT: Duration = Duration::from_secs(15);

/// A bundle as containerd makes it.
fn make_bundle(dir: &Path, id: &str, args: &[&str], change: impl FnOnce(&mut serde_json::Value)) {
    let bundle = dir.join(id);
    make_root(&bundle.join("rootfs"));
    let group = format!("/bulkhead-test-{}", std::process::id());
    let mut spec = json!({
        "ociVersion": "1.1.0",
        "process": process(args),
        "root": {"path": "rootfs"},
        "mounts": mounts(),
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

fn write_script(path: &Path, script: &str) {
    write_program(path, &format!("#!/bin/sh\n{script}\n"));
}

fn write_program(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

impl Pod {
    /// Creates a container for a client without spans.
    async fn create(&self, creation: CreateRequest) -> Result<Arc<Container>, TaskError> {
        self.create_for(None, creation).await
    }
}

impl Container {
    /// Starts it for a client without spans.
    async fn start(&self) -> Result<(), TaskError> {
        self.start_for(None).await
    }
}

/// A host with containerd on it, and one pod.
struct Story {
    dir: tempfile::TempDir,
    pod: Pod,
    guest: Guest,
    heard: Heard,
    events: Publisher,
    _server: Server,
}

impl Story {
    /// The agent answers as soon as the VM is started.
    async fn begin(args: &[&str]) -> Self {
        let story = Self::without_guest(args).await;
        story.guest.write_vmm(&story.dir.path().join("vmm"));
        story
    }

    /// The VM never becomes ready.
    async fn without_guest(args: &[&str]) -> Self {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        make_bundle(dir.path(), "demo", args, |_| {});
        write_script(&at("vmm"), "exec unshare --net sleep 60");
        write_script(&at("shim"), "read vmm; echo; read end");
        let config = format!("kernel={0:?}\ninitramfs={0:?}\nvmm={0:?}\ntemplates=false\n", at("vmm"));
        fs::write(at("config.toml"), config).unwrap();
        let heard = Heard::default();
        let server = heard.serve(&at("events.sock")).await;
        let events = Publisher::start(at("events.sock").to_str(), "default");
        let settings = Settings {
            containerd: "/c".into(),
            namespace: CRI_NAMESPACE.into(),
            id: "demo".into(),
            state_root: at("run"),
            config: at("config.toml"),
            shim: at("shim"),
            socket: None,
        };
        let guest = Guest::new(settings.state_path());
        let pod = Pod::new(settings, events.clone());
        Self { dir, pod, guest, heard, events, _server: server }
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

    /// Waits until these failures, and no others, were counted.
    async fn has_counted(&self, wanted: &[(Cause, u64)]) {
        let root = self.dir.path().join("run");
        let begun = std::time::Instant::now();
        loop {
            let all = failure_counts::counts(&root).unwrap();
            let counted: Vec<_> = all.into_iter().filter(|(_, count)| *count > 0).collect();
            if counted == wanted {
                return;
            }
            assert!(begun.elapsed() < WAIT, "{counted:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Changes the container's spec.
    fn change_spec(&self, change: impl FnOnce(&mut serde_json::Value)) {
        let path = self.dir.path().join("demo/config.json");
        let mut spec = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut spec);
        fs::write(&path, spec.to_string()).unwrap();
    }

    async fn create(&self) -> Arc<Container> {
        timeout(WAIT, self.pod.create(CreateRequest::Task(self.request()))).await.unwrap().unwrap()
    }

    async fn create_and_start(&self) -> Arc<Container> {
        let container = self.create().await;
        container.start().await.unwrap();
        container
    }

    async fn wait_demo(&self) -> u32 {
        timeout(WAIT, self.pod.wait("demo")).await.unwrap().unwrap().status
    }

    /// The pod's first container.
    fn own(&self) -> Arc<Container> {
        self.pod.container("demo").unwrap()
    }

    fn status(&self) -> Status {
        self.own().init.status()
    }

    /// Checks that nothing is left on the host and that containerd got these events.
    async fn end(self, topics: &[&str]) {
        self.events.flush(WAIT).await;
        assert_eq!(self.heard.topics(), topics);
        assert!(!self.dir.path().join("run").exists());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(self.dir.path().to_str().unwrap()));
    }
}

/// What containerd writes of a process that is added to the container.
fn exec(id: &str, args: &[&str]) -> api::ExecProcessRequest {
    let mut request = api::ExecProcessRequest::new();
    request.id = "demo".into();
    request.exec_id = id.into();
    request.spec.mut_or_insert_default().value = process(args).to_string().into_bytes();
    request
}

const WHOLE_LIFE: [&str; 4] = ["/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete"];

#[tokio::test]
async fn a_process_runs_and_its_status_comes_back() {
    let story = Story::begin(&["sh", "-c", "exit 7"]).await;
    let container = story.create().await;
    assert_eq!(container.pid(), story.guest.vmm().pid);
    assert_eq!(story.status(), Status::Created);
    story.own().start().await.unwrap();
    let exit = timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap();
    assert_eq!(exit.status, 7);
    assert!(exit.at <= SystemTime::now());
    let deleted = timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap();
    assert_eq!((deleted.pid, deleted.exit.status), (container.pid(), 7));
    assert!(matches!(story.pod.delete("demo").await, Err(TaskError::Refused(Refusal::NotFound))));
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn the_output_arrives_before_the_end() {
    let story = Story::begin(&["echo", "bye"]).await;
    let fifo = story.dir.path().join("stdout");
    mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
    let mut request = story.request();
    request.stdout = fifo.display().to_string();
    let mut client = pipe::OpenOptions::new().open_receiver(&fifo).unwrap();
    story.pod.create(CreateRequest::Task(request)).await.unwrap();
    story.own().start().await.unwrap();
    let mut output = String::new();
    timeout(WAIT, client.read_to_string(&mut output)).await.unwrap().unwrap();
    assert_eq!(output, "bye\n");
    story.wait_demo().await;
    story.pod.delete("demo").await.unwrap();
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn create_asked_again_answers_the_same() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let request = story.request();
    let (one, two) = tokio::join!(
        story.pod.create(CreateRequest::Task(request.clone())),
        story.pod.create(CreateRequest::Task(request.clone()))
    );
    // The one that came second finds it made, or making.
    let pids: Vec<_> =
        [one, two].into_iter().filter_map(Result::ok).map(|container| container.pid()).collect();
    assert!(!pids.is_empty() && pids.iter().all(|pid| *pid == story.guest.vmm().pid));
    assert_eq!(story.pod.create(CreateRequest::Task(request.clone())).await.unwrap().pid(), pids[0]);
    let mut other = request;
    other.stdout = "/elsewhere".into();
    assert!(matches!(
        story.pod.create(CreateRequest::Task(other)).await,
        Err(TaskError::Refused(Refusal::Exists))
    ));
    story.pod.delete("demo").await.unwrap();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn the_vmms_death_is_the_process_s_death() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.create().await;
    story.own().start().await.unwrap();
    assert!(story.pod.delete("demo").await.is_err());
    story.guest.vmm().kill(WAIT).unwrap();
    let exit = timeout(Duration::from_secs(1), story.pod.wait("demo")).await.unwrap().unwrap();
    assert_eq!(exit.status, 137);
    assert_eq!(timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap().exit.status, 137);
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_signal_ends_the_process() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let container = story.create().await;
    story.own().start().await.unwrap();
    container.guest.agent.signal("demo", 9, false).await.unwrap();
    assert_eq!(timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap().status, 137);
    story.pod.delete("demo").await.unwrap();
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_paused_process_is_resumed_or_killed() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.create().await;
    assert!(matches!(story.own().pause().await, Err(TaskError::Refused(Refusal::Precondition { .. }))));
    let container = story.own();
    container.start().await.unwrap();
    story.own().pause().await.unwrap();
    assert_eq!(story.status(), Status::Paused);
    assert!(story.pod.delete("demo").await.is_err());
    story.own().resume().await.unwrap();
    assert_eq!(story.status(), Status::Running);
    story.own().pause().await.unwrap();
    container.guest.agent.signal("demo", 9, false).await.unwrap();
    assert_eq!(timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap().status, 137);
    story.pod.delete("demo").await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/paused", "/tasks/resumed", "/tasks/paused"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_kill_for_want_of_memory_is_heard_of_before_the_end() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let container = story.create_and_start().await;
    story.guest.follow("oom 137");
    container.execs.add(exec("one", &["sh", "-c", "kill -9 $$"])).unwrap();
    container.execs.start("one").await.unwrap();
    timeout(WAIT, container.execs.get("one").unwrap().wait()).await.unwrap().unwrap();
    // The same kill, which the container's own end tells of as well.
    container.kill(9, false).await.unwrap();
    assert_eq!(story.wait_demo().await, 137);
    story.pod.delete("demo").await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started", "/tasks/oom"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_limit_for_which_the_guest_takes_no_memory_is_refused_after_a_minute_and_forgotten() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.create().await;
    story.own().start().await.unwrap();
    let control = UnixListener::bind(story.guest.state.join("control.sock")).unwrap();
    let vmm = async {
        let mut stream = BufReader::new(control.accept().await.unwrap().0);
        let mut request = String::new();
        stream.read_line(&mut request).await.unwrap();
        assert_eq!(request, "{\"op\":\"resize\",\"memory_mib\":896}\n");
        stream.write_all(b"{\"result\":\"memory\",\"memory_mib\":384}\n").await.unwrap();
        // Nothing else is under way: the minute passes at once.
        tokio::time::pause();
        stream
    };
    let mut request = api::UpdateTaskRequest::new();
    request.id = "demo".into();
    let resources = json!({"memory": {"limit": 772 << 20}});
    request.resources.mut_or_insert_default().value = resources.to_string().into_bytes();
    let own = story.own();
    let (updated, _stream) = tokio::join!(own.update(story.pod.vm(), request), vmm);
    tokio::time::resume();
    assert_eq!(
        chain(&updated.unwrap_err()),
        "cannot grow the VM to the 896 MiB that the limits of its containers require: \
         the guest reached only 384 MiB within 60 s"
    );
    assert_eq!(story.pod.vm().memory_limits(), 0);
    // The container goes on with what it had.
    assert_eq!(story.status(), Status::Running);
    story.pod.stop().await;
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_program_that_cannot_be_executed_is_named_and_can_be_deleted() {
    let story = Story::begin(&["/text"]).await;
    write_program(&story.dir.path().join("demo/rootfs/text"), "no program");
    let container = story.create().await;
    let error = container.start().await.unwrap_err();
    assert_eq!(chain(&error), "exec /text: exec format error");
    story.has_counted(&[(Cause::Program, 1)]).await;
    assert_eq!(story.status(), Status::Stopped);
    assert_eq!(container.init.wait().await.unwrap().status, 255);
    timeout(WAIT, container.guest.agent.wait("demo")).await.expect("something runs").unwrap();
    story.pod.delete("demo").await.unwrap();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn a_program_that_is_missing_leaves_nothing() {
    let story = Story::begin(&["missing"]).await;
    let error = story.pod.create(CreateRequest::Task(story.request())).await.unwrap_err();
    assert_eq!(chain(&error), "exec: \"missing\": executable file not found in $PATH");
    story.has_counted(&[(Cause::Program, 1)]).await;
    assert!(story.pod.is_idle());
    story.end(&[]).await;
}

#[tokio::test]
async fn what_the_guest_refuses_leaves_nothing() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.change_spec(|spec| spec["linux"]["mountLabel"] = json!("label"));
    let error = story.pod.create(CreateRequest::Task(story.request())).await.unwrap_err();
    assert!(chain(&error).starts_with("linux.mountLabel: not implemented; "), "{}", chain(&error));
    story.has_counted(&[(Cause::RefusedField, 1)]).await;
    assert_eq!(story.pod.container("demo").unwrap_err(), Refusal::NotFound);
    assert!(story.pod.is_idle());
    story.end(&[]).await;
}

#[tokio::test]
async fn what_is_missing_on_the_host_leaves_nothing() {
    let story = Story::without_guest(&["sleep", "1000"]).await;
    fs::remove_dir_all(story.dir.path().join("demo/rootfs")).unwrap();
    let error = story.pod.create(CreateRequest::Task(story.request())).await.unwrap_err();
    assert!(chain(&error).contains("demo/rootfs: no such file or directory"), "{}", chain(&error));
    fs::write(story.dir.path().join("config.toml"), "kernel = \"/nonexistent/vmlinux\"\n").unwrap();
    let error = story.pod.create(CreateRequest::Task(story.request())).await.unwrap_err();
    assert!(chain(&error).starts_with("kernel /nonexistent/vmlinux: No such file"), "{}", chain(&error));
    story.has_counted(&[(Cause::Rootfs, 1), (Cause::Configuration, 1)]).await;
    story.end(&[]).await;
}

#[tokio::test]
async fn a_vmm_that_fails_says_why() {
    let story = Story::without_guest(&["sleep", "1000"]).await;
    fs::write(story.dir.path().join("vmm"), "#!/bin/sh\necho 'no /dev/kvm' >&2\nexit 1\n").unwrap();
    let error =
        timeout(WAIT, story.pod.create(CreateRequest::Task(story.request()))).await.unwrap().unwrap_err();
    assert_eq!(chain(&error), "the VM ended: no /dev/kvm");
    story.end(&[]).await;
}

#[tokio::test]
async fn the_end_of_the_shim_ends_everything() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.create().await;
    story.own().start().await.unwrap();
    let waiting = story.own();
    let waiting = tokio::spawn(async move { waiting.init.wait().await });
    tokio::task::yield_now().await;
    timeout(WAIT, story.pod.stop()).await.unwrap();
    assert_eq!(timeout(WAIT, waiting).await.unwrap().unwrap().unwrap().status, 137);
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn the_end_of_the_shim_ends_a_creation_under_way() {
    let story = Story::without_guest(&["sleep", "1000"]).await;
    let creating = story.pod.clone();
    let request = story.request();
    let creating = tokio::spawn(async move { creating.create(CreateRequest::Task(request)).await });
    while !matches!(story.pod.container("demo"), Err(Refusal::Creating)) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    timeout(WAIT, story.pod.stop()).await.unwrap();
    assert!(creating.await.unwrap().is_err());
    story.end(&[]).await;
}
