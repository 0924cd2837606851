//! What a container is in its pod, as the CRI's annotations and the namespaces of its spec say.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use oci_spec::runtime::{LinuxNamespace, LinuxNamespaceType};

use crate::types::{
    request_error::{RequestError, unimplemented},
    spec::Cpu,
};

/// containerd's namespace of the containers of its CRI plugin.
pub const CRI_NAMESPACE: &str = "k8s.io";

/// Of containerd's CRI plugin: `sandbox` or `container`.
pub const CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
/// The value of [`CONTAINER_TYPE`] of a pod's sandbox container.
pub const SANDBOX_TYPE: &str = "sandbox";
/// Of containerd's CRI plugin: the name of the container in its pod.
pub const CONTAINER_NAME: &str = "io.kubernetes.cri.container-name";
/// Of containerd's CRI plugin: the id of the pod's sandbox.
pub(crate) const SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";
/// Of containerd's CRI plugin, if it is not too old: the pod's UID, by which kubelet names its directory of the pod.
pub(crate) const SANDBOX_UID: &str = "io.kubernetes.cri.sandbox-uid";
/// Of containerd's CRI plugin, on a sandbox: the sum of the memory limits of the pod's containers, bytes.
pub(crate) const SANDBOX_MEMORY: &str = "io.kubernetes.cri.sandbox-memory";
/// Of containerd's CRI plugin, on a sandbox: the processor time that the pod's containers may use together,
/// microseconds.
pub(crate) const SANDBOX_CPU_QUOTA: &str = "io.kubernetes.cri.sandbox-cpu-quota";
/// Of containerd's CRI plugin, on a sandbox: in how many microseconds each.
pub(crate) const SANDBOX_CPU_PERIOD: &str = "io.kubernetes.cri.sandbox-cpu-period";

/// What a container is in its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Role {
    /// The only container, as ctr and docker run it.
    Single,
    /// The pod's sandbox container, which lives as long as the pod and has no program of its own.
    Sandbox,
    /// A container that runs in a pod with a sandbox container.
    Member { sandbox_id: String },
}

/// A namespace of another container that is to be joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Joined {
    /// As the spec names it.
    pub(crate) kind: &'static str,
    pub(crate) of: Owner,
}

/// The container that a namespace belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Owner {
    Pid(u32),
    /// The pod's sandbox container, by its id.
    Sandbox(String),
}

/// containerd's namespace of docker's containers.
const DOCKER: &str = "moby";

