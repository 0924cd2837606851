//! The guest's block devices, and their file systems. The VMM attaches devices while the guest runs, and takes them
//! away.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs::{self, File},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    thread,
    time::{Duration, Instant},
};

use bulkhead_agent_api::DISKS_DIR;
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    unistd::syncfs,
};

use crate::{
    attached_devices,
    mount_places::{is_mounted, place_in},
};

/// Where the kernel lists block devices (kernel, Documentation/ABI/stable/sysfs-block).
const DIRECTORY: &str = "/sys/block";
/// Where the kernel makes their nodes (devtmpfs).
const NODES: &str = "/dev";

/// How long a device may be used after its file system was unmounted. A container that ends has copies of the mount
/// until its mount namespace is gone, which the kernel frees a little later.
const USED: Duration = Duration::from_secs(10);
/// How long to wait for the end of a mount that is under way.
const MOUNT: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 10_000 });
/// How long a search waits for an earlier one.
const SEARCH: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 20 });
/// How often one looks again meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The attributes that a mount may have: not what makes it another operation, such as MS_BIND or MS_MOVE.
const ATTRIBUTES: MsFlags = MsFlags::MS_RDONLY
    .union(MsFlags::MS_NOSUID)
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC)
    .union(MsFlags::MS_SYNCHRONOUS)
    .union(MsFlags::MS_DIRSYNC)
    .union(MsFlags::MS_NOATIME)
    .union(MsFlags::MS_NODIRATIME)
    .union(MsFlags::MS_RELATIME)
    .union(MsFlags::MS_STRICTATIME);

/// A file system to be mounted.
#[derive(Debug, Clone)]
pub struct FileSystem {
    /// The serial number of its disk: letters, digits and hyphens.
    pub serial: String,
    /// As /proc/filesystems has it.
    pub fs_type: String,
    /// `MS_*` of mount(2).
    pub flags: u64,
    /// The file system's own options, separated by commas.
    pub options: String,
}

/// The block devices.
pub struct Disks {
    directory: PathBuf,
    /// Held by whoever looks for one, which takes as long as the disk does to answer.
    searching: Mutex<()>,
    /// Those that were found, by their serial numbers: directories in sysfs. They are not asked again: one that hangs
    /// would not answer.
    found: Mutex<BTreeMap<String, PathBuf>>,
    /// The serial numbers of disks whose file systems are being mounted, and whether they are still wanted. The shim
    /// may give up a request while it is carried out here.
    mounting: Mutex<BTreeMap<String, bool>>,
    /// The serial numbers of disks that are being removed. A removal takes as long as the disk takes to answer.
    removing: Mutex<BTreeSet<String>>,
    /// [`attached_devices::forget`] and [`attached_devices::forget_failed`]. Tests replace them.
    forget: fn(&Path) -> io::Result<()>,
    forget_failed: fn() -> io::Result<()>,
}

/// A mount that is under way, until this is dropped.
struct Mounting<'d> {
    disks: &'d Disks,
    serial: &'d str,
}

impl Mounting<'_> {
    fn is_wanted(&self) -> bool {
        self.disks.mounting().get(self.serial).copied().unwrap_or(false)
    }
}

impl Drop for Mounting<'_> {
    fn drop(&mut self) {
        self.disks.mounting().remove(self.serial);
    }
}

/// The removal of a disk that is under way, until this is dropped.
struct Removing<'d> {
    disks: &'d Disks,
    serial: &'d str,
}

impl Drop for Removing<'_> {
    fn drop(&mut self) {
        self.disks.removing().remove(self.serial);
    }
}

impl Default for Disks {
    fn default() -> Self {
        Self::below(Path::new(DIRECTORY))
    }
}

