//! `bulkhead trace`: how long each phase of a pod's start took, and of the starts of its containers.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use bulkhead_host_shim::operator::{
    ContainerStart, MOST_CONTAINERS, Origin, Phase, Pod, StartRecord, Step, Traceparent, VERSION, chain,
    container_starts, one_line, pod_address, start_record,
};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    error::CommandError,
    output::{json as print_json, listing},
    pod,
};

/// The width of the bars, in characters.
const WIDTH: u64 = 40;

/// Which pod, and how it is shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TraceOptions<'a> {
    pub(crate) pod: &'a str,
    pub(crate) namespace: Option<&'a str>,
    pub(crate) json: bool,
    /// The file that spans are written to.
    pub(crate) otlp: Option<&'a Path>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Trace<'s> {
    containerd: &'s str,
    namespace: &'s str,
    id: &'s str,
    version: u32,
    began_unix_us: u64,
    vm: Origin,
    phases: Vec<PlacedPhase<'s>>,
    /// After the first one.
    containers: Vec<ContainerTrace<'s>>,
    /// What should be here, one line each.
    missing: &'s [String],
}

#[derive(Debug, Serialize)]
struct ContainerTrace<'s> {
    container: &'s str,
    began_unix_us: u64,
    phases: Vec<PlacedPhase<'s>>,
}

#[derive(Debug, Serialize)]
struct PlacedPhase<'s> {
    #[serde(flatten)]
    phase: &'s Phase,
    place: &'static str,
}

fn placed(phases: &[Phase]) -> Vec<PlacedPhase<'_>> {
    phases.iter().map(|phase| PlacedPhase { phase, place: phase.step.place() }).collect()
}

impl<'s> Trace<'s> {
    fn of(
        pod: &'s Pod,
        start: &'s StartRecord,
        containers: &'s [ContainerStart],
        missing: &'s [String],
    ) -> Self {
        let of_container = |start: &'s ContainerStart| ContainerTrace {
            container: &start.container,
            began_unix_us: start.began_unix_us,
            phases: placed(&start.phases),
        };
        Self {
            containerd: &pod.containerd,
            namespace: &pod.namespace,
            id: &pod.id,
            version: start.version,
            began_unix_us: start.began_unix_us,
            vm: start.vm,
            phases: placed(&start.phases),
            containers: containers.iter().map(of_container).collect(),
            missing,
        }
    }
}

/// Prints the start of a pod and those of its containers, or writes them to a file. It is an error if something of them
/// is missing, after the rest was printed.
pub(crate) fn trace(
    out: &mut impl Write,
    root: &Path,
    options: TraceOptions<'_>,
) -> Result<(), CommandError> {
    let pods = pod::names(root)?;
    let pod = pod::find(&pods, options.pod, options.namespace)?;
    let not_started = |reason| CommandError::NotStarted { pod: pod.id.clone(), reason };
    let start = start_record(&pod.path).map_err(|reason| not_started(format!(" ({})", one_line(&reason))))?;
    let start = &start.ok_or_else(|| not_started(String::new()))?;
    let containers = &container_starts(&pod.path)
        .map_err(|reason| CommandError::ContainerStarts { pod: pod.id.clone(), reason: one_line(&reason) })?;
    let missing = &missing(pod, start, containers);
    let complete = || match missing.is_empty() {
        true => Ok(()),
        false => {
            Err(CommandError::Incomplete { pod: pod.id.clone(), missing: one_line(&missing.join("; ")) })
        }
    };
    if let Some(path) = options.otlp {
        let write = |source| CommandError::not_written(path, source);
        let mut file = File::create_new(path).map_err(write)?;
        print_json(&mut file, &spans(pod, start, containers)).map_err(|source| {
            // A part of it is of no use. The error is said.
            drop(fs::remove_file(path));
            write(source)
        })?;
        return complete();
    }
    let printed = match options.json {
        true => print_json(out, &Trace::of(pod, start, containers, missing)),
        false => waterfalls(out, start, containers),
    };
    printed.map_err(CommandError::Output)?;
    complete()
}

