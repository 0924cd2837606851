//! The container that a program is to run in. Everything about it is read from the pod's journals and from the bundle
//! that its client has made: the guest can change neither.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use bulkhead_host_shim::operator::{
    CONTAINER_NAME, CONTAINER_TYPE, CRI_NAMESPACE, ContainerPlace, PodState, SANDBOX_TYPE, one_line,
    pod_address,
};
use rustix::fs::ResolveFlags;
use serde_json::Value;

use crate::{
    exec::{error::ExecError, options::Options},
    pod,
    process::regular_file::open_below,
};

/// The spec of a container, in its bundle.
const CONFIG: &str = "config.json";

/// The most that is read of a spec.
const LONGEST_CONFIG: u64 = 16 << 20;

/// A container, and how its shim is reached.
#[derive(Debug)]
pub(super) struct Target {
    /// The id of the pod.
    pub(super) pod: String,
    /// The state directory of the pod.
    pub(super) state: PathBuf,
    pub(super) shim_pid: u32,
    pub(super) socket: PathBuf,
    pub(super) place: ContainerPlace,
    /// The spec of the container.
    pub(super) spec: Value,
}

/// A container that may be meant.
#[derive(Debug)]
struct Candidate {
    place: ContainerPlace,
    /// An error: it may be deleted at this moment.
    spec: Result<Value, ExecError>,
}

impl Candidate {
    fn annotation(&self, key: &str) -> Option<&str> {
        self.spec.as_ref().ok()?.pointer("/annotations")?.get(key)?.as_str()
    }

    /// The id, with the name that Kubernetes has for it.
    fn shown(&self) -> String {
        let id = one_line(&self.place.id);
        match self.annotation(CONTAINER_NAME) {
            Some(name) => format!("{} ({id})", one_line(name)),
            None => id,
        }
    }
}

/// Finds the container that the options name, below the directory of all pods.
pub(super) fn find(root: &Path, options: &Options) -> Result<Target, ExecError> {
    let pods = pod::names(root)?;
    let found = pod::find(&pods, &options.pod, options.namespace.as_deref())?;
    let pod = || found.id.clone();
    let address =
        pod_address(&found.path).map_err(|source| ExecError::Unknown { pod: pod(), source: Some(source) })?;
    let shim_pid = match (address.state, address.shim_pid) {
        (PodState::Running, Some(pid)) => pid,
        (PodState::Crashed, _) => return Err(ExecError::Crashed { pod: pod() }),
        (PodState::Leftover, _) => return Err(ExecError::Leftover { pod: pod() }),
        (PodState::Unknown | PodState::Running, _) => {
            return Err(ExecError::Unknown { pod: pod(), source: None });
        }
    };
    let socket = address.socket.ok_or_else(|| ExecError::NoShim { pod: pod() })?;
    let candidates = address.containers.into_iter().map(|place| {
        let spec = read_spec(&place.bundle);
        Candidate { place, spec }
    });
    let is_of_cri = found.namespace == CRI_NAMESPACE;
    let chosen = choose(&found.id, is_of_cri, candidates.collect(), options.container.as_deref())?;
    Ok(Target {
        pod: pod(),
        state: found.path.clone(),
        shim_pid,
        socket,
        spec: chosen.spec?,
        place: chosen.place,
    })
}

/// The container with the id `wanted`, or else with this name. Without it, the only one beside the pod's sandbox.
fn choose(
    pod: &str,
    is_of_cri: bool,
    mut candidates: Vec<Candidate>,
    wanted: Option<&str>,
) -> Result<Candidate, ExecError> {
    // In other namespaces anybody may write this annotation, and it says nothing.
    let is_sandbox =
        |candidate: &Candidate| is_of_cri && candidate.annotation(CONTAINER_TYPE) == Some(SANDBOX_TYPE);
    candidates.retain(|candidate| !is_sandbox(candidate));
    let shown =
        |candidates: &[Candidate]| candidates.iter().map(Candidate::shown).collect::<Vec<_>>().join(", ");
    let all = shown(&candidates);
    if candidates.is_empty() {
        return Err(ExecError::NoContainer { pod: pod.into() });
    }
    if let Some(wanted) = wanted {
        // An id comes first: nobody gives a container the id of another one as its name.
        match candidates.iter().position(|candidate| candidate.place.id == wanted) {
            Some(index) => return Ok(candidates.swap_remove(index)),
            None => candidates.retain(|candidate| candidate.annotation(CONTAINER_NAME) == Some(wanted)),
        }
    }
    match (candidates.pop(), candidates.is_empty()) {
        (Some(one), true) => Ok(one),
        (Some(last), false) => {
            candidates.push(last);
            let containers = shown(&candidates);
            Err(ExecError::SeveralContainers { pod: pod.into(), containers })
        }
        (None, _) => {
            let wanted = wanted.unwrap_or_default().into();
            Err(ExecError::NoSuchContainer { pod: pod.into(), wanted, containers: all })
        }
    }
}

