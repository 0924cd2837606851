//! The VM of a sandbox and the agent in it, which all containers of the sandbox share.

use std::path::{Path, PathBuf};

use tokio::task::spawn_blocking;

use crate::{
    guest::agent::Agent,
    host::{
        cgroup,
        journal::{Journal, UndoError},
        network, share,
        state_dir::{self, StateDir},
    },
    pod::request::Plan,
    process::{error::TaskError, vm_end::alive},
    types::{config::Config, error::chain},
    vm::{
        start::{self, VmFiles, VmShape},
        vmm::{SHARE, Vm},
    },
};

/// A guest that runs.
#[derive(Debug, Clone)]
pub(crate) struct Guest {
    pub(crate) vm: Vm,
    pub(crate) agent: Agent,
}

/// What the sandbox itself has on the host. Its containers' files are in journals of their own.
#[derive(Debug)]
pub(crate) struct Machine {
    path: PathBuf,
    /// The network namespace that was given, which outlives the VM.
    netns: Option<PathBuf>,
    /// Open while the VM's sockets are needed.
    state: StateDir,
    journal: Journal,
}

/// A machine whose VM is yet to be booted.
#[derive(Debug)]
pub(crate) struct Unbooted {
    pub(crate) machine: Machine,
    pub(crate) files: VmFiles,
}

impl Machine {
    /// Makes what the host needs for the VM, but for the container's files, or nothing. Blocks.
    pub(crate) fn prepare(path: &Path, config: &Config, plan: &Plan) -> Result<Unbooted, TaskError> {
        plan.netns.as_deref().map_or(Ok(()), network::check)?;
        let (state, journal) = StateDir::create(path)?;
        let mut machine = Self { path: path.into(), netns: plan.netns.clone(), state, journal };
        match machine.prepare_files(config, plan) {
            Ok(files) => Ok(Unbooted { machine, files }),
            Err(e) => {
                machine.remove_logged();
                Err(e)
            }
        }
    }

    fn prepare_files(&mut self, config: &Config, plan: &Plan) -> Result<VmFiles, TaskError> {
        share::make(&mut self.journal, &share_of(&self.path))?;
        let cgroup_procs = cgroup::create(&mut self.journal, &plan.cgroup)?;
        let shape = VmShape { netns: plan.netns.clone(), cgroup_procs };
        Ok(start::prepare(&mut self.journal, &self.state, config, shape)?)
    }

    /// Starts the VM, tells it who it is, and has it have the memory that containers with these `limits` need. Who gives up
    /// on it removes the machine.
    pub(crate) async fn boot(
        &mut self,
        plan: &Plan,
        files: VmFiles,
        limits: u64,
    ) -> Result<Guest, TaskError> {
        let vm = Vm::start(&mut self.journal, &self.state, files).await?;
        tracing::info!("the guest is ready, VMM {}", vm.pid());
        let started = async {
            let agent = Agent::connect(vm.vsock()).await?;
            let release = agent.start_sandbox(&plan.id, &plan.hostname).await?;
            tracing::info!("guest kernel {release}");
            Ok(agent)
        };
        let grown = async { Ok(vm.make_room(limits).await?) };
        let (agent, ()) = alive(&vm, async { tokio::try_join!(started, grown) }).await?;
        Ok(Guest { vm, agent })
    }

    /// Gives the sandbox's container the network that the host has for it by now.
    pub(crate) async fn connect(&mut self, vmm: u32, agent: &Agent, id: &str) -> Result<(), TaskError> {
        let found = network::connect(vmm, self.netns.as_deref(), &mut self.journal).await?;
        if let Some(interface) = found {
            agent.configure_network(id, interface.description).await?;
        }
        Ok(())
    }

    /// Ends the VM, if it still runs, and leaves nothing of the sandbox and its containers on the host. Blocks.
    pub(crate) fn remove(self) -> Result<(), UndoError> {
        state_dir::remove(&self.path, self.journal)
    }

    /// The same where something has failed already, which is what is to be reported.
    pub(crate) fn remove_logged(self) {
        if let Err(e) = self.remove() {
            tracing::error!("{}", chain(&e));
        }
    }
}

impl Guest {
    /// Has the guest lose nothing when its machine is removed, which kills the VMM.
    pub(crate) async fn power_off(&self) {
        if self.vm.has_exited() {
            return;
        }
        // It may end by itself meanwhile.
        let settled = async { Ok(self.agent.shutdown().await?) };
        if let Err(e) = alive(&self.vm, settled).await {
            tracing::warn!("the guest does not shut down, and its VMM is killed: {}", chain(&e));
        }
    }
}

/// The directory of the host that the guest sees, in the sandbox's state directory.
pub(crate) fn share_of(state: &Path) -> PathBuf {
    state.join(SHARE)
}

/// Runs what blocks.
pub(crate) async fn blocking<T: Send + 'static, E: Into<TaskError> + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, TaskError> {
    match spawn_blocking(work).await {
        Ok(result) => result.map_err(Into::into),
        Err(e) => Err(TaskError::Internal(e.to_string())),
    }
}
