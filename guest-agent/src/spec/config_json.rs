//! The top of the OCI runtime spec, config.json.
//!
//! oci-spec also has `Spec` and `Process`. Its `Process` checks `execCPUAffinity`, of which the agent only wants to
//! know whether it is there, by a regular expression, and so puts a megabyte of regex engine into the guest's
//! initramfs.

use std::path::PathBuf;

use oci_spec::runtime::{
    Box as ConsoleSize, Hooks, Linux, LinuxIOPriority, LinuxIdMapping, Mount, PosixRlimit, User,
};
use serde::{Deserialize, de::IgnoredAny};

use super::{capabilities, scheduler::Scheduler};

/// config.json.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Spec {
    pub(super) oci_version: String,
    pub(super) root: Option<Root>,
    pub(super) mounts: Option<Vec<Mount>>,
    pub(super) process: Option<Process>,
    pub(super) hostname: Option<String>,
    pub(super) domainname: Option<String>,
    pub(super) hooks: Option<Hooks>,
    pub(super) linux: Option<Linux>,
    pub(super) solaris: Option<IgnoredAny>,
    pub(super) windows: Option<IgnoredAny>,
    pub(super) vm: Option<IgnoredAny>,
    pub(super) zos: Option<IgnoredAny>,
}

/// `root`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Root {
    pub(super) path: PathBuf,
    #[serde(default)]
    pub(super) readonly: bool,
    /// The shim's, not the runtime-spec's: the ids of an id-mapped root, as those of a mount.
    pub(super) uid_mappings: Option<Vec<LinuxIdMapping>>,
    pub(super) gid_mappings: Option<Vec<LinuxIdMapping>>,
}

/// `process`.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Process {
    pub(super) terminal: Option<bool>,
    pub(super) console_size: Option<ConsoleSize>,
    pub(super) user: User,
    pub(super) args: Option<Vec<String>>,
    pub(super) command_line: Option<String>,
    pub(super) env: Option<Vec<String>>,
    pub(super) cwd: PathBuf,
    pub(super) capabilities: Option<capabilities::Sets>,
    pub(super) rlimits: Option<Vec<PosixRlimit>>,
    pub(super) no_new_privileges: Option<bool>,
    pub(super) apparmor_profile: Option<String>,
    pub(super) oom_score_adj: Option<i32>,
    pub(super) selinux_label: Option<String>,
    pub(super) io_priority: Option<LinuxIOPriority>,
    pub(super) scheduler: Option<Scheduler>,
    #[serde(rename = "execCPUAffinity")]
    pub(super) exec_cpu_affinity: Option<IgnoredAny>,
}
