//! The vCPUs of a pod's VM: how many are online, and which of them stand for processors of the host.

use std::collections::BTreeMap;

use bulkhead_agent_api::cpu_list::{self, CpuNumbers};

use crate::{
    host::processors::{Affinities, Present},
    types::{
        request_error::{RequestError, invalid},
        spec::{Cpu, MICRO_CPUS},
    },
};

/// How much of a list an error shows, characters.
const SHOWN: usize = 100;

/// What a container asks of the processors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Its limit in millionths of a processor's time. None: it has no limit.
    pub(crate) limit: Option<u64>,
    /// The processors that it names and that the pod may use. None: all that the pod may use.
    pub(crate) cpus: Option<CpuNumbers>,
    /// Processors that it names as well, and that are offline, or that the cgroup above the pod's lacks.
    pub(crate) offline: CpuNumbers,
}

impl Demand {
    /// That of a container with these limits.
    pub(crate) fn of(cpu: &Cpu, host: &CpuNumbers) -> Self {
        let named = cpu.cpus.as_deref().and_then(cpu_list::parse).unwrap_or_default();
        let (cpus, offline): (CpuNumbers, _) = named.into_iter().partition(|cpu| host.contains(cpu));
        Self { limit: cpu.limit(), cpus: Some(cpus).filter(|cpus| !cpus.is_empty()), offline }
    }
}

/// Refuses limits that name processors or NUMA nodes which the host cannot have. Like the kernel, it takes a set that
/// is offline: without any that can be used, a cgroup has those of the one above.
pub(crate) fn check(cpu: &Cpu, processors: &Present, nodes: &Present) -> Result<(), RequestError> {
    check_set("cpus", cpu.cpus.as_deref(), processors)?;
    check_set("mems", cpu.mems.as_deref(), nodes)
}

fn check_set(name: &str, list: Option<&str>, host: &Present) -> Result<(), RequestError> {
    let Some(list) = list.filter(|list| !list.is_empty()) else { return Ok(()) };
    let is_possible = |set: CpuNumbers| set.is_subset(&host.possible) && !set.is_empty();
    if cpu_list::parse(list).is_some_and(is_possible) {
        return Ok(());
    }
    let list: String = list.chars().take(SHOWN).collect();
    let (possible, usable) = (cpu_list::format(&host.possible), cpu_list::format(&host.usable));
    let reason = format!(
        "{list:?} is no list for cpuset.{name} on this host, which can have {possible} and can use {usable} now"
    );
    Err(invalid(format!("linux.resources.cpu.{name}"), reason))
}

/// The vCPUs of a VM.
#[derive(Debug)]
pub(crate) struct Vcpus {
    count: u8,
    /// How many of them are online. None: the guest has not confirmed what it was asked for last.
    pub(crate) online: Option<u8>,
    /// The processors of the host that are online, and that the cgroup above the pod's may use.
    pub(crate) host: CpuNumbers,
    /// The vCPU that stands for a processor of the host, for those that a container names.
    vcpu_of: BTreeMap<u32, u8>,
}

impl Vcpus {
    /// Those of a VM with `vcpus` vCPUs, which is not started yet.
    pub(crate) fn new(vcpus: u8, host: CpuNumbers) -> Self {
        Self { count: vcpus, online: Some(vcpus), host, vcpu_of: BTreeMap::new() }
    }

    /// How many there are, online or not.
    pub(crate) fn count(&self) -> u8 {
        self.count
    }

    /// All of them, as a set.
    pub(crate) fn all(&self) -> CpuNumbers {
        (0..u32::from(self.count)).collect()
    }

    /// How many vCPUs are to be online for these containers. `pod_limit` is what those containers of the pod may use
    /// together that have a limit, even if they do not exist yet, in millionths of a processor's time. So it says
    /// nothing of a pod in which one has no limit. None: it is not known.
    pub(crate) fn wanted(&self, pod_limit: Option<u64>, demands: &[Demand]) -> u8 {
        // A cpuset is shown with its numbers, and the static policy of kubelet gives one to every container.
        if demands.iter().any(|demand| demand.cpus.is_some() || !demand.offline.is_empty()) {
            return self.count;
        }
        let limits = demands.iter().map(|demand| demand.limit);
        let sum = limits.into_iter().try_fold(0u64, |sum, limit| Some(sum.saturating_add(limit?)));
        match sum.and_then(|sum| pod_limit.or(Some(sum).filter(|_| !demands.is_empty()))) {
            None => self.count,
            Some(limit) => u8::try_from(limit.div_ceil(MICRO_CPUS)).unwrap_or(u8::MAX).clamp(1, self.count),
        }
    }

