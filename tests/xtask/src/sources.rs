//! What the end-to-end cases of each group are made of: as long as that is the same, they would pass on runc again.
//!
//! A group is a file of `tests/e2e/src/cases`, and what this file takes from the files of other groups. All else of the
//! tests' program is common to all groups: its other sources, the packages of this project that it is built with, and
//! the versions and features of all others. `cases/mod.rs` does not count, since it only lists the groups.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::cache::Key;

/// The package of the tests' program.
const E2E: &str = "tests/e2e";
/// The files of its groups.
const CASES: &str = "tests/e2e/src/cases";
/// Files that are compiled into it, or decide how it is compiled.
const COMMON: [&str; 4] = ["Cargo.lock", "Cargo.toml", "contrib", "rust-toolchain.toml"];

/// The digest of each group's sources, by its name, in the project at `root`.
pub(crate) fn of_groups(root: &Path) -> Result<BTreeMap<String, String>> {
    let list = root.join(CASES).join("mod.rs");
    let groups = groups(&read(&list)?)?;
    let of_a_group: BTreeSet<_> = groups.values().map(|file| root.join(CASES).join(file)).collect();

    let mut common = Vec::new();
    for place in COMMON.iter().map(|name| root.join(name)).chain(packages(root, E2E)?) {
        common.extend(files_below(&place)?);
    }
    common.retain(|file| !of_a_group.contains(file) && *file != list);
    let common = digest(root, &common)?;

    let mut digests = BTreeMap::new();
    for (name, file) in groups {
        let files = with_what_they_take(&root.join(CASES).join(file), &of_a_group)?;
        digests.insert(name, digest(root, &files)?.key(&common).hex());
    }
    Ok(digests)
}

/// The file of each group, from lines such as `Group::new("pod_life", pod::life::CASES),`.
fn groups(list: &str) -> Result<BTreeMap<String, PathBuf>> {
    let mut groups = BTreeMap::new();
    for line in list.lines() {
        let Some((_, declared)) = line.split_once("Group::").filter(|_| line.contains("::CASES")) else {
            continue;
        };
        let name = declared.split('"').nth(1).with_context(|| format!("a group without a name: {line}"))?;
        let module = declared.split(", ").nth(1).and_then(|rest| rest.split_once("::CASES"));
        let (module, _) = module.with_context(|| format!("a group without a module: {line}"))?;
        groups.insert(name.to_owned(), PathBuf::from(format!("{}.rs", module.replace("::", "/"))));
    }
    ensure!(!groups.is_empty(), "no groups in {CASES}/mod.rs");
    Ok(groups)
}

/// A group's file, those of other groups from which it takes something, those from which they do, and so on.
fn with_what_they_take(file: &Path, groups: &BTreeSet<PathBuf>) -> Result<Vec<PathBuf>> {
    let mut found = BTreeSet::from([file.to_owned()]);
    let mut left = vec![file.to_owned()];
    while let Some(file) = left.pop() {
        let taken = modules_taken(&read(&file)?);
        for other in groups {
            let name = other.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            if taken.contains(name) && found.insert(other.clone()) {
                left.push(other.clone());
            }
        }
    }
    Ok(found.into_iter().collect())
}

/// The words that follow `super::`, `pod::` or `cases::`, alone or in braces: among them are all modules of other
/// groups that are used.
fn modules_taken(text: &str) -> BTreeSet<String> {
    let mut taken = BTreeSet::new();
    for path in ["super::", "pod::", "cases::"] {
        for (at, _) in text.match_indices(path) {
            let rest = &text[at + path.len()..];
            let named = if rest.starts_with('{') {
                // Up to the line that ends the use; braces may hold others.
                rest.split(';').next()
            } else {
                rest.split(|c: char| !is_of_a_word(c)).next()
            };
            let words = named.unwrap_or_default().split(|c: char| !is_of_a_word(c));
            taken.extend(words.filter(|word| !word.is_empty()).map(str::to_owned));
        }
    }
    taken
}

fn is_of_a_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The directory of a package of this project, and those of all others that it is built with.
fn packages(root: &Path, package: &str) -> Result<Vec<PathBuf>> {
    let workspace: toml::Table = read(&root.join("Cargo.toml"))?.parse().context("Cargo.toml is no TOML")?;
    let ours = |name: &str| {
        let path = workspace.get("workspace")?.get("dependencies")?.get(name)?.get("path")?;
        Some(path.as_str()?.to_owned())
    };
    let (mut found, mut left) = (BTreeSet::from([package.to_owned()]), vec![package.to_owned()]);
    while let Some(package) = left.pop() {
        let file = root.join(&package).join("Cargo.toml");
        let manifest: toml::Table =
            read(&file)?.parse().with_context(|| format!("{} is no TOML", file.display()))?;
        for kind in ["dependencies", "build-dependencies"] {
            let names =
                manifest.get(kind).and_then(|table| table.as_table()).into_iter().flat_map(toml::Table::keys);
            left.extend(names.filter_map(|name| ours(name)).filter(|path| found.insert(path.clone())));
        }
    }
    Ok(found.into_iter().map(|package| root.join(package)).collect())
}