impl Disks {
    fn below(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            searching: Mutex::default(),
            found: Mutex::default(),
            mounting: Mutex::default(),
            removing: Mutex::default(),
            forget: attached_devices::forget,
            forget_failed: attached_devices::forget_failed,
        }
    }

    /// The major and the minor number of the virtio disk with this serial number.
    pub fn find(&self, serial: &str) -> io::Result<(u32, u32)> {
        let numbers = fs::read_to_string(self.search(serial)?.join("dev"))?;
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, format!("{numbers:?} are no numbers"));
        numbers.trim_end().split_once(':').and_then(parse).ok_or_else(invalid)
    }

    /// The directory in sysfs of the disk with this serial number.
    fn search(&self, serial: &str) -> io::Result<PathBuf> {
        if let Some(known) = self.known(serial) {
            return Ok(known);
        }
        let _searching = self.begin_search()?;
        if let Some(disk) = self.ask_new(serial)? {
            return Ok(disk);
        }
        attached_devices::probe()?;
        self.ask_new(serial)?.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("no disk has the serial number {serial:?}"))
        })
    }

    /// A search may hang with its disk. Those that come later do not wait for it for long.
    fn begin_search(&self) -> io::Result<MutexGuard<'_, ()>> {
        let deadline = Instant::now() + SEARCH;
        loop {
            match self.searching.try_lock() {
                Ok(searching) => return Ok(searching),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
                Err(TryLockError::WouldBlock) => {
                    let what = "an earlier search for a disk has not ended";
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, what));
                }
            }
        }
    }

    fn known(&self, serial: &str) -> Option<PathBuf> {
        self.found().get(serial).cloned()
    }

    fn found(&self) -> MutexGuard<'_, BTreeMap<String, PathBuf>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the disks that were not found before for their serial numbers.
    fn ask_new(&self, serial: &str) -> io::Result<Option<PathBuf>> {
        for entry in fs::read_dir(&self.directory)? {
            let disk = entry?.path();
            if self.found().values().any(|known| *known == disk) {
                continue;
            }
            // Others than virtio disks have no such file.
            let Ok(own) = fs::read_to_string(disk.join("serial")) else { continue };
            self.found().insert(own.trim_end().to_owned(), disk);
        }
        Ok(self.known(serial))
    }

    fn mounting(&self) -> MutexGuard<'_, BTreeMap<String, bool>> {
        self.mounting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_mount<'d>(&'d self, serial: &'d str) -> io::Result<Mounting<'d>> {
        match self.mounting().entry(serial.to_owned()) {
            Entry::Vacant(place) => place.insert(true),
            Entry::Occupied(_) => return Err(io::ErrorKind::ResourceBusy.into()),
        };
        Ok(Mounting { disks: self, serial })
    }

    fn removing(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.removing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a second removal of the same disk. It would wait in a thread of its own until the first has ended, and
    /// could then take away the next disk at the same place.
    fn begin_removal<'d>(&'d self, serial: &'d str) -> io::Result<Removing<'d>> {
        if !self.removing().insert(serial.to_owned()) {
            let what = format!("the disk {serial:?} is being removed already");
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, what));
        }
        Ok(Removing { disks: self, serial })
    }

    /// Says that a mount of this disk is not wanted any more. Waits for its end, if one is under way.
    fn give_up_mount(&self, serial: &str) -> io::Result<()> {
        let deadline = Instant::now() + MOUNT;
        loop {
            // The lock is not held while this waits: the mount needs it to end.
            match self.mounting().get_mut(serial) {
                Some(is_wanted) => *is_wanted = false,
                None => return Ok(()),
            }
            if Instant::now() >= deadline {
                let what = format!("mounting the disk {serial:?} has not ended");
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, what));
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Mounts a file system at its place below [`DISKS_DIR`]. If [`Disks::unmount`] or [`Disks::remove`] is called for
    /// the same disk meanwhile, it waits for the end of the mount, which is undone and fails.
    pub fn mount(&self, wanted: &FileSystem) -> io::Result<()> {
        let FileSystem { serial, fs_type, flags, options } = wanted;
        let place = place_in(DISKS_DIR, serial)?;
        let refused =
            |what: &str| io::Error::new(io::ErrorKind::InvalidInput, format!("flags {flags:#x}: {what}"));
        let flags = MsFlags::from_bits(*flags).filter(|flags| ATTRIBUTES.contains(*flags));
        let flags = flags.ok_or_else(|| refused("not attributes of a mount"))?;
        let mounting = self.begin_mount(serial)?;
        let disk = self.search(serial)?;
        let given_up = || io::Error::new(io::ErrorKind::Interrupted, "the disk is not wanted any more");
        if !mounting.is_wanted() {
            return Err(given_up());
        }
        fs::create_dir_all(&place)?;
        let mounted =
            mount(Some(&node(&disk)), &place, Some(fs_type.as_str()), flags, Some(options.as_str()));
        mounted.map_err(|errno| {
            // It is empty.
            drop(fs::remove_dir(&place));
            io::Error::from(errno)
        })?;
        match mounting.is_wanted() {
            true => Ok(()),
            false => detach(&place).and(Err(given_up())),
        }
    }

    /// Writes back what is dirty, and unmounts the file system of the disk with this serial number, if there is one.
    /// Waits until nobody uses the disk any more.
    pub fn unmount(&self, serial: &str) -> io::Result<()> {
        let place = place_in(DISKS_DIR, serial)?;
        self.give_up_mount(serial)?;
        if is_mounted(DISKS_DIR, &place)? {
            // It tells whether the data arrived. What unmounts does not.
            let written = File::open(&place).and_then(|root| Ok(syncfs(&root)?));
            umount2(&place, MntFlags::UMOUNT_NOFOLLOW)?;
            fs::remove_dir(&place)?;
            written?;
        }
        self.known(serial).map_or(Ok(()), |disk| wait_until_unused(&node(&disk)))
    }

    /// Forgets a disk that the VMM has taken away, if there is one with this serial number.
    pub fn remove(&self, serial: &str) -> io::Result<()> {
        let place = place_in(DISKS_DIR, serial)?;
        let _removing = self.begin_removal(serial)?;
        self.give_up_mount(serial)?;
        if is_mounted(DISKS_DIR, &place)? {
            detach(&place)?;
        }
        let known = match self.known(serial) {
            Some(disk) => Some(disk),
            // It was not found, perhaps because the search was given up. The kernel may have its device nevertheless,
            // and still says its serial number.
            None => {
                let _searching = self.begin_search()?;
                self.ask_new(serial)?
            }
        };
        // The VMM may have taken the device away while its driver set it up, so that there was never a disk.
        let Some(disk) = known else { return (self.forget_failed)() };
        (self.forget)(&disk.join("device"))?;
        // Not before: a search would take the disk for a new one meanwhile.
        self.found().remove(serial);
        Ok(())
    }
}

