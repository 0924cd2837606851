//! The device nodes of a spec. A node names a device by the numbers of the host. A character device is one that the
//! guest's kernel has too. A block device is the host's, which the VM gets.

use std::io;

use bulkhead_agent_api::devices::{DEVICES, Kind};
use serde_json::{Value, json};

use crate::{
    host::block_device::BlockDevice,
    types::{
        request_error::{RequestError, invalid, unimplemented},
        spec::{Device, DeviceRule, Linux},
    },
};

/// /dev/kvm (admin-guide/devices.txt).
const KVM: (i64, i64) = (10, 232);

/// The major number of loop devices, which the guest has too.
const LOOP: i64 = 7;

/// A block device of the host that a container gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Disk {
    /// Its index in `linux.devices`.
    index: usize,
    /// As `linux.devices[path]`.
    pub(crate) field: String,
    pub(crate) device: BlockDevice,
    access: Access,
}

impl Disk {
    #[cfg(test)]
    pub(crate) fn of_test(device: BlockDevice) -> Self {
        let access = Access { read: true, write: true, make: true };
        Self { index: 0, field: "linux.devices[/dev/test]".into(), device, access }
    }

    /// Whether the container may write to it.
    pub(crate) fn is_writable(&self) -> bool {
        self.access.write && !self.device.read_only
    }
}

/// The numbers of a device node in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// What the device rules let a container do with a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Access {
    read: bool,
    write: bool,
    make: bool,
}

impl Access {
    /// For a block device. Of the rules for it that have a letter the last one counts, as in the guest's program.
    fn of(rules: &[DeviceRule], device: &BlockDevice) -> Self {
        let is_about = |rule: &&DeviceRule| {
            let is = |number: Option<i64>, own: u32| number.is_none_or(|n| n < 0 || n == i64::from(own));
            matches!(rule.kind.as_deref(), None | Some("" | "a" | "b"))
                && is(rule.major, device.major)
                && is(rule.minor, device.minor)
        };
        let may = |letter| {
            let mut rules = rules.iter().rev().filter(is_about);
            rules.find(|rule| letters(rule).contains(letter)).is_some_and(|rule| rule.allow)
        };
        Self { read: may('r'), write: may('w'), make: may('m') }
    }

    fn letters(self) -> String {
        let letters = [(self.read, 'r'), (self.write, 'w'), (self.make, 'm')];
        letters.iter().filter(|(has, _)| *has).map(|(_, letter)| letter).collect()
    }
}

/// A rule without access is about every access.
fn letters(rule: &DeviceRule) -> &str {
    rule.access.as_deref().filter(|access| !access.is_empty()).unwrap_or("rwm")
}

/// Finds the block devices of the host that the container is to get, by `find`. Refuses a node of a device that there
/// is not. A privileged container gets all nodes of its host without having asked for any of them. So those that the
/// guest lacks are left out of `document`, the spec.
pub(super) fn fit(
    document: &mut Value,
    linux: &Linux,
    find: impl Fn(i64, i64) -> io::Result<Option<BlockDevice>>,
) -> Result<Vec<Disk>, RequestError> {
    let devices = linux.devices.as_deref().unwrap_or_default();
    let rules = linux.resources.devices.as_deref().unwrap_or_default();
    if is_privileged(rules) {
        leave_out_missing(document, devices);
        return Ok(Vec::new());
    }
    let mut disks = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        if device.kind != "b" {
            if !is_in_guest(device) {
                return Err(refusal(device));
            }
            continue;
        }
        let (major, minor) = device.numbers();
        let field = format!("linux.devices[{}]", device.path.display());
        let refused =
            |reason: String| invalid(&field, format!("the host's block device {major}:{minor} {reason}"));
        match find(major, minor).map_err(|error| refused(format!("cannot be looked up: {error}")))? {
            Some(device) if device.has_contents => {
                let access = Access::of(rules, &device);
                // The VM gets no device that nobody in it may use.
                if access.read || access.write {
                    disks.push(Disk { index, field, device, access });
                }
            }
            // A loop device that has no file: the guest has such devices of its own.
            _ if is_in_guest(device) => {}
            Some(_) => return Err(refused("is empty".into())),
            None => return Err(refused("does not exist".into())),
        }
    }
    if let Some(rules) = document.pointer_mut("/linux/resources/devices") {
        leave_out_foreign(rules, &disks.iter().collect::<Vec<_>>());
    }
    Ok(disks)
}

