//! Block devices of the host, which a spec names by their numbers.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, OFlags, flock, major, makedev, minor},
    io::Errno,
};
use tokio::time::timeout;

use crate::host::{
    blocking::{self, BlockingError},
    device_node::NODES,
};

/// Where the kernel lists block devices by their numbers (kernel, Documentation/ABI/stable/sysfs-dev).
const DIRECTORY: &str = "/sys/dev/block";

/// How long opening a device may take. A disk may have to spin up.
const OPEN: Duration = Duration::from_secs(30);
/// How long to wait until a disk is closed.
const CLOSE: Duration = Duration::from_secs(1);
/// How long to wait for the lock of a block device, and until the next attempt. udev has it while it looks at a device
/// (systemd, "Locking Block Device Access"). It does not look at one that is locked, whose contents are the guest's:
/// they are not for the parsers of file systems, RAIDs and volumes on the host. It ignores the lock of device-mapper's
/// devices (docs/host-hardening.md).
const LOCK: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_millis(20);

/// Why a device of the host cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BlockDeviceError {
    #[error("cannot open {node}")]
    Open { node: PathBuf, source: io::Error },
    #[error("{node} is not the block device {major}:{minor}")]
    Other { node: PathBuf, major: u32, minor: u32 },
    #[error("{node} is neither a block device nor a file")]
    Kind { node: PathBuf },
    #[error("{node} is in use: it is mounted, another VM has it, or a program keeps it locked (flock)")]
    Used { node: PathBuf },
    #[error("opening the block device {major}:{minor} did not end within {} s", OPEN.as_secs())]
    Hangs { major: u32, minor: u32 },
    #[error("opening {node} did not end within {} s", OPEN.as_secs())]
    Late { node: PathBuf },
    #[error(transparent)]
    Blocking(#[from] BlockingError),
}

/// A block device of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockDevice {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    node: PathBuf,
    /// It has contents: a medium, or for a loop device a file.
    pub(crate) has_contents: bool,
    pub(crate) read_only: bool,
    /// It has a discard command.
    pub(crate) discards: bool,
}

impl BlockDevice {
    /// The device with these numbers. None: the host has none.
    pub(crate) fn find(major: i64, minor: i64) -> io::Result<Option<Self>> {
        Self::find_below(Path::new(DIRECTORY), major, minor)
    }

    fn find_below(directory: &Path, major: i64, minor: i64) -> io::Result<Option<Self>> {
        let (Ok(major), Ok(minor)) = (u32::try_from(major), u32::try_from(minor)) else { return Ok(None) };
        let device = directory.join(format!("{major}:{minor}"));
        let uevent = match fs::read_to_string(device.join("uevent")) {
            Ok(uevent) => uevent,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(name) = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME=")) else {
            return Ok(None);
        };
        let text = |file: &str| fs::read_to_string(device.join(file)).map(|text| text.trim_end().to_owned());
        // A partition has no queue of its own.
        let discards = text("queue/discard_max_bytes").or_else(|_| text("../queue/discard_max_bytes"));
        Ok(Some(Self {
            major,
            minor,
            node: Path::new(NODES).join(name),
            has_contents: text("size")? != "0",
            read_only: text("ro")? != "0",
            discards: discards.is_ok_and(|most| most != "0"),
        }))
    }

    /// Opens the device for reading, and if `writable` is set also for writing.
    pub(crate) async fn open(&self, writable: bool) -> Result<OpenDisk, BlockDeviceError> {
        let device = self.clone();
        let opened = blocking::run(move || device.open_here(writable).map(OpenDisk::new), drop);
        let late = || BlockDeviceError::Hangs { major: self.major, minor: self.minor };
        timeout(OPEN, opened).await.map_err(|_| late())??
    }

    fn open_here(&self, writable: bool) -> Result<File, BlockDeviceError> {
        let failed = |source| BlockDeviceError::Open { node: self.node.clone(), source };
        let file = File::options().read(true).write(writable).open(&self.node).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        if !found.file_type().is_block_device() || found.rdev() != makedev(self.major, self.minor) {
            let Self { node, major, minor, .. } = self.clone();
            return Err(BlockDeviceError::Other { node, major, minor });
        }
        Ok(file)
    }
}

/// A disk that is open. The last close of a block device writes back what the kernel has for it, and waits for the
/// device. So only a thread that may hang closes it.
#[derive(Debug)]
pub(crate) struct OpenDisk(Option<File>);

impl OpenDisk {
    fn new(file: File) -> Self {
        Self(Some(file))
    }

    /// Closes it, and waits a moment for that, so that whoever wants the disk next finds it free.
    pub(crate) async fn close(mut self) {
        if let Some(file) = self.0.take()
            && !matches!(timeout(CLOSE, blocking::drop_elsewhere(file)).await, Ok(Ok(())))
        {
            tracing::warn!("a disk of the host is not closed yet, and stays in use: it does not respond");
        }
    }
}

impl AsRawFd for OpenDisk {
    fn as_raw_fd(&self) -> RawFd {
        // The file is there until this is closed or dropped. -1 is no descriptor.
        self.0.as_ref().map_or(-1, File::as_raw_fd)
    }
}

impl Drop for OpenDisk {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            // Nobody waits.
            drop(blocking::drop_elsewhere(file));
        }
    }
}

/// Opens a disk for one VM alone: a block device, or an image in a file. Also says whether the device has a discard
/// command. Nobody can mount a block device that is open in this way, and another VM cannot have it.
pub(crate) async fn open_disk(path: &Path, writable: bool) -> Result<(OpenDisk, bool), BlockDeviceError> {
    let node = path.to_owned();
    let open =
        move || open_disk_here(&node, writable).map(|(file, discards)| (OpenDisk::new(file), discards));
    let opened = blocking::run(open, drop);
    let late = || BlockDeviceError::Late { node: path.to_owned() };
    timeout(OPEN, opened).await.map_err(|_| late())??
}

