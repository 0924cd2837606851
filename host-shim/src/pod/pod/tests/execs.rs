//! Processes that are added to a container.

use super::*;
use crate::{process::state::State, types::terminal::WindowSize};

#[tokio::test]
async fn a_process_is_added_runs_and_is_deleted() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    story.own().start().await.unwrap();
    let execs = &container.execs;
    execs.add(exec("one", &["exit", "7"])).unwrap();
    assert!(matches!(execs.add(exec("one", &["sleep"])), Err(TaskError::ExecExists { .. })));
    assert!(matches!(execs.kill("one", 9).await, Err(TaskError::Exec { .. })));
    execs.start("one").await.unwrap();
    assert!(matches!(execs.start("one").await, Err(TaskError::Exec { .. })));
    let one = execs.get("one").unwrap();
    assert_eq!(timeout(WAIT, one.wait()).await.unwrap().unwrap().status, 7);
    assert_eq!(timeout(WAIT, execs.delete("one")).await.unwrap().unwrap().unwrap().status, 7);
    assert!(matches!(execs.get("one"), Err(TaskError::NoExec { .. })));
    assert_eq!(story.status(), Status::Running);
    story.guest.end("demo", 0).await;
    timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap();
    story.pod.delete("demo").await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_terminal_begins_with_the_size_that_it_had_before_its_start() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    let execs = &container.execs;
    let mut request = exec("one", &["sleep"]);
    request.terminal = true;
    request.spec.mut_or_insert_default().value = br#"{"terminal": true, "args": ["sleep"]}"#.to_vec();
    execs.add(request).unwrap();
    execs.add(exec("plain", &["sleep"])).unwrap();
    for (id, width) in [("one", 10), ("one", 20), ("plain", 30)] {
        execs.resize(id, WindowSize { width, height: 5 }).await.unwrap();
    }
    execs.start("one").await.unwrap();
    execs.resize("one", WindowSize { width: 40, height: 5 }).await.unwrap();
    assert_eq!(*story.guest.windows.lock().unwrap(), [[20, 5], [40, 5]]);
    execs.kill("one", 9).await.unwrap();
    timeout(WAIT, execs.get("one").unwrap().wait()).await.unwrap().unwrap();
    let late = execs.resize("one", WindowSize { width: 50, height: 5 }).await;
    assert!(matches!(late, Err(TaskError::ResizeStopped)));
    story.pod.delete("demo").await.unwrap();
    let topics =
        ["/tasks/create", "/tasks/exec-added", "/tasks/exec-added", "/tasks/exec-started", "/tasks/exit"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn a_process_that_cannot_be_started_is_only_deleted() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    container.execs.add(exec("none", &["missing"])).unwrap();
    let error = container.execs.start("none").await.unwrap_err();
    assert_eq!(chain(&error), "exec \"missing\": No such file or directory");
    assert_eq!(container.execs.get("none").unwrap().process.state(), State::Created);
    assert_eq!(container.execs.delete("none").await.unwrap(), None);
    story.pod.delete("demo").await.unwrap();
    story.end(&["/tasks/create", "/tasks/exec-added", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn the_vmms_death_is_heard_of_each_process_before_the_container() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    story.own().start().await.unwrap();
    container.execs.add(exec("one", &["sleep"])).unwrap();
    container.execs.start("one").await.unwrap();
    assert!(matches!(container.execs.delete("one").await, Err(TaskError::Exec { .. })));
    story.guest.vmm().kill(WAIT).unwrap();
    timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap();
    let one = container.execs.get("one").unwrap();
    assert!(matches!(one.process.state(), State::Stopped(exit) if exit.status == 137));
    story.pod.delete("demo").await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/exit", "/tasks/delete"]].concat()).await;
}

#[tokio::test]
async fn stdin_that_was_closed_before_the_start_ends() {
    let story = Story::begin(&["sleep"]).await;
    let container = story.create().await;
    let fifo = story.dir.path().join("stdin");
    mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
    let mut request = exec("one", &["sleep"]);
    request.stdin = fifo.display().to_string();
    container.execs.add(request).unwrap();
    let one = container.execs.get("one").unwrap();
    // CloseIO of a client whose own input has ended at once.
    one.process.close_stdin();
    timeout(WAIT, container.execs.start("one")).await.unwrap().unwrap();
    let mut stdin = timeout(WAIT, story.guest.taken()).await.unwrap();
    let mut received = Vec::new();
    timeout(WAIT, stdin.read_to_end(&mut received)).await.unwrap().unwrap();
    drop(stdin);
    timeout(WAIT, story.pod.stop()).await.unwrap();
}
