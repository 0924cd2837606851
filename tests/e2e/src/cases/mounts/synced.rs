//! What a program has been told to be on the disk is there: it survives a power failure of the host.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use crate::cases::devices::Loop;
use crate::command::Cmd;
use crate::ctr::Host;
use crate::fixtures::{Root, scratch};
use crate::image_root::ImageRoot;

/// Makes a file in a volume and one in the root of the container for each way to write to the disk. The content of a
/// file is its name, and where it is.
const MAKE: &str = "\
import mmap, os
SIZE = 4096
def text(name, where):
    return f'{name} in {where}\\n'.encode().ljust(SIZE)
def make(name, flags=0):
    for where, directory in ('volume', '/volume'), ('root', '/srv'):
        file = os.open(f'{directory}/{name}', os.O_RDWR | os.O_CREAT | flags, 0o600)
        os.write(file, text(name, where) if name != 'msync' else bytes(SIZE))
        yield where, file
for _, file in make('fsync'):
    os.fsync(file)
for _, file in make('fdatasync'):
    os.fdatasync(file)
for flag in 'O_SYNC', 'O_DSYNC':
    list(make(flag, getattr(os, flag)))
for where, file in make('msync'):
    with mmap.mmap(file, SIZE) as mapped:
        mapped[:] = text('msync', where)
        mapped.flush()
";

/// A file system on a loop device. It is unmounted when this is dropped.
struct Disk {
    directory: TempDir,
    device: Loop,
}

impl Disk {
    fn mount(host: &Host) -> Result<Self> {
        let disk = Self { directory: scratch()?, device: Loop::new()? };
        let image = Root::mount(host)?;
        // The driver of ext4 mounts it too.
        let busybox = Cmd::new(&image.path().join("bin/busybox").display().to_string());
        busybox.args(["mke2fs", "-F", disk.device.path()]).run()?.succeeds()?;
        mount(Some(disk.device.path()), disk.place(), Some("ext4"), MsFlags::empty(), None::<&str>)
            .context("cannot mount a disk")?;
        Ok(disk)
    }

    fn place(&self) -> &Path {
        self.directory.path()
    }

    /// A directory of the device in sysfs.
    fn attributes(&self) -> Result<PathBuf> {
        let name = self.device.path().strip_prefix("/dev/").context("no name of a device")?;
        Ok(Path::new("/sys/block").join(name))
    }

    /// How often the cache of the disk was flushed (Documentation/block/stat.rst).
    fn flushes(&self) -> Result<u64> {
        let stat = fs::read_to_string(self.attributes()?.join("stat"))?;
        let flushes = stat.split_whitespace().nth(15).with_context(|| format!("no flushes in {stat:?}"))?;
        flushes.parse().with_context(|| format!("{flushes:?} is no number"))
    }

    /// Expects that these files are on the disk, and that its cache was flushed since `before`.
    fn expect(&self, files: &[&str], before: u64) -> Result<()> {
        const SMALLEST_BLOCK: usize = 1024;
        let image = fs::read_to_string(self.attributes()?.join("loop/backing_file"))?;
        let image = fs::read(image.trim_end()).context("cannot read the disk's content")?;
        let is_there =
            |file: &str| image.chunks(SMALLEST_BLOCK).any(|block| block.starts_with(file.as_bytes()));
        let lost: Vec<_> = files.iter().filter(|file| !is_there(&format!("{file}\n"))).collect();
        ensure!(lost.is_empty(), "expected  all files on the disk\ncame      none of {lost:?}");
        let now = self.flushes()?;
        ensure!(now > before, "expected  more than {before} flushes of the disk's cache\ncame      {now}");
        Ok(())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = umount2(self.place(), MntFlags::MNT_DETACH);
    }
}

pub(super) fn on_disk(host: &Host) -> Result<()> {
    let disk = Disk::mount(host)?;
    let volume = disk.place().join("volume");
    fs::create_dir(&volume)?;
    let image = ImageRoot::make()?.with_snapshot_in(&disk.place().join("snapshot"))?;
    let container = host.container().bind(&volume, "/volume", "rbind:rw");
    let task = image.detach(host, container, &["sleep", "1000"])?;

    let before = disk.flushes()?;
    task.exec(&["python3", "-c", MAKE])?.succeeds()?;
    let names = ["fsync", "fdatasync", "O_SYNC", "O_DSYNC", "msync"];
    let files: Vec<_> =
        names.iter().flat_map(|name| [format!("{name} in volume"), format!("{name} in root")]).collect();
    disk.expect(&files.iter().map(String::as_str).collect::<Vec<_>>(), before)?;

    // The kernel would write it after 30 seconds.
    for (file, path, sync) in [
        ("syncfs in volume", "/volume/syncfs", "sync -f /volume"),
        ("syncfs in root", "/srv/syncfs", "sync -f /srv"),
        ("sync in volume", "/volume/sync", "sync"),
        ("sync in root", "/srv/sync", "sync"),
    ] {
        let before = disk.flushes()?;
        task.exec(&["sh", "-c", &format!("echo '{file}' > {path} && {sync}")])?.succeeds()?;
        disk.expect(&[file], before)?;
    }
    Ok(())
}
