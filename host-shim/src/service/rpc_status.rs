//! The answer to a request that failed: one line, and the code that fits it.

use std::io;

use ttrpc::Code;

use crate::{
    guest::agent::AgentError,
    host::{
        block_device::BlockDeviceError, blocking::BlockingError, cgroup::CgroupError, network::NetworkError,
        rootfs::RootfsError,
    },
    process::{
        error::{DiskError, TaskError},
        state::Refusal,
    },
    types::{
        config::ConfigError, error::chain, options::OptionsError, request_error::RequestError,
        stdio_endpoint::EndpointError,
    },
    vm::{control_socket::AttachError, vmm::VmError},
};

/// The answer to a failed request on the task `id`.
pub(crate) fn of(id: &str, error: &TaskError) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(code(error), format!("container {id}: {}", chain(error))))
}

/// The one place that says which error is which code. Clients of containerd tell apart no more than these.
fn code(error: &TaskError) -> Code {
    match error {
        TaskError::Refused(refusal) | TaskError::Exec { source: refusal, .. } => match refusal {
            Refusal::NotFound | Refusal::Ended => Code::NOT_FOUND,
            Refusal::Exists => Code::ALREADY_EXISTS,
            Refusal::Creating | Refusal::Precondition { .. } => Code::FAILED_PRECONDITION,
        },
        TaskError::NoExec { .. } => Code::NOT_FOUND,
        TaskError::ExecExists { .. } => Code::ALREADY_EXISTS,
        TaskError::Config(ConfigError::Read { .. } | ConfigError::Part { .. }) => Code::UNKNOWN,
        TaskError::Config(_)
        | TaskError::PodNotRunning { .. }
        | TaskError::ResizeStopped
        | TaskError::Unfinished => Code::FAILED_PRECONDITION,
        TaskError::Request(RequestError::Unimplemented { .. })
        | TaskError::Request(RequestError::Endpoint(EndpointError::Scheme { .. }))
        | TaskError::Request(RequestError::Options(OptionsError::Unknown(_) | OptionsError::Runc(_)))
        | TaskError::Rootfs(RootfsError::Option { .. })
        | TaskError::Network(
            NetworkError::HostNamespace { .. }
            | NetworkError::TooMany { .. }
            | NetworkError::TooLong { .. }
            | NetworkError::NoEthernet { .. }
            | NetworkError::NoAddress { .. }
            | NetworkError::L3s { .. }
            | NetworkError::Stacked { .. }
            | NetworkError::Rule { .. }
            | NetworkError::Route { .. },
        )
        | TaskError::Unimplemented { .. } => Code::UNIMPLEMENTED,
        TaskError::Request(_)
        | TaskError::OtherPod { .. }
        | TaskError::NoPod { .. }
        | TaskError::Terminal(_)
        | TaskError::Rootfs(
            RootfsError::Missing { .. }
            | RootfsError::NotDirectory { .. }
            | RootfsError::BindSource { .. }
            | RootfsError::Sockets { .. },
        )
        | TaskError::Cgroup(CgroupError::Outside { .. } | CgroupError::Units { .. })
        | TaskError::Network(NetworkError::Namespace { .. }) => Code::INVALID_ARGUMENT,
        // A value of the spec that the host's kernel refuses, such as a period that is too short.
        TaskError::Cgroup(CgroupError::Limit { source, .. })
            if source.kind() == io::ErrorKind::InvalidInput =>
        {
            Code::INVALID_ARGUMENT
        }
        TaskError::Cgroup(CgroupError::Line { .. }) => Code::INVALID_ARGUMENT,
        TaskError::Cgroup(CgroupError::NoFile { .. } | CgroupError::OfV2 { .. }) => Code::UNIMPLEMENTED,
        TaskError::Disk {
            source: DiskError::Host(BlockDeviceError::Hangs { .. }) | DiskError::Waits { .. },
            ..
        } => Code::DEADLINE_EXCEEDED,
        TaskError::Disk { source: DiskError::Host(_), .. } => Code::FAILED_PRECONDITION,
        TaskError::Disk { source: DiskError::Vmm(AttachError::Refused(_)), .. } => Code::RESOURCE_EXHAUSTED,
        TaskError::Agent(AgentError::Refused { code, .. }) => *code,
        TaskError::Cancelled => Code::ABORTED,
        TaskError::Agent(AgentError::Timeout { .. } | AgentError::Silent { .. })
        | TaskError::Cgroup(CgroupError::Late { .. })
        | TaskError::Vm(VmError::Timeout { .. } | VmError::Stalled)
        | TaskError::Timeout { .. } => Code::DEADLINE_EXCEEDED,
        TaskError::Agent(AgentError::Disconnected { .. } | AgentError::Connect(_))
        | TaskError::Vm(VmError::Ended(_) | VmError::NoKvm(_)) => Code::UNAVAILABLE,
        TaskError::Blocking(BlockingError::TooMany)
        | TaskError::Cgroup(CgroupError::Blocking(BlockingError::TooMany)) => Code::RESOURCE_EXHAUSTED,
        TaskError::StateDir(_)
        | TaskError::Rootfs(_)
        | TaskError::Cgroup(_)
        | TaskError::Processor(_)
        | TaskError::Vm(_)
        | TaskError::Network(_)
        | TaskError::Attach(_)
        | TaskError::Agent(_)
        | TaskError::Disk { .. }
        | TaskError::Stdio(_)
        | TaskError::Hook(_)
        | TaskError::Undo(_)
        | TaskError::Metrics(_)
        | TaskError::PlaceholderProcess(_)
        | TaskError::Promise(_)
        | TaskError::Volume { .. }
        | TaskError::Blocking(_)
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
        let ttrpc::Error::RpcStatus(status) = of("demo", &error) else { panic!("no status") };
        assert_eq!(status.message, "container demo: rootfs: root.path: /srv/root: no such file or directory");
        assert_eq!(status.code(), Code::INVALID_ARGUMENT);
    }

    #[test]
    fn a_guest_that_is_slow_or_gone_has_codes_of_its_own() {
        let slow = AgentError::Timeout { call: "Stats" };
        assert_eq!(code(&slow.into()), Code::DEADLINE_EXCEEDED);
        let silent = AgentError::Silent { call: "Stats", seconds: 7 };
        assert_eq!(code(&silent.into()), Code::DEADLINE_EXCEEDED);
        let gone = AgentError::Disconnected { call: "Stats", reason: "closed".into() };
        assert_eq!(code(&gone.into()), Code::UNAVAILABLE);
        assert_eq!(code(&VmError::Ended("killed".into()).into()), Code::UNAVAILABLE);
        assert_eq!(code(&TaskError::Exec { exec_id: "e".into(), source: Refusal::Ended }), Code::NOT_FOUND);
    }

    #[test]
    fn a_limit_that_the_hosts_kernel_refuses_is_an_invalid_argument() {
        let refused = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            code(&CgroupError::Limit { path: "/sys/fs/cgroup/x/cpu.max".into(), source }.into())
        };
        assert_eq!((refused(22), refused(5)), (Code::INVALID_ARGUMENT, Code::UNKNOWN));
        let late = CgroupError::Late { seconds: 10 };
        assert_eq!(code(&late.into()), Code::DEADLINE_EXCEEDED);
    }

    #[test]
    fn the_agents_code_is_kept() {
        let error = AgentError::Refused { code: Code::UNIMPLEMENTED, message: "linux.seccomp".into() };
        assert_eq!(code(&error.into()), Code::UNIMPLEMENTED);
    }
}
