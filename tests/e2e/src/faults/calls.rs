//! Faults in the system calls of a shim. strace(1) attaches to the shim before containerd hears of it. In one of its
//! system calls, the shim gets an error that the host's kernel could return, or a SIGKILL.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::lifecycle::{FaultInjector, Step};
use super::{Fault, TestBed};
use crate::command::Cmd;
use crate::ctr::Host;
use crate::fixtures::{Replaced, scratch};

/// Names of files about the shim of a container, before its id.
const OPTIONS: &str = "options";
const PID: &str = "pid";
const TRACE: &str = "trace";

/// No step of the shim makes more calls of one kind.
const MOST_CALLS: u32 = 60;

/// A system call of the shim that goes wrong.
#[derive(Clone, Copy)]
pub(crate) struct CallFault {
    /// The system call's name.
    pub(crate) call: &'static str,
    /// As strace's `inject` takes it: `error=ERRNO` or `signal=NAME`.
    pub(crate) effect: &'static str,
    /// Which call of a thread, from 1 on.
    pub(crate) number: u32,
}

impl CallFault {
    /// Says in words which call fails, and how.
    pub(crate) fn fault(self) -> Fault {
        let effect = self.effect.split('=').next_back().unwrap_or_default();
        Fault::new(self.call, effect, format_args!("call {}", self.number))
    }
}

/// What can go wrong, in the order in which a container's life meets it.
pub(crate) const KINDS: &[(&str, &str)] = &[
    ("mkdir", "error=ENOSPC"),
    ("mkdir", "signal=SIGKILL"),
    ("mkdirat", "error=ENOSPC"),
    ("mkdirat", "signal=SIGKILL"),
    ("openat", "error=EMFILE"),
    ("openat2", "error=EMFILE"),
    ("openat2", "signal=SIGKILL"),
    ("mount", "error=ENOMEM"),
    ("mount", "signal=SIGKILL"),
    ("mount_setattr", "error=ENOMEM"),
    ("move_mount", "error=ENOMEM"),
    ("setxattr", "error=ENOSPC"),
    ("flock", "error=ENOLCK"),
    ("write", "signal=SIGKILL"),
    ("unshare", "error=ENOSPC"),
    ("clone3", "error=EAGAIN"),
    ("pidfd_open", "error=EMFILE"),
    ("pipe2", "error=EMFILE"),
    ("socket", "error=EMFILE"),
    ("socketpair", "error=EMFILE"),
    ("accept4", "error=EMFILE"),
    ("connect", "error=ECONNREFUSED"),
    ("sendto", "signal=SIGKILL"),
    ("statx", "error=EIO"),
    ("getdents64", "error=EIO"),
    ("readlinkat", "error=EIO"),
    ("renameat2", "error=EIO"),
    ("umount2", "error=EBUSY"),
    ("umount2", "signal=SIGKILL"),
    ("unlinkat", "error=EIO"),
    ("unlinkat", "signal=SIGKILL"),
    ("rmdir", "signal=SIGKILL"),
];

/// Lets each call of each kind fail, one after the other. With `names`, only these system calls.
pub(super) fn try_all(bed: &mut TestBed<'_>, names: &[String]) -> Result<()> {
    let shim = FaultyShim::install(bed.host())?;
    let is_wanted = |call: &str| names.is_empty() || names.iter().any(|name| name == call);
    for (call, effect) in KINDS.iter().filter(|(call, _)| is_wanted(call)) {
        for number in 1..=MOST_CALLS {
            let fault = CallFault { call, effect, number };
            if !bed.try_fault(&fault.fault(), &mut shim.injector(fault))? {
                break;
            }
        }
    }
    Ok(())
}

/// The host's shim, replaced by a script that starts the shim and attaches strace to it. It comes back when this is
/// dropped.
pub(crate) struct FaultyShim {
    directory: TempDir,
    _script: Replaced,
}

impl FaultyShim {
    /// Replaces the shim.
    pub(crate) fn install(host: &Host) -> Result<Self> {
        let directory = scratch()?;
        let place = PathBuf::from("/usr/local/bin").join(host.runtime().shim());
        let shim = directory.path().join(host.runtime().shim());
        fs::copy(&place, &shim).with_context(|| format!("cannot copy {}", place.display()))?;
        let script = Replaced::file(&place, &script(directory.path(), &shim, host.runtime().shim()))?;
        fs::set_permissions(&place, Permissions::from_mode(0o755))
            .context("cannot make the script executable")?;
        Ok(Self { directory, _script: script })
    }

    /// What strikes the shim of a container.
    pub(crate) fn injector(&self, fault: CallFault) -> CallInjector<'_> {
        CallInjector { directory: self.directory.path(), fault, id: String::new() }
    }
}

/// A fault in the shim of a container.
pub(crate) struct CallInjector<'s> {
    directory: &'s Path,
    fault: CallFault,
    /// The container.
    id: String,
}

impl CallInjector<'_> {
    /// A file about the shim of this container.
    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}-{}", self.id))
    }
}

impl FaultInjector for CallInjector<'_> {
    fn before(&mut self, id: &str, step: Step) -> Result<()> {
        if step != Step::Create {
            return Ok(());
        }
        self.id = id.to_owned();
        let CallFault { call, effect, number } = self.fault;
        let options = format!("-e trace={call} -e inject={call}:{effect}:when={number}");
        fs::write(self.file(OPTIONS), options).context("cannot write strace's options")
    }

    fn end(&mut self) -> Result<()> {
        // strace counts the calls of each thread. It would have a call of each new thread fail. Fails if strace has
        // ended.
        Cmd::new("pkill").args(["--signal", "INT", "--pidfile"]).args([self.file(PID)]).run()?;
        Ok(())
    }

    fn was_injected(&self) -> Result<bool> {
        let trace = fs::read_to_string(self.file(TRACE)).context("strace did not run")?;
        Ok(trace.contains("INJECTED") || trace.contains("killed by SIGKILL"))
    }
}

impl Drop for CallInjector<'_> {
    fn drop(&mut self) {
        for name in [OPTIONS, PID, TRACE] {
            // Not all of them were made.
            let _ = fs::remove_file(self.file(name));
        }
    }
}

/// A script that does what `shim` does. If there is a file of options for the container, `shim start` answers when
/// strace is attached to the server, whose command line begins with `name`. strace leaves programs alone that the
/// server executes.
fn script(directory: &Path, shim: &Path, name: &str) -> String {
    let (directory, shim) = (directory.display(), shim.display());
    format!(
        "#!/bin/sh\n\
         case \" $* \" in *' start '*) ;; *) exec {shim} \"$@\" ;; esac\n\
         id=$(echo \" $* \" | sed 's/.* -id \\([^ ]*\\) .*/\\1/')\n\
         [ -e {directory}/{OPTIONS}-$id ] || exec {shim} \"$@\"\n\
         answer=$({shim} \"$@\") || exit\n\
         pid=$(pgrep -n -f \"^{name} .*-id $id( |\\$)\") || {{ echo no server of $id is found >&2; exit 1; }}\n\
         setsid strace -f -b execve -p $pid -o {directory}/{TRACE}-$id $(cat {directory}/{OPTIONS}-$id) \
         </dev/null >/dev/null 2>&1 &\n\
         echo $! >{directory}/{PID}-$id\n\
         until grep -q 'TracerPid:.[1-9]' /proc/$pid/status; do sleep 0.02; done\n\
         printf %s \"$answer\"\n"
    )
}
