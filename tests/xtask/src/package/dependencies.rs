//! The packages of others that are compiled into what is shipped: their licenses, and a list for tools that look for
//! known vulnerabilities (CycloneDX 1.5).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::json;

use crate::dist::{SHIPPED, TARGET, cargo};
use crate::kernel::Source;

/// How the names of files with a license begin.
const LICENSE_FILES: [&str; 4] = ["LICENSE", "LICENCE", "COPYING", "NOTICE"];

/// A package of somebody else.
#[derive(Debug, Clone)]
pub(super) struct Dependency {
    name: String,
    version: String,
    license: String,
    directory: PathBuf,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    manifest_path: PathBuf,
    /// None: it is of this workspace.
    source: Option<String>,
}

/// The dependencies of all programs that are shipped, by their names.
pub(super) fn shipped() -> Result<Vec<Dependency>> {
    let output = |arguments: &[&str]| {
        let mut command = cargo();
        let output = command.args(arguments).arg("--locked").output().context("cannot run cargo")?;
        ensure!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).context("cargo prints something else")
    };
    // The features are those of these packages alone. `metadata` knows only those of the whole workspace.
    let mut tree =
        vec!["tree", "--edges=normal,no-proc-macro", "--target", TARGET, "--prefix=none", "--format={p}"];
    tree.extend(SHIPPED.iter().flat_map(|package| ["--package", package]));
    let tree = output(&tree)?;
    // `tokio v1.54.0`, and for some another word.
    let compiled: BTreeSet<_> = tree.lines().filter_map(name_and_version).collect();
    let metadata = output(&["metadata", "--format-version=1", "--filter-platform", TARGET])?;
    let metadata: Metadata =
        serde_json::from_str(&metadata).context("cargo metadata prints something else")?;
    let mut dependencies: Vec<_> = metadata
        .packages
        .into_iter()
        .filter(|it| it.source.is_some() && compiled.contains(&(it.name.as_str(), it.version.as_str())))
        .map(|it| Dependency {
            name: it.name,
            version: it.version,
            license: it.license.unwrap_or_else(|| "see its license file".into()),
            directory: it.manifest_path.parent().unwrap_or(Path::new("/")).to_owned(),
        })
        .collect();
    dependencies.sort_by(|one, other| (&one.name, &one.version).cmp(&(&other.name, &other.version)));
    Ok(dependencies)
}

fn name_and_version(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split(' ');
    Some((words.next()?, words.next()?.strip_prefix('v')?))
}

/// The licenses of all, each text once.
pub(super) fn licenses(dependencies: &[Dependency]) -> Result<Vec<u8>> {
    let mut text = String::from(
        "Bulkhead's programs contain these packages. The texts of their licenses follow.\n\
         The guest's kernel is Linux, GPL-2.0 with the syscall note. Its source is named in kernel-source.toml.\n\n",
    );
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for Dependency { name, version, license, directory } in dependencies {
        text.push_str(&format!("{name} {version}: {license}\n"));
        let context = || format!("cannot read the license of {name}");
        for entry in fs::read_dir(directory).with_context(context)? {
            let path = entry.with_context(context)?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
            if path.is_file() && LICENSE_FILES.iter().any(|begin| file.starts_with(begin)) {
                let license = fs::read_to_string(&path).with_context(context)?;
                texts.entry(license.trim().to_owned()).or_default().push(format!("{name} {version}"));
            }
        }
    }
    for (license, mut users) in texts {
        users.dedup();
        text.push_str(&format!("\n{}\n{}:\n\n{license}\n", "-".repeat(80), users.join(", ")));
    }
    Ok(text.into_bytes())
}

/// The list of components. It has neither a time nor a random number, so that it is the same for the same sources.
pub(super) fn sbom(dependencies: &[Dependency], version: &str, kernel: &Source) -> Result<Vec<u8>> {
    let Source { package, version: kernel, .. } = kernel;
    let mut components = vec![json!({
        "type": "operating-system", "name": package, "version": kernel,
        "purl": format!("pkg:deb/debian/{package}@{kernel}"),
    })];
    components.extend(dependencies.iter().map(|Dependency { name, version, license, .. }| {
        json!({
            "type": "library", "name": name, "version": version, "purl": format!("pkg:cargo/{name}@{version}"),
            // Some still write `/` where SPDX has `OR`.
            "licenses": [{"expression": license.replace('/', " OR ")}],
        })
    }));
    let sbom = json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": {"type": "application", "name": "bulkhead", "version": version}},
        "components": components,
    });
    serde_json::to_vec_pretty(&sbom).context("cannot write the list of components")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compiled_in_is_listed_and_what_only_builds_is_not() {
        let dependencies = shipped().unwrap();
        let names: BTreeSet<_> = dependencies.iter().map(|it| it.name.as_str()).collect();
        assert!(names.contains("ttrpc") && names.contains("kvm-ioctls") && names.contains("comfy-table"));
        for other in ["ttrpc-codegen", "tempfile", "proptest", "bulkhead-vmm-api", "tonic"] {
            assert!(!names.contains(other), "{other}");
        }
        let licenses = String::from_utf8(licenses(&dependencies).unwrap()).unwrap();
        assert!(licenses.contains("Permission is hereby granted") && licenses.contains("tokio 1."));
        assert!(!licenses.contains("/root/") && !licenses.contains(".cargo"), "no path of this machine");
        // Each map of a process has another order.
        let again = shipped().unwrap();
        assert_eq!(self::licenses(&again).unwrap(), licenses.as_bytes());
        let text = "package = 'linux-source-6.12'\nversion = '6.12.999-1'\narchive = 'a'\nsha256 = 'b'";
        let kernel: Source = toml::from_str(text).unwrap();
        let sbom = |dependencies: &[Dependency]| self::sbom(dependencies, "1.2.3", &kernel).unwrap();
        assert_eq!(sbom(&again), sbom(&dependencies));
        let sbom: serde_json::Value = serde_json::from_slice(&sbom(&dependencies)).unwrap();
        assert_eq!(sbom["components"].as_array().unwrap().len(), dependencies.len() + 1);
        // The one that the kernel was built from, which need not be the pinned one.
        assert_eq!(sbom["components"][0]["purl"], "pkg:deb/debian/linux-source-6.12@6.12.999-1");
    }
}
