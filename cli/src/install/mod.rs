//! `bulkhead install` and `bulkhead uninstall`: configure containerd on a node, and undo it.

mod block;
mod files;

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use bulkhead_host_shim::operator::{STATE_ROOT, forget_failures, remove_all_templates};
use clap::Args;

use crate::{
    containerd::{self, RUNTIME, handlers},
    error::CommandError,
    install::{
        block::{Change, IMPORTED, Version},
        files::Removal,
    },
    program,
};

/// The name of the file in [`IMPORTED`].
const DROP_IN: &str = "bulkhead.toml";

/// The other files that are written, and their texts.
const OWN_DIRECTORY: &str = "/etc/bulkhead";
const OWN_FILES: [(&str, &str); 2] = [
    ("/etc/bulkhead/config.toml", include_str!("../../../contrib/bulkhead/config.toml")),
    ("/etc/bulkhead/runtimeclass.yaml", include_str!("../../../contrib/kubernetes/runtimeclass.yaml")),
];

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// containerd's configuration.
    #[arg(long, value_name = "FILE", default_value = containerd::CONFIG)]
    containerd_config: PathBuf,
    /// Restarts containerd, so that it reads its configuration. Containers run on.
    #[arg(long)]
    restart: bool,
    /// Configures the host whose root directory is here, such as that of an image. Its containerd is not executed.
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

    fn drop_in(&self) -> PathBuf {
        self.at(Path::new(IMPORTED).join(DROP_IN))
    }

    /// Refuses a root directory in which a symbolic link leads from one of the files to a file outside of it.
    fn check_root(&self) -> Result<(), CommandError> {
        let Some(root) = &self.root else { return Ok(()) };
        let read = |path: &Path| {
            fs::canonicalize(path).map_err(|source| CommandError::Read { path: path.into(), source })
        };
        let inside = read(root)?;
        let own = OWN_FILES.map(|(name, _)| self.at(name));
        for path in [self.at(&self.containerd_config), self.drop_in()].into_iter().chain(own) {
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
    options.check_root()?;
    let path = options.at(&options.containerd_config);
    let is_changed = configure(out, options, &path)?;
    for (name, text) in OWN_FILES {
        let own = options.at(name);
        match read(&own)? {
            None => {
                write(&own, text)?;
                say(out, &format!("wrote {}", own.display()))?;
            }
            Some(found) if found == text => say(out, &format!("kept {}", own.display()))?,
            Some(_) => say(out, &format!("kept {}, which you have changed", own.display()))?,
        }
    }
    finish(out, options, is_changed)?;
    say(out, "for Kubernetes: kubectl apply -f /etc/bulkhead/runtimeclass.yaml")
}

/// Adds the handlers to containerd's configuration. Returns whether it has changed.
fn configure(out: &mut impl Write, options: &Options, path: &Path) -> Result<bool, CommandError> {
    let old = read(path)?;
    let change = match &old {
        Some(text) => block::add(path, text)?,
        None => Change::Text(block::whole(version_of_containerd(options)?)),
    };
    let (path, text) = match change {
        Change::None => {
            say(out, &format!("kept {}: the handlers of Bulkhead are there", path.display()))?;
            return Ok(false);
        }
        Change::Text(text) => (path.to_owned(), text),
        Change::DropIn(text) => (options.drop_in(), text),
    };
    if read(&path)?.as_ref() == Some(&text) {
        say(out, &format!("kept {}", path.display()))?;
        return Ok(false);
    }
    let main = options.at(&options.containerd_config);
    let asked = old.is_some() && options.root.is_none();
    let before = if asked { handlers_of(&main)? } else { None };
    let checked = |file: &Path| -> Result<(), CommandError> {
        let Some(before) = &before else { return Ok(()) };
        let after = handlers_of(file)?.unwrap_or_default();
        let lost = before.keys().find(|handler| !after.contains_key(*handler));
        let reason = match lost {
            Some(handler) => format!("containerd would no longer have the handler {handler}"),
            None if after.get("bulkhead").is_some_and(|runtime| runtime == RUNTIME) => return Ok(()),
            None => "containerd would not see the handler bulkhead in it".into(),
        };
        Err(CommandError::Refused { path: path.clone(), reason })
    };
    if path == main {
        files::write(&path, &text, |new| checked(new).map_err(WriteError::Command))
            .map_err(|error| error.at(&path))?;
    } else {
        let old = read(&path)?;
        write(&path, &text)?;
        // containerd reads the drop-in by the import of its main configuration, so it must be in place to be checked.
        if let Err(error) = checked(&main) {
            match old {
                Some(old) => write(&path, &old)?,
                None => remove(&path)?,
            }
            return Err(error);
        }
    }
    say(out, &format!("wrote {}: the runtime handlers of Bulkhead", path.display()))?;
    Ok(true)
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
    let text = match program::output("containerd", &["--config", &path.to_string_lossy(), "config", "dump"]) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|source| CommandError::Asked { path: path.into(), source })?,
    };
    match toml::from_str(&text) {
        Ok(table) => Ok(Some(handlers(&table))),
        Err(e) => Err(CommandError::Toml { path: path.into(), reason: e.message().replace('\n', " ") }),
    }
}

