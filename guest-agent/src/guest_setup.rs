//! The first steps of PID 1: the file systems of the guest, its cgroups and limits.

use std::{
    fs::{self, Permissions},
    io::{self, ErrorKind},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{
        resource::{RLIM_INFINITY, Resource, setrlimit},
        stat::{Mode, umask},
    },
    unistd::{chdir, chroot},
};

use crate::{
    cgroup::{self, Cgroup, CgroupError},
    device_filter, kernel_modules, syscall,
};

/// Why the guest cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum GuestSetupError {
    /// A mount failed: mostly a kernel without this file system.
    #[error("mounting {fs_type} at {target}: {source}")]
    Mount {
        /// What.
        fs_type: &'static str,
        /// Where.
        target: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Another step failed.
    #[error("{action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The cgroups.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

struct Mount {
    fs_type: &'static str,
    target: &'static str,
    flags: MsFlags,
    options: &'static str,
}

const NO_DEVICES: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);
const KERNEL_FILES: MsFlags = NO_DEVICES.union(MsFlags::MS_NOEXEC);
const DEVICES: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC);

/// In this order. /run and /tmp are plain directories: the root is a tmpfs already.
const MOUNTS: [Mount; 6] = [
    Mount { fs_type: "proc", target: "/proc", flags: KERNEL_FILES, options: "" },
    Mount { fs_type: "sysfs", target: "/sys", flags: KERNEL_FILES, options: "" },
    Mount { fs_type: "devtmpfs", target: "/dev", flags: DEVICES, options: "mode=0755" },
    Mount { fs_type: "devpts", target: "/dev/pts", flags: DEVICES, options: "gid=5,mode=0620,ptmxmode=0666" },
    Mount { fs_type: "tmpfs", target: "/dev/shm", flags: NO_DEVICES, options: "mode=1777" },
    // With nsdelegate a container cannot lift the limits of its own cgroup namespace's root.
    Mount {
        fs_type: "cgroup2",
        target: cgroup::ROOT,
        flags: KERNEL_FILES,
        options: "nsdelegate,memory_recursiveprot",
    },
];

/// Device nodes that udev opens to every user, and the kernel to root alone.
const OPEN_TO_ALL: [&str; 2] = ["/dev/fuse", "/dev/net/tun"];

/// Turns the bare initramfs into a system.
pub fn set_up() -> Result<(), GuestSetupError> {
    let failed = |action| move |source: io::Error| GuestSetupError::Io { action, source };
    umask(Mode::from_bits_truncate(0o022));
    move_root().map_err(failed("moving the root to a tmpfs"))?;
    for directory in ["/run", "/tmp"] {
        fs::create_dir(directory).map_err(failed("creating /run and /tmp"))?;
    }
    for Mount { fs_type, target, flags, options } in MOUNTS {
        match fs::create_dir(target) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(GuestSetupError::Mount { fs_type, target, source: error });
            }
            _ => {}
        }
        mount(Some(fs_type), target, Some(fs_type), flags, Some(options))
            .map_err(|error| GuestSetupError::Mount { fs_type, target, source: error.into() })?;
    }
    open_to_all(&OPEN_TO_ALL).map_err(failed("setting the modes of device nodes"))?;
    // Only a mount or remount from the kernel's first cgroup namespace sets the options of the cgroup2 file system
    // (kernel, kernel/cgroup/cgroup.c, apply_cgroup_root_flags). This makes a second namespace, with the same root. A
    // container without its own cgroup namespace is in it: it sees all cgroups, but its mounts cannot clear nsdelegate.
    unshare(CloneFlags::CLONE_NEWCGROUP)
        .map_err(io::Error::from)
        .map_err(failed("making a cgroup namespace"))?;
    cgroup::containers::prepare()?;
    syscall::loopback_up().map_err(failed("bringing the loopback interface up"))?;
    set_limits().map_err(failed("setting resource limits"))?;
    warm_up_kernel()?;
    kernel_modules::enable().map_err(failed("setting kernel.modprobe"))?;
    report_free_memory().map_err(failed("reporting free memory to the host"))?;
    // If memory is short, the kernel kills processes of containers, and the agent last.
    fs::write("/proc/self/oom_score_adj", "-1000").map_err(failed("setting the agent's OOM score"))
}

