//! The inner host's disk, kernel and initramfs: stock Debian with containerd.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::in_work;
use crate::cache::{Cache, Key};
use crate::progress::{run_logged, step};
use crate::tools::{SUITE, Tools, debootstrap};

/// containerd, runc and CNI are what is served and compared with, docker is another of its clients; QEMU is there for
/// the benchmark.
const PACKAGES: &[&str] = &[
    "systemd",
    "systemd-sysv",
    "udev",
    "linux-image-amd64",
    "initramfs-tools",
    "zstd",
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
    // The tests start a dockerd of their own.
    "docker.service",
    "docker.socket",
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

/// The inner host as it is before its first boot.
#[derive(Debug)]
pub(crate) struct Image {
    /// Raw ext4 image.
    pub(crate) disk: PathBuf,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    /// The digest of what it is made from.
    pub(crate) key: Key,
}

impl Image {
    /// Makes the image if it is not in the cache: about a minute.
    pub(crate) fn ensure(cache: &Cache, tools: &Tools) -> Result<Image> {
        let key = Key::new()
            .bytes(SUITE)
            .bytes(PACKAGES.join(" "))
            .bytes(MASKED_UNITS.join(" "))
            .bytes(RUNNER_UNIT)
            .bytes(MODULES)
            .bytes(DISK_SIZE);
        let dir = cache.entry("inner-disk", &key, |dir| {
            step("making the inner host's disk: Debian with containerd", || make(cache, tools, dir))
        })?;
        Ok(Image {
            disk: dir.join("disk.img"),
            kernel: dir.join("vmlinuz"),
            initramfs: dir.join("initrd.img"),
            key,
        })
    }
}

fn make(cache: &Cache, tools: &Tools, dir: &Path) -> Result<()> {
    let root = dir.join("root");
    fs::create_dir(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    debootstrap(cache, "inner", PACKAGES, &root)?;
    configure(&root).context("cannot configure the inner host")?;
    // Debian keeps symlinks to the newest kernel in the root.
    for name in ["vmlinuz", "initrd.img"] {
        fs::copy(root.join(name), dir.join(name)).with_context(|| format!("the inner host has no {name}"))?;
    }
    let mut mke2fs = tools.command(cache.dir(), "mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=0"]);
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
