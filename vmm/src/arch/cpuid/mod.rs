//! The CPUID tables of the guest. They contain what KVM supports on this host and what the list in [`allowed`]
//! contains. The topology is that of the VM: one socket, with a core of one thread for each vCPU.
//!
//! A guest never gets virtualization or performance counters. There is no option for it.

mod allowed;

use std::fs;

use allowed::ALLOWED;
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

/// The first leaves of the classes of leaves. Each contains the number of the last leaf of its class.
const CLASSES: [u32; 3] = [0, 0x4000_0000, 0x8000_0000];
/// The bits of a leaf that select its class.
const CLASS: u32 = 0xc000_0000;

/// Why there is no CPUID table.
#[derive(Debug, thiserror::Error)]
pub enum CpuidError {
    #[error("cannot read from KVM which CPUID leaves it supports")]
    Supported(#[source] kvm_ioctls::Error),
    #[error("the guest's CPUID table has too many entries")]
    TooMany,
}

/// The leaves that KVM supports on this host. Reads a file of the host, so call this before the VMM enters its jail.
pub fn supported(kvm: &Kvm) -> Result<Vec<kvm_cpuid_entry2>, CpuidError> {
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(CpuidError::Supported)?;
    let mut supported = supported.as_slice().to_vec();
    if fs::read_to_string(CLOCK_SOURCES).is_ok_and(|sources| !has_stable_tsc(&sources)) {
        hide_invariant_tsc(&mut supported);
    }
    Ok(supported)
}

/// The clock sources that the host can use.
const CLOCK_SOURCES: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";

/// Linux leaves the time stamp counter out if it has found it unstable: processors count differently, or it stops.
fn has_stable_tsc(clock_sources: &str) -> bool {
    // Just after the host's boot, until the counter's frequency is known exactly, it is `tsc-early`.
    let is_tsc = |source: &str| matches!(source, "tsc" | "tsc-early" | "hyperv_clocksource_tsc_page");
    clock_sources.split_whitespace().any(is_tsc)
}

/// KVM lists the bit by the model of the processor, even if the host has found the counter unstable. Without it a guest
/// asks KVM's clock, which corrects the counter of each vCPU.
fn hide_invariant_tsc(table: &mut [kvm_cpuid_entry2]) {
    const INVARIANT_TSC: u32 = 1 << 8;
    let power = table.iter_mut().filter(|entry| entry.function == 0x8000_0007);
    power.for_each(|entry| entry.edx &= !INVARIANT_TSC);
}

/// The table of vCPU `id` of `count`.
pub fn for_vcpu(supported: &[kvm_cpuid_entry2], id: u8, count: u8) -> Result<CpuId, CpuidError> {
    let topology = Topology { id: id.into(), count: count.into() };
    let mut entries: Vec<_> = supported.iter().filter(|entry| entry.function != 0xb).copied().collect();
    for entry in &mut entries {
        topology.adapt(entry);
    }
    if supported.iter().any(|entry| entry.function == 0 && entry.eax >= 0xb) {
        entries.extend(topology.extended(0xb));
    }
    CpuId::from_entries(&only_allowed(&entries)).map_err(|_| CpuidError::TooMany)
}

/// Removes everything from a table that is not on the list. Adapts the numbers of the highest leaves and the sizes of
/// extended states to what is left. A table that contains only what is on the list stays the same.
pub fn only_allowed(table: &[kvm_cpuid_entry2]) -> Vec<kvm_cpuid_entry2> {
    let mut entries: Vec<_> = table.iter().filter_map(allowed_part).collect();
    lower_highest(&mut entries);
    set_state_sizes(&mut entries);
    entries
}

/// The part of an entry that is on the list. None if nothing of it is.
fn allowed_part(entry: &kvm_cpuid_entry2) -> Option<kvm_cpuid_entry2> {
    let masks = ALLOWED.iter().find(|leaf| leaf.is(entry))?.masks();
    let [eax, ebx, ecx, edx] = masks;
    let kvm_cpuid_entry2 { function, index, flags, .. } = *entry;
    let (eax, ebx, ecx, edx) = (entry.eax & eax, entry.ebx & ebx, entry.ecx & ecx, entry.edx & edx);
    Some(kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, ..Default::default() })
}

