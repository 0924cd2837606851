//! Pods whose sandbox is the shim's to make (`sandboxer = "shim"`): containerd makes no container for them. What is
//! told of other pods is told of them again, as far as the sandbox has a part in it.

use anyhow::{Context, Result, bail, ensure};
use containerd_shim_protos::{cgroups, cgroups_v2};
use protobuf::Message;

use super::super::{Case, crash::kill_process};
use super::{bad_input, files, life, network, settings, sharing, streams};
use crate::cri::messages::*;
use crate::ctr::Host;
use crate::pods::Pod;

pub(in crate::cases) const CASES: &[Case] = &[
    again("a_pod_is_ready_then_not_ready_then_gone", |host| told(host, life::pod_states)),
    again("a_pod_needs_no_pause_image", |host| told(host, no_pause_image)),
    again("a_container_is_created_runs_exits_and_is_removed", |host| told(host, life::container_states)),
    again("an_exit_of_a_container_does_not_end_its_pod", |host| told(host, life::exit_leaves_pod)),
    again("a_container_is_replaced_in_a_living_pod", |host| told(host, life::replaced)),
    again("the_stop_of_a_pod_kills_its_containers", |host| told(host, life::stop_kills)),
    again("a_pod_with_all_kinds_of_containers_leaves_nothing", |host| told(host, life::leaves_nothing)),
    again("pods_and_containers_are_listed", |host| told(host, life::lists)),
    again("three_pods_at_once_live_in_separate_worlds", |host| told(host, life::three_at_once)),
    again("a_pod_outlives_containerd", |host| told(host, life::outlives_containerd)),
    again("an_exit_while_containerd_is_down_is_reported_when_it_is_back", |host| {
        told(host, life::exit_unseen)
    }),
    again("a_pod_that_ends_while_containerd_is_down_is_not_ready_when_it_is_back", |host| {
        told(host, end_unseen)
    }),
    again("a_killed_vm_ends_its_pod", |host| told(host, vm_killed)),
    again("containers_have_the_pods_host_name", |host| told(host, sharing::host_name)),
    again("containers_share_memory_files", |host| told(host, sharing::shared_memory)),
    again("containers_that_share_processes_see_each_other", |host| told(host, sharing::shared_processes)),
    again("the_pods_hosts_hostname_and_resolver_files_are_there", |host| told(host, files::pod_files)),
    again("a_hosts_file_of_kubelets_is_the_containers", |host| told(host, files::hosts_file)),
    again("the_pods_address_is_the_containers", |host| told(host, network::address)),
    again("a_port_of_the_host_is_the_pods", |host| told(host, network::host_port)),
    again("sysctls_of_the_pod_are_its_containers", |host| told(host, settings::sysctls)),
    again("low_ports_and_pings_need_no_privilege", |host| told(host, settings::unprivileged_network)),
    again("an_exec_with_streams_reads_its_input", |host| told(host, streams::exec_stream)),
    again("an_attached_client_speaks_with_the_container", |host| told(host, streams::attach)),
    again("statistics_of_a_container_and_its_pod", |host| told(host, streams::statistics)),
    again("metrics_of_the_sandbox_are_those_of_its_containers", |host| told(host, metrics)),
    again("a_sysctl_that_does_not_exist_is_refused", |host| told(host, bad_input::sysctl_unknown)),
];

/// A story about these pods. containerd has had them since 2.0.
const fn again(name: &'static str, story: fn(&Host) -> Result<()>) -> Case {
    Case::bulkhead(name, story).since(2, 0)
}

fn told(host: &Host, story: fn(&Host) -> Result<()>) -> Result<()> {
    host.pods()?.with_sandboxes_of_the_shim(|| story(host))
}

fn no_pause_image(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    pods.without_pause_image(host, || {
        let pod = Pod::start(host)?;
        pod.container().run(&["echo", "hello"])?.succeeds()?.prints("hello\n")?;
        let made = pods.ctr().args(["containers", "ls", "--quiet"]).run()?;
        made.check("no container of the pod's own", !made.text().contains(pod.id()))?;
        pod.remove()
    })
}

fn vm_killed(host: &Host) -> Result<()> {
    host.pods()?.leave_nothing(host, || {
        let pod = Pod::start(host)?;
        let container = pod.container().start(&["sleep", "1000"])?;
        kill_process("bulkhead-vmm", pod.id())?;
        life::becomes_not_ready(host, &pod)?;
        let code = container.wait()?.exit_code;
        ensure!(code == 137, "expected  137 of the container\ncame      {code}");
        pod.remove()
    })
}

fn end_unseen(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    let pod = Pod::start(host)?;
    pods.while_containerd_is_down(|| kill_process("bulkhead-vmm", pod.id()).map(drop))?;
    life::becomes_not_ready(host, &pod)?;
    pod.remove()
}

/// Microseconds on a processor and bytes of memory, as containerd's service for sandboxes tells them.
fn used(host: &Host, pod: &Pod<'_>) -> Result<(u64, u64)> {
    let request = SandboxMetricsRequest { sandbox_id: pod.id().to_owned(), sandboxer: "shim".to_owned() };
    let metrics = host.pods()?.client().call(request)?.metrics.context("no metrics")?;
    ensure!(metrics.id == pod.id(), "expected  metrics of {}\ncame      {}", pod.id(), metrics.id);
    let data = metrics.data.context("metrics without data")?;
    match data.type_url.rsplit('/').next() {
        Some("io.containerd.cgroups.v2.Metrics") => {
            let metrics = cgroups_v2::metrics::Metrics::parse_from_bytes(&data.value)?;
            Ok((metrics.cpu.usage_usec, metrics.memory.usage))
        }
        Some("io.containerd.cgroups.v1.Metrics") => {
            let metrics = cgroups::metrics::Metrics::parse_from_bytes(&data.value)?;
            Ok((metrics.cpu.usage.total / 1000, metrics.memory.usage.usage))
        }
        name => bail!("expected  the metrics of a cgroup\ncame      {name:?}"),
    }
}

fn metrics(host: &Host) -> Result<()> {
    const HELD: u64 = 20 << 20;
    let pod = Pod::start(host)?;
    let (cpu_before, memory_before) = used(host, &pod)?;
    for file in ["one", "two"] {
        let script = format!("head -c {HELD} /dev/zero > /dev/shm/{file}; echo ready; sleep 1000");
        pod.container().start(&["sh", "-c", &script])?.wait_for("ready\n")?;
    }
    let (cpu, memory) = used(host, &pod)?;
    let expected = memory_before + 2 * HELD;
    ensure!(memory >= expected, "expected  {expected} bytes or more in use\ncame      {memory}");
    ensure!(cpu > cpu_before, "expected  more processor time than {cpu_before} us\ncame      {cpu} us");
    Ok(())
}
