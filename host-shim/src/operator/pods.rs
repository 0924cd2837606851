//! The pods of this host, by their state directories.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    host::{
        journal::Journal,
        process_id::ProcessId,
        state_dir::{self, CONTAINERS, JOURNAL, VMM_CONFIG},
    },
    operator::process::memory,
    types::{error::chain, text::one_line},
};

/// The longest configuration of a VMM that is read. Those that are written have a thousandth of it.
const LONGEST_CONFIG: u64 = 1 << 20;

/// A pod that has a state directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pod {
    /// The address of its containerd, as the name of a directory.
    pub containerd: String,
    /// Its namespace in this containerd.
    pub namespace: String,
    /// Its id.
    pub id: String,
    /// What is known of it.
    pub state: PodState,
    /// Its state directory.
    pub path: PathBuf,
    /// The ids of its containers, sorted.
    pub containers: Vec<String>,
    /// The pid of the shim. None: it does not live.
    pub shim_pid: Option<u32>,
    /// The pid of the VMM. None: it does not live.
    pub vmm_pid: Option<u32>,
    /// The memory of the VMM and its guest on this host.
    pub memory_bytes: Option<u64>,
    /// The vCPUs of the VM. Some of them may be offline.
    pub vcpus: Option<u8>,
    /// The seconds since the start of the shim.
    pub age_seconds: Option<u64>,
    /// The template that the VM is a clone of.
    pub template: Option<PathBuf>,
    /// What cannot be read, one line each.
    pub problems: Vec<String>,
}

/// What is known of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PodState {
    /// Its shim lives.
    Running,
    /// Its shim has died. containerd still has the bundle. Most likely `... delete` removes the pod at this moment.
    Crashed,
    /// Its shim has died, and containerd has forgotten the pod.
    Leftover,
    /// There is no readable journal: a shim makes or removes the pod at this moment, or it is damaged.
    Unknown,
}

/// What is of interest here of the configuration of a pod's VMM. That of a later version may have more keys.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct VmmConfig {
    pub(super) vcpus: u8,
    /// The socket of the VMM, in the state directory.
    pub(super) control: PathBuf,
    #[serde(default)]
    pub(super) shares: Vec<Share>,
    #[serde(default)]
    pub(super) cgroup_procs: Vec<PathBuf>,
    #[serde(default)]
    restore_from: Option<PathBuf>,
}

/// A directory that the VM shares.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Share {
    pub(super) tag: String,
    /// Only the guest changes what it reaches by this device.
    #[serde(default)]
    pub(super) exclusive: bool,
}

/// The state directories of the pods below `root`, sorted by containerd, namespace and id.
pub fn paths(root: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(root) {
        // No pod has been made since the host booted.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => drop(other?),
    }
    let mut paths: Vec<_> = state_dir::pods(root).collect();
    paths.sort();
    Ok(paths)
}

/// A pod of which only the names are known.
pub fn named(path: &Path) -> Pod {
    let name = |above: usize| {
        let name = path.ancestors().nth(above).and_then(Path::file_name).unwrap_or_default();
        one_line(&name.to_string_lossy())
    };
    Pod {
        containerd: name(2),
        namespace: name(1),
        id: name(0),
        state: PodState::Unknown,
        path: path.to_owned(),
        containers: Vec::new(),
        shim_pid: None,
        vmm_pid: None,
        memory_bytes: None,
        vcpus: None,
        age_seconds: None,
        template: None,
        problems: Vec::new(),
    }
}

/// A pod, its VMM if that lives, and the configuration of it if there is one. May hang in the host's kernel.
pub(super) fn look(path: &Path) -> (Pod, Option<ProcessId>, Option<VmmConfig>) {
    let mut pod = named(path);
    let mut vmm = None;
    match Journal::look(&path.join(JOURNAL)) {
        Ok(journal) => vmm = read_journal(&mut pod, &journal),
        Err(error) => pod.problems.push(chain(&error)),
    }
    match containers(path) {
        Ok(containers) => pod.containers = containers,
        Err(error) => pod.problems.push(format!("{}: {error}", path.join(CONTAINERS).display())),
    }
    let config = vmm_config(path).unwrap_or_else(|error| {
        pod.problems.push(format!("{}: {error}", path.join(VMM_CONFIG).display()));
        None
    });
    if let Some(config) = &config {
        pod.vcpus = Some(config.vcpus);
        pod.template = config.restore_from.clone();
    }
    // The ids are part of the paths.
    pod.problems.iter_mut().for_each(|problem| *problem = one_line(problem));
    (pod, vmm, config)
}

/// Returns the VMM, if it lives.
fn read_journal(pod: &mut Pod, journal: &Journal) -> Option<ProcessId> {
    if let Some((line, text)) = journal.damaged() {
        pod.problems.push(format!("{}: line {line} is damaged: {text}", pod.path.join(JOURNAL).display()));
    }
    let (state, shim) = state_of(&pod.path, journal);
    let vmm = living(journal.vmm());
    pod.state = state;
    pod.age_seconds = shim.and_then(ProcessId::age).map(|age| age.as_secs());
    pod.memory_bytes = vmm.and_then(memory);
    pod.shim_pid = shim.map(|shim| shim.pid);
    pod.vmm_pid = vmm.map(|vmm| vmm.pid);
    vmm
}

