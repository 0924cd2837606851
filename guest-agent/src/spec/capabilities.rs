//! Capabilities of the spec to the kernel's numbers (linux/capability.h).

use serde::Deserialize;

use crate::stage_config::CapabilityMasks;

/// The capabilities by their numbers, without `CAP_`.
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// `process.capabilities`: sets of names. oci-spec's type cannot be read if a name is unknown to it. The runtime-spec
/// wants a warning then, as runc gives: the engine may know a newer kernel.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Sets {
    bounding: Option<Vec<String>>,
    effective: Option<Vec<String>>,
    permitted: Option<Vec<String>>,
    inheritable: Option<Vec<String>>,
    ambient: Option<Vec<String>>,
}

/// The spec's five sets. Without any in the spec the process has none, as the sets are all empty then.
pub(super) fn masks(sets: Option<&Sets>) -> CapabilityMasks {
    let Some(sets) = sets else { return CapabilityMasks::default() };
    CapabilityMasks {
        bounding: mask("bounding", sets.bounding.as_deref()),
        effective: mask("effective", sets.effective.as_deref()),
        permitted: mask("permitted", sets.permitted.as_deref()),
        inheritable: mask("inheritable", sets.inheritable.as_deref()),
        ambient: mask("ambient", sets.ambient.as_deref()),
    }
}

fn mask(set: &str, names: Option<&[String]>) -> u64 {
    let names = names.unwrap_or_default();
    let is_unknown = |name: &&String| number(name).is_none();
    if let Some(name) = names.iter().find(is_unknown) {
        let count = names.iter().filter(is_unknown).count();
        eprintln!(
            "bulkhead-agent: process.capabilities.{set}: unknown names are left out: {name:.64?} ({count} in all)"
        );
    }
    names.iter().filter_map(|name| number(name)).fold(0, |mask, number| mask | 1 << number)
}

fn number(name: &str) -> Option<usize> {
    let name = name.strip_prefix("CAP_")?;
    NAMES.iter().position(|known| *known == name)
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
    fn a_name_that_is_unknown_is_left_out() {
        let sets = r#"{"bounding":["CAP_OF_TOMORROW","CAP_KILL","KILL","cap_chown",""],"effective":["CAP_SYS_TTY_CONFIG"]}"#;
        let masks = masks(Some(&serde_json::from_str(sets).unwrap()));
        assert_eq!((masks.bounding, masks.effective), (1 << 5, 1 << 26));
    }

    #[test]
    fn without_sets_there_are_no_capabilities() {
        assert_eq!(super::masks(None), CapabilityMasks::default());
    }
}
