//! A container that exists, and the states of its life with what is known in each.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use containerd_shim_protos::api;
use tokio::sync::Notify;

use crate::{
    guest::agent::Agent,
    host::hooks::Hooks,
    io::streams::StdinGate,
    pod::role::Role,
    process::{
        exec::Execs,
        oom::OomReports,
        state::{Action, Refusal, Status, next},
    },
    types::exit::Exit,
    vm::vmm::Vm,
};

/// A container that exists in the guest. Immutable, so that requests use it without waiting for one another.
#[derive(Debug)]
pub(crate) struct Container {
    pub(crate) id: String,
    /// As containerd wrote it in the create request.
    pub(crate) request: api::CreateTaskRequest,
    pub(crate) role: Role,
    /// Whether containerd knows it as a task; not the pause of a pod that it has from the Sandbox service.
    pub(crate) is_task: bool,
    pub(crate) created_at: SystemTime,
    /// The process of the host that it goes by: the VMM, or its stand-in.
    pub(crate) pid: u32,
    pub(crate) vm: Vm,
    pub(crate) agent: Agent,
    pub(crate) stdin: StdinGate,
    pub(crate) hooks: Hooks,
    /// The processes added to it.
    pub(crate) execs: Arc<Execs>,
    pub(crate) oom: Arc<OomReports>,
    pub(crate) killed: Killed,
}

/// How long after SIGKILL a container must have ended. Its kernel ends it at once, and its agent tells of that within a
/// few seconds on the slowest host; clients wait for 2 minutes (containerd's CRI), or for ever.
const KILLED_WITHIN: Duration = Duration::from_secs(20);

/// Whether the guest has taken SIGKILL for a container.
#[derive(Debug, Default)]
pub(crate) struct Killed(Notify);

impl Killed {
    /// It has.
    pub(crate) fn is_told(&self) {
        self.0.notify_one();
    }

    /// It has, so long ago that the container must have ended. For whoever waits for its end, and no one else.
    pub(crate) async fn is_overdue(&self) {
        self.0.notified().await;
        tokio::time::sleep(KILLED_WITHIN).await;
    }
}

/// The states, each with what is valid in it.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// Nothing was created yet, or its creation failed and was undone.
    Absent,
    Creating,
    Created(Arc<Container>),
    Running(Arc<Container>),
    Paused(Arc<Container>),
    Stopped(Arc<Container>, Exit),
    /// Nothing is left but the answer to those who still wait.
    Deleted(Exit),
}

impl Phase {
    /// The state without its data.
    pub(crate) fn status(&self) -> Status {
        match self {
            Phase::Absent => Status::Absent,
            Phase::Creating => Status::Creating,
            Phase::Created(_) => Status::Created,
            Phase::Running(_) => Status::Running,
            Phase::Paused(_) => Status::Paused,
            Phase::Stopped(..) => Status::Stopped,
            Phase::Deleted(_) => Status::Deleted,
        }
    }

    /// The container, if `action` is possible on it now.
    pub(crate) fn container_for(&self, action: Action) -> Result<Arc<Container>, Refusal> {
        next(self.status(), action)?;
        match self {
            Phase::Created(container)
            | Phase::Running(container)
            | Phase::Paused(container)
            | Phase::Stopped(container, _) => Ok(Arc::clone(container)),
            Phase::Absent | Phase::Creating | Phase::Deleted(_) => Err(Refusal::NotFound),
        }
    }

    /// How the process ended, once it has.
    pub(crate) fn exit(&self) -> Option<Exit> {
        match self {
            Phase::Stopped(_, exit) | Phase::Deleted(exit) => Some(*exit),
            Phase::Absent | Phase::Creating | Phase::Created(_) | Phase::Running(_) | Phase::Paused(_) => {
                None
            }
        }
    }
}