/// The phases of each start that has ended. The others depend on the pod and on its host.
const OF_FIRST: [Step; 9] = [
    Step::Create,
    Step::ReadRequest,
    Step::PrepareHost,
    Step::MountFiles,
    Step::StartSandbox,
    Step::CreateContainer,
    Step::Start,
    Step::ConnectNetwork,
    Step::StartContainer,
];
const OF_OTHERS: [Step; 7] = [
    Step::Create,
    Step::ReadRequest,
    Step::MountFiles,
    Step::CreateContainer,
    Step::Start,
    Step::ConnectNetwork,
    Step::StartContainer,
];

/// What the records should have and do not, one line each. A shim writes them when a container was created and again
/// when it was started, and may have been unable to.
fn missing(pod: &Pod, start: &StartRecord, containers: &[ContainerStart]) -> Vec<String> {
    let mut missing: Vec<_> = missing_phases(&start.phases, &OF_FIRST, "the pod").into_iter().collect();
    let has = |step| start.phases.iter().any(|phase| phase.step == step);
    if !has(Step::RestoreVm) && !has(Step::BootVm) {
        missing.push("the pod has neither restore_vm nor boot_vm".into());
    }
    let of_container = |start: &ContainerStart| {
        missing_phases(&start.phases, &OF_OTHERS, &format!("the container {}", start.container))
    };
    let address = match pod_address(&pod.path) {
        Ok(address) => address,
        Err(error) => {
            missing.extend(containers.iter().filter_map(of_container));
            missing.push(format!("it is not known which containers there are: {}", chain(&error)));
            return missing;
        }
    };
    // One that was deleted before it has started will never have more.
    let is_there = |start: &&ContainerStart| address.containers.iter().any(|it| it.id == start.container);
    missing.extend(containers.iter().filter(is_there).filter_map(of_container));
    // The first container has the id of the pod.
    let is_recorded = |id: &str| id == pod.id || containers.iter().any(|start| start.container == id);
    let ids = address.containers.into_iter().map(|container| container.id).filter(|id| !is_recorded(id));
    let ids: Vec<_> = ids.collect();
    if !ids.is_empty() {
        missing.push(format!(
            "there is no record of {}: they are being created, or more than {MOST_CONTAINERS} have begun since",
            ids.join(", ")
        ));
    }
    missing
}

/// What is missing in the record of a start, if something is.
fn missing_phases(phases: &[Phase], needed: &[Step], who: &str) -> Option<String> {
    let has = |step| phases.iter().any(|phase| phase.step == step);
    // Without a request, none of its parts is there either.
    let is_missing = |step: &&Step| !has(**step) && step.request().is_none_or(has);
    let steps: Vec<_> = needed.iter().filter(is_missing).map(|step| step.name()).collect();
    let why = if has(Step::Start) { "" } else { ", because it has not started yet or this was not recorded" };
    (!steps.is_empty()).then(|| format!("{who} has no {}{why}", steps.join(", ")))
}

fn waterfalls(out: &mut impl Write, start: &StartRecord, containers: &[ContainerStart]) -> io::Result<()> {
    waterfall(out, &start.phases, start.vm.name())?;
    for start in containers {
        writeln!(out)?;
        waterfall(out, &start.phases, &format!("container {}", one_line(&start.container)))?;
    }
    Ok(())
}

fn waterfall(out: &mut impl Write, phases: &[Phase], what: &str) -> io::Result<()> {
    let end = end_of_all(phases);
    let header = ["PHASE", "WHERE", "BEGIN", "DURATION", &format!("{} in all, {what}", millis(end))];
    listing(out, false, phases, header, |phase| {
        let indent = if phase.step.request().is_some() { "  " } else { "" };
        [
            format!("{indent}{}", phase.step.name()),
            phase.step.place().into(),
            millis(phase.begin_us),
            millis(phase.duration_us),
            bar(phase, end),
        ]
    })
}

fn end_of(phase: &Phase) -> u64 {
    phase.begin_us.saturating_add(phase.duration_us)
}

fn end_of_all(phases: &[Phase]) -> u64 {
    phases.iter().map(end_of).max().unwrap_or(0)
}

fn millis(micros: u64) -> String {
    format!("{}.{:03} ms", micros / 1000, micros % 1000)
}

/// Where a phase is between the beginning and the end, by at least one character.
fn bar(phase: &Phase, end: u64) -> String {
    let place = |micros: u64| {
        let place = u128::from(micros) * u128::from(WIDTH) / u128::from(end.max(1));
        usize::try_from(place).unwrap_or(usize::MAX).min(WIDTH as usize)
    };
    let first = place(phase.begin_us).min(WIDTH as usize - 1);
    let length = place(end_of(phase)).saturating_sub(first).max(1);
    format!("|{:width$}|", format!("{}{}", " ".repeat(first), "#".repeat(length)), width = WIDTH as usize)
}

