//! Bind mounts of what the guest's kernel has itself: of the node of a device, of the host's /dev, and of its cgroups.
//!
//! The numbers of a node mean the host's devices on the host, and other ones in the guest. So the container gets what
//! `linux.devices` would give it. The host's cgroups have none of its processes: a systemd that finds them in
//! /sys/fs/cgroup does not start. Elsewhere they are a directory like others, as monitoring expects it.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use bulkhead_agent_api::devices::{DEVICES, Kind};
use serde_json::{Value, json};

use crate::{
    host::device_node::{DeviceNode, NODES},
    types::{
        request_error::{RequestError, unimplemented},
        spec::is_bind,
    },
};

/// Where the cgroups are, on the host and in a container.
const CGROUPS: &str = "/sys/fs/cgroup";

/// The most mounts of which the sources are looked at. containerd's own limit of a message is far below.
const MAX_MOUNTS: usize = 10_000;

/// Replaces the bind mounts of a spec whose sources are the node of a block device, the host's /dev, or its cgroups at
/// their usual place. Relative sources are in the bundle. Returns whether the spec was changed.
///
/// The node of a block device becomes one of `linux.devices`. The host's /dev becomes a file system with the nodes of
/// the devices that the guest has. Their numbers are the guest's: [`add_missing`] adds them when the host's devices are
/// found. Returns them if the spec was changed. Refuses another directory of /dev in which there are nodes. Blocks.
pub(super) fn replace(document: &mut Value, bundle: &Path) -> Result<Option<Vec<Value>>, RequestError> {
    replace_below(document, bundle, Path::new(NODES))
}

fn replace_below(
    document: &mut Value,
    bundle: &Path,
    dev: &Path,
) -> Result<Option<Vec<Value>>, RequestError> {
    // In a user namespace, Linux mounts those of a cgroup namespace that belongs to it only.
    let may_mount_cgroups = has_namespace(document, "cgroup") || !has_namespace(document, "user");
    let Some(mounts) = document.get_mut("mounts").and_then(Value::as_array_mut) else { return Ok(None) };
    let (mut asked, mut nodes, mut added) = (Vec::new(), Vec::new(), Vec::new());
    let (mut result, mut has_cgroups) = (Ok(()), false);
    let mut index = 0..MAX_MOUNTS;
    mounts.retain_mut(|mount| {
        let (Some(index), Ok(())) = (index.next(), &result) else { return true };
        match Source::of(mount, bundle, dev) {
            Source::Other => true,
            Source::Block(node) => {
                asked.push(node_of(mount, &node));
                false
            }
            Source::Dev => {
                let is_recursive = has_option(mount, "rbind");
                let destination = PathBuf::from(mount["destination"].as_str().unwrap_or_default());
                *mount = tmpfs(&destination, "mode=755");
                nodes.extend(nodes_of_guest(&destination));
                added.extend(is_recursive.then(|| mounts_below(&destination)).into_iter().flatten());
                true
            }
            Source::Cgroups if may_mount_cgroups => {
                has_cgroups = true;
                *mount = cgroups(mount);
                true
            }
            Source::Cgroups => true,
            Source::BelowDev(path) => {
                result = Err(unimplemented(
                    format!("mounts[{index}].source {}, a directory of the host's devices", path.display()),
                    ": the guest has devices of its own. Name each device (linux.devices, docker run --device), or \
                     mount the whole /dev, which has those of the guest then",
                ));
                true
            }
        }
    });
    result?;
    let is_changed = has_cgroups || !(asked.is_empty() && nodes.is_empty());
    // One that the spec has itself stays.
    added.retain(|new: &Value| !mounts.iter().any(|mount| mount["destination"] == new["destination"]));
    mounts.extend(added);
    // A privileged container has all nodes of its host. One that it has twice was asked for.
    if !asked.is_empty()
        && let Some(listed) = devices(document)
    {
        listed.extend(asked);
    }
    Ok(is_changed.then_some(nodes))
}

