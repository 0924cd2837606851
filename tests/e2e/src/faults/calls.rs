//! Faults in the system calls of a shim. strace(1) attaches to the shim before containerd hears of it. In one of its system
//! calls, the shim gets an error that the host's kernel could return, or a SIGKILL.

use std::fmt;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::command::{Cmd, wait_until};
use crate::ctr::{Host, IMAGE};
use crate::fixtures::{Replaced, scratch};
use crate::snapshot::Snapshot;

/// How long a command may take whatever has failed, on an ordinary machine. The shim's own limits are shorter.
const BOUND: Duration = Duration::from_secs(30);
/// How often a client tries to remove a container.
const REMOVALS: u32 = 5;
/// No step of the shim makes more calls of one kind.
const MOST_CALLS: u32 = 60;

/// A system call of the shim that goes wrong.
#[derive(Clone, Copy)]
pub(crate) struct Fault {
    /// The system call's name.
    pub(crate) call: &'static str,
    /// As strace's `inject` takes it: `error=ERRNO` or `signal=NAME`.
    pub(crate) effect: &'static str,
    /// Which call of a thread, from 1 on.
    pub(crate) number: u32,
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
    ("unshare", "error=ENOSPC"),
    ("clone3", "error=EAGAIN"),
    ("pidfd_open", "error=EMFILE"),
    ("pipe2", "error=EMFILE"),
    ("socket", "error=EMFILE"),
    ("connect", "error=ECONNREFUSED"),
    ("sendto", "signal=SIGKILL"),
    ("statx", "error=EIO"),
    ("getdents64", "error=EIO"),
    ("readlinkat", "error=EIO"),
    ("umount2", "error=EBUSY"),
    ("umount2", "signal=SIGKILL"),
    ("unlinkat", "error=EIO"),
    ("unlinkat", "signal=SIGKILL"),
    ("rmdir", "signal=SIGKILL"),
];

/// What a user has seen of a fault.
pub(crate) struct Seen {
    fault: Fault,
    /// The commands that failed, each with its message.
    messages: Vec<String>,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { call, effect, number } = self.fault;
        write!(f, "fault | {call} | {effect} | {number} | {}", self.messages.join("; "))
    }
}

/// Lets each call of each kind fail, one after the other, and prints a line for each fault: `cargo xtask faults` makes
/// docs/reliability.md of them. True if each container ended as expected and left nothing.
pub(crate) fn try_all(host: &Host) -> Result<bool> {
    let before = host_before(host)?;
    let shim = FaultyShim::install(host)?;
    let mut is_good = true;
    for (call, effect) in KINDS {
        for number in 1..=MOST_CALLS {
            match shim.run(Fault { call, effect, number }, &before) {
                Ok(Some(seen)) => println!("{seen}"),
                Ok(None) => break,
                Err(error) => {
                    is_good = false;
                    let error = format!("{error:#}").replace('\n', " ");
                    println!("failure | {call} | {effect} | {number} | {error}");
                    // What is left now would be held against the faults after it.
                    return Ok(is_good);
                }
            }
        }
    }
    Ok(is_good)
}

/// The host after a first container, whose template and directories stay.
pub(crate) fn host_before(host: &Host) -> Result<Snapshot> {
    host.run(&["true"])?.succeeds()?;
    Snapshot::settled(host)
}

/// The host's shim, replaced by a script that starts the shim and attaches strace to it. It comes back when this is dropped.
pub(crate) struct FaultyShim<'h> {
    host: &'h Host,
    directory: TempDir,
    _script: Replaced,
}

impl<'h> FaultyShim<'h> {
    /// Replaces the shim.
    pub(crate) fn install(host: &'h Host) -> Result<Self> {
        let directory = scratch()?;
        let place = PathBuf::from("/usr/local/bin").join(host.runtime().shim());
        let shim = directory.path().join(host.runtime().shim());
        fs::copy(&place, &shim).with_context(|| format!("cannot copy {}", place.display()))?;
        let script = Replaced::file(&place, &script(directory.path(), &shim))?;
        fs::set_permissions(&place, Permissions::from_mode(0o755))
            .context("cannot make the script executable")?;
        Ok(Self { host, directory, _script: script })
    }

