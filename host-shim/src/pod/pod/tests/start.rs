//! What is recorded of a start.

use std::{collections::HashMap, os::unix::fs::PermissionsExt};

use containerd_shim_protos::shim_async::Task;
use tokio::sync::watch;
use ttrpc::r#async::TtrpcContext;

use super::*;
use crate::{
    operator::{container_starts, start_record},
    service::task::TaskService,
    types::timeline::{Origin, Phase, Step},
};

/// The context of a request of this span of a client, and what the client says of the span.
pub(super) fn context_of(span: u64) -> (TtrpcContext, String) {
    let parent = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{span:016x}-01");
    let metadata = HashMap::from([("traceparent".to_owned(), vec![parent.clone()])]);
    (TtrpcContext { metadata, ..Default::default() }, parent)
}

/// The requests of the pod's record that have a caller.
pub(super) fn callers(story: &Story) -> Vec<(&'static str, String)> {
    let record = start_record(&story.guest.state).unwrap().unwrap();
    let called = |phase: &Phase| Some((phase.step.name(), phase.caller?.to_string()));
    record.phases.iter().filter_map(called).collect()
}

fn durations(phases: &[Phase]) -> HashMap<&'static str, u64> {
    phases.iter().map(|phase| (phase.step.name(), phase.duration_us)).collect()
}

#[tokio::test]
async fn the_phases_of_a_start_are_recorded_and_go_with_the_pod() {
    let story = Story::begin(&["sleep", "60"]).await;
    let container = story.create().await;
    let state = story.guest.state.clone();
    let created = start_record(&state).unwrap().unwrap();
    assert_eq!(created.vm, Origin::Boot);
    let mut parts = durations(&created.phases);
    let create = parts.remove(Step::Create.name()).unwrap();
    assert!(parts.values().all(|part| *part <= create), "{created:?}");
    let mut names: Vec<_> = parts.into_keys().collect();
    names.sort_unstable();
    let expected = [
        "boot_vm",
        "create_container",
        "fit_memory",
        "fit_processors",
        "mount_files",
        "prepare_host",
        "read_request",
        "start_sandbox",
    ];
    assert_eq!(names, expected);
    let mode = fs::metadata(state.join("start.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    container.start().await.unwrap();
    let started = start_record(&state).unwrap().unwrap();
    let parts = durations(&started.phases);
    assert!(
        parts["start"] >= parts["start_container"] && parts.contains_key("connect_network"),
        "{started:?}"
    );
    assert_eq!(
        (started.phases.len(), started.began_unix_us),
        (created.phases.len() + 3, created.began_unix_us)
    );
    container.kill(9, false).await.unwrap();
    story.wait_demo().await;
    story.pod.delete("demo").await.unwrap();
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn each_further_container_of_a_pod_has_a_record_of_its_own() {
    let story = Story::pod().await;
    let state = story.guest.state.clone();
    assert_eq!(container_starts(&state), Ok(Vec::new()));
    // It has no bundle.
    let failing = story.pod.create(CreateRequest::Task(story.request_of("none")));
    timeout(WAIT, failing).await.unwrap().unwrap_err();
    story.add("created", &["true"]).await.unwrap();
    story.run("one", &["true"]).await;
    let starts = container_starts(&state).unwrap();
    let [created, started] = starts.as_slice() else { panic!("{starts:?}") };
    assert_eq!([&created.container, &started.container], ["created", "one"]);
    let sorted = |phases: &[Phase]| {
        let mut names: Vec<_> = durations(phases).into_keys().collect();
        names.sort_unstable();
        names
    };
    let of_create =
        ["create", "create_container", "fit_memory", "fit_processors", "mount_files", "read_request"];
    assert_eq!(sorted(&created.phases), of_create);
    let of_start = ["connect_network", "start", "start_container"];
    let all = durations(&started.phases);
    assert_eq!(all.len(), of_create.len() + of_start.len(), "{started:?}");
    assert!(of_create.iter().all(|part| all[part] <= all["create"]), "{started:?}");
    assert!(of_start.iter().all(|part| all[part] <= all["start"]), "{started:?}");
    let first = start_record(&state).unwrap().unwrap();
    assert!(first.began_unix_us < created.began_unix_us && created.began_unix_us < started.began_unix_us);
    let mode = fs::metadata(state.join("container-starts.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!((story.wait("one").await, story.delete("one").await), (0, 0));
    story.delete("created").await;
    story.own().kill(15, false).await.unwrap();
    assert_eq!((story.wait("demo").await, story.delete("demo").await), (0, 0));
    assert!(!state.exists());
    let (begin, end) = (["/tasks/create", "/tasks/start", "/tasks/create"], ["/tasks/exit", "/tasks/delete"]);
    let topics = [&begin[..], &WHOLE_LIFE, &end, &end].concat();
    story.end(&topics).await;
}

#[tokio::test]
async fn the_record_names_the_spans_that_the_requests_belong_to() {
    let story = Story::begin(&["sleep", "60"]).await;
    let service = TaskService::new(story.pod.clone(), watch::channel(false).0);
    let (context, _) = context_of(0);
    timeout(WAIT, service.create(&context, story.request())).await.unwrap().unwrap();
    assert_eq!(callers(&story), [], "a span has another id than 0");
    let (context, starter) = context_of(7);
    let request = api::StartRequest { id: "demo".into(), ..Default::default() };
    timeout(WAIT, service.start(&context, request)).await.unwrap().unwrap();
    assert_eq!(callers(&story), [("start", starter)]);
    story.own().kill(9, false).await.unwrap();
    story.wait_demo().await;
    story.pod.delete("demo").await.unwrap();
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn what_happens_to_a_pod_is_recorded_for_the_operator() {
    let story = Story::begin(&["sleep", "60"]).await;
    let container = story.create().await;
    container.start().await.unwrap();
    container.kill(9, false).await.unwrap();
    story.wait_demo().await;
    let text = fs::read_to_string(story.guest.state.join("events.json")).unwrap();
    let events: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["pod_began", "vm_up", "container_created", "container_started", "container_exited"]);
    assert_eq!((&events[1]["vm"], &events[4]["status"]), (&"boot".into(), &137.into()));
    assert!(events.iter().enumerate().all(|(number, event)| event["number"] == number), "{text}");
    story.pod.delete("demo").await.unwrap();
    assert!(!story.guest.state.exists());
    story.end(&WHOLE_LIFE).await;
}
