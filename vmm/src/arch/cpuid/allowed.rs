//! The leaves, registers and bits of CPUID that a guest may see, with their names. Everything else is zero in the
//! guest, including what later processors and later versions of KVM add.
//!
//! KVM decides what of this list the host has. Names and positions are those of Intel's SDM, volume 2, CPUID, of
//! AMD's APM, volume 3, appendix E, and of Linux, Documentation/virt/kvm/x86/cpuid.rst. docs/security.md shows the
//! same list.

use kvm_bindings::kvm_cpuid_entry2;

/// A leaf or subleaf of CPUID, and the fields that a guest sees.
pub(super) struct Leaf {
    pub(super) function: u32,
    pub(super) subleaf: Subleaf,
    pub(super) fields: &'static [Field],
}

/// The value of ECX that selects the subleaf.
#[derive(Clone, Copy)]
pub(super) enum Subleaf {
    /// The leaf has no subleaves.
    None,
    /// Only this subleaf.
    One(u32),
    /// Every subleaf has these fields.
    Every,
}

/// A field of a register.
pub(super) struct Field {
    pub(super) register: Register,
    pub(super) first: u32,
    pub(super) last: u32,
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "for whoever reads the list, here and in the documentation")
    )]
    pub(super) name: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

use Register::{Eax, Ebx, Ecx, Edx};

/// A bit.
const fn bit(register: Register, position: u32, name: &'static str) -> Field {
    Field { register, first: position, last: position, name }
}

/// A number.
const fn bits(register: Register, first: u32, last: u32, name: &'static str) -> Field {
    Field { register, first, last, name }
}

/// A register that is a single field.
const fn whole(register: Register, name: &'static str) -> Field {
    Field { register, first: 0, last: 31, name }
}

const fn leaf(function: u32, fields: &'static [Field]) -> Leaf {
    Leaf { function, subleaf: Subleaf::None, fields }
}

const fn subleaf(function: u32, index: u32, fields: &'static [Field]) -> Leaf {
    Leaf { function, subleaf: Subleaf::One(index), fields }
}

const fn every_subleaf(function: u32, fields: &'static [Field]) -> Leaf {
    Leaf { function, subleaf: Subleaf::Every, fields }
}

/// The subleaf of leaf 0xd that describes an XSAVE state component.
const fn state(feature: u32) -> Leaf {
    const FIELDS: &[Field] =
        &[whole(Eax, "size"), whole(Ebx, "offset"), bit(Ecx, 1, "aligned to 64 bytes when compacted")];
    subleaf(0xd, feature, FIELDS)
}

impl Leaf {
    /// The visible bits of EAX, EBX, ECX and EDX.
    pub(super) fn masks(&self) -> [u32; 4] {
        let mut masks = [0; 4];
        for field in self.fields {
            masks[field.register as usize] |= field.mask();
        }
        masks
    }

    /// Whether the entry is of this leaf or subleaf.
    pub(super) fn is(&self, entry: &kvm_cpuid_entry2) -> bool {
        let has_index = match self.subleaf {
            Subleaf::None => entry.index == 0,
            Subleaf::One(index) => entry.index == index,
            Subleaf::Every => true,
        };
        entry.function == self.function && has_index
    }
}

impl Field {
    fn mask(&self) -> u32 {
        u32::MAX >> (31 - self.last) & u32::MAX << self.first
    }
}

