//! The manifests of Kubernetes, in the files and on the pages. The tests have no Kubernetes that could refuse them, so
//! they are read here with a reader of YAML, and each field must be one of its kind.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::VERSION;
use crate::dist::source_dir;

/// The pages with manifests.
const PAGES: [&str; 3] = ["docs/quickstart-kubernetes.md", "docs/operations.md", "docs/resources.md"];

/// Fields that manifests here may have, with their types: `text`, `flag`, `cpu`, `memory`, a list with what its
/// entries have, or an object. An object with the key `*` has keys of any name. This is the part of the API of
/// Kubernetes that is used: a field that is misspelt, or in the wrong object, is not among them.
fn schema(kind: &str) -> Value {
    let metadata = json!({ "name": "text", "namespace": "text", "labels": { "*": "text" } });
    match kind {
        "node.k8s.io/v1 RuntimeClass" => json!({
            "apiVersion": "text",
            "kind": "text",
            "metadata": metadata,
            "handler": "text",
            "overhead": { "podFixed": { "cpu": "cpu", "memory": "memory" } },
            "scheduling": { "nodeSelector": { "*": "text" } },
        }),
        "apps/v1 DaemonSet" => json!({
            "apiVersion": "text",
            "kind": "text",
            "metadata": metadata,
            "spec": {
                "selector": { "matchLabels": { "*": "text" } },
                "template": {
                    "metadata": metadata,
                    "spec": {
                        "nodeSelector": { "*": "text" },
                        "priorityClassName": "text",
                        "hostPID": "flag",
                        "automountServiceAccountToken": "flag",
                        "initContainers": [{
                            "name": "text",
                            "image": "text",
                            "command": ["text"],
                            "args": ["text"],
                            "securityContext": { "privileged": "flag" },
                            "volumeMounts": [
                                { "name": "text", "mountPath": "text", "mountPropagation": "text" },
                            ],
                        }],
                        "containers": [{
                            "name": "text",
                            "image": "text",
                            "command": ["text"],
                            "securityContext": {
                                "allowPrivilegeEscalation": "flag",
                                "capabilities": { "drop": ["text"] },
                                "readOnlyRootFilesystem": "flag",
                                "runAsNonRoot": "flag",
                                "runAsUser": "number",
                            },
                        }],
                        "volumes": [{ "name": "text", "hostPath": { "path": "text" } }],
                    },
                },
            },
        }),
        "v1 Pod" => json!({
            "apiVersion": "text",
            "kind": "text",
            "metadata": metadata,
            "spec": {
                "runtimeClassName": "text",
                "containers": [{ "name": "text", "image": "text", "command": ["text"] }],
            },
        }),
        _ => panic!("no manifest may be of the kind {kind:?}"),
    }
}

/// Returns what is wrong.
fn check(value: &Value, schema: &Value, path: &str) -> Vec<String> {
    let is_quantity = |units: &[&str]| {
        let number = value.as_str().and_then(|text| units.iter().find_map(|unit| text.strip_suffix(unit)));
        number.is_some_and(|number| number.parse::<u32>().is_ok_and(|number| number > 0))
    };
    match (schema, value) {
        (Value::Object(fields), Value::Object(values)) => {
            let of_field = |(key, value): (&String, &Value)| match fields.get(key).or(fields.get("*")) {
                Some(schema) => check(value, schema, &format!("{path}.{key}")),
                None => vec![format!("{path} has no field {key}")],
            };
            values.iter().flat_map(of_field).collect()
        }
        (Value::Array(entry), Value::Array(values)) => {
            values.iter().flat_map(|value| check(value, &entry[0], &format!("{path}[]"))).collect()
        }
        (Value::String(kind), value) => {
            let is_right = match kind.as_str() {
                "text" => value.is_string(),
                "flag" => value.is_boolean(),
                "number" => value.is_u64(),
                "cpu" => is_quantity(&["m"]),
                "memory" => is_quantity(&["Mi", "Gi"]),
                other => panic!("{other} is no type"),
            };
            if is_right { Vec::new() } else { vec![format!("{path} is no {kind}: {value}")] }
        }
        _ => vec![format!("{path} has another form: {value}")],
    }
}

