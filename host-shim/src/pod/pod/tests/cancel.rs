//! Whatever hangs, a container can be killed and deleted.

use std::{fs::File, os::fd::AsRawFd};

use containerd_shim_protos::shim_async::Task;
use nix::mount::{MsFlags, mount};
use tokio::sync::watch;
use ttrpc::r#async::TtrpcContext;

use super::*;
use crate::service::task::TaskService;

/// How long a client waits that gives up soon.
const IMPATIENT: Duration = Duration::from_millis(50);

/// Mounts a file system that answers nothing, until the file is dropped.
pub(super) fn mount_hung(place: &Path) -> File {
    fs::create_dir(place).unwrap();
    let requests = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", requests.as_raw_fd());
    mount(Some("hung"), place, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
    requests
}

impl Story {
    /// Gives the container a volume.
    fn bind(&self, source: &Path) {
        let path = self.dir.path().join("demo/config.json");
        let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        spec["mounts"] =
            json!([{"destination": "/v", "type": "bind", "source": source, "options": ["rbind"]}]);
        fs::write(&path, spec.to_string()).unwrap();
    }

    async fn begin_to_create(&self) -> tokio::task::JoinHandle<Result<Arc<Container>, TaskError>> {
        let (pod, request) = (self.pod.clone(), self.request());
        let creating = tokio::spawn(async move { pod.create(Creation::Task(request)).await });
        while !matches!(self.pod.container("demo"), Err(Refusal::Creating)) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        creating
    }
}

#[tokio::test]
async fn a_container_whose_volume_hangs_is_deleted() {
    let story = Story::without_guest(&["sleep"]).await;
    let hung = story.dir.path().join("hung");
    let requests = mount_hung(&hung);
    // The root of the file system is looked at as it is mounted, anything in it later.
    story.bind(&hung.join("data"));
    let creating = story.begin_to_create().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!creating.is_finished());
    let deleted = timeout(WAIT, story.pod.delete("demo")).await.unwrap();
    assert!(matches!(deleted, Err(TaskError::Refused(Refusal::NotFound))));
    assert!(matches!(creating.await.unwrap(), Err(TaskError::Cancelled)));
    assert!(story.pod.is_idle() && !story.dir.path().join("run").exists());
    // The thread goes on, and leaves nothing either.
    drop(requests);
    nix::mount::umount2(&hung, nix::mount::MntFlags::MNT_DETACH).unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    story.end(&[]).await;
}