/// The list.
pub(super) const ALLOWED: &[Leaf] = &[
    leaf(
        0,
        &[whole(Eax, "highest basic leaf"), whole(Ebx, "vendor"), whole(Ecx, "vendor"), whole(Edx, "vendor")],
    ),
    leaf(
        1,
        &[
            bits(Eax, 0, 27, "family, model, stepping"),
            bits(Ebx, 0, 7, "brand"),
            bits(Ebx, 8, 15, "cache line of CLFLUSH"),
            bits(Ebx, 16, 23, "logical processors"),
            bits(Ebx, 24, 31, "local APIC's id"),
            bit(Ecx, 0, "SSE3"),
            bit(Ecx, 1, "PCLMULQDQ"),
            bit(Ecx, 9, "SSSE3"),
            bit(Ecx, 12, "FMA"),
            bit(Ecx, 13, "CMPXCHG16B"),
            bit(Ecx, 17, "PCID"),
            bit(Ecx, 19, "SSE4.1"),
            bit(Ecx, 20, "SSE4.2"),
            bit(Ecx, 21, "x2APIC"),
            bit(Ecx, 22, "MOVBE"),
            bit(Ecx, 23, "POPCNT"),
            bit(Ecx, 24, "TSC_DEADLINE"),
            bit(Ecx, 25, "AES"),
            bit(Ecx, 26, "XSAVE"),
            // KVM sets it while the guest has CR4.OSXSAVE set.
            bit(Ecx, 27, "OSXSAVE"),
            bit(Ecx, 28, "AVX"),
            bit(Ecx, 29, "F16C"),
            bit(Ecx, 30, "RDRAND"),
            bit(Ecx, 31, "HYPERVISOR"),
            bit(Edx, 0, "FPU"),
            bit(Edx, 1, "VME"),
            bit(Edx, 2, "DE"),
            bit(Edx, 3, "PSE"),
            bit(Edx, 4, "TSC"),
            bit(Edx, 5, "MSR"),
            bit(Edx, 6, "PAE"),
            bit(Edx, 7, "MCE"),
            bit(Edx, 8, "CMPXCHG8B"),
            bit(Edx, 9, "APIC"),
            bit(Edx, 11, "SEP"),
            bit(Edx, 12, "MTRR"),
            bit(Edx, 13, "PGE"),
            bit(Edx, 14, "MCA"),
            bit(Edx, 15, "CMOV"),
            bit(Edx, 16, "PAT"),
            bit(Edx, 17, "PSE36"),
            bit(Edx, 19, "CLFLUSH"),
            bit(Edx, 23, "MMX"),
            bit(Edx, 24, "FXSR"),
            bit(Edx, 25, "SSE"),
            bit(Edx, 26, "SSE2"),
            bit(Edx, 27, "SELFSNOOP"),
            bit(Edx, 28, "HTT"),
        ],
    ),
    // Intel's caches and TLBs.
    leaf(
        2,
        &[
            whole(Eax, "descriptors"),
            whole(Ebx, "descriptors"),
            whole(Ecx, "descriptors"),
            whole(Edx, "descriptors"),
        ],
    ),
    // Intel's caches.
    every_subleaf(
        4,
        &[
            bits(Eax, 0, 4, "type of cache"),
            bits(Eax, 5, 7, "level"),
            bits(Eax, 8, 9, "self-initializing, fully associative"),
            bits(Eax, 14, 25, "processors that share it"),
            bits(Eax, 26, 31, "cores"),
            whole(Ebx, "line size, partitions, ways"),
            whole(Ecx, "sets"),
            bits(Edx, 0, 2, "WBINVD, inclusive, indexing"),
        ],
    ),
    // Leaf 6 shows no power or thermal management, and no APERF and MPERF.
    leaf(6, &[bit(Eax, 2, "ARAT")]),
    subleaf(
        7,
        0,
        &[
            whole(Eax, "highest subleaf"),
            bit(Ebx, 0, "FSGSBASE"),
            bit(Ebx, 1, "TSC_ADJUST"),
            bit(Ebx, 3, "BMI1"),
            bit(Ebx, 4, "HLE"),
            bit(Ebx, 5, "AVX2"),
            bit(Ebx, 6, "FDP_EXCPTN_ONLY"),
            bit(Ebx, 7, "SMEP"),
            bit(Ebx, 8, "BMI2"),
            bit(Ebx, 9, "ERMS"),
            bit(Ebx, 10, "INVPCID"),
            bit(Ebx, 11, "RTM"),
            bit(Ebx, 13, "ZERO_FCS_FDS"),
            bit(Ebx, 16, "AVX512F"),
            bit(Ebx, 17, "AVX512DQ"),
            bit(Ebx, 18, "RDSEED"),
            bit(Ebx, 19, "ADX"),
            bit(Ebx, 20, "SMAP"),
            bit(Ebx, 21, "AVX512_IFMA"),
            bit(Ebx, 23, "CLFLUSHOPT"),
            bit(Ebx, 24, "CLWB"),
            bit(Ebx, 26, "AVX512PF"),
            bit(Ebx, 27, "AVX512ER"),
            bit(Ebx, 28, "AVX512CD"),
            bit(Ebx, 29, "SHA"),
            bit(Ebx, 30, "AVX512BW"),
            bit(Ebx, 31, "AVX512VL"),
            bit(Ecx, 1, "AVX512_VBMI"),
            bit(Ecx, 2, "UMIP"),
            bit(Ecx, 3, "PKU"),
            // KVM sets it while the guest has CR4.PKE set.
            bit(Ecx, 4, "OSPKE"),
            bit(Ecx, 6, "AVX512_VBMI2"),
            bit(Ecx, 8, "GFNI"),
            bit(Ecx, 9, "VAES"),
            bit(Ecx, 10, "VPCLMULQDQ"),
            bit(Ecx, 11, "AVX512_VNNI"),
            bit(Ecx, 12, "AVX512_BITALG"),
            bit(Ecx, 14, "AVX512_VPOPCNTDQ"),
            bit(Ecx, 16, "LA57"),
            bit(Ecx, 22, "RDPID"),
            bit(Ecx, 24, "BUS_LOCK_DETECT"),
            bit(Ecx, 25, "CLDEMOTE"),
            bit(Ecx, 27, "MOVDIRI"),
            bit(Ecx, 28, "MOVDIR64B"),
            bit(Edx, 2, "AVX512_4VNNIW"),
            bit(Edx, 3, "AVX512_4FMAPS"),
            bit(Edx, 4, "FSRM"),
            bit(Edx, 8, "AVX512_VP2INTERSECT"),
            bit(Edx, 10, "MD_CLEAR"),
            bit(Edx, 14, "SERIALIZE"),
            bit(Edx, 16, "TSXLDTRK"),
            bit(Edx, 23, "AVX512_FP16"),
            bit(Edx, 26, "SPEC_CTRL"),
            bit(Edx, 27, "STIBP"),
            bit(Edx, 28, "L1D_FLUSH"),
            bit(Edx, 29, "ARCH_CAPABILITIES"),
            bit(Edx, 31, "SSBD"),
        ],
    ),
    subleaf(
        7,
        1,
        &[
            bit(Eax, 0, "SHA512"),
            bit(Eax, 1, "SM3"),
            bit(Eax, 2, "SM4"),
            bit(Eax, 4, "AVX_VNNI"),
            bit(Eax, 5, "AVX512_BF16"),
            bit(Eax, 7, "CMPCCXADD"),
            bit(Eax, 10, "FZRM"),
            bit(Eax, 11, "FSRS"),
            bit(Eax, 12, "FSRC"),
            bit(Eax, 23, "AVX_IFMA"),
            bit(Edx, 4, "AVX_VNNI_INT8"),
            bit(Edx, 5, "AVX_NE_CONVERT"),
            bit(Edx, 10, "AVX_VNNI_INT16"),
            bit(Edx, 14, "PREFETCHI"),
            bit(Edx, 19, "AVX10"),
        ],
    ),
    subleaf(
        7,
        2,
        &[
            bit(Edx, 0, "PSFD"),
            bit(Edx, 1, "IPRED_CTRL"),
            bit(Edx, 2, "RRSBA_CTRL"),
            bit(Edx, 3, "DDPD_U"),
            bit(Edx, 4, "BHI_CTRL"),
            bit(Edx, 5, "MCDT_NO"),
        ],
    ),
    // The topology of the VM. Leaf 0x1f, which has the same contents, is absent.
    every_subleaf(
        0xb,
        &[
            bits(Eax, 0, 4, "bits of the APIC id below"),
            bits(Ebx, 0, 15, "processors of this level"),
            bits(Ecx, 0, 7, "subleaf"),
            bits(Ecx, 8, 15, "type of level"),
            whole(Edx, "x2APIC's id"),
        ],
    ),
    // AMX is absent, because a process must request it from the host and the VMM does not. Supervisor states are
    // absent.
    subleaf(
        0xd,
        0,
        &[
            bit(Eax, 0, "x87"),
            bit(Eax, 1, "SSE"),
            bit(Eax, 2, "AVX"),
            bit(Eax, 5, "opmask"),
            bit(Eax, 6, "ZMM_Hi256"),
            bit(Eax, 7, "Hi16_ZMM"),
            bit(Eax, 9, "PKRU"),
            whole(Ebx, "size of what is enabled"),
            whole(Ecx, "size of all"),
        ],
    ),
    subleaf(
        0xd,
        1,
        &[
            bit(Eax, 0, "XSAVEOPT"),
            bit(Eax, 1, "XSAVEC"),
            bit(Eax, 2, "XGETBV1"),
            bit(Eax, 3, "XSAVES"),
            whole(Ebx, "size of what is enabled, compacted"),
        ],
    ),
    state(2),
    state(5),
    state(6),
    state(7),
    state(9),
    subleaf(
        0x24,
        0,
        &[
            bits(Ebx, 0, 7, "version of AVX10"),
            bit(Ebx, 16, "AVX10_128"),
            bit(Ebx, 17, "AVX10_256"),
            bit(Ebx, 18, "AVX10_512"),
        ],
    ),
    leaf(
        0x4000_0000,
        &[
            whole(Eax, "highest leaf of the hypervisor"),
            whole(Ebx, "KVMKVMKVM"),
            whole(Ecx, "KVMKVMKVM"),
            whole(Edx, "KVMKVMKVM"),
        ],
    ),
    // The features of KVM that our kernel uses. Absent are those for a hypervisor in the guest (ASYNC_PF_VMEXIT), for
    // other idle loops (POLL_CONTROL), and for older kernels (CLOCKSOURCE).
    leaf(
        0x4000_0001,
        &[
            bit(Eax, 1, "NOP_IO_DELAY"),
            bit(Eax, 3, "CLOCKSOURCE2"),
            bit(Eax, 4, "ASYNC_PF"),
            bit(Eax, 5, "STEAL_TIME"),
            bit(Eax, 6, "PV_EOI"),
            bit(Eax, 7, "PV_UNHALT"),
            bit(Eax, 9, "PV_TLB_FLUSH"),
            bit(Eax, 11, "PV_SEND_IPI"),
            bit(Eax, 13, "PV_SCHED_YIELD"),
            bit(Eax, 14, "ASYNC_PF_INT"),
            bit(Eax, 24, "CLOCKSOURCE_STABLE"),
        ],
    ),
    leaf(
        0x8000_0000,
        &[
            whole(Eax, "highest extended leaf"),
            whole(Ebx, "vendor"),
            whole(Ecx, "vendor"),
            whole(Edx, "vendor"),
        ],
    ),
    leaf(
        0x8000_0001,
        &[
            bits(Eax, 0, 27, "family, model, stepping"),
            bit(Ecx, 0, "LAHF_LM"),
            bit(Ecx, 1, "CMP_LEGACY"),
            bit(Ecx, 4, "CR8_LEGACY"),
            bit(Ecx, 5, "ABM"),
            bit(Ecx, 6, "SSE4A"),
            bit(Ecx, 7, "MISALIGNSSE"),
            bit(Ecx, 8, "3DNOWPREFETCH"),
            bit(Ecx, 9, "OSVW"),
            bit(Ecx, 11, "XOP"),
            bit(Ecx, 16, "FMA4"),
            bit(Ecx, 21, "TBM"),
            bit(Ecx, 22, "TOPOEXT"),
            bit(Edx, 0, "FPU"),
            bit(Edx, 1, "VME"),
            bit(Edx, 2, "DE"),
            bit(Edx, 3, "PSE"),
            bit(Edx, 4, "TSC"),
            bit(Edx, 5, "MSR"),
            bit(Edx, 6, "PAE"),
            bit(Edx, 7, "MCE"),
            bit(Edx, 8, "CMPXCHG8B"),
            bit(Edx, 9, "APIC"),
            bit(Edx, 11, "SYSCALL"),
            bit(Edx, 12, "MTRR"),
            bit(Edx, 13, "PGE"),
            bit(Edx, 14, "MCA"),
            bit(Edx, 15, "CMOV"),
            bit(Edx, 16, "PAT"),
            bit(Edx, 17, "PSE36"),
            bit(Edx, 20, "NX"),
            bit(Edx, 22, "MMXEXT"),
            bit(Edx, 23, "MMX"),
            bit(Edx, 24, "FXSR"),
            bit(Edx, 25, "FXSR_OPT"),
            bit(Edx, 26, "PDPE1GB"),
            bit(Edx, 27, "RDTSCP"),
            bit(Edx, 29, "LM"),
            bit(Edx, 30, "3DNOWEXT"),
            bit(Edx, 31, "3DNOW"),
        ],
    ),
    // AMD's caches and TLBs.
    leaf(
        0x8000_0005,
        &[
            whole(Eax, "TLBs of large pages"),
            whole(Ebx, "TLBs of small pages"),
            whole(Ecx, "L1 data"),
            whole(Edx, "L1 instructions"),
        ],
    ),
    leaf(
        0x8000_0006,
        &[
            whole(Eax, "TLBs of large pages"),
            whole(Ebx, "TLBs of small pages"),
            whole(Ecx, "L2"),
            whole(Edx, "L3"),
        ],
    ),
    leaf(0x8000_0007, &[bit(Edx, 8, "invariant TSC")]),
    leaf(
        0x8000_0008,
        &[
            bits(Eax, 0, 7, "bits of a physical address"),
            bits(Eax, 8, 15, "bits of a linear address"),
            bits(Eax, 16, 23, "bits of a guest's physical address"),
            bit(Ebx, 0, "CLZERO"),
            bit(Ebx, 2, "XSAVEERPTR"),
            bit(Ebx, 9, "WBNOINVD"),
            bit(Ebx, 12, "IBPB"),
            bit(Ebx, 14, "IBRS"),
            bit(Ebx, 15, "STIBP"),
            bit(Ebx, 17, "STIBP_ALWAYS_ON"),
            bit(Ebx, 19, "IBRS_SAME_MODE"),
            bit(Ebx, 24, "SSBD"),
            bit(Ebx, 25, "VIRT_SSBD"),
            bit(Ebx, 26, "SSB_NO"),
            bit(Ebx, 28, "PSFD"),
            bit(Ebx, 29, "BTC_NO"),
            bit(Ebx, 30, "IBPB_RET"),
            bits(Ecx, 0, 7, "cores"),
            bits(Ecx, 12, 15, "bits of the APIC id"),
        ],
    ),
    leaf(0x8000_0019, &[whole(Eax, "L1 TLBs of 1 GiB pages"), whole(Ebx, "L2 TLBs of 1 GiB pages")]),
    leaf(0x8000_001a, &[bit(Eax, 0, "FP128"), bit(Eax, 1, "MOVU"), bit(Eax, 2, "FP256")]),
    every_subleaf(
        0x8000_001d,
        &[
            bits(Eax, 0, 4, "type of cache"),
            bits(Eax, 5, 7, "level"),
            bits(Eax, 8, 9, "self-initializing, fully associative"),
            bits(Eax, 14, 25, "processors that share it"),
            whole(Ebx, "line size, partitions, ways"),
            whole(Ecx, "sets"),
            bits(Edx, 0, 1, "WBINVD, inclusive"),
        ],
    ),
    leaf(
        0x8000_001e,
        &[
            whole(Eax, "x2APIC's id"),
            bits(Ebx, 0, 7, "core's id"),
            bits(Ebx, 8, 15, "threads of a core"),
            bits(Ecx, 0, 10, "nodes"),
        ],
    ),
    leaf(
        0x8000_0021,
        &[
            bit(Eax, 0, "NO_NESTED_DATA_BP"),
            bit(Eax, 1, "FS_GS_NON_SERIALIZING"),
            bit(Eax, 2, "LFENCE_SERIALIZING"),
            bit(Eax, 5, "VERW_CLEAR"),
            bit(Eax, 6, "NULL_SEL_CLR_BASE"),
            bit(Eax, 8, "AUTOIBRS"),
            bit(Eax, 9, "NO_SMM_CTL_MSR"),
            bit(Eax, 20, "PREFETCHI"),
            bit(Eax, 27, "SBPB"),
            bit(Eax, 28, "IBPB_BRTYPE"),
            bit(Eax, 29, "SRSO_NO"),
            bit(Eax, 30, "SRSO_USER_KERNEL_NO"),
            bit(Ecx, 1, "TSA_SQ_NO"),
            bit(Ecx, 2, "TSA_L1_NO"),
        ],
    ),
];

#[cfg(test)]
impl Leaf {
    /// The rows of docs/security.md for this leaf, one for each register.
    pub(super) fn rows(&self) -> Vec<String> {
        let subleaf = match self.subleaf {
            Subleaf::None => String::new(),
            Subleaf::One(index) => format!(".{index}"),
            Subleaf::Every => ".*".to_owned(),
        };
        let rows = [(Eax, "eax"), (Ebx, "ebx"), (Ecx, "ecx"), (Edx, "edx")].map(|(register, name)| {
            let of_register = self.fields.iter().filter(|field| field.register == register);
            let fields: Vec<_> = of_register.map(Field::shown).collect();
            let row = format!("| `{:#x}{subleaf}` | {name} | {} |", self.function, fields.join("; "));
            (!fields.is_empty()).then_some(row)
        });
        rows.into_iter().flatten().collect()
    }
}

#[cfg(test)]
impl Field {
    fn shown(&self) -> String {
        match (self.first, self.last) {
            (0, 31) => self.name.to_owned(),
            (first, last) if first == last => format!("{first} {}", self.name),
            (first, last) => format!("{first}-{last} {}", self.name),
        }
    }
}
