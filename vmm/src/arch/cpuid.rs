//! What CPUID answers in the guest: what KVM supports on this host, with the VM's own topology: one socket, a
//! core for each vCPU, one thread a core.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

/// KVM does not say what it supports.
#[derive(Debug, thiserror::Error)]
pub enum CpuidError {
    #[error("KVM does not say which CPUID leaves it supports")]
    Supported(#[source] kvm_ioctls::Error),
    #[error("the guest's CPUID table has too many entries")]
    TooMany,
}

/// Asks KVM what a vCPU can have on this host.
pub fn supported(kvm: &Kvm) -> Result<Vec<kvm_cpuid_entry2>, CpuidError> {
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(CpuidError::Supported)?;
    Ok(supported.as_slice().to_vec())
}

/// The table of vCPU `id` of `count`.
pub fn for_vcpu(supported: &[kvm_cpuid_entry2], id: u8, count: u8) -> Result<CpuId, CpuidError> {
    let topology = Topology { id: id.into(), count: count.into() };
    let mut entries: Vec<_> =
        supported.iter().filter(|entry| !matches!(entry.function, 0xb | 0x1f)).copied().collect();
    for entry in &mut entries {
        topology.adapt(entry);
    }
    if supported.iter().any(|entry| entry.function == 0 && entry.eax >= 0xb) {
        entries.extend(topology.extended(0xb));
    }
    CpuId::from_entries(&entries).map_err(|_| CpuidError::TooMany)
}

/// What a kernel may have come to rely on at its start: the vendor, the features, and what an extended state is made of. The
/// rest says where the vCPU was just then, or how fast its host is.
pub fn features(table: &[kvm_cpuid_entry2]) -> Vec<(u32, u32, [u32; 4])> {
    let relied_on = |entry: &kvm_cpuid_entry2| {
        let kvm_cpuid_entry2 { eax, ebx, ecx, edx, .. } = *entry;
        let kept = match entry.function {
            0 | 7 | 0x4000_0000 | 0x4000_0001 | 0x8000_0001 => [eax, ebx, ecx, edx],
            // Without the APIC's id.
            1 => [eax, 0, ecx, edx],
            // Without the size of what is enabled just now.
            0xd => [eax, 0, ecx, edx],
            0x8000_0008 => [eax, ebx, 0, 0],
            _ => return None,
        };
        Some((entry.function, entry.index, kept))
    };
    table.iter().filter_map(relied_on).collect()
}

#[derive(Clone, Copy)]
struct Topology {
    /// Of the vCPU, and of its local APIC.
    id: u32,
    /// vCPUs in all.
    count: u32,
}

impl Topology {
    /// Bits of an APIC id that tell the cores of the socket apart.
    fn core_bits(self) -> u32 {
        self.count.next_power_of_two().trailing_zeros()
    }

    /// Cache level, in bits 7:5 of the leaves that describe caches, to the number of cores that share it,
    /// less one.
    fn sharers(self, eax: u32) -> u32 {
        const PRIVATE_LEVELS: u32 = 2;
        if (eax >> 5) & 7 <= PRIVATE_LEVELS { 0 } else { self.count - 1 }
    }

    /// Fields as in Intel's SDM, volume 2, CPUID, and AMD's APM, volume 3, appendix E.
    fn adapt(self, entry: &mut kvm_cpuid_entry2) {
        match entry.function {
            1 => {
                const HYPERVISOR: u32 = 1 << 31;
                const TSC_DEADLINE: u32 = 1 << 24;
                const MULTI_CORE: u32 = 1 << 28;
                // KVM emulates the deadline timer, but older ones do not list it here.
                entry.ecx |= HYPERVISOR | TSC_DEADLINE;
                entry.ebx = (entry.ebx & 0xffff) | (self.id << 24) | (self.count.next_power_of_two() << 16);
                entry.edx &= !MULTI_CORE;
                if self.count > 1 {
                    entry.edx |= MULTI_CORE;
                }
            }
            // Intel's caches; all zero where there is none.
            4 if entry.eax & 0x1f != 0 => {
                entry.eax = (entry.eax & 0x3fff) | (self.sharers(entry.eax) << 14) | ((self.count - 1) << 26);
            }
            6 => {
                // The timer goes on in every idle state: without this Linux wants a PIT besides.
                const ALWAYS_RUNNING_TIMER: u32 = 1 << 2;
                entry.eax |= ALWAYS_RUNNING_TIMER;
            }
            0x8000_0008 => {
                entry.ecx = (entry.ecx & !0xf0ff) | (self.core_bits() << 12) | (self.count - 1);
            }
            // AMD's caches.
            0x8000_001d if entry.eax & 0x1f != 0 => {
                entry.eax = (entry.eax & 0x3fff) | (self.sharers(entry.eax) << 14);
            }
            0x8000_001e => {
                // One thread a core, one node.
                (entry.eax, entry.ebx, entry.ecx) = (self.id, self.id, 0);
            }
            _ => {}
        }
    }

