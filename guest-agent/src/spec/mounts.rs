//! Options of OCI mounts (runtime-spec, "Linux mount options") to what the mount system calls take.

use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::Mount;

use super::{error::SpecError, id_mappings};
use crate::{
    stage_config::{AttributeChange, IdMappings, MountKind, MountPlan, Propagation},
    syscall::attr,
};

/// Files of /proc that a mount may replace: those by which a container is shown its own share of a machine. Any other
/// there is what the kernel says of itself, or a knob of its security, and a container must not be told another story
/// of it. runc draws the line here too.
const REPLACEABLE: &[&str] = &[
    "cpuinfo",
    "diskstats",
    "loadavg",
    "meminfo",
    "net/dev",
    "slabinfo",
    "stat",
    "swaps",
    "sys/crypto/fips_enabled",
    "sys/kernel/ns_last_pid",
    "uptime",
];

/// Resolves mount number `index` of the spec.
pub(super) fn resolve(index: usize, mount: &Mount) -> Result<MountPlan, SpecError> {
    let destination = Path::new("/").join(mount.destination());
    let field = format!("mounts[{index}] ({})", destination.display());
    if !destination.components().any(|part| matches!(part, Component::Normal(_))) {
        return Err(SpecError::invalid(&field, "cannot be mounted over the root".into()));
    }
    if let Ok(file) = destination.strip_prefix("/proc")
        && file != Path::new("")
        && !REPLACEABLE.iter().any(|replaceable| file == Path::new(replaceable))
    {
        return Err(SpecError::invalid(&field, "cannot be mounted: it is inside /proc".into()));
    }
    let ids = id_mappings::of_mount(
        &format!("{field}: uidMappings and gidMappings"),
        mount.uid_mappings(),
        mount.gid_mappings(),
    )?;
    let options = Options::parse(&field, mount.options().as_deref().unwrap_or_default())?;
    let fs_type = mount.typ().as_deref().unwrap_or_default();
    let kind = if options.bind.is_some() || fs_type == "bind" {
        bind(&field, mount, &options, ids)?
    } else if ids.is_some() {
        return Err(SpecError::unimplemented(format!("{field}: uidMappings of what is no bind mount")));
    } else {
        file_system(&field, fs_type, mount, &options)?
    };
    Ok(MountPlan {
        destination,
        kind,
        attributes: options.attributes,
        recursive_attributes: options.recursive_attributes,
        propagation: options.propagation,
    })
}

fn bind(
    field: &str,
    mount: &Mount,
    options: &Options,
    ids: Option<IdMappings>,
) -> Result<MountKind, SpecError> {
    if options.is_id_mapped && ids.is_none() {
        let reason = "an id-mapped mount without uidMappings and gidMappings of its own";
        return Err(SpecError::unimplemented(format!("{field}: {reason}")));
    }
    let source = mount.source().clone().unwrap_or_default();
    if !source.is_absolute() {
        let reason =
            format!("the source of a bind mount must be an absolute path, not {:?}", source.display());
        return Err(SpecError::invalid(field, reason));
    }
    if let Some((key, _)) = options.parameters.first() {
        return Err(SpecError::invalid(field, format!("a bind mount has no option {key:?}")));
    }
    Ok(MountKind::Bind { source, recursive: options.bind.unwrap_or(true), ids })
}

fn file_system(field: &str, fs_type: &str, mount: &Mount, options: &Options) -> Result<MountKind, SpecError> {
    if fs_type.is_empty() {
        return Err(SpecError::invalid(field, "neither a type nor the option bind is given".into()));
    }
    let source = mount.source().as_ref().map(|s| s.to_string_lossy().into_owned()).filter(|s| !s.is_empty());
    let mut parameters = options.parameters.clone();
    let on_device = source.as_ref().is_some_and(|s| s.starts_with('/'));
    if on_device && options.attributes.set & attr::RDONLY != 0 {
        // A file system on a device must be read-only itself too, or it is written to (journal) on mounting.
        parameters.push(("ro".into(), None));
    }
    // The guest has cgroup v2 only. `cgroup` is what specs for either version call the container's view of it.
    let fs_type = if fs_type == "cgroup" { "cgroup2" } else { fs_type };
    Ok(MountKind::FileSystem { fs_type: fs_type.into(), source, parameters })
}

