//! The tool root: a Debian 13 directory that holds QEMU, the kernel's source and what builds it, so that nothing
//! but mmdebstrap and root is asked of the machine itself.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::cache::{Cache, Key};
use crate::enclosed::Enclosure;
use crate::progress::{run_logged, step};

/// Debian's release of the tool root and of the inner host.
pub(crate) const SUITE: &str = "trixie";

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
        let key = Key::new().bytes(SUITE).bytes(PACKAGES.join(" "));
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

    /// A command that runs `program` in the root, with no environment but a PATH. Its mounts are its own, so nothing
    /// is left of them when it ends; it is killed when the process that spawned it dies.
    ///
    /// `work`, a directory of this machine, is its `/work` and its working directory.
    pub(crate) fn command(&self, work: &Path, program: impl AsRef<OsStr>) -> Command {
        Enclosure::in_root(&self.root, work).command(program)
    }
}

/// Installs Debian's minimal system and `packages` at `root`, from the default mirror of this machine's mmdebstrap.
pub(crate) fn debootstrap(cache: &Cache, name: &str, packages: &[&str], root: &Path) -> Result<()> {
    let flags = ["--variant=minbase", &format!("--include={}", packages.join(","))];
    mmdebstrap(cache, name, &flags, SUITE, root)
}

/// Unpacks a package of another release of Debian's, and those it needs, at `root`: a place to take files from.
pub(crate) fn unpack(cache: &Cache, suite: &str, package: &str, root: &Path) -> Result<()> {
    // The parts of a release that is still to come may be signed for a few days only and then not touched for weeks.
    let expired = "--aptopt=Acquire::Check-Valid-Until \"false\"";
    let flags = ["--variant=extract", &format!("--include={package}"), expired];
    mmdebstrap(cache, suite, &flags, suite, root)
}

fn mmdebstrap(cache: &Cache, name: &str, flags: &[&str], suite: &str, root: &Path) -> Result<()> {
    require_mmdebstrap(cache)?;
    let mut command = Enclosure::own_mounts().command("mmdebstrap");
    command.args(["--mode=root", "--format=directory"]).args(flags).arg(suite).arg(root);
    run_logged(&mut command, &cache.log(&format!("mmdebstrap-{name}")))
}

/// Installs mmdebstrap where apt-get can.
fn require_mmdebstrap(cache: &Cache) -> Result<()> {
    if runs("mmdebstrap") {
        return Ok(());
    }
    if !runs("apt-get") {
        bail!("mmdebstrap is missing, and there is no apt-get to install it with: install mmdebstrap");
    }
    step("installing mmdebstrap, which is missing, by apt-get", || {
        let log = cache.log("apt-get");
        run_logged(Command::new("apt-get").arg("update"), &log)?;
        let mut install = Command::new("apt-get");
        install.args(["install", "-y", "--no-install-recommends", "mmdebstrap"]);
        run_logged(install.env("DEBIAN_FRONTEND", "noninteractive"), &log)
    })
}

fn runs(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
