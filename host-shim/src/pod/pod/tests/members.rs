//! A pod and its containers.

use containerd_shim_protos::{
    cgroups, cgroups_v2, sandbox_api, sandbox_async::Sandbox as SandboxApi, shim_async::Task,
};
use protobuf::{Message, well_known_types::any::Any};
use tokio::{sync::watch, time::Instant};
use ttrpc::r#async::TtrpcContext;

use super::{
    start::{callers, context_of},
    *,
};
use crate::{
    guest::agent::AgentError,
    host::process_id::ProcessId,
    io::streams::DRAIN,
    service::{sandbox::SandboxService, task::TaskService},
};

/// A spec as the CRI writes it of a container of the pod.
pub(super) fn be_member(spec: &mut serde_json::Value) {
    spec["annotations"] = json!({
        "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "demo",
    });
}

impl Story {
    /// A pod without containers.
    pub(super) async fn pod() -> Self {
        let story = Self::begin(&["of-the-image"]).await;
        make_bundle(story.dir.path(), "demo", &["of-the-image"], |spec| {
            spec["annotations"] = json!({"io.kubernetes.cri.container-type": "sandbox"});
        });
        story.create().await;
        story.own().start().await.unwrap();
        story
    }

    /// Creates a container of the pod.
    pub(super) async fn add(&self, id: &str, args: &[&str]) -> Result<Arc<Container>, TaskError> {
        self.add_with_output(id, args, Path::new("")).await
    }

    async fn add_with_output(
        &self,
        id: &str,
        args: &[&str],
        stdout: &Path,
    ) -> Result<Arc<Container>, TaskError> {
        let vmm = self.guest.vmm().pid;
        make_bundle(self.dir.path(), id, args, |spec| {
            be_member(spec);
            let namespaces = &mut spec["linux"]["namespaces"];
            namespaces[1]["path"] = json!(format!("/proc/{vmm}/ns/ipc"));
            namespaces[2]["path"] = json!(format!("/proc/{vmm}/ns/uts"));
        });
        let mut request = self.request_of(id);
        request.stdout = stdout.display().to_string();
        timeout(WAIT, self.pod.create(CreateRequest::Task(request))).await.unwrap()
    }

    pub(super) async fn run(&self, id: &str, args: &[&str]) -> Arc<Container> {
        let container = self.add(id, args).await.unwrap();
        self.pod.container(id).unwrap().start().await.unwrap();
        container
    }

    pub(super) async fn wait(&self, id: &str) -> u32 {
        let container = self.pod.container(id).unwrap();
        timeout(WAIT, container.init.wait()).await.unwrap().unwrap().status
    }

    pub(super) async fn delete(&self, id: &str) -> u32 {
        timeout(WAIT, self.pod.delete(id)).await.unwrap().unwrap().exit.status
    }

    pub(super) fn has_files(&self, id: &str) -> bool {
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
        let container = story.add("one", &["sh", "-c", "exit 3"]).await.unwrap();
        assert_ne!(container.pid(), story.guest.vmm().pid);
        assert!(Path::new(&format!("/proc/{}", container.pid())).exists());
        story.pod.container("one").unwrap().start().await.unwrap();
        assert_eq!((story.wait("one").await, story.delete("one").await), (3, 3));
        assert!(!story.has_files("one"));
        assert_eq!(story.pod.container("one").unwrap_err(), Refusal::NotFound);
    }
    assert_eq!(story.status(), Status::Running);
    assert!(!story.pod.is_idle());
    // What pause ends with.
    story.own().kill(15, false).await.unwrap();
    assert_eq!((story.wait("demo").await, story.delete("demo").await), (0, 0));
    let topics = [&["/tasks/create", "/tasks/start"][..], &lives(2), &["/tasks/exit", "/tasks/delete"]];
    story.end(&topics.concat()).await;
}

#[tokio::test]
async fn the_pod_ends_with_its_pause() {
    let story = Story::pod().await;
    story.run("one", &["sleep", "1000"]).await;
    // What pause ends with.
    story.own().kill(15, false).await.unwrap();
    assert_eq!(story.wait("one").await, 137);
    assert_eq!((story.delete("one").await, story.delete("demo").await), (137, 0));
    let begin = ["/tasks/create", "/tasks/start", "/tasks/create", "/tasks/start"];
    let end = ["/tasks/exit", "/tasks/exit", "/tasks/delete", "/tasks/delete"];
    story.end(&[begin, end].concat()).await;
}

#[tokio::test]
async fn a_pod_that_is_deleted_first_leaves_its_containers_to_be_deleted() {
    let story = Story::pod().await;
    story.run("one", &["sleep", "1000"]).await;
    story.guest.vmm().kill(WAIT).unwrap();
    assert_eq!((story.wait("one").await, story.wait("demo").await), (137, 137));
    assert_eq!(story.delete("demo").await, 137);
    assert!(!story.dir.path().join("run").exists());
    let error = story.add_after_the_end().await;
    assert_eq!(chain(&error), "pod demo does not run");
    assert_eq!(story.delete("one").await, 137);
    assert!(story.pod.is_idle());
}

