//! Why a pod or a container could not be created or started, as the operator counts it.

use serde::{Deserialize, Serialize};

/// A cause. Its name is the value of a metric's label and a part of events, so it must not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The host has no KVM that can be used.
    NoKvm,
    /// There is no template, or it cannot be used. With this cause only, the pod runs nevertheless: its VM boots.
    Template,
    /// The guest was not ready in time.
    BootTimeout,
    /// The network namespace of the pod, or an interface in it.
    Network,
    /// The root or a mount of the container, or a block device.
    Rootfs,
    /// A field of the request that is invalid, or that asks for what is not built.
    RefusedField,
    /// The guest or its VMM has ended, or the agent does not do what it should.
    Guest,
    /// A VM does not get the memory that its containers need.
    OutOfMemory,
    /// The cgroup of the pod on the host.
    Cgroup,
    /// The configuration of Bulkhead, or a part that it names.
    Configuration,
    /// The program of the container cannot be executed.
    Program,
    /// A hook of the container.
    Hook,
    /// Everything else, such as a state directory that cannot be made.
    Other,
}

impl Cause {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::NoKvm,
        Self::Template,
        Self::BootTimeout,
        Self::Network,
        Self::Rootfs,
        Self::RefusedField,
        Self::Guest,
        Self::OutOfMemory,
        Self::Cgroup,
        Self::Configuration,
        Self::Program,
        Self::Hook,
        Self::Other,
    ];

    /// Its name in files, metrics and events.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoKvm => "no_kvm",
            Self::Template => "template",
            Self::BootTimeout => "boot_timeout",
            Self::Network => "network",
            Self::Rootfs => "rootfs",
            Self::RefusedField => "refused_field",
            Self::Guest => "guest",
            Self::OutOfMemory => "out_of_memory",
            Self::Cgroup => "cgroup",
            Self::Configuration => "configuration",
            Self::Program => "program",
            Self::Hook => "hook",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_the_name_that_is_written() {
        for cause in Cause::ALL {
            assert_eq!(serde_json::to_string(&cause).unwrap(), format!("\"{}\"", cause.name()));
        }
    }
}
