//! `bulkhead install` and `bulkhead uninstall`: configure containerd on a node, and undo it.

mod block;
mod files;
mod metrics;

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use bulkhead_host_shim::operator::{STATE_ROOT, chain, forget_failures, one_line, remove_all_templates};
use clap::Args;

use crate::{
    check::{self, Finding, Status},
    command_output,
    containerd::{self, CONFIG, Containerd, ContainerdConfig, RECORD, RUNTIME, handlers, recorded},
    error::CommandError,
    exec,
    install::{
        block::{Change, Version},
        files::Removal,
    },
    progress::{Count, during},
    run,
};

/// How long a restart may take: RKE2 takes a minute and more until it is ready, and systemd limits how long it waits.
const RESTART: Duration = Duration::from_secs(600);

/// The name of the file in the directory that containerd imports.
const DROP_IN: &str = "bulkhead.toml";

/// The templates of which k3s and RKE2 generate configurations of the second and of the third version. They are beside
/// what is generated.
const TEMPLATE_V2: &str = "config.toml.tmpl";
const TEMPLATE_V3: &str = "config-v3.toml.tmpl";

/// The other files that are written, and their texts.
const OWN_DIRECTORY: &str = "/etc/bulkhead";
const OWN_FILES: [(&str, &str); 2] = [
    ("/etc/bulkhead/config.toml", include_str!("../../../contrib/bulkhead/config.toml")),
    ("/etc/bulkhead/runtimeclass.yaml", include_str!("../../../contrib/kubernetes/runtimeclass.yaml")),
];

#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    containerd: ContainerdConfig,
    /// Restarts containerd, or k3s or RKE2, so that it reads its configuration. Running containers are not
    /// interrupted.
    #[arg(long)]
    restart: bool,
    /// Acts on the host whose root directory is here, such as that of an image. Its containerd is not executed.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "restart")]
    root: Option<PathBuf>,
}

impl Options {
    /// Where the file `path` of the host is.
    fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root
            .as_ref()
            .map_or_else(|| path.into(), |root| root.join(path.strip_prefix("/").unwrap_or(path)))
    }

    fn root(&self) -> &Path {
        self.root.as_deref().unwrap_or(Path::new("/"))
    }

    /// The containerd that is configured.
    fn containerd(&self) -> Containerd {
        self.containerd.containerd(self.root())
    }

    /// Refuses a second containerd: `bulkhead uninstall` would leave the handlers of the first one.
    fn check_only(&self, containerd: &Containerd) -> Result<(), CommandError> {
        let known = Containerd::find(self.root());
        if known == *containerd {
            return Ok(());
        }
        for path in self.with_block(&known) {
            if let Some(text) = read(&path)?
                && block::remove(&path, &text)? != text
            {
                return Err(CommandError::OtherContainerd { path });
            }
        }
        let path = self.drop_in(&known).0;
        match read(&path)?.is_some_and(|text| block::is_ours(&text)) {
            true => Err(CommandError::OtherContainerd { path }),
            false => Ok(()),
        }
    }

    /// Records the configuration that was named, for commands that name none.
    fn record(&self, out: &mut impl Write) -> Result<(), CommandError> {
        let Some(named) = &self.containerd.containerd_config else { return Ok(()) };
        let (path, text) = (self.at(RECORD), format!("{}\n", named.display()));
        if read(&path)?.as_ref() == Some(&text) {
            return say(out, &format!("kept {}", path.display()));
        }
        write(&path, &text)?;
        say(out, &format!("wrote {}", path.display()))
    }

    /// The file of its own for the handlers, and the directory that is imported, as containerd names it.
    fn drop_in(&self, containerd: &Containerd) -> (PathBuf, PathBuf) {
        let directory = containerd.imported();
        (self.at(directory.join(DROP_IN)), directory)
    }

    /// The files that have the block with the handlers, if no file of its own has them.
    fn with_block(&self, containerd: &Containerd) -> Vec<PathBuf> {
        match containerd.generator() {
            None => vec![self.at(&containerd.config)],
            Some(_) => {
                let template = |name| self.at(containerd.config.with_file_name(name));
                [TEMPLATE_V2, TEMPLATE_V3].map(template).into()
            }
        }
    }

    /// Refuses a root directory in which a symbolic link leads from one of the files to a file outside of it.
    fn check_root(&self, containerd: &Containerd) -> Result<(), CommandError> {
        let Some(root) = &self.root else { return Ok(()) };
        let read = |path: &Path| {
            fs::canonicalize(path).map_err(|source| CommandError::Read { path: path.into(), source })
        };
        let inside = read(root)?;
        let own = OWN_FILES.map(|(name, _)| self.at(name));
        let own = own.into_iter().chain([self.at(RECORD)]).chain([metrics::directory(self.root.as_deref())]);
        let of_containerd = [self.at(&containerd.config), self.drop_in(containerd).0];
        for path in of_containerd.into_iter().chain(self.with_block(containerd)).chain(own) {
            // A link that leads nowhere exists too.
            let there = path.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(root);
            if !read(there)?.starts_with(&inside) {
                return Err(CommandError::OutsideRoot { path, root: root.clone() });
            }
        }
        Ok(())
    }
}

