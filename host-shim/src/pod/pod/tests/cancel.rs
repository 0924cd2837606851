//! Whatever hangs, a container can be killed and deleted.

use std::{fs::File, os::fd::AsRawFd, path::PathBuf};

use containerd_shim_protos::shim_async::Task;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tokio::{sync::watch, task::JoinHandle};
use ttrpc::r#async::TtrpcContext;

use super::*;
use crate::service::task::TaskService;

/// How long a client waits that gives up soon.
const IMPATIENT: Duration = Duration::from_millis(50);

/// A file system that answers nothing until it is released.
pub(super) struct Hung {
    place: PathBuf,
    /// Closed: its requests fail.
    _requests: File,
}

impl Hung {
    pub(super) fn release(self) {
        let Self { place, _requests } = self;
        drop(_requests);
        // A process that was forked meanwhile and hangs in its execve has the descriptor still. MNT_FORCE ends its
        // request.
        umount2(&place, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH).unwrap();
    }

    /// A file in it. The root of a file system is looked at when it is mounted, anything in it later.
    pub(super) fn file(&self) -> PathBuf {
        self.place.join("data")
    }
}

impl Story {
    pub(super) fn mount_hung(&self) -> Hung {
        let place = self.dir.path().join("hung");
        fs::create_dir(&place).unwrap();
        let requests = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", requests.as_raw_fd());
        mount(Some("hung"), &place, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
        Hung { place, _requests: requests }
    }

    /// Gives the container a volume that hangs.
    fn bind_hung(&self) -> Hung {
        let hung = self.mount_hung();
        let volume =
            json!({"destination": "/v", "type": "bind", "source": hung.file(), "options": ["rbind"]});
        self.change_spec(|spec| spec["mounts"].as_array_mut().unwrap().push(volume));
        hung
    }

    async fn run_to_its_end(&self) {
        self.create_and_start().await;
        self.wait_demo().await;
    }

    async fn delete_demo(&self) -> Deleted {
        timeout(WAIT, self.pod.delete("demo")).await.unwrap().unwrap()
    }

    /// Delete gives up the creation that is under way.
    async fn delete_what_is_created(&self, creating: JoinHandle<Result<Arc<Container>, TaskError>>) {
        let deleted = timeout(WAIT, self.pod.delete("demo")).await.unwrap();
        assert!(matches!(deleted, Err(TaskError::Refused(Refusal::NotFound))));
        assert!(matches!(creating.await.unwrap(), Err(TaskError::Cancelled)));
    }

    /// Asks for a memory limit that may be more than the VM has.
    fn update_request(&self, limit: u64) -> api::UpdateTaskRequest {
        let mut request = api::UpdateTaskRequest::new();
        request.id = "demo".into();
        let resources = json!({"memory": {"limit": limit}}).to_string();
        request.resources.mut_or_insert_default().value = resources.into_bytes();
        request
    }

    async fn begin_to_create(&self) -> JoinHandle<Result<Arc<Container>, TaskError>> {
        let (pod, request) = (self.pod.clone(), self.request());
        let creating = tokio::spawn(async move { pod.create(CreateRequest::Task(request)).await });
        while !matches!(self.pod.container("demo"), Err(Refusal::Creating)) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        creating
    }
}

#[tokio::test]
async fn a_container_whose_volume_hangs_is_deleted() {
    let story = Story::without_guest(&["sleep", "1000"]).await;
    let hung = story.bind_hung();
    let creating = story.begin_to_create().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!creating.is_finished());
    story.delete_what_is_created(creating).await;
    assert!(story.pod.is_idle() && !story.dir.path().join("run").exists());
    // The thread goes on, and leaves nothing either.
    hung.release();
    tokio::time::sleep(Duration::from_millis(100)).await;
    story.end(&[]).await;
}

