//! The life of pods and their containers: each has its states, and only pause ends a pod.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::super::Case;
use super::super::templates::state_dir;
use super::super::upgrade::placeholder_processes;
use crate::command::wait_until;
use crate::cri::{self, messages::*};
use crate::ctr::{Host, SETTLES};
use crate::fixtures::{at_once, scratch};
use crate::pods::{Container, Pod};
use crate::snapshot::the_process_of;
use crate::stuck::Frozen;

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("a_pod_is_ready_then_not_ready_then_gone", pod_states),
    Case::both("a_container_is_created_runs_exits_and_is_removed", container_states),
    Case::both("exit_codes_are_the_commands", exit_codes),
    Case::both("an_exit_of_a_container_does_not_end_its_pod", exit_leaves_pod),
    Case::both("an_init_container_ends_before_the_next_begins", init_container),
    Case::both("a_container_is_replaced_in_a_living_pod", replaced),
    Case::both("a_container_that_handles_the_stop_signal_ends_by_itself", stopped_by_itself),
    Case::both("a_container_that_ignores_the_stop_signal_is_killed", stopped_by_force),
    Case::both("a_container_of_a_pod_can_be_stopped_while_another_goes_on", one_of_two_stopped),
    Case::both("a_running_container_is_removed_by_force", removed_by_force),
    Case::both("a_container_that_was_never_started_is_removed", removed_unstarted),
    Case::both("the_stop_of_a_pod_kills_its_containers", stop_kills),
    Case::both("a_pod_with_all_kinds_of_containers_leaves_nothing", leaves_nothing),
    Case::both("the_pod_ends_when_pause_ends", pause_killed),
    Case::both("pods_and_containers_are_listed", lists),
    Case::both("three_pods_at_once_live_in_separate_worlds", three_at_once),
    Case::both("a_pod_outlives_containerd", outlives_containerd),
    Case::both("an_exit_while_containerd_is_down_is_reported_when_it_is_back", exit_unseen),
    // Case lifecycle/programs_may_end_by_themselves_when_the_host_shuts_down shows what runc does.
    Case::bulkhead("programs_of_a_pod_may_end_by_themselves_when_the_host_shuts_down", host_shuts_down),
    Case::bulkhead("a_container_that_starts_while_containerd_is_restarted_is_not_left_behind", start_unseen),
];

/// Runs until it is told to stop, and then ends with 3.
const HANDLES_STOP: &str = "trap 'echo stopped; exit 3' TERM; echo ready; while :; do sleep 0.1; done";

fn expect_pod(pod: &Pod<'_>, expected: PodSandboxState) -> Result<()> {
    let came = pod.status()?.state();
    ensure!(came == expected, "expected  the pod to be {expected:?}\ncame      {came:?}");
    Ok(())
}

pub(super) fn pod_states(host: &Host) -> Result<()> {
    host.pods()?.leave_nothing(host, || {
        let pod = Pod::start(host)?;
        expect_pod(&pod, PodSandboxState::Ready)?;
        let handler = pod.status()?.runtime_handler;
        let expected = host.pods()?.handler(host.runtime());
        ensure!(handler == expected, "expected  the handler {expected}\ncame      {handler}");
        pod.stop()?;
        expect_pod(&pod, PodSandboxState::NotReady)?;
        // Kubelet asks more than once.
        pod.stop()?;
        let id = pod.id().to_owned();
        pod.remove()?;
        let client = host.pods()?.client();
        client.refused(PodSandboxStatusRequest::from(id.as_str()), tonic::Code::NotFound)?;
        Ok(())
    })
}

