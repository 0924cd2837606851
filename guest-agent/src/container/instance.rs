//! What the agent knows of a container.

use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex as StdMutex},
};

use tokio::sync::{Mutex, RwLock, watch};

use super::{exec_table::ExecTable, proc_mount::ProcMount, process::Process, update_record::Updates};
use crate::{
    cgroup::Cgroup, guest_reserve::huge_pages::HugePages, host_sockets::HostSockets,
    stage::launcher::Control, stage_config::CommonConfig,
};

/// A container whose init exists or has existed.
pub struct Container {
    pub(super) id: String,
    pub(super) cgroup: Arc<Cgroup>,
    /// Whether there are other containers in its pod, or can be.
    pub(super) may_have_neighbours: bool,
    pub(super) init: Arc<Process>,
    /// By which other processes enter the container.
    pub(super) init_pidfd: OwnedFd,
    /// The proc file system for containers that join its pid namespace.
    pub(super) proc: ProcMount,
    /// Until it is started.
    pub(super) control: Mutex<Option<Control>>,
    /// Held while a process joins.
    pub(super) is_paused: RwLock<bool>,
    /// Of its init, and of each process that joins it.
    pub(super) common: CommonConfig,
    /// Files below /proc/sys that were set when it was created.
    pub(super) sysctls: Vec<PathBuf>,
    /// Files below /proc/sys and their values, for when it is started.
    pub(super) interface_sysctls: Vec<(PathBuf, String)>,
    /// The permanent addresses of the network cards that were moved to its network namespace, for its sake.
    pub(super) cards: StdMutex<Vec<[u8; 6]>>,
    /// The sockets of the host that it mounts.
    pub(super) host_sockets: HostSockets,
    /// The huge pages that are set aside for it. Locked in other threads than the agent's own: the kernel may take
    /// long.
    pub(super) huge_pages: Arc<StdMutex<HugePages>>,
    /// Locked in such threads too.
    pub(super) updates: Arc<StdMutex<Updates>>,
    /// Its other processes that the agent has made.
    pub(super) execs: Arc<ExecTable>,
    /// Becomes true when the container is deleted: what its processes wrote is copied no further then.
    pub(super) deletion: watch::Sender<bool>,
}

impl Container {
    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The pid of its init in the agent's pid namespace.
    pub fn pid(&self) -> i32 {
        self.init.pid()
    }
}
