//! The inner host's disk, kernel and initramfs: stock Debian with containerd.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::in_work;
use crate::cache::{Cache, Key};
use crate::debian::{self, SUITE, debootstrap};
use crate::progress::{run_logged, step};
use crate::tools::Tools;

/// containerd, runc and CNI are what is served and compared with, docker is another of its clients; QEMU is there for
/// the benchmark.
const PACKAGES: &[&str] = &[
    "systemd",
    "systemd-sysv",
    "udev",
    "linux-image-amd64",
    "initramfs-tools",
    "zstd",
    // Without its parser, neither containerd nor docker has a default profile.
    "apparmor",
    "containerd",
    "runc",
    "containernetworking-plugins",
    "docker.io",
    "docker-cli",
    "iptables",
    "iproute2",
    "iputils-ping",
    "procps",
    "kmod",
    "strace",
    "qemu-system-x86",
    // The network of `bulkhead run`.
    "passt",
    // What the cases of tests/e2e/src/cases/programs.rs run in containers, whose root is a copy of the host's.
    "apache2-utils",
    "gcc",
    "git",
    "libc6-dev",
    "libpython3.13-testsuite",
    "make",
    "nginx",
    "nodejs",
    "openssh-client",
    "openssh-server",
    "postgresql",
    "python3",
    "redis-server",
    "stress-ng",
];

/// Units that would only make noise in a measurement.
const MASKED_UNITS: &[&str] = &[
    "getty@.service",
    "getty-static.service",
    "serial-getty@.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "systemd-tmpfiles-clean.timer",
    // It would load a hundred profiles of programs that nobody runs.
    "apparmor.service",
    // The tests start a dockerd of their own.
    "docker.service",
    "docker.socket",
    // These run in containers only.
    "nginx.service",
    "postgresql.service",
    "redis-server.service",
    "ssh.service",
    "ssh.socket",
];

/// Starts the runner, which comes on the payload disk of the boot, so that the image need not be made anew for it.
const RUNNER_UNIT: &str = "\
[Unit]
Description=Runner of the rig
After=containerd.service systemd-modules-load.service

[Service]
ExecStart=/bin/sh -c 'tar -x -f /dev/disk/by-id/virtio-payload -C / && exec /usr/local/lib/rig-runner'
StandardError=journal+console
Restart=on-failure
RestartSec=200ms

[Install]
WantedBy=multi-user.target
";

/// Modules of a container host that nothing else loads before a saved state is made.
const MODULES: &str = "overlay\nvhost_vsock\ntun\nveth\nbridge\n";

const DISK_SIZE: &str = "8G";

/// Left out of the file system: what a disk does not need that lives as long as a test run, and costs an emulated
/// processor time.
const FEATURES: &str = "^has_journal,^metadata_csum";

/// The file beside the disk that lists the packages which are installed on it.
const INSTALLED: &str = "packages";

/// The inner host as it is before its first boot.
#[derive(Debug)]
pub(crate) struct Image {
    /// Raw ext4 image.
    pub(crate) disk: PathBuf,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    /// The installed packages, as `debian::installed` lists them.
    pub(crate) packages: String,
    /// The digest of what runs in it: the packages and their configuration.
    pub(crate) key: Key,
    /// The file system's own: another disk of the same packages has its blocks elsewhere.
    pub(super) uuid: [u8; 16],
}

impl Image {
    /// Makes the image if it is not in the cache: up to five minutes on a busy machine.
    pub(crate) fn ensure(cache: &Cache, tools: &Tools) -> Result<Image> {
        let configuration = Key::new()
            .bytes(MASKED_UNITS.join(" "))
            .bytes(RUNNER_UNIT)
            .bytes(MODULES)
            .bytes(DISK_SIZE)
            .bytes(FEATURES);
        let key = debian::request(cache, SUITE, PACKAGES)?.key(&configuration).bytes(INSTALLED);
        let dir = cache.entry("inner-disk", &key, |dir| {
            step("making the inner host's disk: Debian with containerd", || make(cache, tools, dir))
        })?;
        let packages =
            fs::read_to_string(dir.join(INSTALLED)).context("the inner host's disk has no list")?;
        let disk = dir.join("disk.img");
        Ok(Image {
            uuid: uuid(&disk).with_context(|| format!("cannot read {}", disk.display()))?,
            disk,
            kernel: dir.join("vmlinuz"),
            initramfs: dir.join("initrd.img"),
            key: configuration.bytes(&packages),
            packages,
        })
    }
}

/// Reads the UUID of an ext4 file system, where the kernel's Documentation/filesystems/ext4/super.rst says it is.
fn uuid(disk: &Path) -> Result<[u8; 16]> {
    const SUPERBLOCK: u64 = 1024;
    let disk = File::open(disk)?;
    let mut magic = [0; 2];
    disk.read_exact_at(&mut magic, SUPERBLOCK + 0x38)?;
    ensure!(u16::from_le_bytes(magic) == 0xef53, "there is no ext4 file system");
    let mut uuid = [0; 16];
    disk.read_exact_at(&mut uuid, SUPERBLOCK + 0x68)?;
    Ok(uuid)
}

fn make(cache: &Cache, tools: &Tools, dir: &Path) -> Result<()> {
    let root = dir.join("root");
    fs::create_dir(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    debootstrap(cache, "inner", PACKAGES, &root)?;
    fs::write(dir.join(INSTALLED), debian::installed(&root)?).context("cannot list the packages")?;
    configure(&root).context("cannot configure the inner host")?;
    // Debian keeps symlinks to the newest kernel in the root.
    for name in ["vmlinuz", "initrd.img"] {
        fs::copy(root.join(name), dir.join(name)).with_context(|| format!("the inner host has no {name}"))?;
    }
    let mut mke2fs = tools.command(cache.dir(), "mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-O", FEATURES, "-E", "lazy_itable_init=0"]);
    mke2fs.arg("-d").arg(in_work(cache, &root)).arg(in_work(cache, &dir.join("disk.img"))).arg(DISK_SIZE);
    run_logged(&mut mke2fs, &cache.log("mke2fs"))?;
    fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
}

fn configure(root: &Path) -> Result<()> {
    let units = root.join("etc/systemd/system");
    fs::write(root.join("etc/hostname"), "inner-host\n")?;
    fs::write(root.join("etc/modules-load.d/rig.conf"), MODULES)?;
    fs::write(units.join("rig-runner.service"), RUNNER_UNIT)?;
    fs::create_dir_all(units.join("multi-user.target.wants"))?;
    symlink("../rig-runner.service", units.join("multi-user.target.wants/rig-runner.service"))?;
    for unit in MASKED_UNITS {
        symlink("/dev/null", units.join(unit)).with_context(|| format!("cannot mask {unit}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_told_by_its_uuid() {
        let mut disk = vec![0; 4096];
        disk[1080..1082].copy_from_slice(&[0x53, 0xef]);
        disk[1128..1144].copy_from_slice(b"0123456789abcdef");
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &disk).unwrap();
        assert_eq!(uuid(file.path()).unwrap(), *b"0123456789abcdef");
        disk[1080] = 0;
        fs::write(file.path(), &disk).unwrap();
        uuid(file.path()).unwrap_err();
        fs::write(file.path(), &disk[..1100]).unwrap();
        uuid(file.path()).unwrap_err();
    }
}