/// Replaces the numbers of the host by those of the guest in a spec, in which [`fit`] has found `disks`.
pub(crate) fn translate(document: &mut Value, disks: &[(Disk, Numbers)]) {
    for (Disk { index, .. }, guest) in disks {
        document["linux"]["devices"][*index]["major"] = guest.major.into();
        document["linux"]["devices"][*index]["minor"] = guest.minor.into();
    }
    let rules = &mut document["linux"]["resources"]["devices"];
    add_rules(rules, disks.iter().map(|(disk, numbers)| (*numbers, disk.access)));
}

/// Replaces device rules of the host by those of the guest.
pub(crate) fn translate_rules(rules: &mut Value, disks: &[(Disk, Numbers)]) {
    // The agent refuses rules that are none.
    let Ok(parsed) = serde_json::from_value::<Option<Vec<DeviceRule>>>(rules.clone()) else { return };
    let parsed = parsed.unwrap_or_default();
    leave_out_foreign(rules, &disks.iter().map(|(disk, _)| disk).collect::<Vec<_>>());
    add_rules(rules, disks.iter().map(|(disk, numbers)| (*numbers, Access::of(&parsed, &disk.device))));
}

/// Leaves out the rules about block devices of the host. In the guest their numbers are those of other devices, perhaps
/// of disks of other containers.
fn leave_out_foreign(rules: &mut Value, disks: &[&Disk]) {
    let Some(rules) = rules.as_array_mut() else { return };
    rules.retain(|rule| {
        let number = |name: &str| rule[name].as_i64().filter(|number| *number >= 0);
        let is_loop_of_guest = || {
            let is_it = |disk: &&Disk| number("minor") == Some(disk.device.minor.into());
            !disks.iter().filter(|disk| i64::from(disk.device.major) == LOOP).any(is_it)
        };
        rule["type"] != "b" || number("major").is_none_or(|major| major == LOOP && is_loop_of_guest())
    });
}

fn add_rules(rules: &mut Value, disks: impl Iterator<Item = (Numbers, Access)>) {
    let mut all = rules.as_array().cloned().unwrap_or_default();
    for (Numbers { major, minor }, access) in disks {
        let rule = |allow: bool, access: &str| json!({"allow": allow, "type": "b", "major": major, "minor": minor, "access": access});
        all.push(rule(false, "rwm"));
        // A rule without access would be about every access.
        let access = access.letters();
        all.extend((!access.is_empty()).then(|| rule(true, &access)));
    }
    if rules.is_array() || !all.is_empty() {
        *rules = all.into();
    }
}

fn leave_out_missing(document: &mut Value, devices: &[Device]) {
    if devices.iter().all(is_in_guest) {
        return;
    }
    let Some(nodes) = document.pointer_mut("/linux/devices").and_then(Value::as_array_mut) else { return };
    let mut devices = devices.iter();
    nodes.retain(|_| devices.next().is_none_or(is_in_guest));
    tracing::info!(left = nodes.len(), "a privileged container gets the device nodes that the guest has");
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
        matches!(rule.kind.as_deref(), None | Some("" | "a"))
            && is_all(rule.major)
            && is_all(rule.minor)
            && ['r', 'w', 'm'].iter().all(|letter| letters(rule).contains(*letter))
    };
    rules.iter().rev().find(is_about_all).is_some_and(|rule| rule.allow)
}