fn open_disk_here(node: &Path, writable: bool) -> Result<(File, bool), BlockDeviceError> {
    let failed = |source| BlockDeviceError::Open { node: node.to_owned(), source };
    // What it is must be known before it is opened: O_EXCL has another meaning for a file.
    let found = fs::metadata(node).map_err(failed)?;
    let (is_device, flags) = match found.file_type() {
        kind if kind.is_block_device() => (true, OFlags::EXCL),
        kind if kind.is_file() => (false, OFlags::empty()),
        _ => return Err(BlockDeviceError::Kind { node: node.to_owned() }),
    };
    let mut options = File::options();
    let options = options.read(true).write(writable).custom_flags(flags.bits() as i32);
    let used = || BlockDeviceError::Used { node: node.to_owned() };
    let file = options.open(node).map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy if is_device => used(),
        _ => failed(error),
    })?;
    let opened = file.metadata().map_err(failed)?;
    if (opened.dev(), opened.ino(), opened.rdev()) != (found.dev(), found.ino(), found.rdev()) {
        return Err(failed(io::Error::other("it was replaced meanwhile")));
    }
    // The lock is the VMM's as long as it has the disk.
    let wait = if is_device { LOCK } else { Duration::ZERO };
    lock(&file, wait).map_err(|errno| match errno {
        Errno::WOULDBLOCK => used(),
        other => failed(other.into()),
    })?;
    if !is_device {
        return Ok((file, true));
    }
    let device =
        BlockDevice::find(major(opened.rdev()).into(), minor(opened.rdev()).into()).map_err(failed)?;
    Ok((file, device.is_some_and(|device| device.discards)))
}

/// Locks a disk for this descriptor and its duplicates. EWOULDBLOCK: others have it locked for longer than `wait`.
fn lock(disk: &File, wait: Duration) -> Result<(), Errno> {
    let begun = Instant::now();
    loop {
        match flock(disk, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < wait => sleep(AGAIN),
            other => return other,
        }
    }
}

#[cfg(test)]
impl BlockDevice {
    /// A device that is not there.
    pub(crate) fn of_test(major: u32, minor: u32) -> Self {
        Self::at(Path::new(NODES).join("test"), major, minor)
    }

    /// A device whose node is this file.
    pub(crate) fn at(node: PathBuf, major: u32, minor: u32) -> Self {
        Self { major, minor, node, has_contents: true, read_only: false, discards: false }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_device_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("8:16");
        let write = |place: &Path, files: &[(&str, &str)]| {
            for (name, text) in files {
                let file = place.join(name);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, text).unwrap();
            }
        };
        let uevent = "MAJOR=8\nMINOR=16\nDEVNAME=sdb\nDEVTYPE=disk\n";
        write(
            &disk,
            &[("uevent", uevent), ("size", "2048\n"), ("ro", "0\n"), ("queue/discard_max_bytes", "4096\n")],
        );
        let part = disk.join("sdb1");
        write(&part, &[("uevent", "DEVNAME=sdb1\n"), ("size", "0\n"), ("ro", "1\n")]);
        std::os::unix::fs::symlink(&part, dir.path().join("8:17")).unwrap();
        let found = |minor| BlockDevice::find_below(dir.path(), 8, minor).unwrap();
        let mut expected = BlockDevice::of_test(8, 16);
        (expected.node, expected.discards) = ("/dev/sdb".into(), true);
        assert_eq!(found(16), Some(expected.clone()));
        (expected.minor, expected.node) = (17, "/dev/sdb1".into());
        (expected.has_contents, expected.read_only) = (false, true);
        assert_eq!(found(17), Some(expected));
        assert_eq!((found(18), found(-1)), (None, None));
    }

    #[tokio::test]
    async fn an_image_is_for_one_vm() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        fs::write(&image, "x").unwrap();
        let (file, discards) = open_disk(&image, true).await.unwrap();
        assert!(discards);
        assert!(matches!(open_disk(&image, false).await, Err(BlockDeviceError::Used { .. })));
        file.close().await;
        open_disk(&image, false).await.unwrap();
        assert!(matches!(open_disk(dir.path(), false).await, Err(BlockDeviceError::Kind { .. })));
        let missing = open_disk(&dir.path().join("missing"), false).await.unwrap_err();
        assert!(matches!(missing, BlockDeviceError::Open { .. }), "{missing}");
    }

    #[test]
    fn who_looks_at_a_disk_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "x").unwrap();
        let [udev, own] = [(); 2].map(|()| File::open(&path).unwrap());
        flock(&udev, FlockOperation::LockShared).unwrap();
        assert_eq!(lock(&own, Duration::ZERO), Err(Errno::WOULDBLOCK));
        thread::scope(|scope| {
            let locking = scope.spawn(|| lock(&own, Duration::from_secs(60)));
            drop(udev);
            assert_eq!(locking.join().unwrap(), Ok(()));
        });
        // Now udev leaves it alone.
        let udev = File::open(&path).unwrap();
        assert_eq!(flock(&udev, FlockOperation::NonBlockingLockShared), Err(Errno::WOULDBLOCK));
    }

    #[tokio::test]
    async fn a_node_of_something_else_is_not_opened() {
        let mut device = BlockDevice::of_test(8, 16);
        device.node = "/dev/null".into();
        assert!(matches!(device.open(false).await, Err(BlockDeviceError::Other { .. })));
        device.node = "/nonexistent/node".into();
        assert!(matches!(device.open(false).await, Err(BlockDeviceError::Open { .. })));
    }
}
