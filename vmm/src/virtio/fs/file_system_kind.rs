//! Kinds of file systems of the host.

/// `NFS_SUPER_MAGIC` (statfs(2)).
pub(super) const NFS: i64 = 0x6969;
/// `PROC_SUPER_MAGIC`.
pub(super) const PROC_SUPER_MAGIC: i64 = 0x9fa0;
/// File systems whose files the kernel makes when they are read (linux/magic.h): procfs, sysfs, cgroups of both
/// versions, debugfs, tracefs, securityfs, those of SELinux and Smack, configfs, bpf, resctrl, binfmt_misc, efivarfs.
const MADE_BY_KERNEL: [i64; 14] = [
    PROC_SUPER_MAGIC,
    0x6265_6572,
    0x0027_e0eb,
    0x6367_7270,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0xf97c_ff8c,
    0x4341_5d53,
    0x6265_6570,
    0xcafe_4a11,
    0x0765_5821,
    0x4249_4e4d,
    0xde5e_81e4,
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
