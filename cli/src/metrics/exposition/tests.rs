use std::{
    collections::{BTreeSet, HashSet},
    fs,
};

use bulkhead_host_shim::operator::{
    BlockCounts, Cause, CgroupUsage, CpuUsage, DeviceCounts, NetworkUsage, Origin, Phase, Pressure, Sampler,
    StartRecord, Step,
};

use super::*;

const DASHBOARD: &str = include_str!("../../../../contrib/grafana/bulkhead.json");
const PAGE: &str = include_str!("../../../../docs/observability.md");

/// A host with a pod of this id, of which everything is known.
fn node(id: &str) -> Node {
    let mut node = node_of_no_usage(id);
    let network = node.failures.iter_mut().flatten().find(|(cause, _)| *cause == Cause::Network);
    network.unwrap().1 = 3;
    let sample = &mut node.pods[0];
    (sample.pod.memory_bytes, sample.pod.vcpus) = (Some(1 << 20), Some(2));
    (sample.pod.state, sample.pod.containers) = (PodState::Running, vec!["one".into()]);
    sample.is_up = Some(false);
    (sample.usage.threads, sample.usage.open_files) = (Some(20), Some(30));
    sample.usage.network = Some(NetworkUsage::default());
    sample.usage.cgroup = CgroupUsage {
        cpu_seconds: Some(2.0),
        memory_bytes: Some(3 << 20),
        memory_limit_bytes: Some(4 << 20),
        oom_kills: Some(0),
        cpu_pressure: Pressure { waiting_seconds: Some(0.5), stalled_seconds: None },
        memory_pressure: Pressure::default(),
        io_pressure: Pressure { waiting_seconds: Some(2.0), stalled_seconds: Some(0.0) },
    };
    sample.usage.cpu = Some(CpuUsage { vcpu: 1.5, fs: 0.0, other: 0.25 });
    sample.usage.file_requests = vec![("shared", u64::MAX)];
    sample.usage.kvm_exits = Some(7);
    sample.usage.devices = DeviceCounts {
        balloon_bytes: Some(4096),
        reported_bytes: Some(0),
        plugged_bytes: Some(128 << 20),
        block: Some(BlockCounts { requests: 3, read_bytes: 512, written_bytes: 1024 }),
        vsock_received_bytes: Some(1),
        vsock_sent_bytes: Some(2),
    };
    sample.container_oom_kills = Some(2);
    let phase = |step, duration_us| Phase { step, begin_us: 1, duration_us, caller: None };
    let phases = vec![phase(Step::Create, 300_000), phase(Step::BootVm, 250_000)];
    sample.start = Some(StartRecord { version: 2, began_unix_us: 1_500_000, vm: Origin::Boot, phases });
    node
}

fn node_of_no_usage(id: &str) -> Node {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("c.sock/ns").join(id)).unwrap();
    Sampler::default().sample(dir.path()).unwrap()
}

/// What the text says, read more strictly than Prometheus reads it.
#[derive(Debug, Default)]
struct Parsed {
    /// The names of all metrics.
    names: BTreeSet<String>,
    /// Each name with its labels, as the text has them.
    series: HashSet<String>,
}

/// Reads the text format 0.0.4 (prometheus/docs, exposition_formats.md, and the linter of client_golang, promlint).
fn parse(text: &str) -> Result<Parsed, String> {
    let mut parsed = Parsed::default();
    let body = text.strip_suffix('\n').ok_or("the last line has no end")?;
    let mut lines = body.split('\n').peekable();
    while let Some(line) = lines.next() {
        let help = line.strip_prefix("# HELP ").ok_or(format!("a metric without help: {line}"))?;
        let (name, help) = help.split_once(' ').ok_or(format!("no text: {line}"))?;
        if !is_name(name, ":") || help.is_empty() || help.contains('\\') {
            return Err(format!("wrong help: {line}"));
        }
        if !parsed.names.insert(name.to_owned()) {
            return Err(format!("a metric that comes twice: {name}"));
        }
        let line = lines.next().unwrap_or_default();
        let kind =
            line.strip_prefix(&format!("# TYPE {name} ")).ok_or(format!("no type of {name}: {line}"))?;
        if (kind, name.ends_with("_total")) != ("gauge", false)
            && (kind, name.ends_with("_total")) != ("counter", true)
        {
            return Err(format!("a {kind} of this name: {name}"));
        }
        let mut count = 0;
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            count += 1;
            let series = value(name, line).map_err(|error| format!("{error}: {line}"))?;
            if !parsed.series.insert(series.clone()) {
                return Err(format!("a value that comes twice: {series}"));
            }
        }
        if count == 0 {
            return Err(format!("a metric without a value: {name}"));
        }
    }
    Ok(parsed)
}

