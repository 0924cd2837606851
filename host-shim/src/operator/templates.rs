//! The templates of this host.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::Serialize;

use crate::{
    host::no_symlinks::gone,
    operator::pods::Pod,
    types::config::Config,
    vm::{
        memory::MemoryRange,
        template::{self, DIR},
    },
};

/// A saved VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Template {
    /// Its name, which is a digest of what it was made from and for.
    pub name: String,
    /// Its directory.
    pub path: PathBuf,
    /// Whether pods can use it.
    pub state: TemplateState,
    /// The memory or storage that its files take.
    pub bytes: u64,
    /// The seconds since it was completed.
    pub age_seconds: Option<u64>,
    /// How many pods are clones of it.
    pub clones: usize,
}

/// Whether pods can use a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TemplateState {
    /// It is complete.
    Complete,
    /// Its kernel, agent or VMM was replaced. The next pod that makes a template removes it, and so does `bulkhead gc`.
    Outdated,
    /// A pod makes it at this moment, or its shim was killed meanwhile.
    Unfinished,
}

/// The templates below `root`, sorted by name. Only clones among these pods are counted.
pub(super) fn templates_of(root: &Path, pods: &[Pod]) -> io::Result<Vec<Template>> {
    let entries = match fs::read_dir(root.join(DIR)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut templates = Vec::new();
    for entry in entries {
        let path = match entry {
            // The directory was removed meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => break,
            other => other?.path(),
        };
        let state = match () {
            () if template::is_unfinished(&path) => TemplateState::Unfinished,
            () if template::is_outdated(&path) => TemplateState::Outdated,
            () => TemplateState::Complete,
        };
        let modified = fs::metadata(&path).and_then(|metadata| metadata.modified()).ok();
        templates.push(Template {
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            state,
            bytes: size(&path),
            age_seconds: modified
                .and_then(|time| SystemTime::now().duration_since(time).ok())
                .map(|age| age.as_secs()),
            clones: pods.iter().filter(|pod| pod.template.as_ref() == Some(&path)).count(),
            path,
        });
    }
    templates.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(templates)
}

/// Removes the template with this name below `root`. Its clones keep their memory. Fails with `NotFound` if there is
/// none of this name that is complete.
pub fn remove_template(root: &Path, name: &str) -> io::Result<()> {
    let path = root.join(DIR).join(name);
    // Neither a path elsewhere, nor one that is being made.
    let is_name = Path::new(name).components().count() == 1 && path.file_name() == Some(name.as_ref());
    if !is_name || template::is_unfinished(&path) {
        return Err(io::ErrorKind::NotFound.into());
    }
    template::remove(&path)
}

/// The names of the templates below `root` that [`remove_template`] can remove.
pub fn template_names(root: &Path) -> io::Result<Vec<String>> {
    let templates = templates_of(root, &[])?.into_iter();
    Ok(templates.filter(|it| it.state != TemplateState::Unfinished).map(|it| it.name).collect())
}

/// Removes all templates below `root`, and the directories if nothing else is in them. One that is being made is left
/// alone. Returns how many were removed.
pub fn remove_all_templates(root: &Path) -> io::Result<usize> {
    let mut removed = 0;
    for name in template_names(root)? {
        // A pod that makes a template may have removed it meanwhile, because it is outdated.
        gone(remove_template(root, &name))?;
        removed += 1;
    }
    Ok(removed + remove_unused_templates(root)?.len())
}

/// Removes the templates below `root` that were never completed or that no pod will use, and the directories if nothing
/// else is in them. One that is being made is left alone. Returns the names.
pub fn remove_unused_templates(root: &Path) -> io::Result<Vec<String>> {
    let directory = root.join(DIR);
    let removed = template::remove_unused(&directory)?.unwrap_or_default();
    for directory in [directory.as_path(), root] {
        // Fails if there is a pod, or a template in the making.
        drop(fs::remove_dir(directory));
    }
    let name = |path: PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(removed.into_iter().map(|(path, _)| name(path)).collect())
}

/// What the files of a template take, without its holes.
fn size(path: &Path) -> u64 {
    let files = fs::read_dir(path).into_iter().flatten().flatten();
    files.filter_map(|entry| Some(entry.metadata().ok()?.blocks().saturating_mul(512))).sum()
}

/// The most that a template takes in /run on this host, MiB. It is that of a VM whose containers may have no memory
/// limit.
pub fn largest_template_mib(config: &Config) -> u32 {
    template::most_mib(MemoryRange::of_vm(config, false, None).least)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::operator::sample::templates;

    #[test]
    fn a_template_that_somebody_else_removes_keeps_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        for name in 0..200 {
            fs::create_dir_all(root.join(DIR).join(format!("{name:04x}"))).unwrap();
        }
        thread::scope(|scope| {
            let others: Vec<_> = (0..4).map(|_| scope.spawn(|| remove_all_templates(&root))).collect();
            let removed = others.into_iter().map(|other| other.join().unwrap().unwrap()).sum::<usize>();
            assert!(removed >= 200, "{removed}");
        });
        assert!(!root.exists());
    }

    #[test]
    fn templates_are_listed_and_removed_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(templates(root).unwrap(), []);
        let at = |name: &str| root.join(DIR).join(name);
        for name in ["00ff", "11ee", ".77"] {
            fs::create_dir_all(at(name)).unwrap();
            fs::write(at(name).join("memory"), vec![1; 10_000]).unwrap();
        }
        fs::write(at("11ee/parts.json"), "[damaged").unwrap();
        fs::create_dir_all(root.join("c/ns/pod")).unwrap();
        let config = serde_json::json!({"api_version": 8, "kernel": "k", "initramfs": "i", "vcpus": 1,
            "memory_mib": 256, "control": "c", "vsock": "v", "restore_from": at("00ff")});
        fs::write(root.join("c/ns/pod/vmm.json"), config.to_string()).unwrap();
        let found = templates(root).unwrap();
        let seen: Vec<_> = found.iter().map(|it| (it.name.as_str(), it.state, it.clones)).collect();
        assert_eq!(
            seen,
            [
                (".77", TemplateState::Unfinished, 0),
                ("00ff", TemplateState::Complete, 1),
                ("11ee", TemplateState::Outdated, 0),
            ]
        );
        assert!(found.iter().all(|it| it.bytes >= 10_000 && it.age_seconds.is_some()), "{found:?}");
        for name in [".77", "..", "../c", "00ff/", "00ff/memory", "/", "", "22"] {
            let refused = remove_template(root, name).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::NotFound, "{name}");
        }
        remove_template(root, "00ff").unwrap();
        let left: Vec<_> = templates(root).unwrap().into_iter().map(|it| it.name).collect();
        assert_eq!(left, [".77", "11ee"]);
        assert_eq!(remove_all_templates(root).unwrap(), 2);
        assert!(!root.join(DIR).exists() && root.join("c/ns/pod").exists());
        fs::remove_dir_all(root.join("c")).unwrap();
        assert_eq!(remove_all_templates(root).unwrap(), 0);
        assert!(!root.exists());
    }
}
