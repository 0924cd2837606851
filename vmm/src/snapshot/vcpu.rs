//! The state of a vCPU.

use std::ops::RangeInclusive;

use kvm_bindings::{
    CpuId, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs,
    kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::{StateError, refused};
use crate::arch::cpuid;

const TSC: u32 = 0x10;
/// Armed by the local APIC's state, so it comes after it.
const TSC_DEADLINE: u32 = 0x6e0;
/// Those of Hyper-V (its Top Level Functional Specification, appendix F), which our guests do not see, but KVM lets us write.
/// One of them, the page of the VP's assist, shares its place with KVM's own MSR for ends of interrupts without an exit:
/// written with the 0 that is read of it, it switches these off, and each interrupt of a clone takes an exit more.
const HYPER_V: RangeInclusive<u32> = 0x4000_0000..=0x4000_01ff;

/// All that a vCPU is, by KVM.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VcpuState {
    pub(super) cpuid: Vec<kvm_cpuid_entry2>,
    /// Of its time stamp counter.
    pub(super) tsc_khz: u32,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debug_regs: kvm_debugregs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    /// Those that KVM both tells and takes.
    msrs: Vec<kvm_msr_entry>,
}

/// The MSRs that KVM may tell of a vCPU of ours.
pub(super) fn msr_indices(kvm: &Kvm) -> Result<Vec<u32>, kvm_ioctls::Error> {
    let mut indices = kvm.get_msr_index_list()?.as_slice().to_vec();
    indices.retain(|index| !HYPER_V.contains(index));
    Ok(indices)
}

impl VcpuState {
    /// Of a vCPU that does not run, has no exit to complete, and will not run again: its MSRs are tried on it.
    pub(super) fn save(
        vcpu: &VcpuFd,
        cpuid: Vec<kvm_cpuid_entry2>,
        msrs: &[u32],
    ) -> Result<Self, StateError> {
        Ok(Self {
            cpuid,
            tsc_khz: vcpu.get_tsc_khz().map_err(refused("TSC frequency"))?,
            // First: KVM settles what has arrived at a processor that is being started.
            mp_state: vcpu.get_mp_state().map_err(refused("state of being started"))?,
            regs: vcpu.get_regs().map_err(refused("registers"))?,
            sregs: vcpu.get_sregs().map_err(refused("segments"))?,
            xsave: vcpu.get_xsave().map_err(refused("extended registers"))?,
            xcrs: vcpu.get_xcrs().map_err(refused("extended control registers"))?,
            debug_regs: vcpu.get_debug_regs().map_err(refused("debug registers"))?,
            lapic: vcpu.get_lapic().map_err(refused("local APIC"))?,
            events: vcpu.get_vcpu_events().map_err(refused("pending events"))?,
            msrs: msrs.iter().filter_map(|index| read_msr(vcpu, *index)).collect(),
        })
    }

    /// Has its time stamp counter be where that of `first` is. In the guest all are one; KVM told them one after the other, and
    /// in what is restored has those be one that are set to within a second of each other.
    pub(super) fn take_time_of(&mut self, first: &Self) {
        let is_tsc = |msr: &&kvm_msr_entry| msr.index == TSC;
        if let Some(time) = first.msrs.iter().find(is_tsc) {
            self.msrs.iter_mut().filter(|msr| msr.index == TSC).for_each(|msr| msr.data = time.data);
        }
    }

    /// Makes `vcpu`, which is new, what the saved one was.
    #[allow(unsafe_code)]
    pub(super) fn restore(&self, vcpu: &VcpuFd) -> Result<(), StateError> {
        // Whoever wrote the file: no guest gets more than the list allows.
        let cpuid = CpuId::from_entries(&cpuid::only_allowed(&self.cpuid))
            .map_err(|_| StateError::Many { what: "CPUID leaves" })?;
        vcpu.set_cpuid2(&cpuid).map_err(refused("CPUID table"))?;
        vcpu.set_mp_state(self.mp_state).map_err(refused("state of being started"))?;
        vcpu.set_regs(&self.regs).map_err(refused("registers"))?;
        vcpu.set_sregs(&self.sregs).map_err(refused("segments"))?;
        // SAFETY: KVM reads as much as the guest's extended registers take, and kvm_xsave holds 4096 bytes of them: a guest
        // has more only after its process asked for AMX by arch_prctl(2), which this one never does. kvm-ioctls leaves
        // that to its caller.
        unsafe { vcpu.set_xsave(&self.xsave) }.map_err(refused("extended registers"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(refused("extended control registers"))?;
        vcpu.set_debug_regs(&self.debug_regs).map_err(refused("debug registers"))?;
        vcpu.set_lapic(&self.lapic).map_err(refused("local APIC"))?;
        let (timer, others): (Vec<_>, Vec<_>) = self.msrs.iter().partition(|msr| msr.index == TSC_DEADLINE);
        write_msrs(vcpu, &others)?;
        write_msrs(vcpu, &timer)?;
        vcpu.set_vcpu_events(&self.events).map_err(refused("pending events"))
    }
}

/// None: KVM lists it, but this guest has it not, or cannot get it back.
fn read_msr(vcpu: &VcpuFd, index: u32) -> Option<kvm_msr_entry> {
    let mut msrs = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }]).ok()?;
    let known = vcpu.get_msrs(&mut msrs).ok()? == 1 && vcpu.set_msrs(&msrs).ok()? == 1;
    msrs.as_slice().first().copied().filter(|_| known)
}

fn write_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<(), StateError> {
    let msrs = Msrs::from_entries(entries).map_err(|_| StateError::Many { what: "MSRs" })?;
    let set = vcpu.set_msrs(&msrs).map_err(refused("MSRs"))?;
    match entries.get(set) {
        Some(entry) => Err(StateError::Msr { index: entry.index }),
        None => Ok(()),
    }
}