fn is_name(text: &str, more: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || more.contains(c);
    !text.is_empty() && !text.starts_with(|c: char| c.is_ascii_digit()) && text.chars().all(is_part)
}

/// Returns what is before the value.
fn value(metric: &str, line: &str) -> Result<String, &'static str> {
    let mut rest = line.strip_prefix(metric).ok_or("a value of another metric")?;
    let mut labels = HashSet::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, after) = rest.split_once("=\"").ok_or("no label")?;
            if !is_name(label, "") || label.starts_with("__") || !labels.insert(label) {
                return Err("a label of a wrong name");
            }
            rest = quoted(after)?;
            match rest.strip_prefix(',') {
                Some(after) => rest = after,
                None => break,
            }
        }
        rest = rest.strip_prefix('}').ok_or("labels without an end")?;
    }
    let number = rest.strip_prefix(' ').ok_or("no value")?;
    match number.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(line[..line.len() - number.len()].to_owned()),
        _ => Err("not a number"),
    }
}

/// What follows the quotation mark at the end of a label's value.
fn quoted(text: &str) -> Result<&str, &'static str> {
    let mut chars = text.chars();
    loop {
        match chars.next().ok_or("a label without an end")? {
            '"' => return Ok(chars.as_str()),
            '\\' if !matches!(chars.next(), Some('n' | '"' | '\\')) => return Err("an unknown escape"),
            _ => {}
        }
    }
}

/// The names of metrics that a text uses.
fn used(text: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !is_name(c));
    words.filter(|word| word.starts_with("bulkhead_")).map(str::to_owned).collect()
}