    /// Chooses a vCPU for each processor of the host that a container names and that is online. A choice lasts as long
    /// as a container names that processor, even while it is offline: the guest knows the container's processors by the
    /// numbers of their vCPUs. The vCPU has the same number, if there is such a vCPU and it is free. A VM with fewer
    /// vCPUs than there are such processors has vCPUs that stand for several.
    pub(crate) fn assign(&mut self, demands: &[Demand]) {
        let named: CpuNumbers =
            demands.iter().flat_map(|demand| demand.cpus.iter().flatten().copied()).collect();
        let is_offline = |cpu: &u32| demands.iter().any(|demand| demand.offline.contains(cpu));
        self.vcpu_of.retain(|cpu, _| named.contains(cpu) || is_offline(cpu));
        for cpu in named {
            if self.vcpu_of.contains_key(&cpu) {
                continue;
            }
            let is_free = |vcpu: &u8| !self.vcpu_of.values().any(|used| used == vcpu);
            let same = u8::try_from(cpu).ok().filter(|vcpu| *vcpu < self.count).filter(is_free);
            let shared = || u8::try_from(cpu % u32::from(self.count)).unwrap_or(0);
            let vcpu = same.or_else(|| (0..self.count).find(is_free)).unwrap_or_else(shared);
            self.vcpu_of.insert(cpu, vcpu);
        }
    }

    /// Whether any container names processors.
    pub(crate) fn are_assigned(&self) -> bool {
        !self.vcpu_of.is_empty()
    }

    /// The vCPUs that stand for these processors of the host.
    pub(crate) fn vcpus_of(&self, cpus: &CpuNumbers) -> CpuNumbers {
        cpus.iter().filter_map(|cpu| self.vcpu_of.get(cpu)).map(|vcpu| u32::from(*vcpu)).collect()
    }

