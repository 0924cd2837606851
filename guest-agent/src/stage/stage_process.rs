//! The stage: the agent's binary as a process of one thread, which clones the process that the agent asks for.

use std::{
    env,
    fs::{self, File},
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    process::{self, ExitCode},
};

use nix::{
    sched::{CloneFlags, unshare},
    sys::prctl,
};

use super::{
    Report, SOCKET_VARIABLE, SetupError, Step, container_init, exec, process_attributes,
    rootfs::IdMappedMounts, stage_socket::StageSocket, user_namespace,
};
use crate::{
    cgroup,
    stage_config::{ExecConfig, InitConfig, StageConfig},
    syscall::{self, Cloned},
};

/// Exit status of a process that could not get ready for its program, or not execute it.
const FAILED: u8 = 127;

/// The stage: standard input, output and error are those of the container, and [`super::SOCKET_VARIABLE`] is set.
pub fn main() -> ExitCode {
    let Some(socket) = env::var(SOCKET_VARIABLE).ok().and_then(|fd| fd.parse().ok()) else {
        return ExitCode::from(FAILED);
    };
    let Ok(socket) = syscall::inherited_socket(socket) else { return ExitCode::from(FAILED) };
    let mut agent = StageSocket::new(OwnedFd::from(socket));
    match stage(&mut agent) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without the agent there is nobody left to tell.
            let _ = agent.report(&Report::Failed(error));
            ExitCode::from(FAILED)
        }
    }
}

fn stage(agent: &mut StageSocket) -> Result<(), SetupError> {
    // After its clone, an init in a shared pid namespace is visible there, while it is still root with all capabilities
    // and in the guest's mount namespace. A process that is not dumpable can be traced or inspected only with
    // CAP_SYS_PTRACE, and not by other processes of the same user. The clone inherits this. execve(2) makes the program
    // dumpable again. Every init needs this, because others can join its container before it is started.
    prctl::set_dumpable(false).step(|| "hiding from the containers".into())?;
    let config = agent.receive().step(|| "receiving the configuration".into())?;
    match config {
        StageConfig::Init(config) => make_init(*config, agent),
        StageConfig::Exec(config) => make_helper(&config, agent),
    }
}

fn make_init(mut config: InitConfig, agent: &mut StageSocket) -> Result<(), SetupError> {
    // While the stage has the rights of the guest's root.
    let pid_namespace = config.pid_namespace.map(syscall::pid_namespace_of).transpose();
    let pid_namespace = pid_namespace.step(|| "opening the pid namespace of another container".into())?;
    config.pid_namespace = pid_namespace.as_ref().map(AsRawFd::as_raw_fd);
    let InitConfig { process, .. } = &config;
    process_attributes::begin(process)?;
    if let Some(ids) = &process.common.ids {
        user_namespace::prepare(process, ids)?;
        if config.cgroup_namespace {
            user_namespace::delegate(&config.cgroup_dir, ids)?;
        }
    }
    let id_mapped = match &config.rootfs {
        Some(rootfs) => IdMappedMounts::of(rootfs, &config.cgroup_dir)?,
        None => IdMappedMounts::default(),
    };
    if let Some(offsets) = &config.time_offsets {
        make_time_namespace(offsets)?;
    }
    for joined in &config.joined {
        syscall::setns(joined.init_pidfd, joined.namespaces)
            .step(|| "entering the namespaces of another container".into())?;
    }
    // The process of a new user namespace waits until its ids are mapped.
    let maps = process.common.ids.as_ref().filter(|_| config.namespaces & libc::CLONE_NEWUSER as u64 != 0);
    let gate = maps.map(|_| user_namespace::Gate::new()).transpose().step(|| "making a pipe".into())?;
    match clone_into(&config.cgroup_dir, config.namespaces).step(|| CLONING.into())? {
        Cloned::Parent(pid) => {
            if let (Some(ids), Some(gate)) = (maps, gate) {
                user_namespace::map(pid, ids)?;
                gate.open().step(|| "letting the container's process go on".into())?;
            }
            let report =
                if config.pid_namespace.is_some() { Report::Helper(pid) } else { Report::Cloned(pid) };
            agent.report(&report).step(|| "reporting the container's process id".into())
        }
        Cloned::Child(thread) => {
            // The stage has reported why it did not open the gate.
            if gate.is_some_and(|gate| gate.pass().is_err()) {
                process::exit(FAILED.into());
            }
            if process.common.ids.is_some() {
                user_namespace::become_root()?;
            }
            container_init::run(&config, &id_mapped, agent, thread)
        }
    }
}

/// Makes a time namespace, which the caller's children are in. Its clocks can be set until the first of them is.
fn make_time_namespace(offsets: &str) -> Result<(), SetupError> {
    let namespace = CloneFlags::from_bits_retain(libc::CLONE_NEWTIME);
    unshare(namespace).step(|| "linux.namespaces[time]".into())?;
    if offsets.is_empty() {
        return Ok(());
    }
    process_attributes::write("/proc/self/timens_offsets", offsets)
        .step(|| format!("linux.timeOffsets {offsets:?}"))
}

fn make_helper(config: &ExecConfig, agent: &mut StageSocket) -> Result<(), SetupError> {
    let cloned = match clone_into(&config.cgroup_dir, 0) {
        // A cgroup whose controllers are for those below it takes no process (the kernel's cgroup-v2, "No Internal
        // Process Constraint"). The container has divided it: as with runc the init's takes this one.
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            let cgroup_dir =
                cgroup_of(config.init_pidfd).step(|| "finding the cgroup of the container's init".into())?;
            clone_into(&cgroup_dir, 0)
        }
        other => other,
    };
    match cloned.step(|| CLONING.into())? {
        Cloned::Parent(pid) => {
            agent.report(&Report::Helper(pid)).step(|| "reporting the helper's process id".into())
        }
        Cloned::Child(thread) => exec::run(config, agent, thread),
    }
}

/// What is tried in [`clone_into`].
const CLONING: &str = "cloning the container's process into its namespaces and its cgroup";

/// Clones a process into new `namespaces` and a cgroup.
fn clone_into(cgroup_dir: &Path, namespaces: u64) -> io::Result<Cloned> {
    let cgroup = File::open(cgroup_dir)?;
    syscall::clone_sibling_into(namespaces, cgroup.as_fd())
}

/// The directory of the cgroup that a process is in.
fn cgroup_of(pidfd: RawFd) -> io::Result<PathBuf> {
    let value = |file: String, key: &str| -> io::Result<String> {
        let text = fs::read_to_string(&file)?;
        let value = text.lines().find_map(|line| line.strip_prefix(key));
        value.map(str::to_owned).ok_or_else(|| io::Error::other(format!("{file} does not have {key:?}")))
    };
    // -1 of a process that has ended, which leads nowhere.
    let pid = value(format!("/proc/self/fdinfo/{pidfd}"), "Pid:\t")?;
    let path = value(format!("/proc/{pid}/cgroup"), "0::/")?;
    Ok(Path::new(cgroup::ROOT).join(path))
}
