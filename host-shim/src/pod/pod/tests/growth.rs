//! The VM of a pod grows when containers without a memory limit need more memory.

use std::time::Instant;

use serde_json::Value;
use tokio::net::UnixStream;

use super::*;
use crate::host::{memory_promises, process_id::ProcessId};

/// A pod whose containers need memory as long as the VM can have up to `most` MiB, and the control socket of its VMM.
async fn in_need(most: u32, resources: Value) -> (Story, UnixListener) {
    let story = Story::begin(&["sleep", "1000"]).await;
    let config = story.dir.path().join("config.toml");
    let text = fs::read_to_string(&config).unwrap() + &format!("max_memory_mib = {most}\n");
    fs::write(&config, text).unwrap();
    story.change_spec(|spec| spec["linux"]["resources"] = resources);
    story.guest.follow("need-memory\naccept-limits");
    // The VMM binds its socket when it starts.
    let state = story.guest.state.clone();
    let bound = async move {
        while !state.is_dir() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        UnixListener::bind(state.join("control.sock")).unwrap()
    };
    let (control, _) = tokio::join!(bound, story.create());
    (story, control)
}

/// Expects a request for memory, and answers it. The connection ends with the result.
async fn resized(control: &UnixListener, memory_mib: u32, answer: &str) -> BufReader<UnixStream> {
    let accepted = timeout(WAIT, control.accept()).await.unwrap().unwrap();
    let mut stream = BufReader::new(accepted.0);
    let mut request = String::new();
    stream.read_line(&mut request).await.unwrap();
    assert_eq!(request, format!("{{\"op\":\"resize\",\"memory_mib\":{memory_mib}}}\n"));
    stream.write_all(answer.as_bytes()).await.unwrap();
    stream
}

const OK: &str = "{\"result\":\"ok\"}\n";
const A_PART: &str = "{\"result\":\"memory\",\"memory_mib\":512}\n";

/// Waits until the guest has been asked for its demand in these cases.
async fn asked(story: &Story, expected: &[bool]) {
    let begun = Instant::now();
    while story.guest.demands() != expected {
        assert!(begun.elapsed() < WAIT, "{:?}", story.guest.demands());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn limit(story: &Story, limit: i64) {
    timeout(WAIT, update_limit(story, limit)).await.unwrap().unwrap();
}

async fn update_limit(story: &Story, limit: i64) -> Result<(), TaskError> {
    let mut request = api::UpdateTaskRequest::new();
    request.id = "demo".into();
    let resources = json!({"memory": {"limit": limit}});
    request.resources.mut_or_insert_default().value = resources.to_string().into_bytes();
    story.own().update(story.pod.vm(), request).await
}

#[tokio::test]
async fn a_vm_doubles_until_it_has_the_most_that_it_may_have() {
    let (story, control) = in_need(896, json!({})).await;
    resized(&control, 512, OK).await;
    resized(&control, 896, OK).await;
    asked(&story, &[true, true, false]).await;
    story.pod.delete("demo").await.unwrap();
}

#[tokio::test]
async fn a_guest_hears_at_once_that_its_vm_cannot_grow() {
    let (story, control) = in_need(1024, json!({})).await;
    resized(&control, 512, "{\"result\":\"error\",\"message\":\"no memory\"}\n").await;
    asked(&story, &[true, false]).await;
    story.pod.delete("demo").await.unwrap();
}

#[tokio::test]
async fn only_containers_without_a_limit_have_a_vm_grow() {
    let (story, control) = in_need(512, json!({"memory": {"limit": 64 << 20}})).await;
    asked(&story, &[false]).await;
    limit(&story, -1).await;
    resized(&control, 512, OK).await;
    asked(&story, &[false, true, false]).await;
    story.pod.delete("demo").await.unwrap();
}

/// The guest may get memory after the shim has given up waiting for it.
#[tokio::test]
async fn a_guest_that_was_late_does_not_lose_what_it_got_meanwhile() {
    let (story, control) = in_need(8192, json!({"memory": {"limit": 64 << 20}})).await;
    let late = update_limit(&story, 1 << 30);
    let vmm = async {
        let stream = resized(&control, 1152, A_PART).await;
        // Nothing else is under way: the minute passes at once.
        tokio::time::pause();
        stream
    };
    let (late, _stream) = tokio::join!(late, vmm);
    tokio::time::resume();
    let error = chain(&late.unwrap_err());
    assert!(error.ends_with("the guest reached only 512 MiB within 60 s"), "{error}");
    // What it has is enough for this one. The next one needs more than was reached, and less than was requested.
    limit(&story, 256 << 20).await;
    let enough = update_limit(&story, 512 << 20);
    let larger_part = A_PART.replace("512", "768");
    let (enough, stream) = tokio::join!(enough, resized(&control, 1152, &larger_part));
    enough.unwrap();
    drop(stream);
    let (whole, _stream) = tokio::join!(update_limit(&story, 1 << 30), resized(&control, 1152, OK));
    whole.unwrap();
    limit(&story, 600 << 20).await;
    story.pod.delete("demo").await.unwrap();
}

#[tokio::test]
async fn a_limit_is_raised_while_a_vm_waits_for_memory_on_demand() {
    let (story, control) = in_need(8192, json!({})).await;
    let waits = resized(&control, 512, A_PART.replace("512", "384").as_str()).await;
    let raised = Instant::now();
    let (raise, _stream) = tokio::join!(update_limit(&story, 1 << 30), resized(&control, 1152, OK));
    raise.unwrap();
    assert!(raised.elapsed() < Duration::from_secs(1), "{:?}", raised.elapsed());
    drop(waits);
    story.pod.delete("demo").await.unwrap();
}

/// There was room when the guest was told so, but another VM is given it.
#[tokio::test]
async fn a_guest_hears_at_once_that_another_vm_got_what_was_left() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let other = story.dir.path().join("run/containerd/k8s/other");
    fs::create_dir_all(&other).unwrap();
    memory_promises::make(&other, ProcessId::of(std::process::id()).unwrap(), u64::MAX).unwrap();
    story.guest.follow("need-memory");
    story.create().await;
    asked(&story, &[true, false]).await;
    story.pod.delete("demo").await.unwrap();
}

#[tokio::test]
async fn a_limit_that_is_lowered_is_so_although_the_guest_keeps_its_memory() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.change_spec(|spec| spec["linux"]["resources"] = json!({"memory": {"limit": 128 << 20}}));
    story.guest.follow("accept-limits\nfail-follow");
    story.create().await;
    limit(&story, 64 << 20).await;
    assert_eq!(story.guest.failed_to_follow(), 1);
    story.pod.delete("demo").await.unwrap();
}
