//! Limits on block devices (`linux.resources.blockIO`, and files of the io controller in `unified`). The VMM reads and
//! writes what its guest asks for, so the limits of a container that has a VM of its own are those of the pod's cgroup
//! on the host. A VM has no limits for each of several containers: the agent refuses those of a pod.

use std::io;

use serde_json::Value;

use crate::{
    host::{
        block_device::BlockDevice,
        cgroup_io::{self, IoLimit, LEAST_WEIGHT, Limit, MOST_WEIGHT, Numbers, Rate},
    },
    types::{
        block_io::BlockIo,
        request_error::{RequestError, invalid, unimplemented},
        spec::Resources,
    },
};

/// What all names of files of the io controller begin with.
const PREFIX: &str = "io.";

/// The most limits of a container. A host has fewer devices.
const MOST_LIMITS: usize = 1024;

/// Takes the limits on block devices out of the resources `document`, which are also parsed, so that the guest does not
/// get them.
pub(super) fn take(document: &mut Value, resources: &Resources) -> Result<Vec<IoLimit>, RequestError> {
    let limits = limits(resources, exists)?;
    if let Some(all) = document.as_object_mut() {
        all.remove("blockIO");
    }
    if let Some(files) = document.get_mut("unified").and_then(Value::as_object_mut) {
        files.retain(|file, _| !file.starts_with(PREFIX));
    }
    Ok(limits)
}

/// The same for the resources of an update. What cannot be parsed is the agent's to refuse.
pub(super) fn take_from(
    json: Vec<u8>,
    resources: &Resources,
) -> Result<(Vec<u8>, Vec<IoLimit>), RequestError> {
    let files = resources.unified.iter().flat_map(|files| files.keys());
    if resources.block_io.is_none() && !files.into_iter().any(|file| file.starts_with(PREFIX)) {
        return Ok((json, Vec::new()));
    }
    let Ok(mut document) = serde_json::from_slice(&json) else { return Ok((json, Vec::new())) };
    let limits = take(&mut document, resources)?;
    Ok((serde_json::to_vec(&document).unwrap_or(json), limits))
}

/// Whether the host has this block device.
fn exists((major, minor): Numbers) -> io::Result<bool> {
    Ok(BlockDevice::find(major, minor)?.is_some())
}

/// The limits in the order in which runc sets them.
fn limits(
    resources: &Resources,
    exists: impl Fn(Numbers) -> io::Result<bool>,
) -> Result<Vec<IoLimit>, RequestError> {
    let mut limits = Vec::new();
    if let Some(block_io) = &resources.block_io {
        add_weights(&mut limits, block_io)?;
        add_rates(&mut limits, block_io);
    }
    for (file, text) in resources.unified.iter().flatten().filter(|(file, _)| file.starts_with(PREFIX)) {
        let field = format!("linux.resources.unified[{file}]");
        let Some(name) = cgroup_io::file(file) else {
            return Err(unimplemented(field, "; use io.max, io.weight, io.bfq.weight or io.latency"));
        };
        limits.push(IoLimit { field, limit: Limit::File { name, text: text.clone() } });
    }
    if limits.len() > MOST_LIMITS {
        let reason = format!("has {} limits, and {MOST_LIMITS} are the most", limits.len());
        return Err(invalid("linux.resources.blockIO", reason));
    }
    for IoLimit { field, limit } in &limits {
        let (Limit::Rate { device, .. } | Limit::Weight { device: Some(device), .. }) = limit else {
            continue;
        };
        let (major, minor) = *device;
        match exists(*device) {
            Ok(true) => {}
            Ok(false) => {
                let reason = format!("the host's block device {major}:{minor} does not exist");
                return Err(invalid(field, reason));
            }
            Err(source) => {
                return Err(invalid(field, format!("cannot look at the device {major}:{minor}: {source}")));
            }
        }
    }
    Ok(limits)
}

fn add_weights(limits: &mut Vec<IoLimit>, block_io: &BlockIo) -> Result<(), RequestError> {
    let devices = block_io.weight_device.as_deref().unwrap_or_default();
    let leaf = |weight: Option<u16>| weight.is_some_and(|weight| weight != 0);
    for (field, is_set) in [
        ("leafWeight", leaf(block_io.leaf_weight)),
        ("weightDevice[].leafWeight", devices.iter().any(|device| leaf(device.leaf_weight))),
    ] {
        if is_set {
            let field = format!("linux.resources.blockIO.{field}");
            return Err(unimplemented(field, ": it is of the I/O scheduler CFQ, which Linux no longer has"));
        }
    }
    // 0 is how Go writes a weight that was not given.
    let all = block_io.weight.filter(|weight| *weight != 0).map(|weight| ("weight", None, weight));
    let of_devices = devices.iter().map(|device| {
        ("weightDevice", Some((device.major, device.minor)), device.weight.unwrap_or_default())
    });
    for (field, device, weight) in all.into_iter().chain(of_devices) {
        let field = format!("linux.resources.blockIO.{field}");
        if !(LEAST_WEIGHT..=MOST_WEIGHT).contains(&weight) {
            let reason = format!("{weight} is not between {LEAST_WEIGHT} and {MOST_WEIGHT}");
            return Err(invalid(field, reason));
        }
        limits.push(IoLimit { field, limit: Limit::Weight { device, weight } });
    }
    Ok(())
}