pub(super) fn container_states(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    // containerd writes down the start only when the runtime has answered, and could be overtaken by the end.
    let container = pod.container().create(&["sh", "-c", "echo out; echo err >&2; sleep 1; exit 3"])?;
    container.is(ContainerState::Created)?;
    container.start()?;
    container.finish()?.exits(3)?.prints("out\n")?.complains("err\n")?;
    let status = container.status()?;
    ensure!(status.reason == "Error", "expected  the reason Error\ncame      {}", status.reason);
    let times = [status.created_at, status.started_at, status.finished_at];
    ensure!(
        times.first() > Some(&0) && times.is_sorted(),
        "expected  creation, start and end in that order\ncame      {times:?}"
    );
    let id = container.id().to_owned();
    container.remove()?;
    let client = host.pods()?.client();
    client.refused(ContainerStatusRequest::from(id.as_str()), tonic::Code::NotFound)?;
    Ok(())
}

fn exit_codes(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().start(&["true"])?;
    let status = container.wait()?;
    ensure!(
        status.exit_code == 0 && status.reason == "Completed",
        "expected  Completed with 0\ncame      {} with {}",
        status.reason,
        status.exit_code
    );
    pod.container().sh("exit 255")?.exits(255)?;
    pod.container().sh("kill -9 $$ & wait; sh -c 'kill -9 $$'; exit $?")?.exits(137)?;
    Ok(())
}

pub(super) fn exit_leaves_pod(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let stays = pod.container().start(&["sleep", "1000"])?;
    pod.container().run(&["false"])?.exits(1)?;
    expect_pod(&pod, PodSandboxState::Ready)?;
    stays.exec(&["echo", "alive"])?.succeeds()?.prints("alive\n")?;
    Ok(())
}

fn init_container(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let pod = Pod::start(host)?;
    let init =
        pod.container().mount(shared.path(), "/work").start(&["sh", "-c", "echo made > /work/file"])?;
    init.finish()?.succeeds()?;
    // Kubelet keeps the init container's record while the others run.
    let main = pod.container().mount(shared.path(), "/work").start(&["cat", "/work/file"])?;
    main.finish()?.succeeds()?.prints("made\n")?;
    init.is(ContainerState::Exited)
}

pub(super) fn replaced(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let neighbour = pod.container().start(&["sleep", "1000"])?;
    for attempt in 0..3 {
        // What an earlier attempt wrote is gone with it.
        let script = format!("test ! -e /mark && touch /mark && exit {attempt}");
        let again = pod.container().named("again", attempt);
        again.sh(&script)?.exits(attempt.try_into()?)?;
    }
    neighbour.is(ContainerState::Running)
}

fn stopped_by_itself(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().start(&["sh", "-c", HANDLES_STOP])?;
    container.wait_for("ready\n")?;
    container.stop(1000)?;
    container.finish()?.exits(3)?.prints("ready\nstopped\n")?;
    Ok(())
}

fn stopped_by_force(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let script = "trap 'echo ignored' TERM; echo ready; while :; do sleep 0.1; done";
    let container = pod.container().start(&["sh", "-c", script])?;
    container.wait_for("ready\n")?;
    // Long enough for the shell to hear of the signal.
    let grace = host.patience(Duration::from_secs(2)).as_secs() as i64;
    container.stop(grace)?;
    container.finish()?.exits(137)?.prints("ready\nignored\n")?;
    // A second stop finds nothing to do.
    container.stop(grace)
}

fn one_of_two_stopped(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let stays = pod.container().start(&["sleep", "1000"])?;
    let goes = pod.container().start(&["sleep", "1000"])?;
    goes.stop(0)?;
    goes.finish()?.exits(137)?;
    stays.is(ContainerState::Running)?;
    stays.exec(&["true"])?.succeeds()?;
    Ok(())
}

fn removed_by_force(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().start(&["sh", "-c", "sleep 1000 & sleep 1000"])?;
    container.remove()?;
    expect_names(containers_of(host, &pod)?, &[])?;
    expect_pod(&pod, PodSandboxState::Ready)
}

fn removed_unstarted(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    pod.container().create(&["true"])?.remove()?;
    expect_names(containers_of(host, &pod)?, &[])?;
    pod.container().run(&["true"])?.succeeds()?;
    Ok(())
}