/// Sets the numbers of the highest leaves and subleaves to those that exist.
fn lower_highest(entries: &mut [kvm_cpuid_entry2]) {
    for class in CLASSES {
        let of_class = |entry: &&kvm_cpuid_entry2| entry.function & CLASS == class;
        let highest = entries.iter().filter(of_class).map(|entry| entry.function).max().unwrap_or(class);
        let first = entries.iter_mut().filter(|entry| entry.function == class);
        first.for_each(|entry| entry.eax = entry.eax.min(highest));
    }
    let features = |entry: &&kvm_cpuid_entry2| entry.function == 7;
    let highest = entries.iter().filter(features).map(|entry| entry.index).max().unwrap_or(0);
    let first = entries.iter_mut().filter(|entry| entry.function == 7 && entry.index == 0);
    first.for_each(|entry| entry.eax = entry.eax.min(highest));
}

/// Makes leaf 0xd consistent: it describes only the states in its first mask, and its sizes count only these. KVM
/// updates the sizes of enabled states whenever the guest enables a state.
fn set_state_sizes(entries: &mut Vec<kvm_cpuid_entry2>) {
    /// The size of the x87 and SSE states and of the XSAVE header, which always exist (Intel SDM, volume 1, 13.4).
    const FIRST_STATES: u32 = 512 + 64;
    const COMPACTED: u32 = 1 << 1 | 1 << 3;
    const ALIGNED: u32 = 1 << 1;
    let is = |entry: &kvm_cpuid_entry2, index| entry.function == 0xd && entry.index == index;
    let states = entries.iter().find(|entry| is(entry, 0)).map_or(0, |entry| entry.eax);
    let is_state = |entry: &kvm_cpuid_entry2| entry.function == 0xd && entry.index >= 2;
    entries.retain(|entry| !is_state(entry) || entry.index < 32 && states & 1 << entry.index != 0);
    let mut areas: Vec<_> = entries.iter().filter(|entry| is_state(entry)).copied().collect();
    areas.sort_by_key(|area| area.index);
    let end = |area: &kvm_cpuid_entry2| area.ebx.saturating_add(area.eax);
    let standard = areas.iter().map(end).fold(FIRST_STATES, u32::max);
    let compacted = areas.iter().fold(FIRST_STATES, |size, area| {
        let start = if area.ecx & ALIGNED == 0 { Some(size) } else { size.checked_next_multiple_of(64) };
        start.unwrap_or(u32::MAX).saturating_add(area.eax)
    });
    for entry in entries {
        if is(entry, 0) && states != 0 {
            (entry.ebx, entry.ecx) = (standard, standard);
        } else if is(entry, 1) {
            entry.ebx = if entry.eax & COMPACTED == 0 { 0 } else { compacted };
        }
    }
}