#[derive(Default)]
struct Options {
    /// Some(recursive) if one of `bind`, `rbind` was given.
    bind: Option<bool>,
    /// Whether `idmap` or `ridmap` was given.
    is_id_mapped: bool,
    attributes: AttributeChange,
    recursive_attributes: AttributeChange,
    propagation: Vec<Propagation>,
    parameters: Vec<(String, Option<String>)>,
}

impl Options {
    fn parse(field: &str, options: &[String]) -> Result<Self, SpecError> {
        let mut parsed = Self::default();
        for option in options {
            match option.as_str() {
                "defaults" => {}
                "bind" => parsed.bind = Some(parsed.bind.unwrap_or(false)),
                "rbind" => parsed.bind = Some(true),
                // What is mounted below is mapped too.
                "idmap" | "ridmap" => parsed.is_id_mapped = true,
                "remount" | "tmpcopyup" => {
                    return Err(SpecError::unimplemented(format!("{field}: option {option:?}")));
                }
                other => parsed.add(other),
            }
        }
        Ok(parsed)
    }

    fn add(&mut self, option: &str) {
        if let Some(propagation) = propagation(option) {
            self.propagation.push(propagation);
        } else if let Some(change) = attribute(option) {
            merge(&mut self.attributes, change);
        } else if let Some(change) = option.strip_prefix('r').and_then(attribute) {
            merge(&mut self.recursive_attributes, change);
        } else {
            let (key, value) = match option.split_once('=') {
                Some((key, value)) => (key, Some(value.to_owned())),
                None => (option, None),
            };
            self.parameters.push((key.to_owned(), value));
        }
    }
}

/// The later option wins, as with mount(8).
fn merge(change: &mut AttributeChange, later: AttributeChange) {
    change.set = (change.set & !later.clear) | later.set;
    change.clear = (change.clear & !later.set) | later.clear;
}

/// A propagation type by the name of its mount option.
pub(super) fn propagation(name: &str) -> Option<Propagation> {
    let one = |flag: libc::c_ulong, recursive| Some(Propagation { flag, recursive });
    match name {
        "private" => one(libc::MS_PRIVATE, false),
        "rprivate" => one(libc::MS_PRIVATE, true),
        "slave" => one(libc::MS_SLAVE, false),
        "rslave" => one(libc::MS_SLAVE, true),
        "shared" => one(libc::MS_SHARED, false),
        "rshared" => one(libc::MS_SHARED, true),
        "unbindable" => one(libc::MS_UNBINDABLE, false),
        "runbindable" => one(libc::MS_UNBINDABLE, true),
        _ => None,
    }
}

fn attribute(name: &str) -> Option<AttributeChange> {
    let set = |bit| Some(AttributeChange { set: bit, clear: 0 });
    let clear = |bit| Some(AttributeChange { set: 0, clear: bit });
    // The access-time modes exclude one another: all their bits are cleared as one is set.
    let atime = |bit| Some(AttributeChange { set: bit, clear: attr::ATIME_MASK });
    match name {
        "ro" => set(attr::RDONLY),
        "rw" => clear(attr::RDONLY),
        "nosuid" => set(attr::NOSUID),
        "suid" => clear(attr::NOSUID),
        "nodev" => set(attr::NODEV),
        "dev" => clear(attr::NODEV),
        "noexec" => set(attr::NOEXEC),
        "exec" => clear(attr::NOEXEC),
        "nodiratime" => set(attr::NODIRATIME),
        "diratime" => clear(attr::NODIRATIME),
        "nosymfollow" => set(attr::NOSYMFOLLOW),
        "symfollow" => clear(attr::NOSYMFOLLOW),
        "noatime" => atime(attr::NOATIME),
        "strictatime" => atime(attr::STRICTATIME),
        // relatime is the kernel's default, and so what is left when another mode is switched off.
        "relatime" | "atime" | "norelatime" | "nostrictatime" => atime(0),
        _ => None,
    }
}

/// Whether the container's /dev is a bind mount, in which case nothing is made in it.
pub(super) fn is_dev_bound(mounts: &[MountPlan]) -> bool {
    mounts.iter().any(|m| is_dev(&m.destination) && matches!(m.kind, MountKind::Bind { .. }))
}