pub(super) fn stop_kills(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let one = pod.container().start(&["sleep", "1000"])?;
    let two = pod.container().start(&["sh", "-c", "trap '' TERM; sleep 1000 & wait"])?;
    pod.stop()?;
    for container in [one, two] {
        let status = container.wait()?;
        ensure!(status.exit_code == 137, "expected  137 of a killed container\ncame      {status:?}");
    }
    expect_pod(&pod, PodSandboxState::NotReady)
}

pub(super) fn leaves_nothing(host: &Host) -> Result<()> {
    let shared = scratch()?;
    host.pods()?.leave_nothing(host, || {
        let pod = Pod::plan(host).share_processes().start()?;
        pod.container().create(&["true"])?;
        pod.container().start(&["false"])?.wait()?;
        let runs = pod.container().mount(shared.path(), "/shared").start(&["sleep", "1000"])?;
        runs.exec(&["touch", "/shared/file"])?.succeeds()?;
        pod.remove()
    })
}

fn pause_killed(host: &Host) -> Result<()> {
    host.pods()?.leave_nothing(host, || {
        let pod = Pod::start(host)?;
        let kill = host.pods()?.ctr().args(["tasks", "kill", "--signal", "SIGKILL", pod.id()]);
        kill.run()?.succeeds()?;
        becomes_not_ready(host, &pod)?;
        pod.remove()
    })
}

pub(super) fn becomes_not_ready(host: &Host, pod: &Pod<'_>) -> Result<()> {
    wait_until("the pod not to be ready", host.patience(super::SEEN), || {
        Ok(pod.status()?.state() == PodSandboxState::NotReady)
    })
}

fn containers_of(host: &Host, pod: &Pod<'_>) -> Result<Vec<String>> {
    let filter = ContainerFilter { pod_sandbox_id: pod.id().to_owned(), ..Default::default() };
    let list = host.pods()?.client().call(ListContainersRequest { filter: Some(filter) })?;
    Ok(list.containers.into_iter().map(|container| container.id).collect())
}

fn expect_names(mut came: Vec<String>, expected: &[&str]) -> Result<()> {
    let mut expected = expected.to_owned();
    came.sort();
    expected.sort();
    ensure!(came == expected, "expected  the list {expected:?}\ncame      {came:?}");
    Ok(())
}

pub(super) fn lists(host: &Host) -> Result<()> {
    let own = host.new_id();
    let one = Pod::plan(host).label("case", &own).start()?;
    let two = Pod::plan(host).label("case", &own).start()?;
    let created = one.container().create(&["true"])?;
    let running = one.container().start(&["sleep", "1000"])?;
    let filter = PodSandboxFilter { id: String::new(), label_selector: [("case".to_owned(), own)].into() };
    let list = host.pods()?.client().call(ListPodSandboxRequest { filter: Some(filter) })?;
    let ready = list.items.iter().all(|pod| pod.state() == PodSandboxState::Ready);
    ensure!(ready, "expected  two pods that are ready\ncame      {:?}", list.items);
    expect_names(list.items.into_iter().map(|pod| pod.id).collect(), &[one.id(), two.id()])?;
    expect_names(containers_of(host, &one)?, &[created.id(), running.id()])?;
    expect_names(containers_of(host, &two)?, &[])
}

pub(super) fn three_at_once(host: &Host) -> Result<()> {
    host.pods()?.leave_nothing(host, || {
        at_once(["one", "two", "three"], |name| {
            let pod = Pod::plan(host).hostname(name).start()?;
            let container = pod.container().start(&["sleep", "1000"])?;
            let seen =
                container.sh("hostname; echo $$ > /dev/shm/pid; ls /dev/shm; ps | grep -c '[s]leep 1000'")?;
            pod.remove()?;
            seen.succeeds()?.prints(&format!("{name}\npid\n1\n"))?;
            Ok(())
        })?;
        Ok(())
    })
}

