//! Mounts by descriptor: open_tree(2), fsopen(2) and their like.

use std::{
    ffi::CStr,
    io,
    marker::PhantomData,
    mem::size_of,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use super::result::{check, owned};

/// `MOUNT_ATTR_*` of mount_setattr(2).
pub mod attr {
    /// The mount is read-only.
    pub const RDONLY: u64 = 0x1;
    /// Set-user-ID and file capabilities have no effect.
    pub const NOSUID: u64 = 0x2;
    /// Device nodes cannot be opened.
    pub const NODEV: u64 = 0x4;
    /// Programs cannot be executed.
    pub const NOEXEC: u64 = 0x8;
    /// The mask of the three exclusive access-time modes, of which relatime is zero.
    pub const ATIME_MASK: u64 = 0x70;
    /// Access times stay as they are.
    pub const NOATIME: u64 = 0x10;
    /// Access times are always updated.
    pub const STRICTATIME: u64 = 0x20;
    /// Access times of directories stay as they are.
    pub const NODIRATIME: u64 = 0x80;
    /// The ids of the files are mapped.
    pub const IDMAP: u64 = 0x10_0000;
    /// Symbolic links are not followed.
    pub const NOSYMFOLLOW: u64 = 0x20_0000;
}

/// Argument of mount_setattr(2).
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
pub struct MountAttr<'a> {
    /// `MOUNT_ATTR_*` to set.
    pub set: u64,
    /// `MOUNT_ATTR_*` to clear.
    pub clear: u64,
    /// One of `MS_PRIVATE`, `MS_SLAVE`, `MS_SHARED`, `MS_UNBINDABLE`; 0: unchanged.
    pub propagation: u64,
    /// User namespace of an id-mapped mount.
    userns_fd: u64,
    /// It stays open.
    user_namespace: PhantomData<BorrowedFd<'a>>,
}

impl<'a> MountAttr<'a> {
    /// Sets and clears attributes, and leaves the propagation as it is.
    pub fn new(set: u64, clear: u64) -> Self {
        Self { set, clear, ..Self::default() }
    }

    /// Maps the ids of the files as this user namespace does: those inside are on the file system, those outside are
    /// seen at the mount. The mount must be detached.
    pub fn id_mapped(user_namespace: BorrowedFd<'a>) -> Self {
        Self { set: attr::IDMAP, userns_fd: user_namespace.as_raw_fd() as u64, ..Self::default() }
    }

    /// Changes the propagation only.
    pub fn propagation(flag: u64) -> Self {
        Self { propagation: flag, ..Self::default() }
    }
}

/// Takes a detached copy of the mount at `path`, relative to `dir`; of all mounts below it, if `recursive`. An empty
/// path means what `dir` itself refers to.
pub fn open_tree(dir: BorrowedFd<'_>, path: &CStr, recursive: bool) -> io::Result<OwnedFd> {
    const OPEN_TREE_CLONE: libc::c_int = 1;
    let mut flags = OPEN_TREE_CLONE | libc::O_CLOEXEC | libc::AT_EMPTY_PATH;
    if recursive {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: `path` is a C string that lives through the call, and the call writes nothing.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, dir.as_raw_fd(), path.as_ptr(), flags) };
    owned(fd)
}

/// Opens a context in which a file system of this type can be configured.
pub fn fsopen(fs_type: &CStr) -> io::Result<OwnedFd> {
    const FSOPEN_CLOEXEC: libc::c_int = 1;
    // SAFETY: `fs_type` is a C string that lives through the call, and the call writes nothing.
    owned(unsafe { libc::syscall(libc::SYS_fsopen, fs_type.as_ptr(), FSOPEN_CLOEXEC) })
}

/// Sets a parameter of a file system context: `key=value`, or the flag `key`.
pub fn fsconfig_set(context: BorrowedFd<'_>, key: &CStr, value: Option<&CStr>) -> io::Result<()> {
    const FSCONFIG_SET_FLAG: libc::c_int = 0;
    const FSCONFIG_SET_STRING: libc::c_int = 1;
    let (command, value) = match value {
        Some(value) => (FSCONFIG_SET_STRING, value.as_ptr()),
        None => (FSCONFIG_SET_FLAG, std::ptr::null()),
    };
    // SAFETY: both pointers are C strings that live through the call, or null where the command wants null.
    let result = unsafe {
        libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, key.as_ptr(), value, 0 as libc::c_int)
    };
    check(result).map(drop)
}

/// Creates the file system of a configured context.
pub fn fsconfig_create(context: BorrowedFd<'_>) -> io::Result<()> {
    const FSCONFIG_CMD_CREATE: libc::c_int = 6;
    let null = std::ptr::null::<libc::c_char>();
    // SAFETY: the command takes neither key nor value.
    let result = unsafe {
        libc::syscall(
            libc::SYS_fsconfig,
            context.as_raw_fd(),
            FSCONFIG_CMD_CREATE,
            null,
            null,
            0 as libc::c_int,
        )
    };
    check(result).map(drop)
}

/// Makes a detached mount, with `MOUNT_ATTR_*` of [`attr`], of a created file system.
pub fn fsmount(context: BorrowedFd<'_>, attributes: u64) -> io::Result<OwnedFd> {
    const FSMOUNT_CLOEXEC: libc::c_uint = 1;
    // SAFETY: integers only.
    owned(unsafe {
        libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), FSMOUNT_CLOEXEC, attributes as libc::c_uint)
    })
}

/// Attaches a detached mount over what `target` refers to.
pub fn move_mount(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 0x4;
    const MOVE_MOUNT_T_EMPTY_PATH: libc::c_uint = 0x40;
    // SAFETY: both paths are empty C strings of static life.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            target.as_raw_fd(),
            c"".as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH,
        )
    };
    check(result).map(drop)
}

/// Changes the attributes of the mount that `mount` refers to; of all mounts below it too, if `recursive`.
pub fn mount_setattr(mount: BorrowedFd<'_>, recursive: bool, change: &MountAttr<'_>) -> io::Result<()> {
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty C string, `change` has the layout of struct mount_attr and the size given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            std::ptr::from_ref(change),
            size_of::<MountAttr>(),
        )
    };
    check(result).map(drop)
}