#[tokio::test]
async fn many_volumes_that_hang_do_not_keep_the_others() {
    let story = Story::begin(&["sleep"]).await;
    let hung = story.dir.path().join("hung");
    let requests = mount_hung(&hung);
    for _ in 0..8 {
        let path = hung.join("data");
        let hangs = crate::host::blocking::run(move || fs::metadata(path).is_ok(), drop);
        assert!(timeout(Duration::from_millis(1), hangs).await.is_err());
    }
    story.create().await;
    timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap();
    drop(requests);
    nix::mount::umount2(&hung, nix::mount::MntFlags::MNT_DETACH).unwrap();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn a_start_that_hangs_in_a_hook_is_given_up_when_the_process_is_killed_and_deleted() {
    let story = Story::begin(&["sleep"]).await;
    story.hooks(&[("poststart", "exec sleep 1000")]);
    story.create().await;
    let container = story.own();
    let starting = tokio::spawn(async move { container.start().await });
    while story.status() != Status::Running {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(story.pod.delete("demo").await.is_err(), "it runs");
    timeout(WAIT, story.own().kill(9, false)).await.unwrap().unwrap();
    timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap();
    timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap();
    assert!(starting.await.unwrap().is_err());
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_poststop_hook_that_hangs_does_not_keep_delete() {
    let story = Story::begin(&["exit", "3"]).await;
    story.hooks(&[("poststop", "exec sleep 1000")]);
    story.create().await;
    story.own().start().await.unwrap();
    timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap();
    assert_eq!(timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap().exit.status, 3);
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_second_create_that_waits_while_the_first_fails_is_carried_out() {
    let story = Story::without_guest(&["sleep"]).await;
    let hung = story.dir.path().join("hung");
    let requests = mount_hung(&hung);
    story.bind(&hung.join("data"));
    let first = story.begin_to_create().await;
    let (pod, request) = (story.pod.clone(), story.request());
    let second = tokio::spawn(async move { pod.create(Creation::Task(request)).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    // The volume is there after all, and the first request is given up.
    let path = story.dir.path().join("demo/config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    spec["mounts"] = json!([]);
    fs::write(&path, spec.to_string()).unwrap();
    drop(requests);
    nix::mount::umount2(&hung, nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert!(first.await.unwrap().is_err());
    tokio::spawn(play(story.guest.clone()));
    let made = timeout(WAIT, second).await.unwrap().unwrap().unwrap();
    assert_eq!(story.own().pid(), made.pid());
    timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn an_exit_is_reported_while_nobody_reads_the_output() {
    let story = Story::begin(&["exit", "7"]).await;
    let fifo = story.dir.path().join("stdout");
    mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
    let mut request = story.request();
    request.stdout = fifo.display().to_string();
    let _client = pipe::OpenOptions::new().open_receiver(&fifo).unwrap();
    story.pod.create(Creation::Task(request)).await.unwrap();
    // More than the FIFO and the connection hold.
    let stream = story.guest.stdout.lock().await.take().unwrap();
    let writing = tokio::spawn(async move {
        let mut stream = stream;
        stream.write_all(&vec![0; 8 << 20]).await
    });
    story.own().start().await.unwrap();
    let exit = timeout(Duration::from_secs(2), story.pod.wait("demo")).await.unwrap().unwrap();
    assert_eq!((exit.status, story.status()), (7, Status::Stopped));
    story.events.flush(WAIT).await;
    assert_eq!(story.heard.topics().last().map(String::as_str), Some("/tasks/exit"));
    assert!(!writing.is_finished());
    timeout(DRAINED, story.pod.delete("demo")).await.unwrap().unwrap();
    story.end(&WHOLE_LIFE).await;
}

/// Delete gives the reader 10 s.
const DRAINED: Duration = Duration::from_secs(15);

#[tokio::test]
async fn a_delete_that_cannot_clean_up_can_be_repeated() {
    let story = Story::begin(&["exit", "4"]).await;
    story.create().await;
    story.own().start().await.unwrap();
    timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap();
    let theirs = story.guest.state.join("theirs");
    fs::write(&theirs, "").unwrap();
    let error = timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap_err();
    assert!(chain(&error).contains("cannot undo the directory"), "{}", chain(&error));
    assert!(!story.guest.state.join("share").exists(), "the rest is undone");
    fs::remove_file(theirs).unwrap();
    assert_eq!(timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap().exit.status, 4);
    let late = story.pod.delete("demo").await;
    assert!(matches!(late, Err(TaskError::Refused(Refusal::NotFound))));
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_creation_that_cannot_be_undone_is_undone_by_delete() {
    let story = Story::without_guest(&["sleep"]).await;
    let theirs = story.guest.state.join("theirs");
    fs::write(
        story.dir.path().join("vmm"),
        format!("#!/bin/sh\ntouch {}\necho 'no KVM' >&2\nexit 1\n", theirs.display()),
    )
    .unwrap();
    let error = timeout(WAIT, story.pod.create(Creation::Task(story.request()))).await.unwrap().unwrap_err();
    assert_eq!(chain(&error), "the VM ended: no KVM");
    assert!(theirs.exists(), "something is left");
    fs::remove_file(theirs).unwrap();
    let deleted = timeout(WAIT, story.pod.delete("demo")).await.unwrap();
    assert!(matches!(deleted, Err(TaskError::Refused(Refusal::NotFound))));
    story.end(&[]).await;
}

#[tokio::test]
async fn the_shim_ends_although_nobody_waits_for_the_answer_to_shutdown() {
    let story = Story::without_guest(&["sleep"]).await;
    let hung = story.dir.path().join("hung");
    let requests = mount_hung(&hung);
    story.bind(&hung.join("data"));
    let creating = story.begin_to_create().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (done, mut is_done) = watch::channel(false);
    let service = TaskService::new(story.pod.clone(), done);
    // The host's step is given 2 s, and containerd waits for 3 s at most.
    let context = TtrpcContext::default();
    assert!(timeout(IMPATIENT, service.shutdown(&context, Default::default())).await.is_err());
    timeout(WAIT, is_done.wait_for(|done| *done)).await.unwrap().unwrap();
    assert!(creating.await.unwrap().is_err());
    drop(requests);
    nix::mount::umount2(&hung, nix::mount::MntFlags::MNT_DETACH).unwrap();
    story.end(&[]).await;
}

#[tokio::test]
async fn a_guest_that_hangs_is_killed_although_nobody_waits_for_the_answer_to_kill() {
    let story = Story::begin(&["sleep"]).await;
    story.create().await;
    story.own().start().await.unwrap();
    story.guest.stuck.lock().unwrap().insert("demo".into());
    let service = TaskService::new(story.pod.clone(), watch::channel(false).0);
    let request = api::KillRequest { id: "demo".into(), signal: 9, ..Default::default() };
    assert!(timeout(IMPATIENT, service.kill(&TtrpcContext::default(), request)).await.is_err());
    assert_eq!(timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap().status, 137);
    timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap();
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn an_update_that_fails_when_nobody_waits_for_its_answer_is_forgotten() {
    let story = Story::begin(&["sleep"]).await;
    story.create().await;
    let _control = UnixListener::bind(story.guest.state.join("control.sock")).unwrap();
    let mut request = api::UpdateTaskRequest::new();
    request.id = "demo".into();
    let resources = json!({"memory": {"limit": 772 << 20}});
    request.resources.mut_or_insert_default().value = resources.to_string().into_bytes();
    let service = TaskService::new(story.pod.clone(), watch::channel(false).0);
    assert!(timeout(IMPATIENT, service.update(&TtrpcContext::default(), request)).await.is_err());
    assert_ne!(story.pod.vm().memory_limits(), 0);
    // Nothing else is under way: the minute that the VM has passes at once.
    tokio::time::pause();
    tokio::time::sleep(Duration::from_secs(62)).await;
    tokio::time::resume();
    assert_eq!(story.pod.vm().memory_limits(), 0);
    story.pod.stop().await;
}

#[tokio::test]
async fn an_update_that_fails_takes_back_no_later_one() {
    let story = Story::begin(&["sleep"]).await;
    story.create().await;
    let _control = UnixListener::bind(story.guest.state.join("control.sock")).unwrap();
    let update = |limit: u64| {
        let mut request = api::UpdateTaskRequest::new();
        request.id = "demo".into();
        let resources = json!({"memory": {"limit": limit}}).to_string();
        request.resources.mut_or_insert_default().value = resources.into_bytes();
        let (pod, container) = (story.pod.clone(), story.own());
        tokio::spawn(async move { container.update(pod.vm(), request).await })
    };
    // The VM does not get the memory for the first one; the second one needs none.
    let large = update(772 << 20);
    tokio::time::sleep(IMPATIENT).await;
    let small = update(64 << 20);
    tokio::time::sleep(IMPATIENT).await;
    tokio::time::pause();
    tokio::time::sleep(Duration::from_secs(62)).await;
    tokio::time::resume();
    assert!(large.await.unwrap().is_err());
    timeout(WAIT, small).await.unwrap().unwrap().unwrap();
    assert_eq!(story.pod.vm().memory_limits(), 64 << 20);
    story.pod.stop().await;
}

#[tokio::test]
async fn two_deletes_at_once_run_the_hooks_once() {
    let story = Story::begin(&["exit", "3"]).await;
    let ran = story.dir.path().join("ran");
    story.hooks(&[("poststop", &format!("echo ran >> {}; exec sleep 0.2", ran.display()))]);
    story.create().await;
    story.own().start().await.unwrap();
    timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap();
    let (one, two) =
        timeout(WAIT, async { tokio::join!(story.pod.delete("demo"), story.pod.delete("demo")) })
            .await
            .unwrap();
    assert_eq!(one.unwrap().exit.status, 3);
    assert!(matches!(two, Err(TaskError::Refused(Refusal::NotFound))));
    assert_eq!(fs::read_to_string(ran).unwrap(), "ran\n");
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_hook_whose_program_is_on_storage_that_hangs_does_not_keep_delete() {
    let story = Story::begin(&["sleep"]).await;
    let hung = story.dir.path().join("hung");
    let requests = mount_hung(&hung);
    let path = story.dir.path().join("demo/config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    spec["hooks"]["createRuntime"] = json!([{"path": hung.join("data/hook")}]);
    fs::write(&path, spec.to_string()).unwrap();
    let creating = story.begin_to_create().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!creating.is_finished());
    let deleted = timeout(WAIT, story.pod.delete("demo")).await.unwrap();
    assert!(matches!(deleted, Err(TaskError::Refused(Refusal::NotFound))));
    assert!(matches!(creating.await.unwrap(), Err(TaskError::Cancelled)));
    drop(requests);
    nix::mount::umount2(&hung, nix::mount::MntFlags::MNT_DETACH).unwrap();
    story.end(&[]).await;
}
