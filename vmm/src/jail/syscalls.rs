//! The system calls that each thread may make, and the reason for each. [`super::seccomp`] compiles these tables to
//! filters.
//!
//! No thread can map a file or executable memory, start a process or a thread, execute a program, reach another
//! process, mount a file system or enter a namespace. Only the file server can open files.

use std::mem::size_of;

use kvm_bindings::{
    KVMIO, kvm_clock_data, kvm_debugregs, kvm_ioeventfd, kvm_irq_routing, kvm_irqchip, kvm_irqfd,
    kvm_lapic_state, kvm_mp_state, kvm_msrs, kvm_regs, kvm_sregs, kvm_userspace_memory_region,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use vmm_sys_util::ioctl::{_IOC_NONE, _IOC_READ, _IOC_WRITE, ioctl_expr};

use super::ThreadRole;

/// The type of the ioctls of block devices, whose numbers libc lacks (linux/fs.h).
const BLOCK_DEVICES: u32 = 0x12;

/// Bytes of `struct fsxattr` (linux/fs.h).
const FSXATTR: u32 = 28;

/// A system call that is allowed with these arguments. Several entries for one call are alternatives. An entry without
/// arguments allows the call with any arguments.
pub(super) struct Allowed {
    pub(super) call: libc::c_long,
    pub(super) arguments: &'static [Argument],
}

/// A condition on the lower 32 bits of an argument.
pub(super) struct Argument {
    pub(super) index: u8,
    /// The bits that are compared.
    pub(super) mask: u64,
    pub(super) value: Value,
}

pub(super) enum Value {
    Is(u64),
    ThisProcess,
}

const fn any(call: libc::c_long) -> Allowed {
    Allowed { call, arguments: &[] }
}

const fn when(call: libc::c_long, arguments: &'static [Argument]) -> Allowed {
    Allowed { call, arguments }
}

const fn is(index: u8, value: u64) -> Argument {
    Argument { index, mask: u32::MAX as u64, value: Value::Is(value) }
}

const fn has(index: u8, bits: libc::c_int) -> Argument {
    Argument { index, mask: bits as u64, value: Value::Is(bits as u64) }
}

const fn lacks(index: u8, bits: libc::c_int) -> Argument {
    Argument { index, mask: bits as u64, value: Value::Is(0) }
}

/// The second argument of ioctl(2): a request of KVM. Its number is computed as in linux/kvm.h.
const fn kvm(direction: u32, number: u32, size: usize) -> Argument {
    is(1, ioctl_expr(direction, KVMIO, number, size as u32))
}

/// The system calls of every thread.
pub(super) const EVERY_THREAD: &[Allowed] = &[
    // Eventfds, sockets and files that are open.
    any(libc::SYS_read),
    any(libc::SYS_write),
    any(libc::SYS_close),
    // The standard library calls it in debug builds before it closes a descriptor.
    when(libc::SYS_fcntl, &[is(1, libc::F_GETFD as u64)]),
    // The allocator: its heap,
    any(libc::SYS_brk),
    // and anonymous mappings for its arenas and for large allocations. They are never executable.
    when(libc::SYS_mmap, &[lacks(2, libc::PROT_EXEC), has(3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)]),
    when(libc::SYS_mprotect, &[lacks(2, libc::PROT_EXEC)]),
    any(libc::SYS_munmap),
    any(libc::SYS_mremap),
    any(libc::SYS_madvise),
    // Mutexes, channels, and joining a thread.
    any(libc::SYS_futex),
    any(libc::SYS_sched_yield),
    // If the vDSO cannot read the clock.
    any(libc::SYS_clock_gettime),
    // Keys of hash maps.
    any(libc::SYS_getrandom),
    // The signal that makes a vCPU leave the guest, and a call that was interrupted by stopping the process.
    any(libc::SYS_rt_sigreturn),
    any(libc::SYS_rt_sigprocmask),
    any(libc::SYS_restart_syscall),
    // The end of a thread.
    any(libc::SYS_sigaltstack),
    any(libc::SYS_exit),
    // The end of the process, which any thread may cause by SIGBUS.
    any(libc::SYS_exit_group),
    // A panic: its message,
    when(libc::SYS_writev, &[is(0, libc::STDERR_FILENO as u64)]),
    // and abort(3).
    when(libc::SYS_rt_sigaction, &[is(0, libc::SIGABRT as u64)]),
    any(libc::SYS_getpid),
    any(libc::SYS_gettid),
    when(libc::SYS_tgkill, &[Argument { index: 0, mask: u32::MAX as u64, value: Value::ThisProcess }]),
];

/// The system calls of threads with this role, in addition to [`EVERY_THREAD`].
pub(super) fn for_role(role: ThreadRole) -> &'static [&'static [Allowed]] {
    match role {
        ThreadRole::Control => &[EVENTS, CLIENTS, CONTROL, GROWTH, ATTACHING],
        ThreadRole::Saver => &[EVENTS, CLIENTS, CONTROL, SAVER],
        ThreadRole::Vcpu => &[VCPU],
        ThreadRole::PciVcpu => &[VCPU, MESSAGES],
        ThreadRole::Rng | ThreadRole::Balloon | ThreadRole::Mem => &[EVENTS],
        ThreadRole::Vsock => &[EVENTS, CLIENTS, VSOCK],
        ThreadRole::Net => &[EVENTS, NET],
        ThreadRole::Block => &[EVENTS, BLOCK],
        ThreadRole::Fs => &[EVENTS, FS],
    }
}