fn read_spec(bundle: &Path) -> Result<Value, ExecError> {
    let read = || {
        let directory = File::open(bundle)?;
        let file = open_below(&directory, CONFIG, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)?;
        let mut text = Vec::new();
        file.take(LONGEST_CONFIG).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    };
    read().map_err(|source: io::Error| ExecError::Spec { path: bundle.join(CONFIG), source })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn candidate(id: &str, kind: &str, name: Option<&str>) -> Candidate {
        let mut annotations = json!({ CONTAINER_TYPE: kind });
        if let Some(name) = name {
            annotations[CONTAINER_NAME] = name.into();
        }
        let place = ContainerPlace { id: id.into(), bundle: "/b".into(), root: "/r".into() };
        Candidate { place, spec: Ok(json!({ "annotations": annotations })) }
    }

    fn pod() -> Vec<Candidate> {
        vec![
            candidate("sandbox", "sandbox", None),
            candidate("one", "container", Some("web")),
            candidate("two", "container", Some("log\u{1b}[2J")),
        ]
    }

    fn chosen(candidates: Vec<Candidate>, wanted: Option<&str>) -> Result<String, String> {
        let chosen = choose("p", true, candidates, wanted);
        chosen.map(|candidate| candidate.place.id).map_err(|error| error.to_string())
    }

    #[test]
    fn the_only_container_beside_the_sandbox_is_meant() {
        let mut one = pod();
        one.pop();
        assert_eq!(chosen(one, None), Ok("one".into()));
        let several = chosen(pod(), None).unwrap_err();
        assert!(several.contains("several containers: web (one), log [2J (two); name one with --container"));
        assert_eq!(chosen(pod(), Some("web")), Ok("one".into()));
        assert_eq!(chosen(pod(), Some("two")), Ok("two".into()));
        let none = chosen(pod(), Some("we")).unwrap_err();
        assert!(none.contains("no container we; it has web (one), log [2J (two)"), "{none}");
        let alone = chosen(vec![candidate("sandbox", "sandbox", None)], None).unwrap_err();
        assert!(alone.contains("no container: none was created"), "{alone}");
    }

    #[test]
    fn a_name_does_not_hide_the_id_of_another_container() {
        let two = vec![candidate("a", "container", Some("b")), candidate("b", "container", Some("a"))];
        assert_eq!(chosen(two, Some("b")), Ok("b".into()));
        let same = vec![candidate("a", "container", Some("n")), candidate("b", "container", Some("n"))];
        assert!(chosen(same, Some("n")).unwrap_err().contains("several containers"));
        // The annotation of a sandbox counts for the CRI only.
        let outside = choose("p", false, vec![candidate("a", "sandbox", None)], None).unwrap();
        assert_eq!(outside.place.id, "a");
        // One that cannot be read is no reason to refuse another.
        let mut damaged = pod();
        damaged[2].spec = Err(ExecError::NotRoot);
        assert_eq!(chosen(damaged, Some("web")), Ok("one".into()));
    }

    #[test]
    fn the_spec_is_a_file_of_the_bundle_itself() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = dir.path().join("bundle");
        fs::create_dir(&bundle).unwrap();
        assert!(read_spec(&bundle).unwrap_err().to_string().contains("config.json: cannot read the spec"));
        let elsewhere = dir.path().join("config.json");
        fs::write(&elsewhere, "{\"process\": {}}").unwrap();
        std::os::unix::fs::symlink(&elsewhere, bundle.join(CONFIG)).unwrap();
        assert!(read_spec(&bundle).is_err());
        fs::rename(&elsewhere, bundle.join(CONFIG)).unwrap();
        assert_eq!(read_spec(&bundle).unwrap(), json!({ "process": {} }));
    }

    #[test]
    fn a_pod_that_cannot_run_anything_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("c/ns/demo");
        fs::create_dir_all(&state).unwrap();
        let find = || {
            let options = crate::process::options(&["demo", "--", "true"]).unwrap();
            find(dir.path(), &options).map(drop).unwrap_err().to_string()
        };
        assert!(find().contains("it is made or removed at this moment"));
        let shim = "{\"effect\":\"shim\",\"pid\":4194304,\"start_time\":1}\n";
        fs::write(state.join("journal"), shim).unwrap();
        assert!(find().contains("the pod demo has crashed"));
        let gone = format!("{shim}{{\"effect\":\"bundle\",\"path\":\"/nonexistent\"}}\n");
        fs::write(state.join("journal"), gone).unwrap();
        assert!(find().contains("`bulkhead gc` removes it"));
    }
}
