//! Keeps the inner host's kernel from patching its own code while the tests run.
//!
//! Linux patches a jump in `__schedule` when its first VM is made and back again when its last one ends
//! (`preempt_notifier_key`), and another in KVM around the time when a vCPU's APIC is enabled (`apic_sw_disabled`).
//! While it does so an int3 stands there, and it is gone before the other processors may go on. QEMU's emulation with
//! a thread for each processor drops what it has translated of the old bytes *before* it writes the new ones: what
//! another processor translates in between has the int3 in it, and is run ever after. Then the inner host dies by an
//! `Oops: int3`, or goes on without KVM's hooks in the scheduler, and guests crash at random places. Two programs that
//! do nothing but make VMs on one processor and yield on the other show it within a minute; with a VM that stays they
//! do not.
//!
//! So a VM stays. Its one vCPU never runs, and its APIC is never enabled. For the patches of the first CPU quota see
//! the runner's unit.

use std::process::Command;

use anyhow::{Context, Result};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

/// Holds those jumps as they are for as long as it lives.
pub(crate) struct Still {
    _vcpu: VcpuFd,
    _vm: VmFd,
}

impl Still {
    /// Makes the VM that stays.
    pub(crate) fn hold() -> Result<Still> {
        let kvm = open().context("cannot open /dev/kvm of the inner host")?;
        let vm = kvm.create_vm().context("KVM of the inner host makes no VM")?;
        // Without it a vCPU has no APIC.
        vm.create_irq_chip().context("KVM of the inner host makes no irqchip")?;
        let vcpu = vm.create_vcpu(0).context("KVM of the inner host makes no vCPU")?;
        Ok(Still { _vcpu: vcpu, _vm: vm })
    }
}

/// Loads KVM if that was not done at boot.
fn open() -> Result<Kvm> {
    if let Ok(kvm) = Kvm::new() {
        return Ok(kvm);
    }
    for module in ["kvm_amd", "kvm_intel"] {
        // One of them is for another processor; if both fail the next line says so.
        let _ = Command::new("modprobe").arg(module).status();
    }
    Ok(Kvm::new()?)
}