    /// Runs a container, with a fault in its shim, to its end, and removes it. Expects that each command ends in time, that
    /// each that fails says why, and that the host is as `before` in the end. None if the shim makes no such call.
    pub(crate) fn run(&self, fault: Fault, before: &Snapshot) -> Result<Option<Seen>> {
        let Fault { call, effect, number } = fault;
        let options = format!("-e trace={call} -e inject={call}:{effect}:when={number}");
        fs::write(self.options(), options).context("cannot write strace's options")?;
        let mut messages = Vec::new();
        let id = self.host.new_id();
        let lived = self.live(&id, &mut messages).and_then(|()| self.remove(&id));
        fs::remove_file(self.options()).context("cannot remove strace's options")?;
        lived?;
        before.expect_same(self.host)?;
        let trace = fs::read_to_string(self.trace()).context("strace did not run")?;
        let struck = trace.contains("INJECTED") || trace.contains("killed by SIGKILL");
        Ok(struck.then_some(Seen { fault, messages }))
    }

    fn live(&self, id: &str, messages: &mut Vec<String>) -> Result<()> {
        let runtime = self.host.runtime().in_containerd();
        let run = ["run", "--detach", "--null-io", "--runtime", runtime, IMAGE, id, "sleep", "1000"];
        if !self.command(&run, messages)? {
            return Ok(());
        }
        self.command(&["tasks", "exec", "--exec-id", "exec", id, "true"], messages)?;
        if self.command(&["tasks", "kill", "--signal", "SIGKILL", id], messages)? {
            let limit = self.host.patience(BOUND);
            wait_until("the end of a killed task", limit, || {
                Ok(self.host.task_state(id)?.is_none_or(|state| state == "STOPPED"))
            })?;
        }
        self.command(&["tasks", "delete", id], messages)?;
        Ok(())
    }

    /// Whether the command succeeds. One that fails must say why.
    fn command(&self, words: &[&str], messages: &mut Vec<String>) -> Result<bool> {
        let finished = self.host.ctr(words.iter().copied()).limit(self.host.patience(BOUND)).run()?;
        let said = String::from_utf8_lossy(&finished.stderr).trim().to_owned();
        // The exit status of a task that was killed is ctr's own, and a warning.
        if finished.status == Some(0) || said.contains("non-zero exit code 137") {
            return Ok(true);
        }
        ensure!(!said.is_empty(), "expected  a message\ncame      none of: {}", finished.command);
        messages.push(format!(
            "{}: {}",
            words.first().copied().unwrap_or_default(),
            said.replace(id_of(words), "ID")
        ));
        Ok(false)
    }

    /// Removes what is left of a container, as often as a patient client would. The fault is over by then.
    fn remove(&self, id: &str) -> Result<()> {
        // strace counts the calls of each thread. It would have a call of each new thread fail. Fails if strace has ended.
        Cmd::new("pkill").args(["--signal", "INT", "--pidfile"]).args([self.pid()]).run()?;
        let mut said = String::new();
        for _ in 0..REMOVALS {
            let limit = self.host.patience(BOUND);
            // Fails if containerd has forgotten the task.
            self.host.ctr(["tasks", "delete", "--force", id]).limit(limit).run()?;
            let removed = self.host.ctr(["containers", "rm", id]).limit(limit).run()?;
            let left = self.host.ctr(["containers", "ls", "-q"]).run()?;
            if !left.succeeds()?.text().lines().any(|name| name == id) {
                return Ok(());
            }
            said = String::from_utf8_lossy(&removed.stderr).into_owned();
        }
        anyhow::bail!("expected  the container removed after {REMOVALS} attempts\ncame      {said}")
    }

    fn options(&self) -> PathBuf {
        self.directory.path().join("options")
    }

    fn pid(&self) -> PathBuf {
        self.directory.path().join("pid")
    }

    fn trace(&self) -> PathBuf {
        self.directory.path().join("trace")
    }
}

/// The container's id among ctr's arguments: the word with the prefix of [`Host::new_id`].
fn id_of<'a>(words: &[&'a str]) -> &'a str {
    words.iter().copied().find(|word| word.starts_with("e2e-")).unwrap_or("ID")
}

/// A script that does what `shim` does. If there is a file `options`, `shim start` answers when strace is attached to the
/// server. strace leaves programs alone that the server executes.
fn script(directory: &Path, shim: &Path) -> String {
    let (directory, shim) = (directory.display(), shim.display());
    format!(
        "#!/bin/sh\n\
         case \" $* \" in *' start '*) ;; *) exec {shim} \"$@\" ;; esac\n\
         [ -e {directory}/options ] || exec {shim} \"$@\"\n\
         answer=$({shim} \"$@\") || exit\n\
         pid=$(pgrep -n -f '^{shim} ') || exit\n\
         setsid strace -f -b execve -p $pid -o {directory}/trace $(cat {directory}/options) </dev/null >/dev/null 2>&1 &\n\
         echo $! >{directory}/pid\n\
         until grep -q 'TracerPid:.[1-9]' /proc/$pid/status; do sleep 0.02; done\n\
         printf %s \"$answer\"\n"
    )
}
