//! The interface of the VMM to the shim: its configuration, and the requests of its control socket.
//!
//! Both are JSON, so that an operator can read them and start a VM by hand with `bulkhead-vmm --config vmm.json`.

#![deny(unsafe_code)]

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

pub use shape::{Part, PartError, Shape};
pub use shared_socket::SharedSocket;
pub use working_set::{LONGEST_WORKING_SET, Run, WORKING_SET_FILE, WorkingSet};

mod shape;
mod shared_socket;
#[allow(unsafe_code)]
pub mod tap;
mod working_set;

/// Version of this interface. A VMM refuses a configuration of any other version.
pub const API_VERSION: u32 = 15;

/// The first port of the host that the VMM assigns to connections by [`VmConfig::vsock`] that name no source port.
pub const FIRST_HOST_PORT: u32 = 1 << 30;

/// The unit in MiB by which the memory of a VM grows: the size of a memory block of Linux on x86_64.
pub const BLOCK_MIB: u32 = 128;

/// The most devices that [`ControlRequest::AttachNic`] and [`ControlRequest::AttachBlock`] add to a VM and that it has
/// at the same time, if its other devices leave as many interrupts.
pub const ATTACHABLE_DEVICES: usize = 10;

/// The most queues of a block device, and the most pairs of queues of a network device. Each costs a VM a thread.
pub const MOST_QUEUES: u8 = 4;

/// How many queues each block device of a VM has, and how many pairs of queues each network device: one for each vCPU
/// that the VM can have, up to [`MOST_QUEUES`].
pub fn queues(vcpus: u8) -> usize {
    vcpus.clamp(1, MOST_QUEUES).into()
}

/// The most bytes of [`ControlRequest::AttachBlock::serial`] (virtio 1.3, 5.2.6).
pub const MAX_SERIAL: usize = 20;

/// The exit status of the VMM if it cannot restore the VM of [`VmConfig::restore_from`]: its files are missing or
/// damaged, or it was saved with another kernel, initramfs, VMM or processor. The VM can boot instead.
pub const EXIT_NOT_RESTORED: u8 = 3;

/// The exit status of the VMM if the host has no KVM that it can use.
pub const EXIT_NO_KVM: u8 = 4;

/// The file of a saved VM with the contents of its memory, in [`VmConfig::save_to`].
pub const MEMORY_FILE: &str = "memory";
/// The file of a saved VM with all other state. It is written last.
pub const STATE_FILE: &str = "state.json";

/// The name of a container's root in the directory that a share has for each container. Few but the guest change the
/// files below it, so the guest may cache them for longer than others.
pub const ROOTFS: &str = "rootfs";

/// The line that the VMM writes to its standard output when the vCPUs run.
pub const RUNNING: &str = "running";

/// How each line begins that the VMM prints for its guest on standard error, when the guest has ended. The rest of the
/// line is the guest's choice, without control characters.
pub const GUEST_SAYS: &str = "guest: ";

