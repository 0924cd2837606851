//! What cannot work is refused with the field's codes and a clear word, and leaves the pod as it was.

use anyhow::{Result, ensure};
use tonic::Code;

use super::super::Case;
use crate::cri::messages::*;
use crate::ctr::{Host, Runtime};
use crate::pods::Pod;

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("unknown_ids", unknown_ids),
    Case::both("a_pod_is_stopped_and_removed_twice", removed_twice),
    Case::both("a_container_is_started_twice", started_twice),
    Case::both("a_command_that_the_image_lacks", command_missing),
    Case::both("a_working_directory_that_is_a_file", working_directory_is_a_file),
    Case::both("an_exec_in_a_container_that_has_ended", exec_in_ended),
    Case::both("a_container_in_a_pod_that_is_stopped", container_in_stopped),
    Case::both("a_sysctl_that_does_not_exist", sysctl_unknown),
    Case::both("a_mount_over_a_file_of_the_kernel", mount_over_proc),
    Case::bulkhead("the_hosts_network_is_refused", host_network),
];

/// Expects that the message has all these words.
fn says(message: &str, words: &[&str]) -> Result<()> {
    for word in words {
        let has = message.to_lowercase().contains(&word.to_lowercase());
        ensure!(has, "expected  a message with {word:?}\ncame      {message:?}");
    }
    Ok(())
}

/// Expects that a container changed so cannot be started, for a reason with these words, and that its pod still works.
fn start_is_refused(
    host: &Host,
    change: impl FnOnce(&mut ContainerConfig),
    command: &[&str],
    code: Code,
    words: &[&str],
) -> Result<()> {
    let pods = host.pods()?;
    pods.leave_nothing(host, || {
        let pod = Pod::start(host)?;
        let container = pod.container().config(change).create(command)?;
        let start = StartContainerRequest::from(container.id());
        says(&pods.client().refused(start, code)?, words)?;
        let status = container.status()?;
        ensure!(
            status.state() == ContainerState::Exited
                && status.exit_code == 128
                && status.reason == "StartError",
            "expected  an exited container with StartError and 128\ncame      {status:?}"
        );
        container.remove()?;
        pod.container().run(&["true"])?.succeeds()?;
        pod.remove()
    })
}

fn unknown_ids(host: &Host) -> Result<()> {
    let client = host.pods()?.client();
    client.refused(PodSandboxStatusRequest::from("nobody"), Code::NotFound)?;
    client.refused(ContainerStatusRequest::from("nobody"), Code::NotFound)?;
    client.refused(StartContainerRequest::from("nobody"), Code::NotFound)?;
    let exec =
        ExecSyncRequest { container_id: "nobody".to_owned(), cmd: vec!["true".to_owned()], timeout: 0 };
    client.refused(exec, Code::NotFound)?;
    // What is to be gone and is not there is gone.
    client.call(RemovePodSandboxRequest::from("nobody"))?;
    client.call(RemoveContainerRequest::from("nobody"))?;
    Ok(())
}

fn removed_twice(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().start(&["sleep", "1000"])?;
    let id = container.id().to_owned();
    let client = host.pods()?.client();
    for _ in 0..2 {
        client.call(StopContainerRequest { container_id: id.clone(), timeout: 0 })?;
    }
    for _ in 0..2 {
        client.call(RemoveContainerRequest::from(id.as_str()))?;
    }
    for _ in 0..2 {
        client.call(StopPodSandboxRequest::from(pod.id()))?;
    }
    for _ in 0..2 {
        client.call(RemovePodSandboxRequest::from(pod.id()))?;
    }
    Ok(())
}

fn started_twice(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().start(&["sleep", "1000"])?;
    let again = StartContainerRequest::from(container.id());
    says(&host.pods()?.client().refused(again, Code::Unknown)?, &["RUNNING"])?;
    container.is(ContainerState::Running)?;
    container.stop(0)?;
    let again = StartContainerRequest::from(container.id());
    says(&host.pods()?.client().refused(again, Code::Unknown)?, &["EXITED"])
}

fn command_missing(host: &Host) -> Result<()> {
    let words = ["exec: \"no-such-command\": executable file not found in $PATH"];
    start_is_refused(host, |_| {}, &["no-such-command"], Code::Unknown, &words)
}

fn working_directory_is_a_file(host: &Host) -> Result<()> {
    let words = ["/etc/passwd", "not a directory"];
    start_is_refused(
        host,
        |config| config.working_dir = "/etc/passwd".to_owned(),
        &["true"],
        Code::Unknown,
        &words,
    )
}

fn exec_in_ended(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().start(&["true"])?;
    container.wait()?;
    let request = container.exec_request(&["true"], 0);
    says(&host.pods()?.client().refused(request, Code::Unknown)?, &["EXITED"])
}

fn container_in_stopped(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().create(&["true"])?;
    pod.stop()?;
    let start = StartContainerRequest::from(container.id());
    says(&host.pods()?.client().refused(start, Code::Unknown)?, &["sandbox", "not running"])
}

pub(super) fn sysctl_unknown(host: &Host) -> Result<()> {
    host.pods()?.leave_nothing(host, || {
        let message = Pod::plan(host).sysctl("net.no.such.sysctl", "1").refused(Code::Unknown)?;
        says(&message, &["no/such/sysctl", "no such file or directory"])
    })
}

fn mount_over_proc(host: &Host) -> Result<()> {
    let (host_path, container_path) = ("/etc/hostname".to_owned(), "/proc/version".to_owned());
    let mount = Mount { container_path, host_path, readonly: false };
    // What runc says of a spec comes without a code.
    let code = match host.runtime() {
        Runtime::Runc => Code::Unknown,
        Runtime::Bulkhead => Code::InvalidArgument,
    };
    start_is_refused(host, |config| config.mounts.push(mount), &["true"], code, &["inside /proc"])
}

fn host_network(host: &Host) -> Result<()> {
    host.pods()?.leave_nothing(host, || {
        let message = Pod::plan(host).host_network().refused(Code::Unimplemented)?;
        says(&message, &["network", "host"])
    })
}
