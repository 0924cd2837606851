//! Every system call that neither std nor nix offers in safe form: the one module of the agent with `unsafe` in it.
//!
//! Each function checks what makes the call sound, and returns the kernel's errno as an [`io::Error`].

#![allow(unsafe_code)]

mod bpf;
mod channels;
mod clock;
mod mount;
mod offload;
mod result;

use std::{
    ffi::CStr,
    fs::File,
    io,
    mem::size_of,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use serde::{Deserialize, Serialize};
use tokio::io::{Interest, unix::AsyncFd};

use self::result::{check, owned};
pub use self::{
    bpf::{BpfInstruction, FilterInstruction, attach_device_program, install_filter, load_device_program},
    channels::raise_channels,
    clock::{ClockAdjustment, adjust_clock},
    mount::{
        MountAttr, attr, fsconfig_create, fsconfig_set, fsmount, fsopen, mount_setattr, move_mount, open_tree,
    },
    offload::enable_offload,
};

/// Which side of a clone the caller is.
pub enum Cloned {
    /// The caller; the new process has this id.
    Parent(i32),
    /// The new process.
    Child(SingleThread),
}

/// Proof that the process has one thread: a clone(2) copies the calling thread alone.
pub struct SingleThread(());

/// Argument of clone3(2), `struct clone_args` up to `cgroup`.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Clones a sibling of the caller (`CLONE_PARENT`) into new namespaces and into the cgroup v2 directory `cgroup`.
///
/// `namespaces` holds `CLONE_NEW*` bits only; others are refused with EINVAL. A process of more than one thread is
/// refused with EBUSY: a lock held by another thread would stay locked in the child for ever.
pub fn clone_sibling_into(namespaces: u64, cgroup: BorrowedFd<'_>) -> io::Result<Cloned> {
    let allowed = libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWNET;
    if namespaces & !(allowed as u64) != 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    let mut args = CloneArgs {
        flags: namespaces | libc::CLONE_PARENT as u64 | CLONE_INTO_CGROUP,
        cgroup: cgroup.as_raw_fd() as u64,
        ..CloneArgs::default()
    };
    // SAFETY: without CLONE_VM and a stack the child goes on from here on a copy of the caller's memory, as after
    // fork(2); the caller has one thread (checked above), so that every lock in the copy is free. `args` lives
    // until the call returns. No wrapper of clone3 exists in std, nix or libc.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<CloneArgs>()) })?;
    if pid == 0 { Ok(Cloned::Child(SingleThread(()))) } else { Ok(Cloned::Parent(pid as i32)) }
}

/// The flags of [`clone_sibling`].
pub const SIBLING: u64 = libc::CLONE_PARENT as u64;

/// Clones a sibling of the caller into the pid namespace that the caller has chosen for its children. With clone(2),
/// which system call filters allow that do not know clone3(2).
pub fn clone_sibling(_: SingleThread) -> io::Result<Cloned> {
    let null = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: as in `clone_sibling_into`; the argument proves that the caller has one thread.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone, SIBLING, null, null, null, null) })?;
    if pid == 0 { Ok(Cloned::Child(SingleThread(()))) } else { Ok(Cloned::Parent(pid as i32)) }
}

/// Opens a pidfd of a process: unlike its id, it never comes to mean another one.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    const NO_FLAGS: libc::c_uint = 0;
    // SAFETY: integers only. No wrapper exists in std or nix. The descriptor is close-on-exec, always.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, NO_FLAGS) })
}

/// Opens the pid namespace of the process that the pidfd of this number refers to. Unlike a pidfd, [`setns`] takes it
/// from whoever has the rights in the namespace.
pub fn pid_namespace_of(pidfd: RawFd) -> io::Result<OwnedFd> {
    const PIDFD_GET_PID_NAMESPACE: libc::Ioctl = 0xff05;
    // SAFETY: the command takes no argument. The number is not taken over, and one that is no pidfd is refused by the
    // kernel. No wrapper exists in std, nix or libc. The descriptor is close-on-exec, always.
    owned(i64::from(unsafe { libc::ioctl(pidfd, PIDFD_GET_PID_NAMESPACE, 0) }))
}

/// Enters namespaces (`CLONE_NEW*` bits) of the process that the pidfd of this number refers to, or the one that it
/// refers to itself; the pid namespace is entered by later children only.
pub fn setns(pidfd: RawFd, namespaces: u64) -> io::Result<()> {
    // SAFETY: integers only: the number is not taken over, and one that is no pidfd is refused by the kernel. nix
    // wants a descriptor that this process owns or has borrowed; an inherited one is neither.
    check(i64::from(unsafe { libc::setns(pidfd, namespaces as libc::c_int) })).map(drop)
}