/// `bulkhead install`.
pub(crate) fn install(out: &mut impl Write, options: &Options) -> Result<(), CommandError> {
    let containerd = options.containerd();
    options.check_root(&containerd)?;
    options.check_only(&containerd)?;
    let is_changed = configure(out, options, &containerd)?;
    for (name, text) in OWN_FILES {
        let own = options.at(name);
        match read(&own)? {
            None => {
                write(&own, text)?;
                say(out, &format!("wrote {}", own.display()))?;
            }
            Some(found) if found == text => say(out, &format!("kept {}", own.display()))?,
            Some(_) => say(out, &kept(&own))?,
        }
    }
    finish(out, options, &containerd, is_changed)?;
    say(out, "for Kubernetes: kubectl apply -f /etc/bulkhead/runtimeclass.yaml")?;
    // The containerd of an image is not asked, and its network comes with the node.
    if options.root.is_some() {
        let path = options.at(&containerd.config);
        let configuration = read(&path)?.and_then(|text| toml::from_str(&text).ok());
        let disabled = configuration.as_ref().and_then(check::disabled);
        return disabled.map_or(Ok(()), |finding| finding.print(out).map_err(CommandError::Output));
    }
    say_of_network(out, Path::new("/"), containerd.configuration(), containerd.generator())
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

/// What is said of a file that was changed by the operator, or was written by another version.
fn kept(path: &Path) -> String {
    format!("kept {}: it is not what this version writes", path.display())
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
    let (path, text) = match change {
        Change::None => {
            say(out, &format!("kept {}: the handlers of Bulkhead are there", place.display()))?;
            return Ok(false);
        }
        Change::Text(text) => (place, text),
        Change::DropIn(text) => (drop_in, text),
    };
    let before = read(&path)?;
    if before.as_ref() == Some(&text) {
        say(out, &format!("kept {}", path.display()))?;
        return Ok(false);
    }
    let lost = before.as_ref().map_or_else(Vec::new, |before| block::lost(before, &text));
    if before.is_some_and(|before| block::has_all_of(&before, &text)) {
        let added = match &lost[..] {
            [] => String::new(),
            lost => format!(", and {}", one_line(&lost.join("; "))),
        };
        say(out, &format!("kept {}: the handlers of Bulkhead are there{added}", path.display()))?;
        return Ok(false);
    }
    match containerd.generator() {
        // Nobody can ask containerd before a configuration has been generated.
        Some(_) => write(&path, &text)?,
        None => {
            let asked = old.is_some() && options.root.is_none();
            write_checked(&path, &text, &main, asked)?;
        }
    }
    say(out, &format!("wrote {}: the runtime handlers of Bulkhead", path.display()))?;
    let remedy = "if they are yours, write them again beside those of Bulkhead; the next `bulkhead install` keeps \
                  them there";
    say_lost(out, &path, &lost, remedy)?;
    Ok(true)
}

/// Says which lines are not in a file any more, if there are any.
fn say_lost(out: &mut impl Write, path: &Path, lost: &[String], remedy: &str) -> Result<(), CommandError> {
    if lost.is_empty() {
        return Ok(());
    }
    let found = format!("lines that this version does not write are gone: {}", one_line(&lost.join("; ")));
    Finding::warn(&path.display().to_string(), found, remedy).print(out).map_err(CommandError::Output)
}

fn template_of(version: Version) -> &'static str {
    match version {
        Version::V2 => TEMPLATE_V2,
        Version::V3 => TEMPLATE_V3,
    }
}

