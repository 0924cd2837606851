//! The device nodes of a spec. A node names a device by the numbers of the host. A character device is one that the
//! guest's kernel has too. A block device is the host's, which the VM gets.

use std::{collections::BTreeMap, io, ops::RangeInclusive, path::Path};

use bulkhead_agent_api::devices::{DEVICES, Kind};
use serde_json::{Value, json};

use crate::{
    host::{
        block_device::BlockDevice,
        device_node::{self, DeviceNode},
    },
    types::{
        request_error::{RequestError, invalid, unimplemented},
        spec::{Device, DeviceRule, Linux},
    },
};

/// /dev/kvm (admin-guide/devices.txt).
const KVM: (i64, i64) = (10, 232);

/// The major number of loop devices, which the guest has too.
const LOOP: i64 = 7;

/// Nodes that every host has. An engine that lists the nodes of its host lists these too.
const OF_EVERY_HOST: [&str; 6] =
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];

/// What the devices of a spec are compared with.
pub(super) trait Host {
    /// None: the host has none with these numbers.
    fn block_device(&self, major: i64, minor: i64) -> io::Result<Option<BlockDevice>>;
    fn has_character_device(&self, major: i64, minor: i64) -> bool;
    /// None: something else than a device node is there.
    fn node(&self, path: &Path) -> io::Result<Option<DeviceNode>>;
}

/// The host that the shim runs on.
pub(super) struct ThisHost;

impl Host for ThisHost {
    fn block_device(&self, major: i64, minor: i64) -> io::Result<Option<BlockDevice>> {
        BlockDevice::find(major, minor)
    }

    fn has_character_device(&self, major: i64, minor: i64) -> bool {
        device_node::is_character_device(major, minor)
    }

    fn node(&self, path: &Path) -> io::Result<Option<DeviceNode>> {
        DeviceNode::at(path)
    }
}

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

/// Finds the block devices of the host that the container is to get. Refuses a node of a device that there is not, and
/// a rule about devices that the container cannot have.
///
/// A privileged container gets all nodes of its host without having asked for any of them. Of these, those that the
/// guest lacks are left out of `document`, the spec.
pub(super) fn fit(document: &mut Value, linux: &Linux, host: &impl Host) -> Result<Vec<Disk>, RequestError> {
    let devices = linux.devices.as_deref().unwrap_or_default();
    let rules = linux.resources.devices.as_deref().unwrap_or_default();
    let is_privileged = is_privileged(rules);
    let listed: Vec<_> = if is_privileged {
        leave_out_unasked(document, devices, host)
    } else {
        devices.iter().map(|device| (device, Origin::Asked)).collect()
    };
    let mut disks = Vec::new();
    for (index, (device, origin)) in listed.into_iter().enumerate() {
        if origin == Origin::OfHost {
            continue;
        }
        if device.kind == "b" {
            disks.extend(disk(index, device, rules, host)?);
        } else if !is_in_guest(device) {
            return Err(refusal(device));
        }
    }
    check_rules(rules, &disks.iter().collect::<Vec<_>>())?;
    if let Some(rules) = document.pointer_mut("/linux/resources/devices") {
        leave_out_foreign(rules, &disks.iter().collect::<Vec<_>>());
    }
    Ok(disks)
}

