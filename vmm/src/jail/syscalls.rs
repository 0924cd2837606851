//! Which system calls a thread may make, and why: the tables that [`super::seccomp`] makes filters of.
//!
//! None of them maps memory that can be executed, or a file; none starts a process or a thread, executes a program, or
//! reaches another process; none mounts, or leaves a namespace. What opens a file is the file server's alone.

use std::mem::size_of;

use kvm_bindings::{
    KVMIO, kvm_clock_data, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msrs, kvm_regs,
    kvm_sregs, kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use vmm_sys_util::ioctl::{_IOC_NONE, _IOC_READ, _IOC_WRITE, ioctl_expr};

use super::Duty;

/// A system call that may be made, if its arguments are as they are here. Another entry for the same call is another
/// way in which it may be made; one without arguments makes any way right.
pub(super) struct Allowed {
    pub(super) call: libc::c_long,
    pub(super) arguments: &'static [Argument],
}

/// The lower half of an argument, in which all of these arguments have their bits.
pub(super) struct Argument {
    pub(super) index: u8,
    /// The bits that are looked at.
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

/// A request of KVM, as linux/kvm.h makes its number.
const fn kvm(direction: u32, number: u32, size: usize) -> Argument {
    is(1, ioctl_expr(direction, KVMIO, number, size as u32))
}

/// Of every thread.
pub(super) const EVERY_THREAD: &[Allowed] = &[
    // Eventfds (interrupts, kicks, the end), sockets and files: only what is open.
    any(libc::SYS_read),
    any(libc::SYS_write),
    any(libc::SYS_close),
    // What a debug build asks before it closes a descriptor.
    when(libc::SYS_fcntl, &[is(1, libc::F_GETFD as u64)]),
    // The allocator: its heap,
    any(libc::SYS_brk),
    // and its arenas, and large pieces: never executable, never a file.
    when(libc::SYS_mmap, &[lacks(2, libc::PROT_EXEC), has(3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)]),
    when(libc::SYS_mprotect, &[lacks(2, libc::PROT_EXEC)]),
    any(libc::SYS_munmap),
    any(libc::SYS_mremap),
    any(libc::SYS_madvise),
    // Locks, channels, and waiting for a thread.
    any(libc::SYS_futex),
    any(libc::SYS_sched_yield),
    // Where the vDSO cannot tell the time.
    any(libc::SYS_clock_gettime),
    // Keys of hash maps.
    any(libc::SYS_getrandom),
    // The signal that takes a vCPU out of the guest, and a call that a stop of the process has interrupted.
    any(libc::SYS_rt_sigreturn),
    any(libc::SYS_rt_sigprocmask),
    any(libc::SYS_restart_syscall),
    // A thread's end.
    any(libc::SYS_sigaltstack),
    any(libc::SYS_exit),
    // A panic: what it says,
    when(libc::SYS_writev, &[is(0, libc::STDERR_FILENO as u64)]),
    // and abort(3).
    when(libc::SYS_rt_sigaction, &[is(0, libc::SIGABRT as u64)]),
    any(libc::SYS_getpid),
    any(libc::SYS_gettid),
    when(libc::SYS_tgkill, &[Argument { index: 0, mask: u32::MAX as u64, value: Value::ThisProcess }]),
];

/// Of the threads with this duty, beside those of every thread.
pub(super) fn of_duty(duty: Duty) -> &'static [&'static [Allowed]] {
    match duty {
        Duty::Control => &[EVENTS, CLIENTS, CONTROL, GROWTH],
        Duty::Saver => &[EVENTS, CLIENTS, CONTROL, SAVER],
        Duty::Vcpu => &[VCPU],
        Duty::Rng | Duty::Balloon | Duty::Mem => &[EVENTS],
        Duty::Vsock => &[EVENTS, CLIENTS, VSOCK],
        Duty::Net => &[EVENTS, NET],
        Duty::Fs => &[EVENTS, FS],
    }
}

/// Waiting for whatever comes first.
const EVENTS: &[Allowed] =
    &[any(libc::SYS_epoll_create1), any(libc::SYS_epoll_ctl), any(libc::SYS_epoll_wait)];

/// Clients of a Unix socket that listens.
const CLIENTS: &[Allowed] = &[
    any(libc::SYS_accept4),
    // What is said to and by them.
    any(libc::SYS_recvfrom),
    any(libc::SYS_sendto),
    // Nobody waits for a client.
    when(libc::SYS_ioctl, &[is(1, libc::FIONBIO)]),
];

const CONTROL: &[Allowed] = &[
    // A client waits that cannot be accepted.
    any(libc::SYS_clock_nanosleep),
    // The end.
    any(libc::SYS_exit_group),
];

const GROWTH: &[Allowed] = &[
    // Memory that is the guest's from now on (KVM_SET_USER_MEMORY_REGION).
    when(libc::SYS_ioctl, &[kvm(_IOC_WRITE, 0x46, size_of::<kvm_userspace_memory_region>())]),
    // How much the host's pool of huge pages lacks: a file that is open.
    any(libc::SYS_pread64),
];

/// Everything that there is to a VM is read, and written to files that are open. Its MSRs are tried: what KVM does not take
/// back is not saved.
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
    // What of its memory the guest has touched.
    any(libc::SYS_mincore),
];

const VCPU: &[Allowed] = &[
    // The guest, and nothing else of KVM.
    when(libc::SYS_ioctl, &[kvm(_IOC_NONE, 0x80, 0)]),
    // A device that its driver activates gets its queues' kicks.
    when(libc::SYS_fcntl, &[is(1, libc::F_DUPFD_CLOEXEC as u64)]),
];

const VSOCK: &[Allowed] = &[
    // When clients that cannot be accepted are tried again.
    any(libc::SYS_timerfd_settime),
    // A connection of the guest to whoever listens for it.
    when(libc::SYS_socket, &[is(0, libc::AF_UNIX as u64)]),
    any(libc::SYS_connect),
    // One half of a connection ends.
    any(libc::SYS_shutdown),
];

const NET: &[Allowed] = &[
    // A packet, from and to the guest's memory.
    any(libc::SYS_readv),
    any(libc::SYS_writev),
    // What the driver leaves undone.
    when(libc::SYS_ioctl, &[is(1, libc::TUNSETOFFLOAD)]),
];

/// FUSE requests, each with the calls that serve it.
const FS: &[Allowed] = &[
    // Who makes what is made: the caller, with a umask of theirs. Back to root afterwards.
    any(libc::SYS_setresuid),
    any(libc::SYS_setresgid),
    any(libc::SYS_umask),
    // CAP_FSETID is given up for a change by others than root, and taken up again.
    any(libc::SYS_capget),
    any(libc::SYS_capset),
    // LOOKUP, GETATTR, and what all others begin with.
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
    // O_APPEND, which the guest may set and clear.
    when(libc::SYS_fcntl, &[is(1, libc::F_SETFL as u64)]),
    // FLUSH closes a copy of the descriptor.
    when(libc::SYS_fcntl, &[is(1, libc::F_DUPFD_CLOEXEC as u64)]),
    // FSYNC, FALLOCATE, LSEEK, COPY_FILE_RANGE, STATFS.
    any(libc::SYS_fsync),
    any(libc::SYS_fdatasync),
    any(libc::SYS_fallocate),
    any(libc::SYS_lseek),
    any(libc::SYS_copy_file_range),
    any(libc::SYS_fstatfs),
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