/// Writes the configuration `main`, or a file that it imports. If containerd is `asked`, it must have all handlers with
/// it that it had before, and Bulkhead's.
fn write_checked(path: &Path, text: &str, main: &Path, asked: bool) -> Result<(), CommandError> {
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
        return files::write(path, text, |new| checked(new).map_err(WriteError::Command))
            .map_err(|error| error.at(path));
    }
    let old = read(path)?;
    write(path, text)?;
    // containerd reads the drop-in by the import of its main configuration, so it must be in place to be checked.
    checked(main).or_else(|error| {
        match old {
            Some(old) => write(path, &old)?,
            None => remove(path)?,
        }
        Err(error)
    })
}

/// An error of a new file.
enum WriteError {
    Io(io::Error),
    Command(CommandError),
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl WriteError {
    fn at(self, path: &Path) -> CommandError {
        match self {
            Self::Io(source) => CommandError::Write { path: path.into(), source },
            Self::Command(error) => error,
        }
    }
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

/// What to do about lines that `bulkhead uninstall` has removed with those of Bulkhead.
const REMOVED_BESIDE: &str = "they were beside those of Bulkhead; if they are yours, write them elsewhere";

/// `bulkhead uninstall`.
pub(crate) fn uninstall(out: &mut impl Write, options: &Options) -> Result<(), CommandError> {
    let containerd = options.containerd();
    options.check_root(&containerd)?;
    // If one step fails, the others are taken all the same: the programs may be removed right after. The first error is
    // the result.
    let mut steps = Steps { out, first: Ok(()) };
    let mut is_changed = false;
    for path in options.with_block(&containerd) {
        is_changed |= steps.take(|out| remove_block(out, &path));
    }
    is_changed |= steps.take(|out| remove_drop_in(out, &options.drop_in(&containerd).0));
    let is_removed = steps.first.is_ok();
    for (name, text) in OWN_FILES {
        steps.take(|out| remove_own(out, &options.at(name), text));
    }
    // Another try must find the handlers that are still there.
    if is_removed && recorded(options.root()).as_ref() == Some(&containerd.config) {
        let path = options.at(RECORD);
        steps.take(|out| {
            remove(&path)?;
            say(out, &format!("removed {}", path.display()))
        });
    }
    // Fails if the operator has files of his own there.
    let own = options.at(OWN_DIRECTORY);
    if fs::remove_dir(&own).is_ok() {
        steps.take(|out| say(out, &format!("removed {}", own.display())));
    }
    steps.take(|out| metrics::end(out, options.root.as_deref()));
    if options.root.is_none() {
        steps.take(remove_state);
    }
    steps.take(|out| finish(out, options, &containerd, is_changed));
    steps.first?;
    say(
        steps.out,
        "Running pods are not affected. Remove the package, or the files of the archive, when none is left.",
    )
}

/// Steps that are all taken, also after one has failed.
struct Steps<'a, W> {
    out: &'a mut W,
    /// The first error. The others are printed.
    first: Result<(), CommandError>,
}

impl<W: Write> Steps<'_, W> {
    /// Returns what the step returns, or what stands for nothing.
    fn take<T: Default>(&mut self, step: impl FnOnce(&mut W) -> Result<T, CommandError>) -> T {
        step(self.out).unwrap_or_else(|error| {
            if self.first.is_ok() {
                self.first = Err(error);
            } else {
                // If that fails too, the first error is enough.
                let _ = say(self.out, &chain(&error));
            }
            T::default()
        })
    }
}

/// Removes a file that `bulkhead install` has written with this text.
fn remove_own(out: &mut impl Write, path: &Path, text: &str) -> Result<(), CommandError> {
    let removed = files::remove(path, text);
    match removed.map_err(|source| CommandError::Remove { path: path.into(), source })? {
        Removal::Absent => Ok(()),
        Removal::Removed => say(out, &format!("removed {}", path.display())),
        Removal::Changed => say(out, &kept(path)),
    }
}

