//! A container's init, from its first instruction to the container's program.

use std::{convert::Infallible, os::fd::AsFd, path::PathBuf};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::{sethostname, setsid},
};

use super::{
    Order, Report, SetupError, Step,
    clone_process::NewProcess,
    console::Console,
    execute_program::{Filters, ReadyProcess},
    find_program, process_attributes,
    rootfs::{self, IdMappedMounts},
    stage_socket::StageSocket,
};
use crate::{
    stage_config::InitConfig,
    syscall::{self, SingleThread},
};

/// Builds the container around the caller, waits for the start, and executes the container's program.
///
/// If the container joins an existing pid namespace, the caller stays outside of it. It is a helper then, which drops
/// its privileges, clones the init into the namespace, and returns.
pub(super) fn run(
    config: &InitConfig,
    id_mapped: &IdMappedMounts,
    agent: &mut StageSocket,
    thread: SingleThread,
) -> Result<(), SetupError> {
    let process = &config.process;
    set_up_namespaces(config)?;
    if config.namespaces & libc::CLONE_NEWPID as u64 != 0 {
        // Nobody else is in the pid namespace yet.
        let proc = rootfs::new_proc()?;
        agent.report_with(&Report::Proc, proc.as_fd()).step(|| "handing over the proc file system".into())?;
    }
    let console = match &config.rootfs {
        Some(rootfs) => rootfs::enter(rootfs, process, id_mapped)?,
        None => rootfs::enter_empty().map(|()| None)?,
    };
    let env = find_program::with_home(&process.env, process.uid);
    match config.pid_namespace {
        Some(pidfd) => {
            syscall::setns(pidfd, libc::CLONE_NEWPID as u64)
                .step(|| "entering the pid namespace of another container".into())?;
            process_attributes::apply_privileged_settings(process)?;
            if let Some(console) = &console {
                process_attributes::own_stream(console.slave(), process)?;
            }
            NewProcess { process, console, env }.clone(agent, thread, start)
        }
        None => match become_init(config, console, env, agent)? {},
    }
}

/// The caller is the container's init itself.
fn become_init(
    config: &InitConfig,
    console: Option<Console>,
    env: Vec<String>,
    agent: &mut StageSocket,
) -> Result<Infallible, SetupError> {
    let process = &config.process;
    setsid().step(|| "making a session".into())?;
    let master = console.map(Console::take).transpose()?;
    process_attributes::apply_privileged_settings(process)?;
    process_attributes::set_scheduler(process)?;
    process_attributes::set_process_limit(process)?;
    let filters = Filters::of(process);
    process_attributes::install(filters.early)?;
    let program = match &config.rootfs {
        Some(_) => ReadyProcess::find(process, env, filters.late)?,
        None => ReadyProcess::pause(process, filters.late)?,
    };
    agent.report_ready(master).step(|| "reporting that the container is ready".into())?;
    start(program, agent)
}

fn start(program: ReadyProcess<'_>, agent: &mut StageSocket) -> Result<Infallible, SetupError> {
    let Order::Start = agent.receive().step(|| "waiting for the start".into())?;
    program.execute(agent)
}

fn set_up_namespaces(config: &InitConfig) -> Result<(), SetupError> {
    if config.cgroup_namespace {
        unshare(CloneFlags::CLONE_NEWCGROUP).step(|| "linux.namespaces[cgroup]".into())?;
    }
    if config.namespaces & libc::CLONE_NEWNET as u64 != 0 {
        syscall::loopback_up().step(|| "loopback interface".into())?;
    }
    if let Some(hostname) = &config.hostname {
        sethostname(hostname).step(|| format!("hostname {hostname:?}"))?;
    }
    if let Some(domainname) = &config.domainname {
        syscall::set_domain_name(domainname).step(|| format!("domainname {domainname:?}"))?;
    }
    for (path, value) in &config.sysctls {
        process_attributes::write(PathBuf::from("/proc/sys").join(path), value)
            .step(|| format!("linux.sysctl {} = {value:?}", path.display()))?;
    }
    Ok(())
}
