//! What holds for the process as a whole, from its first moment on.

use std::{
    fs,
    io::{self, Write},
};

use nix::{
    errno::Errno,
    sys::{
        prctl::{set_dumpable, set_no_new_privs},
        resource::{Resource, getrlimit, setrlimit},
        stat::{Mode, umask},
    },
};
use rustix::{
    process::getpid,
    thread::{CoreSchedulingScope, create_core_scheduling_cookie},
};

use super::JailError;

/// The most files that the process may have open. The file server keeps fewer than half of them (`virtio::fs`), so that
/// vsock connections, of which there are a thousand with two or three each, always find some.
const OPEN_FILES: u64 = 1 << 16;

/// Makes the process one that keeps what it has to itself, and to which nothing is added:
///
/// - a program that it executes gains no privilege (no_new_privs, which seccomp wants too);
/// - it leaves no core, which would hold the guest's memory, and nobody but root may look into it in /proc or trace it;
/// - it has no descriptor but its three streams, whatever its parent forgot to close;
/// - what it makes before the guest runs (sockets, the console's file) is its own user's;
/// - it has a bounded number of files. The size of a file is not bounded: files that it writes are the containers';
/// - no other process runs on the same core at the same time, where the host's kernel can do that.
///
/// To be called first of all: whatever was opened before is closed.
pub fn harden() -> Result<(), JailError> {
    close_inherited().map_err(JailError::Descriptors)?;
    let failed = |what| move |errno: Errno| JailError::Set { what, source: errno.into() };
    set_no_new_privs().map_err(failed("no_new_privs"))?;
    set_dumpable(false).map_err(failed("PR_SET_DUMPABLE"))?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(failed("RLIMIT_CORE"))?;
    bound_open_files().map_err(failed("RLIMIT_NOFILE"))?;
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    keep_cores_to_itself().map_err(|source| JailError::Set { what: "PR_SCHED_CORE", source })
}

/// Gives the process a cookie of its own for core scheduling. The hardware threads of a core run tasks of one cookie only,
/// so a guest learns nothing of another pod from a core that they share. Threads that are started later inherit the cookie.
/// See Linux, Documentation/admin-guide/hw-vuln/core-scheduling.rst.
fn keep_cores_to_itself() -> io::Result<()> {
    const SMT: &str = "/sys/devices/system/cpu/smt/active";
    match create_core_scheduling_cookie(getpid(), CoreSchedulingScope::ThreadGroup) {
        // Each core of the host has one thread: nothing is shared.
        Err(rustix::io::Errno::NODEV) => Ok(()),
        // The kernel is older than 5.14, or was built without it.
        Err(rustix::io::Errno::INVAL) => {
            if fs::read_to_string(SMT).is_ok_and(|active| active.trim() == "1") {
                // Nobody is left to be told if stderr is closed.
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

/// To as many as the process may have, and never more than [`OPEN_FILES`].
fn bound_open_files() -> nix::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let limit = hard.min(OPEN_FILES);
    setrlimit(Resource::RLIMIT_NOFILE, limit, limit)
}

#[allow(unsafe_code)]
fn close_inherited() -> io::Result<()> {
    const FIRST: libc::c_uint = libc::STDERR_FILENO as libc::c_uint + 1;
    // SAFETY: closes what nobody in this process owns: its first act is this one, and the standard library has opened
    // nothing but what 0 to 2 lacked. Nothing safe closes a descriptor that is not known.
    match unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::unix::fs::PermissionsExt,
    };

    use rustix::{io::Errno, thread::core_scheduling_cookie};

    use super::{CoreSchedulingScope, OPEN_FILES, Resource, getpid, getrlimit, harden};
    use crate::jail::testing::{End, drill};

    #[test]
    fn gains_nothing_and_leaves_no_core() {
        let body = || {
            harden().unwrap();
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(status.contains("\nNoNewPrivs:\t1\n"), "{status}");
            assert!(!nix::sys::prctl::get_dumpable().unwrap());
            assert_eq!(getrlimit(Resource::RLIMIT_CORE).unwrap(), (0, 0));
            let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
            assert!(soft == hard && hard <= OPEN_FILES, "{soft} {hard}");
            let dir = tempfile::tempdir().unwrap();
            let made = dir.path().join("file");
            fs::write(&made, "").unwrap();
            assert_eq!(fs::metadata(&made).unwrap().permissions().mode() & 0o777, 0o600);
        };
        drill(body, End::succeeds);
    }

    /// Where the kernel has no core scheduling, or cores have one thread each, there is no cookie to be seen.
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
        // dup(2) makes one that a program which is executed keeps.
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
