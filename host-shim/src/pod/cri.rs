//! Translates the CRI's description of a pod, for a containerd that makes no sandbox container, into the OCI spec of
//! a sandbox container and the contents of the pod's files.

use std::{collections::HashMap, path::Path};

use bulkhead_agent_api::HUGE_PAGE_SIZE;
use containerd_shim_protos::sandbox_api::CreateSandboxRequest;
use protobuf::Message;
use serde_json::{Value, json};

use crate::{
    pod::container_role::{
        CONTAINER_TYPE, HOST_IPC, HOST_NETWORK, HOST_PID, SANDBOX_CPU_PERIOD, SANDBOX_CPU_QUOTA, SANDBOX_ID,
        SANDBOX_MEMORY,
    },
    pod::huge_pages,
    types::request_error::{RequestError, unimplemented},
};

/// The messages.
#[allow(warnings, clippy::all)]
mod messages {
    include!(concat!(env!("OUT_DIR"), "/cri.rs"));
}

use messages::{DNSConfig, LinuxContainerResources, NamespaceMode, NamespaceOption, PodSandboxConfig};

/// The type of the options. containerd writes it without a host name before it.
const TYPE_NAME: &str = "runtime.v1.PodSandboxConfig";

/// The user of the pause image: nobody.
const PAUSE_USER: u32 = 65535;

/// Sysctls that containerd's CRI plugin sets by default (enable_unprivileged_ports, enable_unprivileged_icmp). It
/// does not pass these two options to the shim.
const SYSCTLS: [(&str, &str); 2] =
    [("net.ipv4.ip_unprivileged_port_start", "0"), ("net.ipv4.ping_group_range", "0 2147483647")];

/// A pod, as the Sandbox service gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SandboxConfig {
    /// The OCI spec of its sandbox container.
    pub(crate) spec: Vec<u8>,
    /// /etc/resolv.conf of its containers. None: the host's.
    pub(crate) resolv_conf: Option<String>,
}

impl SandboxConfig {
    /// Reads the request.
    pub(crate) fn read(request: &CreateSandboxRequest) -> Result<Self, RequestError> {
        let config = config(request)?;
        let resolv_conf = config.dns_config.as_ref().map(resolv_conf);
        Ok(Self { spec: pause_spec(request, config)?, resolv_conf })
    }
}

fn pause_spec(request: &CreateSandboxRequest, config: PodSandboxConfig) -> Result<Vec<u8>, RequestError> {
    let linux = config.linux.get_or_default();
    refuse(linux.security_context.get_or_default().namespace_options.get_or_default())?;
    let mut annotations: HashMap<&str, &str> = HashMap::new();
    for (key, value) in config.annotations.iter().chain(&request.annotations) {
        annotations.insert(key, value);
    }
    let resources = linux.resources.get_or_default();
    refuse_huge_pages(resources)?;
    let [memory, quota, period] =
        [resources.memory_limit_in_bytes, resources.cpu_quota, resources.cpu_period].map(|n| n.to_string());
    annotations.insert(CONTAINER_TYPE, "sandbox");
    annotations.insert(SANDBOX_ID, &request.sandbox_id);
    annotations.insert(SANDBOX_MEMORY, &memory);
    annotations.insert(SANDBOX_CPU_QUOTA, &quota);
    annotations.insert(SANDBOX_CPU_PERIOD, &period);
    let mut sysctls: HashMap<&str, &str> = SYSCTLS.into();
    sysctls.extend(linux.sysctls.iter().map(|(key, value)| (key.as_str(), value.as_str())));
    let mut network = json!({"type": "network"});
    if !request.netns_path.is_empty() {
        network["path"] = request.netns_path.clone().into();
    }
    let mut spec = json!({
        "ociVersion": "1.1.0",
        "process": {
            "user": {"uid": PAUSE_USER, "gid": PAUSE_USER},
            "args": ["/pause"],
            "cwd": "/",
            "noNewPrivileges": true,
        },
        "annotations": annotations,
        "linux": {
            "namespaces": [
                {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "cgroup"}, network,
            ],
            "sysctl": sysctls,
            "resources": {"hugepageLimits": huge_page_limits(resources)},
            "cgroupsPath": cgroup(&linux.cgroup_parent, &request.sandbox_id),
        },
    });
    if !config.hostname.is_empty() {
        spec["hostname"] = Value::String(config.hostname);
    }
    serde_json::to_vec(&spec)
        .map_err(|source| RequestError::Parse { path: request.bundle_path.clone().into(), source })
}

