//! Kinds of file systems of the host.

/// NFS (statfs(2)).
pub(super) const NFS: i64 = 0x6969;
pub(super) const PROC_SUPER_MAGIC: i64 = 0x9fa0;
/// File systems whose files the kernel makes when they are read (linux/magic.h).
const MADE_BY_KERNEL: [i64; 17] = [
    PROC_SUPER_MAGIC,
    0x6265_6572, // sysfs
    0x0027_e0eb, // cgroup v1
    0x6367_7270, // cgroup v2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xf97c_ff8c, // of SELinux
    0x4341_5d53, // of Smack
    0x6265_6570, // configfs
    0xcafe_4a11, // bpf
    0x0765_5821, // resctrl
    0x4249_4e4d, // binfmt_misc
    0x6573_5543, // fusectl
    0x6e66_7364, // nfsd
    0x1980_0202, // mqueue
    0xde5e_81e4, // efivarfs
];

/// What the file server has to know of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileSystemKind {
    Nfs,
    /// The kernel makes the contents of a file when it is read. Its size and its times say nothing about them.
    MadeByKernel,
    Other,
}

impl FileSystemKind {
    /// `magic` is `f_type` of statfs(2).
    pub(super) fn of(magic: i64) -> Self {
        match magic {
            NFS => Self::Nfs,
            _ if MADE_BY_KERNEL.contains(&magic) => Self::MadeByKernel,
            _ => Self::Other,
        }
    }
}