#[tokio::test]
async fn many_volumes_that_hang_do_not_keep_the_others() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let hung = story.mount_hung();
    for _ in 0..8 {
        let path = hung.file();
        let hangs = crate::host::blocking::run(move || fs::metadata(path).is_ok(), drop);
        assert!(timeout(Duration::from_millis(1), hangs).await.is_err());
    }
    story.create().await;
    story.delete_demo().await;
    hung.release();
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn a_start_that_hangs_in_a_hook_is_given_up_when_the_process_is_killed_and_deleted() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.hooks(&[("poststart", "exec sleep 1000")]);
    story.create().await;
    let container = story.own();
    let starting = tokio::spawn(async move { container.start().await });
    while story.status() != Status::Running {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(story.pod.delete("demo").await.is_err(), "it runs");
    timeout(WAIT, story.own().kill(9, false)).await.unwrap().unwrap();
    story.wait_demo().await;
    story.delete_demo().await;
    assert!(starting.await.unwrap().is_err());
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_poststop_hook_that_hangs_does_not_keep_delete() {
    let story = Story::begin(&["sh", "-c", "exit 3"]).await;
    story.hooks(&[("poststop", "exec sleep 1000")]);
    story.run_to_its_end().await;
    assert_eq!(story.delete_demo().await.exit.status, 3);
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_second_create_that_waits_while_the_first_fails_is_carried_out() {
    let story = Story::without_guest(&["sleep", "1000"]).await;
    let hung = story.bind_hung();
    let first = story.begin_to_create().await;
    let (pod, request) = (story.pod.clone(), story.request());
    let second = tokio::spawn(async move { pod.create(CreateRequest::Task(request)).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    // The container is wanted without the volume, and the first request is given up.
    story.change_spec(|spec| drop(spec["mounts"].as_array_mut().unwrap().pop()));
    story.guest.write_vmm(&story.dir.path().join("vmm"));
    hung.release();
    assert!(first.await.unwrap().is_err());
    let made = timeout(WAIT, second).await.unwrap().unwrap().unwrap();
    assert_eq!(story.own().pid(), made.pid());
    story.delete_demo().await;
    story.end(&["/tasks/create", "/tasks/exit", "/tasks/delete"]).await;
}

#[tokio::test]
async fn an_exit_is_reported_while_nobody_reads_the_output() {
    // More than the FIFO holds, and less than the pipe, the connection and the FIFO hold together.
    const WRITTEN: usize = 200_000;
    let story = Story::begin(&["sh", "-c", &format!("head -c {WRITTEN} /dev/zero; exit 7")]).await;
    let fifo = story.dir.path().join("stdout");
    mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
    let mut request = story.request();
    request.stdout = fifo.display().to_string();
    let mut client = pipe::OpenOptions::new().open_receiver(&fifo).unwrap();
    story.pod.create(CreateRequest::Task(request)).await.unwrap();
    story.own().start().await.unwrap();
    let exit = timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap();
    assert_eq!((exit.status, story.status()), (7, Status::Stopped));
    story.events.flush(WAIT).await;
    assert_eq!(story.heard.topics().last().map(String::as_str), Some("/tasks/exit"));
    timeout(DRAINED, story.pod.delete("demo")).await.unwrap().unwrap();
    let mut read = Vec::new();
    timeout(WAIT, client.read_to_end(&mut read)).await.unwrap().unwrap();
    assert!(read.len() < WRITTEN, "all output was written before the exit");
    story.end(&WHOLE_LIFE).await;
}

/// Delete gives the reader 10 s.
const DRAINED: Duration = Duration::from_secs(15);

#[tokio::test]
async fn a_delete_that_cannot_clean_up_can_be_repeated() {
    let story = Story::begin(&["sh", "-c", "exit 4"]).await;
    story.run_to_its_end().await;
    let theirs = story.guest.state.join("theirs");
    fs::write(&theirs, "").unwrap();
    let error = timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap_err();
    assert!(chain(&error).contains("cannot undo the directory"), "{}", chain(&error));
    assert!(!story.guest.state.join("share").exists(), "the rest is undone");
    fs::remove_file(theirs).unwrap();
    assert_eq!(story.delete_demo().await.exit.status, 4);
    let late = story.pod.delete("demo").await;
    assert!(matches!(late, Err(TaskError::Refused(Refusal::NotFound))));
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_creation_that_cannot_be_undone_is_undone_by_delete() {
    let story = Story::without_guest(&["sleep", "1000"]).await;
    let theirs = story.guest.state.join("theirs");
    fs::write(
        story.dir.path().join("vmm"),
        format!("#!/bin/sh\ntouch {}\necho 'no KVM' >&2\nexit 1\n", theirs.display()),
    )
    .unwrap();
    let error =
        timeout(WAIT, story.pod.create(CreateRequest::Task(story.request()))).await.unwrap().unwrap_err();
    assert_eq!(chain(&error), "the VM ended: no KVM");
    assert!(theirs.exists(), "something is left");
    fs::remove_file(theirs).unwrap();
    let deleted = timeout(WAIT, story.pod.delete("demo")).await.unwrap();
    assert!(matches!(deleted, Err(TaskError::Refused(Refusal::NotFound))));
    story.end(&[]).await;
}

#[tokio::test]
async fn the_shim_ends_although_nobody_waits_for_the_answer_to_shutdown() {
    let story = Story::without_guest(&["sleep", "1000"]).await;
    let hung = story.bind_hung();
    let creating = story.begin_to_create().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (done, mut is_done) = watch::channel(false);
    let service = TaskService::new(story.pod.clone(), done);
    // The host's step is given 2 s, and containerd waits for 3 s at most.
    let context = TtrpcContext::default();
    assert!(timeout(IMPATIENT, service.shutdown(&context, Default::default())).await.is_err());
    timeout(WAIT, is_done.wait_for(|done| *done)).await.unwrap().unwrap();
    assert!(creating.await.unwrap().is_err());
    hung.release();
    story.end(&[]).await;
}

#[tokio::test]
async fn a_guest_that_hangs_is_killed_although_nobody_waits_for_the_answer_to_kill() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.create_and_start().await;
    story.guest.follow("lose demo");
    let service = TaskService::new(story.pod.clone(), watch::channel(false).0);
    let request = api::KillRequest { id: "demo".into(), signal: 9, ..Default::default() };
    assert!(timeout(IMPATIENT, service.kill(&TtrpcContext::default(), request)).await.is_err());
    assert_eq!(story.wait_demo().await, 137);
    story.delete_demo().await;
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn the_end_of_a_guest_goes_on_without_who_began_it_and_all_wait_for_it() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let guest = story.create_and_start().await.guest.clone();
    let first = timeout(Duration::from_millis(1), story.pod.vm().power_off()).await;
    assert!(first.is_err(), "the guest has ended before anybody could give up waiting");
    timeout(WAIT, story.pod.vm().power_off()).await.unwrap();
    assert!(guest.vm.has_exited());
    assert!(story.pod.vm().has_ended_in_order().await);
    story.delete_demo().await;
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_guest_that_is_slow_or_gone_has_codes_of_its_own() {
    let story = Story::begin(&["sleep", "1000"]).await;
    let container = story.create_and_start().await;
    let service = TaskService::new(story.pod.clone(), watch::channel(false).0);
    let stats = async || {
        let request = api::StatsRequest { id: "demo".into(), ..Default::default() };
        timeout(WAIT, service.stats(&TtrpcContext::default(), request)).await.unwrap()
    };
    let code = |error: ttrpc::Error| match error {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("{other}"),
    };
    stats().await.unwrap();
    story.guest.stop();
    assert_eq!(code(stats().await.unwrap_err()), ttrpc::Code::DEADLINE_EXCEEDED);
    assert_eq!(code(stats().await.unwrap_err()), ttrpc::Code::DEADLINE_EXCEEDED);
    story.guest.go_on();
    timeout(WAIT, container.guest.agent.wait_for_answer()).await.unwrap().unwrap();
    stats().await.unwrap();
    container.execs.add(exec("one", &["true"])).unwrap();
    story.guest.stop();
    let request = api::StartRequest { id: "demo".into(), exec_id: "one".into(), ..Default::default() };
    let end = async {
        tokio::time::sleep(IMPATIENT).await;
        story.guest.vmm().kill(WAIT).unwrap();
    };
    let context = TtrpcContext::default();
    let (started, ()) =
        timeout(WAIT, async { tokio::join!(service.start(&context, request), end) }).await.unwrap();
    assert_eq!(code(started.unwrap_err()), ttrpc::Code::UNAVAILABLE);
    assert_eq!(story.wait_demo().await, 137);
    story.delete_demo().await;
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exit", "/tasks/delete"];
    story.end(&topics).await;
}

#[tokio::test]
async fn an_update_that_fails_when_nobody_waits_for_its_answer_is_forgotten() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.create().await;
    let _control = UnixListener::bind(story.guest.state.join("control.sock")).unwrap();
    let service = TaskService::new(story.pod.clone(), watch::channel(false).0);
    let request = story.update_request(772 << 20);
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
    let story = Story::begin(&["sleep", "1000"]).await;
    story.create().await;
    story.guest.follow("accept-limits");
    let _control = UnixListener::bind(story.guest.state.join("control.sock")).unwrap();
    let update = |limit: u64| {
        let (pod, container, request) = (story.pod.clone(), story.own(), story.update_request(limit));
        tokio::spawn(async move { container.update(pod.vm(), request).await })
    };
    // The VM does not get the memory for the first one; the second one needs none.
    let large = update(772 << 20);
    tokio::time::sleep(IMPATIENT).await;
    let small = update(64 << 20);
    tokio::time::sleep(IMPATIENT).await;
    tokio::time::pause();
    // In steps that are shorter than the agent may take for the second one.
    while !large.is_finished() {
        tokio::time::advance(Duration::from_millis(500)).await;
    }
    tokio::time::resume();
    assert!(large.await.unwrap().is_err());
    timeout(WAIT, small).await.unwrap().unwrap().unwrap();
    assert_eq!(story.pod.vm().memory_limits(), 64 << 20);
    story.pod.stop().await;
}

#[tokio::test]
async fn two_deletes_at_once_run_the_hooks_once() {
    let story = Story::begin(&["sh", "-c", "exit 3"]).await;
    let ran = story.dir.path().join("ran");
    story.hooks(&[("poststop", &format!("echo ran >> {}; exec sleep 0.2", ran.display()))]);
    story.run_to_its_end().await;
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
    let story = Story::begin(&["sleep", "1000"]).await;
    let hung = story.mount_hung();
    let hook = hung.file().join("hook");
    story.change_spec(|spec| spec["hooks"]["createRuntime"] = json!([{"path": hook}]));
    let creating = story.begin_to_create().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!creating.is_finished());
    story.delete_what_is_created(creating).await;
    hung.release();
    story.end(&[]).await;
}