fn version_of_containerd(options: &Options) -> Result<Version, CommandError> {
    let unknown = |reason: String| CommandError::NoContainerd { reason };
    if options.root.is_some() {
        let path = options.at(&options.containerd_config);
        return Err(unknown(format!("there is no {}", path.display())));
    }
    let version = containerd::version().map_err(|error| unknown(error.to_string()))?;
    match containerd::major_and_minor(&version) {
        Some((major, _)) => Ok(Version::of_containerd(major)),
        None => Err(unknown(format!("its version is {version}"))),
    }
}

/// `bulkhead uninstall`.
pub(crate) fn uninstall(out: &mut impl Write, options: &Options) -> Result<(), CommandError> {
    options.check_root()?;
    let path = options.at(&options.containerd_config);
    let mut is_changed = false;
    if let Some(text) = read(&path)? {
        let old = block::remove(&path, &text)?;
        if old.is_empty() && old != text {
            remove(&path)?;
            say(out, &format!("removed {}", path.display()))?;
        } else if old != text {
            write(&path, &old)?;
            say(out, &format!("wrote {}, without the runtime handlers of Bulkhead", path.display()))?;
        }
        is_changed = old != text;
    }
    let drop_ins = [false, true].map(|with_runc| (options.drop_in(), Version::V3.file(with_runc)));
    let drop_in =
        drop_ins.into_iter().find(|(path, text)| files::read(path).is_ok_and(|it| it.as_ref() == Some(text)));
    let drop_in = drop_in.unwrap_or_else(|| (options.drop_in(), Version::V3.file(true)));
    let own = OWN_FILES.map(|(name, text)| (options.at(name), text.to_owned()));
    for (at, (path, text)) in [drop_in].into_iter().chain(own).enumerate() {
        match files::remove(&path, &text)
            .map_err(|source| CommandError::Remove { path: path.clone(), source })?
        {
            Removal::Absent => {}
            Removal::Removed => {
                is_changed |= at == 0;
                say(out, &format!("removed {}", path.display()))?;
            }
            Removal::Changed => say(out, &format!("kept {}, which you have changed", path.display()))?,
        }
    }
    // Fails if the operator has files of his own there.
    let own = options.at(OWN_DIRECTORY);
    if fs::remove_dir(&own).is_ok() {
        say(out, &format!("removed {}", own.display()))?;
    }
    if options.root.is_none() {
        let root = Path::new(STATE_ROOT);
        let failed = |source| CommandError::Remove { path: root.into(), source };
        forget_failures(root).map_err(failed)?;
        let removed = remove_all_templates(root).map_err(failed)?;
        say(out, &format!("removed {removed} templates from {STATE_ROOT}"))?;
    }
    finish(out, options, is_changed)?;
    say(out, "Pods that run go on. Remove the package, or the files of the archive, when none is left.")
}

/// Restarts containerd, or says that it is necessary.
fn finish(out: &mut impl Write, options: &Options, is_changed: bool) -> Result<(), CommandError> {
    if !is_changed {
        say(out, "containerd's configuration is as it was")?;
    }
    // It may have been changed before, without a restart.
    if !options.restart {
        let remedy = "containerd reads its configuration when it starts: systemctl restart containerd";
        return if is_changed { say(out, remedy) } else { Ok(()) };
    }
    program::output("systemctl", &["restart", "containerd"]).map_err(CommandError::Restart)?;
    say(out, "restarted containerd")
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
        Options { containerd_config: containerd::CONFIG.into(), restart: false, root: Some(root.into()) }
    }

    fn said(act: impl FnOnce(&mut Vec<u8>) -> Result<(), CommandError>) -> String {
        let mut out = Vec::new();
        act(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_is_installed_is_uninstalled_without_a_trace() {
        for configuration in ["version = 2\n", "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n"] {
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
    fn what_the_operator_has_changed_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("etc/containerd")).unwrap();
        fs::write(root.join("etc/containerd/config.toml"), "version = 2\n").unwrap();
        install(&mut Vec::new(), &options(root)).unwrap();
        fs::write(root.join("etc/bulkhead/config.toml"), "memory_mib = 512\n").unwrap();
        let said = said(|out| uninstall(out, &options(root)));
        assert!(said.contains("etc/bulkhead/config.toml, which you have changed"), "{said}");
        assert_eq!(tree(root).into_values().collect::<Vec<_>>(), ["memory_mib = 512\n", "version = 2\n"]);
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
    fn a_root_without_a_configuration_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = install(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
        assert!(error.starts_with("containerd is not found: there is no "), "{error}");
        assert!(tree(dir.path()).is_empty());
    }
}
