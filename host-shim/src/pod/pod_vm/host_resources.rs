//! What the pod itself has on the host: state directory, share, cgroup and network. Starts the VM with them. The files
//! of the containers are in journals of their own.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use bulkhead_agent_api::{
    HUGE_PAGE_SIZE,
    cpu_list::{self, CpuNumbers},
};
use tokio::time::Instant;

use crate::{
    guest::agent::{Agent, HostSettings},
    host::{
        cgroup,
        cgroup_changes::CgroupChanges,
        cgroup_limits::{self, Cpuset},
        event_log::EventLog,
        journal::{Effect, Journal, UndoError},
        kernel_parameters,
        memory::{self, Above},
        network,
        pending_operations::PendingOperations,
        processors::{self, ProcessorError},
        rootfs::Rootfs,
        share,
        state_dir::{self, StateDir},
    },
    pod::{
        create_request::CreatePlan,
        huge_pages::{self, OTHER_SIZE},
        pod_vm::{memory_size::LimitAbove, network::Network, port_forward::PortForward},
        vcpus::{Demand, Vcpus},
    },
    process::{
        error::TaskError,
        running_guest::{Guest, run_in},
    },
    types::{
        config::Config,
        error::chain,
        spec::{Cpu, Resources},
        timeline::{Step, Timeline},
    },
    vm::{
        memory::{MemoryRange, Needs},
        start::{self, VmPlan, VmRequest},
        vmm::Vm,
    },
};

/// What the pod itself has on the host. Its containers' files are in journals of their own.
#[derive(Debug)]
pub(super) struct HostResources {
    /// The network namespace that was given, which outlives the VM.
    pub(super) netns: Option<PathBuf>,
    /// None: the pod's first container has not started.
    pub(super) network: Option<Network>,
    pub(super) port_forward: Option<PortForward>,
    pub(super) cgroup: Option<CgroupChanges>,
    pub(super) memory: Option<MemoryRange>,
    /// The huge pages that kubelet allows the pod, bytes.
    pub(super) huge_pages: u64,
    /// The size of the VM that the cgroup's memory limit is made for. None: there is no limit.
    pub(super) limit_mib: Option<u32>,
    /// The most huge pages that the only container has had, bytes. The VM keeps the memory that it got for them.
    pub(super) most_huge_pages: u64,
    /// The memory limit of the cgroups above, and what it is expected to become.
    pub(super) limit_above: LimitAbove,
    /// What the limit is higher for files of a single container's root that are in the host's memory.
    pub(super) root_bytes_in_memory: u64,
    /// The limits of processor time of the only container, from which the cgroup's are derived.
    pub(super) cpu: Cpu,
    /// The processors and NUMA nodes of the cgroup. None: they are not known, because a change was given up.
    pub(super) cpuset: Option<Cpuset>,
    /// The file that says which processors the cgroup above may use.
    cpuset_above: Option<PathBuf>,
    /// The processes and threads that the cgroups above allow the pod.
    tasks_above: Option<u64>,
    /// Whether threads of the VMM may be pinned to processors.
    pub(super) is_pinned: bool,
    pub(super) vcpus: Vcpus,
    /// The limit of the processor time of all containers, if it is known. In millionths of a processor.
    pub(super) pod_cpu_limit: Option<u64>,
    /// Open while the VM's sockets are needed.
    pub(super) state: StateDir,
    pub(super) journal: Journal,
    /// Some until the VM is started.
    pub(super) plan: Option<VmPlan>,
    timeline: Timeline,
}

/// Whether vCPUs may go offline, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fit {
    Grow,
    Exactly,
}