/// A start, as it becomes spans.
struct Start<'s> {
    /// What no other start has. The ids of its spans are made of it.
    unique: String,
    /// The span for all of it.
    whole: &'static str,
    began_unix_us: u64,
    phases: &'s [Phase],
    /// Attributes of its spans.
    attributes: Vec<Value>,
}

/// The starts as OpenTelemetry's JSON (OTLP 1.0, ExportTraceServiceRequest), with one resource for each place.
fn spans(pod: &Pod, start: &StartRecord, containers: &[ContainerStart]) -> Value {
    let of_pod = format!("{}/{}/{}", pod.containerd, pod.namespace, pod.id);
    let first = Start {
        unique: format!("{of_pod}/{}", start.began_unix_us),
        whole: "start_of_pod",
        began_unix_us: start.began_unix_us,
        phases: &start.phases,
        attributes: vec![attribute("bulkhead.vm", start.vm.name())],
    };
    let others = containers.iter().map(|start| Start {
        unique: format!("{of_pod}/{}/{}", start.container, start.began_unix_us),
        whole: "start_of_container",
        began_unix_us: start.began_unix_us,
        phases: &start.phases,
        attributes: vec![attribute("bulkhead.container", &start.container)],
    });
    let starts: Vec<_> = [first].into_iter().chain(others).collect();
    let of_place = |place: &str| {
        let spans: Vec<_> = starts.iter().flat_map(|start| start.spans(place)).collect();
        json!({
            "resource": {"attributes": [
                attribute("service.name", &format!("bulkhead-{place}")),
                attribute("service.version", VERSION),
                attribute("bulkhead.containerd", &pod.containerd),
                attribute("bulkhead.namespace", &pod.namespace),
                attribute("bulkhead.pod", &pod.id),
            ]},
            "scopeSpans": [{"scope": {"name": "bulkhead trace"}, "spans": spans}],
        })
    };
    let resources = ["shim", "vmm", "agent"].map(of_place);
    json!({ "resourceSpans": resources })
}

fn attribute(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

impl Start<'_> {
    /// Its spans of a place.
    ///
    /// A request that belongs to a span of containerd is in containerd's trace, with its parts. The other requests are
    /// in a trace of their own, below a span for the whole start.
    fn spans(&self, place: &str) -> Vec<Value> {
        let own: String = hex(&self.unique, 16);
        let of_place = self.phases.iter().filter(|phase| phase.step.place() == place);
        let spans = of_place.map(|phase| {
            let request = phase.step.request();
            let caller = self.caller_of(request.unwrap_or(phase.step));
            let trace = caller.map_or(own.clone(), |caller| caller.trace_id());
            let parent = match (request, caller) {
                (Some(request), _) => self.span_id(request.name()),
                (None, Some(caller)) => caller.span_id(),
                (None, None) => self.span_id(self.whole),
            };
            self.span(phase.step.name(), (trace, parent), phase.begin_us, end_of(phase))
        });
        let has_own = self.phases.iter().any(|it| it.step.request().is_none() && it.caller.is_none());
        let whole = || self.span(self.whole, (own.clone(), String::new()), 0, end_of_all(self.phases));
        (place == "shim" && has_own).then(whole).into_iter().chain(spans).collect()
    }

    fn span(&self, name: &str, (trace, parent): (String, String), begin: u64, end: u64) -> Value {
        let nanos = |micros: u64| {
            let micros = u128::from(self.began_unix_us) + u128::from(micros);
            (micros * 1000).to_string()
        };
        json!({
            "traceId": trace, "spanId": self.span_id(name), "parentSpanId": parent, "name": name, "kind": 1,
            "startTimeUnixNano": nanos(begin), "endTimeUnixNano": nanos(end),
            "attributes": self.attributes, "status": {},
        })
    }

    fn span_id(&self, name: &str) -> String {
        hex(&format!("{}/{name}", self.unique), 8)
    }

    /// The span of containerd that a request of the start belongs to.
    fn caller_of(&self, request: Step) -> Option<Traceparent> {
        self.phases.iter().find(|phase| phase.step == request)?.caller
    }
}

