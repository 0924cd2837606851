//! The volumes of one pod, as kubelet and storage drivers make and remove them.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use super::super::devices::attach;
use crate::command::{Cmd, wait_until};
use crate::ctr::Host;
use crate::fixtures::{Root, scratch};
use crate::pods::Pod;

/// KiB of a disk.
const DISK: u64 = 4 << 10;
/// How long a file system and a loop device may be in use after the end of the pod.
const FREED: Duration = Duration::from_secs(10);

/// An empty file system, of which each pod gets a copy.
pub(super) struct Image {
    directory: TempDir,
}

impl Image {
    pub(super) fn make(host: &Host) -> Result<Self> {
        let image = Self { directory: scratch()? };
        File::create(image.path())?.set_len(DISK << 10)?;
        let root = Root::mount(host)?;
        let mkfs = Cmd::new(&root.path().join("bin/busybox").display().to_string());
        mkfs.args(["mke2fs", "-F"]).args([&image.path()]).args([DISK.to_string()]).run()?.succeeds()?;
        Ok(image)
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("disk")
    }
}

/// What a pod has. Dropping this unmounts it, if the case has failed.
pub(super) struct Volumes {
    directory: TempDir,
    kubelet: PathBuf,
    mounted: Vec<PathBuf>,
    /// The loop devices: one as it is, one with a file system.
    loops: Vec<String>,
}

impl Volumes {
    pub(super) fn make(pod: &Pod<'_>, image: &Image) -> Result<Self> {
        let directory = scratch()?;
        let kubelet = directory.path().join("pods").join(pod.uid()?);
        let mut volumes = Self { directory, kubelet, mounted: Vec::new(), loops: Vec::new() };
        volumes.make_projected("config", "public\n")?;
        volumes.mount("secret", "tmpfs", None)?;
        volumes.make_projected("secret", "hidden\n")?;
        for name in ["host", "scratch/part", "tree/below", "slave/later"] {
            fs::create_dir_all(volumes.at(name))?;
        }
        fs::set_permissions(volumes.at("scratch"), fs::Permissions::from_mode(0o777))?;
        fs::write(volumes.at("host").join("file"), "host\n")?;
        fs::write(volumes.at("host-file"), "")?;
        volumes.mount("memory", "tmpfs", Some("mode=777"))?;
        volumes.mount("pages", "hugetlbfs", Some("pagesize=2M,mode=777"))?;
        volumes.mount("tree/below", "tmpfs", None)?;
        volumes.bind(&volumes.at("scratch").join("part"), "part")?;
        volumes.make_disks(image)?;
        volumes.serve()?;
        Ok(volumes)
    }

    /// Where a volume is on the host: those of kubelet are in its directory of the pod.
    pub(super) fn at(&self, name: &str) -> PathBuf {
        let kind = match name.split('/').next().unwrap_or_default() {
            "config" => "volumes/kubernetes.io~configmap",
            "secret" => "volumes/kubernetes.io~secret",
            "scratch" | "memory" | "pages" => "volumes/kubernetes.io~empty-dir",
            "disk" => "volumes/kubernetes.io~csi",
            "part" => "volume-subpaths/scratch/first",
            _ => return self.directory.path().join(name),
        };
        self.kubelet.join(kind).join(name)
    }

    /// The loop device without a file system.
    pub(super) fn raw(&self) -> &str {
        self.loops.first().map_or("", String::as_str)
    }

    /// The socket of a service of the host.
    pub(super) fn service(&self) -> PathBuf {
        self.directory.path().join("service.sock")
    }

    /// One file, as kubelet's AtomicWriter writes it.
    fn make_projected(&self, name: &str, content: &str) -> Result<()> {
        let path = self.at(name);
        fs::create_dir_all(path.join("..2026_11_26_10_00_00.1"))?;
        fs::write(path.join("..2026_11_26_10_00_00.1/key"), content)?;
        symlink("..2026_11_26_10_00_00.1", path.join("..data"))?;
        Ok(symlink("..data/key", path.join("key"))?)
    }