/// What a pod's first container asks of the host.
pub(super) struct HostRequest {
    pub(super) netns: Option<PathBuf>,
    pub(super) cgroup: PathBuf,
    /// The limits of the pod's cgroup, if they are the shim's to set.
    pub(super) resources: Option<Resources>,
    pub(super) pod_cpu_limit: Option<u64>,
    /// The files of the container.
    pub(super) rootfs: Option<Rootfs>,
    /// The operations of the pod that have not ended, and the pod's id among them.
    pub(super) pending: (PendingOperations, String),
    /// Journal entries that name the bundle and the shim's socket. They come first.
    pub(super) owners: Vec<Effect>,
    pub(super) timeline: Timeline,
    pub(super) events: EventLog,
}

impl HostResources {
    /// Blocks.
    pub(super) fn prepare(path: &Path, config: &Config, wanted: &HostRequest) -> Result<Self, TaskError> {
        let HostRequest { netns, owners, .. } = wanted;
        netns.as_deref().map_or(Ok(()), network::check)?;
        let (state, journal) = StateDir::create(path, owners)?;
        wanted.events.begin(path);
        let netns = netns.clone();
        let mut host = Self {
            netns,
            network: None,
            port_forward: None,
            cgroup: None,
            memory: None,
            huge_pages: 0,
            most_huge_pages: 0,
            limit_mib: None,
            limit_above: LimitAbove::default(),
            root_bytes_in_memory: wanted.rootfs.as_ref().map_or(0, Rootfs::bytes_in_memory),
            cpu: Cpu::default(),
            cpuset: Some(Cpuset::default()),
            is_pinned: false,
            cpuset_above: None,
            tasks_above: None,
            // They follow from the cgroup.
            vcpus: Vcpus::new(1, CpuNumbers::new()),
            pod_cpu_limit: wanted.pod_cpu_limit,
            state,
            journal,
            plan: None,
            timeline: wanted.timeline.clone(),
        };
        match host.prepare_share_and_cgroup(config, wanted) {
            Ok(plan) => {
                host.plan = Some(plan);
                Ok(host)
            }
            Err(error) => {
                host.remove_logged();
                Err(error)
            }
        }
    }

    fn prepare_share_and_cgroup(
        &mut self,
        config: &Config,
        wanted: &HostRequest,
    ) -> Result<VmPlan, TaskError> {
        share::make(&mut self.journal, &state_dir::share_path(self.state.path()))?;
        let owner = cgroup::Owner { state: self.state.path(), root: self.state.root() };
        let cgroup = cgroup::create(&mut self.journal, &wanted.cgroup, owner)?;
        self.cpuset_above = cgroup_limits::cpuset_above(&cgroup);
        self.tasks_above = cgroup_limits::tasks_above(&cgroup)?;
        let usable = self.usable_processors()?;
        self.vcpus = Vcpus::new(config.vcpus_on(usable.len()), usable);
        // Whether all containers of a pod have limits is not known yet. If they do, kubelet has limited its cgroup.
        let is_limited =
            wanted.resources.as_ref().is_some_and(|resources| resources.memory.bytes().is_some());
        let memory = MemoryRange::of_vm(config, is_limited, Above::of(&cgroup)?.for_new_vm());
        self.memory = Some(memory);
        if wanted.resources.is_none() {
            huge_pages::check_other_size(memory::huge_pages_above(&cgroup, OTHER_SIZE)?)?;
            self.huge_pages = memory::huge_pages_above(&cgroup, HUGE_PAGE_SIZE)?.unwrap_or(0);
        }
        if let Some(resources) = &wanted.resources {
            let huge_pages = resources.huge_pages().unwrap_or(0);
            self.most_huge_pages = huge_pages;
            let limits = resources.memory.bytes();
            self.limit_mib = limits.map(|limits| self.vm_mib(Needs { limits, huge_pages }));
            if let Some(limit_mib) = self.limit_mib {
                cgroup_limits::limit_memory(&cgroup, limit_mib, self.root_bytes_in_memory)?;
            }
            let cpuset = cpuset_of([&resources.cpu]);
            cgroup_limits::limit_cpuset(&cgroup, &mut self.cpuset, &cpuset)?;
        }
        let one_online = self.begins_with_one_vcpu(wanted.resources.as_ref().map(|resources| &resources.cpu));
        let vcpus = self.vcpus.count();
        let request = VmRequest {
            netns: self.netns.clone(),
            cgroup_procs: cgroup.procs(),
            vcpus,
            memory,
            one_online,
            timeline: self.timeline.clone(),
        };
        let (pending, id) = &wanted.pending;
        self.cgroup = Some(CgroupChanges::new(cgroup, pending, id));
        Ok(start::prepare(&mut self.journal, &self.state, config, request)?)
    }

