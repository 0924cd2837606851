//! A VM's start: as a clone of a template if it can be one, else by a boot.

use std::{fs, path::PathBuf};

use bulkhead_vmm_api::{API_VERSION, NicConfig, ShareConfig, VmConfig};

use crate::{
    host::{
        failure_counts,
        journal::Journal,
        memory_promises::PROMISE,
        network::CardNumber,
        share::make_tmpfs,
        state_dir::{CONSOLE, CONSOLE_DIRECTORY, SHARE, StateDir},
    },
    types::{
        config::Config,
        failure::Cause,
        timeline::{Step, Timeline},
    },
    vm::{
        memory::MemoryRange,
        template::{self, Template, TemplateError},
        vmm::{
            CONFIG, CONTROL, Launcher, ROOTS_TAG, ReadyListener, SHARE_TAG, VSOCK, Vm, VmError, record_files,
        },
    },
};

/// What the pod asks of its VM.
#[derive(Debug)]
pub(crate) struct VmRequest {
    /// The network namespace of the VMM. None: a new one.
    pub(crate) netns: Option<PathBuf>,
    pub(crate) cgroup_procs: Vec<PathBuf>,
    pub(crate) vcpus: u8,
    /// What it begins with, and what it can grow to.
    pub(crate) memory: MemoryRange,
    /// Only the first vCPU is brought online. Otherwise all are.
    pub(crate) one_online: bool,
    /// Where it is noted how long the start takes.
    pub(crate) timeline: Timeline,
}

#[cfg(test)]
impl VmRequest {
    pub(crate) fn of_one_vcpu(config: &Config) -> Self {
        let memory = MemoryRange::of_vm(config, true, None);
        Self {
            netns: None,
            cgroup_procs: Vec::new(),
            vcpus: 1,
            memory,
            one_online: false,
            timeline: Timeline::default(),
        }
    }
}

/// With this argument the kernel leaves all vCPUs but the first offline (Linux, admin-guide/kernel-parameters.txt). So
/// there are up to two templates: bringing a vCPU online or offline takes longer than starting a clone that has it so.
const ONE_ONLINE: &str = "maxcpus=1";

/// The console is in a tmpfs of its own. The VMM stops at 4 MiB, but one that its guest has taken over would fill the
/// host's /run.
const CONSOLE_SIZE: &str = "size=5m,mode=0700";
/// The tmpfs itself, its root, and the file.
const CONSOLE_INODES: usize = 3;

/// A VM that is ready to be started.
#[derive(Debug)]
pub(crate) struct VmPlan {
    vmm: PathBuf,
    config: VmConfig,
    listener: ReadyListener,
    /// Where templates are, if the VM may be a clone.
    templates: Option<PathBuf>,
    timeline: Timeline,
}

/// Reserves the VM's files, and listens for the agent. Blocks.
pub(crate) fn prepare(
    journal: &mut Journal,
    state: &StateDir,
    config: &Config,
    request: VmRequest,
) -> Result<VmPlan, VmError> {
    let timeline = request.timeline.clone();
    let vm = vm_config(config, request);
    record_files(journal, state, &[CONFIG, CONTROL, VSOCK, PROMISE])?;
    if config.console {
        make_console(journal, state)?;
    }
    Ok(VmPlan {
        vmm: config.vmm.clone(),
        config: vm,
        listener: ReadyListener::bind(journal, state, VSOCK)?,
        templates: config.has_templates().then(|| state.root().join(template::DIR)),
        timeline,
    })
}

/// Finds the template for such VMs, or makes it, and returns its directory. It belongs to no pod. The configuration
/// must not exclude templates.
pub(crate) async fn make_template(
    journal: &mut Journal,
    state: &StateDir,
    config: &Config,
    request: VmRequest,
) -> Result<PathBuf, TemplateError> {
    let mut launcher = Launcher { journal, state, vmm: config.vmm.clone() };
    let vm = vm_config(config, request);
    let templates = state.root().join(template::DIR);
    Ok(Template::find_or_make(&mut launcher, &vm, &templates).await?.path().to_owned())
}

/// The configuration of the VMM.
fn vm_config(config: &Config, request: VmRequest) -> VmConfig {
    // A VM that is to be larger begins with the same memory and grows, because each shape needs a template of its own.
    let memory = request.memory;
    VmConfig {
        api_version: API_VERSION,
        kernel: config.kernel.clone(),
        initramfs: config.initramfs.clone(),
        kernel_args: request.one_online.then(|| ONE_ONLINE.to_owned()).into_iter().collect(),
        vcpus: request.vcpus,
        memory_mib: memory.least,
        max_memory_mib: Some(memory.most),
        hugepages: config.hugepages,
        console: config.console.then(|| CONSOLE.into()),
        control: CONTROL.into(),
        vsock: VSOCK.into(),
        shares: [(SHARE_TAG, false), (ROOTS_TAG, true)]
            .map(|(tag, exclusive)| ShareConfig { tag: tag.into(), dir: SHARE.into(), exclusive })
            .into(),
        netns: request.netns,
        nics: vec![NicConfig { tap: CardNumber(0).tap(), mac: CardNumber(0).mac() }],
        cgroup_procs: request.cgroup_procs,
        transport: config.transport,
        save_to: None,
        restore_from: None,
    }
}

fn make_console(journal: &mut Journal, state: &StateDir) -> Result<(), VmError> {
    let directory = state.path().join(CONSOLE_DIRECTORY);
    make_tmpfs(journal, &directory, CONSOLE_SIZE, CONSOLE_INODES)
        .map_err(|source| VmError::Prepare { path: directory, source })?;
    record_files(journal, state, &[CONSOLE])
}

impl Vm {
    /// Starts the VM, as a clone of a template if possible, and waits until its agent is ready or the VMM has ended.
    pub(crate) async fn start(
        journal: &mut Journal,
        state: &StateDir,
        plan: VmPlan,
    ) -> Result<Self, VmError> {
        let VmPlan { vmm, config, listener, templates, timeline } = plan;
        let mut launcher = Launcher { journal, state, vmm };
        let template = match templates {
            Some(templates) => {
                let _step = timeline.begin(Step::FindTemplate);
                let template = Template::ensure(&mut launcher, &config, &templates).await?;
                if template.is_none() {
                    failure_counts::count(state.root(), Cause::Template);
                }
                template
            }
            None => None,
        };
        if let Some(template) = template {
            let step = timeline.begin(Step::RestoreVm);
            let clone = VmConfig { restore_from: Some(template.path().to_owned()), ..config.clone() };
            let restored = launcher.restore(&clone).await;
            drop(step);
            match restored {
                Err(VmError::NotRestored(reason)) => {
                    tracing::warn!(error = reason, "the VM cannot be restored from its template, and boots");
                    failure_counts::count(state.root(), Cause::Template);
                    template.discard();
                    // The clone may have made them.
                    for socket in [CONTROL, VSOCK] {
                        let _ = fs::remove_file(state.path().join(socket));
                    }
                }
                other => return other,
            }
        }
        let _step = timeline.begin(Step::BootVm);
        launcher.boot(CONFIG, &config, listener).await
    }
}

#[cfg(test)]
mod tests {
    use bulkhead_vmm_api::Transport;

    use super::*;

    #[test]
    fn a_vm_has_the_transport_of_the_configuration() {
        for transport in [Transport::Mmio, Transport::Pci] {
            let config = Config { transport, ..Config::default() };
            assert_eq!(vm_config(&config, VmRequest::of_one_vcpu(&config)).transport, transport);
        }
    }
}
