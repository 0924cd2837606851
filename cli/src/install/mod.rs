//! `bulkhead install` and `bulkhead uninstall`: configure containerd on a node, and undo it.

mod archive_files;
mod block;
mod files;
pub(crate) mod lock;
mod metrics;
mod options;
mod own_files;
mod restart;
mod steps;
mod uninstall;

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, Write},
    path::Path,
    time::Duration,
};

use bulkhead_host_shim::operator::one_line;

pub(crate) use self::{options::Options, uninstall::uninstall};
use crate::{
    check::{self, Status},
    command_output,
    containerd::{self, CONFIG, Containerd, RUNTIME, TEMPLATE_V2, TEMPLATE_V3, handlers},
    error::CommandError,
    install::{
        block::{Change, Version},
        files::WriteError,
        lock::{Lock, OF_INSTALL},
        options::{KEPT_PROGRAM, MANIFEST, OWN_FILES},
        own_files::Record,
        restart::{Restart, finish},
        steps::{AS_IT_WAS, Steps, check_unchanged, kept, read, remove, say, say_lost, write, write_over},
    },
};

/// `bulkhead install`.
pub(crate) fn install(out: &mut impl Write, options: &Options) -> Result<(), CommandError> {
    install_within(out, options, OF_INSTALL)
}

fn install_within(out: &mut impl Write, options: &Options, within: Duration) -> Result<(), CommandError> {
    options.check_own()?;
    let _lock = Lock::take(options.root(), within)?;
    options.check_one_installation()?;
    let containerd = options.containerd();
    options.check_containerd(&containerd)?;
    options.check_only(&containerd)?;
    let is_changed = configure(out, options, &containerd)?;
    let mut steps = Steps { out, errors: Vec::new() };
    let written = write_own(&mut steps, options)?;
    let has_manifest = written.iter().any(|(name, _)| *name == MANIFEST);
    if !is_changed {
        say(steps.out, AS_IT_WAS)?;
    }
    // An old file that stays must not keep containerd from its configuration.
    steps.take(|out| archive_files::remove_older(out, options));
    steps.take(|_| remove_kept_program(&options.at(KEPT_PROGRAM)));
    steps.take(|out| finish(out, options, &containerd, &Restart { is_changed, also_if_down: true }));
    steps.end()?;
    say(out, &format!("for Kubernetes: kubectl apply -f {MANIFEST}"))?;
    if !has_manifest {
        let advice =
            "that is not the manifest of this version; to have it, move the file away and install again";
        say(out, advice)?;
    }
    // The containerd of an image is not asked, and its network comes with the node.
    if options.root.is_some() {
        let path = options.at(&containerd.config);
        let configuration = read(&path)?.and_then(|text| toml::from_str(&text).ok());
        let disabled = configuration.as_ref().and_then(check::disabled);
        return disabled.map_or(Ok(()), |finding| finding.print(out).map_err(CommandError::Output));
    }
    say_of_network(out, Path::new("/"), containerd.configuration(), containerd.generator())
}

/// Writes the other files, unless somebody has edited them. Returns those that are as this version writes them, with
/// their texts.
fn write_own<W: Write>(
    steps: &mut Steps<'_, W>,
    options: &Options,
) -> Result<Vec<(&'static str, &'static str)>, CommandError> {
    let record = Record::read(steps.out, options)?;
    let (mut own, mut new) = (Vec::new(), Vec::new());
    for (name, text) in OWN_FILES {
        let found = read(&options.at(name))?;
        match &found {
            Some(found) if found == text => {}
            Some(found) if !record.has(name, found) => {
                say(steps.out, &kept(&options.at(name)))?;
                continue;
            }
            _ => new.push((name, text)),
        }
        own.push((name, text, found));
    }
    let has_begun = steps.take(|_| record.begin(options, &new).map(|()| true));
    for (name, text, found) in &own {
        let path = options.at(name);
        match found {
            None => {
                write(&path, text)?;
                say(steps.out, &format!("wrote {}", path.display()))?;
            }
            Some(found) if found == text => say(steps.out, &format!("kept {}", path.display()))?,
            Some(found) => {
                write_over(&path, Some(found), text)?;
                say(steps.out, &format!("wrote {}: it was that of another version", path.display()))?;
            }
        }
    }
    let own: Vec<_> = own.into_iter().map(|(name, text, _)| (name, text)).collect();
    if has_begun {
        steps.take(|_| record.end(options, &own));
    }
    Ok(own)
}

