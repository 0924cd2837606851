//! What the shim tells the VMM: the configuration it is born with and the requests of its control socket.
//!
//! Both are JSON, so that an operator can read them and start a VM by hand: `bulkhead-vmm --config vmm.json`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use shape::{Part, PartError, Shape};

mod shape;

/// Version of this interface. A VMM refuses a configuration of any other version.
pub const API_VERSION: u32 = 6;

/// The ports of the host that the VMM itself gives the connections of [`VmConfig::vsock`] start here.
pub const FIRST_HOST_PORT: u32 = 1 << 30;

/// MiB by which a VM's memory grows: as many as Linux adds at a time on x86_64, whatever is asked for.
pub const BLOCK_MIB: u32 = 128;

/// Exit status of a VMM whose VM cannot go on from [`VmConfig::restore_from`]: what is there is missing, damaged, or of
/// other parts or another host than these. It can boot instead.
pub const EXIT_NOT_RESTORED: u8 = 3;

/// The files of a saved VM, in [`VmConfig::save_to`]: what is in its memory, and all else, which is written last.
pub const MEMORY_FILE: &str = "memory";
/// See [`MEMORY_FILE`].
pub const STATE_FILE: &str = "state.json";

/// What a VMM says on its standard output, a line, once the VM runs.
pub const RUNNING: &str = "running";

/// Everything one VM is born with. Relative paths are relative to the VMM's working directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// Must be [`API_VERSION`].
    pub api_version: u32,
    /// Uncompressed ELF `vmlinux`.
    pub kernel: PathBuf,
    /// newc cpio archive whose `/init` is the agent.
    pub initramfs: PathBuf,
    /// Words added to the end of the kernel's command line.
    #[serde(default)]
    pub kernel_args: Vec<String>,
    /// 1..=32.
    pub vcpus: u8,
    /// MiB, at least 64.
    pub memory_mib: u32,
    /// MiB that [`ControlRequest::Grow`] can have the VM have: as many as `memory_mib`, the default, or more by a multiple of
    /// [`BLOCK_MIB`].
    #[serde(default)]
    pub max_memory_mib: Option<u32>,
    /// Take the guest's memory from the host's pool of 2 MiB pages, all of it before the guest runs, and what it grows by when
    /// it does: none of it goes back while the VM lives. `memory_mib` is even then, and there is neither `save_to` nor
    /// `restore_from`.
    #[serde(default)]
    pub hugepages: bool,
    /// File that the guest's serial console is appended to. None: the guest has no serial port, which boots faster.
    #[serde(default)]
    pub console: Option<PathBuf>,
    /// Unix socket on which the VMM serves [`ControlRequest`]s. Created by the VMM, which cannot remove it from
    /// its jail: that is for whoever started it.
    pub control: PathBuf,
    /// Path of the Unix socket by which the host connects into the guest: write `CONNECT <port>\n`, read
    /// `OK <port of the host>\n`, then the bytes are the guest's. `CONNECT <port> <port of the host>\n` has the guest see
    /// it come from that port, which is below [`FIRST_HOST_PORT`] and has no other connection to the same port of the guest.
    /// A guest that connects to port P of the host (CID 2) reaches whoever listens at `<path>_P`, if that was there when
    /// the VMM started.
    pub vsock: PathBuf,
    /// Directories served to the guest by virtio-fs.
    #[serde(default)]
    pub shares: Vec<ShareConfig>,
    /// Network namespace that the VMM joins before it makes anything: where the taps of its cards are. None: a new
    /// one of its own. Never the one that it was started in.
    #[serde(default)]
    pub netns: Option<PathBuf>,
    /// Network cards.
    #[serde(default)]
    pub nics: Vec<NicConfig>,
    /// `cgroup.procs` files of the host that the VMM joins before it creates the VM.
    #[serde(default)]
    pub cgroup_procs: Vec<PathBuf>,
    /// Directory to which [`ControlRequest::Save`] saves the VM. Nothing of the kind may be in it yet.
    #[serde(default)]
    pub save_to: Option<PathBuf>,
    /// Directory in which a VM was saved that this one goes on from. It must have been saved by this VMM, of this kernel
    /// and initramfs, with as many of everything. None: the VM boots.
    #[serde(default)]
    pub restore_from: Option<PathBuf>,
}

/// One directory served by virtio-fs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareConfig {
    /// Mount tag, at most 36 bytes (virtio 1.3, 5.11.4).
    pub tag: String,
    /// Directory of the host.
    pub dir: PathBuf,
}

/// One virtio-net card on a tap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicConfig {
    /// Name of the tap, which the VMM makes in [`VmConfig::netns`] and which ends with the VMM. Whoever ties it to
    /// something brings it up.
    pub tap: String,
    /// The guest's address, `02:00:00:00:00:01`.
    pub mac: String,
}

/// One line of JSON to the control socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    /// Answers [`ControlReply::Ok`] while the VM runs.
    Status,
    /// Ends the VM at once, as if its plug were pulled; the VMM exits 0.
    Stop,
    /// Saves the VM to [`VmConfig::save_to`] and ends it; the VMM exits 0 when all is written, else it says why not. The
    /// guest's connections are not saved: whoever restores it has to connect again.
    Save,
    /// Has the VM have so much memory at least, MiB, rounded up to what it can have ([`BLOCK_MIB`]): its guest is told so,
    /// and does it or not. Answered by [`ControlReply::Memory`], again and again whenever the guest has taken or given some,
    /// and at last by [`ControlReply::Ok`].
    Grow {
        /// At most [`VmConfig::max_memory_mib`].
        memory_mib: u32,
    },
}

/// One line of JSON from the control socket, one for each request but [`ControlRequest::Grow`], in the order of the requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlReply {
    /// Done.
    Ok,
    /// Not done yet.
    Memory {
        /// MiB that the VM has by now.
        memory_mib: u32,
    },
    /// Not done, and why.
    Error {
        /// One line for an operator.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_says_no_more_than_it_must() {
        let text = r#"{"api_version":6,"kernel":"k","initramfs":"i","vcpus":1,"memory_mib":256,
            "control":"control.sock","vsock":"vsock.sock"}"#;
        let config: VmConfig = serde_json::from_str(text).unwrap();
        assert_eq!((&config.console, &config.netns), (&None, &None));
        assert_eq!((&config.save_to, &config.restore_from), (&None, &None));
        assert_eq!((config.max_memory_mib, config.hugepages), (None, false));
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
        let grow = ControlRequest::Grow { memory_mib: 512 };
        assert_eq!(words(&grow), r#"{"op":"grow","memory_mib":512}"#);
        let memory = ControlReply::Memory { memory_mib: 384 };
        assert_eq!(serde_json::to_string(&memory).unwrap(), r#"{"result":"memory","memory_mib":384}"#);
        assert_eq!(serde_json::to_string(&ControlReply::Ok).unwrap(), r#"{"result":"ok"}"#);
        let error = ControlReply::Error { message: "no".into() };
        assert_eq!(serde_json::to_string(&error).unwrap(), r#"{"result":"error","message":"no"}"#);
    }
}
