//! Capabilities of the spec to the kernel's numbers (linux/capability.h).

use oci_spec::runtime::{Capabilities, Capability, LinuxCapabilities};

use crate::stage_config::CapabilityMasks;

/// The spec's five sets. Without any in the spec the process has none, as the sets are all empty then.
pub(super) fn masks(capabilities: Option<&LinuxCapabilities>) -> CapabilityMasks {
    let Some(sets) = capabilities else { return CapabilityMasks::default() };
    CapabilityMasks {
        bounding: mask(sets.bounding().as_ref()),
        effective: mask(sets.effective().as_ref()),
        permitted: mask(sets.permitted().as_ref()),
        inheritable: mask(sets.inheritable().as_ref()),
        ambient: mask(sets.ambient().as_ref()),
    }
}

fn mask(set: Option<&Capabilities>) -> u64 {
    set.into_iter().flatten().fold(0, |mask, &capability| mask | 1 << number(capability))
}

fn number(capability: Capability) -> u32 {
    match capability {
        Capability::Chown => 0,
        Capability::DacOverride => 1,
        Capability::DacReadSearch => 2,
        Capability::Fowner => 3,
        Capability::Fsetid => 4,
        Capability::Kill => 5,
        Capability::Setgid => 6,
        Capability::Setuid => 7,
        Capability::Setpcap => 8,
        Capability::LinuxImmutable => 9,
        Capability::NetBindService => 10,
        Capability::NetBroadcast => 11,
        Capability::NetAdmin => 12,
        Capability::NetRaw => 13,
        Capability::IpcLock => 14,
        Capability::IpcOwner => 15,
        Capability::SysModule => 16,
        Capability::SysRawio => 17,
        Capability::SysChroot => 18,
        Capability::SysPtrace => 19,
        Capability::SysPacct => 20,
        Capability::SysAdmin => 21,
        Capability::SysBoot => 22,
        Capability::SysNice => 23,
        Capability::SysResource => 24,
        Capability::SysTime => 25,
        Capability::SysTtyConfig => 26,
        Capability::Mknod => 27,
        Capability::Lease => 28,
        Capability::AuditWrite => 29,
        Capability::AuditControl => 30,
        Capability::Setfcap => 31,
        Capability::MacOverride => 32,
        Capability::MacAdmin => 33,
        Capability::Syslog => 34,
        Capability::WakeAlarm => 35,
        Capability::BlockSuspend => 36,
        Capability::AuditRead => 37,
        Capability::Perfmon => 38,
        Capability::Bpf => 39,
        Capability::CheckpointRestore => 40,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_become_masks() {
        let sets = serde_json::from_str(
            r#"{"bounding":["CAP_CHOWN","CAP_KILL"],"effective":["CAP_CHECKPOINT_RESTORE"],"permitted":[]}"#,
        )
        .unwrap();
        let masks = masks(Some(&sets));
        assert_eq!(masks.bounding, 0b10_0001);
        assert_eq!(masks.effective, 1 << 40);
        assert_eq!((masks.permitted, masks.inheritable, masks.ambient), (0, 0, 0));
    }

    #[test]
    fn without_sets_there_are_no_capabilities() {
        assert_eq!(super::masks(None), CapabilityMasks::default());
    }
}
