//! What an installation is told, and where its files are.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use clap::Args;

use crate::{
    containerd::{CONFIG, Containerd, ContainerdConfig, RECORD, at_root},
    error::CommandError,
    install::{
        block, lock, metrics,
        steps::{read, say, write},
    },
};

/// The name of the file in the directory that containerd imports.
pub(super) const DROP_IN: &str = "bulkhead.toml";

/// The list of the archive's files, which the archive has, and that of the last installation.
pub(super) const ARCHIVE_FILES: &str = "/usr/lib/bulkhead/files";
pub(super) const ARCHIVE_RECORD: &str = "/etc/bulkhead/archive-files";

/// The program of the package. That of the archive is in /usr/local.
pub(super) const PACKAGE_PROGRAM: &str = "/usr/bin/bulkhead";

/// Where the removal of the package has kept its program, because not all could be undone. An installation can undo it.
pub(super) const KEPT_PROGRAM: &str = "/var/lib/bulkhead-uninstall";

/// The other files that are written, and their texts.
pub(super) const OWN_DIRECTORY: &str = "/etc/bulkhead";
pub(super) const OWN_FILES: [(&str, &str); 2] = [
    ("/etc/bulkhead/config.toml", include_str!("../../../contrib/bulkhead/config.toml")),
    (MANIFEST, include_str!("../../../contrib/kubernetes/runtimeclass.yaml")),
];

/// The one for Kubernetes.
pub(super) const MANIFEST: &str = "/etc/bulkhead/runtimeclass.yaml";

/// The digests of these files.
pub(super) const OWN_RECORD: &str = "/etc/bulkhead/installed-files";

#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(super) containerd: ContainerdConfig,
    /// Restarts containerd, or k3s or RKE2, if it has not read its configuration. Running containers are not
    /// interrupted.
    #[arg(long)]
    pub(super) restart: bool,
    /// Acts on the host whose root directory is here, such as that of an image. Its containerd is not executed.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "restart")]
    pub(super) root: Option<PathBuf>,
}

impl Options {
    /// Where the file `path` of the host is.
    pub(super) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.as_ref().map_or_else(|| path.into(), |root| at_root(root, path))
    }

    pub(super) fn root(&self) -> &Path {
        self.root.as_deref().unwrap_or(Path::new("/"))
    }

    /// The containerd that is configured.
    pub(super) fn containerd(&self) -> Containerd {
        self.containerd.containerd(self.root())
    }

    /// The containerds from which the handlers are removed: the one that is named, or all that may have them.
    pub(super) fn containerds(&self, recorded: Option<&Path>) -> Vec<Containerd> {
        match &self.containerd.containerd_config {
            Some(named) => vec![Containerd::of(named.clone())],
            None => Containerd::all(recorded),
        }
    }

    /// Refuses an archive over a package: the removal of one takes files of the other.
    pub(super) fn check_one_installation(&self) -> Result<(), CommandError> {
        let [package, list] = [PACKAGE_PROGRAM, ARCHIVE_FILES].map(|path| self.at(path));
        // An operator may have made a link to the archive's program. A package has only files.
        let has_package = package.symlink_metadata().is_ok_and(|metadata| metadata.is_file());
        match has_package && list.exists() {
            true => Err(CommandError::TwoInstallations { package, list }),
            false => Ok(()),
        }
    }

    /// Refuses a second containerd: `bulkhead uninstall` would leave the handlers of the first one.
    pub(super) fn check_only(&self, containerd: &Containerd) -> Result<(), CommandError> {
        let known = Containerd::find(self.root());
        if known == *containerd {
            return Ok(());
        }
        self.check_there(&known)?;
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

    /// Fails if the configuration that was recorded is not there, such as on a disk that is not mounted: nobody knows
    /// whether the handlers are in it. The default one may be removed with containerd, and is found without a record.
    pub(super) fn check_there(&self, containerd: &Containerd) -> Result<(), CommandError> {
        let path = self.at(&containerd.config);
        let is_there = match containerd.generator() {
            None => path.exists() || containerd.config == Path::new(CONFIG),
            // The templates are beside it, and it is generated anew.
            Some(_) => path.parent().is_some_and(Path::exists),
        };
        match is_there {
            true => Ok(()),
            false => Err(CommandError::NotThere { path, record: self.at(RECORD) }),
        }
    }

    /// Records the configuration that was named, for commands that name none.
    pub(super) fn record(&self, out: &mut impl Write) -> Result<(), CommandError> {
        let Some(named) = &self.containerd.containerd_config else { return Ok(()) };
        let (path, text) = (self.at(RECORD), format!("{}\n", named.display()));
        if read(&path)?.as_ref() == Some(&text) {
            return say(out, &format!("kept {}", path.display()));
        }
        write(&path, &text)?;
        say(out, &format!("wrote {}", path.display()))
    }

    /// The file of its own for the handlers, and the directory that is imported, as containerd names it.
    pub(super) fn drop_in(&self, containerd: &Containerd) -> (PathBuf, PathBuf) {
        let directory = containerd.imported();
        (self.at(directory.join(DROP_IN)), directory)
    }

    /// The files that have the block with the handlers, if no file of its own has them.
    pub(super) fn with_block(&self, containerd: &Containerd) -> Vec<PathBuf> {
        match containerd.generator() {
            None => vec![self.at(&containerd.config)],
            Some(_) => containerd.templates().iter().map(|path| self.at(path)).collect(),
        }
    }

    /// Refuses a root directory in which a symbolic link leads from one of our own files to a file outside of it.
    pub(super) fn check_own(&self) -> Result<(), CommandError> {
        let own = OWN_FILES.map(|(name, _)| self.at(name));
        let others = [
            self.at(RECORD),
            self.at(KEPT_PROGRAM),
            metrics::directory(self.root.as_deref()),
            self.at(lock::DIRECTORY),
        ];
        let of_archive = [ARCHIVE_FILES, ARCHIVE_RECORD, OWN_RECORD].map(|path| self.at(path));
        self.check_inside(own.into_iter().chain(others).chain(of_archive))
    }

    /// The same for the files of a containerd.
    pub(super) fn check_containerd(&self, containerd: &Containerd) -> Result<(), CommandError> {
        let of_containerd = [self.at(&containerd.config), self.drop_in(containerd).0];
        self.check_inside(of_containerd.into_iter().chain(self.with_block(containerd)))
    }

    pub(super) fn check_inside(&self, paths: impl Iterator<Item = PathBuf>) -> Result<(), CommandError> {
        let Some(root) = &self.root else { return Ok(()) };
        let read = |path: &Path| {
            fs::canonicalize(path).map_err(|source| CommandError::Read { path: path.into(), source })
        };
        let inside = read(root)?;
        for path in paths {
            // A link that leads nowhere exists too.
            let there = path.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(root);
            if !read(there)?.starts_with(&inside) {
                return Err(CommandError::OutsideRoot { path, root: root.clone() });
            }
        }
        Ok(())
    }
}
