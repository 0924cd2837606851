//! Where the shim of a pod answers, and where the files of its containers are. A guest can change none of these paths:
//! they are in journals, in the pod's state directory, which the guest does not see.

use std::path::{Path, PathBuf};

use crate::{
    host::{
        journal::{Journal, UndoError},
        state_dir::{self, CONTAINERS, JOURNAL},
    },
    operator::pods::{self, PodState},
};

/// A pod as a client of its shim needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodAddress {
    /// What is known of the pod.
    pub state: PodState,
    /// The pid of the shim. None: it does not live.
    pub shim_pid: Option<u32>,
    /// The shim's socket. None: the pod is being made, or it is no pod of a client.
    pub socket: Option<PathBuf>,
    /// Its containers, sorted by their ids.
    pub containers: Vec<ContainerPlace>,
}

/// A container on its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerPlace {
    /// Its id.
    pub id: String,
    /// The directory that its client has made, with config.json (OCI runtime-spec).
    pub bundle: PathBuf,
    /// Its root directory, whose files the guest can change. There is none if the root is on a disk.
    pub root: PathBuf,
}

/// The address of the pod with this state directory. The error says which journal cannot be read.
pub fn pod_address(pod: &Path) -> Result<PodAddress, PodAddressError> {
    let journal = Journal::look(&pod.join(JOURNAL))?;
    let (state, shim) = pods::state_of(pod, &journal);
    let mut containers = Vec::new();
    let share = state_dir::share_path(pod);
    for entry in std::fs::read_dir(pod.join(CONTAINERS)).into_iter().flatten().flatten() {
        // A container that is deleted at this moment has none any more.
        let Ok(journal) = Journal::look(&entry.path()) else { continue };
        if let (Ok(id), Some(bundle)) = (entry.file_name().into_string(), journal.bundle()) {
            let root = share.join(&id).join("rootfs");
            containers.push(ContainerPlace { id, bundle: bundle.into(), root });
        }
    }
    containers.sort_by(|one, other| one.id.cmp(&other.id));
    let socket = journal.shim_socket().map(Path::to_owned);
    Ok(PodAddress { state, shim_pid: shim.map(|shim| shim.pid), socket, containers })
}

/// Why the address of a pod is not known.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct PodAddressError(#[from] UndoError);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{
        journal::Effect,
        state_dir::{StateDir, container_journal},
    };

    #[test]
    fn a_pod_is_reached_by_what_its_journals_say() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock/k8s.io/pod");
        let missing = pod_address(&path).unwrap_err().to_string();
        assert!(missing.contains("cannot read the journal"), "{missing}");
        let owners = [Effect::ShimSocket { path: "/run/containerd/s/x".into() }];
        let (state, _journal) = StateDir::create(&path, &owners).unwrap();
        for id in ["two", "one"] {
            let bundle = Path::new("/bundles").join(id);
            container_journal(&path, id).unwrap().record(Effect::Bundle { path: bundle }).unwrap();
        }
        // One that is made at this moment has an empty journal.
        drop(container_journal(&path, "new").unwrap());
        let address = pod_address(&path).unwrap();
        assert_eq!((address.state, address.shim_pid), (PodState::Running, Some(std::process::id())));
        assert_eq!(address.socket.as_deref(), Some(Path::new("/run/containerd/s/x")));
        let ids: Vec<_> = address.containers.iter().map(|container| container.id.as_str()).collect();
        assert_eq!(ids, ["one", "two"]);
        assert_eq!(address.containers[0].bundle, Path::new("/bundles/one"));
        assert_eq!(address.containers[0].root, path.join("share/one/rootfs"));
        drop(state);
    }
}
