//! Changes to the guest as a whole that a test must replace: its clock, its share, its processors, its
//! AppArmor profiles, and sync(2).
//!
//! A test that runs the agent on a machine that is not a guest provides its own [`Machine`]. It also gives the agent a
//! default [`crate::guest_reserve::Reserve`], which changes no sysctls.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use bulkhead_agent_api::SHARE_DIR;
use bulkhead_vmm_api::SharedSocket;

use nix::{
    mount::{MsFlags, mount},
    sys::{
        stat::{major, minor},
        time::TimeSpec,
    },
    time::{ClockId, clock_settime},
    unistd::sync,
};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use crate::{
    apparmor,
    clock::{self, Correction},
    disks::{Disks, FileSystem},
    processors::Processors,
};

/// The machine that the agent runs on.
pub trait Machine: Send + Sync {
    /// Sets the wall clock to a time since 1970.
    fn set_clock(&self, since_1970: Duration) -> io::Result<()>;

    /// Makes the directory `place`, and mounts the share with this tag there.
    fn mount_share(&self, tag: &str, place: &Path) -> io::Result<()>;

    /// Corrects the wall clock.
    fn adjust_clock(&self, correction: Correction) -> io::Result<()>;

    /// Loads a binary policy of AppArmor into the kernel.
    fn load_apparmor_policy(&self, policy: &[u8]) -> io::Result<()>;

    /// Brings the first `count` processors online and the others offline. Returns how many are online.
    fn set_processors(&self, count: u32) -> io::Result<u32>;

    /// The numbers, major and minor, of the block device with this serial number that the VMM has attached. Waits for
    /// the device.
    fn find_disk(&self, serial: &str) -> io::Result<(u32, u32)>;

    /// Mounts the file system of such a device, see [`Disks::mount`].
    fn mount_disk(&self, wanted: &FileSystem) -> io::Result<()>;

    /// Unmounts it, see [`Disks::unmount`].
    fn unmount_disk(&self, serial: &str) -> io::Result<()>;

    /// Forgets such a device, see [`Disks::remove`].
    fn remove_disk(&self, serial: &str) -> io::Result<()>;

    /// The name by which a socket is bound to the inode of a socket of the host that is at `path` in the share.
    /// `NotFound`: it is not there.
    fn name_to_bind(&self, path: &Path, socket: &SharedSocket) -> io::Result<PathBuf>;

    /// Writes back all dirty data.
    fn write_back(&self);
}

/// A guest.
#[derive(Default)]
pub struct GuestMachine {
    processors: Processors,
    disks: Disks,
}

impl Machine for GuestMachine {
    fn set_clock(&self, since_1970: Duration) -> io::Result<()> {
        Ok(clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(since_1970))?)
    }

    fn mount_share(&self, tag: &str, place: &Path) -> io::Result<()> {
        fs::create_dir_all(place)?;
        // Neither nodev nor nosuid: the rootfs inherits them, and an image has setuid programs and may have devices.
        mount(Some(tag), place, Some("virtiofs"), MsFlags::empty(), None::<&str>)?;
        read_ahead(place)
            .map_err(|error| io::Error::new(error.kind(), format!("cannot set read_ahead_kb: {error}")))
    }

    fn adjust_clock(&self, correction: Correction) -> io::Result<()> {
        clock::adjust(correction)
    }

    fn load_apparmor_policy(&self, policy: &[u8]) -> io::Result<()> {
        apparmor::load(policy)
    }

    fn set_processors(&self, count: u32) -> io::Result<u32> {
        self.processors.set_online(count)
    }

    fn find_disk(&self, serial: &str) -> io::Result<(u32, u32)> {
        self.disks.find(serial)
    }

    fn mount_disk(&self, wanted: &FileSystem) -> io::Result<()> {
        self.disks.mount(wanted)
    }

    fn unmount_disk(&self, serial: &str) -> io::Result<()> {
        self.disks.unmount(serial)
    }

    fn remove_disk(&self, serial: &str) -> io::Result<()> {
        self.disks.remove(serial)
    }

    fn name_to_bind(&self, path: &Path, socket: &SharedSocket) -> io::Result<PathBuf> {
        // The VMM answers for files that were looked up. The guest may have cached what was there a moment ago.
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
        statx(CWD, path, flags, StatxFlags::TYPE)?;
        Ok(Path::new(SHARE_DIR).join(socket.name()))
    }

    fn write_back(&self) {
        sync();
    }
}

/// Has files of a share read ahead further than Linux does by itself, 128 KiB: a program that is executed is read in
/// pieces of this size, and each takes as long as its way to the host and back.
fn read_ahead(share: &Path) -> io::Result<()> {
    const KIB: &str = "512";
    let device = fs::metadata(share)?.dev();
    fs::write(format!("/sys/class/bdi/{}:{}/read_ahead_kb", major(device), minor(device)), KIB)
}
