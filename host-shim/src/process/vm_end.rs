//! Work that ends when the VM does.

use std::time::Duration;

use crate::{
    guest::agent::AgentError,
    process::error::TaskError,
    vm::vmm::{Vm, VmError, VmExit},
};

/// How long the VMM of an agent that has failed may take to end by itself.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Does `work` in a guest; if the VM ends meanwhile, that is why it failed.
pub(crate) async fn alive<T>(
    vm: &Vm,
    work: impl Future<Output = Result<T, TaskError>>,
) -> Result<T, TaskError> {
    tokio::select! {
        biased;
        exit = vm.exited() => Err(VmError::Ended(exit.to_string()).into()),
        done = work => match done {
            // An agent that answers lives.
            Ok(_) | Err(TaskError::Agent(AgentError::Refused { .. })) => done,
            Err(e) => Err(last_words(vm).await.map_or(e, |exit| VmError::Ended(exit.to_string()).into())),
        },
    }
}

/// How a VM ended whose agent has just failed. A guest that crashes takes its agent along, and the agent's silence may
/// be heard before the VMM has said what happened; None if the VMM lives on.
pub(crate) async fn last_words(vm: &Vm) -> Option<VmExit> {
    tokio::time::timeout(LAST_WORDS, vm.exited()).await.ok()
}
