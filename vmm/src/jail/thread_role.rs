//! The roles of the VMM's threads. A thread's role decides what its jail leaves to it.

/// What a thread is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadRole {
    /// The first thread of the process: waits for the end of the VM and serves the control socket.
    Control,
    /// The first thread of a VM that will be saved. It does what [`ThreadRole::Control`] does, and saves the VM.
    Saver,
    /// Runs a vCPU and handles its exits.
    Vcpu,
    /// Runs a vCPU of a VM with a PCI bus. It also tells KVM of the messages of the devices.
    PciVcpu,
    /// Serves the entropy device.
    Rng,
    /// Serves the vsock device.
    Vsock,
    /// Serves the network devices.
    Net,
    /// Serves the block devices.
    Block,
    /// Serves files by virtio-fs.
    Fs,
    /// Serves the balloon device.
    Balloon,
    /// Serves the memory device.
    Mem,
}

impl ThreadRole {
    /// All roles.
    pub const ALL: [Self; 11] = [
        Self::Control,
        Self::Saver,
        Self::Vcpu,
        Self::PciVcpu,
        Self::Rng,
        Self::Vsock,
        Self::Net,
        Self::Block,
        Self::Fs,
        Self::Balloon,
        Self::Mem,
    ];

    /// The name of threads with this role. `vcpu` is followed by the vCPU's index.
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Saver => "saver",
            Self::Vcpu | Self::PciVcpu => "vcpu",
            Self::Rng => "rng",
            Self::Vsock => "vsock",
            Self::Net => "net",
            Self::Block => "block",
            Self::Fs => "fs",
            Self::Balloon => "balloon",
            Self::Mem => "mem",
        }
    }

    /// Whether the thread opens and changes files of the host.
    pub(super) fn serves_files(self) -> bool {
        match self {
            Self::Fs => true,
            Self::Control
            | Self::Saver
            | Self::Vcpu
            | Self::PciVcpu
            | Self::Rng
            | Self::Vsock
            | Self::Net
            | Self::Block
            | Self::Balloon
            | Self::Mem => false,
        }
    }

    /// Whether the thread runs as root. The file server creates files for all users. The vsock thread connects to
    /// sockets that belong to root.
    pub(super) fn runs_as_root(self) -> bool {
        self.serves_files() || self.connects_to_sockets()
    }

    /// Whether the thread connects to sockets of the host.
    pub(super) fn connects_to_sockets(self) -> bool {
        self == Self::Vsock
    }
}