/// The file itself, or all files below a directory, in an order that is always the same.
fn files_below(place: &Path) -> Result<Vec<PathBuf>> {
    let context = || format!("cannot list {}", place.display());
    if !place.metadata().with_context(context)?.is_dir() {
        return Ok(vec![place.to_owned()]);
    }
    let mut entries = fs::read_dir(place)
        .with_context(context)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    entries.sort();
    let files = entries.iter().map(|entry| files_below(entry)).collect::<Result<Vec<_>>>()?;
    Ok(files.concat())
}

fn digest(root: &Path, files: &[PathBuf]) -> Result<Key> {
    files.iter().try_fold(Key::new(), |key, file| {
        let name = file.strip_prefix(root).unwrap_or(file);
        key.bytes(name.as_os_str().as_encoded_bytes()).file(file)
    })
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::dist::source_dir;

    /// A project with the groups `exec`, which takes something from `jail`, `jail`, and `pod_life`.
    fn project() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let list = "Group::new(\"exec\", exec::CASES),\n    Group::brief(\"jail\", jail::CASES),\n\
                    Group::new(\"pod_life\", pod::life::CASES),\n";
        let workspace = "[workspace.dependencies]\nours = { path = \"ours\" }\nmore = { path = \"more\" }\nserde = \"1\"\n";
        for (file, text) in [
            ("Cargo.lock", ""),
            ("Cargo.toml", workspace),
            ("rust-toolchain.toml", ""),
            ("contrib/file", ""),
            ("ours/Cargo.toml", "[dependencies]\nmore.workspace = true\n"),
            ("more/Cargo.toml", ""),
            ("more/src/lib.rs", ""),
            ("other/src/lib.rs", ""),
            ("tests/e2e/Cargo.toml", "[dependencies]\nours.workspace = true\nserde.workspace = true\n"),
            ("tests/e2e/src/main.rs", ""),
            ("tests/e2e/src/cases/mod.rs", list),
            ("tests/e2e/src/cases/case.rs", ""),
            (
                "tests/e2e/src/cases/exec.rs",
                "use super::{\n    Case,\n    other::{Some, more},\n    jail::Vmm,\n};\n",
            ),
            ("tests/e2e/src/cases/jail.rs", "use super::Case;\n"),
            ("tests/e2e/src/cases/pod/mod.rs", ""),
            ("tests/e2e/src/cases/pod/life.rs", "use super::super::Case;\n"),
        ] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    /// The groups whose digest changes when this is added to a file.
    fn changed_by(file: &str) -> Vec<String> {
        let project = project();
        let before = of_groups(project.path()).unwrap();
        let path = project.path().join(file);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{text}# more\n")).unwrap();
        let after = of_groups(project.path()).unwrap();
        assert_eq!((before.len(), after.len()), (3, 3));
        before.into_iter().filter(|(name, digest)| after[name] != *digest).map(|(name, _)| name).collect()
    }

    #[test]
    fn a_group_changes_with_its_file_and_with_those_that_it_takes_from() {
        assert_eq!(changed_by("tests/e2e/src/cases/exec.rs"), ["exec"]);
        assert_eq!(changed_by("tests/e2e/src/cases/jail.rs"), ["exec", "jail"]);
        assert_eq!(changed_by("tests/e2e/src/cases/pod/life.rs"), ["pod_life"]);
    }

    #[test]
    fn all_groups_change_with_what_is_common_to_them() {
        for file in [
            "Cargo.lock",
            "Cargo.toml",
            "contrib/file",
            "more/src/lib.rs",
            "tests/e2e/Cargo.toml",
            "tests/e2e/src/main.rs",
            "tests/e2e/src/cases/case.rs",
            "tests/e2e/src/cases/pod/mod.rs",
        ] {
            assert_eq!(changed_by(file), ["exec", "jail", "pod_life"], "{file}");
        }
    }

    #[test]
    fn nothing_changes_with_other_packages_and_lists() {
        for file in ["other/src/lib.rs", "tests/e2e/src/cases/mod.rs"] {
            assert_eq!(changed_by(file), [""; 0], "{file}");
        }
    }

    #[test]
    fn the_groups_of_this_project_are_found() {
        let digests = of_groups(source_dir()).unwrap();
        assert!(digests.len() > 30 && digests.contains_key("pods_at_once"), "{digests:?}");
    }
}