    /// Starts the VM, tells it who it is, and gives it the memory that its containers need.
    pub(super) async fn start_vm(&mut self, plan: &CreatePlan, needs: Needs) -> Result<Guest, TaskError> {
        let vm_plan = self.plan.take().ok_or_else(|| TaskError::PodNotRunning { pod_id: plan.id.clone() })?;
        let vm = Vm::start(&mut self.journal, &self.state, vm_plan).await?;
        tracing::info!(vmm = vm.pid(), "the guest is ready");
        let timeline = self.timeline.clone();
        let started = async {
            let _step = timeline.begin(Step::StartSandbox);
            let agent = Agent::connect(vm.vsock()).await?;
            let of_host =
                HostSettings { kernel_parameters: kernel_parameters::read(), tasks: self.tasks_above };
            let release = agent.start_sandbox(&plan.id, &plan.hostname, of_host).await?;
            tracing::info!(kernel = release, "the guest knows its pod");
            Ok::<_, TaskError>(agent)
        };
        let allowed = self.memory_above().await?.limit;
        self.limit_above.set_followed(allowed, Instant::now());
        let resized = async {
            let _step = timeline.begin(Step::FitMemory);
            Ok::<_, TaskError>(vm.fit_memory(needs, allowed).await?)
        };
        let of_guest = async {
            let (agent, added_mib): (Agent, _) = tokio::try_join!(started, resized)?;
            if let Some(added_mib) = added_mib {
                agent.follow_memory(added_mib).await?;
            }
            Ok::<_, TaskError>(agent)
        };
        let agent = run_in(&vm, of_guest).await?;
        Ok(Guest { vm, agent, profiles: Arc::default() })
    }

    /// Ends the VM, if it still runs, and leaves nothing of the pod and its containers on the host. Blocks.
    pub(super) fn remove(self) -> Result<(), UndoError> {
        // These come first, because they keep the network namespace, and the next step may hang.
        drop((self.port_forward, self.network));
        self.state.remove(self.journal)
    }

    /// The same where something has failed already, which is what is to be reported.
    pub(super) fn remove_logged(self) {
        if let Err(error) = self.remove() {
            tracing::error!(error = chain(&error), "the pod left something on the host");
        }
    }

    /// Whether the VM is to begin with one vCPU online, as its containers need fewer than there are. `cpu` are the
    /// limits of a single container.
    fn begins_with_one_vcpu(&mut self, cpu: Option<&Cpu>) -> bool {
        let demands: Vec<_> = cpu.iter().map(|cpu| Demand::of(cpu, &self.vcpus.host)).collect();
        let all = self.vcpus.count();
        if self.vcpus.wanted(self.pod_cpu_limit, &demands) < all {
            self.vcpus.online = Some(1);
            return true;
        }
        false
    }

    /// The processors of the host that the pod may use now.
    pub(super) fn usable_processors(&self) -> Result<CpuNumbers, ProcessorError> {
        processors::usable(self.cpuset_above.as_deref())
    }

    /// Chooses vCPUs for the processors that containers with these limits name.
    pub(super) fn assign(&mut self, limits: &[Cpu]) -> Result<Vec<Demand>, TaskError> {
        self.vcpus.host = self.usable_processors()?;
        let demands: Vec<_> = limits.iter().map(|cpu| Demand::of(cpu, &self.vcpus.host)).collect();
        self.vcpus.assign(&demands);
        Ok(demands)
    }