fn add_rates(limits: &mut Vec<IoLimit>, block_io: &BlockIo) {
    for (field, of, devices) in [
        ("throttleReadBpsDevice", Rate::BytesRead, &block_io.throttle_read_bps_device),
        ("throttleWriteBpsDevice", Rate::BytesWritten, &block_io.throttle_write_bps_device),
        ("throttleReadIOPSDevice", Rate::Reads, &block_io.throttle_read_iops_device),
        ("throttleWriteIOPSDevice", Rate::Writes, &block_io.throttle_write_iops_device),
    ] {
        limits.extend(devices.iter().flatten().map(|device| IoLimit {
            field: format!("linux.resources.blockIO.{field}"),
            limit: Limit::Rate { device: (device.major, device.minor), of, most: device.rate },
        }));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The host has the device 8:0 alone.
    fn of(resources: Value) -> Result<Vec<IoLimit>, RequestError> {
        limits(&serde_json::from_value(resources).unwrap(), |device| Ok(device == (8, 0)))
    }

    fn refusal(resources: Value) -> String {
        of(resources).unwrap_err().to_string()
    }

    #[test]
    fn limits_are_read_in_runcs_order() {
        let rate = |rate: u64| json!([{"major": 8, "minor": 0, "rate": rate}]);
        let limits = of(json!({
            "unified": {"io.max": "8:16 rbps=5", "memory.high": "1"},
            "blockIO": {
                "throttleWriteIOPSDevice": rate(4), "throttleReadIOPSDevice": rate(3),
                "throttleWriteBpsDevice": rate(2), "throttleReadBpsDevice": rate(1),
                "weightDevice": [{"major": 8, "minor": 0, "weight": 10}], "weight": 1000, "leafWeight": 0,
            },
        }));
        let limit = |field: &str, limit| IoLimit { field: format!("linux.resources.{field}"), limit };
        let device = (8, 0);
        let expected = [
            limit("blockIO.weight", Limit::Weight { device: None, weight: 1000 }),
            limit("blockIO.weightDevice", Limit::Weight { device: Some(device), weight: 10 }),
            limit("blockIO.throttleReadBpsDevice", Limit::Rate { device, of: Rate::BytesRead, most: 1 }),
            limit("blockIO.throttleWriteBpsDevice", Limit::Rate { device, of: Rate::BytesWritten, most: 2 }),
            limit("blockIO.throttleReadIOPSDevice", Limit::Rate { device, of: Rate::Reads, most: 3 }),
            limit("blockIO.throttleWriteIOPSDevice", Limit::Rate { device, of: Rate::Writes, most: 4 }),
            limit("unified[io.max]", Limit::File { name: "io.max", text: "8:16 rbps=5".into() }),
        ];
        assert_eq!(limits.unwrap(), expected);
        // As docker writes a container without limits.
        let none = json!({"blockIO": {"weight": 0, "weightDevice": [], "throttleReadBpsDevice": null}});
        assert_eq!(
            (of(none).unwrap(), of(json!({"blockIO": null, "unified": null})).unwrap()),
            (vec![], vec![])
        );
    }

    #[test]
    fn wrong_limits_on_block_devices_are_named() {
        let missing = json!({"blockIO": {"throttleReadBpsDevice": [{"major": 8, "minor": 99, "rate": 1}]}});
        assert_eq!(
            refusal(missing),
            "linux.resources.blockIO.throttleReadBpsDevice: the host's block device 8:99 does not exist"
        );
        let missing = json!({"blockIO": {"weightDevice": [{"major": -1, "minor": 0, "weight": 10}]}});
        assert_eq!(
            refusal(missing),
            "linux.resources.blockIO.weightDevice: the host's block device -1:0 does not exist"
        );
        for (resources, expected) in [
            (json!({"blockIO": {"weight": 9}}), "blockIO.weight: 9 is not between 10 and 1000"),
            (
                json!({"blockIO": {"weightDevice": [{"major": 8, "minor": 0}]}}),
                "blockIO.weightDevice: 0 is not between 10 and 1000",
            ),
            (json!({"blockIO": {"leafWeight": 10}}), "blockIO.leafWeight is not implemented: it is of"),
            (
                json!({"blockIO": {"weightDevice": [{"major": 8, "minor": 0, "weight": 10, "leafWeight": 20}]}}),
                "blockIO.weightDevice[].leafWeight is not implemented: it is of",
            ),
            (json!({"unified": {"io.pressure": "1"}}), "unified[io.pressure] is not implemented; use io.max"),
        ] {
            let refusal = refusal(resources);
            assert!(refusal.starts_with(&format!("linux.resources.{expected}")), "{refusal}");
        }
        let many = vec![json!({"major": 8, "minor": 0, "rate": 1}); MOST_LIMITS + 1];
        assert!(refusal(json!({"blockIO": {"throttleReadBpsDevice": many}})).contains("1024 are the most"));
    }

    #[test]
    fn the_guest_gets_the_rest() {
        let given = json!({
            "blockIO": {"weight": 500}, "unified": {"io.weight": "default 7", "memory.high": "1"}, "pids": {"limit": 5},
        });
        let json = given.to_string().into_bytes();
        let resources: Resources = serde_json::from_value(given).unwrap();
        let (rest, limits) = take_from(json, &resources).unwrap();
        let rest: Value = serde_json::from_slice(&rest).unwrap();
        assert_eq!(rest, json!({"unified": {"memory.high": "1"}, "pids": {"limit": 5}}));
        assert_eq!(limits.len(), 2);
        // Without such limits nothing changes, nor if it cannot be read.
        let (rest, limits) = take_from(b"{ \"pids\": 1".to_vec(), &Resources::default()).unwrap();
        assert_eq!((rest.as_slice(), limits), (b"{ \"pids\": 1".as_slice(), vec![]));
    }
}