/// Whether a namespace is docker's. A daemon with `userns-remap` adds the user and the group that root is mapped to:
/// `moby-200000.200000`.
pub(crate) fn is_dockers(namespace: &str) -> bool {
    namespace.strip_prefix(DOCKER).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

impl Role {
    /// Reads the annotations of a container in this namespace of containerd. In a namespace other than that of the
    /// CRI plugin anybody may write such annotations, and they say nothing, as on runc.
    pub(crate) fn of(namespace: &str, annotations: &HashMap<String, String>) -> Result<Self, RequestError> {
        if namespace != CRI_NAMESPACE {
            return Ok(Role::Single);
        }
        let invalid = |field: &str, reason: String| RequestError::Invalid {
            field: format!("annotations[{field}]"),
            reason,
        };
        match annotations.get(CONTAINER_TYPE).map(String::as_str) {
            None => Ok(Role::Single),
            Some(SANDBOX_TYPE) => Ok(Role::Sandbox),
            Some("container") => match annotations.get(SANDBOX_ID) {
                Some(id) if !id.is_empty() => Ok(Role::Member { sandbox_id: id.clone() }),
                _ => Err(invalid(SANDBOX_ID, "is missing".into())),
            },
            Some(other) => {
                Err(invalid(CONTAINER_TYPE, format!("{other:?} is neither \"sandbox\" nor \"container\"")))
            }
        }
    }

    /// Whether a bind mount of the spec is the /dev/shm that containerd made for the pod on the host. The guest has its
    /// own.
    pub(crate) fn is_pod_shm(&self, destination: &Path, source: &Path) -> bool {
        match self {
            Role::Member { sandbox_id } => {
                destination == Path::new("/dev/shm") && source.ends_with(Path::new(sandbox_id).join("shm"))
            }
            Role::Single | Role::Sandbox => false,
        }
    }
}

/// The pod's UID in Kubernetes, if it is known.
pub(crate) fn pod_uid(annotations: &HashMap<String, String>) -> Option<&str> {
    annotations.get(SANDBOX_UID).map(String::as_str).filter(|uid| !uid.is_empty())
}

/// Bytes that the containers of the pod may use together. None: there is no limit, or the annotation is missing.
pub(crate) fn memory_limit(annotations: &HashMap<String, String>) -> Option<u64> {
    annotations.get(SANDBOX_MEMORY)?.parse().ok().filter(|limit| *limit > 0)
}

/// The processor time that the containers of the pod may use together, as [`Cpu::limit`].
pub(crate) fn cpu_limit(annotations: &HashMap<String, String>) -> Option<u64> {
    let period = annotations.get(SANDBOX_CPU_PERIOD).and_then(|period| period.parse().ok());
    let quota = annotations.get(SANDBOX_CPU_QUOTA)?.parse().ok();
    Cpu { quota, period, ..Cpu::default() }.limit()
}

/// The namespaces that the container `id` joins. A VM shares no namespace with its host or with containers of other
/// pods.
pub(crate) fn joined(
    role: &Role,
    id: &str,
    namespaces: &[LinuxNamespace],
) -> Result<Vec<Joined>, RequestError> {
    let with_path =
        namespaces.iter().filter_map(|namespace| Some((namespace.typ(), namespace.path().as_ref()?)));
    // The network namespace of a pod is the one that its VMM is in.
    let is_member = matches!(role, Role::Member { .. });
    let others = with_path.filter(|(kind, path)| {
        let is_of_pod = match kind {
            LinuxNamespaceType::Network => true,
            // The guest makes one with the same ids.
            LinuxNamespaceType::User => *role == Role::Sandbox && is_pinned(path, id),
            _ => false,
        };
        is_member || !is_of_pod
    });
    let joined = others.map(|(kind, path)| join(role, kind, path)).collect::<Result<_, _>>()?;
    refuse_missing(role, namespaces)?;
    Ok(joined)
}

/// The field of a pod's manifest that asks for the host's network, and what to use instead. So the next two.
pub(crate) const HOST_NETWORK: (&str, &str) =
    ("hostNetwork: true", " in a microVM; use a Service or hostPort, or runc for this pod");
pub(crate) const HOST_PID: (&str, &str) =
    ("hostPID: true", " in a microVM; use shareProcessNamespace: true, or runc for this pod");
pub(crate) const HOST_IPC: (&str, &str) =
    ("hostIPC: true", " in a microVM; use the pod's own ipc namespace, or runc for this pod");

/// Refuses a spec that lacks a namespace, because the container would then use the host's. The error uses the words of
/// the client: those of a pod's manifest, or of ctr.
fn refuse_missing(role: &Role, namespaces: &[LinuxNamespace]) -> Result<(), RequestError> {
    for (kind, in_pod, hint) in [
        (LinuxNamespaceType::Network, Some(HOST_NETWORK), " in a microVM; run without --net-host"),
        (LinuxNamespaceType::Pid, Some(HOST_PID), " in a microVM; ask for a pid namespace"),
        (LinuxNamespaceType::Ipc, Some(HOST_IPC), " in a microVM; ask for an ipc namespace"),
        (LinuxNamespaceType::Uts, Some(HOST_NETWORK), " in a microVM; ask for a uts namespace"),
        (LinuxNamespaceType::Mount, None, " in a microVM; ask for a mount namespace"),
    ] {
        if namespaces.iter().any(|namespace| namespace.typ() == kind) {
            continue;
        }
        if *role != Role::Single
            && let Some((what, hint)) = in_pod
        {
            return Err(unimplemented(what, hint));
        }
        let what = format!("the host's {} namespace (linux.namespaces has none of its own)", name_of(kind));
        return Err(unimplemented(what, hint));
    }
    Ok(())
}

/// The network namespace of the host that the pod's VMM is to be in; None: a new one.
pub(crate) fn netns(role: &Role, namespaces: &[LinuxNamespace]) -> Option<PathBuf> {
    if matches!(role, Role::Member { .. }) {
        return None;
    }
    let network = namespaces.iter().find(|namespace| namespace.typ() == LinuxNamespaceType::Network)?;
    network.path().clone().filter(|path| !path.as_os_str().is_empty())
}

fn join(role: &Role, kind: LinuxNamespaceType, path: &Path) -> Result<Joined, RequestError> {
    let name = match kind {
        LinuxNamespaceType::Network => "net",
        LinuxNamespaceType::Pid => "pid",
        LinuxNamespaceType::Ipc => "ipc",
        LinuxNamespaceType::Uts => "uts",
        LinuxNamespaceType::User => "user",
        _ => "",
    };
    let of = match (role, pid_of(path)) {
        (Role::Member { .. }, Some((pid, file))) if file == name => Some(Owner::Pid(pid)),
        (Role::Member { sandbox_id }, None)
            if kind == LinuxNamespaceType::User && is_pinned(path, sandbox_id) =>
        {
            Some(Owner::Sandbox(sandbox_id.clone()))
        }
        _ => None,
    };
    of.map(|of| Joined { kind: name_of(kind), of }).ok_or_else(|| {
        let what = format!("joining the {} namespace {} (linux.namespaces)", name_of(kind), path.display());
        unimplemented(what, "")
    })
}

/// Whether this is the user namespace that containerd 2 has made on the host for the pod of this sandbox.
fn is_pinned(path: &Path, sandbox_id: &str) -> bool {
    path.ends_with(Path::new(sandbox_id).join("pinned-namespaces/user"))
}

/// Parses `/proc/PID/ns/FILE`.
fn pid_of(path: &Path) -> Option<(u32, &str)> {
    let (pid, file) = path.to_str()?.strip_prefix("/proc/")?.split_once("/ns/")?;
    Some((pid.parse().ok()?, file))
}

/// As the spec writes it.
fn name_of(kind: LinuxNamespaceType) -> &'static str {
    match kind {
        LinuxNamespaceType::Mount => "mount",
        LinuxNamespaceType::Cgroup => "cgroup",
        LinuxNamespaceType::Uts => "uts",
        LinuxNamespaceType::Ipc => "ipc",
        LinuxNamespaceType::User => "user",
        LinuxNamespaceType::Pid => "pid",
        LinuxNamespaceType::Network => "network",
        LinuxNamespaceType::Time => "time",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::is_on_troubleshooting_page;

    #[test]
    fn docker_has_a_namespace_for_each_user_that_its_root_is_mapped_to() {
        assert!(is_dockers("moby") && is_dockers("moby-200000.200000"));
        assert!(!is_dockers("default") && !is_dockers("k8s.io") && !is_dockers("mobydick"));
    }

    fn role(annotations: &[(&str, &str)]) -> Result<Role, RequestError> {
        Role::of(
            CRI_NAMESPACE,
            &annotations.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
        )
    }

    fn namespaces(network: &str, pid: Option<&str>) -> Vec<LinuxNamespace> {
        let mut list = json!([{"type": "mount"}, {"type": "network", "path": network},
            {"type": "ipc", "path": "/proc/42/ns/ipc"}, {"type": "uts", "path": "/proc/42/ns/uts"}, {"type": "pid"}]);
        if let Some(path) = pid {
            list[4]["path"] = path.into();
        }
        serde_json::from_value(list).unwrap()
    }

    #[test]
    fn containerds_annotations_say_what_a_container_is() {
        assert_eq!(role(&[]).unwrap(), Role::Single);
        assert_eq!(role(&[(CONTAINER_TYPE, "sandbox")]).unwrap(), Role::Sandbox);
        let member = role(&[(CONTAINER_TYPE, "container"), (SANDBOX_ID, "s")]).unwrap();
        assert_eq!(member, Role::Member { sandbox_id: "s".into() });
        assert!(role(&[(CONTAINER_TYPE, "container")]).unwrap_err().to_string().contains(SANDBOX_ID));
        assert!(role(&[(CONTAINER_TYPE, "vm")]).unwrap_err().to_string().contains("\"vm\""));
    }

    #[test]
    fn annotations_of_others_make_no_pod() {
        for (kind, id) in [("sandbox", "s"), ("container", "s"), ("vm", "")] {
            let annotations = [(CONTAINER_TYPE.into(), kind.into()), (SANDBOX_ID.into(), id.into())].into();
            assert_eq!(Role::of("moby", &annotations).unwrap(), Role::Single);
        }
    }

    #[test]
    fn the_annotations_of_a_sandbox_limit_its_processor_time() {
        let limit = |quota: &str, period: &str| {
            let of = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
            cpu_limit(&[(SANDBOX_CPU_QUOTA, quota), (SANDBOX_CPU_PERIOD, period)].map(of).into())
        };
        assert_eq!(limit("150000", "100000"), Some(1_500_000));
        assert_eq!(limit("150000", "0"), Some(1_500_000));
        assert_eq!((limit("0", "100000"), limit("-1", "100000"), limit("", "")), (None, None, None));
        assert_eq!(cpu_limit(&HashMap::new()), None);
    }

    #[test]
    fn a_member_joins_what_it_is_told_to() {
        let member = Role::Member { sandbox_id: "s".into() };
        let found = joined(&member, "c", &namespaces("/proc/42/ns/net", None)).unwrap();
        let expected = ["network", "ipc", "uts"].map(|kind| Joined { kind, of: Owner::Pid(42) });
        assert_eq!(found, expected);
        let found = joined(&member, "c", &namespaces("/proc/42/ns/net", Some("/proc/43/ns/pid"))).unwrap();
        assert_eq!(found.last(), Some(&Joined { kind: "pid", of: Owner::Pid(43) }));
    }

    #[test]
    fn the_user_namespace_that_containerd_has_made_for_a_pod_is_one_of_the_guest() {
        let with_users = |path: &str| -> Vec<LinuxNamespace> {
            let mut list = serde_json::to_value(namespaces("/run/netns/x", None)).unwrap();
            list[2] = json!({"type": "ipc"});
            list[3] = json!({"type": "uts"});
            list[1] = json!({"type": "network"});
            list.as_array_mut().unwrap().push(json!({"type": "user", "path": path}));
            serde_json::from_value(list).unwrap()
        };
        let own = with_users("/run/containerd/sandboxes/s/pinned-namespaces/user");
        assert_eq!(joined(&Role::Sandbox, "s", &own).unwrap(), []);
        let member = Role::Member { sandbox_id: "s".into() };
        let users = Joined { kind: "user", of: Owner::Sandbox("s".into()) };
        assert_eq!(joined(&member, "c", &own).unwrap(), [users]);
        // That of another pod, and one of the host.
        let others = with_users("/run/containerd/sandboxes/t/pinned-namespaces/user");
        for namespaces in [others, with_users("/proc/1/ns/user")] {
            assert!(joined(&Role::Sandbox, "s", &namespaces).is_err());
        }
        assert!(joined(&Role::Single, "s", &own).is_err());
        assert!(joined(&member, "c", &with_users("/run/t/pinned-namespaces/user")).is_err());
    }

    #[test]
    fn what_is_no_namespace_of_the_pod_is_refused() {
        let member = Role::Member { sandbox_id: "s".into() };
        for path in ["/proc/42/ns/ipc", "/proc/x/ns/net", "/proc/42/net", "/run/netns/x"] {
            let error = joined(&member, "c", &namespaces(path, None)).unwrap_err().to_string();
            assert!(error.contains(&format!("joining the network namespace {path}")), "{error}");
        }
        assert!(joined(&Role::Single, "c", &namespaces("/proc/42/ns/net", None)).is_err());
    }

    #[test]
    fn a_namespace_of_the_host_is_refused_in_the_words_of_who_asks() {
        let without_network = &namespaces("/run/netns/x", None)[2..];
        let error = |role| refuse_missing(&role, without_network).unwrap_err().to_string();
        let expected = "hostNetwork: true is not implemented in a microVM; use a Service or hostPort, or runc for this pod";
        assert_eq!(error(Role::Sandbox), expected);
        assert!(error(Role::Single).ends_with("in a microVM; run without --net-host"));
        for (kind, word) in [(LinuxNamespaceType::Pid, "hostPID"), (LinuxNamespaceType::Ipc, "hostIPC")] {
            let mut others = namespaces("/run/netns/x", None);
            others.retain(|namespace| namespace.typ() != kind);
            let error = refuse_missing(&Role::Sandbox, &others).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{word}: true is not implemented in a microVM; use ")),
                "{error}"
            );
            assert!(is_on_troubleshooting_page(&error));
        }
        assert!(is_on_troubleshooting_page(&error(Role::Sandbox)));
    }

    #[test]
    fn the_vmm_is_in_the_network_namespace_of_its_sandbox() {
        let network = &namespaces("/run/netns/x", None)[1..2];
        assert_eq!(netns(&Role::Sandbox, network), Some("/run/netns/x".into()));
        assert_eq!(netns(&Role::Single, network), Some("/run/netns/x".into()));
        assert_eq!(netns(&Role::Member { sandbox_id: "s".into() }, network), None);
    }

    #[test]
    fn the_pods_shared_memory_is_the_guests() {
        let member = Role::Member { sandbox_id: "s".into() };
        let shm = Path::new("/dev/shm");
        assert!(
            member.is_pod_shm(shm, Path::new("/run/containerd/io.containerd.grpc.v1.cri/sandboxes/s/shm"))
        );
        assert!(
            !member.is_pod_shm(shm, Path::new("/var/lib/kubelet/pods/p/volumes/kubernetes.io~empty-dir/shm"))
        );
        assert!(!member.is_pod_shm(Path::new("/data"), Path::new("/sandboxes/s/shm")));
    }
}
