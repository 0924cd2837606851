//! `bulkhead template`: lists, makes and removes saved VMs.

use std::{
    io::{self, Write},
    path::Path,
};

use bulkhead_host_shim::operator::{
    BuildError, Built, Template, TemplateState, build_templates, one_line, remove_template,
    remove_unused_templates, template_names, templates,
};

use crate::{
    config_file::ConfigFile,
    error::CommandError,
    output::{age, listing, mib, or_none},
    progress,
};

/// `bulkhead template ls`.
pub(crate) fn ls(out: &mut impl Write, root: &Path, is_json: bool) -> Result<(), CommandError> {
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
pub(crate) fn build(out: &mut impl Write, root: &Path, config: &ConfigFile) -> Result<(), CommandError> {
    let tell = |built: Built| progress::apart(|| tell(out, &built));
    let config = config.load()?;
    let built = progress::during("making templates", false, |_| build_templates(root, &config, tell));
    built.map_err(|error| match error {
        BuildError::Tell(error) => CommandError::Output(error),
        error => CommandError::Build(error),
    })
}

fn tell(out: &mut impl Write, built: &Built) -> io::Result<()> {
    let name = one_line(&built.path.file_name().unwrap_or_default().to_string_lossy());
    let (online, vcpus) = built.vcpus;
    let vm = format!("{} MiB, {online} of {vcpus} vCPUs online", built.memory_mib);
    match built.took {
        Some(took) => writeln!(out, "made {name} ({vm}) in {:.1} s", took.as_secs_f64())?,
        None => writeln!(out, "kept {name} ({vm})")?,
    }
    // So that it is seen while the next one is made.
    out.flush()
}

/// `bulkhead template rm`.
pub(crate) fn rm(
    out: &mut impl Write,
    root: &Path,
    names: Vec<String>,
    all: bool,
) -> Result<(), CommandError> {
    if all {
        return rm_all(out, root);
    }
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

/// Removes all but those that are being made, and goes on after a failure. Returns the first one.
fn rm_all(out: &mut impl Write, root: &Path) -> Result<(), CommandError> {
    let list = |source| CommandError::List { path: root.into(), source };
    let mut result = Ok(());
    for name in template_names(root).map_err(list)? {
        match remove_template(root, &name) {
            Ok(()) => writeln!(out, "removed {}", one_line(&name)).map_err(CommandError::Output)?,
            // A pod has removed it meanwhile, because it is outdated.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(source) => result = result.and(Err(CommandError::Remove { path: name.into(), source })),
        }
    }
    let unfinished = remove_unused_templates(root);
    for name in unfinished.map_err(|source| CommandError::Remove { path: root.into(), source })? {
        writeln!(out, "removed {}", one_line(&name)).map_err(CommandError::Output)?;
    }
    result
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::output::shown;

    #[test]
    fn templates_are_removed_by_name_or_all() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["00ff", "11ee", ".77"] {
            fs::create_dir_all(dir.path().join(".templates").join(name)).unwrap();
        }
        let table = shown(|out| ls(out, dir.path(), false));
        assert!(table.contains("00ff  complete    0.0 MiB"), "{table}");
        let error = rm(&mut Vec::new(), dir.path(), vec!["22".into()], false).unwrap_err();
        assert!(error.to_string().starts_with("there is no complete template with the name 22"), "{error}");
        assert_eq!(shown(|out| rm(out, dir.path(), vec!["11ee".into()], false)), "removed 11ee\n");
        // One that was never completed, and what is none, are removed too.
        fs::write(dir.path().join(".templates/0a"), "of another version").unwrap();
        let removed = shown(|out| rm(out, dir.path(), Vec::new(), true));
        assert_eq!(removed, "removed 00ff\nremoved 0a\nremoved .77\n");
        assert!(!dir.path().join(".templates").exists());
        assert_eq!(shown(|out| rm(out, dir.path(), Vec::new(), true)), "");
    }
}