fn refusal(device: &Device) -> RequestError {
    let (major, minor) = device.numbers();
    let hint = if device.numbers() == KVM {
        ": the guest cannot run VMs; use runc for this container"
    } else {
        ": the guest's kernel does not have this device (docs/operations.md lists those that it has); use runc for \
         this container"
    };
    unimplemented(
        format!("linux.devices[{}] (character device {major}:{minor})", device.path.display()),
        hint,
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A host with the disks 8:0 and 8:16, which is read-only, an empty drive 11:0, and loop devices, of which 7:1 has
    /// a file.
    fn host(major: i64, minor: i64) -> io::Result<Option<BlockDevice>> {
        if !matches!((major, minor), (8, 0 | 16) | (11, 0) | (7, 0..8)) {
            return Ok(None);
        }
        let mut device = BlockDevice::of_test(major as u32, minor as u32);
        device.has_contents = major == 8 || (major, minor) == (7, 1);
        device.read_only = (major, minor) == (8, 16);
        Ok(Some(device))
    }

    /// The disks that the container gets, whether they are writable, and the spec for the guest, in which they have the
    /// numbers from 254:0 on.
    fn disks(devices: Value, rules: Value) -> (Vec<(u32, u32, bool)>, Value) {
        let mut document = json!({"linux": {"devices": devices, "resources": {"devices": rules}}});
        let linux: Linux = serde_json::from_value(document["linux"].clone()).unwrap();
        let disks = fit(&mut document, &linux, host).unwrap();
        let found =
            disks.iter().map(|disk| (disk.device.major, disk.device.minor, disk.is_writable())).collect();
        let numbers = (0..).map(|index| Numbers { major: 254, minor: 16 * index });
        translate(&mut document, &disks.into_iter().zip(numbers).collect::<Vec<_>>());
        (found, document["linux"].clone())
    }

    fn rule(allow: bool, major: i64, minor: i64, access: &str) -> Value {
        json!({"allow": allow, "type": "b", "major": major, "minor": minor, "access": access})
    }

    fn deny_all() -> Value {
        json!({"allow": false, "access": "rwm"})
    }

    #[test]
    fn a_block_device_is_the_hosts_with_the_guests_numbers() {
        let devices = json!([
            node("/dev/fuse", "c", 10, 229),
            node("/dev/data", "b", 8, 0),
            node("/dev/loop1", "b", 7, 1),
        ]);
        let fuse = json!({"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rwm"});
        let rules = json!([deny_all(), fuse, rule(true, 8, 0, "rwm"), rule(true, 7, 1, "r")]);
        let (found, linux) = disks(devices, rules);
        assert_eq!(found, [(8, 0, true), (7, 1, false)]);
        let numbers = |index: usize| {
            let device = &linux["devices"][index];
            (device["path"].as_str().unwrap(), device["major"].as_u64(), device["minor"].as_u64())
        };
        assert_eq!(numbers(0), ("/dev/fuse", Some(10), Some(229)));
        assert_eq!(numbers(1), ("/dev/data", Some(254), Some(0)));
        assert_eq!(numbers(2), ("/dev/loop1", Some(254), Some(16)));
        let expected = json!([
            deny_all(),
            fuse,
            rule(false, 254, 0, "rwm"),
            rule(true, 254, 0, "rwm"),
            rule(false, 254, 16, "rwm"),
            rule(true, 254, 16, "r"),
        ]);
        assert_eq!(linux["resources"]["devices"], expected);
    }

    #[test]
    fn the_rules_of_the_host_decide_what_may_be_done_with_a_device() {
        let of = |rules: Value| {
            let (found, linux) = disks(json!([node("/dev/sda", "b", 8, 0)]), rules);
            let last = linux["resources"]["devices"].as_array().unwrap().last().cloned();
            (found.first().map(|(_, _, writable)| *writable), last.unwrap_or_default()["access"].clone())
        };
        // Of any device, of any number.
        let all = json!({"allow": true, "type": "b", "major": 8, "access": "rw"});
        assert_eq!(of(json!([deny_all(), all])), (Some(true), json!("rw")));
        assert_eq!(of(json!([all, rule(false, 8, 0, "w")])), (Some(false), json!("r")));
        assert_eq!(of(json!([deny_all(), rule(true, 8, 0, "rm")])), (Some(false), json!("rm")));
        assert_eq!(of(json!([deny_all(), rule(true, 8, 0, "")])), (Some(true), json!("rwm")));
        // Nobody may use it, so the VM does not get it.
        for none in [
            json!([]),
            json!([deny_all()]),
            json!([deny_all(), rule(true, 8, 16, "rwm")]),
            json!([rule(true, 8, 0, "rwm"), deny_all()]),
            json!([{"allow": true, "type": "c", "major": 8, "minor": 0, "access": "rwm"}]),
        ] {
            assert_eq!(of(none).0, None);
        }
        // One that the host cannot write to is read-only for the guest, whatever the rules say.
        let (found, _) = disks(json!([node("/dev/sdb", "b", 8, 16)]), json!([rule(true, 8, 16, "rwm")]));
        assert_eq!(found, [(8, 16, false)]);
    }

    #[test]
    fn an_update_keeps_what_the_container_has() {
        let devices = json!([node("/dev/sda", "b", 8, 0)]);
        let mut document = json!({"linux": {"devices": devices, "resources": {}}});
        let mut linux: Linux = serde_json::from_value(document["linux"].clone()).unwrap();
        linux.resources.devices = serde_json::from_value(json!([rule(true, 8, 0, "rwm")])).unwrap();
        let disks = fit(&mut document, &linux, host).unwrap();
        let disks: Vec<_> = disks.into_iter().map(|disk| (disk, Numbers { major: 254, minor: 0 })).collect();
        let mut rules = json!([deny_all(), rule(true, 8, 0, "r")]);
        translate_rules(&mut rules, &disks);
        assert_eq!(rules, json!([deny_all(), rule(false, 254, 0, "rwm"), rule(true, 254, 0, "r")]));
        let mut rules = json!([deny_all()]);
        translate_rules(&mut rules, &disks);
        assert_eq!(rules, json!([deny_all(), rule(false, 254, 0, "rwm")]));
        // The numbers of other disks of the host are those of other devices here.
        let mut rules = json!([deny_all(), rule(true, 254, -1, "rwm"), rule(true, 7, 2, "r")]);
        translate_rules(&mut rules, &[]);
        assert_eq!(rules, json!([deny_all(), rule(true, 7, 2, "r")]));
        let mut none = json!([{"allow": "yes"}]);
        translate_rules(&mut none, &disks);
        assert_eq!(none, json!([{"allow": "yes"}]));
    }

    #[test]
    fn a_loop_device_without_a_file_is_the_guests_own() {
        let (found, linux) = disks(json!([node("/dev/loop0", "b", 7, 0)]), confined());
        assert_eq!((found, linux["devices"][0]["major"].as_u64()), (vec![], Some(7)));
    }

    /// The paths of the nodes that the agent gets.
    fn nodes(devices: Value, rules: Value) -> Result<Vec<String>, String> {
        let mut document = json!({"linux": {"devices": devices, "resources": {"devices": rules}}});
        let linux: Linux = serde_json::from_value(document["linux"].clone()).unwrap();
        fit(&mut document, &linux, host).map_err(|error| error.to_string())?;
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
            ("/dev/xvda", "b", 202, 0, ": the host's block device 202:0 does not exist"),
            ("/dev/sr0", "b", 11, 0, ": the host's block device 11:0 is empty"),
            ("/dev/sdx", "b", 8, -1, ": the host's block device 8:-1 does not exist"),
            ("/dev/nvidia0", "c", 195, 0, "the guest's kernel does not have this device"),
            ("/dev/ttyS0", "u", 4, 64, "the guest's kernel does not have this device"),
            // The numbers of a character device.
            ("/dev/fuse", "b", 10, 229, "the host's block device 10:229 does not exist"),
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