/// Waiting for events.
const EVENTS: &[Allowed] =
    &[any(libc::SYS_epoll_create1), any(libc::SYS_epoll_ctl), any(libc::SYS_epoll_wait)];

/// Accepting clients of a listening Unix socket.
const CLIENTS: &[Allowed] = &[
    any(libc::SYS_accept4),
    // Requests and replies.
    any(libc::SYS_recvfrom),
    any(libc::SYS_sendto),
    // Their sockets do not block.
    when(libc::SYS_ioctl, &[is(1, libc::FIONBIO)]),
];

const CONTROL: &[Allowed] = &[
    // The pause before the next attempt to accept a client.
    any(libc::SYS_clock_nanosleep),
    // Requests to the control socket, with which a file descriptor may come.
    any(libc::SYS_recvmsg),
];

/// Attaching a network device or a block device.
const ATTACHING: &[Allowed] = &[
    // The events of its interrupt and of its queues,
    any(libc::SYS_eventfd2),
    // which KVM is told of (KVM_IRQFD and KVM_IOEVENTFD).
    when(libc::SYS_ioctl, &[kvm(_IOC_WRITE, 0x76, size_of::<kvm_irqfd>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_WRITE, 0x79, size_of::<kvm_ioeventfd>())]),
    // Asking which offloads a tap device can have.
    when(libc::SYS_ioctl, &[is(1, libc::TUNSETOFFLOAD)]),
    // What the file descriptor of a block device is of, whether it can be written to,
    any(libc::SYS_fstat),
    when(libc::SYS_fcntl, &[is(1, libc::F_GETFL as u64)]),
    // and the sizes of the host's device.
    when(libc::SYS_ioctl, &[is(1, ioctl_expr(_IOC_READ, BLOCK_DEVICES, 114, size_of::<u64>() as u32))]),
    when(libc::SYS_ioctl, &[is(1, libc::BLKSSZGET)]),
    when(libc::SYS_ioctl, &[is(1, libc::BLKPBSZGET)]),
    when(libc::SYS_ioctl, &[is(1, libc::BLKIOMIN)]),
    when(libc::SYS_ioctl, &[is(1, libc::BLKIOOPT)]),
];

const GROWTH: &[Allowed] = &[
    // Adding memory to the guest (KVM_SET_USER_MEMORY_REGION).
    when(libc::SYS_ioctl, &[kvm(_IOC_WRITE, 0x46, size_of::<kvm_userspace_memory_region>())]),
    // Reading how many huge pages are free from a file that is open.
    any(libc::SYS_pread64),
];

/// Reading the state of a VM from KVM. MSRs are also written: those that KVM does not accept are not saved.
const SAVER: &[Allowed] = &[
    when(libc::SYS_ioctl, &[kvm(_IOC_READ, 0x81, size_of::<kvm_regs>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ, 0x83, size_of::<kvm_sregs>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ | _IOC_WRITE, 0x88, size_of::<kvm_msrs>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_WRITE, 0x89, size_of::<kvm_msrs>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ, 0x8e, size_of::<kvm_lapic_state>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ, 0x98, size_of::<kvm_mp_state>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ, 0x9f, size_of::<kvm_vcpu_events>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ, 0xa1, size_of::<kvm_debugregs>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_NONE, 0xa3, 0)]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ, 0xa4, size_of::<kvm_xsave>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ, 0xa6, size_of::<kvm_xcrs>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ | _IOC_WRITE, 0x62, size_of::<kvm_irqchip>())]),
    when(libc::SYS_ioctl, &[kvm(_IOC_READ, 0x7c, size_of::<kvm_clock_data>())]),
    // Finding the pages that the guest has touched, in a file that is open.
    any(libc::SYS_pread64),
];

const VCPU: &[Allowed] = &[
    // Running the guest (KVM_RUN). No other request of KVM is allowed.
    when(libc::SYS_ioctl, &[kvm(_IOC_NONE, 0x80, 0)]),
    // The eventfds of a device's queues are duplicated when its driver activates it.
    when(libc::SYS_fcntl, &[is(1, libc::F_DUPFD_CLOEXEC as u64)]),
];

const MESSAGES: &[Allowed] = &[
    // The driver sets a message up, which goes to the table of the VM (KVM_SET_GSI_ROUTING).
    when(libc::SYS_ioctl, &[kvm(_IOC_WRITE, 0x6a, size_of::<kvm_irq_routing>())]),
];