/// Later it would undo this installation.
fn remove_kept_program(path: &Path) -> Result<(), CommandError> {
    match fs::remove_dir_all(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(CommandError::Remove { path: path.into(), source })
        }
        _ => Ok(()),
    }
}

/// Says what pods of Kubernetes lack of a network, as `bulkhead check` does.
fn say_of_network(
    out: &mut impl Write,
    root: &Path,
    configuration: io::Result<toml::Table>,
    generator: Option<&str>,
) -> Result<(), CommandError> {
    let finding = check::network(root, configuration, generator);
    if finding.status == Status::Ok {
        return Ok(());
    }
    finding.print(out).map_err(CommandError::Output)
}

/// Records which configuration is containerd's, and adds the handlers to it. Returns whether it has changed.
fn configure(out: &mut impl Write, options: &Options, containerd: &Containerd) -> Result<bool, CommandError> {
    let main = options.at(&containerd.config);
    let old = read(&main)?;
    let (drop_in, imported) = options.drop_in(containerd);
    let (place, change) = match (&old, containerd.generator()) {
        (Some(text), None) => {
            let by_default = || match options.root {
                // Each containerd reads this one.
                Some(_) => Ok(Version::V2),
                None => version_of(containerd, options),
            };
            (main.clone(), block::add(&main, text, &imported, by_default)?)
        }
        (Some(text), Some(generator)) => {
            let template = |version| main.with_file_name(template_of(version));
            let read = |version| Ok((template(version), read(&template(version))?));
            let added = block::add_to_generated(&main, text, &imported, read);
            let (version, change) = added.map_err(|error| match error {
                CommandError::ConfigVersion { path } => CommandError::GeneratedVersion { path, generator },
                other => other,
            })?;
            (template(version), change)
        }
        // A file that no containerd reads would configure nothing.
        (None, None) if containerd.config != Path::new(CONFIG) => {
            return Err(CommandError::NoContainerdConfig { path: main });
        }
        (None, None) => (main.clone(), Change::Text(block::whole(version_of(containerd, options)?))),
        (None, Some(generator)) => return Err(CommandError::NotGenerated { path: main, generator }),
    };
    // First, so that `bulkhead uninstall` finds what is written, even if this process is killed meanwhile.
    options.record(out)?;
    let has_own_file = matches!(change, Change::DropIn(_));
    let (path, text) = match change {
        Change::None => {
            say(out, &format!("kept {}: the handlers of Bulkhead are there", place.display()))?;
            return Ok(false);
        }
        Change::Text(text) => (place, text),
        Change::DropIn(text) => (drop_in, text),
    };
    // The new text is made from what was read first. It must not replace what somebody has written since then.
    let before = if path == main { old.clone() } else { read(&path)? };
    if before.as_ref() == Some(&text) {
        say(out, &format!("kept {}", path.display()))?;
        return Ok(false);
    }
    let lost = before.as_ref().map_or_else(Vec::new, |before| block::lost(before, &text));
    if before.as_ref().is_some_and(|before| block::has_all_of(before, &text)) {
        let added = match &lost[..] {
            [] => String::new(),
            lost => format!(", and {}", one_line(&lost.join("; "))),
        };
        say(out, &format!("kept {}: the handlers of Bulkhead are there{added}", path.display()))?;
        return Ok(false);
    }
    if has_own_file && before.as_ref().is_some_and(|before| !block::is_ours(before)) {
        return Err(CommandError::OtherFile { path });
    }
    match containerd.generator() {
        // Nobody can ask containerd before a configuration has been generated.
        Some(_) => write_over(&path, before.as_deref(), &text)?,
        None => {
            let asked = old.is_some() && options.root.is_none();
            write_checked(&path, before.as_deref(), &text, &main, asked)?;
        }
    }
    say(out, &format!("wrote {}: the runtime handlers of Bulkhead", path.display()))?;
    let remedy = "if they are yours, write them again beside those of Bulkhead; the next `bulkhead install` keeps \
                  them there";
    say_lost(out, &path, &lost, remedy)?;
    Ok(true)
}

