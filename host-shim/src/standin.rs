//! A process of the host that stands for one container of a pod.
//!
//! containerd's clients know a container by a pid of the host: they name its namespaces by it
//! (`/proc/PID/ns/pid` of the container that an ephemeral one joins), and operators kill it. The VMM's pid is the
//! pod's. So each further container gets a process that does nothing: it waits for the end of its stdin, which the
//! shim holds, and so never outlives the shim.

use std::{
    io::{self, Read},
    path::Path,
    process::Stdio,
};

use tokio::process::{Child, ChildStdin, Command};

/// The command line's word for it.
pub(crate) const COMMAND: &str = "stand-in";

/// The process. Ends with the value.
#[derive(Debug)]
pub(crate) struct StandIn {
    pid: u32,
    child: Child,
    _alive: Option<ChildStdin>,
}

impl StandIn {
    /// Starts one; `shim` is this program.
    pub(crate) fn spawn(shim: &Path) -> io::Result<Self> {
        let mut child = Command::new(shim)
            .arg(COMMAND)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let pid = child.id().ok_or_else(|| io::Error::other("it has no pid"))?;
        let alive = child.stdin.take();
        Ok(Self { pid, child, _alive: alive })
    }

    /// On the host.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until somebody has ended it.
    pub(crate) async fn ended(&mut self) {
        // An error: it cannot be waited for, so it has ended.
        _ = self.child.wait().await;
    }
}

/// The process itself.
pub(crate) fn run() -> io::Result<()> {
    io::stdin().read(&mut [0]).map(drop)
}
