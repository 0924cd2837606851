//! The state that all vCPUs of a VM share in KVM: the interrupt controllers and the clock.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use super::error::{StateError, refused};

/// What KVM has stored of the interrupt controllers and the clock of one VM.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VmState {
    irqchips: [kvm_irqchip; 3],
    /// kvm-clock in nanoseconds. The clock of a restored VM continues from this value.
    clock_ns: u64,
}

impl VmState {
    /// Reads the state from KVM. No vCPU may run meanwhile.
    pub(super) fn save(vm: &VmFd) -> Result<Self, StateError> {
        let irqchip = |chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            vm.get_irqchip(&mut chip).map_err(refused("interrupt controllers")).map(|()| chip)
        };
        Ok(Self {
            irqchips: [
                irqchip(KVM_IRQCHIP_PIC_MASTER)?,
                irqchip(KVM_IRQCHIP_PIC_SLAVE)?,
                irqchip(KVM_IRQCHIP_IOAPIC)?,
            ],
            clock_ns: vm.get_clock().map_err(refused("clock"))?.clock,
        })
    }

    /// Writes the state to KVM. Call this after all vCPUs were restored, because the interrupt controllers send
    /// interrupts to them.
    pub(super) fn restore(&self, vm: &VmFd) -> Result<(), StateError> {
        for chip in &self.irqchips {
            vm.set_irqchip(chip).map_err(refused("interrupt controllers"))?;
        }
        // Without a flag KVM does not add the time that has passed since the save.
        let clock = kvm_clock_data { clock: self.clock_ns, ..Default::default() };
        vm.set_clock(&clock).map_err(refused("clock"))
    }
}