/// So many bytes of a digest.
fn hex(text: &str, bytes: usize) -> String {
    Sha256::digest(text).iter().take(bytes).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, fs};

    use super::*;

    fn start() -> StartRecord {
        let phase = |step, begin_us, duration_us| Phase { step, begin_us, duration_us, caller: None };
        let phases = vec![
            phase(Step::Create, 0, 60_000),
            phase(Step::RestoreVm, 10_000, 25_500),
            phase(Step::StartSandbox, 40_000, 1),
            phase(Step::Start, 70_000, 10_000),
        ];
        StartRecord { version: 2, began_unix_us: 1_000_000, vm: Origin::Clone, phases }
    }

    fn container() -> ContainerStart {
        let phase = |step, begin_us, duration_us| Phase { step, begin_us, duration_us, caller: None };
        let phases = vec![phase(Step::Create, 0, 6_000), phase(Step::CreateContainer, 3_000, 3_000)];
        ContainerStart { version: 1, container: "app".into(), began_unix_us: 2_000_000, phases }
    }

    /// Pods that have started, and one that has not, in two namespaces. Those have a second container.
    fn pods() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for pod in ["one/demo", "two/demo", "two/new"] {
            let path = dir.path().join("c").join(pod);
            fs::create_dir_all(&path).unwrap();
            if pod != "two/new" {
                let line = serde_json::to_string(&start()).unwrap() + "\n";
                fs::write(path.join("start.json"), line).unwrap();
                let line = serde_json::to_string(&container()).unwrap() + "\n";
                fs::write(path.join("container-starts.json"), line).unwrap();
            }
        }
        dir
    }

    fn options<'a>(pod: &'a str, namespace: Option<&'a str>) -> TraceOptions<'a> {
        TraceOptions { pod, namespace, json: false, otlp: None }
    }

    /// What a trace of these pods shows, whose records lack some phases.
    fn in_part(root: &Path, options: TraceOptions<'_>) -> (String, String) {
        let mut text = Vec::new();
        match trace(&mut text, root, options) {
            Err(error @ CommandError::Incomplete { .. }) => {
                (String::from_utf8(text).unwrap(), error.to_string())
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_missing_is_said_and_only_that() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/demo");
        let add = |name: &str| {
            fs::write(path.join("containers").join(name), "{\"effect\":\"bundle\",\"path\":\"/b\"}\n")
        };
        fs::create_dir_all(path.join("containers")).unwrap();
        fs::write(path.join("journal"), "{\"effect\":\"shim\",\"pid\":4194304,\"start_time\":1}\n").unwrap();
        add("demo").unwrap();
        add("app").unwrap();
        let phase = |step| Phase { step, begin_us: 0, duration_us: 1, caller: None };
        let write = |steps: &[Step], container: Option<&[Step]>| {
            let phases = |steps: &[Step]| steps.iter().copied().map(phase).collect::<Vec<_>>();
            let record = StartRecord { phases: phases(steps), ..start() };
            fs::write(path.join("start.json"), serde_json::to_string(&record).unwrap() + "\n").unwrap();
            let record = container.map(|steps| ContainerStart { phases: phases(steps), ..self::container() });
            let lines =
                record.map(|record| serde_json::to_string(&record).unwrap() + "\n").unwrap_or_default();
            fs::write(path.join("container-starts.json"), lines).unwrap();
        };
        let whole = [&OF_FIRST[..], &[Step::BootVm]].concat();
        write(&whole, Some(&OF_OTHERS));
        let mut text = Vec::new();
        trace(&mut text, dir.path(), options("demo", None)).unwrap();
        let mut value = Vec::new();
        trace(&mut value, dir.path(), TraceOptions { json: true, ..options("demo", None) }).unwrap();
        let value: Value = serde_json::from_slice(&value).unwrap();
        assert_eq!(value["missing"], json!([]));
        let said = |first: &[Step], container: Option<&[Step]>| {
            write(first, container);
            let (shown, said) = in_part(dir.path(), TraceOptions { json: true, ..options("demo", None) });
            let shown: Value = serde_json::from_str(&shown).unwrap();
            assert!(said.starts_with("the trace of the pod demo is not complete: "), "{said}");
            assert_eq!(shown["missing"].as_array().unwrap().len(), 1, "{shown}");
            said["the trace of the pod demo is not complete: ".len()..].to_owned()
        };
        let without = |steps: &[Step], missing: &[Step]| -> Vec<Step> {
            steps.iter().copied().filter(|step| !missing.contains(step)).collect()
        };
        let created = without(&whole, &[Step::Start, Step::ConnectNetwork, Step::StartContainer]);
        let not_started = "has no start, because it has not started yet or this was not recorded";
        assert_eq!(said(&created, Some(&OF_OTHERS)), format!("the pod {not_started}"));
        let created = without(&OF_OTHERS, &[Step::Start, Step::ConnectNetwork, Step::StartContainer]);
        assert_eq!(said(&whole, Some(&created)), format!("the container app {not_started}"));
        // Its start has failed, and it was deleted.
        fs::remove_file(path.join("containers/app")).unwrap();
        trace(&mut Vec::new(), dir.path(), options("demo", None)).unwrap();
        add("app").unwrap();
        let lost = without(&whole, &[Step::MountFiles, Step::StartContainer]);
        assert_eq!(said(&lost, Some(&OF_OTHERS)), "the pod has no mount_files, start_container");
        assert_eq!(said(&OF_FIRST, Some(&OF_OTHERS)), "the pod has neither restore_vm nor boot_vm");
        assert!(
            said(&whole, None)
                .starts_with("there is no record of app: they are being created, or more than 16")
        );
        write(&whole, Some(&OF_OTHERS));
        fs::remove_file(path.join("journal")).unwrap();
        let (_, said) = in_part(dir.path(), options("demo", None));
        let is_said = said.contains("it is not known which containers there are: ");
        assert!(is_said && said.contains("cannot read the journal"), "{said}");
    }

    #[test]
    fn a_phase_is_a_bar_where_it_was() {
        let mut text = Vec::new();
        waterfalls(&mut text, &start(), &[container()]).unwrap();
        let text = String::from_utf8(text).unwrap();
        let (text, of_container) = text.split_once("\n\n").unwrap();
        let lines: Vec<_> = of_container.lines().collect();
        assert!(lines[0].ends_with("6.000 ms in all, container app"), "{of_container}");
        assert!(
            lines[1].starts_with("create ") && lines[2].starts_with("  create_container "),
            "{of_container}"
        );
        assert!(lines[2].ends_with(&format!("|{}{}|", " ".repeat(20), "#".repeat(20))), "{of_container}");
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].ends_with("80.000 ms in all, clone"), "{text}");
        assert!(lines[2].starts_with("  restore_vm") && lines[2].contains("25.500 ms"), "{text}");
        let bars: Vec<_> = lines[1..].iter().map(|line| line.split_once('|').unwrap().1).collect();
        let bar = |first: usize, length: usize| {
            format!("{}{}{}|", " ".repeat(first), "#".repeat(length), " ".repeat(40 - first - length))
        };
        assert_eq!(bars, [bar(0, 30), bar(5, 12), bar(20, 1), bar(35, 5)]);
        let nonsense = Phase { begin_us: u64::MAX, duration_us: u64::MAX, ..start().phases[0] };
        assert_eq!(super::bar(&nonsense, 0).len(), 42);
    }

    #[test]
    fn the_start_of_one_pod_is_shown() {
        let dir = pods();
        let several = trace(&mut Vec::new(), dir.path(), options("demo", None)).unwrap_err().to_string();
        assert!(several.contains("--namespace"), "{several}");
        let new = trace(&mut Vec::new(), dir.path(), options("new", None)).unwrap_err().to_string();
        assert!(new.starts_with("the pod new has no record of its start"), "{new}");
        let json = TraceOptions { json: true, ..options("demo", Some("one")) };
        let (text, _) = in_part(dir.path(), json);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&value["namespace"], &value["vm"]), (&"one".into(), &"clone".into()));
        assert_eq!(
            value["phases"][1],
            json!({"step": "restore_vm", "begin_us": 10000, "duration_us": 25500, "place": "vmm"})
        );
        let containers = value["containers"].as_array().unwrap();
        assert_eq!((containers.len(), &containers[0]["container"]), (1, &"app".into()));
        assert_eq!(containers[0]["phases"][1]["place"], "agent");
        let path = dir.path().join("c/one/demo/container-starts.json");
        fs::write(path, "{\"version\":2}\n").unwrap();
        let error = trace(&mut Vec::new(), dir.path(), json).unwrap_err().to_string();
        assert!(error.contains("container-starts.json: it has version 2"), "{error}");
    }

    #[test]
    fn a_request_with_a_caller_is_in_the_trace_of_the_caller() {
        let dir = pods();
        let pod = bulkhead_host_shim::operator::pod_named(&dir.path().join("c/one/demo"));
        let spans_of = |start: &StartRecord| -> HashMap<String, Value> {
            let value = spans(&pod, start, &[]);
            let resources = value["resourceSpans"].as_array().unwrap();
            let spans = resources.iter().flat_map(|it| it["scopeSpans"][0]["spans"].as_array().unwrap());
            spans.map(|span| (span["name"].as_str().unwrap().to_owned(), span.clone())).collect()
        };
        let caller = |trace: &str, span: &str| Traceparent::try_from(format!("00-{trace}-{span}-01")).ok();
        let (one, two) = ("1".repeat(32), "2".repeat(32));
        let mut start = start();
        start.phases[0].caller = caller(&one, "00000000000000aa");
        let spans = spans_of(&start);
        let parts = ["create", "restore_vm", "start_sandbox"].map(|name| &spans[name]["traceId"]);
        assert_eq!(parts, [&json!(one); 3]);
        assert_eq!(spans["create"]["parentSpanId"], "00000000000000aa");
        assert_eq!(spans["restore_vm"]["parentSpanId"], spans["create"]["spanId"]);
        // The other request has no caller.
        assert_eq!(spans["start"]["traceId"], spans["start_of_pod"]["traceId"]);
        assert_eq!(spans["start"]["parentSpanId"], spans["start_of_pod"]["spanId"]);
        // With `ctr`, each of the two requests has a trace of its own.
        start.phases[3].caller = caller(&two, "00000000000000bb");
        let spans = spans_of(&start);
        assert_eq!((&spans["create"]["traceId"], &spans["start"]["traceId"]), (&json!(one), &json!(two)));
        assert_eq!(spans["start"]["parentSpanId"], "00000000000000bb");
        assert!(!spans.contains_key("start_of_pod") && spans.len() == 4, "{spans:?}");
        drop(dir);
    }

    #[test]
    fn spans_have_the_ids_and_times_that_collectors_expect() {
        let dir = pods();
        let path = dir.path().join("spans.json");
        let otlp = TraceOptions { otlp: Some(&path), ..options("demo", Some("one")) };
        assert_eq!(in_part(dir.path(), otlp).0, "");
        assert!(trace(&mut Vec::new(), dir.path(), otlp).unwrap_err().to_string().contains("spans.json"));
        let value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let spans: Vec<_> = value["resourceSpans"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|resource| resource["scopeSpans"][0]["spans"].as_array().unwrap())
            .collect();
        let named = |name: &str| *spans.iter().find(|span| span["name"] == name).unwrap();
        assert_eq!(spans.len(), 8);
        let of_container = |span: &&&Value| {
            let attribute = &span["attributes"][0];
            attribute["key"] == "bulkhead.container" && attribute["value"]["stringValue"] == "app"
        };
        let of_container: Vec<_> = spans.iter().filter(of_container).collect();
        let names: Vec<_> = of_container.iter().map(|span| span["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["start_of_container", "create", "create_container"]);
        let [whole, create, part] = of_container.as_slice() else { panic!("{of_container:?}") };
        assert_eq!((&create["parentSpanId"], &part["parentSpanId"]), (&whole["spanId"], &create["spanId"]));
        assert_eq!(create["startTimeUnixNano"], "2000000000");
        assert_ne!(
            (&create["traceId"], &create["spanId"]),
            (&named("create")["traceId"], &named("create")["spanId"])
        );
        for span in &spans {
            assert_eq!(span["traceId"].as_str().map(str::len), Some(32));
            assert_eq!(span["spanId"].as_str().map(str::len), Some(16));
        }
        let (root, create, restore) = (named("start_of_pod"), named("create"), named("restore_vm"));
        assert_eq!((&root["parentSpanId"], &create["parentSpanId"]), (&"".into(), &root["spanId"]));
        assert_eq!(restore["parentSpanId"], create["spanId"]);
        assert_eq!(restore["startTimeUnixNano"], "1010000000");
        assert_eq!(
            (&restore["endTimeUnixNano"], &root["endTimeUnixNano"]),
            (&"1035500000".into(), &"1080000000".into())
        );
    }
}
