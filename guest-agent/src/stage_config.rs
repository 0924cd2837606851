//! What the agent tells the single-threaded stage about the process that it is to make: the OCI spec with every field
//! checked and resolved, so that little can fail after the clone. JSON, one line.

use std::path::PathBuf;

use oci_spec::runtime::PosixRlimit;
use serde::{Deserialize, Serialize};

use crate::syscall::{FilterInstruction, SchedulerAttributes};

/// What the agent's binary is called (its argument zero) when it is to be the stage.
pub const STAGE: &str = "container-stage";

/// The same name for the stage of a pod's sandbox container. Its process keeps this name, which other containers of the
/// pod may see.
pub const PAUSE: &str = "/pause";

/// The first line that the stage gets.
#[derive(Debug, Serialize, Deserialize)]
pub enum StageConfig {
    /// Make a container's init, and the container around it.
    Init(Box<InitConfig>),
    /// Make one more process in a container.
    Exec(Box<ExecConfig>),
}

/// Everything about one container's init.
#[derive(Debug, Serialize, Deserialize)]
pub struct InitConfig {
    /// The container's cgroup v2 directory.
    pub cgroup_dir: PathBuf,
    /// Namespaces of other containers, entered before the clone.
    pub joined: Vec<SharedNamespaces>,
    /// The pid namespace of another container that this one joins, as a pidfd of that container's init: the number of a
    /// descriptor that the stage inherits. The stage replaces it by a descriptor of the namespace itself. The helper
    /// that clones the init enters it as one of its last steps. None: the pid namespace is new, or the guest's, or one
    /// of `joined`.
    pub pid_namespace: Option<i32>,
    /// `CLONE_NEW*` bits for clone3(2).
    pub namespaces: u64,
    /// Whether the container gets a cgroup namespace. The root of a new cgroup namespace is the cgroup of its creator.
    /// So the init calls unshare(2) after the clone into the cgroup, and there is no bit in `namespaces`.
    pub cgroup_namespace: bool,
    /// The clocks of a time namespace of the container's own, as /proc/PID/timens_offsets takes them: a line for each
    /// clock that differs (time_namespaces(7)). None: the clocks are the guest's.
    pub time_offsets: Option<String>,
    /// Host name in the container's UTS namespace.
    pub hostname: Option<String>,
    /// NIS domain name in the container's UTS namespace.
    pub domainname: Option<String>,
    /// Files below /proc/sys, and what to write in them.
    pub sysctls: Vec<(PathBuf, String)>,
    /// The container's file systems; None: an empty root, in which the agent's own pause runs.
    pub rootfs: Option<RootfsConfig>,
    /// The container's process.
    pub process: ProcessConfig,
}

/// Namespaces of one other container.
#[derive(Debug, Serialize, Deserialize)]
pub struct SharedNamespaces {
    /// Number of a descriptor that the stage inherits: a pidfd of that container's init.
    pub init_pidfd: i32,
    /// `CLONE_NEW*` bits.
    pub namespaces: u64,
}

/// Everything about a process that joins a container.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExecConfig {
    /// The container's cgroup v2 directory.
    pub cgroup_dir: PathBuf,
    /// Number of a descriptor that the stage inherits: a pidfd of the container's init, whose namespaces are entered.
    pub init_pidfd: i32,
    /// The process.
    pub process: ProcessConfig,
}

/// The container's file systems.
#[derive(Debug, Serialize, Deserialize)]
pub struct RootfsConfig {
    /// Directory of the guest that becomes the container's root.
    pub path: PathBuf,
    /// The ids of its files that are others at the mount, or None.
    pub ids: Option<IdMappings>,
    /// Whether the root is mounted read-only in the end.
    pub readonly: bool,
    /// Propagation of the root; None: private.
    pub propagation: Option<Propagation>,
    /// In the order of the spec.
    pub mounts: Vec<MountPlan>,
    /// Where the guest has a proc file system that shows the pid namespace of the container, if that is another
    /// container's. It is bound wherever the spec mounts one.
    pub proc: Option<PathBuf>,
    /// Device nodes; with the default ones of the runtime-spec unless /dev is a bind mount.
    pub devices: Vec<DeviceNode>,
    /// Whether the links in /dev are made: not if /dev is a bind mount.
    pub dev_links: bool,
    /// Paths hidden behind /dev/null or an empty directory.
    pub masked_paths: Vec<PathBuf>,
    /// Paths made read-only.
    pub readonly_paths: Vec<PathBuf>,
}

impl RootfsConfig {
    /// Whether each proc file system of the spec is like any other of its pid namespace.
    pub fn has_plain_proc(&self) -> bool {
        self.mounts.iter().all(|mount| match &mount.kind {
            MountKind::FileSystem { fs_type, parameters, .. } => fs_type != "proc" || parameters.is_empty(),
            MountKind::Bind { .. } => true,
        })
    }
}

