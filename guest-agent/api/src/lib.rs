//! What the shim and the agent say to each other: the ttrpc service of `proto/agent.proto`, the vsock ports,
//! and the places in the guest that both name.

#![deny(unsafe_code)]

pub mod cpu_list;
pub mod cpu_weight;
pub mod datagrams;
pub mod devices;
pub mod features;
pub mod name_server;
pub mod network_parameters;
pub mod nftables;
pub mod relay;
#[allow(unsafe_code)]
pub mod synchronization;

/// Version of this interface, checked by `StartSandbox` and by the ready message (see [`READY_PORT`]). It rises
/// too when the agent must cope with another machine, such as one whose devices are on a PCI bus.
pub const API_VERSION: u32 = 23;

/// vsock port on which the agent serves ttrpc.
pub const RPC_PORT: u32 = 1024;

/// vsock port on which the agent takes stream connections; the port that each comes from is its id.
pub const STREAM_PORT: u32 = 1025;

/// vsock port of the host (CID 2) to which the agent connects once, when it serves [`RPC_PORT`] and
/// [`STREAM_PORT`]. It writes [`API_VERSION`], 4 bytes little-endian, and closes.
pub const READY_PORT: u32 = 1026;

/// Bytes of an answer at most: the shim ends the connection on which more comes, since what it decodes from an answer
/// takes many times the memory.
pub const MAX_ANSWER: u32 = 256 << 10;

/// Processes that ListPids tells of at most, so that they fit into an answer.
pub const MAX_PIDS: usize = 32 << 10;

/// Bytes of a policy of AppArmor at most: a request with more would not fit into a message of ttrpc. Most profiles take
/// some ten thousand.
pub const MAX_APPARMOR_POLICY: usize = 2 << 20;

/// Bytes of an error's text at most; the agent cuts what is longer.
pub const MAX_ERROR: usize = 16 << 10;

/// Where the agent mounts the pod's share in the guest.
pub const SHARE_DIR: &str = "/run/bulkhead/share";

/// Where the agent mounts the same share exclusively: nobody but the guest changes the files that are used here. These
/// are the roots of containers that a snapshotter has made for them.
pub const ROOTS_DIR: &str = "/run/bulkhead/roots";

/// The memory that the containers of a pod share as their /dev/shm: a tmpfs of the guest. It exists once the pod's
/// pause process does.
pub const SHM_DIR: &str = "/run/bulkhead/shm";

/// The volumes in memory that the containers of a pod share, each a directory of the name that MakeVolume gives.
pub const VOLUMES_DIR: &str = "/run/bulkhead/volumes";

/// The file systems of disks that the VMM has attached, each in a directory of the name that is the disk's serial
/// number.
pub const DISKS_DIR: &str = "/run/bulkhead/disks";

/// The size of the guest's huge pages, bytes, and its name in `linux.resources.hugepageLimits`. There are no others.
pub const HUGE_PAGE: u64 = 2 << 20;
pub const HUGE_PAGE_SIZE: &str = "2MB";

/// Memory for the pages of programs in a container with a memory limit, bytes. They do not count for that limit: the
/// guest's kernel charges them to the cgroup around the container's own, which is limited to so much more.
pub const PROGRAMS: u64 = 32 << 20;

/// Kernel parameters without a namespace of which a guest has the host's numbers, as files below /proc/sys. Programs
/// tell their users to raise some of them on the host. What these limit is charged to the container or takes nothing
/// by itself, except for `fs/aio-max-nr`, of which a small guest has less. `fs/protected_*` protect users from links,
/// FIFOs and files that others make. Linux sets them to 0, and systemd(1) raises them on most hosts.
pub const HOST_PARAMETERS: [&str; 12] = [
    "fs/aio-max-nr",
    "fs/file-max",
    "fs/inotify/max_user_instances",
    "fs/nr_open",
    "fs/pipe-max-size",
    "fs/protected_fifos",
    "fs/protected_hardlinks",
    "fs/protected_regular",
    "fs/protected_symlinks",
    "net/core/rmem_max",
    "net/core/wmem_max",
    "vm/max_map_count",
];

/// What kubelet calls the link to the contents of a volume that it keeps up to date.
pub const VOLUME_DATA: &str = "..data";

/// The sockets of the host's services that containers mount: a directory for each container.
pub const HOST_SOCKETS_DIR: &str = "/run/bulkhead/sockets";

/// Sockets of the host's services that one container can mount.
pub const MAX_HOST_SOCKETS: usize = 64;

/// Sockets of the host's services in the directories that the containers of a pod mount.
pub const MAX_DIRECTORY_SOCKETS: usize = 64;

/// Connections to services of the host at one time, of all containers of a pod. The next one waits for the end of one.
pub const MAX_HOST_CONNECTIONS: usize = 128;

/// The messages.
#[allow(warnings, clippy::all)]
pub mod agent {
    include!(concat!(env!("OUT_DIR"), "/agent.rs"));
}

/// The service's client and server.
#[allow(warnings, clippy::all)]
pub mod agent_ttrpc {
    include!(concat!(env!("OUT_DIR"), "/agent_ttrpc.rs"));
}