/// The configuration of a VM. Relative paths are relative to the working directory of the VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// Must be [`API_VERSION`].
    pub api_version: u32,
    /// Uncompressed ELF `vmlinux`.
    pub kernel: PathBuf,
    /// newc cpio archive whose `/init` is the agent.
    pub initramfs: PathBuf,
    /// Arguments that are appended to the kernel command line.
    #[serde(default)]
    pub kernel_args: Vec<String>,
    /// The number of vCPUs, 1 to 32.
    pub vcpus: u8,
    /// The initial memory in MiB, at least 64.
    pub memory_mib: u32,
    /// The most memory in MiB that the VM may have after [`ControlRequest::Resize`]: `memory_mib`, which is the
    /// default, or more by a multiple of [`BLOCK_MIB`].
    #[serde(default)]
    pub max_memory_mib: Option<u32>,
    /// Take the guest's memory from the host's pool of 2 MiB huge pages. The initial memory is taken before the guest
    /// runs, and added memory when it is added. No page goes back to the pool before the VM ends. `memory_mib` must
    /// be even, and `save_to` and `restore_from` must be absent.
    #[serde(default)]
    pub hugepages: bool,
    /// The file to which the output of the guest's serial console is appended. None: the guest's kernel writes
    /// emergencies and panics only, which makes it boot faster. The VMM prints the last of them when the guest ends
    /// ([`GUEST_SAYS`]).
    #[serde(default)]
    pub console: Option<PathBuf>,
    /// The Unix socket for [`ControlRequest`]s. The VMM creates it but cannot remove it, because it is in a jail
    /// then. The process that started the VMM has to remove it.
    pub control: PathBuf,
    /// The path of the Unix socket for connections from the host to the guest. A client writes `CONNECT <port>\n` and
    /// reads `OK <port of the host>\n`. Then the stream is connected to the guest. `CONNECT <port> <port of the
    /// host>\n` chooses the source port, which must be below [`FIRST_HOST_PORT`] and must have no other connection to
    /// the same port of the guest. A guest that connects to port P of the host (CID 2) reaches the Unix socket
    /// `<path>_P`, if that existed when the VMM started.
    pub vsock: PathBuf,
    /// The directories that are shared with the guest by virtio-fs.
    #[serde(default)]
    pub shares: Vec<ShareConfig>,
    /// The network namespace that the VMM enters first. The tap devices are created in it. None: a new network
    /// namespace. The VMM never stays in the network namespace in which it was started.
    #[serde(default)]
    pub netns: Option<PathBuf>,
    /// The network devices.
    #[serde(default)]
    pub nics: Vec<NicConfig>,
    /// The `cgroup.procs` files of the cgroups that the VMM joins before it creates the VM.
    #[serde(default)]
    pub cgroup_procs: Vec<PathBuf>,
    /// How the guest's drivers reach the virtio devices.
    #[serde(default)]
    pub transport: Transport,
    /// The directory to which [`ControlRequest::Save`] saves the VM. It must not contain a saved VM yet.
    #[serde(default)]
    pub save_to: Option<PathBuf>,
    /// The directory with a saved VM, from whose state this VM continues. It must have been saved by the same VMM
    /// with the same kernel, initramfs, sizes, transport and devices. None: the VM boots.
    #[serde(default)]
    pub restore_from: Option<PathBuf>,
}

/// A transport of virtio.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// Each device has a page of registers, which the kernel's command line names, and an interrupt line (virtio 1.3,
    /// 4.2).
    Mmio,
    /// Each device is a function of a PCI bus, and has an interrupt message for each queue (virtio 1.3, 4.1).
    #[default]
    Pci,
}

/// A directory that is shared by virtio-fs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareConfig {
    /// The tag by which the guest mounts it, at most 36 bytes (virtio 1.3, 5.11.4).
    pub tag: String,
    /// The directory of the host.
    pub dir: PathBuf,
    /// Nobody but this guest changes the files that it uses of this share. So the guest need not say when it opens or
    /// closes a file, and may cache what it knows for long.
    #[serde(default)]
    pub exclusive: bool,
}

/// A network device on a tap device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicConfig {
    /// The name of the tap device. The VMM creates it in [`VmConfig::netns`], and the kernel removes it when the VMM
    /// ends. The VMM does not bring it up.
    pub tap: String,
    /// The MAC address of the guest, such as `02:00:00:00:00:01`.
    pub mac: String,
}

