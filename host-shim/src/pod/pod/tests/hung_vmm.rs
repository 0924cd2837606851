//! A VMM that is killed and does not end, because a thread of it hangs in the host's kernel.

use super::*;
use crate::{host::state_dir, vm::vmm::VmExit};

#[tokio::test]
async fn all_containers_end_and_what_the_vmm_keeps_is_left_for_later() {
    let story = Story::pod().await;
    story.run("one", &["sleep", "1000"]).await;
    let (hung, vm) = (story.guest.hang(), story.own().guest.vm.clone());
    timeout(WAIT, story.pod.vm().kill()).await.unwrap();
    let vmm = story.guest.vmm();
    let exit = timeout(WAIT, vm.exited()).await.unwrap();
    assert!(matches!(exit, VmExit::Hangs { pid } if pid == vmm.pid));
    assert_eq!((story.wait("one").await, story.wait("demo").await), (137, 137));
    assert_eq!((story.delete("one").await, story.delete("demo").await), (137, 137));
    assert!(vmm.may_live());
    // Nothing but the process, its cgroup and the journal is left.
    let state = &story.guest.state;
    let left: Vec<_> = fs::read_dir(state).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["journal"]);
    assert!(timeout(WAIT, story.pod.create(CreateRequest::Task(story.request()))).await.unwrap().is_err());

    hung.go_on();
    timeout(WAIT, async {
        while vmm.may_live() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await
    .unwrap();
    state_dir::clean(state).unwrap().complete().unwrap();
    let life = ["/tasks/create", "/tasks/start"];
    let end = ["/tasks/exit", "/tasks/exit", "/tasks/delete", "/tasks/delete"];
    story.end(&[life, life].concat().into_iter().chain(end).collect::<Vec<_>>()).await;
}