/// The part of a table that a running kernel relies on: the vendor, the features, and the layout of extended states.
/// The rest is about the current state of a vCPU, or about the speed of its host.
pub fn features(table: &[kvm_cpuid_entry2]) -> Vec<(u32, u32, [u32; 4])> {
    let relied_on = |entry: &kvm_cpuid_entry2| {
        let kvm_cpuid_entry2 { eax, ebx, ecx, edx, .. } = *entry;
        let kept = match entry.function {
            0 | 7 | 0x24 | 0x4000_0000 | 0x4000_0001 | 0x8000_0001 | 0x8000_0007 | 0x8000_0021 => {
                [eax, ebx, ecx, edx]
            }
            // EBX contains the APIC id.
            1 => [eax, 0, ecx, edx],
            // EBX contains the size of the states that are currently enabled.
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
    /// The id of the vCPU, which is that of its local APIC too.
    id: u32,
    /// The number of vCPUs.
    count: u32,
}

impl Topology {
    /// The number of bits of an APIC id that are the number of the core.
    fn core_bits(self) -> u32 {
        self.count.next_power_of_two().trailing_zeros()
    }

    /// The number of cores that share a cache, minus one. Bits 7:5 of `eax` are the level of the cache.
    fn sharers(self, eax: u32) -> u32 {
        const PRIVATE_LEVELS: u32 = 2;
        if (eax >> 5) & 7 <= PRIVATE_LEVELS { 0 } else { self.count - 1 }
    }

    /// Sets the topology in an entry (Intel SDM, volume 2, CPUID; AMD APM, volume 3, appendix E).
    fn adapt(self, entry: &mut kvm_cpuid_entry2) {
        match entry.function {
            1 => {
                const HYPERVISOR: u32 = 1 << 31;
                const TSC_DEADLINE: u32 = 1 << 24;
                const MULTI_CORE: u32 = 1 << 28;
                // KVM emulates the TSC deadline timer, but older versions do not list it here.
                entry.ecx |= HYPERVISOR | TSC_DEADLINE;
                entry.ebx = (entry.ebx & 0xffff) | (self.id << 24) | (self.count.next_power_of_two() << 16);
                entry.edx &= !MULTI_CORE;
                if self.count > 1 {
                    entry.edx |= MULTI_CORE;
                }
            }
            // Caches of Intel processors. An entry of zeros is the end of the list.
            4 if entry.eax & 0x1f != 0 => {
                entry.eax = (entry.eax & 0x3fff) | (self.sharers(entry.eax) << 14) | ((self.count - 1) << 26);
            }
            6 => {
                // The timer of the local APIC runs in every idle state. Without this bit Linux needs a PIT.
                const ALWAYS_RUNNING_TIMER: u32 = 1 << 2;
                entry.eax |= ALWAYS_RUNNING_TIMER;
            }
            0x8000_0008 => {
                entry.ecx = (entry.ecx & !0xf0ff) | (self.core_bits() << 12) | (self.count - 1);
            }
            // Caches of AMD processors.
            0x8000_001d if entry.eax & 0x1f != 0 => {
                entry.eax = (entry.eax & 0x3fff) | (self.sharers(entry.eax) << 14);
            }
            0x8000_001e => {
                // A core has one thread, and there is one node.
                (entry.eax, entry.ebx, entry.ecx) = (self.id, self.id, 0);
            }
            _ => {}
        }
    }

    /// The extended topology: a level of threads, a level of cores, and the end.
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

    #[test]
    fn a_counter_that_the_host_does_not_trust_is_not_shown_as_invariant() {
        assert!(
            has_stable_tsc("kvm-clock tsc acpi_pm \n")
                && has_stable_tsc("hyperv_clocksource_tsc_page acpi_pm\n")
        );
        assert!(!has_stable_tsc("hpet acpi_pm \n"));
        let mut table = [(0x8000_0007, 0x101), (0x8000_0008, 0x101)]
            .map(|(function, edx)| kvm_cpuid_entry2 { edx, ..leaf(function, 0) });
        hide_invariant_tsc(&mut table);
        assert_eq!(table.map(|entry| entry.edx), [1, 0x101]);
    }

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

    const INTEL: &[u8; 12] = b"GenuineIntel";
    const AMD: &[u8; 12] = b"AuthenticAMD";
    const EAX: usize = 0;
    const EBX: usize = 1;
    const ECX: usize = 2;
    const EDX: usize = 3;

    fn registers(entry: &kvm_cpuid_entry2) -> [u32; 4] {
        [entry.eax, entry.ebx, entry.ecx, entry.edx]
    }

    /// A host with every bit of every leaf set, and with the extended states of real processors.
    fn everything(vendor: &[u8; 12]) -> Vec<kvm_cpuid_entry2> {
        // The size, the offset and the alignment of each state. PT and CET are not in the standard format.
        const STATES: [(u32, [u32; 3]); 12] = [
            (2, [256, 576, 0]),
            (3, [64, 960, 0]),
            (4, [64, 1024, 0]),
            (5, [64, 1088, 0]),
            (6, [512, 1152, 0]),
            (7, [1024, 1664, 0]),
            (8, [128, 0, 1]),
            (9, [8, 2688, 0]),
            (11, [16, 0, 1]),
            (12, [24, 0, 1]),
            (17, [64, 2752, 2]),
            (18, [8192, 2816, 6]),
        ];
        let classes =
            [0..=0x40, 0x4000_0000..=0x4000_0110, 0x8000_0000..=0x8000_0040, 0xc000_0000..=0xc000_0004];
        let ones = |function, index| kvm_cpuid_entry2 {
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: u32::MAX,
            ebx: u32::MAX,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..leaf(function, index)
        };
        let mut table: Vec<_> = classes
            .into_iter()
            .flatten()
            .flat_map(|function| (0..64).map(move |index| ones(function, index)))
            .collect();
        for entry in &mut table {
            let word = |at: usize| u32::from_le_bytes(vendor[at..at + 4].try_into().unwrap());
            match (entry.function, entry.index) {
                (0 | 0x8000_0000, 0) => (entry.ebx, entry.edx, entry.ecx) = (word(0), word(4), word(8)),
                (0xd, index @ 2..) => {
                    let state = STATES.iter().find(|(number, _)| *number == index);
                    let [size, offset, flags] = state.map_or([0; 3], |(_, state)| *state);
                    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (size, offset, flags, 0);
                }
                _ => {}
            }
        }
        table
    }

    #[test]
    fn a_guest_sees_what_is_listed_and_nothing_else() {
        for vendor in [INTEL, AMD] {
            let shown = for_vcpu(&everything(vendor), 1, 2).unwrap().as_slice().to_vec();
            for entry in &shown {
                let (function, index) = (entry.function, entry.index);
                let listed = ALLOWED.iter().find(|leaf| leaf.is(entry));
                let masks = listed.unwrap_or_else(|| panic!("{function:#x}.{index} is not listed")).masks();
                for (register, mask) in registers(entry).into_iter().zip(masks) {
                    assert_eq!(register & !mask, 0, "{function:#x}.{index}: {register:#x}, not {mask:#x}");
                }
                let same = shown.iter().filter(|other| (other.function, other.index) == (function, index));
                assert_eq!(same.count(), 1, "{function:#x}.{index} comes once");
            }
            for leaf in ALLOWED {
                let entry = shown.iter().find(|entry| leaf.is(entry));
                let entry = entry.unwrap_or_else(|| panic!("{:#x} is missing", leaf.function));
                for field in leaf.fields.iter().filter(|field| field.first == field.last) {
                    // In this host only the state of AMX is aligned.
                    let is_set = registers(entry)[field.register as usize] >> field.first & 1 != 0;
                    let is_flag_of_state = leaf.function == 0xd && entry.index >= 2;
                    assert!(is_set || is_flag_of_state, "{:#x}: {} is missing", leaf.function, field.name);
                }
            }
        }
    }

    #[test]
    fn a_guest_sees_no_virtualization_no_counters_and_no_secrets_of_the_host() {
        const HIDDEN: &[(u32, u32, usize, u32, &str)] = &[
            (1, 0, ECX, 2, "DTES64"),
            (1, 0, ECX, 3, "MONITOR"),
            (1, 0, ECX, 4, "DS_CPL"),
            (1, 0, ECX, 5, "VMX"),
            (1, 0, ECX, 6, "SMX"),
            (1, 0, ECX, 15, "PDCM"),
            (1, 0, EDX, 21, "DS"),
            (6, 0, ECX, 0, "APERFMPERF"),
            (7, 0, EBX, 2, "SGX"),
            (7, 0, EBX, 12, "RDT_M"),
            (7, 0, EBX, 15, "RDT_A"),
            (7, 0, EBX, 25, "INTEL_PT"),
            (7, 0, ECX, 5, "WAITPKG"),
            (7, 0, ECX, 30, "SGX_LC"),
            (7, 0, EDX, 19, "ARCH_LBR"),
            (7, 0, EDX, 24, "AMX_TILE"),
            (0xd, 0, EAX, 17, "XTILECFG"),
            (0xd, 1, EAX, 4, "XFD"),
            (0xd, 1, ECX, 8, "PT's state"),
            (0x4000_0001, 0, EAX, 10, "ASYNC_PF_VMEXIT"),
            (0x8000_0001, 0, ECX, 2, "SVM"),
            (0x8000_0001, 0, ECX, 10, "IBS"),
            (0x8000_0001, 0, ECX, 12, "SKINIT"),
            (0x8000_0001, 0, ECX, 15, "LWP"),
            (0x8000_0001, 0, ECX, 23, "PERFCTR_CORE"),
            (0x8000_0001, 0, ECX, 24, "PERFCTR_NB"),
            (0x8000_0001, 0, ECX, 28, "PERFCTR_L2I"),
            (0x8000_0008, 0, EBX, 1, "IRPERF"),
            (0x8000_0008, 0, EBX, 4, "RDPRU"),
        ];
        const GONE: &[u32] = &[
            5,
            0xa,
            0xf,
            0x10,
            0x12,
            0x14,
            0x1c,
            0x1f,
            0x4000_0002,
            0x4000_0010,
            0x4000_0100,
            0x8000_000a,
            0x8000_001b,
            0x8000_001f,
            0x8000_0020,
            0x8000_0022,
            0xc000_0000,
        ];
        for vendor in [INTEL, AMD] {
            let shown = for_vcpu(&everything(vendor), 0, 1).unwrap().as_slice().to_vec();
            for (function, index, register, bit, name) in HIDDEN {
                let value = registers(&find(&shown, *function, *index))[*register];
                assert_eq!(value >> bit & 1, 0, "{name}");
            }
            for function in GONE {
                assert!(shown.iter().all(|entry| entry.function != *function), "{function:#x}");
            }
        }
    }

    #[test]
    fn a_guest_has_what_makes_it_fast_and_safe() {
        const NEEDED: &[(u32, u32, usize, &[u32])] = &[
            // PCID, x2APIC, TSC_DEADLINE, AES, XSAVE, AVX, RDRAND.
            (1, 0, ECX, &[17, 21, 24, 25, 26, 28, 30]),
            (6, 0, EAX, &[2]),
            // FSGSBASE, AVX2, SMEP, ERMS, INVPCID, AVX512F, SMAP, SHA.
            (7, 0, EBX, &[0, 5, 7, 9, 10, 16, 20, 29]),
            // UMIP, PKU.
            (7, 0, ECX, &[2, 3]),
            // FSRM, MD_CLEAR, SPEC_CTRL, STIBP, L1D_FLUSH, ARCH_CAPABILITIES, SSBD.
            (7, 0, EDX, &[4, 10, 26, 27, 28, 29, 31]),
            // CLOCKSOURCE2, ASYNC_PF_INT, CLOCKSOURCE_STABLE.
            (0x4000_0001, 0, EAX, &[3, 14, 24]),
            (0x8000_0001, 0, EDX, &[27]),
            (0x8000_0007, 0, EDX, &[8]),
            // IBPB, IBRS, STIBP, SSBD.
            (0x8000_0008, 0, EBX, &[12, 14, 15, 24]),
        ];
        let shown = for_vcpu(&everything(INTEL), 0, 1).unwrap().as_slice().to_vec();
        for (function, index, register, bits) in NEEDED {
            let value = registers(&find(&shown, *function, *index))[*register];
            for bit in *bits {
                assert_ne!(value >> bit & 1, 0, "{function:#x}.{index}, register {register}, bit {bit}");
            }
        }
    }

    #[test]
    fn the_highest_leaves_are_those_that_are_there() {
        let shown = only_allowed(&everything(AMD));
        assert_eq!(find(&shown, 0, 0).eax, 0x24);
        assert_eq!(find(&shown, 7, 0).eax, 2);
        assert_eq!(find(&shown, 0x4000_0000, 0).eax, 0x4000_0001);
        assert_eq!(find(&shown, 0x8000_0000, 0).eax, 0x8000_0021);
        // They are not increased either.
        let mut host = everything(AMD);
        host.retain(|entry| !(entry.function == 0x24 || entry.function == 7 && entry.index > 0));
        let shown = only_allowed(&host);
        assert_eq!((find(&shown, 0, 0).eax, find(&shown, 7, 0).eax), (0xd, 0));
        host.iter_mut().filter(|entry| entry.function == 0).for_each(|entry| entry.eax = 7);
        assert_eq!(find(&only_allowed(&host), 0, 0).eax, 7);
    }

    #[test]
    fn the_sizes_of_states_are_those_of_the_listed_ones() {
        let shown = only_allowed(&everything(INTEL));
        let first = find(&shown, 0xd, 0);
        // x87, SSE, AVX, the three states of AVX-512, and PKRU. The last ends at 2696.
        assert_eq!(registers(&first), [0x2e7, 2696, 2696, 0]);
        assert_eq!(registers(&find(&shown, 0xd, 1)), [0xf, 576 + 256 + 64 + 512 + 1024 + 8, 0, 0]);
        let states: Vec<_> =
            shown.iter().filter(|entry| entry.function == 0xd).map(|entry| entry.index).collect();
        assert_eq!(states, [0, 1, 2, 5, 6, 7, 9]);
        // A host without AVX-512. When compacted, PKRU starts at a multiple of 64 there.
        let mut host = everything(AMD);
        for entry in host.iter_mut().filter(|entry| entry.function == 0xd) {
            match entry.index {
                0 => entry.eax = 0x207,
                2 => entry.eax = 250,
                9 => (entry.ebx, entry.ecx) = (832, 2),
                _ => {}
            }
        }
        let shown = only_allowed(&host);
        assert_eq!(registers(&find(&shown, 0xd, 0)), [0x207, 840, 840, 0]);
        assert_eq!(find(&shown, 0xd, 1).ebx, 832 + 8);
        assert!(shown.iter().all(|entry| entry.function != 0xd || ![5, 6, 7].contains(&entry.index)));
    }

    #[test]
    fn a_table_that_was_saved_stays_the_same_and_gains_nothing() {
        let shown = for_vcpu(&everything(INTEL), 2, 3).unwrap().as_slice().to_vec();
        let plain = |table: &[kvm_cpuid_entry2]| {
            table.iter().map(|entry| (entry.function, entry.index, registers(entry))).collect::<Vec<_>>()
        };
        assert_eq!(plain(&only_allowed(&shown)), plain(&shown));
        let mut damaged = shown.clone();
        damaged.iter_mut().filter(|entry| entry.function == 1).for_each(|entry| entry.ecx |= 1 << 5);
        damaged.push(kvm_cpuid_entry2 { eax: 1, ebx: 8, ..leaf(0x8000_000a, 0) });
        damaged.push(kvm_cpuid_entry2 { eax: u32::MAX, ecx: 2, ..leaf(0xd, 33) });
        assert_ne!(features(&damaged), features(&shown), "a clone is refused");
        assert_eq!(plain(&only_allowed(&damaged)), plain(&shown));
    }

    #[test]
    fn a_saved_vm_is_refused_where_a_feature_is_another() {
        let host = everything(AMD);
        let of = |host: &[kvm_cpuid_entry2], id| features(for_vcpu(host, id, 4).unwrap().as_slice());
        assert_eq!(of(&host, 0), of(&host, 3), "vCPUs differ in their topology alone");
        let cleared = [
            (1, 0, ECX, 28),
            (7, 1, EAX, 4),
            (0xd, 0, EAX, 9),
            (0x4000_0001, 0, EAX, 14),
            (0x8000_0007, 0, EDX, 8),
            (0x8000_0021, 0, EAX, 8),
        ];
        for (function, index, register, bit) in cleared {
            let mut other = host.clone();
            let entry = other.iter_mut().find(|entry| (entry.function, entry.index) == (function, index));
            let entry = entry.unwrap();
            let registers = [&mut entry.eax, &mut entry.ebx, &mut entry.ecx, &mut entry.edx];
            *registers.into_iter().nth(register).unwrap() &= !(1 << bit);
            assert_ne!(of(&other, 0), of(&host, 0), "{function:#x}.{index}");
        }
        // Differences that no guest sees do not matter.
        let mut other = host.clone();
        other.retain(|entry| ![0xa, 0x8000_000a].contains(&entry.function));
        other.iter_mut().filter(|entry| entry.function == 1).for_each(|entry| entry.ecx &= !(1 << 5));
        assert_eq!(of(&other, 0), of(&host, 0));
    }

    #[test]
    fn the_documentation_shows_the_list() {
        let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/security.md");
        let document = std::fs::read_to_string(document).unwrap();
        let section = document.split("\n## ").find(|section| section.starts_with("What CPUID shows"));
        let rows: Vec<_> = section
            .expect("the section")
            .lines()
            .filter(|line| line.starts_with("| `"))
            .map(str::to_owned)
            .collect();
        let listed: Vec<_> = ALLOWED.iter().flat_map(allowed::Leaf::rows).collect();
        assert!(
            rows == listed,
            "docs/security.md, What CPUID shows, needs these rows:\n{}",
            listed.join("\n")
        );
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
