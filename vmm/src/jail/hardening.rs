//! Restrictions of the process as a whole, which hold from its start.

use std::{
    fs,
    io::{self, Write},
};

use nix::{
    errno::Errno,
    sys::{
        prctl::{set_dumpable, set_no_new_privs},
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigHandler, Signal, signal},
        stat::{Mode, umask},
    },
};
use rustix::{
    process::getpid,
    thread::{CoreSchedulingScope, create_core_scheduling_cookie},
};

use super::JailError;

/// RLIMIT_CORE. With 0 the kernel still starts the program that core_pattern names (core(5)), and would pass the
/// guest's memory to it. With 1 it does not (do_coredump in fs/coredump.c), and a core file is not so short.
///
/// [`set_dumpable`] alone does not prevent that: when a thread changes its user, the kernel makes the process as
/// dumpable as the sysctl fs.suid_dumpable says (commit_creds in kernel/cred.c).
const NO_CORE: u64 = 1;

/// The most file descriptors that the process may have. The file server keeps fewer than half of them (`virtio::fs`).
/// The others are left to the vsock device, whose thousand connections take one each, and to clients of the control
/// socket.
const OPEN_FILES: u64 = 1 << 16;

/// Restricts the process:
///
/// - It gains no privilege when it executes a program (no_new_privs, which seccomp needs too).
/// - It leaves no core dump, which would contain the guest's memory. Only root can trace it or read its files in /proc.
/// - It closes all file descriptors that it inherited, except for stdin, stdout and stderr.
/// - Only its own user can use the files and sockets that it makes before the guest runs.
/// - Its number of open files is limited. The size of a file is not limited, because it writes the files of containers.
/// - A write beyond RLIMIT_FSIZE, which the process may have inherited, fails instead of killing it.
/// - SIGBUS ends it with a message. It is process 1 of its namespace, which Linux does not end by the default action.
/// - Its threads allocate from one arena, so that none opens a file to free memory.
/// - If the host's kernel supports core scheduling, no other process runs on the same core at the same time.
///
/// Call this first: it closes every file that was opened before.
pub fn harden() -> Result<(), JailError> {
    close_inherited().map_err(JailError::Descriptors)?;
    let failed = |what| move |errno: Errno| JailError::Set { what, source: errno.into() };
    set_no_new_privs().map_err(failed("no_new_privs"))?;
    set_dumpable(false).map_err(failed("PR_SET_DUMPABLE"))?;
    setrlimit(Resource::RLIMIT_CORE, NO_CORE, NO_CORE).map_err(failed("RLIMIT_CORE"))?;
    limit_open_files().map_err(failed("RLIMIT_NOFILE"))?;
    ignore_file_size_signal().map_err(failed("SIGXFSZ"))?;
    end_on_bus_error().map_err(failed("SIGBUS"))?;
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    use_one_arena().map_err(|source| JailError::Set { what: "M_ARENA_MAX", source })?;
    enable_core_scheduling().map_err(|source| JailError::Set { what: "PR_SCHED_CORE", source })
}

/// Lets all threads allocate from one arena, the heap. When an arena of a thread shrinks, the C library opens a file in
/// /proc to learn how (check_may_shrink_heap in glibc's malloc/arena.c). Only the file server may open files: any other
/// thread would be killed by its system call filter.
#[allow(unsafe_code)]
fn use_one_arena() -> io::Result<()> {
    // SAFETY: mallopt takes two integers and changes nothing but the allocator's own parameters.
    match unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) } {
        1 => Ok(()),
        _ => Err(io::Error::other("mallopt refuses M_ARENA_MAX")),
    }
}

/// Gives the process a core scheduling cookie of its own. The hardware threads of a core run tasks with the same cookie
/// only, so a guest learns nothing about another pod from a core that they share. Threads inherit the cookie.
/// See Linux, Documentation/admin-guide/hw-vuln/core-scheduling.rst.
fn enable_core_scheduling() -> io::Result<()> {
    const SMT: &str = "/sys/devices/system/cpu/smt/active";
    match create_core_scheduling_cookie(getpid(), CoreSchedulingScope::ThreadGroup) {
        // Each core of the host has a single hardware thread, so nothing is shared.
        Err(rustix::io::Errno::NODEV) => Ok(()),
        // The kernel is older than 5.14, or was built without CONFIG_SCHED_CORE.
        Err(rustix::io::Errno::INVAL) => {
            if fs::read_to_string(SMT).is_ok_and(|active| active.trim() == "1") {
                // If stderr is closed, nobody reads this warning.
                let _ = writeln!(
                    io::stderr(),
                    "the kernel has no core scheduling: other processes may run on a core of the VM at the same time"
                );
            }
            Ok(())
        }
        done => Ok(done?),
    }
}

/// Sets the limit to the hard limit that the process inherited, or to [`OPEN_FILES`] if that is less.
fn limit_open_files() -> nix::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let limit = hard.min(OPEN_FILES);
    setrlimit(Resource::RLIMIT_NOFILE, limit, limit)
}

/// A guest chooses how large it makes a file. A file that is larger than RLIMIT_FSIZE would kill the VMM by SIGXFSZ;
/// when the signal is ignored, the write returns EFBIG (setrlimit(2)).
#[allow(unsafe_code)]
fn ignore_file_size_signal() -> nix::Result<()> {
    // SAFETY: no handler is installed, so no code of this process runs in a signal context.
    unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) }.map(drop)
}