/// A container's init calls pivot_root(2), which the kernel refuses while the root is the initramfs itself.
///
/// The initramfs stays mounted below the new root. Only /proc/self/exe of the agent, and the modules of the kernel,
/// still lead to it. It is made read-only, so that no process of a container can write to the agent's program.
fn move_root() -> io::Result<()> {
    const NEW_ROOT: &str = "/newroot";
    fs::create_dir(NEW_ROOT)?;
    mount(Some("tmpfs"), NEW_ROOT, Some("tmpfs"), NO_DEVICES, Some("mode=0755"))?;
    bind_modules(kernel_modules::DIRECTORY, &format!("{NEW_ROOT}{}", kernel_modules::DIRECTORY))?;
    mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY,
        None::<&str>,
    )?;
    chdir(NEW_ROOT)?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)?;
    chroot(".")?;
    chdir("/")?;
    Ok(())
}

/// Lets the modules be seen in the new root too. A kernel may have been built without them.
fn bind_modules(modules: &str, target: &str) -> io::Result<()> {
    if !fs::exists(modules)? {
        return Ok(());
    }
    let flags = KERNEL_FILES | MsFlags::MS_RDONLY;
    fs::create_dir_all(target)?;
    mount(Some(modules), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    let remount = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags;
    Ok(mount(None::<&str>, target, None::<&str>, remount, None::<&str>)?)
}

/// Makes the kernel do its one-time work before the VM is saved as a template. So its clones need not do it, and share
/// the pages.
///
/// With its first cgroup the kernel patches its code in fifty places. With its first BPF program it fills a block of 2
/// MiB. So this makes a cgroup with a BPF program, in which nothing ever runs.
fn warm_up_kernel() -> Result<(), GuestSetupError> {
    let program = device_filter::generate(&[], None).map_err(|error| GuestSetupError::Io {
        action: "making a device program",
        source: io::Error::other(error),
    })?;
    Ok(Cgroup::create(Path::new(cgroup::ROOT).join("kept"))?.configure(&[], &program)?)
}

/// Reports all free memory to the balloon device, so that no clone has to. By itself the kernel takes half a minute.
/// Writing the order does it (`kernel-config/patches/page-reporting-at-once.patch`).
fn report_free_memory() -> io::Result<()> {
    const ORDER: &str = "/sys/module/page_reporting/parameters/page_reporting_order";
    /// What the parameter is as long as there is no device that takes reports.
    const NO_DEVICE: &str = "-1";
    match fs::read_to_string(ORDER) {
        // The kernel of the configuration may lack reports.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        order => match order?.trim() {
            NO_DEVICE => Ok(()),
            order => fs::write(ORDER, order),
        },
    }
}

/// Lets every user open these nodes, as udev does on a host. The device rules of a container decide whether it has the
/// device. In a container with a user namespace this very node is mounted, and its root is another user here.
fn open_to_all(nodes: &[&str]) -> io::Result<()> {
    for node in nodes {
        match fs::set_permissions(node, Permissions::from_mode(0o666)) {
            // The kernel of the configuration may lack the device.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            set => set?,
        }
    }
    Ok(())
}

/// What containers inherit where their spec says nothing: as much as services of a host do.
fn set_limits() -> io::Result<()> {
    const OPEN_FILES: u64 = 1 << 20;
    // The kernel's own rule is half of threads-max at boot. This is its result for 16 GiB. A pending signal is charged.
    const PENDING_SIGNALS: u64 = 1 << 16;
    setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)?;
    setrlimit(Resource::RLIMIT_SIGPENDING, PENDING_SIGNALS, PENDING_SIGNALS)?;
    Ok(setrlimit(Resource::RLIMIT_NPROC, RLIM_INFINITY, RLIM_INFINITY)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_was_built_without_modules_needs_none() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("modules");
        bind_modules("/nonexistent/modules", target.to_str().unwrap()).unwrap();
        assert!(!target.exists());
    }
}
