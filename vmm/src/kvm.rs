//! Opens KVM, checks that this host can run a VM, and maps guest memory before the guest touches it.

use std::{io, path::Path};

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE, KVMIO, kvm_enable_cap, kvm_pre_fault_memory,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vmm_sys_util::{
    ioctl::{_IOC_READ, _IOC_WRITE, ioctl_with_mut_ref},
    ioctl_ioc_nr,
};

// kvm-ioctls does not have it yet.
ioctl_ioc_nr!(
    KVM_PRE_FAULT_MEMORY,
    _IOC_READ | _IOC_WRITE,
    KVMIO,
    0xd5,
    size_of::<kvm_pre_fault_memory>() as u32
);

/// The version of the API has not changed since Linux 2.6.22.
const KVM_API_VERSION: i32 = 12;

/// The capabilities that the VMM needs. Every KVM since Linux 4.13 has them.
const NEEDED: &[(Cap, &str)] = &[
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::IrqRouting, "KVM_CAP_IRQ_ROUTING"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    // With this timer the guest needs no PIT, neither for timer interrupts nor to calibrate its clocks.
    (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
];

/// Why KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    #[error("KVM is missing: there is no /dev/kvm; {ENABLE}")]
    Missing,
    #[error("KVM cannot be opened: no permission for /dev/kvm; {RUN_AS}")]
    Permission,
    #[error("KVM cannot be opened: /dev/kvm")]
    Open(#[source] kvm_ioctls::Error),
    #[error(
        "KVM cannot be used: /dev/kvm is provided by kvm_pvm, which does not run a stock kernel; {OTHER_HOST}"
    )]
    Pvm,
    #[error("KVM cannot be used: its API version is {found}, not {KVM_API_VERSION}")]
    Version { found: i32 },
    #[error("KVM cannot be used: it lacks {capability}; {NEWER}")]
    Capability { capability: &'static str },
}

/// What to do about each error. The message ends with it.
const ENABLE: &str = "load kvm_intel or kvm_amd, or enable virtualization in the firmware (if this is a VM: nested \
                      virtualization in its host)";
const RUN_AS: &str = "run as root or as a member of its group";
const OTHER_HOST: &str = "use a host with kvm_intel or kvm_amd";
const NEWER: &str = "use a newer host kernel";

impl KvmError {
    /// What to do about it, if that is known. The message ends with `; ` and this.
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Missing => Some(ENABLE),
            Self::Permission => Some(RUN_AS),
            Self::Pvm => Some(OTHER_HOST),
            Self::Capability { .. } => Some(NEWER),
            Self::Open(_) | Self::Version { .. } => None,
        }
    }
}

/// Opens KVM and checks that it can run the guest.
pub fn open() -> Result<Kvm, KvmError> {
    // This check comes first, because with kvm_pvm a VM can be created but its guest hangs.
    if Path::new("/sys/module/kvm_pvm").exists() {
        return Err(KvmError::Pvm);
    }
    let kvm = Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => KvmError::Missing,
        libc::EACCES | libc::EPERM => KvmError::Permission,
        _ => KvmError::Open(error),
    })?;
    let found = kvm.get_api_version();
    if found != KVM_API_VERSION {
        return Err(KvmError::Version { found });
    }
    match NEEDED.iter().find(|(capability, _)| !kvm.check_extension(*capability)) {
        Some((_, capability)) => Err(KvmError::Capability { capability }),
        None => Ok(kvm),
    }
}

/// Disables the performance counters of the VM's vCPUs. Call this before the first vCPU is created. It is not enough
/// that CPUID shows no counters: on AMD processors a guest can use the first four counters without a CPUID bit.
///
/// Does nothing if KVM does not support this, as before Linux 5.18.
pub fn disable_counters(kvm: &Kvm, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
    let offered = kvm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into());
    if offered & KVM_PMU_CAP_DISABLE.cast_signed() == 0 {
        return Ok(());
    }
    let args = [KVM_PMU_CAP_DISABLE.into(), 0, 0, 0];
    vm.enable_cap(&kvm_enable_cap { cap: KVM_CAP_PMU_CAPABILITY, args, ..Default::default() })
}

/// Maps `len` bytes of guest memory from `address` on, as if the vCPU had read each page (KVM_PRE_FAULT_MEMORY). Both
/// are multiples of a page. Fails on hosts before Linux 6.11, and with shadow page tables.
#[allow(unsafe_code)]
pub fn map_pages(vcpu: &VcpuFd, address: u64, len: u64) -> io::Result<()> {
    let mut range = kvm_pre_fault_memory { gpa: address, size: len, ..Default::default() };
    while range.size > 0 {
        let before = range.size;
        // SAFETY: the kernel reads and writes `range`, which is what this request takes.
        match unsafe { ioctl_with_mut_ref(vcpu, KVM_PRE_FAULT_MEMORY(), &mut range) } {
            // What is left is in `range`.
            0 if range.size < before => {}
            0 => return Err(io::ErrorKind::WriteZero.into()),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}
