//! A guest that runs: its VM and the agent in it. Work in it ends when the VM does.

use std::{sync::Arc, time::Duration};

use ttrpc::Code;

use crate::{
    guest::{
        agent::{Agent, AgentError},
        profiles::Profiles,
    },
    process::error::TaskError,
    types::error::chain,
    vm::vmm::{Vm, VmError, VmExit},
};

/// How long a VMM whose agent failed may take to end by itself.
const VMM_EXIT: Duration = Duration::from_millis(500);

/// A guest that runs. Clones are the same guest.
#[derive(Debug, Clone)]
pub(crate) struct Guest {
    pub(crate) vm: Vm,
    pub(crate) agent: Agent,
    pub(crate) profiles: Arc<Profiles>,
}

impl Guest {
    /// Does `work` in the guest. If the VM ends meanwhile, the error says how.
    pub(crate) async fn run<T>(
        &self,
        work: impl Future<Output = Result<T, TaskError>>,
    ) -> Result<T, TaskError> {
        run_in(&self.vm, work).await
    }

    /// Asks the guest to delete the container. Returns whether the container is gone.
    pub(crate) async fn try_delete(&self, id: &str) -> bool {
        if self.vm.has_exited() {
            return true;
        }
        match self.agent.delete_container(id).await {
            Ok(()) | Err(AgentError::Refused { code: Code::NOT_FOUND, .. }) => true,
            // With a VM that has ended everything in it is gone.
            Err(error) => {
                tracing::warn!(container = id, error = chain(&error), "the guest keeps the container");
                self.vm.has_exited()
            }
        }
    }

    /// Ends what runs in the guest and writes its dirty data back, so that nothing is lost when the VMM is killed.
    pub(crate) async fn power_off(&self, within: Duration) {
        if self.vm.has_exited() {
            return;
        }
        if let Err(error) = self.run(async { Ok(self.agent.shutdown(within).await?) }).await {
            tracing::warn!(error = chain(&error), "the guest does not shut down");
        }
    }
}

/// Does `work` in a VM. If the VM ends meanwhile, the error says how.
pub(crate) async fn run_in<T>(
    vm: &Vm,
    work: impl Future<Output = Result<T, TaskError>>,
) -> Result<T, TaskError> {
    tokio::select! {
        biased;
        exit = vm.exited() => Err(VmError::from(exit).into()),
        done = work => match done {
            // An agent that answers is in a VM that runs.
            Ok(_) | Err(TaskError::Agent(AgentError::Refused { .. })) => done,
            Err(error) => Err(exit_of(vm).await.map_or(error, |exit| VmError::from(exit).into())),
        },
    }
}

/// How a VM ended whose agent has just failed. The connection to the agent of a guest that crashes may break before the
/// VMM has ended. None: the VM still runs.
pub(crate) async fn exit_of(vm: &Vm) -> Option<VmExit> {
    tokio::time::timeout(VMM_EXIT, vm.exited()).await.ok()
}