/// The state of the pod with this state directory and journal, and its shim if that lives.
pub(super) fn state_of(path: &Path, journal: &Journal) -> (PodState, Option<ProcessId>) {
    let shim = living(journal.shim());
    let state = match (journal.shim(), shim) {
        (None, _) => PodState::Unknown,
        (_, Some(_)) => PodState::Running,
        (_, None) if state_dir::is_abandoned(path) => PodState::Leftover,
        (_, None) => PodState::Crashed,
    };
    (state, shim)
}

fn living(process: Option<ProcessId>) -> Option<ProcessId> {
    process.filter(|process| process.may_live())
}

fn containers(path: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(path.join(CONTAINERS)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let id = |entry: io::Result<fs::DirEntry>| Ok(one_line(&entry?.file_name().to_string_lossy()));
    let mut ids = entries.map(id).collect::<io::Result<Vec<_>>>()?;
    ids.sort();
    Ok(ids)
}

/// The configuration of the pod's VMM. None: there is none yet.
fn vmm_config(path: &Path) -> io::Result<Option<VmmConfig>> {
    let file = match File::open(path.join(VMM_CONFIG)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut text = Vec::new();
    file.take(LONGEST_CONFIG).read_to_end(&mut text)?;
    Ok(Some(serde_json::from_slice(&text)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{journal::Effect, state_dir::StateDir};

    fn one(root: &Path) -> Pod {
        let paths = paths(root).unwrap();
        assert_eq!(paths.len(), 1, "{paths:?}");
        look(&paths[0]).0
    }

    #[test]
    fn a_host_without_pods_has_an_empty_list() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(paths(&dir.path().join("none")).unwrap(), [""; 0].map(PathBuf::from));
        fs::create_dir(dir.path().join(".templates")).unwrap();
        assert_eq!(paths(dir.path()).unwrap(), [""; 0].map(PathBuf::from));
    }

    #[test]
    fn a_pod_is_described_by_what_its_shim_has_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock/k8s.io/pod");
        let (state, mut journal) = StateDir::create(&path, &[]).unwrap();
        let own = ProcessId::of(std::process::id()).unwrap();
        journal.record(Effect::Vmm(own)).unwrap();
        for id in ["two", "one"] {
            fs::write(path.join(CONTAINERS).join(id), "").unwrap();
        }
        let config = r#"{"api_version":8,"kernel":"k","initramfs":"i","vcpus":3,"memory_mib":256,
            "control":"c","vsock":"v","restore_from":"/run/bulkhead/.templates/0a"}"#;
        fs::write(path.join(VMM_CONFIG), config).unwrap();
        let pod = one(dir.path());
        assert_eq!(
            (pod.containerd.as_str(), pod.namespace.as_str(), pod.id.as_str()),
            ("c.sock", "k8s.io", "pod")
        );
        assert_eq!((pod.state, pod.shim_pid, pod.vmm_pid), (PodState::Running, Some(own.pid), Some(own.pid)));
        assert_eq!((pod.vcpus, pod.containers), (Some(3), vec!["one".to_owned(), "two".to_owned()]));
        assert_eq!(pod.template.as_deref(), Some(Path::new("/run/bulkhead/.templates/0a")));
        assert!(pod.memory_bytes.is_some_and(|bytes| bytes > 0) && pod.age_seconds.is_some());
        assert_eq!(pod.problems, [""; 0]);
        drop(state);
    }

    #[test]
    fn what_a_crashed_shim_has_left_is_reported_and_no_reason_to_fail() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/\u{1b}[2J");
        fs::create_dir_all(&path).unwrap();
        let pod = one(dir.path());
        assert_eq!((pod.state, pod.id.as_str()), (PodState::Unknown, " [2J"));
        assert!(pod.problems[0].ends_with("cannot read the journal: no such file or directory"), "{pod:?}");
        let shim = r#"{"effect":"shim","pid":4294967295,"start_time":18446744073709551615}"#;
        fs::write(path.join(JOURNAL), format!("{shim}\n\u{0}\u{1}not JSON\n")).unwrap();
        fs::write(path.join(CONTAINERS), "").unwrap();
        fs::write(path.join(VMM_CONFIG), r#"{"vcpus":1e99}"#).unwrap();
        let pod = one(dir.path());
        assert_eq!((pod.state, pod.shim_pid, pod.vcpus), (PodState::Crashed, None, None));
        assert_eq!(pod.problems.len(), 3, "{pod:?}");
        assert!(pod.problems.iter().all(|line| !line.chars().any(char::is_control)), "{pod:?}");
        fs::write(
            path.join(JOURNAL),
            format!("{shim}\n{{\"effect\":\"bundle\",\"path\":\"/nonexistent\"}}\n"),
        )
        .unwrap();
        assert_eq!(one(dir.path()).state, PodState::Leftover);
    }
}
