//! The agent honours what its API says that it honours, and refuses the rest.

#![allow(clippy::unwrap_used)]

use std::{collections::BTreeSet, path::Path};

use bulkhead_agent::spec::{self, PodSharing, Resolved, SpecError};
use bulkhead_agent_api::features;
use serde_json::{Value, json};

/// A spec with one value changed, which is given by a JSON pointer.
fn resolve(pointer: &str, value: Value) -> Result<Resolved, SpecError> {
    let mut spec = json!({
        "ociVersion": "1.1.0",
        "root": {"path": "/root"},
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["true"], "cwd": "/", "capabilities": {}},
        "mounts": [],
        "linux": {"namespaces": [{"type": "mount"}], "seccomp": null},
    });
    *spec.pointer_mut(pointer).unwrap() = value;
    spec::resolve(spec.to_string().as_bytes(), Path::new("/sys/fs/cgroup/c"), PodSharing::default())
}

/// The candidates that are honoured.
fn honoured<'a>(candidates: &[&'a str], honours: impl Fn(&str) -> bool) -> BTreeSet<&'a str> {
    candidates.iter().copied().filter(|candidate| honours(candidate)).collect()
}

fn set<'a>(names: &[&'a str]) -> BTreeSet<&'a str> {
    let set: BTreeSet<_> = names.iter().copied().collect();
    assert_eq!(set.len(), names.len(), "a name is listed twice");
    set
}

#[test]
fn mount_options() {
    // A bind mount takes no option that is not known.
    let honours = |option: &str| {
        let mount = json!({"destination": "/a", "type": "bind", "source": "/s", "options": [option]});
        resolve("/mounts", json!([mount])).is_ok()
    };
    // Of mount(8) and of other runtimes.
    let words = [
        "acl",
        "async",
        "atime",
        "bind",
        "defaults",
        "dev",
        "diratime",
        "dirsync",
        "exec",
        "idmap",
        "iversion",
        "lazytime",
        "loud",
        "mand",
        "move",
        "noacl",
        "noatime",
        "nodev",
        "nodiratime",
        "noexec",
        "noiversion",
        "nolazytime",
        "nomand",
        "norelatime",
        "nostrictatime",
        "nosuid",
        "nosymfollow",
        "private",
        "relatime",
        "remount",
        "ro",
        "rw",
        "shared",
        "silent",
        "slave",
        "strictatime",
        "suid",
        "symfollow",
        "sync",
        "tmpcopyup",
        "unbindable",
    ];
    let all: Vec<String> =
        words.iter().flat_map(|word| [(*word).to_owned(), format!("r{word}"), format!("rr{word}")]).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    assert_eq!(honoured(&all, honours), set(features::MOUNT_OPTIONS));
}

#[test]
fn namespaces() {
    let honours = |kind: &str| {
        let mut all = vec![json!({"type": "mount"})];
        all.extend((kind != "mount").then(|| json!({ "type": kind })));
        match resolve("/linux/namespaces", json!(all)) {
            // It wants the ids, and so knows the namespace.
            Err(SpecError::Invalid { .. }) => kind == "user",
            other => other.is_ok(),
        }
    };
    let all = ["cgroup", "ipc", "mount", "network", "pid", "time", "user", "uts"];
    assert_eq!(honoured(&all, honours), set(features::NAMESPACES));
}

#[test]
fn capabilities() {
    for (number, name) in features::CAPABILITIES.iter().enumerate() {
        let resolved = resolve("/process/capabilities", json!({"permitted": [name]})).unwrap();
        assert_eq!(resolved.init.process.capabilities.permitted, 1 << number, "{name}");
    }
}

#[test]
fn system_call_filters() {
    let filter = |change: &dyn Fn(&mut Value)| {
        let mut filter = json!({"defaultAction": "SCMP_ACT_ALLOW"});
        change(&mut filter);
        resolve("/linux/seccomp", filter).is_ok()
    };
    let action = |name: &str| filter(&|filter| filter["defaultAction"] = json!(name));
    let actions = [features::SECCOMP_ACTIONS, &["SCMP_ACT_NOTIFY"]].concat();
    assert_eq!(honoured(&actions, action), set(features::SECCOMP_ACTIONS));
    let operator = |name: &str| {
        let argument = json!({"index": 0, "value": 1, "valueTwo": 1, "op": name});
        let rule = json!({"names": ["mkdir"], "action": "SCMP_ACT_ERRNO", "args": [argument]});
        filter(&|filter| filter["syscalls"] = json!([rule]))
    };
    assert_eq!(honoured(features::SECCOMP_OPERATORS, operator), set(features::SECCOMP_OPERATORS));
    let arch = |name: &str| filter(&|filter| filter["architectures"] = json!([name]));
    assert_eq!(honoured(features::SECCOMP_ARCHS, arch), set(features::SECCOMP_ARCHS));
    let flag = |name: &str| filter(&|filter| filter["flags"] = json!([name]));
    assert_eq!(honoured(features::SECCOMP_KNOWN_FLAGS, flag), set(features::SECCOMP_FLAGS));
}

#[test]
fn versions() {
    let (oldest, newest) = features::OCI_VERSIONS;
    for version in [oldest, newest] {
        resolve("/ociVersion", json!(version)).unwrap();
    }
    resolve("/ociVersion", json!("2.0.0")).unwrap_err();
}