/// Removes what is in /run besides pods.
fn remove_state(out: &mut impl Write) -> Result<(), CommandError> {
    let root = Path::new(STATE_ROOT);
    let failed = |source| CommandError::Remove { path: root.into(), source };
    forget_failures(root).map_err(failed)?;
    let removed = remove_all_templates(root).map_err(failed)?;
    say(out, &format!("removed {removed} templates from {STATE_ROOT}"))?;
    let roots = [STATE_ROOT, run::directory::ROOT, exec::ROOT];
    roots.into_iter().for_each(|root| files::remove_empty(Path::new(root)));
    Ok(())
}

/// Removes the block with the handlers from a file, and the file if it has nothing else. Returns whether it was there.
fn remove_block(out: &mut impl Write, path: &Path) -> Result<bool, CommandError> {
    let Some(text) = read(path)? else { return Ok(false) };
    let old = block::remove(path, &text)?;
    if old == text {
        return Ok(false);
    }
    if old.is_empty() {
        remove(path)?;
        say(out, &format!("removed {}", path.display()))?;
    } else {
        write(path, &old)?;
        say(out, &format!("wrote {}, without the runtime handlers of Bulkhead", path.display()))?;
    }
    say_lost(out, path, &block::lost_by_removal(&text, &old), REMOVED_BESIDE)?;
    Ok(true)
}

/// Removes the file of its own with the handlers, which may be that of another version. Returns whether it was there.
fn remove_drop_in(out: &mut impl Write, path: &Path) -> Result<bool, CommandError> {
    match read(path)? {
        None => Ok(false),
        Some(text) if block::is_ours(&text) => {
            remove(path)?;
            say(out, &format!("removed {}", path.display()))?;
            say_lost(out, path, &block::lost_by_removal(&text, ""), REMOVED_BESIDE)?;
            Ok(true)
        }
        Some(_) => {
            let line = format!("kept {}: it was not written by `bulkhead install`", path.display());
            say(out, &line).map(|()| false)
        }
    }
}

/// Restarts containerd, or says that it is necessary.
fn finish(
    out: &mut impl Write,
    options: &Options,
    containerd: &Containerd,
    is_changed: bool,
) -> Result<(), CommandError> {
    if !is_changed {
        say(out, "containerd's configuration is as it was")?;
    }
    // It may have been changed before, without a restart.
    if !options.restart {
        let reader = containerd.generator().unwrap_or("containerd");
        let commands: Vec<_> =
            containerd.units().iter().map(|unit| format!("systemctl restart {unit}")).collect();
        let remedy = format!("{reader} reads its configuration when it starts: {}", commands.join(" or "));
        return if is_changed { say(out, &remedy) } else { Ok(()) };
    }
    let unit = unit_of(containerd.units());
    let restart = |_: &Count| {
        let mut command = Command::new("systemctl");
        command.args(["restart", unit]).stderr(Stdio::null());
        command_output::answer(command, &[], RESTART)
    };
    during(&format!("restarting {unit}"), false, restart).map_err(CommandError::Restart)?;
    say(out, &format!("restarted {unit}"))
}