    /// Has the guest bring this many vCPUs online.
    pub(super) async fn set_online(&mut self, guest: &Guest, wanted: u8, fit: Fit) -> Result<(), TaskError> {
        let is_enough = |online: u8| online == wanted || (online > wanted && fit == Fit::Grow);
        if self.vcpus.online.is_some_and(is_enough) {
            return Ok(());
        }
        // Not known until the guest has answered. It may carry out a request after the deadline.
        self.vcpus.online = None;
        let now = guest.agent.set_processors(wanted).await?;
        self.vcpus.online = Some(wanted);
        tracing::info!(vcpus = wanted, now, "vCPUs are online");
        Ok(())
    }

    /// Lets the VMM use what containers with these limits may use.
    pub(super) async fn apply_cpu_limits(
        &mut self,
        guest: &Guest,
        limits: &[Cpu],
        demands: &[Demand],
    ) -> Result<(), TaskError> {
        self.limit_cpuset(cpuset_of(limits)).await?;
        let are_assigned = self.vcpus.are_assigned();
        if let Some(cgroup) = &self.cgroup
            && (self.is_pinned || are_assigned)
        {
            self.is_pinned = true;
            let (vmm, affinities) = (guest.vm.process(), self.vcpus.affinities(demands));
            // This is done in the order of the other changes: it must not overtake an earlier one that hangs.
            cgroup.change(move |_| Ok(processors::pin(vmm, &affinities)?), |_| ()).await?;
            self.is_pinned = are_assigned;
        }
        Ok(())
    }

    /// Sets the processors and NUMA nodes of the pod's cgroup.
    async fn limit_cpuset(&mut self, wanted: Cpuset) -> Result<(), TaskError> {
        let Some(cgroup) = &self.cgroup else { return Ok(()) };
        if self.cpuset.as_ref() == Some(&wanted) {
            return Ok(());
        }
        // Not known until the change has ended: the caller may give up waiting.
        let mut present = self.cpuset.take();
        let set = move |cgroup: &_| {
            let limited = cgroup_limits::limit_cpuset(cgroup, &mut present, &wanted);
            Ok((present, limited))
        };
        let (present, limited) = cgroup.change(set, |_| ()).await?;
        self.cpuset = present;
        Ok(limited?)
    }
}

/// The processors and NUMA nodes that containers with these limits may use together. All, if one of them may use all.
fn cpuset_of<'c>(limits: impl IntoIterator<Item = &'c Cpu> + Clone) -> Cpuset {
    let union = |list: fn(&Cpu) -> Option<&str>| {
        let lists = limits.clone().into_iter().map(|cpu| list(cpu).filter(|list| !list.is_empty()));
        let lists = lists.collect::<Option<Vec<_>>>().filter(|lists| !lists.is_empty())?;
        let numbers = lists.into_iter().map(cpu_list::parse).collect::<Option<Vec<CpuNumbers>>>()?;
        Some(cpu_list::format(&numbers.into_iter().flatten().collect()))
    };
    Cpuset { cpus: union(|cpu| cpu.cpus.as_deref()), mems: union(|cpu| cpu.mems.as_deref()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_may_use_what_one_of_its_containers_may() {
        let cpu = |cpus: &str, mems: &str| Cpu {
            cpus: Some(cpus.into()),
            mems: Some(mems.into()),
            ..Cpu::default()
        };
        let set = |cpus: Option<&str>, mems: Option<&str>| Cpuset {
            cpus: cpus.map(str::to_owned),
            mems: mems.map(str::to_owned),
        };
        assert_eq!(cpuset_of(&[cpu("2-3", "0"), cpu("0,3", "0")]), set(Some("0,2-3"), Some("0")));
        assert_eq!(cpuset_of(&[cpu("2-3", ""), cpu("0,3", "0")]), set(Some("0,2-3"), None));
        assert_eq!(cpuset_of(&[cpu("2", ""), Cpu::default()]), set(None, None));
        assert_eq!(cpuset_of(&[]), set(None, None));
    }
}