/// What the source of a mount is.
enum Source {
    Block(DeviceNode),
    /// The host's /dev itself.
    Dev,
    /// A directory in the file system of /dev.
    BelowDev(PathBuf),
    /// The host's cgroups, where those of the container belong.
    Cgroups,
    Other,
}

impl Source {
    /// Only what is in `dev` by its path is looked at. Other storage may hang, and is looked at when it is mounted. A
    /// block device that is found then is refused.
    fn of(mount: &Value, bundle: &Path, dev: &Path) -> Self {
        let kind = mount["type"].as_str();
        let Some(source) = mount["source"].as_str().filter(|_| is_bind(kind, |name| has_option(mount, name)))
        else {
            return Self::Other;
        };
        let path = bundle.join(source);
        // Mounts that would propagate to the host are refused later.
        let is_shared = has_option(mount, "shared") || has_option(mount, "rshared");
        let destination = mount["destination"].as_str().map(Path::new);
        if path == Path::new(CGROUPS) && destination == Some(Path::new(CGROUPS)) && !is_shared {
            return Self::Cgroups;
        }
        if !path.starts_with(dev) {
            return Self::Other;
        }
        // What cannot be looked at cannot be mounted, and that is an error later.
        let Ok(found) = fs::metadata(&path) else { return Self::Other };
        match (DeviceNode::of(&found), fs::metadata(dev)) {
            (Some(node), _) if node.is_block => Self::Block(node),
            (None, Ok(dev)) if found.is_dir() && found.dev() == dev.dev() => {
                if found.ino() == dev.ino() {
                    Self::Dev
                } else if has_nodes(&path, &mut 0) {
                    Self::BelowDev(path)
                } else {
                    // Of links, as /dev/disk.
                    Self::Other
                }
            }
            _ => Self::Other,
        }
    }
}

fn has_option(mount: &Value, name: &str) -> bool {
    mount["options"].as_array().is_some_and(|options| options.iter().any(|option| option == name))
}

fn node_of(mount: &Value, node: &DeviceNode) -> Value {
    json!({
        "path": mount["destination"],
        "type": if node.is_block { "b" } else { "c" },
        "major": node.major,
        "minor": node.minor,
        "fileMode": node.mode,
        "uid": node.uid,
        "gid": node.gid,
    })
}

/// The nodes of the guest in the place of the host's /dev. Those of the agent are in the container's own /dev.
fn nodes_of_guest(place: &Path) -> impl Iterator<Item = Value> {
    /// A link to that of the container's own terminals.
    const LINK: &str = "ptmx";
    DEVICES.iter().filter_map(move |device| {
        let name = Path::new(device.path).strip_prefix(NODES).ok().filter(|name| *name != Path::new(LINK))?;
        let (kind, mode) = if device.kind == Kind::Block { ("b", 0o660) } else { ("c", 0o666) };
        let path = place.join(name);
        Some(json!({"path": path, "type": kind, "major": device.major, "minor": device.minor, "fileMode": mode}))
    })
}

