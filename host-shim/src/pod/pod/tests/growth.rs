//! The VM of a pod grows when containers without a memory limit need more memory.

use std::time::Instant;

use serde_json::Value;

use super::*;

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

/// Expects a request for memory, and answers it.
async fn resized(control: &UnixListener, memory_mib: u32, answer: &str) {
    let accepted = timeout(WAIT, control.accept()).await.unwrap().unwrap();
    let mut stream = BufReader::new(accepted.0);
    let mut request = String::new();
    stream.read_line(&mut request).await.unwrap();
    assert_eq!(request, format!("{{\"op\":\"resize\",\"memory_mib\":{memory_mib}}}\n"));
    stream.write_all(answer.as_bytes()).await.unwrap();
}

const OK: &str = "{\"result\":\"ok\"}\n";

/// Waits until the guest has been asked for its demand in these cases.
async fn asked(story: &Story, expected: &[bool]) {
    let begun = Instant::now();
    while story.guest.demands() != expected {
        assert!(begun.elapsed() < WAIT, "{:?}", story.guest.demands());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn limit(story: &Story, limit: i64) {
    let mut request = api::UpdateTaskRequest::new();
    request.id = "demo".into();
    let resources = json!({"memory": {"limit": limit}});
    request.resources.mut_or_insert_default().value = resources.to_string().into_bytes();
    timeout(WAIT, story.own().update(story.pod.vm(), request)).await.unwrap().unwrap();
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
