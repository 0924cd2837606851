//! What goes on after its request was given up.

use std::sync::mpsc;

use tokio::task::JoinHandle;

use super::{cancel::Hung, members::be_member, *};
use crate::guest::agent::AgentError;

/// How long a thread may take to end when nothing holds it up any more.
const AT_ONCE: Duration = Duration::from_secs(2);

impl Story {
    /// Begins to create a container of the pod with a volume that hangs.
    async fn begin_to_add(&self, id: &str, hung: &Hung) -> JoinHandle<Result<Arc<Container>, TaskError>> {
        make_bundle(self.dir.path(), id, &["sleep", "1000"], |spec| {
            be_member(spec);
            spec["mounts"] =
                json!([{"destination": "/v", "type": "bind", "source": hung.file(), "options": ["rbind"]}]);
        });
        let (pod, request) = (self.pod.clone(), self.request_of(id));
        let creating = tokio::spawn(async move { pod.create(CreateRequest::Task(request)).await });
        // It is in the thread by then.
        while !self.has_journal(id) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!creating.is_finished());
        creating
    }

    fn has_journal(&self, id: &str) -> bool {
        self.guest.state.join("containers").join(id).exists()
    }

    async fn until_finished(&self, id: &str) {
        let finished = async {
            while self.pod.vm().pending.contains(id) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(AT_ONCE, finished).await.unwrap();
    }
}

#[tokio::test]
async fn a_creation_that_goes_on_late_undoes_no_other_container_of_its_id() {
    let story = Story::pod().await;
    let hung = story.mount_hung();
    let creating = story.begin_to_add("one", &hung).await;
    let deleted = timeout(WAIT, story.pod.delete("one")).await.unwrap();
    assert!(matches!(deleted, Err(TaskError::Refused(Refusal::NotFound))));
    assert!(matches!(creating.await.unwrap(), Err(TaskError::Cancelled)));
    let refused = story.add("one", &["sleep", "1000"]).await.unwrap_err();
    assert!(matches!(refused, TaskError::Unfinished), "{refused}");
    story.add("two", &["sleep", "1000"]).await.unwrap();
    hung.release();
    story.until_finished("one").await;
    story.add("one", &["sleep", "1000"]).await.unwrap();
    assert!(story.has_files("one") && story.has_files("two"));
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn an_undo_that_goes_on_late_keeps_its_id_from_being_used_again() {
    let story = Story::pod().await;
    let (go_on, waits) = mpsc::channel::<()>();
    let undo = move || {
        _ = waits.recv();
        Ok(())
    };
    let error = story.pod.vm().undo("one", undo).await.unwrap_err();
    assert!(matches!(error, TaskError::Timeout { .. }), "{error}");
    let refused = story.add("one", &["sleep", "1000"]).await.unwrap_err();
    assert!(matches!(refused, TaskError::Unfinished), "{refused}");
    drop(go_on);
    story.until_finished("one").await;
    story.add("one", &["sleep", "1000"]).await.unwrap();
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn a_delete_that_is_tried_again_while_its_undo_hangs_starts_no_second_one() {
    let story = Story::pod().await;
    story.run("one", &["sh", "-c", "exit 3"]).await;
    assert_eq!(story.wait("one").await, 3);
    let (go_on, waits) = mpsc::channel::<()>();
    let undo = move || {
        _ = waits.recv();
        Ok(())
    };
    assert!(story.pod.vm().undo("one", undo).await.is_err());
    for _ in 0..2 {
        let error = timeout(WAIT, story.pod.delete("one")).await.unwrap().unwrap_err();
        assert!(matches!(error, TaskError::Timeout { .. }), "{error}");
        assert!(story.has_files("one"), "a second undo has begun");
    }
    drop(go_on);
    assert_eq!(story.delete("one").await, 3);
    assert!(!story.has_files("one"));
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn who_else_cleans_up_the_pod_is_named_before_the_request_is_given_up() {
    let story = Story::begin(&["sh", "-c", "exit 3"]).await;
    story.create_and_start().await;
    story.wait_demo().await;
    // Another process that cleans up the pod holds this lock.
    let other = fs::File::open(&story.guest.state).unwrap();
    other.lock().unwrap();
    let error = timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap_err();
    assert!(chain(&error).contains("another process has been cleaning this up"), "{}", chain(&error));
    drop(other);
    assert_eq!(story.delete("demo").await, 3);
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_container_that_is_being_created_ends_with_its_pod() {
    let story = Story::pod().await;
    let hung = story.mount_hung();
    let creating = story.begin_to_add("one", &hung).await;
    story.own().kill(15, false).await.unwrap();
    let created = timeout(WAIT, creating).await.unwrap().unwrap();
    assert!(matches!(created, Err(TaskError::Cancelled)), "{created:?}");
    // Nobody would end it.
    assert_eq!(chain(&story.add_after_the_end().await), "pod demo does not run");
    hung.release();
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn a_container_that_the_guest_did_not_delete_is_deleted_later() {
    let story = Story::pod().await;
    story.run("one", &["sh", "-c", "exit 3"]).await;
    assert_eq!(story.wait("one").await, 3);
    story.guest.follow("lose one");
    let is_deleted = || story.guest.log().contains("bulkhead-agent: container one deleted");
    assert_eq!(story.delete("one").await, 3);
    assert!(!story.has_files("one") && !is_deleted());
    story.guest.follow("");
    let deleted = async {
        while !is_deleted() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(WAIT, deleted).await.unwrap();
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

impl Story {
    /// Sets a limit that each kernel has for a cgroup.
    async fn limit(&self, file: &str, value: &str) -> Result<(), TaskError> {
        timeout(WAIT, self.limit_at_last(file, value)).await.unwrap()
    }

    async fn limit_at_last(&self, file: &str, value: &str) -> Result<(), TaskError> {
        let mut request = api::UpdateTaskRequest::new();
        request.id = "demo".into();
        request.resources.mut_or_insert_default().value =
            json!({"unified": {file: value}}).to_string().into_bytes();
        self.own().update(self.pod.vm(), request).await
    }
}

fn is_late(updated: Result<(), TaskError>) -> bool {
    matches!(updated, Err(TaskError::Agent(AgentError::Timeout { .. }) | TaskError::Timeout { .. }))
}

#[tokio::test]
async fn an_update_that_the_guest_makes_late_is_undone() {
    const DEPTH: &str = "cgroup.max.depth";
    const DESCENDANTS: &str = "cgroup.max.descendants";
    let story = Story::begin(&["sleep", "1000"]).await;
    story.create().await;
    story.limit(DEPTH, "5").await.unwrap();
    story.guest.stop();
    assert!(is_late(story.limit(DEPTH, "7").await));
    // Not even begun before it is known what became of the first one. The time that it waits passes at once.
    tokio::time::pause();
    assert!(is_late(story.limit_at_last(DEPTH, "8").await));
    tokio::time::resume();
    story.guest.go_on();
    story.limit(DESCENDANTS, "9").await.unwrap();
    let limit = |file| story.guest.cgroup_file("demo", file);
    assert_eq!([limit(DEPTH), limit(DESCENDANTS)], ["5", "9"]);
    // Nor does it take another update to undo one.
    story.guest.stop();
    assert!(is_late(story.limit(DEPTH, "7").await));
    story.guest.go_on();
    let undone = async {
        while limit(DEPTH) != "5" || story.own().updates.try_lock().is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(WAIT, undone).await.unwrap();
    assert_eq!(limit(DESCENDANTS), "9");
    story.pod.delete("demo").await.unwrap();
}
