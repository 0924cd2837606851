//! The state of a vCPU.

use std::ops::RangeInclusive;

use kvm_bindings::{
    CpuId, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs,
    kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::error::{StateError, refused};
use crate::arch::cpuid;

const TSC: u32 = 0x10;
/// Restored after the state of the local APIC, which must be in TSC-deadline mode.
const TSC_DEADLINE: u32 = 0x6e0;
/// The MSRs of Hyper-V (Top Level Functional Specification, appendix F). CPUID does not offer them to guests, but KVM
/// lets the VMM write them. They are not saved: HV_X64_MSR_VP_ASSIST_PAGE shares its state in KVM with
/// MSR_KVM_PV_EOI_EN. Restoring the value 0 that KVM returns for the first would disable the second, and each
/// interrupt of a clone would cause one more exit.
const HYPER_V: RangeInclusive<u32> = 0x4000_0000..=0x4000_01ff;

/// All state of a vCPU in KVM.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VcpuState {
    pub(super) cpuid: Vec<kvm_cpuid_entry2>,
    /// The frequency of its time stamp counter.
    pub(super) tsc_khz: u32,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debug_regs: kvm_debugregs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    /// The MSRs that KVM can both read and write.
    msrs: Vec<kvm_msr_entry>,
}

/// The MSRs that KVM may be able to read, without those that must not be saved.
pub(super) fn msr_indices(kvm: &Kvm) -> Result<Vec<u32>, kvm_ioctls::Error> {
    let mut indices = kvm.get_msr_index_list()?.as_slice().to_vec();
    indices.retain(|index| !HYPER_V.contains(index));
    Ok(indices)
}

impl VcpuState {
    /// Reads the state from KVM. The vCPU must have completed its last exit, and must not run again: each MSR is
    /// written to it once.
    pub(super) fn save(
        vcpu: &VcpuFd,
        cpuid: Vec<kvm_cpuid_entry2>,
        msrs: &[u32],
    ) -> Result<Self, StateError> {
        Ok(Self {
            cpuid,
            tsc_khz: vcpu.get_tsc_khz().map_err(refused("TSC frequency"))?,
            // This comes first, because KVM handles pending INIT and SIPI signals in this call.
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

    /// Copies the time stamp counter of `first`. The counters of all vCPUs are equal in the guest, but were read one
    /// after another. KVM synchronizes counters that are set to values within a second of each other.
    pub(super) fn copy_tsc_of(&mut self, first: &Self) {
        let is_tsc = |msr: &&kvm_msr_entry| msr.index == TSC;
        if let Some(time) = first.msrs.iter().find(is_tsc) {
            self.msrs.iter_mut().filter(|msr| msr.index == TSC).for_each(|msr| msr.data = time.data);
        }
    }

    /// A time stamp counter 10 seconds after the saved one. The counter of a new vCPU starts at 0. If the value that is
    /// written is within a second of it, KVM takes the write for an attempt to synchronize vCPUs, and ignores the
    /// value. Since Linux 6.7, KVM does so only from the second write on. So write this value first: after it, KVM
    /// accepts the saved one.
    fn distant_tsc(&self) -> Vec<kvm_msr_entry> {
        let distance = 10 * 1000 * u64::from(self.tsc_khz);
        let distant = |msr: &kvm_msr_entry| kvm_msr_entry { data: msr.data.wrapping_add(distance), ..*msr };
        self.msrs.iter().filter(|msr| msr.index == TSC).map(distant).collect()
    }

    /// Writes the state to `vcpu`, a new vCPU. `is_first`: no other vCPU of the VM has its state yet.
    #[allow(unsafe_code)]
    pub(super) fn restore(&self, vcpu: &VcpuFd, is_first: bool) -> Result<(), StateError> {
        // The file may have been changed, so the saved table is reduced to the allowed features again.
        let cpuid = CpuId::from_entries(&cpuid::only_allowed(&self.cpuid))
            .map_err(|_| StateError::Many { what: "CPUID leaves" })?;
        vcpu.set_cpuid2(&cpuid).map_err(refused("CPUID table"))?;
        vcpu.set_mp_state(self.mp_state).map_err(refused("state of being started"))?;
        vcpu.set_regs(&self.regs).map_err(refused("registers"))?;
        vcpu.set_sregs(&self.sregs).map_err(refused("segments"))?;
        // SAFETY: KVM reads as many bytes as the extended registers of the guest have, and kvm_xsave has 4096. A
        // guest has more only if its process has requested AMX by arch_prctl(2), which this process never does.
        // kvm-ioctls leaves this check to its caller.
        unsafe { vcpu.set_xsave(&self.xsave) }.map_err(refused("extended registers"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(refused("extended control registers"))?;
        vcpu.set_debug_regs(&self.debug_regs).map_err(refused("debug registers"))?;
        vcpu.set_lapic(&self.lapic).map_err(refused("local APIC"))?;
        let (timer, others): (Vec<_>, Vec<_>) = self.msrs.iter().partition(|msr| msr.index == TSC_DEADLINE);
        if is_first {
            write_msrs(vcpu, &self.distant_tsc())?;
        }
        write_msrs(vcpu, &others)?;
        write_msrs(vcpu, &timer)?;
        vcpu.set_vcpu_events(&self.events).map_err(refused("pending events"))
    }
}

/// Reads an MSR. Returns None if KVM lists the MSR but cannot read or write it for this guest.
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
