//! The numbers of a pod under memory pressure. The case prints them, and `cargo xtask bench pressure` reads them.

use serde::{Deserialize, Serialize};

/// What the line begins with that has the numbers, as JSON.
pub(crate) const LINE: &str = "under pressure: ";

/// What one run says of one runtime.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Numbers {
    /// Of the host.
    pub(crate) processors: usize,
    pub(crate) leaks: Vec<Leak>,
    pub(crate) cache: PageCache,
    pub(crate) resized: Vec<Resized>,
}

/// The pod's cgroup on the host, at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct HostCgroup {
    pub(crate) max_mib: u64,
    pub(crate) peak_mib: u64,
    /// `oom_kill` of memory.events.
    pub(crate) kills: u64,
}

/// A container that takes more and more memory, beside a sidecar.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Leak {
    pub(crate) limit_mib: u64,
    /// The names of the processes that were killed, by the kernel that the containers see.
    pub(crate) killed: Vec<String>,
    pub(crate) exit_status: i32,
    pub(crate) reason: String,
    /// What it had written when it was killed.
    pub(crate) written_mib: u64,
    /// How often the sidecar was asked for a page by the network, and how often it answered.
    pub(crate) asked: u32,
    pub(crate) answered: u32,
    /// Whether the process of the sidecar that holds memory is still there.
    pub(crate) sidecar_whole: bool,
    pub(crate) pod_ready: bool,
    pub(crate) host: HostCgroup,
}

/// A container that writes and reads a file that is larger than its limit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PageCache {
    pub(crate) limit_mib: u64,
    pub(crate) file_mib: u64,
    pub(crate) exit_status: i32,
    pub(crate) seconds: f64,
    pub(crate) host: HostCgroup,
}

/// A container with one of the limits that it has one after the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Resized {
    pub(crate) limit_mib: u64,
    /// memory.max of the pod's cgroup.
    pub(crate) max_mib: u64,
    /// memory.current of the pod's cgroup as soon as the limit is in force, and at the end.
    pub(crate) begins_with_mib: u64,
    pub(crate) ends_with_mib: u64,
    /// The size of a process within the limit, and its exit status.
    pub(crate) within_mib: u64,
    pub(crate) within_status: i32,
    /// The same of one beyond the limit.
    pub(crate) beyond_mib: u64,
    pub(crate) beyond_status: i32,
    pub(crate) kills: u64,
}
