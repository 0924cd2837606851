//! A container's init, from its first instruction to the container's program.

use std::{convert::Infallible, path::PathBuf};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::{sethostname, setsid},
};

use super::{
    Order, SetupError, Step, attributes, program,
    ready::{Filters, Program},
    report::Agent,
    rootfs,
};
use crate::{config::InitConfig, syscall};

/// Builds the container around the caller, waits for the start, and executes the container's program.
pub(super) fn run(config: &InitConfig, agent: &mut Agent) -> Result<Infallible, SetupError> {
    let process = &config.process;
    setsid().step(|| "making a session".into())?;
    attributes::begin(process)?;
    set_up_namespaces(config)?;
    let terminal = match &config.rootfs {
        Some(rootfs) => rootfs::enter(rootfs, process)?,
        None => rootfs::enter_empty().map(|()| None)?,
    };
    let env = program::with_home(&process.env, process.uid);
    attributes::set(process)?;
    attributes::set_process_limit(process)?;
    let filters = Filters::of(process);
    attributes::install(filters.early)?;
    let program = match &config.rootfs {
        Some(_) => Program::find(process, env, filters.late)?,
        None => Program::pause(process, filters.late)?,
    };

    agent.report_ready(terminal).step(|| "reporting that the container is ready".into())?;
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
        attributes::write("/proc/sys/kernel/domainname", domainname)
            .step(|| format!("domainname {domainname:?}"))?;
    }
    for (path, value) in &config.sysctls {
        attributes::write(PathBuf::from("/proc/sys").join(path), value)
            .step(|| format!("linux.sysctl {} = {value:?}", path.display()))?;
    }
    Ok(())
}