/// A request to the control socket: a line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    /// Replies [`ControlReply::Ok`] if the VM runs.
    Status,
    /// Ends the VM at once, like a power failure. The VMM exits with status 0.
    Stop,
    /// Saves the VM to [`VmConfig::save_to`] and ends it. The VMM exits with status 0 if the VM was saved, and with
    /// an error otherwise. The connections of the guest are not saved.
    Save,
    /// Changes the memory of the guest to `memory_mib`. The VMM grants memory in units of [`BLOCK_MIB`]. What is too
    /// much is taken away from the guest's kernel by the balloon device, and goes back to the host. With
    /// [`VmConfig::hugepages`] there is no balloon, so the guest gets whole units, and never less than it had.
    ///
    /// The guest decides whether it does so. The replies are any number of [`ControlReply::Memory`], one each time the
    /// guest's memory is nearer to the size than was reported before, and [`ControlReply::Ok`] when it has the size
    /// that was requested last. The first reply comes at once: from then on the request is the last one.
    Resize {
        /// In MiB, at most [`VmConfig::max_memory_mib`].
        memory_mib: u32,
    },
    /// Closes all files of directories of the shares that the host has unmounted, soon after the reply. The guest may
    /// still use such files. Its requests for them fail from then on.
    CloseUnmounted,
    /// Counts what the guest has requested of the devices since the VMM has started. The reply is
    /// [`ControlReply::Counts`].
    Counts,
    /// Says what the devices have done since the VMM has started. The reply is [`ControlReply::Devices`]. An
    /// older VMM, which does not know the request, replies [`ControlReply::Error`].
    DeviceCounts,
    /// Adds a network device. A VM gets at most [`ATTACHABLE_DEVICES`] after its start. The file descriptors of its tap
    /// device, as [`tap::create`] makes them with this many [`queues`], are sent with the request in one message
    /// (SCM_RIGHTS). The guest finds the device when it probes the placeholders on its command line again: until then
    /// they have the device ID 0 (virtio 1.3, 4.2.2). With [`Transport::Pci`] it finds the device when it scans the bus
    /// again. A network device is not removed before the VM ends. A VM that will be saved gets no device.
    AttachNic {
        /// The MAC address of the guest, as [`NicConfig::mac`].
        mac: String,
    },
    /// Adds a block device, in the same way as [`ControlRequest::AttachNic`]. A file descriptor of a block device of
    /// the host, or of a file, is sent with the request. It keeps the size that it has now.
    AttachBlock {
        /// The serial number by which the guest finds it, at most [`MAX_SERIAL`] bytes.
        serial: String,
        /// The guest cannot write, although the file descriptor may be writable.
        #[serde(default)]
        read_only: bool,
        /// The host's device has a discard command.
        #[serde(default)]
        discards: bool,
    },
    /// Takes a block device away that [`ControlRequest::AttachBlock`] has added, if there is one, and closes its file.
    /// A driver that still uses it gets an error for each request. The place is free for another device when the driver
    /// has reset this one. The reply is an error if a request is under way: then the file is closed when that ends.
    DetachBlock {
        /// That of the device.
        serial: String,
    },
}

/// A reply of the control socket: a line of JSON. There is one for each request, but several for
/// [`ControlRequest::Resize`]. Replies have the order of the requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlReply {
    /// The request was carried out.
    Ok,
    /// The request was not carried out completely yet.
    Memory {
        /// The memory that the guest has now, in MiB.
        memory_mib: u32,
    },
    /// The reply to [`ControlRequest::Counts`].
    Counts {
        /// One for each of [`VmConfig::shares`].
        shares: Vec<ShareCounts>,
    },
    /// The reply to [`ControlRequest::DeviceCounts`].
    Devices(DeviceCounts),
    /// The request was not carried out.
    Error {
        /// The reason, in one line for an operator.
        message: String,
    },
}

/// What the guest has requested of a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareCounts {
    /// As [`ShareConfig::tag`].
    pub tag: String,
    /// The number of FUSE requests by the name of their opcode (`LOOKUP`), of those that there were.
    pub requests: BTreeMap<String, u64>,
}

