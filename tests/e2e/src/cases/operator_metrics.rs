//! What an operator sees of pods that run: metrics, and how a pod started.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Case;
use crate::command::{Cmd, Finished, wait_until};
use crate::ctr::{Host, NAMESPACE, Task};
use crate::fixtures::{Replaced, scratch};
use crate::stuck::Frozen;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("metrics_top_and_trace_tell_of_a_pod", pod),
    Case::bulkhead("the_unit_serves_metrics_by_http", unit),
];

/// How long a command may take where the host is emulated.
const LIMIT: Duration = Duration::from_secs(120);

fn bulkhead(arguments: &[&str]) -> Result<Finished> {
    Cmd::new("bulkhead").args(arguments).limit(LIMIT).run()
}

/// The value of the pod's metric. `more` is a label beside those of each pod. The unit tests of the command read the
/// whole text as Prometheus does.
fn of_pod(text: &str, name: &str, id: &str, more: Option<(&str, &str)>) -> Option<f64> {
    let pod = format!(",namespace=\"{NAMESPACE}\",pod=\"{id}\"");
    let more = more.map(|(label, value)| format!(",{label}=\"{value}\"")).unwrap_or_default();
    let end = format!("{pod}{more}}} ");
    text.lines().find_map(|line| {
        let labels = line.strip_prefix(name)?.strip_prefix("{containerd=\"")?;
        labels.split_once(&end)?.1.parse().ok()
    })
}

fn pod(host: &Host) -> Result<()> {
    // With a limit, the pod's cgroup on the host has the controller of memory.
    let flags = ["--privileged", "--memory-limit", "268435456"];
    let task = host.container().flags(flags).detach(&["sleep", "1000"])?;
    let id = task.id().to_owned();
    let text = bulkhead(&["metrics"])?.succeeds()?.text();
    let number = |name: &str, more: Option<(&str, &str)>| {
        of_pod(&text, name, &id, more).with_context(|| format!("no {name} {more:?} of {id} in\n{text}"))
    };
    ensure!(number("bulkhead_pod_up", None)? == 1.0, "expected  it is up\ncame      {text}");
    let vm = if host_has_templates(&id)? { "clone" } else { "boot" };
    number("bulkhead_pod_vm_info", Some(("vm", vm)))?;
    let create = number("bulkhead_pod_start_seconds", Some(("phase", "create")))?;
    let mut parts = 0.0;
    for phase in ["read_request", "prepare_host", "mount_files", "create_container"] {
        parts += number("bulkhead_pod_start_seconds", Some(("phase", phase)))?;
    }
    number("bulkhead_pod_start_seconds", Some(("phase", "start_container")))?;
    ensure!(0.0 < parts && parts <= create, "expected  phases of Create\ncame      {parts} of {create} s");
    let memory = number("bulkhead_pod_memory_bytes", None)?;
    ensure!((1e6..1e9).contains(&memory), "expected  1 MB to 1 GB\ncame      {memory}");
    for (name, more) in [
        ("bulkhead_pod_cpu_seconds_total", Some(("thread", "vcpu"))),
        ("bulkhead_pod_cgroup_cpu_seconds_total", None),
        ("bulkhead_pod_cgroup_memory_bytes", None),
        ("bulkhead_pod_cgroup_memory_limit_bytes", None),
        ("bulkhead_pod_kvm_exits_total", None),
        ("bulkhead_pod_file_requests_total", Some(("device", "exclusive"))),
        ("bulkhead_pod_vsock_receive_bytes_total", None),
        ("bulkhead_pod_vsock_transmit_bytes_total", None),
        ("bulkhead_pod_vmm_threads", None),
        ("bulkhead_pod_vmm_open_files", None),
        ("bulkhead_pod_containers", None),
    ] {
        let value = number(name, more)?;
        ensure!(value > 0.0, "expected  {name} of more than 0\ncame      {value}");
    }
    for name in
        ["balloon_bytes", "free_page_reported_bytes_total", "plugged_memory_bytes", "block_requests_total"]
    {
        number(&format!("bulkhead_pod_{name}"), None)?;
    }
    top_and_trace(&id)?;
    let said = bulkhead(&["logs", &id, "--namespace", NAMESPACE])?.succeeds()?.text();
    let lines = said.lines().filter(|line| line.contains(&id)).count();
    ensure!(lines > 1 && lines == said.lines().count(), "expected  lines of {id} only\ncame      {said}");
    // A VMM that does not answer. What the host knows is still there, and the command ends in time.
    let frozen = Frozen::vm_of(&task)?;
    let stopped = Cmd::new("bulkhead").args(["metrics"]).limit(LIMIT).run();
    drop(frozen);
    let stopped = stopped?;
    stopped.within(Duration::from_secs(30))?;
    let text = stopped.succeeds()?.text();
    let number = |name: &str| of_pod(&text, name, &id, None);
    ensure!(number("bulkhead_pod_up") == Some(0.0), "expected  it is not up\ncame      {text}");
    let memory = number("bulkhead_pod_memory_bytes");
    ensure!(memory.is_some_and(|bytes| bytes > 0.0), "expected  its memory\ncame      {text}");
    panic(host, &task)?;
    task.ends(137)?;
    let after = bulkhead(&["metrics"])?.succeeds()?.text();
    let left = of_pod(&after, "bulkhead_pod_up", &id, None);
    ensure!(left.is_none(), "expected  no metric of a pod that has ended\ncame      {after}");
    Ok(())
}