    fn mount(&mut self, name: &str, kind: &str, options: Option<&str>) -> Result<()> {
        let path = self.at(name);
        fs::create_dir_all(&path)?;
        mount(Some(kind), &path, Some(kind), MsFlags::empty(), options)
            .with_context(|| format!("cannot mount a {kind}"))?;
        self.mounted.push(path);
        Ok(())
    }

    fn bind(&mut self, source: &Path, name: &str) -> Result<()> {
        let path = self.at(name);
        fs::create_dir_all(&path)?;
        mount(Some(source), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        self.mounted.push(path);
        Ok(())
    }

    fn make_disks(&mut self, image: &Image) -> Result<()> {
        for name in ["raw", "formatted"] {
            let file = self.directory.path().join(name);
            fs::copy(image.path(), &file)?;
            self.loops.push(attach(&file)?);
        }
        let (path, device) = (self.at("disk"), self.loops.last().cloned().unwrap_or_default());
        fs::create_dir_all(&path)?;
        mount(Some(device.as_str()), &path, Some("ext4"), MsFlags::empty(), None::<&str>)
            .context("cannot mount a disk")?;
        self.mounted.push(path);
        Ok(())
    }

    /// Serves the one client that there is.
    fn serve(&self) -> Result<()> {
        let listener = UnixListener::bind(self.service())?;
        thread::spawn(move || listener.accept().and_then(|(mut client, _)| client.write_all(b"served\n")));
        Ok(())
    }

    /// Mounts a file system below a directory that a container has.
    pub(super) fn mount_late(&mut self) -> Result<()> {
        self.mount("slave/later", "tmpfs", None)?;
        Ok(fs::write(self.at("slave/later/file"), "later\n")?)
    }

    /// Expects on the host what the first container has written.
    pub(super) fn expect_written(&self) -> Result<()> {
        for (file, expected) in [
            (self.at("host-file"), "file\n"),
            (self.at("scratch").join("part/file"), "part\n"),
            (self.at("disk").join("file"), "disk\n"),
        ] {
            let came = fs::read_to_string(&file)?;
            ensure!(came == expected, "expected  {expected:?} in {}\ncame      {came:?}", file.display());
        }
        Ok(())
    }

    /// Removes them, when the pod is gone. Expects that nobody uses them any more.
    pub(super) fn remove(mut self, host: &Host) -> Result<()> {
        // What was sent to the disk by then is there.
        let mut raw = [0; 3];
        File::open(self.directory.path().join("raw"))?.read_exact_at(&mut raw, 0)?;
        ensure!(raw == *b"raw", "expected  \"raw\" on the disk\ncame      {raw:?}");
        // What cannot be unmounted stays in the list, and is detached when this is dropped.
        while let Some(path) = self.mounted.last() {
            umount2(path, MntFlags::empty()).with_context(|| format!("{} is in use", path.display()))?;
            self.mounted.pop();
        }
        while let Some(device) = self.loops.pop() {
            Cmd::new("losetup").args(["--detach", &device]).run()?.succeeds()?;
            // One that is still used keeps its file.
            wait_until(&format!("{device} to be free"), host.patience(FREED), || {
                let file =
                    format!("/sys/class/block/{}/loop/backing_file", device.trim_start_matches("/dev/"));
                let file = fs::read_to_string(file).unwrap_or_default();
                Ok(!file.starts_with(&self.directory.path().display().to_string()))
            })?;
        }
        fs::remove_dir_all(self.directory.path()).context("cannot remove the volumes")
    }
}

impl Drop for Volumes {
    fn drop(&mut self) {
        // Nothing is left of one that was removed.
        for path in self.mounted.iter().rev() {
            _ = umount2(path, MntFlags::MNT_DETACH);
        }
        for device in &self.loops {
            _ = Cmd::new("losetup").args(["--detach", device]).run();
        }
    }
}
