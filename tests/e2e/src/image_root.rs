//! The root of a container as a snapshot of an image, like those of users' containers. No image with real programs is
//! needed: its first layer is the host's root file system.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use crate::api::Api;
use crate::api::messages::{CreateTask, Mount, StartProcess};
use crate::cases::programs::{PATH, on_disk};
use crate::ctr::{Container, Host, Task};

/// How long containerd may take to start a container on an ordinary machine.
const LIMIT: Duration = Duration::from_secs(30);

/// An image of two layers: the host's root file system, and some files. Its snapshot is an overlay, which the shim
/// mounts, as it does for a snapshotter of containerd.
pub(crate) struct ImageRoot {
    directory: TempDir,
    /// Where the files of the snapshot are.
    snapshot: PathBuf,
}

impl ImageRoot {
    /// The second layer and the snapshot are in memory, because overlayfs takes none that is below the first layer.
    pub(crate) fn make() -> Result<Self> {
        let directory = on_disk()?;
        let image = Self { snapshot: directory.path().to_owned(), directory };
        mount(Some("tmpfs"), image.directory.path(), Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
            .context("cannot mount a file system for an image")?;
        for name in ["layer/srv", "layer/etc", "upper", "work"] {
            fs::create_dir_all(image.at(name)).with_context(|| format!("cannot make {name}"))?;
        }
        image.write("etc/hosts", b"127.0.0.1 localhost\n::1 localhost\n")?;
        Ok(image)
    }

    /// Keeps the files of the snapshot in this directory, which is not below the host's root file system. Call this
    /// before a container has the root.
    pub(crate) fn with_snapshot_in(mut self, directory: &Path) -> Result<Self> {
        for name in ["upper", "work"] {
            fs::create_dir_all(directory.join(name)).with_context(|| format!("cannot make {name}"))?;
        }
        self.snapshot = directory.to_owned();
        Ok(self)
    }

    /// The second layer, to add files before a container has the root.
    pub(crate) fn layer(&self) -> PathBuf {
        self.at("layer")
    }

    /// Adds a file to the second layer. Call this before a container has the root.
    pub(crate) fn write(&self, name: &str, content: &[u8]) -> Result<()> {
        fs::write(self.layer().join(name), content).with_context(|| format!("cannot write {name}"))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The options of the snapshot's overlay.
    fn options(&self) -> [String; 3] {
        let at = |name: &str| self.snapshot.join(name).display().to_string();
        [
            format!("workdir={}", at("work")),
            format!("upperdir={}", at("upper")),
            format!("lowerdir={}:/", self.layer().display()),
        ]
    }

    /// Mounts the snapshot on the host, for whoever is not a container. Returns where.
    pub(crate) fn mount(&self) -> Result<PathBuf> {
        let path = self.at("root");
        fs::create_dir(&path).context("cannot make a place for a snapshot")?;
        let options = self.options().join(",");
        mount(Some("overlay"), &path, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
            .context("cannot mount a snapshot")?;
        Ok(path)
    }

    /// Starts a container whose root is the snapshot.
    pub(crate) fn detach<'h>(
        &self,
        host: &'h Host,
        container: Container<'h>,
        command: &[&str],
    ) -> Result<Task<'h>> {
        let task = container.flags(["--env", PATH]).create(command)?;
        let (kind, source) = ("overlay".to_owned(), "overlay".to_owned());
        let rootfs = vec![Mount { kind, source, target: String::new(), options: self.options().into() }];
        let api = Api::connect(host.patience(LIMIT))?;
        let id = task.id().to_owned();
        api.call(CreateTask { container_id: id.clone(), rootfs }).context("cannot create a task")?;
        api.call(StartProcess { container_id: id, exec_id: String::new() }).context("cannot start a task")?;
        Ok(task)
    }
}

impl Drop for ImageRoot {
    fn drop(&mut self) {
        // It is not mounted if it could not be made. What is mounted below it goes with it.
        let _ = umount2(self.directory.path(), MntFlags::MNT_DETACH);
    }
}