/// The guest's kernel panics, and the operator hears why without any configuration.
fn panic(host: &Host, task: &Task<'_>) -> Result<()> {
    let ended = task.exec(&["sh", "-c", "echo 2 > /proc/sys/vm/panic_on_oom; tail /dev/zero"])?;
    ensure!(ended.status != Some(0), "the guest has survived the panic of its kernel");
    let panic = "Kernel panic - not syncing: Out of memory";
    let told = |arguments: &[&str], text: &str| {
        let arguments = [arguments, &[task.id(), "--namespace", NAMESPACE]].concat();
        wait_until(
            &format!("{text:?} in bulkhead {arguments:?}"),
            host.patience(Duration::from_secs(5)),
            || Ok(bulkhead(&arguments)?.succeeds()?.text().lines().any(|line| line.contains(text))),
        )
    };
    told(&["events", "--once"], "vm_ended  the guest powered off or reset")?;
    told(&["events", "--once"], &format!("its last words: {panic}"))?;
    told(&["logs"], &format!("guest: {panic}"))
}

/// Whether the pod is a clone.
fn host_has_templates(id: &str) -> Result<bool> {
    let path = super::templates::state_dir(NAMESPACE, id)?.join("vmm.json");
    let config: Value = serde_json::from_slice(&fs::read(path)?)?;
    Ok(!config["restore_from"].is_null())
}

fn top_and_trace(id: &str) -> Result<()> {
    let top = bulkhead(&["top", "--once", "--every", "1", "--json"])?.succeeds()?.text();
    let rows: Value = serde_json::from_str(&top).with_context(|| top.clone())?;
    let row = rows.as_array().and_then(|rows| rows.iter().find(|row| row["id"] == id));
    let row = row.with_context(|| format!("top does not show {id}: {top}"))?;
    ensure!(
        row["is_up"] == true && row["rates"]["cpu"].as_f64().is_some(),
        "expected  it is up, and its rates\ncame      {row:#}"
    );
    let shown = bulkhead(&["trace", id])?.succeeds()?.text();
    for phase in ["create ", "  create_container ", "start ", "  start_container "] {
        let has = shown.lines().any(|line| line.starts_with(phase) && line.ends_with('|'));
        ensure!(has, "expected  a bar of {phase}\ncame      {shown}");
    }
    let directory = scratch()?;
    let file = directory.path().join("spans.json").display().to_string();
    bulkhead(&["trace", id, "--namespace", NAMESPACE, "--otlp", &file])?.succeeds()?;
    let spans: Value = serde_json::from_slice(&fs::read(&file)?)?;
    let resources = spans["resourceSpans"].as_array().map(Vec::len);
    ensure!(resources == Some(3), "expected  spans of shim, VMM and agent\ncame      {spans:#}");
    bulkhead(&["trace", "no-such-pod"])?.exits(1)?.fails_with("there is no pod with the id no-such-pod")?;
    Ok(())
}

/// The unit of the package.
const UNIT: &str = include_str!("../../../../contrib/systemd/bulkhead-metrics.service");
const UNIT_FILE: &str = "/run/systemd/system/bulkhead-metrics.service";
const ADDRESS: &str = "127.0.0.1:9659";

/// Stops the unit, whatever becomes of the case.
struct Started;

impl Drop for Started {
    fn drop(&mut self) {
        _ = Cmd::new("systemctl").args(["stop", "bulkhead-metrics.service"]).run();
    }
}

/// What the server answers to this request.
fn http(request: &str) -> Result<String> {
    let mut stream = TcpStream::connect(ADDRESS)?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(stream, "{request} HTTP/1.1\r\nHost: {ADDRESS}\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn unit(host: &Host) -> Result<()> {
    let _file = Replaced::file(Path::new(UNIT_FILE), UNIT)?;
    let task = host.container().detach(&["sleep", "1000"])?;
    Cmd::new("systemctl").args(["daemon-reload"]).limit(LIMIT).run()?.succeeds()?;
    let started = Started;
    Cmd::new("systemctl").args(["start", "bulkhead-metrics.service"]).limit(LIMIT).run()?.succeeds()?;
    wait_until("the unit serves", LIMIT, || Ok(TcpStream::connect(ADDRESS).is_ok()))?;
    for _ in 0..2 {
        let answer = http("GET /metrics")?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP")?;
        ensure!(
            head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("text/plain; version=0.0.4"),
            "expected  Prometheus's text format\ncame      {head}"
        );
        for (name, more) in [
            ("bulkhead_pod_up", None),
            ("bulkhead_pod_memory_bytes", None),
            ("bulkhead_pod_start_seconds", Some(("phase", "create"))),
            ("bulkhead_pod_cpu_seconds_total", Some(("thread", "vcpu"))),
            ("bulkhead_pod_vmm_open_files", None),
            ("bulkhead_pod_kvm_exits_total", None),
        ] {
            let value = of_pod(body, name, task.id(), more);
            ensure!(
                value.is_some_and(|value| value > 0.0),
                "expected  {name}\ncame      {value:?} in {body}"
            );
        }
    }
    // A VMM that hangs does not keep the server from answering, and it is up again when it goes on.
    let up = || -> Result<_> { Ok(of_pod(&http("GET /metrics")?, "bulkhead_pod_up", task.id(), None)) };
    let frozen = Frozen::vm_of(&task)?;
    // An answer is given again for a second.
    wait_until("the pod is not up", LIMIT, || Ok(up()? == Some(0.0)))?;
    for _ in 0..3 {
        let value = up()?;
        ensure!(value == Some(0.0), "expected  it is not up\ncame      {value:?}");
    }
    drop(frozen);
    wait_until("the pod is up again", LIMIT, || Ok(up()? == Some(1.0)))?;
    let other = http("GET /")?;
    ensure!(other.starts_with("HTTP/1.1 404 "), "expected  404\ncame      {other}");
    drop(started);
    task.dies()
}