fn tmpfs(place: &Path, mode: &str) -> Value {
    let options = ["nosuid", "noexec", "strictatime", mode, "size=65536k"];
    json!({"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options})
}

/// The file system in place of a bind mount, with its options.
fn cgroups(bind: &Value) -> Value {
    let usual = ["nosuid", "noexec", "nodev"].map(Value::from);
    let given = bind["options"].as_array().into_iter().flatten();
    let given = given.filter(|option| *option != "bind" && *option != "rbind").cloned();
    let options: Vec<_> = usual.into_iter().chain(given).collect();
    json!({"destination": CGROUPS, "type": "cgroup", "source": "cgroup", "options": options})
}

fn has_namespace(document: &Value, kind: &str) -> bool {
    let namespaces = document["linux"]["namespaces"].as_array();
    namespaces.is_some_and(|all| all.iter().any(|namespace| namespace["type"] == kind))
}

/// The file systems that a host has below /dev.
fn mounts_below(place: &Path) -> [Value; 2] {
    let terminals = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"];
    [
        json!({"destination": place.join("pts"), "type": "devpts", "source": "devpts", "options": terminals}),
        tmpfs(&place.join("shm"), "mode=1777"),
    ]
}

/// Whether there are nodes in a directory of /dev, or more entries than the limit.
fn has_nodes(directory: &Path, seen: &mut usize) -> bool {
    const MAX_ENTRIES: usize = 10_000;
    let Ok(entries) = fs::read_dir(directory) else { return true };
    entries.flatten().any(|entry| {
        *seen += 1;
        match entry.file_type() {
            Ok(kind) if *seen < MAX_ENTRIES && kind.is_dir() => has_nodes(&entry.path(), seen),
            Ok(kind) => *seen >= MAX_ENTRIES || kind.is_block_device() || kind.is_char_device(),
            Err(_) => true,
        }
    })
}

/// `linux.devices`.
fn devices(document: &mut Value) -> Option<&mut Vec<Value>> {
    let linux = document.get_mut("linux")?.as_object_mut()?;
    let listed = linux.entry("devices").or_insert(Value::Null);
    if listed.is_null() {
        *listed = Vec::<Value>::new().into();
    }
    listed.as_array_mut()
}

/// Adds nodes of the guest's devices to `linux.devices`, except where the spec has one at the same path.
pub(super) fn add_missing(document: &mut Value, nodes: Vec<Value>) {
    if nodes.is_empty() {
        return;
    }
    let Some(listed) = devices(document) else { return };
    for node in nodes {
        if !listed.iter().any(|other| other["path"] == node["path"]) {
            listed.push(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::{
        mount::{MntFlags, MsFlags, mount, umount2},
        sys::stat::{Mode, SFlag, makedev, mknod},
    };

    use super::*;
    use crate::testing::private_mounts;

    fn bind(source: &Path, destination: &str) -> Value {
        json!({"destination": destination, "type": "bind", "source": source, "options": ["rbind", "rprivate"]})
    }

    #[test]
    fn the_node_of_a_block_device_is_one_of_the_containers_devices() {
        let dir = tempfile::tempdir().unwrap();
        let (node, link) = (dir.path().join("node"), dir.path().join("link"));
        mknod(&node, SFlag::S_IFBLK, Mode::from_bits_truncate(0o640), makedev(8, 16)).unwrap();
        std::os::unix::fs::symlink("node", &link).unwrap();
        let data = bind(Path::new("/var"), "/data");
        let mounts = json!([bind(&link, "/dev/xvda"), data, {"destination": "/dev", "type": "tmpfs"}]);
        // A privileged container has the node of its host at that path.
        let of_host = json!({"path": "/dev/xvda", "type": "b", "major": 8, "minor": 16});
        let mut document = json!({"mounts": mounts, "linux": {"devices": [of_host]}});
        assert_eq!(replace_below(&mut document, Path::new("/"), dir.path()).unwrap(), Some(Vec::new()));
        assert_eq!(document["mounts"], json!([data, {"destination": "/dev", "type": "tmpfs"}]));
        let expected = json!({
            "path": "/dev/xvda", "type": "b", "major": 8, "minor": 16, "fileMode": 0o640, "uid": 0, "gid": 0,
        });
        assert_eq!(document["linux"]["devices"], json!([of_host, expected]));
    }

    #[test]
    fn the_hosts_dev_has_the_devices_of_the_guest() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        mount(Some("t"), dir.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::create_dir_all(dir.path().join("disk/by-id")).unwrap();
        std::os::unix::fs::symlink("../../sda", dir.path().join("disk/by-id/one")).unwrap();
        fs::create_dir(dir.path().join("dri")).unwrap();
        mknod(&dir.path().join("dri/card0"), SFlag::S_IFCHR, Mode::empty(), makedev(226, 0)).unwrap();
        let own = json!({"destination": "/dev/shm", "type": "bind", "source": "/var"});
        let fuse = json!({"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 0o600});
        let mounts = json!([bind(dir.path(), "/dev"), own]);
        let mut document = json!({"mounts": mounts, "linux": {"devices": [fuse]}});
        let nodes = replace_below(&mut document, Path::new("/"), dir.path()).unwrap().unwrap();
        // They are not taken for nodes of the host.
        assert_eq!(document["linux"]["devices"], json!([fuse]));
        add_missing(&mut document, nodes);
        let mounts = document["mounts"].as_array().unwrap();
        let types: Vec<_> = mounts.iter().map(|it| (it["destination"].clone(), it["type"].clone())).collect();
        assert_eq!(
            types,
            [("/dev", "tmpfs"), ("/dev/shm", "bind"), ("/dev/pts", "devpts")]
                .map(|(a, b)| (a.into(), b.into()))
        );
        let devices = document["linux"]["devices"].as_array().unwrap();
        assert_eq!((devices.len(), &devices[0]), (DEVICES.len() - 1, &fuse));
        assert!(devices.iter().any(|it| it["path"] == "/dev/loop7" && it["type"] == "b"));

        let mut document = json!({"mounts": [bind(&dir.path().join("dri"), "/dri")], "linux": {}});
        let error = replace_below(&mut document, Path::new("/"), dir.path()).unwrap_err().to_string();
        assert!(error.contains("/dri, a directory of the host's devices is not implemented"), "{error}");
        let links = json!({"mounts": [bind(&dir.path().join("disk"), "/dev/disk")], "linux": {}});
        assert_eq!(replace_below(&mut links.clone(), Path::new("/"), dir.path()).unwrap(), None);
        umount2(dir.path(), MntFlags::MNT_DETACH).unwrap();
    }

    #[test]
    fn the_hosts_cgroups_at_their_place_are_those_of_the_guest() {
        let dir = tempfile::tempdir().unwrap();
        let given = |destination: &str, options: &[&str]| {
            let source = CGROUPS;
            json!({"destination": destination, "type": "bind", "source": source, "options": options})
        };
        let elsewhere = given("/host/sys/fs/cgroup", &["rbind", "ro"]);
        let mut document = json!({
            "mounts": [given("/sys/fs/cgroup/", &["ro", "rbind", "rprivate", "rw"]), elsewhere],
            "linux": {"namespaces": [{"type": "user"}, {"type": "cgroup"}]},
        });
        assert!(replace(&mut document, dir.path()).unwrap().unwrap().is_empty());
        let options = ["nosuid", "noexec", "nodev", "ro", "rprivate", "rw"];
        let expected =
            json!({"destination": CGROUPS, "type": "cgroup", "source": "cgroup", "options": options});
        assert_eq!(document["mounts"], json!([expected, elsewhere]));

        let shared = [given(CGROUPS, &["rbind", "rshared"])];
        for document in [
            json!({"mounts": shared, "linux": {}}),
            json!({"mounts": [given(CGROUPS, &["rbind"])], "linux": {"namespaces": [{"type": "user"}]}}),
        ] {
            assert!(replace(&mut document.clone(), dir.path()).unwrap().is_none());
        }
    }

    #[test]
    fn other_mounts_stay() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = json!([
            bind(dir.path(), "/a"),
            bind(Path::new("/nonexistent"), "/b"),
            bind(Path::new("/dev/null"), "/c"),
            {"destination": "/d", "type": "tmpfs", "source": "/dev"},
            {"destination": "/e", "type": "bind"},
            7,
        ]);
        let mut document = json!({"mounts": mounts, "linux": {}});
        assert_eq!(replace(&mut document, Path::new("/")).unwrap(), None);
        assert_eq!(document["mounts"], mounts);
        assert_eq!(replace(&mut json!({}), Path::new("/")).unwrap(), None);
    }
}
