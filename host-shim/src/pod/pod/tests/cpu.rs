//! The vCPUs of a pod's VM follow the limits of its containers.

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
    let mut request = api::UpdateTaskRequest::new();
    request.id = id.into();
    request.resources.mut_or_insert_default().value = resources.to_string().into_bytes();
    let container = story.pod.container(id).unwrap();
    timeout(WAIT, container.update(story.pod.vm(), request)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_container_without_a_limit_has_all_vcpus_from_the_start() {
    let story = of_four(json!({}), json!({})).await;
    story.create().await;
    assert_eq!((kernel_args(&story), online(&story)), (json!([]), vec![]));
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
    let error = story.pod.create(Creation::Task(story.request())).await.unwrap_err().to_string();
    assert!(error.contains("linux.resources.cpu.cpus: \"4000\""), "{error}");
}
