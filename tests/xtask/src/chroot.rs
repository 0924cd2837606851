//! Runs a command in a new mount namespace, in another root if one is given.
//!
//! A closure between fork and exec would need unsafe code in a process with several threads. So this program starts
//! itself again as `xtask chroot`, which does the steps before exec in safe code and with one thread.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;

/// This program's own executable: right even after a rebuild has replaced the file.
const SELF: &str = "/proc/self/exe";

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The mount namespace of a command. Also the arguments of `xtask chroot`.
#[derive(Debug, Clone, Args)]
pub(crate) struct MountNamespace {
    /// Root directory. Its /dev is this machine's, and its /proc and, if possible, its /sys are new.
    #[arg(long, requires = "work")]
    root: Option<PathBuf>,
    /// Directory that is bound to /work of the root.
    #[arg(long)]
    work: Option<PathBuf>,
}

impl MountNamespace {
    /// A copy of this machine's mounts, whose changes are not seen outside.
    pub(crate) fn copy() -> MountNamespace {
        MountNamespace { root: None, work: None }
    }

    /// The same copy, in which a command sees `root` as its root and `work` as its /work.
    pub(crate) fn with_root(root: &Path, work: &Path) -> MountNamespace {
        MountNamespace { root: Some(root.into()), work: Some(work.into()) }
    }

    /// A command that runs `program` in the namespace. In another root it has a PATH and no other variable.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(SELF);
        command.arg("chroot");
        if let (Some(root), Some(work)) = (&self.root, &self.work) {
            command.arg("--root").arg(root).arg("--work").arg(work);
            command.env_clear().env("PATH", PATH);
        }
        command.arg("--").arg(program);
        command
    }

    /// Makes the namespace, and executes `argv` in it in place of this program. Returns only if that fails.
    pub(crate) fn become_command(&self, argv: &[OsString]) -> Result<()> {
        let (program, args) = argv.split_first().context("no command is given")?;
        set_pdeathsig(Signal::SIGKILL).context("cannot ask to die with the parent")?;
        unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace (root is needed)")?;
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .context("cannot make the mounts private")?;
        if let (Some(root), Some(work)) = (&self.root, &self.work) {
            enter(root, work).with_context(|| format!("cannot enter the root {}", root.display()))?;
        }
        let error = Command::new(program).args(args).exec();
        Err(error).with_context(|| format!("cannot run {}", program.display()))
    }
}

fn enter(root: &Path, work: &Path) -> Result<()> {
    let bind = |from: &Path, to: &str| {
        mount(Some(from), &root.join(to), None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
            .with_context(|| format!("cannot bind {} to /{to} of it", from.display()))
    };
    bind(Path::new("/dev"), "dev")?;
    bind(work, "work")?;
    mount(Some("proc"), &root.join("proc"), Some("proc"), MsFlags::empty(), None::<&str>)
        .context("cannot mount its /proc")?;
    // glibc reads there whether it can ask for huge pages. Where it cannot be mounted, QEMU takes more time.
    _ = mount(Some("sysfs"), &root.join("sys"), Some("sysfs"), MsFlags::MS_RDONLY, None::<&str>);
    nix::unistd::chroot(root).context("cannot change to it")?;
    std::env::set_current_dir("/work").context("cannot change to its /work")
}
