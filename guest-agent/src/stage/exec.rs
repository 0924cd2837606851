//! A process that joins a container, from its first instruction to its program.
//!
//! Whatever it meets in the container's namespaces may be hostile, and so may whoever sees it there: a process with
//! CAP_SYS_PTRACE can trace every other of its pid namespace. So exec takes two steps. A helper enters the
//! container's cgroup and all of its namespaces, and becomes the process's user. It is no member of the pid namespace
//! itself, and is not seen in there. Finally it clones the process, which has no more rights than its program will have
//! ([`super::clone_process`]).

use std::{fs::File, os::fd::RawFd};

use nix::unistd::chdir;

use super::{
    SetupError, Step, clone_process::NewProcess, console::Console, execute_program::ReadyProcess,
    find_program, process_attributes, stage_socket::StageSocket, user_namespace,
};
use crate::{
    stage_config::{ExecConfig, WindowSize},
    syscall::{self, SingleThread},
};

/// The namespaces that the helper enters; the pid namespace comes before. It is already in the namespaces that the
/// container shares with the guest.
const JOINED: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWTIME) as u64;

/// The helper. Returns when the process is cloned; in the process it does not return.
pub(super) fn run(
    config: &ExecConfig,
    agent: &mut StageSocket,
    thread: SingleThread,
) -> Result<(), SetupError> {
    let process = &config.process;
    process_attributes::begin(process)?;
    match &process.common.ids {
        Some(ids) => {
            user_namespace::prepare(process, ids)?;
            enter_namespaces(config.init_pidfd, JOINED | libc::CLONE_NEWUSER as u64)?;
            user_namespace::become_root()?;
        }
        None => enter_namespaces(config.init_pidfd, JOINED)?,
    }
    let console = process.terminal.map(open_console).transpose()?;
    let env = find_program::with_home(&process.env, process.uid);
    process_attributes::apply_privileged_settings(process)?;
    if let Some(console) = &console {
        process_attributes::own_stream(console.slave(), process)?;
    }
    let new_process = NewProcess { process, console, env };
    new_process.clone(agent, thread, ReadyProcess::execute)
}

/// All at once, so that there is no moment in some of the container's namespaces only.
fn enter_namespaces(init_pidfd: RawFd, namespaces: u64) -> Result<(), SetupError> {
    // This is for the children of the caller.
    syscall::setns(init_pidfd, libc::CLONE_NEWPID as u64)
        .step(|| "entering the container's pid namespace".into())?;
    syscall::setns(init_pidfd, namespaces).step(|| "entering the container's namespaces".into())?;
    // setns(2) has changed the root and the working directory to the container's root already. Done again, since all
    // that follows relies on it.
    chdir("/").step(|| "changing to the container's root".into())
}

/// Opens a terminal of the container that the caller is in.
fn open_console(size: WindowSize) -> Result<Console, SetupError> {
    let root = File::open("/").step(|| "opening the container's root".into())?;
    Console::open(root, size)
}
