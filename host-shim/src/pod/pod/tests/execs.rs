//! Processes that are added to a container.

use super::*;
use crate::{process::state::State, types::terminal::WindowSize};

#[tokio::test]
async fn a_process_is_added_runs_and_is_deleted() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let container = story.create().await;
    story.own().start().await.unwrap();
    let execs = &container.execs;
    execs.add(exec("one", &["sh", "-c", "exit 7"])).unwrap();
    assert!(matches!(execs.add(exec("one", &["sleep", "1000"])), Err(TaskError::ExecExists { .. })));
    assert!(matches!(execs.kill("one", 9).await, Err(TaskError::Exec { .. })));
    execs.start("one").await.unwrap();
    assert!(matches!(execs.start("one").await, Err(TaskError::Exec { .. })));
    let one = execs.get("one").unwrap();
    assert_eq!(timeout(WAIT, one.wait()).await.unwrap().unwrap().status, 7);
    assert_eq!(timeout(WAIT, execs.delete("one")).await.unwrap().unwrap().unwrap().status, 7);
    assert!(matches!(execs.get("one"), Err(TaskError::NoExec { .. })));
    assert_eq!(story.status(), Status::Running);
    container.kill(9, false).await.unwrap();
    assert_eq!(story.wait_demo().await, 137);
    story.pod.delete("demo").await.unwrap();
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started"];
    story.end(&[&topics[..], &["/tasks/exit", "/tasks/exit", "/tasks/delete"]].concat()).await;
}

/// Standard input or output of a process that is added: the test's end of a FIFO, and its path for the request.
fn fifo(story: &Story, name: &str) -> String {
    let fifo = story.dir.path().join(name);
    mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
    fifo.display().to_string()
}

#[tokio::test]
async fn a_terminal_begins_with_the_size_that_it_had_before_its_start() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let container = story.create().await;
    let execs = &container.execs;
    // Prints the size at its start, and again with each SIGWINCH.
    let script = "trap 'stty size' WINCH; stty size; while :; do sleep 0.01; done";
    let mut request = exec("one", &["sh", "-c", script]);
    request.terminal = true;
    request.stdout = fifo(&story, "stdout");
    let mut client = BufReader::new(pipe::OpenOptions::new().open_receiver(&request.stdout).unwrap()).lines();
    let mut size = async || timeout(WAIT, client.next_line()).await.unwrap().unwrap().unwrap();
    execs.add(request).unwrap();
    execs.add(exec("plain", &["sleep", "1000"])).unwrap();
    for (id, width) in [("one", 10), ("one", 20), ("plain", 30)] {
        execs.resize(id, WindowSize { width, height: 5 }).await.unwrap();
    }
    execs.start("one").await.unwrap();
    assert_eq!(size().await.trim_end(), "5 20");
    execs.resize("one", WindowSize { width: 40, height: 5 }).await.unwrap();
    assert_eq!(size().await.trim_end(), "5 40");
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
    let story = Story::begin(&["sleep", "1000"]).await;
    let container = story.create().await;
    container.execs.add(exec("none", &["missing"])).unwrap();
    let error = container.execs.start("none").await.unwrap_err();
    assert_eq!(chain(&error), "exec: \"missing\": executable file not found in $PATH");
    assert_eq!(container.execs.get("none").unwrap().process.state(), State::Created);
    assert_eq!(container.execs.delete("none").await.unwrap(), None);
    story.pod.delete("demo").await.unwrap();
    story.end(&["/tasks/create", "/tasks/exec-added", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn the_vmms_death_is_heard_of_each_process_before_the_container() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let container = story.create().await;
    story.own().start().await.unwrap();
    container.execs.add(exec("one", &["sleep", "1000"])).unwrap();
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
    let story = Story::begin(&["sleep", "1000"]).await;
    let container = story.create().await;
    // It ends with its input.
    let mut request = exec("one", &["cat"]);
    request.stdin = fifo(&story, "stdin");
    container.execs.add(request).unwrap();
    let one = container.execs.get("one").unwrap();
    // CloseIO of a client whose own input has ended at once.
    one.process.close_stdin();
    timeout(WAIT, container.execs.start("one")).await.unwrap().unwrap();
    assert_eq!(timeout(WAIT, one.wait()).await.unwrap().unwrap().status, 0);
    timeout(WAIT, story.pod.stop()).await.unwrap();
}