fn source(path: &str) -> String {
    fs::read_to_string(source_dir().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn parsed(yaml: &str) -> Value {
    serde_yaml_ng::from_str(yaml).unwrap_or_else(|error| panic!("{error} in\n{yaml}"))
}

/// The manifests of the files.
fn of_files() -> Vec<(String, Value)> {
    let entries = fs::read_dir(source_dir().join("contrib/kubernetes")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let manifests: Vec<_> = names
        .filter(|name| name.ends_with(".yaml"))
        .map(|name| (name.clone(), parsed(&source(&format!("contrib/kubernetes/{name}")))))
        .collect();
    assert_eq!(manifests.len(), 3);
    manifests
}

fn file(name: &str) -> Value {
    of_files().into_iter().find(|(found, _)| found == name).unwrap().1
}

/// All documents in blocks of YAML of the pages.
fn of_pages() -> Vec<(String, Value)> {
    let mut blocks = Vec::new();
    for page in PAGES {
        for block in source(page).split("```yaml\n").skip(1) {
            let documents = block.split("```").next().unwrap().split("---\n");
            blocks.extend(documents.map(|document| (page.to_owned(), parsed(document))));
        }
    }
    blocks
}

/// The handlers that a configuration of containerd has.
fn handlers(configuration: &str, plugin: &str) -> BTreeSet<String> {
    let table: toml::Table = configuration.parse().unwrap();
    let runtimes = table.get("plugins").and_then(|plugins| plugins.get(plugin));
    let runtimes = runtimes.map(|plugin| &plugin["containerd"]["runtimes"]);
    runtimes.iter().flat_map(|runtimes| runtimes.as_table().unwrap().keys().cloned()).collect()
}

/// The handlers that `bulkhead install` adds, and those that a page shows how to add. Each version of containerd's
/// configuration has its own plugin.
fn all_handlers(file: &str, plugin: &str) -> BTreeSet<String> {
    let pages = PAGES.map(source);
    let blocks = pages.iter().flat_map(|page| page.split("```toml\n").skip(1));
    let shown = blocks.flat_map(|block| handlers(block.split("```").next().unwrap(), plugin));
    handlers(&source(&format!("contrib/containerd/{file}")), plugin).into_iter().chain(shown).collect()
}

#[test]
fn each_manifest_has_fields_of_its_kind_only() {
    let (files, pages) = (of_files(), of_pages());
    let manifests = files.iter().chain(&pages).filter(|(_, manifest)| manifest.get("apiVersion").is_some());
    let mut seen = 0;
    for (place, manifest) in manifests {
        let text = |key: &str| manifest[key].as_str().unwrap_or_default();
        let wrong = check(manifest, &schema(&format!("{} {}", text("apiVersion"), text("kind"))), "");
        assert_eq!(wrong, [""; 0], "{place}");
        let name = manifest["metadata"]["name"].as_str().unwrap_or_default();
        let is_label = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        assert!(!name.is_empty() && is_label, "{place}: {name:?}");
        seen += 1;
    }
    assert!(seen >= 5, "only {seen} manifests are found");
}

#[test]
fn a_field_that_is_wrong_is_found() {
    let class = file("runtimeclass.yaml");
    let schema = schema("node.k8s.io/v1 RuntimeClass");
    for (pointer, key, value, said) in [
        ("", "handlers", json!("bulkhead"), " has no field handlers"),
        ("", "spec", json!({ "handler": "bulkhead" }), " has no field spec"),
        ("/overhead/podFixed", "memory", json!("128MB"), ".overhead.podFixed.memory is no memory: \"128MB\""),
        ("/overhead/podFixed", "cpu", json!(1), ".overhead.podFixed.cpu is no cpu: 1"),
        ("", "overhead", json!("128Mi"), ".overhead has another form: \"128Mi\""),
    ] {
        let mut wrong = class.clone();
        wrong.pointer_mut(pointer).unwrap()[key] = value;
        assert_eq!(check(&wrong, &schema, ""), [said]);
    }
}

#[test]
fn a_runtime_class_names_a_handler_that_is_added_and_a_pod_a_class() {
    let of_2 = all_handlers("config-2.toml", "io.containerd.grpc.v1.cri");
    let of_3 = all_handlers("config-3.toml", "io.containerd.cri.v1.runtime");
    assert!(of_2.len() >= 2 && of_3.len() >= 3, "{of_2:?} and {of_3:?}");
    let all: Vec<_> = of_files().into_iter().chain(of_pages()).collect();
    let of_kind = |kind: &str| all.iter().filter(move |(_, it)| it["kind"] == kind).collect::<Vec<_>>();
    let (classes, pods) = (of_kind("RuntimeClass"), of_kind("Pod"));
    assert!(classes.len() >= 4 && !pods.is_empty(), "{classes:?} and {pods:?}");
    for (place, class) in &classes {
        let handler = class["handler"].as_str().unwrap();
        assert!(of_2.contains(handler) && of_3.contains(handler), "{place}: {handler}");
    }
    for (place, pod) in pods {
        let named = &pod["spec"]["runtimeClassName"];
        assert!(classes.iter().any(|(_, class)| class["metadata"]["name"] == *named), "{place}: {named}");
    }
}

#[test]
fn the_quick_start_uses_the_names_of_the_manifests() {
    let page = source(PAGES[0]);
    let class = file("runtimeclass.yaml");
    let name = class["metadata"]["name"].as_str().unwrap();
    // The pod that it starts.
    let overrides = page.split("--overrides='").nth(1).unwrap().split('\'').next().unwrap();
    let overrides: Value = serde_json::from_str(overrides).unwrap();
    assert_eq!(overrides, json!({ "apiVersion": "v1", "spec": { "runtimeClassName": name } }));
    assert!(page.contains(&format!("kubectl delete runtimeclass {name}\n")));
    assert!(page.contains(&format!("runtimeclass.node.k8s.io/{name} created\n")));
    let overhead = serde_json::to_string(&class["overhead"]["podFixed"]).unwrap();
    assert!(page.contains(&format!("\n{overhead}\n")), "{overhead}");
}

#[test]
fn a_daemon_set_selects_its_own_pods_and_the_commands_of_the_page_name_it() {
    let page = source(PAGES[0]);
    let archive = format!("bulkhead-{VERSION}-x86_64.tar.gz");
    assert!(
        source("contrib/kubernetes/Dockerfile").contains(&format!("\nCOPY {archive} /bulkhead.tar.gz\n"))
    );
    for name in ["daemonset.yaml", "daemonset-remove.yaml"] {
        let set = file(name);
        let (spec, template) = (&set["spec"], &set["spec"]["template"]);
        assert_eq!(spec["selector"]["matchLabels"], template["metadata"]["labels"], "{name}");
        let (set_name, namespace) =
            (set["metadata"]["name"].as_str().unwrap(), &set["metadata"]["namespace"]);
        let label = template["metadata"]["labels"]["name"].as_str().unwrap();
        for what in [format!("daemonset/{set_name}"), format!("name={label}")] {
            assert!(page.contains(&format!("{what}\n")) || page.contains(&format!("{what} ")), "{what}");
        }
        assert_eq!(namespace, "kube-system");
        assert_eq!(template["spec"]["nodeSelector"]["bulkhead"], "yes");
        assert!(page.contains("kubectl label node NODE bulkhead=yes\n"));
        let container = &template["spec"]["initContainers"][0];
        let image = format!("REGISTRY/bulkhead-install:{VERSION}");
        assert_eq!(container["image"], image.as_str());
        assert_eq!(template["spec"]["containers"][0]["image"], image.as_str());
        let logs = format!(" --selector name={label} --container {} ", container["name"].as_str().unwrap());
        assert!(page.contains(&logs), "{logs}");
        assert!(page.contains(&format!("docker build --tag ${image} .\n")), "{image}");
        let volumes = |list: &Value| -> BTreeSet<String> {
            list.as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(volumes(&container["volumeMounts"]), volumes(&template["spec"]["volumes"]), "{name}");
        assert_eq!(container["command"], json!(["sh", "-ec"]));
        assert_eq!(container["args"].as_array().unwrap().len(), 1);
        is_script(container["args"][0].as_str().unwrap());
    }
}

/// Expects that a shell can parse it.
fn is_script(script: &str) {
    let status = Command::new("sh").args(["-n", "-c", script]).stdin(Stdio::null()).status().unwrap();
    assert!(status.success(), "{script}");
}
