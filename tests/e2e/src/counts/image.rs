//! The root of the container whose costs are counted: a snapshot of an image, as users' containers have it.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use crate::api::Api;
use crate::api::messages::{CreateTask, Mount, StartProcess};
use crate::cases::programs::{PATH, on_disk};
use crate::ctr::{Container, Host, Task};

const WORKER: &str = include_str!("worker.py");
pub(super) const MIB: usize = 1 << 20;
/// The page that the worker serves, in bytes.
pub(super) const PAGE: usize = 1000;
/// So many files of 1 MiB can be read for the first time.
const COLD: usize = 32;

/// An image of two layers: the host's root file system, and the files of the worker. Its snapshot is an overlay, which
/// the shim mounts, as it does for a snapshotter of containerd.
pub(super) struct Image {
    directory: TempDir,
}

impl Image {
    /// The second layer and the snapshot are in memory, because overlayfs takes none that is below the first layer.
    pub(super) fn make() -> Result<Self> {
        let image = Self { directory: on_disk()? };
        mount(Some("tmpfs"), image.directory.path(), Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
            .context("cannot mount a file system for an image")?;
        for name in ["layer/srv", "layer/etc", "upper", "work"] {
            fs::create_dir_all(image.at(name)).with_context(|| format!("cannot make {name}"))?;
        }
        let write = |name: &str, content: &[u8]| {
            fs::write(image.at("layer").join(name), content).with_context(|| format!("cannot write {name}"))
        };
        write("etc/hosts", b"127.0.0.1 localhost\n::1 localhost\n")?;
        write("srv/worker.py", WORKER.as_bytes())?;
        write("srv/page", &[b'x'; PAGE])?;
        write("srv/warm", &vec![b'x'; MIB])?;
        (0..COLD).try_for_each(|index| write(&format!("srv/cold-{index}"), &vec![b'x'; MIB]))?;
        Ok(image)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts a container whose root is the snapshot.
    pub(super) fn detach<'h>(
        &self,
        host: &'h Host,
        container: Container<'h>,
        command: &[&str],
    ) -> Result<Task<'h>> {
        let task = container.flags(["--env", PATH]).create(command)?;
        let at = |name: &str| self.at(name).display().to_string();
        let options = vec![
            format!("workdir={}", at("work")),
            format!("upperdir={}", at("upper")),
            format!("lowerdir={}:/", at("layer")),
        ];
        let (kind, source) = ("overlay".to_owned(), "overlay".to_owned());
        let rootfs = vec![Mount { kind, source, target: String::new(), options }];
        let api = Api::connect(host.patience(crate::counts::LIMIT))?;
        let id = task.id().to_owned();
        api.call(CreateTask { container_id: id.clone(), rootfs }).context("cannot create a task")?;
        api.call(StartProcess { container_id: id, exec_id: String::new() }).context("cannot start a task")?;
        Ok(task)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // It is not mounted if it could not be made.
        let _ = umount2(self.directory.path(), MntFlags::MNT_DETACH);
    }
}
