//! The pod of a containerd that makes no sandbox container: the CRI's own description of it, as the OCI spec that the
//! sandbox container would have had.

use std::{collections::HashMap, path::Path};

use containerd_shim_protos::sandbox_api::CreateSandboxRequest;
use protobuf::Message;
use serde_json::{Value, json};

use crate::{
    pod::{CONTAINER_TYPE, SANDBOX_ID, SANDBOX_MEMORY},
    request::{RequestError, unimplemented},
};

/// The messages.
#[allow(warnings, clippy::all)]
mod messages {
    include!(concat!(env!("OUT_DIR"), "/cri.rs"));
}

use messages::{NamespaceMode, NamespaceOption, PodSandboxConfig};

/// Of the options. containerd writes it without a host before the name.
const TYPE_NAME: &str = "runtime.v1.PodSandboxConfig";

/// As the pause image has it: nobody.
const PAUSE_USER: u32 = 65535;

/// The spec of the pod's pause.
pub(crate) fn pause_spec(request: &CreateSandboxRequest) -> Result<Vec<u8>, RequestError> {
    let config = config(request)?;
    let linux = config.linux.get_or_default();
    refuse(linux.security_context.get_or_default().namespace_options.get_or_default())?;
    let mut annotations: HashMap<&str, &str> = HashMap::new();
    for (key, value) in config.annotations.iter().chain(&request.annotations) {
        annotations.insert(key, value);
    }
    let memory = linux.resources.get_or_default().memory_limit_in_bytes.to_string();
    annotations.insert(CONTAINER_TYPE, "sandbox");
    annotations.insert(SANDBOX_ID, &request.sandbox_id);
    annotations.insert(SANDBOX_MEMORY, &memory);
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
            "sysctl": linux.sysctls,
            "cgroupsPath": cgroup(&linux.cgroup_parent, &request.sandbox_id)?,
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
    for (mode, name) in [(options.network, "hostNetwork"), (options.pid, "hostPID"), (options.ipc, "hostIPC")]
    {
        if mode == node {
            return Err(unimplemented(name, " in a microVM"));
        }
    }
    Ok(())
}

fn cgroup(parent: &str, id: &str) -> Result<String, RequestError> {
    if parent.ends_with(".slice") {
        return Err(unimplemented(
            format!("the cgroup parent {parent:?} of the systemd cgroup driver"),
            "; use the cgroupfs driver",
        ));
    }
    let parent = if parent.is_empty() { "/bulkhead" } else { parent };
    Ok(Path::new(parent).join(id).display().to_string())
}

#[cfg(test)]
mod tests {
    use protobuf::well_known_types::any::Any;

    use super::{
        messages::{LinuxPodSandboxConfig, LinuxSandboxSecurityContext},
        *,
    };

    fn request(change: impl FnOnce(&mut PodSandboxConfig)) -> CreateSandboxRequest {
        let mut config = PodSandboxConfig::new();
        config.hostname = "pod".into();
        let linux: &mut LinuxPodSandboxConfig = config.linux.mut_or_insert_default();
        linux.cgroup_parent = "/kubepods/pod1".into();
        linux.sysctls.insert("net.core.somaxconn".into(), "7".into());
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
        let spec: Value = serde_json::from_slice(&pause_spec(&request(|_| {})).unwrap()).unwrap();
        assert_eq!(spec["hostname"], "pod");
        assert_eq!(spec["linux"]["cgroupsPath"], "/kubepods/pod1/s");
        assert_eq!(spec["linux"]["sysctl"]["net.core.somaxconn"], "7");
        assert_eq!(spec["linux"]["namespaces"][5], json!({"type": "network", "path": "/run/netns/n"}));
        assert_eq!(spec["annotations"][CONTAINER_TYPE], "sandbox");
    }

    #[test]
    fn what_a_vm_cannot_share_is_refused_by_name() {
        let on_host = request(|config| {
            let context: &mut LinuxSandboxSecurityContext =
                config.linux.mut_or_insert_default().security_context.mut_or_insert_default();
            context.namespace_options.mut_or_insert_default().network = NamespaceMode::NODE.into();
        });
        let error = pause_spec(&on_host).unwrap_err().to_string();
        assert_eq!(error, "hostNetwork is not implemented in a microVM");
        let systemd =
            request(|config| config.linux.mut_or_insert_default().cgroup_parent = "kubepods-x.slice".into());
        assert!(pause_spec(&systemd).unwrap_err().to_string().contains("kubepods-x.slice"));
    }

    #[test]
    fn options_of_another_kind_are_named() {
        let mut other = request(|_| {});
        other.options.mut_or_insert_default().type_url = "types.containerd.io/x.Y".into();
        let error = pause_spec(&other).unwrap_err().to_string();
        assert!(error.contains("x.Y") && error.contains(TYPE_NAME), "{error}");
    }
}
