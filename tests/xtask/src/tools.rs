//! The tool root: a directory with a Debian 13 system, which has QEMU, the kernel's source and what builds it. So the
//! machine itself needs only mmdebstrap and root.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::chroot::MountNamespace;
use crate::debian::{self, SUITE, debootstrap};
use crate::progress::step;

const PACKAGES: &[&str] = &[
    "qemu-system-x86",
    "qemu-utils",
    "e2fsprogs",
    "busybox-static",
    "linux-source-6.12",
    "gcc",
    "libc6-dev",
    "make",
    "bc",
    "flex",
    "bison",
    "libelf-dev",
    "libssl-dev",
    "openssl",
    "xz-utils",
    "cpio",
    "kmod",
];

/// A complete tool root.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    root: PathBuf,
}

impl Tools {
    /// Makes the tool root if it is not in the cache: about half a minute.
    pub(crate) fn ensure(cache: &Cache) -> Result<Tools> {
        if !nix::unistd::geteuid().is_root() {
            bail!("run this as root: it makes a Debian root, mounts in it and changes to it");
        }
        let key = debian::request(cache, SUITE, PACKAGES)?;
        let root = cache.entry("tools", &key, |root| {
            step("making the tool root: QEMU, kernel source, compiler", || {
                debootstrap(cache, "tools", PACKAGES, root)?;
                fs::create_dir_all(root.join("work")).context("cannot make /work of the tool root")
            })
        })?;
        Ok(Tools { root })
    }

    /// The root directory.
    pub(crate) fn path(&self) -> &Path {
        &self.root
    }

    /// Lists the installed packages.
    pub(crate) fn packages(&self) -> Result<String> {
        debian::installed(&self.root)
    }

    /// A command that runs `program` in the root, with no environment but a PATH. Its mounts are its own, so nothing
    /// is left of them when it ends; it is killed when the process that spawned it dies.
    ///
    /// `work`, a directory of this machine, is its `/work` and its working directory.
    pub(crate) fn command(&self, work: &Path, program: impl AsRef<OsStr>) -> Command {
        MountNamespace::with_root(&self.root, work).command(program)
    }
}
