//! What containerd is told when something fails: one line, and the code that fits it.

use std::{error::Error, io};

use nix::errno::Errno;
use ttrpc::Code;

use crate::{
    agent::AgentError,
    cgroup::CgroupError,
    config::ConfigError,
    container::Refusal,
    hooks::HookError,
    journal::UndoError,
    lines::one_line,
    network::NetworkError,
    request::RequestError,
    rootfs::RootfsError,
    statedir::StateDirError,
    stdio::{EndpointError, StdioError},
    terminal::TerminalError,
    vm::VmError,
};

/// Why a request to a task failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TaskError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error(transparent)]
    Stdio(#[from] StdioError),
    #[error(transparent)]
    Hook(#[from] HookError),
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    #[error("the container is gone, but not all that it had on the host")]
    Undo(#[from] UndoError),
    #[error("{what} is not implemented")]
    Unimplemented { what: &'static str },
    #[error("exec {exec_id} does not exist")]
    NoExec { exec_id: String },
    #[error("exec {exec_id} already exists")]
    ExecExists { exec_id: String },
    #[error("exec {exec_id} was started or deleted already")]
    ExecStarted { exec_id: String },
    #[error("exec {exec_id} has not been started")]
    ExecNotStarted { exec_id: String },
    #[error("exec {exec_id} is still running")]
    ExecRuns { exec_id: String },
    /// As runc's shim words it, of any process.
    #[error("cannot resize a stopped container")]
    ResizeStopped,
    #[error("this shim serves sandbox {own}, to which the container does not belong")]
    Pod { own: String },
    #[error("the container {id} is no sandbox of a pod, so no other container can be added to it")]
    NoPod { id: String },
    #[error("the sandbox {sandbox_id} does not run")]
    NoSandbox { sandbox_id: String },
    #[error("cannot start the container's stand-in")]
    StandIn(#[source] io::Error),
    #[error("the shim is shutting down")]
    Stopping,
    #[error("the shim is broken: {0}")]
    Internal(String),
}

/// The answer to a failed request on the task `id`.
pub(crate) fn status(id: &str, error: &TaskError) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(code(error), format!("container {id}: {}", chain(error))))
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = describe(error);
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {}", describe(error));
        cause = error.source();
    }
    one_line(&text)
}

/// The system's own errors read as in all that containerd and runc say: "no such file or directory".
fn describe(error: &(dyn Error + 'static)) -> String {
    match error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
        Some(errno) => Errno::from_raw(errno).desc().to_lowercase(),
        None => error.to_string(),
    }
}

/// The one place that says which error is which code. Clients of containerd tell apart no more than these.
fn code(error: &TaskError) -> Code {
    match error {
        TaskError::Refused(Refusal::NotFound | Refusal::Ended) | TaskError::NoExec { .. } => Code::NOT_FOUND,
        TaskError::Refused(Refusal::Exists) | TaskError::ExecExists { .. } => Code::ALREADY_EXISTS,
        TaskError::Refused(Refusal::Precondition { .. })
        | TaskError::Config(_)
        | TaskError::NoSandbox { .. }
        | TaskError::ExecStarted { .. }
        | TaskError::ExecNotStarted { .. }
        | TaskError::ExecRuns { .. }
        | TaskError::ResizeStopped => Code::FAILED_PRECONDITION,
        TaskError::Request(RequestError::Unimplemented { .. })
        | TaskError::Request(RequestError::Endpoint(EndpointError::Scheme { .. }))
        | TaskError::Rootfs(RootfsError::Option { .. })
        | TaskError::Network(
            NetworkError::HostNamespace { .. }
            | NetworkError::Several { .. }
            | NetworkError::NoEthernet { .. }
            | NetworkError::Route { .. },
        )
        | TaskError::Unimplemented { .. } => Code::UNIMPLEMENTED,
        TaskError::Request(_)
        | TaskError::Pod { .. }
        | TaskError::NoPod { .. }
        | TaskError::Terminal(_)
        | TaskError::Rootfs(
            RootfsError::Missing { .. } | RootfsError::NotDirectory { .. } | RootfsError::BindSource { .. },
        )
        | TaskError::Cgroup(CgroupError::Outside { .. } | CgroupError::Units { .. })
        | TaskError::Network(NetworkError::Namespace { .. }) => Code::INVALID_ARGUMENT,
        TaskError::Agent(AgentError::Refused { code, .. }) => *code,
        TaskError::Stopping => Code::ABORTED,
        TaskError::StateDir(_)
        | TaskError::Rootfs(_)
        | TaskError::Cgroup(_)
        | TaskError::Vm(_)
        | TaskError::Network(_)
        | TaskError::Agent(_)
        | TaskError::Stdio(_)
        | TaskError::Hook(_)
        | TaskError::Undo(_)
        | TaskError::StandIn(_)
        | TaskError::Internal(_) => Code::UNKNOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_with_the_cause() {
        let error = TaskError::from(RootfsError::Missing {
            what: "root.path".into(),
            path: "/srv/root".into(),
            source: io::Error::from_raw_os_error(2),
        });
        let ttrpc::Error::RpcStatus(status) = status("demo", &error) else { panic!("no status") };
        assert_eq!(status.message, "container demo: rootfs: root.path: /srv/root: no such file or directory");
        assert_eq!(status.code(), Code::INVALID_ARGUMENT);
    }

    #[test]
    fn the_agents_code_is_kept() {
        let error = AgentError::Refused { code: Code::UNIMPLEMENTED, message: "linux.seccomp".into() };
        assert_eq!(code(&error.into()), Code::UNIMPLEMENTED);
    }
}
