//! The pod that an operator names.

use std::path::Path;

use bulkhead_host_shim::operator::{Pod, pod_named, pod_paths};

use crate::error::CommandError;

/// The pods below `root`. Only their names are known.
pub(crate) fn names(root: &Path) -> Result<Vec<Pod>, CommandError> {
    let paths = pod_paths(root).map_err(|source| CommandError::List { path: root.into(), source })?;
    Ok(paths.iter().map(|path| pod_named(path)).collect())
}

/// The one pod of this id, in this namespace if one is named.
pub(crate) fn find<'p>(
    pods: &'p [Pod],
    wanted: &str,
    namespace: Option<&str>,
) -> Result<&'p Pod, CommandError> {
    let is_wanted =
        |pod: &&Pod| pod.id == wanted && namespace.is_none_or(|namespace| pod.namespace == namespace);
    let found: Vec<_> = pods.iter().filter(is_wanted).collect();
    match found.as_slice() {
        [] => Err(CommandError::NoPod { pod: wanted.into() }),
        [one] => Ok(one),
        several => {
            let places: Vec<_> =
                several.iter().map(|pod| format!("{} of {}", pod.namespace, pod.containerd)).collect();
            Err(CommandError::SeveralPods { pod: wanted.into(), places: places.join(", ") })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_pod_is_named_by_its_id_and_its_namespace_if_necessary() {
        let dir = tempfile::tempdir().unwrap();
        for pod in ["one/demo", "two/demo", "two/new"] {
            fs::create_dir_all(dir.path().join("c").join(pod)).unwrap();
        }
        let pods = names(dir.path()).unwrap();
        assert_eq!(find(&pods, "demo", Some("two")).unwrap().namespace, "two");
        let several = find(&pods, "demo", None).unwrap_err().to_string();
        assert!(several.contains("one of c, two of c") && several.contains("--namespace"), "{several}");
        let none = find(&pods, "dem", None).unwrap_err().to_string();
        assert!(none.contains("bulkhead ps"), "{none}");
    }
}
