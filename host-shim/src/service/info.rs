//! `-info`: what containerd 2 and its clients ask of a runtime before they use it.

use bulkhead_agent_api::features::{
    CAPABILITIES, MOUNT_OPTIONS, NAMESPACES, OCI_VERSIONS, SECCOMP_ACTIONS, SECCOMP_ARCHS, SECCOMP_FLAGS,
    SECCOMP_KNOWN_FLAGS, SECCOMP_OPERATORS,
};
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};

use crate::types::build;

const NAME: &str = "io.containerd.bulkhead.v2";

/// The type of the features structure of the OCI runtime-spec, for containerd.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// The hooks that the shim runs on the host.
const HOOKS: [&str; 4] = ["prestart", "createRuntime", "poststart", "poststop"];

/// Describes the runtime.
pub(crate) fn info() -> RuntimeInfo {
    let mut version = RuntimeVersion::new();
    version.version = build::VERSION.into();
    version.revision = build::COMMIT.into();
    let mut described = Any::new();
    described.type_url = FEATURES.into();
    described.value = features().to_string().into_bytes();
    let mut info = RuntimeInfo::new();
    info.name = NAME.into();
    info.version = Some(version).into();
    info.features = Some(described).into();
    info
}

/// The features structure (OCI runtime-spec, features.md, features-linux.md).
fn features() -> Value {
    let (oldest, newest) = OCI_VERSIONS;
    let absent = json!({"enabled": false});
    json!({
        "ociVersionMin": oldest,
        "ociVersionMax": newest,
        "hooks": HOOKS,
        "mountOptions": MOUNT_OPTIONS,
        "linux": {
            "namespaces": NAMESPACES,
            "capabilities": CAPABILITIES,
            // This describes the guest, not the host.
            "cgroup": {"v1": false, "v2": true, "systemd": false, "systemdUser": false, "rdma": false},
            "seccomp": {
                "enabled": true,
                "actions": SECCOMP_ACTIONS,
                "operators": SECCOMP_OPERATORS,
                "archs": SECCOMP_ARCHS,
                "knownFlags": SECCOMP_KNOWN_FLAGS,
                "supportedFlags": SECCOMP_FLAGS,
            },
            "apparmor": {"enabled": true},
            "selinux": absent,
            "intelRdt": absent,
            "mountExtensions": {"idmap": {"enabled": true}},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containerd_learns_that_mounts_can_be_read_only_recursively() {
        let info = info();
        assert_eq!((info.name.as_str(), info.features.type_url.as_str()), (NAME, FEATURES));
        let features: Value = serde_json::from_slice(&info.features.value).unwrap();
        let options = features["mountOptions"].as_array().unwrap();
        assert!(options.contains(&json!("rro")) && options.contains(&json!("rbind")));
        // Without these two it runs no pod with user namespaces.
        assert_eq!(features["linux"]["mountExtensions"]["idmap"]["enabled"], true);
        assert!(features["linux"]["namespaces"].as_array().unwrap().contains(&json!("user")));
    }
}
