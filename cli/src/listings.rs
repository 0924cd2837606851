//! The commands that list what is there: pods, templates, settings, and what nobody uses any more.

use std::{
    io::{self, Write},
    path::Path,
};

use bulkhead_host_shim::operator::{
    BuildError, Built, Garbage, Pod, PodState, Removed, Template, TemplateState, build_templates, chain,
    garbage, one_line, pods, remove_garbage, remove_template, templates,
};

use crate::{
    config_file::ConfigFile,
    error::CommandError,
    output::{age, listing, mib, or_none},
    run::directory::{leftovers, remove_leftovers},
};

/// `bulkhead ps`.
pub(crate) fn ps(
    out: &mut impl Write,
    errors: &mut impl Write,
    root: &Path,
    is_json: bool,
) -> Result<(), CommandError> {
    let pods = pods(root).map_err(|source| CommandError::List { path: root.into(), source })?;
    let header =
        ["NAMESPACE", "ID", "STATE", "CONTAINERS", "SHIM", "VMM", "MEMORY", "VCPUS", "AGE", "CONTAINERD"];
    let cells = |pod: &Pod| {
        [
            pod.namespace.clone(),
            pod.id.clone(),
            state_name(pod.state).into(),
            pod.containers.len().to_string(),
            or_none(pod.shim_pid),
            or_none(pod.vmm_pid),
            or_none(pod.memory_bytes.map(mib)),
            or_none(pod.vcpus),
            or_none(pod.age_seconds.map(age)),
            pod.containerd.clone(),
        ]
    };
    listing(out, is_json, &pods, header, cells).map_err(CommandError::Output)?;
    // In JSON, each pod has its problems.
    if !is_json {
        for problem in pods.iter().flat_map(|pod| &pod.problems) {
            writeln!(errors, "warning: {problem}").map_err(CommandError::Output)?;
        }
    }
    Ok(())
}

fn state_name(state: PodState) -> &'static str {
    match state {
        PodState::Running => "running",
        PodState::Crashed => "crashed",
        PodState::Leftover => "leftover",
        PodState::Unknown => "unknown",
    }
}

/// `bulkhead template ls`.
pub(crate) fn template_ls(out: &mut impl Write, root: &Path, is_json: bool) -> Result<(), CommandError> {
    let templates = templates(root).map_err(|source| CommandError::List { path: root.into(), source })?;
    let cells = |template: &Template| {
        let state = match template.state {
            TemplateState::Complete => "complete",
            TemplateState::Outdated => "outdated",
            TemplateState::Unfinished => "unfinished",
        };
        [
            one_line(&template.name),
            state.into(),
            mib(template.bytes),
            or_none(template.age_seconds.map(age)),
            template.clones.to_string(),
        ]
    };
    listing(out, is_json, &templates, ["NAME", "STATE", "SIZE", "AGE", "CLONES"], cells)
        .map_err(CommandError::Output)
}

/// `bulkhead template build`.
pub(crate) fn template_build(
    out: &mut impl Write,
    root: &Path,
    config: &ConfigFile,
) -> Result<(), CommandError> {
    let tell = |built: Built| {
        let name = one_line(&built.path.file_name().unwrap_or_default().to_string_lossy());
        let (online, vcpus) = built.vcpus;
        let vm = format!("{} MiB, {online} of {vcpus} vCPUs online", built.memory_mib);
        match built.took {
            Some(took) => writeln!(out, "made {name} ({vm}) in {:.1} s", took.as_secs_f64())?,
            None => writeln!(out, "kept {name} ({vm})")?,
        }
        // So that it is seen while the next one is made.
        out.flush()
    };
    build_templates(root, &config.load()?, tell).map_err(|error| match error {
        BuildError::Tell(error) => CommandError::Output(error),
        error => CommandError::Build(error),
    })
}

/// `bulkhead template rm`.
pub(crate) fn template_rm(
    out: &mut impl Write,
    root: &Path,
    names: Vec<String>,
    all: bool,
) -> Result<(), CommandError> {
    let names = if all {
        let found = templates(root).map_err(|source| CommandError::List { path: root.into(), source })?;
        let complete = found.into_iter().filter(|template| template.state != TemplateState::Unfinished);
        complete.map(|template| template.name).collect()
    } else {
        names
    };
    for name in names {
        match remove_template(root, &name) {
            Ok(()) => writeln!(out, "removed {}", one_line(&name)).map_err(CommandError::Output)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(CommandError::NoTemplate { name: one_line(&name) });
            }
            Err(source) => return Err(CommandError::Remove { path: name.into(), source }),
        }
    }
    Ok(())
}

/// `bulkhead config show`.
pub(crate) fn config_show(
    out: &mut impl Write,
    config: &ConfigFile,
    is_json: bool,
) -> Result<(), CommandError> {
    let settings = config.load()?.settings();
    listing(out, is_json, &settings, ["KEY", "VALUE", "ORIGIN"], |setting| {
        let origin =
            setting.origin.as_ref().map_or_else(|| "default".into(), |path| path.display().to_string());
        [setting.key.into(), or_none(setting.value.as_ref()), origin]
    })
    .map_err(CommandError::Output)
}