    /// Extended topology: a level of threads, a level of cores and the end.
    fn extended(self, function: u32) -> [kvm_cpuid_entry2; 3] {
        const THREADS: u32 = 1 << 8;
        const CORES: u32 = 2 << 8;
        let level = |index, bits, below, kind| kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: bits,
            ebx: below,
            ecx: index | kind,
            edx: self.id,
            ..Default::default()
        };
        [level(0, 0, 1, THREADS), level(1, self.core_bits(), self.count, CORES), level(2, 0, 0, 0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, ..Default::default() }
    }

    fn table(id: u8, count: u8) -> Vec<kvm_cpuid_entry2> {
        let host = [
            kvm_cpuid_entry2 { eax: 0xd, ..leaf(0, 0) },
            kvm_cpuid_entry2 { ebx: 0x0710_0800, ..leaf(1, 0) },
            kvm_cpuid_entry2 { eax: 0xfc00_0121, ..leaf(4, 0) },
            kvm_cpuid_entry2 { eax: 0xfc03_c163, ..leaf(4, 3) },
            leaf(6, 0),
            kvm_cpuid_entry2 { edx: 99, ..leaf(0xb, 0) },
            kvm_cpuid_entry2 { edx: 99, ..leaf(0x1f, 0) },
            kvm_cpuid_entry2 { ecx: 0x703f, ..leaf(0x8000_0008, 0) },
        ];
        for_vcpu(&host, id, count).unwrap().as_slice().to_vec()
    }

    fn find(table: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *table.iter().find(|entry| entry.function == function && entry.index == index).unwrap()
    }

    #[test]
    fn a_vcpu_knows_that_it_is_one_and_who_it_is() {
        let table = table(1, 2);
        let features = find(&table, 1, 0);
        assert_eq!(features.ebx, 0x0102_0800);
        assert_ne!(features.ecx & (1 << 31), 0, "hypervisor");
        assert_ne!(features.ecx & (1 << 24), 0, "TSC deadline");
        assert_ne!(features.edx & (1 << 28), 0, "more than one core");
        assert_ne!(find(&table, 6, 0).eax & 4, 0, "ARAT");
    }

    #[test]
    fn the_hosts_topology_does_not_show() {
        let table = table(2, 3);
        assert!(table.iter().all(|entry| entry.edx != 99));
        assert_eq!(table.iter().filter(|entry| entry.function == 0xb).count(), 3);
        let cores = find(&table, 0xb, 1);
        assert_eq!((cores.eax, cores.ebx, cores.edx), (2, 3, 2));
        assert_eq!(find(&table, 4, 0).eax, 0x0800_0121, "first level: private, three cores");
        assert_eq!(find(&table, 4, 3).eax, 0x0800_8163, "third level: shared by three");
        assert_eq!(find(&table, 0x8000_0008, 0).ecx, 0x2002);
    }

    #[test]
    fn one_vcpu_is_alone() {
        let table = table(0, 1);
        assert_eq!(find(&table, 1, 0).ebx, 0x0001_0800);
        assert_eq!(find(&table, 1, 0).edx, 0);
        assert_eq!(find(&table, 0xb, 1).eax, 0);
    }
}