/// What the devices of a VM have done. None: the VM has no such device, or the VMM does not count that. A later version
/// may have more fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceCounts {
    /// Bytes that are in the balloon now.
    pub balloon_bytes: Option<u64>,
    /// Bytes that the guest has reported as free, and that went back to the host. The guest may use them again.
    pub reported_bytes: Option<u64>,
    /// Bytes that are plugged now by the memory device, beside the initial memory.
    pub plugged_bytes: Option<u64>,
    /// Of all block devices together, including those that were taken away.
    pub block: Option<BlockCounts>,
    /// Payload of the socket device that the guest has received: standard input and requests to the agent.
    pub vsock_received_bytes: Option<u64>,
    /// Payload that the guest has sent.
    pub vsock_sent_bytes: Option<u64>,
}

/// What the guest has requested of its block devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockCounts {
    /// Requests of all types, including those that failed.
    pub requests: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_says_no_more_than_it_must() {
        let text = r#"{"api_version":15,"kernel":"k","initramfs":"i","vcpus":1,"memory_mib":256,
            "control":"control.sock","vsock":"vsock.sock"}"#;
        let config: VmConfig = serde_json::from_str(text).unwrap();
        assert_eq!((&config.console, &config.netns), (&None, &None));
        assert_eq!((&config.save_to, &config.restore_from), (&None, &None));
        assert_eq!((config.max_memory_mib, config.hugepages), (None, false));
        assert_eq!(config.transport, Transport::Pci);
        assert!(config.shares.is_empty() && config.nics.is_empty() && config.cgroup_procs.is_empty());
        let again = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<VmConfig>(&again).unwrap(), config);
    }

    #[test]
    fn a_field_that_is_not_known_is_refused() {
        let text = r#"{"tag":"share","dir":"d","readonly":true}"#;
        let error = serde_json::from_str::<ShareConfig>(text).unwrap_err();
        assert!(error.to_string().contains("`readonly`"), "{error}");
    }

    #[test]
    fn control_is_spoken_in_these_words() {
        let words = |value: &ControlRequest| serde_json::to_string(value).unwrap();
        assert_eq!(words(&ControlRequest::Status), r#"{"op":"status"}"#);
        assert_eq!(words(&ControlRequest::Stop), r#"{"op":"stop"}"#);
        assert_eq!(words(&ControlRequest::Save), r#"{"op":"save"}"#);
        let resize = ControlRequest::Resize { memory_mib: 512 };
        assert_eq!(words(&resize), r#"{"op":"resize","memory_mib":512}"#);
        assert_eq!(words(&ControlRequest::CloseUnmounted), r#"{"op":"close_unmounted"}"#);
        let attach = ControlRequest::AttachNic { mac: "02:00:00:00:00:02".into() };
        assert_eq!(words(&attach), r#"{"op":"attach_nic","mac":"02:00:00:00:00:02"}"#);
        let block = ControlRequest::AttachBlock { serial: "8:16".into(), read_only: true, discards: false };
        let text = r#"{"op":"attach_block","serial":"8:16","read_only":true,"discards":false}"#;
        assert_eq!(words(&block), text);
        let detach = ControlRequest::DetachBlock { serial: "8:16".into() };
        assert_eq!(words(&detach), r#"{"op":"detach_block","serial":"8:16"}"#);
        let memory = ControlReply::Memory { memory_mib: 384 };
        assert_eq!(serde_json::to_string(&memory).unwrap(), r#"{"result":"memory","memory_mib":384}"#);
        assert_eq!(serde_json::to_string(&ControlReply::Ok).unwrap(), r#"{"result":"ok"}"#);
        assert_eq!(words(&ControlRequest::Counts), r#"{"op":"counts"}"#);
        let requests = BTreeMap::from([("LOOKUP".to_owned(), 2)]);
        let counts = ControlReply::Counts { shares: vec![ShareCounts { tag: "share".into(), requests }] };
        assert_eq!(
            serde_json::to_string(&counts).unwrap(),
            r#"{"result":"counts","shares":[{"tag":"share","requests":{"LOOKUP":2}}]}"#
        );
        let error = ControlReply::Error { message: "no".into() };
        assert_eq!(serde_json::to_string(&error).unwrap(), r#"{"result":"error","message":"no"}"#);
    }
}
