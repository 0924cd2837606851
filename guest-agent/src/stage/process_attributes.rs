//! The attributes of a container's process, its user and its capabilities.

use std::{
    env,
    ffi::CString,
    fs,
    io::{self, IsTerminal, Write},
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};

use nix::{
    errno::Errno,
    sys::{
        prctl,
        resource::{Resource, setrlimit},
        stat::{Mode, SFlag, fstat, umask},
    },
    unistd::{Gid, Uid, chdir, fchown, setgid, setgroups, setuid},
};
use oci_spec::runtime::{PosixRlimit, PosixRlimitType};

use super::{SetupError, Step, errno_text};
use crate::{
    stage_config::{CapabilityMasks, ProcessConfig, SeccompFilter},
    syscall::{self, CapabilitySets},
};

const ROOT: &str = "/";

/// The first steps of a process, while the guest's file systems are still there.
pub(super) fn begin(process: &ProcessConfig) -> Result<(), SetupError> {
    // Files, directories and nodes get the modes that they are given.
    umask(Mode::empty());
    // Through the guest's /proc: that of the container may be anything.
    write("/proc/self/oom_score_adj", &process.oom_score_adj.to_string())
        .step(|| "process.oomScoreAdj".into())?;
    // This takes effect when the program is executed, even in a process that is cloned from this one.
    if let Some(profile) = &process.common.apparmor_profile {
        write("/proc/self/attr/apparmor/exec", &format!("exec {profile}"))
            .step(|| format!("process.apparmorProfile {profile:?}"))?;
    }
    // This is done as root, so that root owns the keyring. Processes that join the container later open the keyring of
    // its init by this name.
    match &process.common.session_keyring {
        Some(name) => join_keyring(name).step(|| format!("session keyring {name}")),
        None => Ok(()),
    }
}

fn join_keyring(name: &str) -> io::Result<()> {
    match CString::new(name).map_err(io::Error::from).and_then(|name| syscall::join_session_keyring(&name)) {
        // A kernel without keyrings.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        other => other,
    }
}

/// Into a file that exists.
pub(super) fn write(path: impl AsRef<Path>, value: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(path)?.write_all(value.as_bytes())
}

/// Applies the settings that need privileges, and changes to the working directory.
pub(super) fn apply_privileged_settings(process: &ProcessConfig) -> Result<(), SetupError> {
    syscall::default_signals().step(|| "resetting signals".into())?;
    syscall::close_on_exec_all().step(|| "closing the agent's descriptors".into())?;
    for limit in process.rlimits.iter().filter(|limit| !limits_processes(limit)) {
        set_limit(limit)?;
    }
    if let Some((class, priority)) = process.io_priority {
        syscall::set_io_priority(class, priority).step(|| "process.ioPriority".into())?;
    }
    if let Some(domain) = process.common.personality {
        syscall::set_personality(domain).step(|| "linux.personality".into())?;
    }
    match chdir(&process.cwd) {
        // The user may be allowed to enter it, as on a server of NFS that maps root to nobody. `become_user` tries
        // again if it finds the process in `/`.
        Err(Errno::EACCES | Errno::EPERM) => {
            chdir(ROOT).step(|| "changing to the container's root".into())?
        }
        other => entered(process, other)?,
    }
    umask(Mode::from_bits_truncate(process.umask));
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    for stream in [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()] {
        own_stream(stream, process)?;
    }
    Ok(())
}

/// What came of an attempt to change to the working directory.
fn entered(process: &ProcessConfig, attempt: nix::Result<()>) -> Result<(), SetupError> {
    // As runc words it: containerd's clients know it so.
    attempt
        .map_err(|error| errno_text(&error.into()))
        .step(|| format!("chdir to cwd ({:?}) set in config.json failed", process.cwd))?;
    // Fails if the directory is not below the root.
    env::current_dir().step(|| format!("process.cwd {}", process.cwd.display()))?;
    Ok(())
}

/// Sets how the process is scheduled, which takes a privileged process.
pub(super) fn set_scheduler(process: &ProcessConfig) -> Result<(), SetupError> {
    match process.scheduler {
        Some(attributes) => syscall::set_scheduler(attributes).step(|| "process.scheduler".into()),
        None => Ok(()),
    }
}

/// Whether a process that is cloned is scheduled in the same way (sched(7), "Resetting scheduling policy for child
/// processes"). A process with the policy DEADLINE cannot be cloned at all.
pub(super) fn scheduler_outlives_clone(process: &ProcessConfig) -> bool {
    const RESET_ON_FORK: u64 = 1;
    process.scheduler.is_none_or(|attributes| {
        attributes.policy != libc::SCHED_DEADLINE as u32 && attributes.flags & RESET_ON_FORK == 0
    })
}

/// RLIMIT_NPROC counts the processes of a user, a helper that is about to end among them: it is set last.
pub(super) fn set_process_limit(process: &ProcessConfig) -> Result<(), SetupError> {
    process.rlimits.iter().filter(|limit| limits_processes(limit)).try_for_each(set_limit)
}

/// Whether [`set_process_limit`] has something to set.
pub(super) fn has_process_limit(process: &ProcessConfig) -> bool {
    process.rlimits.iter().any(limits_processes)
}