/// Which of these units is restarted: the one that runs. While none runs, the one that is there: it may be about to
/// start.
fn unit_of(units: &[&'static str]) -> &'static str {
    let first = units.first().copied().unwrap_or("containerd");
    let [_, _, ..] = units else { return first };
    let ask = |arguments: &[&str]| command_output::output("systemctl", arguments);
    let is_active = |unit: &&&str| ask(&["is-active", "--quiet", unit]).is_ok();
    let is_there = |unit: &&&str| {
        ask(&["show", "--property", "LoadState", "--value", unit]).is_ok_and(|state| state.trim() == "loaded")
    };
    units.iter().find(is_active).or_else(|| units.iter().find(is_there)).copied().unwrap_or(first)
}

fn read(path: &Path) -> Result<Option<String>, CommandError> {
    files::read(path).map_err(|source| CommandError::Read { path: path.into(), source })
}

fn write(path: &Path, text: &str) -> Result<(), CommandError> {
    let written = files::write(path, text, |_| Ok::<_, io::Error>(()));
    written.map_err(|source| CommandError::Write { path: path.into(), source })
}

fn remove(path: &Path) -> Result<(), CommandError> {
    fs::remove_file(path).map_err(|source| CommandError::Remove { path: path.into(), source })
}

fn say(out: &mut impl Write, line: &str) -> Result<(), CommandError> {
    writeln!(out, "{line}").map_err(CommandError::Output)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, os::unix::fs::symlink};

    use super::*;
    use crate::containerd::IMPORTED;

    /// All files below a directory.
    fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(root).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                files.extend(tree(&path));
            } else {
                files.insert(path.clone(), fs::read_to_string(&path).unwrap());
            }
        }
        files
    }

    fn options(root: &Path) -> Options {
        named(None, root)
    }

    fn named(containerd_config: Option<&str>, root: &Path) -> Options {
        let containerd = ContainerdConfig { containerd_config: containerd_config.map(PathBuf::from) };
        Options { containerd, restart: false, root: Some(root.into()) }
    }

    fn said(act: impl FnOnce(&mut Vec<u8>) -> Result<(), CommandError>) -> String {
        let mut out = Vec::new();
        act(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_is_installed_is_uninstalled_without_a_trace() {
        for configuration in [
            "version = 2\n",
            "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n",
            // Without a version.
            "# root = '/var/lib/containerd'",
        ] {
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path();
            fs::create_dir_all(root.join("etc/containerd/conf.d")).unwrap();
            fs::write(root.join("etc/containerd/config.toml"), configuration).unwrap();
            let before = tree(root);
            let first = said(|out| install(out, &options(root)));
            assert!(first.contains("wrote") && first.contains("systemctl restart containerd"), "{first}");
            let installed = tree(root);
            assert!(installed.contains_key(&root.join("etc/bulkhead/runtimeclass.yaml")));
            let ours = installed.values().filter(|text| text.contains(RUNTIME)).count();
            assert_eq!(ours, 1, "{installed:?}");
            let second = said(|out| install(out, &options(root)));
            assert!(second.contains("as it was") && !second.contains("wrote"), "{second}");
            assert_eq!(tree(root), installed);
            let removed = said(|out| uninstall(out, &options(root)));
            assert!(removed.contains("systemctl restart containerd"), "{removed}");
            assert_eq!(tree(root), before);
            assert!(!root.join("etc/bulkhead").exists());
            let again = said(|out| uninstall(out, &options(root)));
            assert!(again.starts_with("containerd's configuration is as it was"), "{again}");
        }
    }

    #[test]
    fn what_was_installed_elsewhere_is_found_without_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let at = |path: &str| root.join(path.trim_start_matches('/'));
        for directory in ["etc/containerd", "elsewhere"] {
            fs::create_dir_all(at(directory)).unwrap();
            fs::write(at(directory).join("config.toml"), "version = 2\n").unwrap();
        }
        let before = tree(root);
        let elsewhere = "/elsewhere/config.toml";
        let first = said(|out| install(out, &named(Some(elsewhere), root)));
        assert!(first.contains(&format!("wrote {}\n", at(RECORD).display())), "{first}");
        let installed = tree(root);
        assert!(installed[&at(elsewhere)].contains(RUNTIME) && !installed[&at(CONFIG)].contains(RUNTIME));
        // With the name and without it.
        for again in [named(Some(elsewhere), root), options(root)] {
            let said = said(|out| install(out, &again));
            assert!(said.contains("as it was") && !said.contains("wrote"), "{said}");
            assert_eq!(tree(root), installed);
        }
        let refused = install(&mut Vec::new(), &named(Some(CONFIG), root)).unwrap_err().to_string();
        assert!(refused.starts_with(&format!("{}: ", at(elsewhere).display())), "{refused}");
        assert!(refused.ends_with("run `bulkhead uninstall` first"), "{refused}");
        assert_eq!(tree(root), installed);
        let removed = said(|out| uninstall(out, &options(root)));
        assert!(removed.contains(&format!("removed {}\n", at(RECORD).display())), "{removed}");
        assert_eq!(tree(root), before);
        // The other way round, and for a file of its own that is imported.
        fs::write(at(CONFIG), "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n").unwrap();
        install(&mut Vec::new(), &options(root)).unwrap();
        let refused = install(&mut Vec::new(), &named(Some(elsewhere), root)).unwrap_err().to_string();
        assert!(refused.starts_with(&format!("{}: ", at(IMPORTED).join(DROP_IN).display())), "{refused}");
        // What was removed by hand refuses nothing.
        fs::remove_file(at(IMPORTED).join(DROP_IN)).unwrap();
        install(&mut Vec::new(), &named(Some(elsewhere), root)).unwrap();
        // Another configuration than the recorded one leaves the record.
        uninstall(&mut Vec::new(), &named(Some(CONFIG), root)).unwrap();
        assert_eq!(recorded(root).as_deref(), Some(Path::new(elsewhere)));
    }

    #[test]
    fn what_the_operator_has_changed_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("etc/containerd")).unwrap();
        fs::write(root.join("etc/containerd/config.toml"), "version = 2\n").unwrap();
        install(&mut Vec::new(), &options(root)).unwrap();
        fs::write(root.join("etc/bulkhead/config.toml"), "memory_mib = 512\n").unwrap();
        let said = said(|out| uninstall(out, &options(root)));
        assert!(said.contains("etc/bulkhead/config.toml: it is not what this version writes"), "{said}");
        assert_eq!(tree(root).into_values().collect::<Vec<_>>(), ["memory_mib = 512\n", "version = 2\n"]);
    }

    #[test]
    fn a_configuration_that_is_named_must_exist() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/config.toml");
        let options = Options { root: None, ..named(path.to_str(), Path::new("/")) };
        let error = configure(&mut Vec::new(), &options, &options.containerd()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: there is no such file, so", path.display())), "{error}");
        assert!(!dir.path().join("new").exists());
    }

    #[test]
    fn a_disabled_plugin_is_said_to_ignore_the_handlers() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("etc/containerd")).unwrap();
        let text = "version = 2\ndisabled_plugins = ['io.containerd.grpc.v1.cri']\n";
        fs::write(dir.path().join("etc/containerd/config.toml"), text).unwrap();
        let said = said(|out| install(out, &options(dir.path())));
        assert!(
            said.contains("the runtime handlers have no effect\n      -> remove `io.containerd."),
            "{said}"
        );
    }

    #[test]
    fn a_line_that_the_operator_has_added_is_kept_or_named() {
        let cgroups = "  cgroup_writable = true\n";
        for (configuration, written) in [
            ("version = 2\n", "config.toml"),
            ("version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n", "conf.d/bulkhead.toml"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let at = |path: &str| dir.path().join("etc/containerd").join(path);
            fs::create_dir_all(at("conf.d")).unwrap();
            fs::write(at("config.toml"), configuration).unwrap();
            install(&mut Vec::new(), &options(dir.path())).unwrap();
            let ours = fs::read_to_string(at(written)).unwrap();
            let line = format!("runtime_type = \"{RUNTIME}\"\n");
            let edited = ours.replacen(&line, &format!("{line}{cgroups}"), 1);
            fs::write(at(written), &edited).unwrap();
            let again = said(|out| install(out, &options(dir.path())));
            assert!(again.contains("and cgroup_writable = true") && !again.contains("wrote"), "{again}");
            assert_eq!(fs::read_to_string(at(written)).unwrap(), edited);
            // What another version has written is replaced.
            fs::write(at(written), edited.replacen(&line, "runtime_type = \"old\"\n", 1)).unwrap();
            let upgraded = said(|out| install(out, &options(dir.path())));
            let gone = "are gone: runtime_type = \"old\"; cgroup_writable = true\n      -> if";
            assert!(upgraded.contains(gone), "{upgraded}");
            assert_eq!(fs::read_to_string(at(written)).unwrap(), ours);
        }
    }

    #[test]
    fn the_link_of_a_server_of_metrics_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let wants = dir.path().join("etc/systemd/system/multi-user.target.wants");
        fs::create_dir_all(&wants).unwrap();
        let link = wants.join("bulkhead-metrics.service");
        symlink("/usr/local/lib/systemd/system/bulkhead-metrics.service", &link).unwrap();
        let removed = said(|out| uninstall(out, &options(dir.path())));
        assert!(removed.contains(&format!("removed {}\n", link.display())), "{removed}");
        assert!(link.symlink_metadata().is_err());
        assert!(!said(|out| uninstall(out, &options(dir.path()))).contains("metrics"));
    }

    #[test]
    fn a_file_that_cannot_be_read_keeps_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        fs::create_dir_all(at("etc/containerd")).unwrap();
        fs::write(at("etc/containerd/config.toml"), "version = 2\n").unwrap();
        install(&mut Vec::new(), &options(dir.path())).unwrap();
        fs::write(at("etc/containerd/config.toml"), b"\xff").unwrap();
        fs::write(at("etc/bulkhead/runtimeclass.yaml"), b"\xff").unwrap();
        let mut out = Vec::new();
        let error = uninstall(&mut out, &options(dir.path())).unwrap_err().to_string();
        let said = String::from_utf8(out).unwrap();
        assert!(error.contains("etc/containerd/config.toml"), "{error}");
        assert!(said.contains("removed") && !at("etc/bulkhead/config.toml").exists(), "{said}");
        assert!(!said.contains("Running pods"), "{said}");
    }

    #[test]
    fn a_configuration_that_is_not_cleaned_stays_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
        let elsewhere = "/elsewhere/config.toml";
        for directory in ["etc/containerd", "elsewhere"] {
            fs::create_dir_all(at(directory)).unwrap();
            fs::write(at(directory).join("config.toml"), "version = 2\n").unwrap();
        }
        let before = tree(dir.path());
        install(&mut Vec::new(), &named(Some(elsewhere), dir.path())).unwrap();
        let installed = fs::read(at(elsewhere)).unwrap();
        fs::write(at(elsewhere), b"\xff").unwrap();
        let error = uninstall(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
        assert!(error.contains(elsewhere), "{error}");
        fs::write(at(elsewhere), installed).unwrap();
        let removed = said(|out| uninstall(out, &options(dir.path())));
        assert!(removed.contains(&format!("removed {}\n", at(RECORD).display())), "{removed}");
        assert_eq!(tree(dir.path()), before);
    }

    #[test]
    fn a_configuration_is_recorded_before_it_is_changed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(at("elsewhere")).unwrap();
        fs::write(at("elsewhere/config.toml"), "version = 2\n").unwrap();
        // A directory in its place, so that it cannot be written.
        fs::create_dir_all(at(RECORD).join("x")).unwrap();
        install(&mut Vec::new(), &named(Some("/elsewhere/config.toml"), dir.path())).unwrap_err();
        assert_eq!(fs::read_to_string(at("elsewhere/config.toml")).unwrap(), "version = 2\n");
    }

    #[test]
    fn what_another_version_has_installed_is_uninstalled() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        fs::create_dir_all(at("etc/containerd/conf.d")).unwrap();
        let configuration = "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n";
        fs::write(at("etc/containerd/config.toml"), configuration).unwrap();
        install(&mut Vec::new(), &options(dir.path())).unwrap();
        let drop_in = at("etc/containerd/conf.d/bulkhead.toml");
        let other = fs::read_to_string(&drop_in).unwrap().replace("  sandboxer = \"shim\"\n", "");
        fs::write(&drop_in, &other).unwrap();
        let removed = said(|out| uninstall(out, &options(dir.path())));
        assert!(removed.contains("removed") && removed.contains("systemctl restart containerd"), "{removed}");
        assert!(!drop_in.exists(), "a handler would be left, and no shim");
        // One that the operator has written is his.
        fs::write(&drop_in, "version = 3\n").unwrap();
        let kept = said(|out| uninstall(out, &options(dir.path())));
        assert!(kept.contains("bulkhead.toml: it was not written by `bulkhead install`"), "{kept}");
        assert!(drop_in.exists());
    }

    #[test]
    fn k3s_and_rke2_keep_what_they_generate() {
        for (data, unit) in [
            ("var/lib/rancher/k3s", "systemctl restart k3s or systemctl restart k3s-agent"),
            ("var/lib/rancher/rke2", "systemctl restart rke2-server or systemctl restart rke2-agent"),
        ] {
            let directory = format!("{data}/agent/etc/containerd");
            let imports = format!("version = 3\nimports = [\"/{directory}/config-v3.toml.d/*.toml\"]\n");
            for (generated, written) in [
                ("version = 2\n", "config.toml.tmpl"),
                ("version = 3\n", "config-v3.toml.tmpl"),
                (imports.as_str(), "config-v3.toml.d/bulkhead.toml"),
            ] {
                let dir = tempfile::tempdir().unwrap();
                let at = |path: &str| dir.path().join(&directory).join(path);
                fs::create_dir_all(at("config-v3.toml.d")).unwrap();
                // Of a containerd for docker, beside the one for Kubernetes.
                fs::create_dir_all(dir.path().join("etc/containerd")).unwrap();
                fs::write(dir.path().join("etc/containerd/config.toml"), "version = 2\n").unwrap();
                fs::write(at("config.toml"), generated).unwrap();
                let before = tree(dir.path());
                let first = said(|out| install(out, &options(dir.path())));
                assert!(first.contains(unit), "{first}");
                assert!(fs::read_to_string(at(written)).unwrap().contains(RUNTIME), "{first}");
                let added = tree(dir.path()).len() - before.len();
                assert_eq!(added, 1 + OWN_FILES.len(), "{:?}", tree(dir.path()));
                let second = said(|out| install(out, &options(dir.path())));
                assert!(second.contains("as it was") && !second.contains("wrote"), "{second}");
                said(|out| uninstall(out, &options(dir.path())));
                assert_eq!(tree(dir.path()), before);
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let path = "/data/k3s/agent/etc/containerd/config.toml";
        let options = named(Some(path), dir.path());
        let error = install(&mut Vec::new(), &options).unwrap_err().to_string();
        let remedy = "which k3s generates when it starts; start k3s first";
        assert!(error.contains(remedy) && !error.contains("install"), "{error}");
        let generated = dir.path().join("data/k3s/agent/etc/containerd/config.toml");
        fs::create_dir_all(generated.parent().unwrap()).unwrap();
        fs::write(&generated, "[plugins.opt]\n").unwrap();
        let error = install(&mut Vec::new(), &options).unwrap_err().to_string();
        assert!(
            error.contains("k3s generates it; put the version at") && !error.contains("default"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(generated).unwrap(), "[plugins.opt]\n");
    }

    #[test]
    fn a_link_to_a_file_outside_of_the_root_is_refused() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = dir.path();
        let hosts = outside.path().join("config.toml");
        fs::create_dir_all(root.join("etc/containerd")).unwrap();
        fs::write(&hosts, "version = 2\n").unwrap();
        symlink(&hosts, root.join("etc/containerd/config.toml")).unwrap();
        for refused in [install(&mut Vec::new(), &options(root)), uninstall(&mut Vec::new(), &options(root))]
        {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("etc/containerd/config.toml leads out of the root directory"), "{error}");
        }
        // A directory may be a link too, and the link may lead to another file of the root directory.
        fs::remove_file(root.join("etc/containerd/config.toml")).unwrap();
        fs::write(root.join("etc/containerd/own.toml"), "version = 2\n").unwrap();
        symlink("own.toml", root.join("etc/containerd/config.toml")).unwrap();
        symlink(outside.path(), root.join("etc/bulkhead")).unwrap();
        assert!(install(&mut Vec::new(), &options(root)).is_err());
        fs::remove_file(root.join("etc/bulkhead")).unwrap();
        install(&mut Vec::new(), &options(root)).unwrap();
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(&hosts).unwrap(), "version = 2\n");
    }

    #[test]
    fn what_pods_lack_of_a_network_is_said_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let network = |text: &str, generator| {
            said(|out| say_of_network(out, dir.path(), Ok(toml::from_str(text).unwrap()), generator))
        };
        // k3s has no handler before it has read its template, and gets it when it starts next.
        let v3 = "[plugins.'io.containerd.cri.v1.runtime'.cni]\nconf_dir = '/cni'\n";
        let none = network(v3, Some("k3s"));
        assert!(none.starts_with("warn  CNI: there is no configuration in /cni"), "{none}");
        assert!(none.lines().nth(1).is_some_and(|line| line.starts_with("      -> install")), "{none}");
        fs::create_dir_all(dir.path().join("cni")).unwrap();
        fs::create_dir_all(dir.path().join("opt/cni/bin")).unwrap();
        fs::write(dir.path().join("cni/10-pods.conf"), "{\"type\": \"bridge\"}").unwrap();
        fs::write(dir.path().join("opt/cni/bin/bridge"), "").unwrap();
        assert_eq!(network(v3, None), "");
        let unknown = said(|out| say_of_network(out, dir.path(), Err(io::ErrorKind::NotFound.into()), None));
        assert!(
            unknown.starts_with("fail  runtime handler: containerd's configuration is not known"),
            "{unknown}"
        );
    }

    #[test]
    fn a_root_without_a_configuration_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = install(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
        assert!(error.starts_with("containerd is not found: there is no "), "{error}");
        assert!(tree(dir.path()).is_empty());
    }
}
