//! `linux.uidMappings` and `linux.gidMappings`: the ids of a user namespace.

use oci_spec::runtime::{Linux, LinuxIdMapping};

use super::error::SpecError;
use crate::stage_config::{IdMappings, IdRange, outside};

/// As many ranges as the kernel takes (user_namespaces(7)).
const MOST: usize = 340;

/// Resolves both for a container in a user namespace of its own or of its pod. A container of a pod names the ids of
/// the pod.
pub(super) fn resolve(linux: &Linux, has_namespace: bool) -> Result<Option<IdMappings>, SpecError> {
    let mappings = IdMappings {
        users: ranges("linux.uidMappings", linux.uid_mappings(), has_namespace)?,
        groups: ranges("linux.gidMappings", linux.gid_mappings(), has_namespace)?,
    };
    Ok(has_namespace.then_some(mappings))
}

/// Resolves the ids of a mount. Inside are those on the file system, outside those at the mount (runtime-spec,
/// config.md, "POSIX-platform Mounts"). None: they are the same.
pub(super) fn of_mount(
    field: &str,
    users: &Option<Vec<LinuxIdMapping>>,
    groups: &Option<Vec<LinuxIdMapping>>,
) -> Result<Option<IdMappings>, SpecError> {
    let count = |ids: &Option<Vec<_>>| ids.as_ref().map_or(0, Vec::len);
    match (count(users), count(groups)) {
        (0, 0) => Ok(None),
        (1..=MOST, 1..=MOST) => Ok(Some(IdMappings { users: all(users), groups: all(groups) })),
        _ => Err(SpecError::invalid(field, "needs ranges of both users and groups, and not too many".into())),
    }
}

fn all(mappings: &Option<Vec<LinuxIdMapping>>) -> Vec<IdRange> {
    let range = |range: &LinuxIdMapping| IdRange {
        inside: range.container_id(),
        outside: range.host_id(),
        length: range.size(),
    };
    mappings.iter().flatten().map(range).collect()
}

fn ranges(
    field: &str,
    mappings: &Option<Vec<LinuxIdMapping>>,
    has_namespace: bool,
) -> Result<Vec<IdRange>, SpecError> {
    let ranges = all(mappings);
    let problem = match (has_namespace, ranges.len()) {
        (false, 0) => return Ok(Vec::new()),
        (false, _) => "needs a user namespace",
        (true, 0) => "must be set for a user namespace",
        (true, 1..=MOST) => "",
        (true, _) => "has too many ranges",
    };
    if !problem.is_empty() {
        return Err(SpecError::invalid(field, problem.into()));
    }
    // The container is built by its root.
    match outside(&ranges, 0) {
        Some(_) => Ok(ranges),
        None => Err(SpecError::invalid(field, "has no id for the container's 0".into())),
    }
}