fn limits_processes(limit: &PosixRlimit) -> bool {
    limit.typ() == PosixRlimitType::RlimitNproc
}

fn set_limit(limit: &PosixRlimit) -> Result<(), SetupError> {
    setrlimit(resource(limit.typ()), limit.soft(), limit.hard())
        .step(|| format!("process.rlimits[{}]", limit.typ()))
}

/// Gives a stream to the process's user, so that its program can open /dev/stdout and its like again.
pub(super) fn own_stream(stream: BorrowedFd<'_>, process: &ProcessConfig) -> Result<(), SetupError> {
    let owned = || -> nix::Result<()> {
        let is_fifo = SFlag::from_bits_truncate(fstat(stream)?.st_mode) & SFlag::S_IFMT == SFlag::S_IFIFO;
        // Not the guest's /dev/null.
        if is_fifo || stream.is_terminal() {
            fchown(stream, Some(Uid::from_raw(process.uid)), None)?;
        }
        Ok(())
    };
    owned().step(|| "process.user: giving it the standard streams".into())
}

/// Installs a filter, if there is one.
pub(super) fn install(filter: Option<&SeccompFilter>) -> Result<(), SetupError> {
    let Some(SeccompFilter { flags, program }) = filter else { return Ok(()) };
    syscall::install_filter(program, *flags).step(|| "linux.seccomp: installing the filter".into())
}

/// User, groups and capabilities, in the order in which each is still permitted.
pub(super) fn become_user(process: &ProcessConfig) -> Result<(), SetupError> {
    drop_bounding(process.capabilities.bounding)?;
    prctl::set_keepcaps(true).step(|| "keeping capabilities".into())?;
    let groups: Vec<Gid> = process.additional_gids.iter().copied().map(Gid::from_raw).collect();
    setgroups(&groups).step(|| "process.user.additionalGids".into())?;
    setgid(Gid::from_raw(process.gid)).step(|| format!("process.user.gid {}", process.gid))?;
    setuid(Uid::from_raw(process.uid)).step(|| format!("process.user.uid {}", process.uid))?;
    if process.cwd != Path::new(ROOT) {
        let here = env::current_dir().step(|| format!("process.cwd {}", process.cwd.display()))?;
        if here == Path::new(ROOT) {
            entered(process, chdir(&process.cwd))?;
        }
    }
    prctl::set_keepcaps(false).step(|| "keeping capabilities".into())?;
    set_capabilities(process.capabilities)?;
    if process.no_new_privileges {
        prctl::set_no_new_privs().step(|| "process.noNewPrivileges".into())?;
    }
    Ok(())
}

fn drop_bounding(keep: u64) -> Result<(), SetupError> {
    for capability in (0..u64::BITS).filter(|n| keep & (1 << n) == 0) {
        match syscall::drop_bounding(capability) {
            // Beyond the last capability that the kernel knows.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            other => other.step(|| format!("process.capabilities.bounding: dropping number {capability}"))?,
        }
    }
    Ok(())
}

fn set_capabilities(masks: CapabilityMasks) -> Result<(), SetupError> {
    let CapabilityMasks { effective, permitted, inheritable, ambient, .. } = masks;
    syscall::capset(CapabilitySets { effective, permitted, inheritable })
        .step(|| "process.capabilities".into())?;
    syscall::clear_ambient().step(|| "process.capabilities.ambient".into())?;
    for capability in (0..u64::BITS).filter(|n| ambient & (1 << n) != 0) {
        syscall::raise_ambient(capability)
            .step(|| format!("process.capabilities.ambient: raising number {capability}"))?;
    }
    Ok(())
}

pub(super) fn resource(kind: PosixRlimitType) -> Resource {
    match kind {
        PosixRlimitType::RlimitCpu => Resource::RLIMIT_CPU,
        PosixRlimitType::RlimitFsize => Resource::RLIMIT_FSIZE,
        PosixRlimitType::RlimitData => Resource::RLIMIT_DATA,
        PosixRlimitType::RlimitStack => Resource::RLIMIT_STACK,
        PosixRlimitType::RlimitCore => Resource::RLIMIT_CORE,
        PosixRlimitType::RlimitRss => Resource::RLIMIT_RSS,
        PosixRlimitType::RlimitNproc => Resource::RLIMIT_NPROC,
        PosixRlimitType::RlimitNofile => Resource::RLIMIT_NOFILE,
        PosixRlimitType::RlimitMemlock => Resource::RLIMIT_MEMLOCK,
        PosixRlimitType::RlimitAs => Resource::RLIMIT_AS,
        PosixRlimitType::RlimitLocks => Resource::RLIMIT_LOCKS,
        PosixRlimitType::RlimitSigpending => Resource::RLIMIT_SIGPENDING,
        PosixRlimitType::RlimitMsgqueue => Resource::RLIMIT_MSGQUEUE,
        PosixRlimitType::RlimitNice => Resource::RLIMIT_NICE,
        PosixRlimitType::RlimitRtprio => Resource::RLIMIT_RTPRIO,
        PosixRlimitType::RlimitRttime => Resource::RLIMIT_RTTIME,
    }
}