fn config(request: &CreateSandboxRequest) -> Result<PodSandboxConfig, RequestError> {
    let Some(options) = request.options.as_ref() else { return Ok(PodSandboxConfig::new()) };
    let invalid = |reason: String| RequestError::Invalid { field: "options of the sandbox".into(), reason };
    let name = options.type_url.rsplit('/').next().unwrap_or_default();
    if name != TYPE_NAME {
        return Err(invalid(format!("{:?} is not {TYPE_NAME}", options.type_url)));
    }
    PodSandboxConfig::parse_from_bytes(&options.value).map_err(|e| invalid(e.to_string()))
}

/// A VM shares no namespace with its host.
fn refuse(options: &NamespaceOption) -> Result<(), RequestError> {
    let node = NamespaceMode::NODE.into();
    for (mode, (what, hint)) in
        [(options.network, HOST_NETWORK), (options.pid, HOST_PID), (options.ipc, HOST_IPC)]
    {
        if mode == node {
            return Err(unimplemented(what, hint));
        }
    }
    if options.userns_options.as_ref().is_some_and(|userns| userns.mode != node) {
        return Err(unimplemented("a user namespace (hostUsers: false)", " in a microVM"));
    }
    Ok(())
}

/// Refuses limits of huge pages of a size that the guest lacks. The error has the name of the field in the CRI.
fn refuse_huge_pages(resources: &LinuxContainerResources) -> Result<(), RequestError> {
    let limits = resources.hugepage_limits.iter().filter(|limit| limit.limit > 0);
    if let Some(limit) = limits.map(|limit| &limit.page_size).find(|size| *size != HUGE_PAGE_SIZE) {
        return Err(huge_pages::unknown_size(format!("linux.resources.hugepage_limits[{limit}] of the pod")));
    }
    let files = resources.unified.iter().filter(|(_, value)| !matches!(value.as_str(), "0" | "max"));
    match files.map(|(file, _)| file).find(|file| file.starts_with("hugetlb.")) {
        Some(file) => Err(unimplemented(
            format!("linux.resources.unified[{file}] of the pod"),
            ": hugepage_limits sets the pages aside too",
        )),
        None => Ok(()),
    }
}

fn huge_page_limits(resources: &LinuxContainerResources) -> Vec<Value> {
    let limits = resources.hugepage_limits.iter().filter(|limit| limit.page_size == HUGE_PAGE_SIZE);
    limits.map(|limit| json!({"pageSize": limit.page_size, "limit": limit.limit})).collect()
}

/// As containerd writes it (resolv.conf(5)).
fn resolv_conf(config: &DNSConfig) -> String {
    let mut text = String::new();
    if !config.searches.is_empty() {
        text += &format!("search {}\n", config.searches.join(" "));
    }
    for server in &config.servers {
        text += &format!("nameserver {server}\n");
    }
    if !config.options.is_empty() {
        text += &format!("options {}\n", config.options.join(" "));
    }
    text
}

/// The cgroup path in containerd's form. With kubelet's systemd cgroup driver it has the form slice:prefix:name.
fn cgroup(parent: &str, id: &str) -> String {
    let slice = parent.rsplit('/').next().filter(|name| name.ends_with(".slice"));
    if let Some(slice) = slice {
        return format!("{slice}:cri-containerd:{id}");
    }
    let parent = if parent.is_empty() { "/bulkhead" } else { parent };
    Path::new(parent).join(id).display().to_string()
}

#[cfg(test)]
mod tests {
    use protobuf::well_known_types::any::Any;

    use super::{
        messages::{HugepageLimit, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, UserNamespace},
        *,
    };

    fn request(change: impl FnOnce(&mut PodSandboxConfig)) -> CreateSandboxRequest {
        let mut config = PodSandboxConfig::new();
        config.hostname = "pod".into();
        let linux: &mut LinuxPodSandboxConfig = config.linux.mut_or_insert_default();
        linux.cgroup_parent = "/kubepods/pod1".into();
        linux.sysctls.insert("net.core.somaxconn".into(), "7".into());
        linux.sysctls.insert("net.ipv4.ip_unprivileged_port_start".into(), "1024".into());
        change(&mut config);
        let mut options = Any::new();
        options.type_url = TYPE_NAME.into();
        options.value = config.write_to_bytes().unwrap();
        let mut request = CreateSandboxRequest::new();
        request.sandbox_id = "s".into();
        request.netns_path = "/run/netns/n".into();
        request.options = Some(options).into();
        request
    }

