//! The modules of the guest kernel: an archive of them and of an index, which the agent reads
//! (`guest-agent/src/kernel_modules.rs`) when the kernel asks for one.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::initramfs;

/// What the build calls a module that it has compressed.
const EXTENSION: &str = ".ko.xz";

/// Aliases that the kernel never asks for: udev does, when it finds a device or has to make a node.
const OF_UDEV: &[&str] = &["cpu:", "x86cpu:", "devname:", "of:", "acpi", "pci:", "platform:", "hdaudio:"];

/// Archives what `make modules_install` has put below `installed`.
pub(crate) fn archive(installed: &Path) -> Result<Vec<u8>> {
    let root = installed.join("lib/modules");
    let mut versions = fs::read_dir(&root).with_context(|| format!("cannot list {}", root.display()))?;
    let (Some(version), None) = (versions.next(), versions.next()) else {
        bail!("{} is not of one kernel", root.display());
    };
    let directory = version.with_context(|| format!("cannot list {}", root.display()))?.path();
    let read = |name: &str| {
        let path = directory.join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let modules = Modules::read(&read("modules.dep")?)?;
    ensure!(!modules.0.is_empty(), "the kernel has no modules");
    let index = modules.index(&read("modules.alias")?)?;
    let mut files = vec![("index".to_owned(), index.into_bytes())];
    for (name, module) in &modules.0 {
        let path = directory.join(&module.file);
        let data = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        files.push((format!("{name}{EXTENSION}"), data));
    }
    initramfs::modules(&files)
}

/// A module.
#[derive(Debug, PartialEq, Eq)]
struct Module {
    file: PathBuf,
    /// Names of those that must be loaded before it, in this order.
    needed: Vec<String>,
}

/// All of them, by name.
#[derive(Debug)]
struct Modules(BTreeMap<String, Module>);

impl Modules {
    /// Reads what depmod(8) has found out (modules.dep(5)). What must be loaded first comes last there.
    fn read(dependencies: &str) -> Result<Modules> {
        let mut modules = BTreeMap::new();
        for line in dependencies.lines() {
            let (file, needed) =
                line.split_once(':').with_context(|| format!("modules.dep has the line {line:?}"))?;
            let needed = needed.split_ascii_whitespace().rev().map(name).collect::<Result<_>>()?;
            let module = Module { file: file.into(), needed };
            ensure!(modules.insert(name(file)?, module).is_none(), "two modules have the name of {file}");
        }
        Ok(Modules(modules))
    }

    /// The index, with those of depmod's `aliases` that the kernel can ask for.
    fn index(&self, aliases: &str) -> Result<String> {
        let mut lines = Vec::new();
        for (name, Module { needed, .. }) in &self.0 {
            let words = ["module", name].into_iter().chain(needed.iter().map(String::as_str));
            lines.push(words.collect::<Vec<_>>().join(" "));
        }
        for line in aliases.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<&str> = line.split(' ').collect();
            let &["alias", pattern, name] = words.as_slice() else {
                bail!("modules.alias has the line {line:?}");
            };
            ensure!(self.0.contains_key(name), "the alias {pattern} is of {name}, which is no module");
            if OF_UDEV.iter().any(|prefix| pattern.starts_with(prefix)) {
                continue;
            }
            ensure!(!pattern.contains(['?', '[', '\\']), "the agent does not know the pattern {pattern}");
            lines.push(line.to_owned());
        }
        lines.push(String::new());
        Ok(lines.join("\n"))
    }
}

/// The name of the module in a file. The kernel takes `-` and `_` for the same, and the agent looks for the latter.
fn name(file: &str) -> Result<String> {
    let name = file.rsplit('/').next().and_then(|name| name.strip_suffix(EXTENSION));
    let name = name.with_context(|| format!("{file} is not named *{EXTENSION}"))?;
    Ok(name.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str = "kernel/a/first.ko.xz:\nkernel/a/second.ko.xz: kernel/a/first.ko.xz\n\
        kernel/b/dm-third.ko.xz: kernel/a/second.ko.xz kernel/a/first.ko.xz\n";

    #[test]
    fn the_index_has_what_is_needed_in_the_order_of_loading() {
        let aliases = "# comment\nalias block_major_7_* first\nalias devname:third dm_third\n";
        let index = Modules::read(DEPENDENCIES).unwrap().index(aliases).unwrap();
        let expected =
            "module dm_third first second\nmodule first\nmodule second first\nalias block_major_7_* first\n";
        assert_eq!(index, expected);
    }

    #[test]
    fn what_the_agent_could_not_read_is_an_error() {
        let modules = Modules::read(DEPENDENCIES).unwrap();
        for (alias, why) in [
            ("alias a? first", "pattern a?"),
            ("alias a[bc] first", "pattern a[bc]"),
            ("alias a fourth", "no module"),
            ("alias a", "line"),
        ] {
            let error = modules.index(alias).unwrap_err().to_string();
            assert!(error.contains(why), "{alias}: {error}");
        }
        for (lines, why) in
            [("a.ko.xz", "line"), ("a.ko:", "not named"), ("a/b.ko.xz:\nc/b.ko.xz:", "two modules")]
        {
            let error = Modules::read(lines).unwrap_err().to_string();
            assert!(error.contains(why), "{lines}: {error}");
        }
    }
}
