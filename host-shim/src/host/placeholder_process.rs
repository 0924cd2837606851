//! A placeholder process: a process of the host that stands for one container of a pod.
//!
//! containerd's clients know a container by a pid of the host: they name its namespaces by it
//! (`/proc/PID/ns/pid` of the container that an ephemeral one joins), and operators kill it. The VMM's pid is the
//! pod's. So each further container gets a process that does nothing: it waits for the end of its stdin, which the
//! shim holds, and so never outlives the shim.
//!
//! Hooks and tools enter a container's namespaces by its pid, and change them. So the process is in the VMM's
//! network, ipc and mount namespaces, as the VMM itself is, and has uts and cgroup namespaces of its own. It shares
//! only the host's pid, user and time namespaces.

use std::{
    fs::File,
    io::{self, BufRead, Write},
    path::Path,
    process::Stdio,
    time::Duration,
};

use nix::{
    sched::{CloneFlags, setns, unshare},
    sys::signal::{SigSet, Signal},
};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, ChildStdin, Command},
    time::timeout,
};

use crate::host::blocking;

/// The command that runs it.
pub(crate) const COMMAND: &str = "placeholder-process";

/// An earlier version calls the command this, and executes the installed program by its path. Its pods may still run
/// after an upgrade.
pub(crate) const EARLIER_COMMAND: &str = "stand-in";

/// The name of this program for who lists the processes, whatever path it is executed by.
pub(crate) const PROGRAM: &str = "containerd-shim-bulkhead-v2";

/// How long it may take to be where it belongs.
const READY: Duration = Duration::from_secs(10);

/// The process. Ends with the value.
#[derive(Debug)]
pub(crate) struct PlaceholderProcess {
    pid: u32,
    child: Child,
    _alive: ChildStdin,
}

impl PlaceholderProcess {
    /// Starts one in the namespaces of the process `vmm`, and returns when it is there; `shim` is this program.
    pub(crate) async fn spawn(shim: &Path, vmm: u32) -> io::Result<Self> {
        let mut command = Command::new(shim);
        command
            .arg0(PROGRAM)
            .arg(COMMAND)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let mut child = blocking::spawn(command).await?;
        let pid = child.id().ok_or_else(|| io::Error::other("it has no pid"))?;
        let (Some(mut alive), Some(mut ready)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("it has no streams"));
        };
        let entered = async {
            alive.write_all(format!("{vmm}\n").as_bytes()).await?;
            ready.read_exact(&mut [0]).await
        };
        match timeout(READY, entered).await {
            Ok(Ok(_)) => Ok(Self { pid, child, _alive: alive }),
            Ok(Err(e)) => Err(io::Error::other(format!("it cannot enter the VM's namespaces: {e}"))),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// The pid on the host.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until somebody has ended it.
    pub(crate) async fn ended(&mut self) {
        // An error: it cannot be waited for, so it has ended.
        _ = self.child.wait().await;
    }
}

/// The process itself. Its first line of input is the pid of the VMM, whose namespaces it enters; then it says so.
///
/// It never takes SIGTERM, which a host that shuts down sends to every process: the container's init would be killed
/// with it, and may end by itself. An init without a handler does not take it either.
pub(crate) fn run() -> io::Result<()> {
    SigSet::from(Signal::SIGTERM).thread_block()?;
    let mut input = io::stdin().lock();
    let mut vmm = String::new();
    input.read_line(&mut vmm)?;
    let vmm: u32 = vmm.trim().parse().map_err(io::Error::other)?;
    // All are opened first: behind the last one there is no /proc of the host.
    let open = |(name, kind)| Ok((File::open(format!("/proc/{vmm}/ns/{name}"))?, kind));
    let kinds = [
        ("net", CloneFlags::CLONE_NEWNET),
        ("ipc", CloneFlags::CLONE_NEWIPC),
        ("mnt", CloneFlags::CLONE_NEWNS),
    ];
    let namespaces = kinds.into_iter().map(open).collect::<io::Result<Vec<_>>>()?;
    for (namespace, kind) in namespaces {
        setns(namespace, kind)?;
    }
    unshare(CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWCGROUP)?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    io::stdout().write_all(b"\n")?;
    input.read_line(&mut String::new()).map(drop)
}