/// The block device of a node. None: the container gets none of the host's.
fn disk(
    index: usize,
    node: &Device,
    rules: &[DeviceRule],
    host: &impl Host,
) -> Result<Option<Disk>, RequestError> {
    let (major, minor) = node.numbers();
    let field = format!("linux.devices[{}]", node.path.display());
    let refused =
        |reason: String| Err(invalid(&field, format!("the host's block device {major}:{minor} {reason}")));
    match host.block_device(major, minor) {
        Ok(Some(device)) if device.has_contents => {
            let access = Access::of(rules, &device);
            // The VM gets no device that nobody in it may use.
            let is_usable = access.read || access.write;
            Ok(is_usable.then_some(Disk { index, field, device, access }))
        }
        // A loop device that has no file: the guest has such devices of its own.
        Ok(_) if is_in_guest(node) => Ok(None),
        Ok(Some(_)) => refused("is empty".into()),
        Ok(None) => refused("does not exist".into()),
        Err(error) => refused(format!("cannot be looked up: {error}")),
    }
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

/// Replaces device rules of the host by those of the guest, for a container that has these disks. Refuses a rule about
/// devices that it does not have.
pub(crate) fn translate_rules(rules: &mut Value, disks: &[(Disk, Numbers)]) -> Result<(), RequestError> {
    // The agent refuses rules that are none.
    let Ok(parsed) = serde_json::from_value::<Option<Vec<DeviceRule>>>(rules.clone()) else { return Ok(()) };
    let parsed = parsed.unwrap_or_default();
    let own: Vec<_> = disks.iter().map(|(disk, _)| disk).collect();
    check_rules(&parsed, &own)?;
    leave_out_foreign(rules, &own);
    add_rules(rules, disks.iter().map(|(disk, numbers)| (*numbers, Access::of(&parsed, &disk.device))));
    Ok(())
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

/// Why a privileged container has a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// Somebody asked for it.
    Asked,
    /// It is one of all nodes of the host.
    OfHost,
}

/// Leaves out the nodes of the host that the guest lacks, except those that were asked for. Returns those that stay.
fn leave_out_unasked<'d>(
    document: &mut Value,
    devices: &'d [Device],
    host: &impl Host,
) -> Vec<(&'d Device, Origin)> {
    // Of two nodes at one path, the last one counts. An engine adds what it is asked for to the nodes of the host.
    let mut at_path: BTreeMap<&Path, Vec<usize>> = BTreeMap::new();
    for (index, device) in devices.iter().enumerate() {
        at_path.entry(&device.path).or_default().push(index);
    }
    let has_all = OF_EVERY_HOST.iter().all(|path| at_path.contains_key(Path::new(path)));
    let origin =
        |(index, device): (usize, &Device)| match at_path.get(device.path.as_path()).map(Vec::as_slice) {
            Some([.., last]) if *last != index => None,
            Some([_]) if has_all && is_of_host(device, host) => is_in_guest(device).then_some(Origin::OfHost),
            _ => Some(Origin::Asked),
        };
    let origins: Vec<_> = devices.iter().enumerate().map(origin).collect();
    if let Some(nodes) = document.pointer_mut("/linux/devices").and_then(Value::as_array_mut) {
        let mut stays = origins.iter().map(Option::is_some);
        nodes.retain(|_| stays.next().unwrap_or(true));
    }
    let stay: Vec<_> =
        devices.iter().zip(origins).filter_map(|(device, origin)| Some((device, origin?))).collect();
    if stay.len() < devices.len() {
        tracing::info!(left = stay.len(), "a privileged container gets the device nodes that the guest has");
    }
    stay
}

/// Whether a node is at a path where the host has a node. Its numbers may be old: an engine may start a container again
/// by the list that it made when the container was created. So is one whose device has disappeared since then.
fn is_of_host(device: &Device, host: &impl Host) -> bool {
    let (major, minor) = device.numbers();
    match host.node(&device.path) {
        Ok(Some(_)) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => match device.kind.as_str() {
            "b" => matches!(host.block_device(major, minor), Ok(None)),
            _ => !host.has_character_device(major, minor),
        },
        Ok(None) | Err(_) => false,
    }
}

