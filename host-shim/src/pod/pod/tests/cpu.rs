//! The vCPUs of a pod's VM follow the limits of its containers.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Instant,
};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::Value;

use super::*;
use crate::host::processors;

/// A pod whose VMs have four vCPUs, and whose first container has these annotations and resources.
async fn of_four(annotations: Value, resources: Value) -> Story {
    let story = Story::begin(&["sleep", "1000"]).await;
    let config = story.dir.path().join("config.toml");
    let text = fs::read_to_string(&config).unwrap() + "vcpus = 4\n";
    fs::write(&config, text).unwrap();
    story.change_spec(|spec| {
        spec["annotations"] = annotations;
        spec["linux"]["resources"] = resources;
    });
    story.guest.follow("accept-limits");
    story
}

fn kernel_args(story: &Story) -> Value {
    let config = fs::read(story.guest.state.join("vmm.json")).unwrap();
    serde_json::from_slice::<Value>(&config).unwrap()["kernel_args"].clone()
}

fn online(story: &Story) -> Vec<u32> {
    story.guest.online()
}

async fn update(story: &Story, id: &str, resources: Value) {
    let container = story.pod.container(id).unwrap();
    timeout(WAIT, container.update(story.pod.vm(), request_to_update(id, resources))).await.unwrap().unwrap();
}

fn request_to_update(id: &str, resources: Value) -> api::UpdateTaskRequest {
    let mut request = api::UpdateTaskRequest::new();
    request.id = id.into();
    request.resources.mut_or_insert_default().value = resources.to_string().into_bytes();
    request
}

#[tokio::test]
async fn a_container_without_a_limit_has_all_vcpus_from_the_start() {
    let story = of_four(json!({}), json!({})).await;
    story.create().await;
    assert_eq!((kernel_args(&story), online(&story)), (json!([]), vec![]));
    story.pod.delete("demo").await.unwrap();
}

