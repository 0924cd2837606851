//! The causes of failures, by which the operator counts them.

use ttrpc::Code;

use crate::{
    guest::agent::AgentError,
    host::rootfs::RootfsError,
    process::error::{DiskError, TaskError},
    types::failure::Cause,
    vm::vmm::VmError,
};

/// The cause of an error. None: the client has given the request up, so nothing has failed.
pub(crate) fn cause_of(error: &TaskError) -> Option<Cause> {
    Some(match error {
        TaskError::Cancelled => return None,
        TaskError::Config(_) => Cause::Configuration,
        TaskError::Request(_)
        | TaskError::Terminal(_)
        | TaskError::Unimplemented { .. }
        | TaskError::Rootfs(RootfsError::Option { .. } | RootfsError::Sockets { .. }) => Cause::RefusedField,
        TaskError::Rootfs(_) | TaskError::Volume { .. } => Cause::Rootfs,
        TaskError::Disk { source: DiskError::Guest(error), .. } => of_agent(error),
        TaskError::Disk { .. } => Cause::Rootfs,
        TaskError::Cgroup(_) | TaskError::Processor(_) => Cause::Cgroup,
        TaskError::Network(_) | TaskError::Attach(_) => Cause::Network,
        TaskError::Vm(error) => of_vm(error),
        TaskError::Agent(error) => of_agent(error),
        TaskError::Stdio(_) | TaskError::Timeout { .. } | TaskError::PodNotRunning { .. } => Cause::Guest,
        TaskError::Hook(_) => Cause::Hook,
        TaskError::Promise(_) => Cause::OutOfMemory,
        TaskError::Refused(_)
        | TaskError::StateDir(_)
        | TaskError::Undo(_)
        | TaskError::Metrics(_)
        | TaskError::NoExec { .. }
        | TaskError::ExecExists { .. }
        | TaskError::Exec { .. }
        | TaskError::ResizeStopped
        | TaskError::OtherPod { .. }
        | TaskError::NoPod { .. }
        | TaskError::Blocking(_)
        | TaskError::Unfinished
        | TaskError::PlaceholderProcess(_)
        | TaskError::Internal(_) => Cause::Other,
    })
}

fn of_vm(error: &VmError) -> Cause {
    match error {
        VmError::NoKvm(_) => Cause::NoKvm,
        VmError::Timeout { .. } | VmError::Stalled => Cause::BootTimeout,
        VmError::Grow { .. } | VmError::HugePages { .. } | VmError::GrowOnDemand { .. } => Cause::OutOfMemory,
        VmError::NotRestored(_) => Cause::Template,
        VmError::Version { .. } => Cause::Configuration,
        VmError::Ended(_) | VmError::Wait(_) => Cause::Guest,
        VmError::Prepare { .. } | VmError::Spawn { .. } => Cause::Other,
    }
}

/// By the code of the agent's answer (`guest-agent/src/server.rs`).
fn of_agent(error: &AgentError) -> Cause {
    match error {
        AgentError::Refused { code: Code::UNIMPLEMENTED | Code::INVALID_ARGUMENT, .. } => Cause::RefusedField,
        AgentError::Refused { code: Code::RESOURCE_EXHAUSTED, .. } => Cause::OutOfMemory,
        // The stage of the process has failed, mostly because there is no such program.
        AgentError::Refused { code: Code::UNKNOWN, .. } => Cause::Program,
        AgentError::Refused { .. }
        | AgentError::Connect(_)
        | AgentError::Timeout { .. }
        | AgentError::Silent { .. }
        | AgentError::Disconnected { .. }
        | AgentError::Entropy(_) => Cause::Guest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::request_error::unimplemented;

    #[test]
    fn errors_have_the_cause_that_an_operator_looks_for() {
        let of_code = |code| TaskError::from(AgentError::Refused { code, message: String::new() });
        for (error, cause) in [
            (VmError::NoKvm("no /dev/kvm".into()).into(), Some(Cause::NoKvm)),
            (VmError::Stalled.into(), Some(Cause::BootTimeout)),
            (VmError::Ended("killed".into()).into(), Some(Cause::Guest)),
            (unimplemented("hostNetwork", "").into(), Some(Cause::RefusedField)),
            (RootfsError::Option { option: "x".into() }.into(), Some(Cause::RefusedField)),
            (RootfsError::NotDirectory { path: "/x".into() }.into(), Some(Cause::Rootfs)),
            (of_code(Code::UNKNOWN), Some(Cause::Program)),
            (of_code(Code::RESOURCE_EXHAUSTED), Some(Cause::OutOfMemory)),
            (of_code(Code::INTERNAL), Some(Cause::Guest)),
            (TaskError::Unfinished, Some(Cause::Other)),
            (TaskError::Cancelled, None),
        ] {
            assert_eq!(cause_of(&error), cause, "{error}");
        }
    }
}