/// Unmounts a file system whose disk is gone or not wanted, even if it is in use.
fn detach(place: &Path) -> io::Result<()> {
    umount2(place, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)?;
    fs::remove_dir(place)
}

fn node(disk: &Path) -> PathBuf {
    Path::new(NODES).join(disk.file_name().unwrap_or_default())
}

/// The kernel lets one open a device exclusively that no file system uses (open(2), O_EXCL).
fn wait_until_unused(node: &Path) -> io::Result<()> {
    let deadline = Instant::now() + USED;
    loop {
        match File::options().read(true).custom_flags(libc::O_EXCL).open(node) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                thread::sleep(LOOK_AGAIN);
            }
            other => return other.map(drop),
        }
    }
}

fn parse((major, minor): (&str, &str)) -> Option<(u32, u32)> {
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_number_leads_nowhere_else() {
        assert_eq!(place_in(DISKS_DIR, "root-1").unwrap(), Path::new(DISKS_DIR).join("root-1"));
        assert!(["", "..", "a/b", "8:16"].iter().all(|serial| place_in(DISKS_DIR, serial).is_err()));
    }

    #[test]
    fn only_attributes_of_a_mount_are_flags() {
        let disks = Disks::below(Path::new("/nonexistent"));
        let wanted = |flags: MsFlags| FileSystem {
            serial: "root-1".into(),
            fs_type: "ext4".into(),
            flags: flags.bits(),
            options: String::new(),
        };
        for (flags, kind) in [
            (MsFlags::MS_RDONLY | MsFlags::MS_NOATIME, io::ErrorKind::NotFound),
            (MsFlags::MS_REMOUNT, io::ErrorKind::InvalidInput),
            (MsFlags::MS_RDONLY | MsFlags::MS_BIND, io::ErrorKind::InvalidInput),
        ] {
            assert_eq!(disks.mount(&wanted(flags)).unwrap_err().kind(), kind, "{flags:?}");
        }
    }

    /// A directory like the kernel's /sys/block, which is removed when this is dropped.
    struct Block(PathBuf);

    impl Block {
        fn with(test: &str, disks: &[(&str, Option<&str>, &str)]) -> Self {
            let dir = std::env::temp_dir().join(format!("bulkhead-{test}-{}", std::process::id()));
            for (name, serial, dev) in disks {
                fs::create_dir_all(dir.join(name)).unwrap();
                fs::write(dir.join(name).join("dev"), dev).unwrap();
                if let Some(serial) = serial {
                    fs::write(dir.join(name).join("serial"), serial).unwrap();
                }
            }
            Self(dir)
        }
    }

    impl Drop for Block {
        fn drop(&mut self) {
            _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_mount_that_is_given_up_while_it_is_under_way_leaves_nothing() {
        let block = Block::with("given-up", &[("vda", Some("root-1"), "254:0\n")]);
        let disks = Disks::below(&block.0);
        let wanted =
            FileSystem { serial: "root-1".into(), fs_type: "ext4".into(), flags: 0, options: String::new() };
        thread::scope(|scope| {
            // The search hangs, as if a disk were slow.
            let searching = disks.begin_search().unwrap();
            let mounting = scope.spawn(|| disks.mount(&wanted));
            while disks.mounting().is_empty() {
                thread::yield_now();
            }
            assert_eq!(disks.unmount("root-1").unwrap_err().kind(), io::ErrorKind::ResourceBusy);
            drop(searching);
            assert_eq!(mounting.join().unwrap().unwrap_err().kind(), io::ErrorKind::Interrupted);
        });
        assert!(disks.mounting().is_empty());
    }

    #[test]
    fn a_mount_that_is_given_up_can_end_meanwhile() {
        let disks = Disks::below(Path::new("/nonexistent"));
        thread::scope(|scope| {
            let mounting = disks.begin_mount("root-1").unwrap();
            let given_up = scope.spawn(|| disks.give_up_mount("root-1"));
            while mounting.is_wanted() {
                thread::yield_now();
            }
            drop(mounting);
            given_up.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_disk_is_removed_once_at_a_time() {
        let block = Block::with("removed", &[("vda", Some("root-1"), "254:0\n")]);
        let mut disks = Disks::below(&block.0);
        // Like the removal of a disk that does not answer, until its directory has this file.
        disks.forget = |device| {
            let disk = device.parent().unwrap();
            fs::write(disk.join("begun"), "")?;
            while !disk.join("answer").exists() {
                thread::yield_now();
            }
            Ok(())
        };
        thread::scope(|scope| {
            let first = scope.spawn(|| disks.remove("root-1"));
            while !block.0.join("vda/begun").exists() {
                thread::yield_now();
            }
            assert_eq!(disks.remove("root-1").unwrap_err().kind(), io::ErrorKind::ResourceBusy);
            fs::write(block.0.join("vda/answer"), "").unwrap();
            first.join().unwrap().unwrap();
        });
        assert!(disks.known("root-1").is_none() && disks.removing().is_empty());
    }

    #[test]
    fn a_disk_that_nobody_has_found_yet_is_forgotten() {
        let block = Block::with("gone", &[("vda", Some("root-1"), "254:0\n"), ("loop0", None, "7:0\n")]);
        let mut disks = Disks::below(&block.0);
        disks.forget = |device| fs::remove_dir_all(device.parent().unwrap());
        disks.forget_failed = || Err(io::ErrorKind::Other.into());
        assert!(disks.remove("root-2").is_err(), "its driver may have failed");
        assert!(block.0.join("vda").exists());
        disks.remove("root-1").unwrap();
        assert!(!block.0.join("vda").exists() && disks.known("root-1").is_none());
    }

    #[test]
    fn a_disk_is_found_by_its_serial_number() {
        let block = Block::with(
            "disks",
            &[("vda", Some("8:16"), "254:0\n"), ("vdb", Some("7:0"), "254:16\n"), ("loop0", None, "7:0\n")],
        );
        let dir = &block.0;
        let mut disks = Disks::below(dir);
        disks.forget_failed = || Ok(());
        assert_eq!(disks.find("7:0").unwrap(), (254, 16));
        assert_eq!(disks.ask_new("8:1").unwrap(), None);
        assert!(disks.remove("root-1").is_ok(), "there is none");
        // One that was found is not asked again: it may never answer.
        fs::remove_file(dir.join("vda/serial")).unwrap();
        assert_eq!(disks.find("8:16").unwrap(), (254, 0));
        fs::write(dir.join("vda/dev"), "254\n").unwrap();
        assert_eq!(disks.find("8:16").unwrap_err().kind(), io::ErrorKind::InvalidData);
        let _searching = disks.searching.lock();
        assert_eq!(disks.find("8:1").unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(disks.find("7:0").unwrap(), (254, 16));
    }
}