    /// Where the threads of the VMM are to run. What stands for no processor that is online runs on all that the
    /// containers may use.
    pub(crate) fn affinities(&self, demands: &[Demand]) -> Affinities {
        let is_bound = !demands.is_empty() && demands.iter().all(|demand| demand.cpus.is_some());
        let online = || self.vcpu_of.iter().filter(|(cpu, _)| self.host.contains(cpu));
        let others = if is_bound { online().map(|(cpu, _)| *cpu).collect() } else { self.host.clone() };
        let of_vcpu = |vcpu: u8| {
            let cpus: CpuNumbers =
                online().filter(|(_, assigned)| **assigned == vcpu).map(|(cpu, _)| *cpu).collect();
            if cpus.is_empty() { others.clone() } else { cpus }
        };
        Affinities { vcpus: (0..self.count).map(of_vcpu).collect(), others: others.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limited(limit: u64) -> Demand {
        Demand { limit: Some(limit), ..Demand::default() }
    }

    fn bound<const N: usize>(cpus: [u32; N]) -> Demand {
        Demand { cpus: Some(cpus.into()), ..Demand::default() }
    }

    fn processors(vcpus: u8, host: u32) -> Vcpus {
        Vcpus::new(vcpus, (0..host).collect())
    }

    #[test]
    fn a_pod_has_the_vcpus_that_its_limits_can_use() {
        let four = processors(4, 4);
        let wanted = |pod, demands: &[Demand]| four.wanted(pod, demands);
        assert_eq!(wanted(None, &[]), 4);
        assert_eq!(wanted(None, &[limited(500_000)]), 1);
        assert_eq!(wanted(None, &[limited(1_000_000)]), 1);
        assert_eq!(wanted(None, &[limited(500_000), limited(1_000_000)]), 2);
        assert_eq!(wanted(None, &[limited(9_000_000)]), 4);
        assert_eq!(wanted(None, &[limited(u64::MAX), limited(u64::MAX)]), 4);
        assert_eq!(wanted(None, &[limited(500_000), Demand::default()]), 4, "one without a limit");
        assert_eq!(wanted(Some(1_500_000), &[]), 2);
        assert_eq!(wanted(Some(1_500_000), &[limited(500_000)]), 2, "another container is still to come");
        assert_eq!(
            wanted(Some(1_500_000), &[limited(1_500_000), Demand::default()]),
            4,
            "of those with a limit"
        );
        assert_eq!(wanted(Some(1_000_000), &[limited(1_000_000), bound([0])]), 4);
        let offline = Demand { offline: [4].into(), ..limited(1_000_000) };
        assert_eq!(wanted(Some(1_000_000), &[offline]), 4, "its processors may come back");
    }

    #[test]
    fn limits_name_processors_that_the_host_has() {
        let host = (0..4).collect();
        let cpu = |cpus: &str| Cpu { cpus: Some(cpus.into()), ..Cpu::default() };
        let of = |cpus: &str| Demand::of(&cpu(cpus), &host);
        let of_online = |cpus: &str| Demand { offline: CpuNumbers::new(), ..of(cpus) };
        assert_eq!((of("1-2"), of_online("3-7")), (bound([1, 2]), bound([3])));
        assert_eq!((of(""), of_online("9")), (Demand::default(), Demand::default()));
        assert_eq!((of("3-5").offline, of("9").offline), ([4, 5].into(), [9].into()));
        let present = Present { possible: (0..6).collect(), usable: host };
        let check = |cpu: &Cpu| check(cpu, &present, &present).map_err(|error| error.to_string());
        for right in ["0-3", "", "3-4", "0-5", "4-5"] {
            assert_eq!(check(&cpu(right)), Ok(()), "{right}");
        }
        let long = "0,".repeat(4000);
        for wrong in ["4000", "3-6", "x", ",", &long] {
            let error = check(&cpu(wrong)).unwrap_err();
            assert!(error.contains("linux.resources.cpu.cpus") && error.contains("cpuset.cpus"), "{error}");
            assert!(error.len() < 400, "{error}");
            let mems = Cpu { mems: Some(wrong.into()), ..Cpu::default() };
            assert!(check(&mems).unwrap_err().contains("linux.resources.cpu.mems"));
        }
    }

    #[test]
    fn a_vcpu_has_the_number_of_its_processor() {
        let mut four = processors(4, 4);
        let demands = [bound([2, 3])];
        four.assign(&demands);
        assert_eq!(four.vcpus_of(&[2, 3].into()), [2, 3].into());
        let Affinities { vcpus, others } = four.affinities(&demands);
        assert_eq!(vcpus, [[2, 3].into(), [2, 3].into(), [2].into(), CpuNumbers::from([3])]);
        assert_eq!(others, [2, 3].into());
        // Another container may use all: the vCPUs that stand for no processor do as well.
        let demands = [bound([2, 3]), Demand::default()];
        let Affinities { vcpus, others } = four.affinities(&demands);
        assert_eq!((vcpus[0].len(), vcpus[2].len(), others.len()), (4, 1, 4));
        four.assign(&[Demand::default()]);
        assert!(!four.are_assigned());
    }

    #[test]
    fn a_processor_that_goes_offline_changes_its_own_vcpu_only() {
        let mut four = processors(4, 4);
        let [one, two] = ["1-2", "3"].map(|cpus| Cpu { cpus: Some(cpus.into()), ..Cpu::default() });
        let follow = |four: &mut Vcpus, host: CpuNumbers, limits: &[&Cpu]| {
            four.host = host;
            let demands: Vec<_> = limits.iter().map(|cpu| Demand::of(cpu, &four.host)).collect();
            four.assign(&demands);
            four.affinities(&demands).vcpus
        };
        let all: CpuNumbers = (0..4).collect();
        let before = follow(&mut four, all.clone(), &[&one, &two]);
        assert_eq!(before[1..], [[1].into(), [2].into(), CpuNumbers::from([3])]);
        // Its vCPU runs on what is left to the containers, and is no other processor's.
        let without = follow(&mut four, [0, 1, 3].into(), &[&one, &two]);
        assert_eq!(without[1..], [[1].into(), [1, 3].into(), CpuNumbers::from([3])]);
        let more = Cpu { cpus: Some("6".into()), ..Cpu::default() };
        follow(&mut four, [0, 1, 3, 6].into(), &[&one, &two, &more]);
        assert_eq!(four.vcpus_of(&[1, 2, 3, 6].into()), [0, 1, 2, 3].into());
        assert_eq!(four.vcpus_of(&[6].into()), [0].into());
        assert_eq!(follow(&mut four, all, &[&one, &two]), before);
        // Nobody names it any more.
        follow(&mut four, [0, 1, 3].into(), &[&two]);
        assert_eq!(four.vcpus_of(&[1, 2].into()), CpuNumbers::new());
    }

    #[test]
    fn a_processor_with_a_number_beyond_the_vcpus_has_one_nevertheless() {
        let mut four = processors(4, 128);
        four.assign(&[bound([64, 65])]);
        assert_eq!(four.vcpus_of(&[64, 65].into()), [0, 1].into());
        // What stands for a processor goes on doing so.
        four.assign(&[bound([65]), bound([1, 2])]);
        assert_eq!(four.vcpus_of(&[65].into()), [1].into());
        assert_eq!(four.vcpus_of(&[1, 2].into()), [0, 2].into());
    }

    #[test]
    fn a_vm_with_too_few_vcpus_shares_them() {
        let mut two = processors(2, 4);
        let demands = [bound([0, 1]), bound([2, 3])];
        two.assign(&demands);
        assert_eq!(two.vcpus_of(&[2, 3].into()), [0, 1].into());
        assert_eq!(two.affinities(&demands).vcpus, [CpuNumbers::from([0, 2]), [1, 3].into()]);
    }
}
