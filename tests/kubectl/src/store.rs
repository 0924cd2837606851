//! What the API server of a cluster keeps, in a file.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

const FILE: &str = "/run/kubectl-stand-in.json";

/// A RuntimeClass, with the fields that the API has and this project uses. Any other field is an error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Class {
    api_version: String,
    kind: String,
    pub(crate) metadata: Metadata,
    pub(crate) handler: String,
    pub(crate) overhead: Overhead,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Metadata {
    pub(crate) name: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Overhead {
    pub(crate) pod_fixed: BTreeMap<String, String>,
}

impl Class {
    /// Reads a manifest.
    pub(crate) fn read(yaml: &str) -> Result<Self> {
        let class: Self = serde_yaml_ng::from_str(yaml)?;
        let (version, kind) = (class.api_version.as_str(), class.kind.as_str());
        ensure!((version, kind) == ("node.k8s.io/v1", "RuntimeClass"), "it is a {kind} of {version}");
        Ok(class)
    }

    /// The number of a quantity of the overhead, which must have this unit.
    pub(crate) fn quantity(&self, of: &str, unit: &str) -> Result<i64> {
        let text = self.overhead.pod_fixed.get(of).with_context(|| format!("no overhead of {of}"))?;
        let number = text.strip_suffix(unit).with_context(|| format!("{of}: {text} is not in {unit}"))?;
        number.parse().with_context(|| format!("{of}: {text}"))
    }
}

/// A pod of one container.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Pod {
    /// The RuntimeClass.
    pub(crate) class: String,
    /// The ids that the CRI gave.
    pub(crate) sandbox: String,
    pub(crate) container: String,
    pub(crate) cgroup: String,
}

/// All objects, by their names.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Store {
    pub(crate) classes: BTreeMap<String, Class>,
    pub(crate) pods: BTreeMap<String, Pod>,
}

impl Store {
    /// Reads what the last command has saved.
    pub(crate) fn open() -> Result<Self> {
        match fs::read(FILE) {
            Ok(bytes) => serde_json::from_slice(&bytes).context(FILE),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).context(FILE),
        }
    }

    pub(crate) fn save(&self) -> Result<()> {
        fs::write(FILE, serde_json::to_vec(self)?).context(FILE)
    }

    pub(crate) fn class(&self, name: &str) -> Result<&Class> {
        self.classes.get(name).with_context(|| format!("runtimeclasses.node.k8s.io \"{name}\" not found"))
    }

    pub(crate) fn pod(&self, name: &str) -> Result<&Pod> {
        self.pods.get(name).with_context(|| format!("pods \"{name}\" not found"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const CLASS: &str = include_str!("../../../contrib/kubernetes/runtimeclass.yaml");

    #[test]
    fn the_class_of_the_package_is_read_and_others_are_refused() {
        let class = Class::read(CLASS).unwrap();
        assert_eq!((class.metadata.name.as_str(), class.handler.as_str()), ("bulkhead", "bulkhead"));
        assert_eq!(
            (class.quantity("cpu", "m").unwrap(), class.quantity("memory", "Mi").unwrap()),
            (100, 128)
        );
        assert!(class.quantity("memory", "Gi").is_err());
        for (old, new, reason) in [
            ("handler:", "handlers:", "unknown field `handlers`"),
            ("RuntimeClass", "PodClass", "it is a PodClass"),
            ("podFixed", "fixed", "unknown field `fixed`"),
        ] {
            let error = format!("{:#}", Class::read(&CLASS.replace(old, new)).unwrap_err());
            assert!(error.contains(reason), "{error}");
        }
    }
}