pub(super) fn outlives_containerd(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    let pod = Pod::start(host)?;
    let script = "trap 'exit 8' TERM; echo before; while [ ! -e /go ]; do sleep 0.1; done; echo after; while :; do sleep 0.1; done";
    let container = pod.container().start(&["sh", "-c", script])?;
    container.wait_for("before\n")?;
    pods.while_containerd_is_down(|| Ok(()))?;
    expect_pod(&pod, PodSandboxState::Ready)?;
    container.is(ContainerState::Running)?;
    container.exec(&["touch", "/go"])?.succeeds()?;
    container.wait_for("after\n")?;
    container.stop(1000)?;
    container.finish()?.exits(8)?.prints("before\nafter\n")?;
    Ok(())
}

pub(super) fn exit_unseen(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    let shared = scratch()?;
    let pod = Pod::start(host)?;
    let start = |script: &str| -> Result<Container<'_>> {
        pod.container().mount(shared.path(), "/shared").start(&["sh", "-c", script])
    };
    let ends = start("while [ ! -e /shared/go ]; do sleep 0.1; done; touch /shared/gone; exit 9")?;
    let stays = start("sleep 1000")?;
    pods.while_containerd_is_down(|| {
        std::fs::write(shared.path().join("go"), "")?;
        let gone = shared.path().join("gone");
        wait_until("the container's last words", host.patience(super::SEEN), || Ok(gone.exists()))
    })?;
    // With no process left of it, containerd asks nobody for its status, and makes one up.
    ends.wait()?;
    stays.is(ContainerState::Running)
}

/// containerd does not find the container when it is back, and asks for its deletion. Its creation has not ended yet.
fn start_unseen(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    let pod = Pod::start(host)?;
    let container = pod.container().create(&["sleep", "1000"])?;
    let files = state_dir(cri::NAMESPACE, pod.id())?.join("share").join(container.id());
    let stands_still = Frozen::vm_of_pod(pod.id())?;
    thread::scope(|scope| {
        let start = scope.spawn(|| container.start());
        wait_until("the files of the container", host.patience(SETTLES), || Ok(files.exists()))?;
        pods.while_containerd_is_down(|| Ok(()))?;
        match start.join() {
            Ok(started) => ensure!(started.is_err(), "expected  no answer to the start\ncame      one"),
            Err(_) => bail!("the thread that starts the container panicked"),
        }
        Ok(())
    })?;
    drop(stands_still);
    wait_until("the end of the container that is unknown", host.patience(SETTLES), || Ok(!files.exists()))?;
    pod.container().run(&["true"])?.exits(0)?;
    Ok(())
}

/// systemd sends SIGTERM to all processes then, and has ended containerd before.
fn host_shuts_down(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let pod = Pod::start(host)?;
    let script = "trap 'sleep 1; echo ended >/shared/end; exit' TERM; touch /shared/ready; while :; do sleep 0.1; done";
    let _container = pod.container().mount(shared.path(), "/shared").start(&["sh", "-c", script])?;
    let patience = host.patience(Duration::from_secs(10));
    wait_until("the program to run", patience, || Ok(shared.path().join("ready").exists()))?;
    let [vmm, shim] =
        ["bulkhead-vmm", host.runtime().shim()].map(|program| the_process_of(program, pod.id()));
    let (vmm, shim) = (vmm?, shim?);
    let placeholders = placeholder_processes(shim)?;
    ensure!(placeholders.len() == 1, "expected  one placeholder process\ncame      {placeholders:?}");
    host.pods()?.while_containerd_is_down(|| {
        for pid in [placeholders[0], vmm, shim] {
            kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM).context("cannot send SIGTERM")?;
        }
        let shim = Path::new("/proc").join(shim.to_string());
        wait_until("the end of the shim", patience, || Ok(!shim.exists()))
    })?;
    let end = fs::read_to_string(shared.path().join("end")).context("the program could not end by itself")?;
    ensure!(end == "ended\n", "expected  ended\ncame      {end:?}");
    Ok(())
}