#[test]
fn numbers_have_base_units_and_the_labels_of_their_pod() {
    let text = text(&node("demo"));
    let labels = r#"containerd="c.sock",namespace="ns",pod="demo""#;
    for line in [
        format!("bulkhead_pod_up{{{labels}}} 0"),
        format!("bulkhead_pod_containers{{{labels}}} 1"),
        format!(r#"bulkhead_pod_start_seconds{{{labels},phase="boot_vm"}} 0.25"#),
        format!(r#"bulkhead_pod_vm_info{{{labels},vm="boot"}} 1"#),
        format!("bulkhead_pod_created_timestamp_seconds{{{labels}}} 1.5"),
        format!(r#"bulkhead_pod_cpu_seconds_total{{{labels},thread="vcpu"}} 1.5"#),
        format!(r#"bulkhead_pod_file_requests_total{{{labels},device="shared"}} 18446744073709551615"#),
        format!("bulkhead_pod_kvm_exits_total{{{labels}}} 7"),
        format!("bulkhead_pod_balloon_bytes{{{labels}}} 4096"),
        format!("bulkhead_pod_free_page_reported_bytes_total{{{labels}}} 0"),
        format!("bulkhead_pod_plugged_memory_bytes{{{labels}}} 134217728"),
        format!("bulkhead_pod_block_written_bytes_total{{{labels}}} 1024"),
        format!("bulkhead_pod_vsock_transmit_bytes_total{{{labels}}} 2"),
        format!(r#"bulkhead_pod_cgroup_pressure_waiting_seconds_total{{{labels},resource="cpu"}} 0.5"#),
        format!(r#"bulkhead_pod_cgroup_pressure_waiting_seconds_total{{{labels},resource="io"}} 2"#),
        format!(r#"bulkhead_pod_cgroup_pressure_stalled_seconds_total{{{labels},resource="io"}} 0"#),
        "# TYPE bulkhead_pod_kvm_exits_total counter".to_owned(),
        r#"bulkhead_pods{state="running"} 1"#.to_owned(),
        r#"bulkhead_templates{state="complete"} 0"#.to_owned(),
        "bulkhead_pods_left_out 0".to_owned(),
        format!(r#"bulkhead_build_info{{version="{VERSION}",commit="{COMMIT}"}} 1"#),
        r#"bulkhead_failures_total{cause="no_kvm"} 0"#.to_owned(),
        r#"bulkhead_failures_total{cause="network"} 3"#.to_owned(),
    ] {
        assert!(text.lines().any(|one| one == line), "{line}\nis not in\n{text}");
    }
    for unknown in [
        r#"waiting_seconds_total{LABELS,resource="memory"}"#,
        r#"stalled_seconds_total{LABELS,resource="cpu"}"#,
    ] {
        let unknown = unknown.replace("LABELS", labels);
        assert!(!text.contains(&unknown), "what is not known is not 0: {text}");
    }
    let text = super::text(&node_of_no_usage("demo"));
    for name in [
        "cgroup",
        "memory",
        "cpu",
        "start",
        "containers",
        "vmm",
        "network",
        "file",
        "balloon",
        "plugged",
        "block",
    ] {
        assert!(!text.contains(&format!("bulkhead_pod_{name}")), "what is not known is not 0: {text}");
    }
    parse(&text).unwrap();
}

#[test]
fn a_pod_of_which_it_is_not_known_is_neither_up_nor_down() {
    let up = |is_up| {
        let mut node = node("demo");
        node.pods[0].is_up = is_up;
        let text = text(&node);
        let line = text.lines().find(|line| line.starts_with("bulkhead_pod_up{"));
        line.and_then(|line| line.rsplit(' ').next()).map(str::to_owned)
    };
    assert_eq!([up(Some(true)).as_deref(), up(Some(false)).as_deref()], [Some("1"), Some("0")]);
    assert_eq!(up(None), None);
    // One that a shim makes at this moment, or that cannot be looked at in time.
    let unknown = text(&node_of_no_usage("demo"));
    assert!(!unknown.contains("bulkhead_pod_up"), "{unknown}");
}

#[test]
fn the_dashboard_lists_the_namespace_of_a_pod_of_which_nothing_is_known() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let namespaces = variables.iter().find(|variable| variable["name"] == "namespace").unwrap();
    let query = namespaces["query"].as_str().unwrap();
    let metric =
        query.strip_prefix("label_values(").and_then(|query| query.strip_suffix(", namespace)")).unwrap();
    let text = text(&node_of_no_usage("demo"));
    let is_there = text.lines().any(|line| line.starts_with(&format!("{metric}{{")));
    assert!(is_there, "{metric} has no value of a pod in\n{text}");
}

#[test]
fn no_name_of_a_pod_ends_its_label() {
    let text = text(&node("a\"} 1 \\"));
    assert!(text.contains(r#"pod="a\"} 1 \\"} 0"#), "{text}");
    parse(&text).unwrap();
    assert_eq!(escaped("a\nb\\n"), r"a\nb\\n");
    let long = super::text(&node_of_no_usage(&"\u{fc}\"".repeat(80)));
    parse(&long).unwrap();
}

#[test]
fn two_pods_that_are_shown_alike_have_one_value() {
    let mut node = node("demo");
    let twin = node.pods[0].clone();
    node.pods.push(twin);
    let parsed = parse(&text(&node)).unwrap();
    assert!(parsed.series.contains(r#"bulkhead_pod_up{containerd="c.sock",namespace="ns",pod="demo"} "#));
}

#[test]
fn the_reader_of_these_tests_refuses_what_prometheus_would_not_read() {
    let good = "# HELP a_total x.\n# TYPE a_total counter\na_total{pod=\"p\\\"\\\\\",b=\"\"} 2\na_total 3\n";
    assert_eq!(parse(good).unwrap().series.len(), 2);
    for (from, to) in [
        ("a_total 3\n", "a_total 3"),
        ("a_total 3", "b_total 3"),
        ("a_total 3", "a_total three"),
        ("a_total 3", "a_total{pod=\"p\\\"\\\\\",b=\"\"} 3"),
        ("counter", "gauge"),
        ("# HELP a_total x.\n", ""),
        ("# TYPE a_total counter\n", ""),
        ("\\\"", "\""),
        ("\\\"", "\\t"),
        ("\"} 2", "\" 2"),
        ("pod=", "__pod="),
        ("pod=", "b="),
    ] {
        assert!(parse(&good.replacen(from, to, 1)).is_err(), "{from:?} as {to:?}");
    }
    assert!(parse(&good.repeat(2)).is_err());
}

#[test]
fn the_dashboard_asks_for_metrics_that_are_exported_and_the_page_lists_them_all() {
    let exported = parse(&text(&node("demo"))).unwrap().names;
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let queries: Vec<_> = dashboard["panels"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap())
        .map(|target| &target["expr"])
        .chain(dashboard["templating"]["list"].as_array().unwrap()[1..].iter().map(|it| &it["query"]))
        .map(|query| query.as_str().unwrap().to_owned())
        .collect();
    assert!(queries.len() > 8, "{queries:?}");
    for query in queries {
        let asked = used(&query);
        assert!(!asked.is_empty() && asked.is_subset(&exported), "{query}: {exported:?}");
    }
    for cause in Cause::ALL {
        let row = format!("\n| `{}` | ", cause.name());
        assert!(PAGE.contains(&row), "the page does not list the cause {}", cause.name());
    }
    let section = PAGE.split_once("\n## Metrics\n").unwrap().1;
    let listed = used(section.split("\n## ").next().unwrap());
    let missing: Vec<_> = exported.difference(&listed).collect();
    let unknown: Vec<_> = listed.difference(&exported).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "missing {missing:?}, unknown {unknown:?}");
}
