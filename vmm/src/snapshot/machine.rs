//! The state of what all vCPUs share in KVM: the interrupt controllers, and the clock.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use super::{StateError, refused};

/// State of a VM's own.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MachineState {
    irqchips: [kvm_irqchip; 3],
    /// Nanoseconds on the guest's clock (kvm-clock), which goes on from here.
    clock_ns: u64,
}

impl MachineState {
    /// Of a VM none of whose vCPUs runs.
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

    /// After the vCPUs' state, which the interrupt controllers speak to.
    pub(super) fn restore(&self, vm: &VmFd) -> Result<(), StateError> {
        for chip in &self.irqchips {
            vm.set_irqchip(chip).map_err(refused("interrupt controllers"))?;
        }
        // No flag: the time that has passed since is none of the guest's.
        let clock = kvm_clock_data { clock: self.clock_ns, ..Default::default() };
        vm.set_clock(&clock).map_err(refused("clock"))
    }
}
