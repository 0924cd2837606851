//! What `bulkhead trace` says of the start of a pod and of its container, and how that belongs to containerd's spans.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::operator::bulkhead;
use crate::containerd::TELLS_OF_SPANS;
use crate::ctr::{Host, SETTLES};
use crate::fixtures::scratch;
use crate::pods::Pod;
use crate::story::otlp::{self, Collector};

/// The span of kubelet that RunPodSandbox belongs to.
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

pub(super) fn spans(host: &Host) -> Result<()> {
    if host.version() < TELLS_OF_SPANS {
        return spans_of_pod(host, None);
    }
    let collector = Collector::start(otlp::ADDRESS)?;
    spans_of_pod(host, Some(&collector))?;
    host.pods()?.with_sandboxes_of_the_shim(|| spans_of_pod(host, Some(&collector)))
}

/// Expects our spans of a pod, and that they are parts of containerd's, which the collector gets.
fn spans_of_pod(host: &Host, collector: Option<&Collector>) -> Result<()> {
    let pod = Pod::plan(host).span(SPAN).start()?;
    let app = pod.container().start(&["sleep", "1000"])?;
    let directory = scratch()?;
    let file = directory.path().join("spans.json").display().to_string();
    bulkhead(&["trace", pod.id(), "--otlp", &file])?.succeeds()?;
    let exported: Value = serde_json::from_slice(&fs::read(&file)?)?;
    of_container(pod.id(), app.id(), &exported)?;
    let mut spans = BTreeMap::new();
    for resource in exported["resourceSpans"].as_array().into_iter().flatten() {
        let service = resource["resource"]["attributes"][0]["value"]["stringValue"].as_str();
        for span in resource["scopeSpans"][0]["spans"].as_array().into_iter().flatten() {
            if span["attributes"][0]["key"] == CONTAINER {
                continue;
            }
            spans.insert(format!("{} {}", service.unwrap_or(""), span["name"].as_str().unwrap_or("")), span);
        }
    }
    let vm =
        ["bulkhead-vmm restore_vm", "bulkhead-vmm boot_vm"].into_iter().find(|it| spans.contains_key(*it));
    let vm = vm.with_context(|| format!("expected  a span of the VMM\ncame      {exported:#}"))?;
    let span = |name: &str| {
        spans.get(name).copied().with_context(|| format!("expected  {name}\ncame      {exported:#}"))
    };
    for (request, parts) in [
        ("bulkhead-shim create", [vm, "bulkhead-agent create_container"]),
        ("bulkhead-shim start", ["bulkhead-shim connect_network", "bulkhead-agent start_container"]),
    ] {
        let request = span(request)?;
        for part in parts {
            let part = span(part)?;
            ensure!(
                part["parentSpanId"] == request["spanId"] && part["traceId"] == request["traceId"],
                "expected  a part of {request:#}\ncame      {part:#}"
            );
        }
        match collector {
            Some(collector) => is_in_run_pod_sandbox(host, collector, request)?,
            None => ensure!(
                request["traceId"] != TRACE,
                "expected  a trace of its own, because containerd tells of none\ncame      {request:#}"
            ),
        }
    }
    pod.remove()
}

/// The attribute of spans of a container that is not the first one of its pod.
const CONTAINER: &str = "bulkhead.container";

/// Expects the start of a container beside that of its pod: bars, and spans in a trace of their own or of containerd.
fn of_container(pod: &str, app: &str, exported: &Value) -> Result<()> {
    let shown = bulkhead(&["trace", pod])?.succeeds()?.text();
    let bars = shown.split_once("\n\n").map_or("", |(_, bars)| bars);
    let begins = |line: &&str, phase: &str| line.starts_with(phase) && line.ends_with('|');
    let phases = ["create ", "  mount_files ", "  create_container ", "start ", "  start_container "];
    let has_all = phases.iter().all(|phase| bars.lines().any(|line| begins(&line, phase)));
    let is_named = bars.lines().next().is_some_and(|line| line.ends_with(&format!("container {app}")));
    ensure!(is_named && has_all, "expected  bars of the container {app}\ncame      {shown}");
    let spans = exported["resourceSpans"].as_array().into_iter().flatten();
    let spans = spans.flat_map(|it| it["scopeSpans"][0]["spans"].as_array().into_iter().flatten());
    let of_app = spans.filter(|span| {
        let attribute = &span["attributes"][0];
        attribute["key"] == CONTAINER && attribute["value"]["stringValue"] == app
    });
    let of_app: Vec<_> = of_app.collect();
    let span = |name: &str| {
        let span = of_app.iter().find(|span| span["name"] == name);
        span.with_context(|| format!("expected  the span {name} of {app}\ncame      {exported:#}"))
    };
    for (request, part) in [("create", "create_container"), ("start", "start_container")] {
        let (request, part) = (span(request)?, span(part)?);
        ensure!(
            part["parentSpanId"] == request["spanId"] && part["traceId"] == request["traceId"],
            "expected  a part of {request:#}\ncame      {part:#}"
        );
    }
    Ok(())
}

/// Expects that the span of a request is a part of RunPodSandbox, which containerd exports and which is a part of the
/// client's span.
fn is_in_run_pod_sandbox(host: &Host, collector: &Collector, request: &Value) -> Result<()> {
    let (trace, parent) = (request["traceId"].as_str(), request["parentSpanId"].as_str());
    let what = format!("spans of containerd from {request:#} up to {SPAN}");
    let whole = collector.find(&what, host.patience(SETTLES), |spans| {
        let whole = *otlp::ancestry(spans, trace?, parent?).last()?;
        (whole.trace == TRACE && SPAN.split('-').nth(2) == Some(&whole.parent)).then(|| whole.clone())
    })?;
    ensure!(
        whole.service == "containerd" && whole.name.ends_with("/RunPodSandbox"),
        "expected  RunPodSandbox of containerd\ncame      {whole:?}"
    );
    let time = |key: &str| request[key].as_str().and_then(|nanos| nanos.parse::<u64>().ok());
    let (begin, end) = (time("startTimeUnixNano"), time("endTimeUnixNano"));
    ensure!(
        begin.is_some_and(|begin| whole.begin_ns <= begin) && end.is_some_and(|end| end <= whole.end_ns),
        "expected  {request:#}\nin        {whole:?}\ncame      outside"
    );
    Ok(())
}