/// One OCI mount.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountPlan {
    /// Absolute path in the container.
    pub destination: PathBuf,
    /// What is mounted.
    pub kind: MountKind,
    /// Attributes of the mount itself.
    pub attributes: AttributeChange,
    /// Attributes of the mount and all mounts below it (`rro` and the like).
    pub recursive_attributes: AttributeChange,
    /// Applied in order.
    pub propagation: Vec<Propagation>,
}

/// What is mounted.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountKind {
    /// A file or directory of the guest.
    Bind {
        /// Absolute path in the guest.
        source: PathBuf,
        /// With the mounts below it.
        recursive: bool,
        /// The ids of its files that are others at the mount, or None.
        ids: Option<IdMappings>,
    },
    /// A file system of its own.
    FileSystem {
        /// Its type, e.g. `tmpfs`.
        fs_type: String,
        /// What /proc/mounts shows as its source; a device for those that need one.
        source: Option<String>,
        /// Its options in the order of the spec, as key and value.
        parameters: Vec<(String, Option<String>)>,
    },
}

/// `MOUNT_ATTR_*` bits to set and to clear, as mount_setattr(2) takes them.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttributeChange {
    /// Bits to set.
    pub set: u64,
    /// Bits to clear.
    pub clear: u64,
}

impl AttributeChange {
    /// Whether there is nothing to change.
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }
}

/// A propagation type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Propagation {
    /// `MS_PRIVATE`, `MS_SLAVE`, `MS_SHARED` or `MS_UNBINDABLE`.
    pub flag: u64,
    /// Whether all mounts below get it too.
    pub recursive: bool,
}

/// A device node, or a FIFO.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Absolute path in the container.
    pub path: PathBuf,
    /// Its type.
    pub kind: NodeKind,
    /// Major number.
    pub major: u64,
    /// Minor number.
    pub minor: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Type of a device node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeKind {
    /// Character device.
    Char,
    /// Block device.
    Block,
    /// FIFO.
    Fifo,
}

/// A process of a container.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessConfig {
    /// Program and arguments; never empty.
    pub args: Vec<String>,
    /// `NAME=value` each.
    pub env: Vec<String>,
    /// Absolute path in the container.
    pub cwd: PathBuf,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary groups.
    pub additional_gids: Vec<u32>,
    /// File mode creation mask.
    pub umask: u32,
    /// Resource limits.
    pub rlimits: Vec<PosixRlimit>,
    /// Capability sets as masks.
    pub capabilities: CapabilityMasks,
    /// Whether execve(2) may grant no privileges.
    pub no_new_privileges: bool,
    /// -1000..=1000.
    pub oom_score_adj: i32,
    /// I/O scheduling class (1..=3) and priority (0..=7).
    pub io_priority: Option<(u8, u8)>,
    /// The first size of the terminal that its standard streams are; None: it has none.
    pub terminal: Option<WindowSize>,
    /// Policy and parameters of the scheduler.
    pub scheduler: Option<SchedulerAttributes>,
    /// The part that is the same for all processes of the container.
    pub common: CommonConfig,
}

/// Size of a terminal's window, characters; 0: not known.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Columns.
    pub width: u16,
    /// Rows.
    pub height: u16,
}

/// What every process of a container has, the init and those that join it later.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommonConfig {
    /// The system call filter.
    pub seccomp: Option<SeccompFilter>,
    /// Execution domain, as personality(2) takes it.
    pub personality: Option<u64>,
    /// Name of the session keyring, which all of them share; None: that of the agent.
    pub session_keyring: Option<String>,
    /// The ids of a user namespace that is not the guest's; None: the container is in the guest's.
    pub ids: Option<IdMappings>,
    /// The AppArmor profile. A process that joins the container may have another one. None: unconfined.
    pub apparmor_profile: Option<String>,
}

/// Which ids of the guest those of a user namespace are.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMappings {
    /// Ids of users.
    pub users: Vec<IdRange>,
    /// Ids of groups.
    pub groups: Vec<IdRange>,
}

/// Ids that follow one another, inside and outside of a user namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    /// The first one in the container.
    pub inside: u32,
    /// The first one in the guest.
    pub outside: u32,
    /// How many.
    pub length: u32,
}

/// The id outside of a user namespace, if it has one.
pub fn outside(ranges: &[IdRange], id: u32) -> Option<u32> {
    ranges.iter().find_map(|range| {
        let offset = id.checked_sub(range.inside).filter(|offset| *offset < range.length)?;
        range.outside.checked_add(offset)
    })
}

/// A system call filter as the kernel takes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeccompFilter {
    /// `SECCOMP_FILTER_FLAG_*`.
    pub flags: u64,
    /// Never empty.
    pub program: Vec<FilterInstruction>,
}

/// Capability sets; bit n is capability number n.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapabilityMasks {
    /// Bounding set.
    pub bounding: u64,
    /// Effective set.
    pub effective: u64,
    /// Permitted set.
    pub permitted: u64,
    /// Inheritable set.
    pub inheritable: u64,
    /// Ambient set.
    pub ambient: u64,
}
