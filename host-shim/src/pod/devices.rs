//! The device nodes of a spec. A node names a device by the numbers of the host, and the guest's kernel has few
//! devices.

use bulkhead_agent_api::devices::{DEVICES, Kind};
use serde_json::Value;

use crate::types::{
    request_error::{RequestError, unimplemented},
    spec::{Device, DeviceRule, Linux},
};

/// /dev/kvm (admin-guide/devices.txt).
const KVM: (i64, i64) = (10, 232);

/// Refuses a node of a device that the guest lacks. A privileged container gets all nodes of its host without having
/// asked for any of them, so there they are left out of `document`, the spec.
pub(super) fn fit(document: &mut Value, linux: &Linux) -> Result<(), RequestError> {
    let devices = linux.devices.as_deref().unwrap_or_default();
    let Some(missing) = devices.iter().find(|device| !is_in_guest(device)) else { return Ok(()) };
    if !is_privileged(linux.resources.devices.as_deref().unwrap_or_default()) {
        return Err(refusal(missing));
    }
    let Some(nodes) = document.pointer_mut("/linux/devices").and_then(Value::as_array_mut) else {
        return Ok(());
    };
    let mut devices = devices.iter();
    nodes.retain(|_| devices.next().is_none_or(is_in_guest));
    tracing::info!(left = nodes.len(), "a privileged container gets the device nodes that the guest has");
    Ok(())
}

fn is_in_guest(device: &Device) -> bool {
    let has = |kind| {
        let numbers = device.numbers();
        DEVICES.iter().any(|it| it.kind == kind && numbers == (it.major.into(), it.minor.into()))
    };
    match device.kind.as_str() {
        "c" | "u" => has(Kind::Char),
        "b" => has(Kind::Block),
        // A FIFO needs no device. The agent refuses what is no type.
        _ => true,
    }
}

/// Whether the rules are those of a privileged container: the last one about all devices allows everything.
fn is_privileged(rules: &[DeviceRule]) -> bool {
    let is_about_all = |rule: &&DeviceRule| {
        let is_all = |number: Option<i64>| number.is_none_or(|number| number < 0);
        // A rule without access is about every access.
        let access = rule.access.as_deref().filter(|access| !access.is_empty()).unwrap_or("rwm");
        matches!(rule.kind.as_deref(), None | Some("" | "a"))
            && is_all(rule.major)
            && is_all(rule.minor)
            && ['r', 'w', 'm'].iter().all(|letter| access.contains(*letter))
    };
    rules.iter().rev().find(is_about_all).is_some_and(|rule| rule.allow)
}

fn refusal(device: &Device) -> RequestError {
    let (major, minor) = device.numbers();
    let (kind, hint) = match device.kind.as_str() {
        "b" => (
            "block device",
            ": the guest does not have the block devices of the host; mount the file system on the host, and give \
             the container a volume",
        ),
        _ if device.numbers() == KVM => {
            ("character device", ": the guest cannot run VMs; use runc for this container")
        }
        _ => (
            "character device",
            ": the guest's kernel does not have this device (docs/operations.md lists those that it has); use runc \
             for this container",
        ),
    };
    unimplemented(format!("linux.devices[{}] ({kind} {major}:{minor})", device.path.display()), hint)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The paths of the nodes that the agent gets.
    fn nodes(devices: Value, rules: Value) -> Result<Vec<String>, String> {
        let mut document = json!({"linux": {"devices": devices, "resources": {"devices": rules}}});
        let linux: Linux = serde_json::from_value(document["linux"].clone()).unwrap();
        fit(&mut document, &linux).map_err(|error| error.to_string())?;
        let nodes = document["linux"]["devices"].as_array().cloned().unwrap_or_default();
        Ok(nodes.iter().map(|node| node["path"].as_str().unwrap().to_owned()).collect())
    }

    fn node(path: &str, kind: &str, major: i64, minor: i64) -> Value {
        json!({"path": path, "type": kind, "major": major, "minor": minor, "fileMode": 432})
    }

    fn confined() -> Value {
        json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 10, "minor": 232, "access": "rwm"},
        ])
    }

    #[test]
    fn a_device_that_the_guest_lacks_is_refused_by_name() {
        for (path, kind, major, minor, expected) in [
            (
                "/dev/kvm",
                "c",
                10,
                232,
                "(character device 10:232) is not implemented: the guest cannot run VMs",
            ),
            (
                "/dev/xvda",
                "b",
                202,
                0,
                "(block device 202:0) is not implemented: the guest does not have the block devices of the host",
            ),
            ("/dev/nvidia0", "c", 195, 0, "the guest's kernel does not have this device"),
            ("/dev/ttyS0", "u", 4, 64, "the guest's kernel does not have this device"),
            // The numbers of a character device.
            ("/dev/fuse", "b", 10, 229, "(block device 10:229)"),
        ] {
            let error = nodes(json!([node(path, kind, major, minor)]), confined()).unwrap_err();
            assert!(error.starts_with(&format!("linux.devices[{path}]")), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_device_that_the_guest_has_stays_whatever_its_name() {
        let devices = json!([
            node("/dev/fuse", "c", 10, 229),
            node("/dev/tunnel", "c", 10, 200),
            node("/dev/loop0", "b", 7, 0),
            node("/pipe", "p", 0, 0),
        ]);
        assert_eq!(nodes(devices, confined()).unwrap(), ["/dev/fuse", "/dev/tunnel", "/dev/loop0", "/pipe"]);
        assert_eq!(nodes(Value::Null, Value::Null).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_privileged_container_gets_the_devices_that_the_guest_has() {
        let devices = || {
            json!([
                node("/dev/kvm", "c", 10, 232),
                node("/dev/fuse", "c", 10, 229),
                node("/dev/sda", "b", 8, 0),
                node("/dev/null", "c", 1, 3),
            ])
        };
        for allowed in [
            json!([{"allow": true, "access": "rwm"}]),
            json!([{"allow": false, "access": "rwm"}, {"allow": true, "type": "a", "major": -1, "minor": -1}]),
        ] {
            assert_eq!(nodes(devices(), allowed).unwrap(), ["/dev/fuse", "/dev/null"]);
        }
        for confined in [
            json!([{"allow": true, "access": "rwm"}, {"allow": false, "access": "rwm"}]),
            json!([{"allow": true, "access": "rw"}]),
            json!([{"allow": true, "type": "c", "access": "rwm"}]),
            json!([{"allow": true, "type": "a", "major": 10, "access": "rwm"}]),
            json!([]),
        ] {
            assert!(nodes(devices(), confined).unwrap_err().starts_with("linux.devices[/dev/kvm]"));
        }
    }
}