fn is_dev(path: &Path) -> bool {
    path.components().collect::<PathBuf>() == Path::new("/dev")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(json: &str) -> Result<MountPlan, SpecError> {
        resolve(0, &serde_json::from_str(json).unwrap())
    }

    #[test]
    fn a_tmpfs_gets_attributes_and_parameters() {
        let plan = plan(
            r#"{"destination":"/dev","type":"tmpfs","source":"tmpfs",
                "options":["nosuid","strictatime","mode=755","size=65536k"]}"#,
        )
        .unwrap();
        assert_eq!(plan.attributes.set, attr::NOSUID | attr::STRICTATIME);
        assert_eq!(plan.attributes.clear, attr::ATIME_MASK);
        let MountKind::FileSystem { fs_type, source, parameters } = plan.kind else {
            panic!("not a file system")
        };
        assert_eq!((fs_type.as_str(), source.as_deref()), ("tmpfs", Some("tmpfs")));
        assert_eq!(parameters, [("mode".into(), Some("755".into())), ("size".into(), Some("65536k".into()))]);
    }

    #[test]
    fn a_bind_mount_is_recognised_by_its_option_or_type() {
        let by_option =
            plan(r#"{"destination":"/a","type":"none","source":"/s","options":["bind","ro"]}"#).unwrap();
        assert_eq!(by_option.kind, MountKind::Bind { source: "/s".into(), recursive: false, ids: None });
        assert_eq!(by_option.attributes.set, attr::RDONLY);
        let by_type =
            plan(r#"{"destination":"/a","type":"bind","source":"/s","options":["rprivate","rro"]}"#).unwrap();
        assert_eq!(by_type.kind, MountKind::Bind { source: "/s".into(), recursive: true, ids: None });
        assert!(by_type.attributes.is_empty());
        assert_eq!(by_type.recursive_attributes.set, attr::RDONLY);
        assert_eq!(by_type.propagation, [Propagation { flag: libc::MS_PRIVATE, recursive: true }]);
    }

    #[test]
    fn the_later_option_wins() {
        let plan =
            plan(r#"{"destination":"/a","type":"tmpfs","options":["ro","nodev","noatime","rw","relatime"]}"#)
                .unwrap();
        assert_eq!(plan.attributes.set, attr::NODEV);
        assert_eq!(plan.attributes.clear, attr::RDONLY | attr::ATIME_MASK);
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        let cases = [
            (r#"{"destination":"/a","source":"x","options":["bind"]}"#, "must be an absolute path"),
            (r#"{"destination":"/a","source":"/x","options":["bind","size=1"]}"#, "no option \"size\""),
            (r#"{"destination":"/a"}"#, "neither a type"),
            (r#"{"destination":"/a","source":"/x","options":["bind","sync"]}"#, "no option \"sync\""),
            (r#"{"destination":"/a","type":"tmpfs","options":["tmpcopyup"]}"#, "tmpcopyup"),
        ];
        for (json, expected) in cases {
            let error = plan(json).unwrap_err().to_string();
            assert!(error.starts_with("mounts[0] (/a)") && error.contains(expected), "{error}");
        }
    }

    #[test]
    fn nothing_is_mounted_over_the_root() {
        for destination in ["/", "", "/./", "/.."] {
            let json = serde_json::json!({"destination": destination, "type": "tmpfs"});
            assert!(plan(&json.to_string()).is_err(), "{destination:?}");
        }
    }

    #[test]
    fn the_kernels_own_files_are_not_replaced() {
        let over = |path: &str| {
            plan(&format!(
                r#"{{"destination": "{path}", "type": "bind", "source": "/f", "options": ["bind"]}}"#
            ))
        };
        for path in ["/proc/version", "/proc/sys", "/proc/self/attr", "proc/net", "/proc/./sys/kernel"] {
            assert!(over(path).unwrap_err().to_string().contains("inside /proc"), "{path}");
        }
        for path in ["/proc", "/proc/meminfo", "/proc/net/dev", "/process", "/data/proc/version"] {
            over(path).unwrap();
        }
    }

    #[test]
    fn a_read_only_device_is_read_only_below_too() {
        let plan =
            plan(r#"{"destination":"/a","type":"ext4","source":"/dev/vda","options":["ro"]}"#).unwrap();
        let MountKind::FileSystem { parameters, .. } = plan.kind else { panic!("not a file system") };
        assert_eq!(parameters, [("ro".into(), None)]);
    }
}