/// Why a run has left something.
const KILLED: &str = "its `bulkhead run` was killed";

/// `bulkhead gc`. Returns whether everything was removed.
pub(crate) fn gc(
    out: &mut impl Write,
    root: &Path,
    dry_run: bool,
    is_json: bool,
) -> Result<bool, CommandError> {
    let list = |source| CommandError::List { path: root.into(), source };
    let path = |garbage: &Garbage| one_line(&garbage.path.display().to_string());
    if dry_run {
        let mut found = garbage(root).map_err(list)?;
        found.extend(leftovers().into_iter().map(|path| Garbage { path, reason: KILLED }));
        let cells = |garbage: &Garbage| [path(garbage), garbage.reason.to_owned()];
        listing(out, is_json, &found, ["WOULD BE REMOVED", "WHY"], cells).map_err(CommandError::Output)?;
        return Ok(true);
    }
    // First those of killed runs, because their shims still live.
    let runs = remove_leftovers().into_iter().map(|(path, removed)| Removed {
        garbage: Garbage { path, reason: KILLED },
        error: removed.err().map(|error| chain(&error)),
    });
    let mut removed: Vec<_> = runs.collect();
    removed.extend(remove_garbage(root));
    let cells = |removed: &Removed| {
        let result =
            removed.error.as_ref().map_or_else(|| "removed".into(), |error| format!("failed: {error}"));
        [path(&removed.garbage), result, removed.garbage.reason.to_owned()]
    };
    listing(out, is_json, &removed, ["PATH", "RESULT", "WHY"], cells).map_err(CommandError::Output)?;
    Ok(removed.iter().all(|removed| removed.error.is_none()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn shown(show: impl FnOnce(&mut Vec<u8>) -> Result<(), CommandError>) -> String {
        let mut out = Vec::new();
        show(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn pods_that_cannot_be_read_are_listed_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("run-containerd-containerd.sock/k8s.io/demo")).unwrap();
        let mut errors = Vec::new();
        let table = shown(|out| ps(out, &mut errors, dir.path(), false));
        let row: Vec<_> = table.lines().nth(1).unwrap().split_whitespace().collect();
        let expected =
            ["k8s.io", "demo", "unknown", "0", "-", "-", "-", "-", "-", "run-containerd-containerd.sock"];
        assert_eq!(row, expected);
        let errors = String::from_utf8(errors).unwrap();
        assert!(errors.starts_with("warning: ") && errors.contains("cannot read the journal"), "{errors}");
        let json = shown(|out| ps(out, &mut Vec::new(), dir.path(), true));
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json[0]["state"], "unknown");
        assert_eq!(json[0]["problems"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn templates_are_removed_by_name_or_all() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["00ff", "11ee", ".77"] {
            fs::create_dir_all(dir.path().join(".templates").join(name)).unwrap();
        }
        let table = shown(|out| template_ls(out, dir.path(), false));
        assert!(table.contains("00ff  complete    0.0 MiB"), "{table}");
        let error = template_rm(&mut Vec::new(), dir.path(), vec!["22".into()], false).unwrap_err();
        assert!(error.to_string().starts_with("there is no complete template with the name 22"), "{error}");
        assert_eq!(shown(|out| template_rm(out, dir.path(), vec!["11ee".into()], false)), "removed 11ee\n");
        assert_eq!(shown(|out| template_rm(out, dir.path(), Vec::new(), true)), "removed 00ff\n");
        assert_eq!(shown(|out| template_rm(out, dir.path(), Vec::new(), true)), "");
        let dry = shown(|out| gc(out, dir.path(), true, false).map(drop));
        assert!(dry.contains(".templates/.77"), "{dry}");
        let mut out = Vec::new();
        assert!(gc(&mut out, dir.path(), false, false).unwrap());
        assert_eq!(shown(|out| gc(out, dir.path(), true, true).map(drop)), "[]\n");
    }

    #[test]
    fn each_setting_has_its_origin() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let config = ConfigFile { config: Some(path.clone()) };
        let missing = config_show(&mut Vec::new(), &config, false).unwrap_err().to_string();
        assert!(missing.contains("config.toml: there is no such file; name another one"), "{missing}");
        fs::write(&path, "memory_mib = 512\n").unwrap();
        let table = shown(|out| config_show(out, &config, false));
        let line = |key: &str| {
            let line = table.lines().find(|line| line.starts_with(key)).unwrap();
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(line("memory_mib"), ["memory_mib", "512", path.to_str().unwrap()]);
        assert_eq!(line("vcpus"), ["vcpus", "-", "default"]);
        fs::write(&path, "memroy_mib = 512\n").unwrap();
        let error = config_show(&mut Vec::new(), &config, false).unwrap_err().to_string();
        assert!(error.ends_with("there is no key `memroy_mib`; did you mean `memory_mib`?"), "{error}");
    }
}