impl Story {
    pub(super) async fn add_after_the_end(&self) -> TaskError {
        make_bundle(self.dir.path(), "two", &["sleep", "1000"], |spec| {
            be_member(spec);
        });
        self.pod.create(CreateRequest::Task(self.request_of("two"))).await.unwrap_err()
    }
}

#[tokio::test]
async fn a_container_that_the_guest_refuses_leaves_its_pod_alone() {
    let story = Story::pod().await;
    let error = story.add("one", &["missing"]).await.unwrap_err();
    assert_eq!(chain(&error), "exec: \"missing\": executable file not found in $PATH");
    assert!(!story.has_files("one"));
    assert_eq!(story.run("one", &["true"]).await.id, "one");
    timeout(WAIT, story.pod.stop()).await.unwrap();
    assert!(story.pod.is_idle());
    assert!(!story.dir.path().join("run").exists());
}

#[tokio::test]
async fn who_kills_the_placeholder_process_means_the_container() {
    let story = Story::pod().await;
    let container = story.run("one", &["sleep", "1000"]).await;
    ProcessId::of(container.pid()).unwrap().kill(WAIT).unwrap();
    assert_eq!(story.wait("one").await, 137);
    assert_eq!(story.status(), Status::Running);
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn a_container_whose_placeholder_process_was_killed_is_killed_when_the_guest_answers_again() {
    let story = Story::pod().await;
    let container = story.run("one", &["sleep", "1000"]).await;
    story.guest.follow("lose one");
    ProcessId::of(container.pid()).unwrap().kill(WAIT).unwrap();
    let sent_again = async {
        while story.guest.lost("one") < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(WAIT, sent_again).await.unwrap();
    assert_eq!(container.init.status(), Status::Running);
    story.guest.follow("");
    assert_eq!(story.wait("one").await, 137);
    assert_eq!(story.status(), Status::Running, "the pod continues");
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn a_namespace_of_a_stranger_is_not_joined() {
    let story = Story::pod().await;
    make_bundle(story.dir.path(), "one", &["sleep", "1000"], |spec| {
        be_member(spec);
        spec["linux"]["namespaces"][0]["path"] = json!("/proc/1/ns/pid");
    });
    let error = story.pod.create(CreateRequest::Task(story.request_of("one"))).await.unwrap_err();
    let expected =
        "linux.namespaces: process 1 is of no container of this pod, so its pid namespace cannot be joined";
    assert_eq!(chain(&error), expected);
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn a_pod_without_a_container_of_its_own() {
    let story = Story::begin(&["no-image"]).await;
    fs::remove_dir_all(story.dir.path().join("demo")).unwrap();
    let (done, is_done) = watch::channel(false);
    let service = SandboxService::new(story.pod.clone(), done);
    let id = || "demo".to_owned();
    let mut create = sandbox_api::CreateSandboxRequest::new();
    create.sandbox_id = id();
    create.options.mut_or_insert_default().type_url = "runtime.v1.PodSandboxConfig".into();
    // Field 2, the hostname.
    create.options.mut_or_insert_default().value = b"\x12\x05guest".to_vec();
    let (creation, caller) = context_of(1);
    timeout(WAIT, service.create_sandbox(&creation, create.clone())).await.unwrap().unwrap();
    let status = sandbox_api::SandboxStatusRequest { sandbox_id: id(), ..Default::default() };
    let state =
        async || service.sandbox_status(&TtrpcContext::default(), status.clone()).await.unwrap().state;
    assert_eq!(state().await, "SANDBOX_NOTREADY");
    let start = sandbox_api::StartSandboxRequest { sandbox_id: id(), ..Default::default() };
    let (context, starter) = context_of(2);
    let started = service.start_sandbox(&context, start).await.unwrap();
    assert_eq!(callers(&story), [("create", caller), ("start", starter)]);
    assert_eq!((started.pid, state().await.as_str()), (story.guest.vmm().pid, "SANDBOX_READY"));

    story.run("one", &["sleep", "1000"]).await;
    // The pod's files, which nobody else has made: /etc/hostname is the second, after the four of the spec.
    let hostname = story.guest.state.join("share/one/mounts/5");
    assert_eq!(fs::read_to_string(hostname).unwrap(), "guest\n");
    let metrics = sandbox_api::SandboxMetricsRequest { sandbox_id: id(), ..Default::default() };
    let metrics = service.sandbox_metrics(&TtrpcContext::default(), metrics).await.unwrap().metrics;
    assert_eq!(metrics.id, "demo");
    assert!(usage_usec(&metrics.data) > 0);
    let stop = sandbox_api::StopSandboxRequest { sandbox_id: id(), ..Default::default() };
    timeout(WAIT, service.stop_sandbox(&TtrpcContext::default(), stop)).await.unwrap().unwrap();
    assert_eq!((story.wait("one").await, story.delete("one").await), (137, 137));
    assert_eq!(state().await, "SANDBOX_NOTREADY");
    let wait = sandbox_api::WaitSandboxRequest { sandbox_id: id(), ..Default::default() };
    assert_eq!(service.wait_sandbox(&TtrpcContext::default(), wait).await.unwrap().exit_status, 137);
    let is_shut_down = || story.guest.log().contains("bulkhead-agent: shutting down");
    assert!(!is_shut_down(), "the guest runs until Shutdown");
    timeout(WAIT, service.shutdown_sandbox(&TtrpcContext::default(), Default::default()))
        .await
        .unwrap()
        .unwrap();
    assert!(*is_done.borrow());
    assert!(is_shut_down(), "the guest's data is written back");
    // containerd knows no task of the pod's id.
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
    make_bundle(story.dir.path(), "other", &["sleep", "1000"], |_| {});
    let error = story.pod.create(CreateRequest::Task(story.request_of("other"))).await.unwrap_err();
    assert_eq!(chain(&error), "this shim serves pod demo, to which the container does not belong");
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn a_container_that_does_not_answer_costs_no_other_its_vm() {
    let story = Story::pod().await;
    story.run("slow", &["sh", "-c", "until [ -e /end ]; do sleep 0.01; done"]).await;
    story.run("other", &["sleep", "1000"]).await;
    story.guest.follow("lose slow");
    let killed = story.pod.container("slow").unwrap().kill(9, false).await.unwrap_err();
    assert_eq!(chain(&killed), "the guest's agent does not answer SignalProcess in time");
    fs::write(story.dir.path().join("slow/rootfs/end"), "").unwrap();
    // Its end in the guest is late, and nothing is left of it on the host.
    assert_eq!((story.wait("slow").await, story.delete("slow").await), (0, 0));
    assert!(!story.has_files("slow"));
    assert_eq!(story.pod.container("other").unwrap().init.status(), Status::Running);
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn stop_sandbox_waits_for_its_containers_and_is_repeatable() {
    let story = Story::pod().await;
    story.run("one", &["sleep", "1000"]).await;
    story.run("two", &["sleep", "1000"]).await;
    let service = SandboxService::new(story.pod.clone(), watch::channel(false).0);
    for _ in 0..2 {
        let stop = sandbox_api::StopSandboxRequest { sandbox_id: "demo".into(), ..Default::default() };
        timeout(WAIT, service.stop_sandbox(&TtrpcContext::default(), stop)).await.unwrap().unwrap();
        let ended = |id: &str| story.pod.container(id).unwrap().init.state().exit().map(|exit| exit.status);
        assert_eq!(["one", "two", "demo"].map(ended), [Some(137); 3]);
        assert!(!story.pod.vm().guest().unwrap().vm.has_exited(), "the VM is killed for nothing");
    }
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn programs_may_end_by_themselves_when_the_host_shuts_down() {
    let story = Story::pod().await;
    let fifo = story.dir.path().join("one.fifo");
    mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
    let mut client = BufReader::new(pipe::OpenOptions::new().open_receiver(&fifo).unwrap()).lines();
    let args = ["sh", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done"];
    story.add_with_output("one", &args, &fifo).await.unwrap();
    story.pod.container("one").unwrap().start().await.unwrap();
    story.run("two", &["sleep", "1000"]).await;
    assert_eq!(timeout(WAIT, client.next_line()).await.unwrap().unwrap().unwrap(), "ready");
    let status = |id: &str| story.pod.container(id).unwrap().init.status();
    // The init of a pid namespace ignores the signal if it has no handler.
    story.pod.terminate(Duration::from_millis(500)).await;
    assert_eq!((story.wait("one").await, status("two")), (5, Status::Running));
    assert_eq!(story.status(), Status::Running, "pause stays");
    let late = story.add("three", &["true"]).await.unwrap_err();
    assert!(matches!(late, TaskError::Cancelled), "{late}");
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn the_output_of_all_containers_drains_at_the_same_time() {
    let story = Story::pod().await;
    let mut clients = Vec::new();
    for id in ["one", "two", "three", "four", "five"] {
        let fifo = story.dir.path().join(format!("{id}.fifo"));
        mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
        clients.push(pipe::OpenOptions::new().open_receiver(&fifo).unwrap());
        // More than a FIFO holds, and nobody reads it.
        let args = ["sh", "-c", "head -c 1000000 /dev/zero; sleep 1000"];
        story.add_with_output(id, &args, &fifo).await.unwrap();
        story.pod.container(id).unwrap().start().await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let begun = std::time::Instant::now();
    timeout(WAIT, story.pod.stop()).await.unwrap();
    assert!((DRAIN..4 * DRAIN).contains(&begun.elapsed()), "one after the other: {:?}", begun.elapsed());
}

#[tokio::test]
async fn containers_of_a_pod_share_its_namespaces() {
    let story = Story::pod().await;
    let mut seen = Vec::new();
    for id in ["one", "two"] {
        let fifo = story.dir.path().join(format!("{id}.fifo"));
        mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
        let mut client = BufReader::new(pipe::OpenOptions::new().open_receiver(&fifo).unwrap()).lines();
        // It goes on: the kernel uses the numbers of namespaces again.
        let args = ["sh", "-c", "readlink /proc/self/ns/ipc /proc/self/ns/uts /proc/self/ns/mnt; sleep 1000"];
        story.add_with_output(id, &args, &fifo).await.unwrap();
        story.pod.container(id).unwrap().start().await.unwrap();
        for _ in 0..3 {
            seen.push(timeout(WAIT, client.next_line()).await.unwrap().unwrap().unwrap());
        }
    }
    assert_eq!(seen[..2], seen[3..5]);
    assert_ne!(seen[2], seen[5], "each has mounts of its own");
    let of_host = |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
    assert_ne!([Path::new(&seen[0]), Path::new(&seen[1])], [of_host("ipc"), of_host("uts")]);
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn the_shim_of_a_pod_that_was_deleted_first_ends_with_its_last_container() {
    let story = Story::pod().await;
    story.run("one", &["sleep", "1000"]).await;
    story.guest.vmm().kill(WAIT).unwrap();
    assert_eq!((story.wait("one").await, story.wait("demo").await), (137, 137));
    let (done, mut is_done) = watch::channel(false);
    let service = TaskService::new(story.pod.clone(), done);
    let delete = async |id: &str| {
        let request = api::DeleteRequest { id: id.into(), ..Default::default() };
        timeout(WAIT, service.delete(&TtrpcContext::default(), request)).await.unwrap().unwrap()
    };
    delete("demo").await;
    // containerd says so after this one alone: the other is a container of a pod.
    service.shutdown(&TtrpcContext::default(), Default::default()).await.unwrap();
    assert!(!*is_done.borrow(), "there is another container");
    delete("one").await;
    timeout(WAIT, is_done.wait_for(|done| *done)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_pod_whose_guest_does_not_answer_costs_one_deadline_for_all_its_containers() {
    /// More than the deadline of one query, and less than that of two.
    const ONE_DEADLINE: Duration = Duration::from_millis(3500);
    let story = Story::pod().await;
    for id in ["one", "two", "three"] {
        story.run(id, &["sleep", "1000"]).await;
    }
    let agent = &story.own().guest.agent;
    let answers = async || timeout(WAIT, agent.wait_for_answer()).await.unwrap().unwrap();
    story.pod.stats().await.unwrap();
    story.guest.stop();
    let begun = Instant::now();
    let late = story.pod.stats().await.unwrap_err();
    assert!(matches!(late, TaskError::Agent(AgentError::Timeout { .. })), "{late}");
    for container in story.pod.members() {
        let late = container.stats().await.unwrap_err();
        assert!(matches!(late, TaskError::Agent(AgentError::Silent { .. })), "{late}");
    }
    assert!(begun.elapsed() < ONE_DEADLINE, "{:?}", begun.elapsed());
    story.guest.go_on();
    answers().await;
    story.pod.stats().await.unwrap();
    story.guest.stop();
    // As containerd does when it is restarted.
    let begun = Instant::now();
    for container in story.pod.members() {
        assert_eq!(container.pids().await.unwrap(), [container.pid()]);
    }
    assert!(begun.elapsed() < ONE_DEADLINE, "{:?}", begun.elapsed());
    story.guest.go_on();
    answers().await;
    let member = &story.pod.members()[0];
    assert!(member.pids().await.unwrap().iter().all(|pid| *pid == member.pid()));
    story.pod.stop().await;
}

#[tokio::test]
async fn the_statistics_of_a_pod_are_asked_for_all_containers_at_the_same_time() {
    let story = Story::pod().await;
    for id in ["one", "two"] {
        story.run(id, &["sleep", "1000"]).await;
    }
    story.guest.follow("lose-queries one\nlose-queries two");
    let asked = async {
        while story.guest.lost("one") == 0 || story.guest.lost("two") == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // Before the deadline of the first.
    let asked = timeout(Duration::from_secs(1), asked);
    let (late, asked) = tokio::join!(story.pod.stats(), asked);
    asked.unwrap();
    assert!(matches!(late, Err(TaskError::Agent(AgentError::Timeout { .. }))), "{late:?}");
    story.pod.stop().await;
}