const VSOCK: &[Allowed] = &[
    // The timer for the next attempt to accept a client.
    any(libc::SYS_timerfd_settime),
    // A connection from the guest to a socket of the host.
    when(libc::SYS_socket, &[is(0, libc::AF_UNIX as u64)]),
    any(libc::SYS_connect),
    // Shutting down one or both directions of a connection.
    any(libc::SYS_shutdown),
];

const NET: &[Allowed] = &[
    // Moving a packet between the tap device and guest memory.
    any(libc::SYS_readv),
    any(libc::SYS_writev),
    // Enabling the offloads that the driver has negotiated,
    when(libc::SYS_ioctl, &[is(1, libc::TUNSETOFFLOAD)]),
    // and as many queues of the tap device as it uses.
    when(libc::SYS_ioctl, &[is(1, libc::TUNSETQUEUE)]),
];

const BLOCK: &[Allowed] = &[
    // Moving data between the host's device and guest memory.
    any(libc::SYS_preadv),
    any(libc::SYS_pwritev),
    // A flush.
    any(libc::SYS_fdatasync),
    // Zeroes, and a discard on a file.
    any(libc::SYS_fallocate),
    // A discard on a device.
    when(libc::SYS_ioctl, &[is(1, ioctl_expr(_IOC_NONE, BLOCK_DEVICES, 119, 0))]),
];

/// The calls that serve FUSE requests.
const FS: &[Allowed] = &[
    // A new file belongs to the user and group of the calling process and gets its umask. What root may not do, the
    // thread does as this process. Then it is root again.
    any(libc::SYS_geteuid),
    any(libc::SYS_getegid),
    any(libc::SYS_setresuid),
    any(libc::SYS_setresgid),
    any(libc::SYS_setgroups),
    any(libc::SYS_umask),
    // CAP_FSETID is dropped while a file is changed for another user than root.
    any(libc::SYS_capget),
    any(libc::SYS_capset),
    // LOOKUP and GETATTR, and the first step of most other requests.
    any(libc::SYS_openat),
    any(libc::SYS_statx),
    // SETATTR, by /proc/self/fd.
    any(libc::SYS_fchmodat),
    any(libc::SYS_fchownat),
    any(libc::SYS_ftruncate),
    any(libc::SYS_utimensat),
    // READ and WRITE.
    any(libc::SYS_preadv),
    any(libc::SYS_pwritev),
    // READ of a file without positions; write(2) is allowed to all.
    any(libc::SYS_readv),
    // WRITE to the end of a file.
    when(libc::SYS_pwritev2, &[is(5, libc::RWF_APPEND as u64)]),
    // FLUSH closes a duplicate of the descriptor.
    when(libc::SYS_fcntl, &[is(1, libc::F_DUPFD_CLOEXEC as u64)]),
    // GETLK and SETLK. None of these waits: there is no F_OFD_SETLKW, and flock(2) has LOCK_NB.
    when(libc::SYS_fcntl, &[is(1, libc::F_OFD_GETLK as u64)]),
    when(libc::SYS_fcntl, &[is(1, libc::F_OFD_SETLK as u64)]),
    when(libc::SYS_flock, &[has(1, libc::LOCK_NB)]),
    // FSYNC, SYNCFS, FALLOCATE, LSEEK, COPY_FILE_RANGE, STATFS.
    any(libc::SYS_fsync),
    any(libc::SYS_fdatasync),
    any(libc::SYS_syncfs),
    any(libc::SYS_fallocate),
    any(libc::SYS_lseek),
    any(libc::SYS_copy_file_range),
    any(libc::SYS_fstatfs),
    // IOCTL: reading and setting inode flags (FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR),
    // and FS_IOC_GETVERSION. The kernel's numbers say `long`.
    when(libc::SYS_ioctl, &[is(1, ioctl_expr(_IOC_READ, b'f' as u32, 1, size_of::<libc::c_long>() as u32))]),
    when(libc::SYS_ioctl, &[is(1, ioctl_expr(_IOC_WRITE, b'f' as u32, 2, size_of::<libc::c_long>() as u32))]),
    when(libc::SYS_ioctl, &[is(1, ioctl_expr(_IOC_READ, b'X' as u32, 31, FSXATTR))]),
    when(libc::SYS_ioctl, &[is(1, ioctl_expr(_IOC_WRITE, b'X' as u32, 32, FSXATTR))]),
    when(libc::SYS_ioctl, &[is(1, ioctl_expr(_IOC_READ, b'v' as u32, 1, size_of::<libc::c_long>() as u32))]),
    // READDIR.
    any(libc::SYS_getdents64),
    // Names: READLINK, SYMLINK, LINK, MKDIR, MKNOD, RENAME2, UNLINK and RMDIR.
    any(libc::SYS_readlinkat),
    any(libc::SYS_symlinkat),
    any(libc::SYS_linkat),
    any(libc::SYS_mkdirat),
    any(libc::SYS_mknodat),
    any(libc::SYS_renameat2),
    any(libc::SYS_unlinkat),
    // Extended attributes, by /proc/self/fd.
    any(libc::SYS_getxattr),
    any(libc::SYS_setxattr),
    any(libc::SYS_listxattr),
    any(libc::SYS_removexattr),
];