#[tokio::test]
async fn a_pod_has_the_vcpus_of_its_annotation_if_that_is_allowed() {
    let story = of_four(json!({"bulkhead.dev/vcpus": "3"}), json!({})).await;
    let error = story.pod.create(CreateRequest::Task(story.request())).await.unwrap_err();
    let text = chain(&error);
    let expected =
        "annotations[bulkhead.dev/vcpus]: it is not allowed; add \"vcpus\" to `allowed_annotations` in /";
    assert!(text.starts_with(expected) && text.ends_with("/config.toml"), "{text}");
    story.has_counted(&[(Cause::RefusedField, 1)]).await;
    let config = story.dir.path().join("config.toml");
    let text = fs::read_to_string(&config).unwrap() + "allowed_annotations = ['vcpus']\n";
    fs::write(&config, text).unwrap();
    story.create().await;
    let vmm = fs::read(story.guest.state.join("vmm.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&vmm).unwrap()["vcpus"], 3);
    story.pod.delete("demo").await.unwrap();
}

#[tokio::test]
async fn a_container_has_the_vcpus_that_its_limit_can_use() {
    let story = of_four(json!({}), json!({"cpu": {"quota": 150_000, "period": 100_000}})).await;
    story.create().await;
    assert_eq!((kernel_args(&story), online(&story)), (json!(["maxcpus=1"]), vec![2]));
    update(&story, "demo", json!({"pids": {"limit": 5}})).await;
    assert_eq!(online(&story), [2]);
    update(&story, "demo", json!({"cpu": {"quota": 300_000}})).await;
    update(&story, "demo", json!({"cpu": {"period": 50_000}})).await;
    update(&story, "demo", json!({"cpu": {"quota": -1}})).await;
    assert_eq!(online(&story), [2, 3, 4]);
    update(&story, "demo", json!({"cpu": {"quota": 50_000}})).await;
    assert_eq!(online(&story), [2, 3, 4, 1]);
    story.pod.delete("demo").await.unwrap();
}

/// Where the VMM may run.
fn allowed(story: &Story) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", story.guest.vmm().pid)).unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    list.trim().to_owned()
}

#[tokio::test]
async fn the_vmm_runs_on_the_set_of_processors_of_its_container() {
    let last = online_on_host().last().unwrap().to_string();
    let cpu = json!({"cpus": last, "mems": "0", "quota": 50_000});
    let story = of_four(json!({}), json!({"cpu": cpu, "pids": {"limit": 5}})).await;
    story.create().await;
    assert_eq!((kernel_args(&story), online(&story)), (json!([]), vec![]), "all are online");
    assert_eq!(allowed(&story), last);
    update(&story, "demo", json!({"cpu": {"cpus": "0", "mems": ""}})).await;
    assert_eq!(allowed(&story), "0");
    let given = story.guest.limits();
    // A vCPU has the number of its processor, if there is one.
    let vcpu = if last.parse::<u32>().unwrap() < 4 { last } else { "0".to_owned() };
    assert_eq!(given[0], json!({"cpu": {"cpus": vcpu, "quota": 50_000}, "pids": {"limit": 5}}));
    assert_eq!(given[1]["cpu"].get("mems"), None);
    story.pod.delete("demo").await.unwrap();
}

fn online_on_host() -> Vec<u32> {
    processors::online().unwrap().into_iter().collect()
}

#[tokio::test]
async fn processors_that_the_host_lacks_are_named() {
    let story = of_four(json!({}), json!({"cpu": {"cpus": "4000"}})).await;
    let error = story.pod.create(CreateRequest::Task(story.request())).await.unwrap_err().to_string();
    assert!(error.contains("linux.resources.cpu.cpus: \"4000\""), "{error}");
}

#[tokio::test]
async fn vcpus_of_which_the_guest_has_not_confirmed_the_number_are_asked_for_again() {
    let story = of_four(json!({}), json!({})).await;
    story.create().await;
    story.guest.follow("accept-limits\nfail-processors");
    update(&story, "demo", json!({"cpu": {"quota": 50_000}})).await;
    assert!(online(&story).is_empty());
    story.guest.follow("accept-limits");
    update(&story, "demo", json!({"cpu": {"quota": 400_000}})).await;
    assert_eq!(online(&story), [4]);
    story.pod.delete("demo").await.unwrap();
}

/// A pod of the CRI, with these further annotations, that runs.
async fn sandbox_of_four(annotations: Value) -> Story {
    let mut all = json!({"io.kubernetes.cri.container-type": "sandbox"});
    all.as_object_mut().unwrap().extend(annotations.as_object().unwrap().clone());
    let story = of_four(all, json!({})).await;
    story.create_and_start().await;
    story
}

/// Creates a container of the pod.
async fn add(story: &Story, id: &str, args: &[&str], resources: Value) -> Result<Arc<Container>, TaskError> {
    make_bundle(story.dir.path(), id, args, |spec| {
        super::members::be_member(spec);
        spec["linux"]["resources"] = resources;
    });
    timeout(WAIT, story.pod.create(CreateRequest::Task(story.request_of(id)))).await.unwrap()
}

#[tokio::test]
async fn a_container_that_has_ended_gives_back_its_processors() {
    let story = sandbox_of_four(json!({})).await;
    let all = allowed(&story);
    let last = online_on_host().last().unwrap().to_string();
    let cpu = json!({"cpu": {"cpus": last}});
    add(&story, "deleted", &["sleep", "1000"], cpu.clone()).await.unwrap();
    assert_eq!(allowed(&story), last);
    story.pod.delete("deleted").await.unwrap();
    assert_eq!(allowed(&story), all);
    add(&story, "failed", &["missing"], cpu.clone()).await.unwrap_err();
    assert_eq!(allowed(&story), all);
    let ended = add(&story, "ended", &["sleep", "1000"], cpu).await.unwrap();
    ended.start().await.unwrap();
    assert_eq!(allowed(&story), last);
    ended.kill(9, false).await.unwrap();
    let given_back = async {
        while allowed(&story) != all {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WAIT, given_back).await.expect("it keeps its processors");
    story.pod.stop().await;
}

#[tokio::test]
async fn the_limit_of_the_pod_counts_until_a_container_gets_another_limit() {
    let story = sandbox_of_four(
        json!({"io.kubernetes.cri.sandbox-cpu-quota": "200000", "io.kubernetes.cri.sandbox-cpu-period": "100000"}),
    )
    .await;
    add(&story, "one", &["sleep", "1000"], json!({"cpu": {"quota": 100_000}})).await.unwrap();
    assert_eq!(online(&story), [2]);
    // kubelet repeats a limit that it does not change.
    update(&story, "one", json!({"cpu": {"quota": 100_000}, "pids": {"limit": 9}})).await;
    assert_eq!(online(&story), [2]);
    update(&story, "one", json!({"cpu": {"quota": 300_000}})).await;
    assert_eq!(online(&story), [2, 3]);
    story.pod.stop().await;
}

#[tokio::test]
async fn a_container_without_a_limit_has_all_vcpus_beside_those_with_one() {
    // The CRI's sum of the limits that there are. kubelet does not limit the cgroup of such a pod.
    let story = sandbox_of_four(json!({"io.kubernetes.cri.sandbox-cpu-quota": "100000"})).await;
    add(&story, "limited", &["sleep", "1000"], json!({"cpu": {"quota": 100_000}})).await.unwrap();
    assert_eq!(online(&story), Vec::<u32>::new(), "it began with one");
    add(&story, "unlimited", &["sleep", "1000"], json!({"cpu": {"period": 100_000}})).await.unwrap();
    assert_eq!(online(&story), [4]);
    story.pod.stop().await;
}

#[tokio::test]
async fn the_limit_of_the_pod_changes_and_ends() {
    let story = sandbox_of_four(json!({"io.kubernetes.cri.sandbox-cpu-quota": "200000"})).await;
    add(&story, "one", &["sleep", "1000"], json!({"cpu": {"quota": 100_000}})).await.unwrap();
    update(&story, "demo", json!({"cpu": {"quota": 300_000}})).await;
    update(&story, "demo", json!({"cpu": {"quota": 0}})).await;
    assert_eq!(online(&story), [2, 3]);
    update(&story, "demo", json!({"cpu": {"quota": -1}})).await;
    assert_eq!(online(&story), [2, 3, 1], "what the container's own limit can use");
    story.pod.stop().await;
}

/// A cgroup of the host that may use its processor 0. It is removed when this is dropped.
struct OneProcessor(PathBuf, String);

impl OneProcessor {
    fn make() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("/bulkhead-test-{}-one-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let v1 = PathBuf::from("/sys/fs/cgroup/cpuset");
        let root = if v1.exists() { v1 } else { PathBuf::from("/sys/fs/cgroup") };
        // v2 has a controller only where the cgroup above enables it.
        _ = fs::write(root.join("cgroup.subtree_control"), "+cpuset");
        let group = root.join(&name[1..]);
        fs::create_dir(&group).unwrap();
        let made = Self(group, name);
        for file in ["cpuset.cpus", "cpuset.mems"] {
            fs::write(made.0.join(file), "0").unwrap();
        }
        made
    }
}

impl Drop for OneProcessor {
    fn drop(&mut self) {
        _ = fs::remove_dir(&self.0);
    }
}

/// A story in that cgroup, whose VMs have four vCPUs if `of_four`.
async fn in_group(group: &OneProcessor, of_four: bool) -> Story {
    let story =
        if of_four { self::of_four(json!({}), json!({})).await } else { Story::begin(&["true"]).await };
    story.change_spec(|spec| spec["linux"]["cgroupsPath"] = format!("{}/pod", group.1).into());
    story.guest.follow("accept-limits");
    story
}

#[tokio::test]
async fn a_pod_has_as_many_vcpus_as_the_cgroup_above_has_processors() {
    let group = OneProcessor::make();
    let story = in_group(&group, false).await;
    story.create().await;
    let config = fs::read(story.guest.state.join("vmm.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&config).unwrap()["vcpus"], 1);
    story.pod.delete("demo").await.unwrap();
}

#[tokio::test]
async fn a_set_that_cannot_be_used_is_all_that_the_pod_may_use() {
    let group = OneProcessor::make();
    let story = in_group(&group, true).await;
    story.create().await;
    // It is not offline, but that makes no difference here.
    let last = processors::processors().unwrap().possible.into_iter().next_back().unwrap();
    update(&story, "demo", json!({"cpu": {"cpus": last.to_string()}})).await;
    let vcpus = if last == 0 { "0" } else { "0-3" };
    assert_eq!(story.guest.limits().last().unwrap()["cpu"]["cpus"], vcpus);
    let effective = ["cpuset.effective_cpus", "cpuset.cpus.effective"]
        .iter()
        .find_map(|file| fs::read_to_string(group.0.join("pod").join(file)).ok());
    assert_eq!(effective.as_deref(), Some("0\n"));
    story.pod.delete("demo").await.unwrap();
}

#[tokio::test]
async fn an_update_that_fails_after_its_container_is_deleted_leaves_no_limit() {
    let story = sandbox_of_four(json!({})).await;
    let limits = json!({"memory": {"limit": 64 << 20}, "cpu": {"cpus": "0"}});
    let one = add(&story, "one", &["sleep", "1000"], limits).await.unwrap();
    assert_eq!(story.pod.vm().memory_limits(), 64 << 20);
    let path = story.guest.state.join("control.sock");
    let control = UnixListener::bind(&path).unwrap();
    let vmm = async {
        let mut stream = BufReader::new(control.accept().await.unwrap().0);
        stream.read_line(&mut String::new()).await.unwrap();
        stream.write_all(b"{\"result\":\"memory\",\"memory_mib\":384}\n").await.unwrap();
        // Nobody answers what follows.
        fs::remove_file(&path).unwrap();
        story.pod.delete("one").await.unwrap();
        // The minute that the guest has for the memory passes at once.
        tokio::time::pause();
        stream
    };
    let resources = json!({"memory": {"limit": 772 << 20}, "cpu": {"cpus": "0"}});
    let request = request_to_update("one", resources);
    let (updated, _stream) = tokio::join!(one.update(story.pod.vm(), request), vmm);
    tokio::time::resume();
    assert!(chain(&updated.unwrap_err()).contains("within 60 s"));
    assert_eq!((story.pod.vm().memory_limits(), story.pod.vm().cpu_of("one")), (0, None));
    story.pod.stop().await;
}

/// A file of the pod's cgroup on the host, by its name in cgroup v1 and in v2.
fn cpu_file(story: &Story, v1: &str, v2: &str) -> PathBuf {
    let spec = fs::read(story.dir.path().join("demo/config.json")).unwrap();
    let spec: Value = serde_json::from_slice(&spec).unwrap();
    let path = spec["linux"]["cgroupsPath"].as_str().unwrap();
    let file = PathBuf::from(format!("/sys/fs/cgroup/cpu{path}/{v1}"));
    if file.exists() { file } else { format!("/sys/fs/cgroup{path}/{v2}").into() }
}

/// The quota of the pod's cgroup on the host.
fn quota_on_host(story: &Story) -> String {
    let text = fs::read_to_string(cpu_file(story, "cpu.cfs_quota_us", "cpu.max")).unwrap();
    text.split_whitespace().next().unwrap().to_owned()
}

/// Whether the cgroup has the shares, or the weight, that a new one has.
fn shares_on_host(story: &Story) -> String {
    let text = fs::read_to_string(cpu_file(story, "cpu.shares", "cpu.weight")).unwrap();
    if matches!(text.trim(), "1024" | "100") { "default".to_owned() } else { "other".to_owned() }
}

#[tokio::test]
async fn an_update_that_the_hosts_cgroup_refuses_does_not_change_the_guest() {
    let story = of_four(json!({}), json!({"cpu": {"quota": 50_000, "period": 100_000}})).await;
    let container = story.create_and_start().await;
    let given = story.guest.limits().len();
    // The kernel accepts no period below a millisecond.
    let request = request_to_update("demo", json!({"cpu": {"period": 500, "shares": 2048}}));
    let error = container.update(story.pod.vm(), request).await.unwrap_err();
    assert!(chain(&error).contains("cannot set /"), "{}", chain(&error));
    assert_eq!(story.guest.limits().len(), given, "the guest got limits");
    assert_eq!((quota_on_host(&story).as_str(), shares_on_host(&story).as_str()), ("60000", "default"));
    assert_eq!(story.pod.vm().cpu_of("demo").unwrap().period, Some(100_000));
    story.pod.stop().await;
}

#[tokio::test]
async fn an_update_that_the_guest_refuses_leaves_the_hosts_cgroup_as_it_was() {
    let story = of_four(json!({}), json!({"cpu": {"quota": 50_000, "period": 100_000}})).await;
    let container = story.create_and_start().await;
    story.guest.follow("accept-limits\nfail-update");
    let request = request_to_update("demo", json!({"cpu": {"quota": 150_000, "shares": 2048}}));
    let error = container.update(story.pod.vm(), request).await.unwrap_err();
    assert!(chain(&error).contains("fail-update"), "{}", chain(&error));
    assert_eq!((quota_on_host(&story).as_str(), shares_on_host(&story).as_str()), ("60000", "default"));
    story.guest.follow("accept-limits");
    update(&story, "demo", json!({"cpu": {"quota": 150_000, "shares": 2048}})).await;
    assert_eq!((quota_on_host(&story).as_str(), shares_on_host(&story).as_str()), ("160000", "other"));
    story.pod.stop().await;
}

#[tokio::test]
async fn a_cgroup_of_the_host_that_hangs_keeps_no_other_request() {
    let story = of_four(json!({}), json!({"cpu": {"quota": 50_000, "period": 100_000}})).await;
    let container = story.create_and_start().await;
    let file = cpu_file(&story, "cpu.cfs_period_us", "cpu.max");
    let fifo = story.dir.path().join("fifo");
    mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
    mount(Some(&fifo), &file, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    // A thread that waits for the end of the write could not do anything else.
    let begun = Instant::now();
    let reader = thread::spawn(move || {
        thread::sleep(HANGS);
        fs::read(fifo).unwrap()
    });
    let request = request_to_update("demo", json!({"cpu": {"quota": 150_000}}));
    let error = container.update(story.pod.vm(), request).await.unwrap_err();
    assert!(chain(&error).contains("were not set within"), "{}", chain(&error));
    assert!(begun.elapsed() < HANGS, "the shim hung");
    assert!(story.pod.vm().pending.contains("demo"));
    reader.join().unwrap();
    umount2(&file, MntFlags::MNT_DETACH).unwrap();
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

/// How long a file of the cgroup hangs. Much longer than the shim waits for it.
const HANGS: Duration = Duration::from_secs(8);

#[tokio::test]
async fn an_update_before_the_start_holds_after_it() {
    let story = of_four(json!({}), json!({"cpu": {"quota": 50_000, "period": 100_000}})).await;
    let container = story.create().await;
    update(&story, "demo", json!({"cpu": {"quota": 150_000}})).await;
    container.start().await.unwrap();
    // With what the VMM's devices may take.
    assert_eq!(quota_on_host(&story), "160000");
    story.pod.stop().await;
}

#[tokio::test]
async fn updates_that_wait_for_others_end_before_their_client_gives_up() {
    let story = of_four(json!({}), json!({})).await;
    let container = story.create().await;
    story.guest.stop();
    tokio::time::pause();
    let begun = tokio::time::Instant::now();
    let mut updates = tokio::task::JoinSet::new();
    // Each waits for an answer of the guest, one after the other. Together they would take longer.
    for _ in 0..80 {
        let (pod, container) = (story.pod.clone(), Arc::clone(&container));
        let request = request_to_update("demo", json!({"pids": {"limit": 9}}));
        updates.spawn(async move { container.update(pod.vm(), request).await });
    }
    let errors: Vec<_> = updates.join_all().await.into_iter().map(Result::unwrap_err).collect();
    assert!(begun.elapsed() < Duration::from_secs(110), "{:?}", begun.elapsed());
    let is_late = |error: &&TaskError| matches!(error, TaskError::Timeout { seconds: 90, .. });
    assert!(errors.iter().any(|error| is_late(&error)));
    tokio::time::resume();
    story.guest.go_on();
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn a_start_in_a_guest_that_does_not_answer_ends_before_its_client_gives_up() {
    let story = of_four(json!({}), json!({"cpu": {"quota": 50_000, "period": 100_000}})).await;
    let container = story.create().await;
    story.guest.stop();
    tokio::time::pause();
    let begun = tokio::time::Instant::now();
    // Another request waits for vCPUs meanwhile, and the start waits for it.
    let (pod, updated) = (story.pod.clone(), Arc::clone(&container));
    let request = request_to_update("demo", json!({"cpu": {"quota": 150_000}}));
    let updating = tokio::spawn(async move { updated.update(pod.vm(), request).await });
    tokio::task::yield_now().await;
    let error = container.start().await.unwrap_err();
    assert!(matches!(error, TaskError::Timeout { seconds: 60, .. }), "{error}");
    // kubelet waits for two minutes.
    assert!(begun.elapsed() < Duration::from_secs(90), "{:?}", begun.elapsed());
    assert!(updating.await.unwrap().is_err());
    tokio::time::resume();
    story.guest.go_on();
    timeout(WAIT, story.pod.stop()).await.unwrap();
}
