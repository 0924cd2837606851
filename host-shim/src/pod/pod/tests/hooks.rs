//! The host's hooks.

use super::*;

impl Story {
    /// Gives the container one hook of each of these kinds, which notes its kind and then runs the script.
    pub(super) fn hooks(&self, hooks: &[(&str, &str)]) {
        self.change_spec(|spec| {
            for (kind, script) in hooks {
                let script = format!("echo {kind} >> noted; {script}");
                spec["hooks"][kind] = json!([{"path": "/bin/sh", "args": ["sh", "-c", script]}]);
            }
        });
    }

    /// The kinds in the order in which they were run.
    fn noted(&self) -> String {
        fs::read_to_string(self.dir.path().join("demo/noted")).unwrap()
    }
}

#[tokio::test]
async fn hooks_are_run_along_the_life() {
    let story = Story::begin(&["sh", "-c", "exit 7"]).await;
    story.hooks(&[("prestart", ""), ("createRuntime", ""), ("poststart", ""), ("poststop", "")]);
    story.create().await;
    assert_eq!(story.noted(), "prestart\ncreateRuntime\n");
    story.own().start().await.unwrap();
    assert_eq!(story.noted(), "prestart\ncreateRuntime\npoststart\n");
    timeout(WAIT, story.pod.wait("demo")).await.unwrap().unwrap();
    story.pod.delete("demo").await.unwrap();
    assert_eq!(story.noted(), "prestart\ncreateRuntime\npoststart\npoststop\n");
    story.end(&WHOLE_LIFE).await;
}

#[tokio::test]
async fn a_hook_that_fails_before_the_start_undoes_the_creation() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.hooks(&[("createRuntime", "echo why >&2; exit 3"), ("poststop", "")]);
    let error =
        timeout(WAIT, story.pod.create(CreateRequest::Task(story.request()))).await.unwrap().unwrap_err();
    assert_eq!(chain(&error), "hooks.createRuntime[0] (/bin/sh) failed (exit status 3): why");
    assert!(!story.guest.has_had_containers(), "the container was made");
    assert_eq!(story.noted(), "createRuntime\npoststop\n");
    story.end(&[]).await;
}

#[tokio::test]
async fn a_hook_that_fails_after_the_start_ends_the_process() {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.hooks(&[("poststart", "exit 3")]);
    story.create().await;
    let error = timeout(WAIT, story.own().start()).await.unwrap().unwrap_err();
    assert_eq!(chain(&error), "hooks.poststart[0] (/bin/sh) failed (exit status 3): it does not say why");
    assert_eq!(story.status(), Status::Stopped);
    assert_eq!(story.wait_demo().await, 137);
    story.pod.delete("demo").await.unwrap();
    // The program did run.
    story.end(&WHOLE_LIFE).await;
}

/// Ends the shim while a hook of this kind hangs.
async fn stop_during(kind: &str, topics: &[&str]) {
    let story = Story::begin(&["sleep", "1000"]).await;
    story.hooks(&[(kind, "exec sleep 1000")]);
    let (pod, request) = (story.pod.clone(), story.request());
    let life = tokio::spawn(async move {
        pod.create(CreateRequest::Task(request)).await?;
        pod.container("demo")?.start().await
    });
    let noted = story.dir.path().join("demo/noted");
    let waiting = async {
        while !noted.exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(WAIT, waiting).await.unwrap();
    timeout(WAIT, story.pod.stop()).await.unwrap();
    assert!(matches!(life.await.unwrap(), Err(TaskError::Cancelled)));
    story.end(topics).await;
}

#[tokio::test]
async fn a_hook_that_hangs_before_the_start_does_not_keep_the_shim() {
    stop_during("createRuntime", &[]).await;
}

#[tokio::test]
async fn a_hook_that_hangs_after_the_start_does_not_keep_the_shim() {
    stop_during("poststart", &WHOLE_LIFE).await;
}