/// Refuses a rule that allows to use devices none of which the container can have. A rule about all block or character
/// devices, and one that only allows to make nodes, is none. Nor is any rule of a privileged container.
fn check_rules(rules: &[DeviceRule], disks: &[&Disk]) -> Result<(), RequestError> {
    /// Pseudo-terminals (admin-guide/devices.txt). The engines allow them, and /dev/console.
    const TERMINALS: RangeInclusive<i64> = 136..=143;
    const CONSOLE: (i64, i64) = (5, 1);
    if is_privileged(rules) {
        return Ok(());
    }
    for (index, rule) in rules.iter().enumerate() {
        let Some(major) = rule.major.filter(|major| *major >= 0) else { continue };
        let is = |own: (i64, i64)| major == own.0 && rule.minor.is_none_or(|n| n < 0 || n == own.1);
        let has = |kind| DEVICES.iter().any(|it| it.kind == kind && is((it.major.into(), it.minor.into())));
        let leads_somewhere = match rule.kind.as_deref() {
            Some("b") => {
                let is_about = |disk: &&Disk| is((disk.device.major.into(), disk.device.minor.into()));
                has(Kind::Block) || disks.iter().any(is_about)
            }
            Some("c" | "u") => has(Kind::Char) || is(CONSOLE) || TERMINALS.contains(&major),
            _ => continue,
        };
        if rule.allow && letters(rule) != "m" && !leads_somewhere {
            let kind = if rule.kind.as_deref() == Some("b") { "block" } else { "character" };
            let minor = rule.minor.filter(|n| *n >= 0).map_or("*".into(), |minor| minor.to_string());
            return Err(unimplemented(
                format!("linux.resources.devices[{index}] (access to the {kind} device {major}:{minor})"),
                ": the container has no such device. A block device of the host needs a node too (linux.devices, \
                 docker run --device); docs/resources.md lists the character devices that the guest's kernel has",
            ));
        }
    }
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
        ": the guest's kernel does not have this device (docs/resources.md lists those that it has); use runc for \
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
    /// a file. It has the nodes /dev/sda of 8:0, /dev/kvm and /dev/fuse, and a link /dev/data.
    struct TestHost;

    impl Host for TestHost {
        fn block_device(&self, major: i64, minor: i64) -> io::Result<Option<BlockDevice>> {
            if !matches!((major, minor), (8, 0 | 16) | (11, 0) | (7, 0..8)) {
                return Ok(None);
            }
            let mut device = BlockDevice::of_test(major as u32, minor as u32);
            device.has_contents = major == 8 || (major, minor) == (7, 1);
            device.read_only = (major, minor) == (8, 16);
            Ok(Some(device))
        }

        fn has_character_device(&self, major: i64, minor: i64) -> bool {
            matches!((major, minor), (1, _) | (5, _) | (10, 229 | 232))
        }

        fn node(&self, path: &Path) -> io::Result<Option<DeviceNode>> {
            let (is_block, major, minor) = match path.to_str().unwrap() {
                "/dev/sda" => (true, 8, 0),
                "/dev/kvm" => (false, 10, 232),
                "/dev/fuse" => (false, 10, 229),
                "/dev/data" => return Ok(None),
                _ => return Err(io::ErrorKind::NotFound.into()),
            };
            Ok(Some(DeviceNode { is_block, major, minor, mode: 0o600, uid: 0, gid: 0 }))
        }
    }

    /// The disks that the container gets, whether they are writable, and the spec for the guest, in which they have the
    /// numbers from 254:0 on.
    fn disks(devices: Value, rules: Value) -> (Vec<(u32, u32, bool)>, Value) {
        let mut document = json!({"linux": {"devices": devices, "resources": {"devices": rules}}});
        let linux: Linux = serde_json::from_value(document["linux"].clone()).unwrap();
        let disks = fit(&mut document, &linux, &TestHost).unwrap();
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
            json!([deny_all(), rule(true, 8, 16, "m")]),
            json!([deny_all(), {"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rwm"}]),
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
        let disks = fit(&mut document, &linux, &TestHost).unwrap();
        let disks: Vec<_> = disks.into_iter().map(|disk| (disk, Numbers { major: 254, minor: 0 })).collect();
        let mut rules = json!([deny_all(), rule(true, 8, 0, "r")]);
        translate_rules(&mut rules, &disks).unwrap();
        assert_eq!(rules, json!([deny_all(), rule(false, 254, 0, "rwm"), rule(true, 254, 0, "r")]));
        let mut rules = json!([deny_all()]);
        translate_rules(&mut rules, &disks).unwrap();
        assert_eq!(rules, json!([deny_all(), rule(false, 254, 0, "rwm")]));
        // The numbers of other disks of the host are those of other devices here.
        let mut rules = json!([deny_all(), rule(false, 254, -1, "rwm"), rule(true, 7, 2, "r")]);
        translate_rules(&mut rules, &[]).unwrap();
        assert_eq!(rules, json!([deny_all(), rule(true, 7, 2, "r")]));
        let error =
            translate_rules(&mut json!([deny_all(), rule(true, 254, -1, "rwm")]), &disks).unwrap_err();
        assert!(error.to_string().contains("access to the block device 254:*"), "{error}");
        let mut none = json!([{"allow": "yes"}]);
        translate_rules(&mut none, &disks).unwrap();
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
        fit(&mut document, &linux, &TestHost).map_err(|error| error.to_string())?;
        let nodes = document["linux"]["devices"].as_array().cloned().unwrap_or_default();
        Ok(nodes.iter().map(|node| node["path"].as_str().unwrap().to_owned()).collect())
    }

    fn node(path: &str, kind: &str, major: i64, minor: i64) -> Value {
        json!({"path": path, "type": kind, "major": major, "minor": minor, "fileMode": 432})
    }

    fn confined() -> Value {
        json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rwm"},
        ])
    }

    /// What an engine writes for a privileged container: all nodes of the host, and what was asked for.
    fn of_host(asked: &[Value]) -> Value {
        let mut nodes: Vec<_> =
            [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9)]
                .map(|(name, major, minor)| node(&format!("/dev/{name}"), "c", major, minor))
                .into();
        nodes.push(node("/dev/tty", "c", 5, 0));
        nodes.push(node("/dev/kvm", "c", 10, 232));
        nodes.push(node("/dev/fuse", "c", 10, 229));
        nodes.push(node("/dev/sda", "b", 8, 0));
        // It disappears while the container is created.
        nodes.push(node("/dev/sdz", "b", 65, 144));
        nodes.extend_from_slice(asked);
        nodes.into()
    }

    fn all_allowed() -> Value {
        json!([{"allow": true, "access": "rwm"}])
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
        let expected =
            ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/fuse"];
        for allowed in [
            all_allowed(),
            json!([{"allow": false, "access": "rwm"}, {"allow": true, "type": "a", "major": -1, "minor": -1}]),
        ] {
            assert_eq!(nodes(of_host(&[]), allowed).unwrap(), expected);
        }
        for confined in [
            json!([{"allow": true, "access": "rwm"}, {"allow": false, "access": "rwm"}]),
            json!([{"allow": true, "access": "rw"}]),
            json!([{"allow": true, "type": "c", "access": "rwm"}]),
            json!([{"allow": true, "type": "a", "major": 10, "access": "rwm"}]),
            json!([]),
        ] {
            assert!(nodes(of_host(&[]), confined).unwrap_err().starts_with("linux.devices[/dev/kvm]"));
        }
    }

    #[test]
    fn a_privileged_container_gets_the_block_devices_that_it_asks_for() {
        for (asked, rules) in [
            // At another path than the host's: docker, or a raw block volume of a pod.
            (node("/dev/xvda", "b", 8, 0), all_allowed()),
            (node("/dev/data", "b", 8, 0), json!([{"allow": true}, rule(true, 8, 0, "r")])),
            // At the host's path, beside the host's node: ctr, or a raw block volume.
            (node("/dev/sda", "b", 8, 0), all_allowed()),
        ] {
            let path = asked["path"].clone();
            let (found, linux) = disks(of_host(&[asked]), rules);
            assert_eq!(found, [(8, 0, true)], "{path}");
            let listed = linux["devices"].as_array().unwrap();
            let of_path: Vec<_> = listed.iter().filter(|node| node["path"] == path).collect();
            assert_eq!(of_path.len(), 1, "{listed:?}");
            assert_eq!((of_path[0]["major"].as_u64(), listed.len()), (Some(254), 8));
            let expected = [rule(false, 254, 0, "rwm"), rule(true, 254, 0, "rwm")];
            assert!(linux["resources"]["devices"].as_array().unwrap().ends_with(&expected));
        }
        // Alone, without the host's nodes.
        let (found, _) = disks(json!([node("/dev/sda", "b", 8, 0)]), all_allowed());
        assert_eq!(found, [(8, 0, true)]);
    }

    #[test]
    fn what_a_privileged_container_asks_for_and_the_guest_lacks_is_refused() {
        for asked in [
            node("/dev/my-kvm", "c", 10, 232),
            node("/dev/kvm", "c", 10, 232),
            node("/dev/data", "b", 11, 0),
            // The host has another device there.
            node("/dev/fuse", "c", 10, 232),
        ] {
            let error = nodes(of_host(std::slice::from_ref(&asked)), all_allowed()).unwrap_err();
            let name = format!("linux.devices[{}]", asked["path"].as_str().unwrap());
            assert!(error.starts_with(&name), "{error}");
        }
        let error = nodes(json!([node("/dev/kvm", "c", 10, 232)]), all_allowed()).unwrap_err();
        assert!(error.starts_with("linux.devices[/dev/kvm]"), "{error}");
        let tunnel = node("/dev/tunnel", "c", 10, 229);
        assert!(nodes(of_host(&[tunnel]), all_allowed()).unwrap().contains(&"/dev/tunnel".into()));
    }

    #[test]
    fn a_rule_about_devices_that_the_container_cannot_have_is_refused() {
        let of = |new: Value| nodes(json!([node("/dev/sda", "b", 8, 0)]), json!([deny_all(), new]));
        let char = |allow: bool, major: i64, minor: i64| {
            let mut rule = rule(allow, major, minor, "rwm");
            rule["type"] = "c".into();
            rule
        };
        for (rule, expected) in [
            (rule(true, 8, 16, "rwm"), "the block device 8:16) is not implemented"),
            (rule(true, 253, -1, "r"), "the block device 253:*) is not implemented"),
            (char(true, 188, -1), "the character device 188:*) is not implemented"),
            (char(true, 10, 232), "the character device 10:232) is not implemented"),
        ] {
            let error = of(rule).unwrap_err();
            assert!(error.starts_with("linux.resources.devices[1]") && error.contains(expected), "{error}");
        }
        // The engines' own are among these.
        for rule in [
            rule(true, 8, -1, "rwm"),
            rule(true, 7, 3, "rwm"),
            rule(false, 8, 16, "w"),
            rule(true, -1, -1, "m"),
            rule(true, 8, 16, "m"),
            char(true, 10, -1),
            char(true, 136, -1),
            char(true, 5, 1),
            char(true, 10, 200),
            char(false, 188, -1),
            json!({"allow": true, "type": "c", "access": "rwm"}),
        ] {
            assert!(of(rule.clone()).is_ok(), "{rule}");
        }
    }
}