/// Reaps one child that has ended: its process id, and its exit status or 128 + the signal that killed it. None if
/// there is none now.
pub fn reap_one() -> io::Result<Option<(i32, u32)>> {
    let mut status = 0;
    loop {
        // nix's waitpid fails on real-time signals after it has reaped.
        // SAFETY: `status` lives through the call.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        if pid < 0 {
            let error = io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::ECHILD) { Ok(None) } else { Err(error) };
        }
        if pid == 0 {
            return Ok(None);
        }
        if libc::WIFEXITED(status) {
            return Ok(Some((pid, libc::WEXITSTATUS(status) as u32)));
        }
        if libc::WIFSIGNALED(status) {
            return Ok(Some((pid, 128 + libc::WTERMSIG(status) as u32)));
        }
    }
}

/// Whether there is any child process, ended or not.
pub fn has_children() -> bool {
    // SAFETY: all-zero bytes are a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` lives through the call, which changes no child, owing to WNOWAIT.
    unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, flags) == 0 }
}

/// Sends a signal, real-time ones too, which nix has no names for, to one process.
pub fn kill(pid: i32, signal: u32) -> io::Result<()> {
    let Ok(signal) = i32::try_from(signal) else { return Err(io::Error::from_raw_os_error(libc::EINVAL)) };
    if pid <= 0 {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    // SAFETY: integers only; one process, as `pid` is positive.
    check(i64::from(unsafe { libc::kill(pid, signal) })).map(drop)
}

/// Capability sets as bit masks; bit n is capability number n.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct CapabilitySets {
    /// Effective set.
    pub effective: u64,
    /// Permitted set.
    pub permitted: u64,
    /// Inheritable set.
    pub inheritable: u64,
}

/// Sets the calling thread's capability sets.
pub fn capset(sets: CapabilitySets) -> io::Result<()> {
    const LINUX_CAPABILITY_VERSION_3: u32 = 0x2008_0522;
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    let mut header = Header { version: LINUX_CAPABILITY_VERSION_3, pid: 0 };
    let half = |shift: u32| Data {
        effective: (sets.effective >> shift) as u32,
        permitted: (sets.permitted >> shift) as u32,
        inheritable: (sets.inheritable >> shift) as u32,
    };
    let data = [half(0), half(32)];
    // SAFETY: version 3 takes a header and two data structures (capset(2)), and both live through the call.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) }).map(drop)
}

/// Drops a capability from the bounding set. EINVAL: the kernel does not know the number.
pub fn drop_bounding(capability: u32) -> io::Result<()> {
    prctl(libc::PR_CAPBSET_DROP, u64::from(capability), 0)
}

/// Empties the ambient set.
pub fn clear_ambient() -> io::Result<()> {
    prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as u64, 0)
}

/// Adds a capability, which must be permitted and inheritable, to the ambient set.
pub fn raise_ambient(capability: u32) -> io::Result<()> {
    prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE as u64, u64::from(capability))
}

fn prctl(option: libc::c_int, first: u64, second: u64) -> io::Result<()> {
    // SAFETY: the options used in this file take integers only.
    check(i64::from(unsafe { libc::prctl(option, first, second, 0_u64, 0_u64) })).map(drop)
}

/// Gives every signal its default action back: ignored ones survive execve(2). The Rust runtime ignores SIGPIPE,
/// glibc's posix_spawn the two signals that it uses itself.
pub fn default_signals() -> io::Result<()> {
    /// `struct sigaction` of the kernel (not of the C library), whose zero is SIG_DFL without flags.
    #[repr(C)]
    #[derive(Default)]
    struct Action {
        handler: usize,
        flags: u64,
        restorer: usize,
        mask: u64,
    }
    let action = Action::default();
    for signal in (1..=64).filter(|signal| ![libc::SIGKILL, libc::SIGSTOP].contains(signal)) {
        let no_old = std::ptr::null_mut::<Action>();
        // SAFETY: `action` lives through the call and installs no handler. The C library's function would refuse
        // its own two signals.
        check(unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, &raw const action, no_old, size_of::<u64>())
        })?;
    }
    Ok(())
}

/// Marks every descriptor above the standard three close-on-exec.
pub fn close_on_exec_all() -> io::Result<()> {
    // SAFETY: only flags of descriptors change.
    let result =
        unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    check(result).map(drop)
}

/// Takes over the socket that the parent process left at descriptor `fd`. Works once in a process (EBUSY after).
pub fn inherited_socket(fd: RawFd) -> io::Result<UnixStream> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if fd <= libc::STDERR_FILENO {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    // SAFETY: the borrow ends with the call, which fails with EBADF if nothing is open there.
    let open = unsafe { BorrowedFd::borrow_raw(fd) };
    nix::fcntl::fcntl(open, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    // SAFETY: it is open (the call above succeeded), it was open before this process's first instruction (so that
    // no value of this process owns it), and it is taken once only.
    Ok(unsafe { UnixStream::from_raw_fd(fd) })
}

/// Has tokio wait for the descriptor's events, with epoll(7). Shared, so that it stays the one that was registered.
pub fn register(descriptor: OwnedFd) -> io::Result<Arc<AsyncFd<OwnedFd>>> {
    // SAFETY: what an OwnedFd refers to stays open until it is dropped, and its number never changes. No other one
    // takes its place in the AsyncFd: that would take a mutable reference, which no user of an Arc here asks for.
    Ok(Arc::new(unsafe { AsyncFd::register(descriptor) }?))
}

/// Sets the NIS domain name of the caller's UTS namespace. Unlike /proc/sys/kernel/domainname, this takes a capability
/// in the user namespace of the UTS namespace only.
pub fn set_domain_name(name: &str) -> io::Result<()> {
    // SAFETY: the call reads as many bytes as it is told to, of a string that lives through it.
    check(i64::from(unsafe { libc::setdomainname(name.as_ptr().cast(), name.len()) })).map(drop)
}

/// Brings the loopback interface of the caller's network namespace up.
pub fn loopback_up() -> io::Result<()> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: all-zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads an ifreq, which lives through the call.
    check(i64::from(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) }))
        .map(drop)
}