fn template_of(version: Version) -> &'static str {
    match version {
        Version::V2 => TEMPLATE_V2,
        Version::V3 => TEMPLATE_V3,
    }
}

/// Writes the configuration `main`, or a file that it imports, which had the text `old` when it was read. If containerd
/// is `asked`, it must have all handlers with it that it had before, and Bulkhead's.
fn write_checked(
    path: &Path,
    old: Option<&str>,
    text: &str,
    main: &Path,
    asked: bool,
) -> Result<(), CommandError> {
    let before = if asked { handlers_of(main)? } else { None };
    let checked = |file: &Path| -> Result<(), CommandError> {
        let Some(before) = &before else { return Ok(()) };
        let after = handlers_of(file)?.unwrap_or_default();
        let lost = before.keys().find(|handler| !after.contains_key(*handler));
        let reason = match lost {
            Some(handler) => format!("containerd would no longer have the handler {handler}"),
            None if after.get("bulkhead").is_some_and(|runtime| runtime == RUNTIME) => return Ok(()),
            None => "containerd would not see the handler bulkhead in it".into(),
        };
        Err(CommandError::Refused { path: path.into(), reason })
    };
    if path == main {
        // Last, because containerd may take its time.
        let check = |new: &Path| checked(new).and_then(|()| check_unchanged(path, old));
        return files::write(path, text, |new| check(new).map_err(WriteError::Command))
            .map_err(|error| error.at(path));
    }
    write_over(path, old, text)?;
    // containerd reads the drop-in by the import of its main configuration, so it must be in place to be checked.
    checked(main).map_err(|error| {
        match old.map_or_else(|| remove(path), |old| write(path, old)) {
            Ok(()) => error,
            // Both must be known: with the file in place, containerd may not start.
            Err(second) => CommandError::Several(vec![error, second]),
        }
    })
}

/// The runtime of each handler that containerd would have with the configuration at `path`. None: there is no
/// containerd to ask.
fn handlers_of(path: &Path) -> Result<Option<BTreeMap<String, String>>, CommandError> {
    let text = match command_output::output(
        "containerd",
        &["--config", &path.to_string_lossy(), "config", "dump"],
    ) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|source| CommandError::Asked { path: path.into(), source })?,
    };
    match toml::from_str(&text) {
        Ok(table) => Ok(Some(handlers(&table))),
        Err(e) => Err(CommandError::Toml { path: path.into(), reason: e.message().replace('\n', " ") }),
    }
}

/// The version of the configuration that this containerd reads by default.
fn version_of(containerd: &Containerd, options: &Options) -> Result<Version, CommandError> {
    let unknown = |reason: String| CommandError::NoContainerd { reason };
    if options.root.is_some() {
        let path = options.at(&containerd.config);
        return Err(unknown(format!("there is no {}", path.display())));
    }
    let version = containerd.version().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let path = env::var_os("PATH").unwrap_or_default();
            CommandError::NotInPath { path: one_line(&path.to_string_lossy()) }
        }
        _ => unknown(error.to_string()),
    })?;
    match containerd::major_and_minor(&version) {
        Some((major, _)) => Ok(Version::of_containerd(major)),
        None => Err(unknown(format!("its version is {version}"))),
    }
}

#[cfg(test)]
mod tests;