    #[test]
    fn the_pod_is_as_the_cri_describes_it() {
        let pod = SandboxConfig::read(&request(|_| {})).unwrap();
        assert_eq!(pod.resolv_conf, None);
        let spec: Value = serde_json::from_slice(&pod.spec).unwrap();
        assert_eq!(spec["hostname"], "pod");
        assert_eq!(spec["linux"]["cgroupsPath"], "/kubepods/pod1/s");
        assert_eq!(spec["linux"]["sysctl"]["net.core.somaxconn"], "7");
        assert_eq!(spec["linux"]["sysctl"]["net.ipv4.ip_unprivileged_port_start"], "1024");
        assert_eq!(spec["linux"]["sysctl"]["net.ipv4.ping_group_range"], "0 2147483647");
        assert_eq!(spec["linux"]["namespaces"][5], json!({"type": "network", "path": "/run/netns/n"}));
        assert_eq!(spec["annotations"][CONTAINER_TYPE], "sandbox");
    }

    #[test]
    fn the_resolvers_file_is_the_pods() {
        let pod = |change: fn(&mut DNSConfig)| {
            SandboxConfig::read(&request(|config| change(config.dns_config.mut_or_insert_default()))).unwrap()
        };
        let all = pod(|dns| {
            dns.servers = vec!["10.0.0.10".into(), "fd00::10".into()];
            dns.searches = vec!["e2e.svc".into(), "svc".into()];
            dns.options = vec!["ndots:5".into()];
        });
        let expected = "search e2e.svc svc\nnameserver 10.0.0.10\nnameserver fd00::10\noptions ndots:5\n";
        assert_eq!(all.resolv_conf.as_deref(), Some(expected));
        assert_eq!(pod(|_| {}).resolv_conf.as_deref(), Some(""));
    }

    #[test]
    fn the_cgroup_is_below_that_of_the_pod() {
        assert_eq!(cgroup("", "s"), "/bulkhead/s");
        assert_eq!(cgroup("/kubepods/pod1", "s"), "/kubepods/pod1/s");
        for parent in ["kubepods-x.slice", "/kubepods.slice/kubepods-x.slice"] {
            assert_eq!(cgroup(parent, "s"), "kubepods-x.slice:cri-containerd:s");
        }
    }

    #[test]
    fn what_a_vm_cannot_share_is_refused_by_name() {
        let on_host = request(|config| {
            let context: &mut LinuxSandboxSecurityContext =
                config.linux.mut_or_insert_default().security_context.mut_or_insert_default();
            context.namespace_options.mut_or_insert_default().network = NamespaceMode::NODE.into();
        });
        let error = SandboxConfig::read(&on_host).unwrap_err().to_string();
        assert!(error.starts_with("hostNetwork: true is not implemented in a microVM; use "), "{error}");
        let with_users = request(|config| {
            let context: &mut LinuxSandboxSecurityContext =
                config.linux.mut_or_insert_default().security_context.mut_or_insert_default();
            let options = context.namespace_options.mut_or_insert_default();
            options.userns_options = Some(UserNamespace::new()).into();
        });
        assert!(SandboxConfig::read(&with_users).unwrap_err().to_string().starts_with("a user namespace"));
    }

    #[test]
    fn huge_pages_of_the_pod_are_its_sandboxs_or_are_refused_by_name() {
        let of = |size: &str, bytes: u64| {
            SandboxConfig::read(&request(|config| {
                let mut limit = HugepageLimit::new();
                (limit.page_size, limit.limit) = (size.into(), bytes);
                config.linux.mut_or_insert_default().resources.mut_or_insert_default().hugepage_limits =
                    vec![limit];
            }))
        };
        let limits = |size: &str, bytes: u64| {
            let spec: Value = serde_json::from_slice(&of(size, bytes).unwrap().spec).unwrap();
            spec["linux"]["resources"]["hugepageLimits"].clone()
        };
        assert_eq!(limits("2MB", 4 << 20), json!([{"pageSize": "2MB", "limit": 4 << 20}]));
        assert_eq!(limits("1GB", 0), json!([]));
        let error = of("1GB", 1 << 30).unwrap_err().to_string();
        assert!(
            error.starts_with("linux.resources.hugepage_limits[1GB] of the pod is not implemented"),
            "{error}"
        );
        let unified = |value: &str| {
            SandboxConfig::read(&request(|config| {
                let resources = config.linux.mut_or_insert_default().resources.mut_or_insert_default();
                resources.unified.insert("hugetlb.1GB.max".into(), value.into());
            }))
        };
        assert!(unified("max").is_ok());
        let error = unified("1073741824").unwrap_err().to_string();
        assert!(error.starts_with("linux.resources.unified[hugetlb.1GB.max] of the pod"), "{error}");
    }

    #[test]
    fn options_of_another_kind_are_named() {
        let mut other = request(|_| {});
        other.options.mut_or_insert_default().type_url = "types.containerd.io/x.Y".into();
        let error = SandboxConfig::read(&other).unwrap_err().to_string();
        assert!(error.contains("x.Y") && error.contains(TYPE_NAME), "{error}");
    }
}