/// Adds bytes to the kernel's random pool `random`, an open /dev/urandom, credits all their bits, and reseeds.
pub fn add_entropy(random: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
    const RNDRESEEDCRNG: libc::Ioctl = 0x5207;
    const CHUNK: usize = 256;
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        size: libc::c_int,
        bytes: [u8; CHUNK],
    }
    for chunk in bytes.chunks(CHUNK) {
        let mut info =
            PoolInfo { entropy_bits: chunk.len() as i32 * 8, size: chunk.len() as i32, bytes: [0; CHUNK] };
        info.bytes[..chunk.len()].copy_from_slice(chunk);
        // SAFETY: struct rand_pool_info of random(4), with `size` bytes behind its header; it is only read.
        check(i64::from(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &raw const info) }))?;
    }
    // SAFETY: takes no argument.
    check(i64::from(unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) })).map(drop)
}

/// Sets the caller's I/O scheduling class (1 real time, 2 best effort, 3 idle) and priority in it (0..=7).
pub fn set_io_priority(class: u8, priority: u8) -> io::Result<()> {
    const IOPRIO_WHO_PROCESS: libc::c_int = 1;
    const IOPRIO_CLASS_SHIFT: u32 = 13;
    let value = (libc::c_int::from(class) << IOPRIO_CLASS_SHIFT) | libc::c_int::from(priority);
    // SAFETY: integers only.
    check(unsafe { libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, value) }).map(drop)
}

/// Argument of sched_setattr(2), without its first field and those on the clamping of utilization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerAttributes {
    /// `SCHED_*`.
    pub policy: u32,
    /// `SCHED_FLAG_*`.
    pub flags: u64,
    /// -20..=19, for the policies OTHER and BATCH.
    pub nice: i32,
    /// 1..=99, for the policies FIFO and RR.
    pub priority: u32,
    /// Nanoseconds, for the policy DEADLINE as the two below.
    pub runtime: u64,
    /// Nanoseconds.
    pub deadline: u64,
    /// Nanoseconds.
    pub period: u64,
}

/// Sets how the calling thread is scheduled.
pub fn set_scheduler(attributes: SchedulerAttributes) -> io::Result<()> {
    const THIS_THREAD: libc::pid_t = 0;
    const NO_FLAGS: libc::c_uint = 0;
    let SchedulerAttributes { policy, flags, nice, priority, runtime, deadline, period } = attributes;
    // struct sched_attr in its first version, as words of 64 bits: size and policy, flags, nice and priority, ...
    let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    let mut words = [0, flags, pair(nice as u32, priority), runtime, deadline, period];
    words[0] = pair(size_of_val(&words) as u32, policy);
    // SAFETY: a struct sched_attr of the size that its first field says, which lives through the call. No wrapper
    // exists in std, nix or libc.
    check(unsafe { libc::syscall(libc::SYS_sched_setattr, THIS_THREAD, words.as_ptr(), NO_FLAGS) }).map(drop)
}

/// Makes a keyring of this name the caller's session keyring: one that exists, or a new one that others of the caller's
/// user find by its name.
pub fn join_session_keyring(name: &CStr) -> io::Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_ulong = 1;
    const KEYCTL_SETPERM: libc::c_ulong = 5;
    /// What the kernel gives a session keyring (keyctl(2)): all to its possessors; its user may view, read and link it.
    const USUAL: libc::c_ulong = 0x3f13_0000;
    /// KEY_USR_SEARCH: to find it by its name takes this.
    const USER_SEARCH: libc::c_ulong = 0x0008_0000;
    // SAFETY: `name` is a C string that lives through the call. No wrapper exists in std, nix or libc.
    let joined = unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, name.as_ptr()) };
    let id = check(joined)?;
    // SAFETY: integers only.
    check(unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_SETPERM, id, USUAL | USER_SEARCH) }).map(drop)
}

/// Sets the caller's execution domain; execve(2) keeps it.
pub fn set_personality(domain: u64) -> io::Result<()> {
    // SAFETY: an integer only. The C library's type for it differs between its versions.
    check(unsafe { libc::syscall(libc::SYS_personality, domain) }).map(drop)
}

/// Has the runtime wait for urgent data (`POLLPRI`) of a file.
pub fn watch_urgent(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: a File's descriptor is open and the same for as long as the File lives, and the AsyncFd owns it.
    Ok(unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) }?)
}