/// What the process says when it gets SIGBUS.
const BUS_ERROR: &str = "bulkhead-vmm: the host sends SIGBUS: a memory error of the host, a truncated file of the VM, \
                         or a split lock with split_lock_detect=fatal\n";

#[allow(unsafe_code)]
fn end_on_bus_error() -> nix::Result<()> {
    extern "C" fn end(_: libc::c_int) {
        // SAFETY: both functions may be called in a signal handler (signal-safety(7)), and the text is static.
        unsafe {
            libc::write(libc::STDERR_FILENO, BUS_ERROR.as_ptr().cast(), BUS_ERROR.len());
            libc::_exit(1);
        }
    }
    // SAFETY: the handler does only what a handler may do.
    unsafe { signal(Signal::SIGBUS, SigHandler::Handler(end)) }.map(drop)
}

#[allow(unsafe_code)]
fn close_inherited() -> io::Result<()> {
    const FIRST: libc::c_uint = libc::STDERR_FILENO as libc::c_uint + 1;
    // SAFETY: this is the first thing that the process does, so no object in it owns one of these descriptors: the
    // standard library opens only those of 0 to 2 that are missing. No safe function closes descriptors that it does
    // not own.
    match unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::{
            fd::AsRawFd,
            unix::fs::{FileExt, PermissionsExt},
        },
    };

    use nix::sys::resource::setrlimit;
    use rustix::{io::Errno, thread::core_scheduling_cookie};

    use super::{BUS_ERROR, CoreSchedulingScope, NO_CORE, OPEN_FILES, Resource, getpid, getrlimit, harden};
    use crate::jail::{
        ThreadRole, enter_thread,
        testing::{End, drill},
    };

    /// In a thread that may make only a few system calls.
    #[test]
    #[allow(unsafe_code)]
    fn a_bus_error_ends_the_process_with_a_message() {
        let body = || {
            harden().unwrap();
            let file = tempfile::tempfile().unwrap();
            let (length, flags) = (4096, libc::MAP_SHARED);
            // SAFETY: nothing else is mapped there, and the read is meant to fail: the file is empty.
            unsafe {
                let page =
                    libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, flags, file.as_raw_fd(), 0);
                assert!(page != libc::MAP_FAILED);
                enter_thread(ThreadRole::Vcpu).unwrap();
                page.cast::<u8>().read_volatile();
            }
        };
        drill(body, |end| end.fails_with(BUS_ERROR));
    }

    #[test]
    fn gains_nothing_and_leaves_no_core() {
        let body = || {
            harden().unwrap();
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(status.contains("\nNoNewPrivs:\t1\n"), "{status}");
            assert!(!nix::sys::prctl::get_dumpable().unwrap());
            assert_eq!(getrlimit(Resource::RLIMIT_CORE).unwrap(), (NO_CORE, NO_CORE));
            let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
            assert!(soft == hard && hard <= OPEN_FILES, "{soft} {hard}");
            let dir = tempfile::tempdir().unwrap();
            let made = dir.path().join("file");
            fs::write(&made, "").unwrap();
            assert_eq!(fs::metadata(&made).unwrap().permissions().mode() & 0o777, 0o600);
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn a_write_beyond_the_file_size_limit_is_an_error() {
        let body = || {
            harden().unwrap();
            let file = tempfile::tempfile().unwrap();
            setrlimit(Resource::RLIMIT_FSIZE, 4096, 4096).unwrap();
            let error = file.write_at(b"x", 4096).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFBIG));
            assert_eq!(file.set_len(8192).unwrap_err().raw_os_error(), Some(libc::EFBIG));
        };
        drill(body, End::succeeds);
    }

    /// Without core scheduling in the kernel, or with one thread per core, there is no cookie to compare.
    #[test]
    fn its_cores_are_its_own() {
        let body = || {
            let cookie = || core_scheduling_cookie(getpid(), CoreSchedulingScope::Thread);
            let before = cookie();
            harden().unwrap();
            match before {
                Ok(before) => {
                    assert_ne!(cookie().unwrap(), before);
                    let later = std::thread::spawn(move || {
                        let thread = rustix::thread::gettid();
                        core_scheduling_cookie(thread, CoreSchedulingScope::Thread).unwrap()
                    });
                    assert_eq!(later.join().unwrap(), cookie().unwrap());
                }
                Err(error) => assert!(matches!(error, Errno::INVAL | Errno::NODEV), "{error}"),
            }
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn descriptors_of_its_parent_are_closed() {
        // A descriptor made by dup(2) stays open across execve(2).
        let leaked = rustix::io::dup(File::open("/").unwrap()).unwrap();
        let body = || {
            drop(leaked);
            let open = || {
                let links = fs::read_dir("/proc/self/fd").unwrap();
                links
                    .filter(|link| fs::read_link(link.as_ref().unwrap().path()).is_ok_and(|to| to == *"/"))
                    .count()
            };
            assert_eq!(open(), 1);
            harden().unwrap();
            assert_eq!(open(), 0);
        };
        drill(body, End::succeeds);
    }
}
