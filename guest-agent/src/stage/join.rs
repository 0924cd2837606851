//! A process that joins a container, from its first instruction to its program.
//!
//! Whatever it meets in the container's namespaces may be hostile, and so may whoever sees it there: a process with
//! CAP_SYS_PTRACE can trace every other of its pid namespace. So what joins is made in two steps. A helper enters the
//! container's cgroup and all of its namespaces, and becomes the process's user. It is no member of the pid namespace
//! itself, and is not seen in there. Last it clones the process, which has no more rights than its program will have.

use std::{convert::Infallible, fs::File, os::fd::RawFd};

use nix::unistd::{chdir, setsid};

use super::{
    Report, SetupError, Step, attributes,
    console::Console,
    program,
    ready::{Filters, Program},
    report::Agent,
};
use crate::{
    config::{ExecConfig, ProcessConfig, SeccompFilter, WindowSize},
    seccomp_program,
    syscall::{self, Cloned, SingleThread},
};

/// The namespaces that the helper enters; the pid namespace comes before. Of those that the container shares with the
/// guest it is a member already.
const JOINED: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWCGROUP) as u64;

/// The helper. Returns when the process is cloned; in the process it does not return.
pub(super) fn run(config: &ExecConfig, agent: &mut Agent, thread: SingleThread) -> Result<(), SetupError> {
    let process = &config.process;
    attributes::begin(process)?;
    enter_namespaces(config.init_pidfd)?;
    let console = process.terminal.map(open_console).transpose()?;
    let env = program::with_home(&process.env, process.uid);
    attributes::set(process)?;
    if let Some(console) = &console {
        attributes::own_stream(console.slave(), process)?;
    }
    let Filters { early, late } = Filters::of(process);
    if early.is_none_or(|filter| allows_clone(filter, process)) {
        attributes::install(early)?;
        let program = Program::find(process, env, late)?;
        return clone(agent, thread, |agent| execute(process, console, program, agent));
    }
    // Under such a filter there is no way from the helper to the process. The process has the helper's rights until it
    // installs the filter: who may trace it can use them.
    clone(agent, thread, |agent| {
        attributes::install(early)?;
        let program = Program::find(process, env, late)?;
        execute(process, console, program, agent)
    })
}

/// The process. It leads a session of its own, as a container's init does.
fn execute(
    process: &ProcessConfig,
    console: Option<Console>,
    program: Program<'_>,
    agent: &mut Agent,
) -> Result<Infallible, SetupError> {
    setsid().step(|| "making a session".into())?;
    let master = console.map(Console::take).transpose()?;
    attributes::set_process_limit(process)?;
    agent.report_ready(master).step(|| "reporting that the process is ready".into())?;
    program.execute(agent)
}

fn clone(
    agent: &mut Agent,
    thread: SingleThread,
    process: impl FnOnce(&mut Agent) -> Result<Infallible, SetupError>,
) -> Result<(), SetupError> {
    match syscall::clone_sibling(thread).step(|| "cloning the process into the container".into())? {
        Cloned::Parent(pid) => agent.report(&Report::Cloned(pid)).step(|| "reporting the process id".into()),
        Cloned::Child(_) => match process(agent)? {},
    }
}

/// Whether a filter lets the helper clone the process, and lets the process do what is left to do before its program.
/// runc needs less of a filter: it installs the filter in the process itself.
fn allows_clone(filter: &SeccompFilter, process: &ProcessConfig) -> bool {
    let mut calls = vec![(libc::SYS_clone, [syscall::SIBLING, 0, 0, 0, 0, 0]), (libc::SYS_setsid, [0; 6])];
    if process.terminal.is_some() {
        calls.push((libc::SYS_ioctl, [0, libc::TIOCSCTTY, 0, 0, 0, 0]));
        calls.extend((0..3).map(|to| (libc::SYS_dup2, [0, to, 0, 0, 0, 0])));
    }
    if attributes::has_process_limit(process) {
        calls.push((libc::SYS_prlimit64, [0, u64::from(libc::RLIMIT_NPROC), 0, 0, 0, 0]));
    }
    calls.into_iter().all(|(number, arguments)| seccomp_program::allows(&filter.program, number, arguments))
}

/// All at once, so that there is no moment in some of the container's namespaces only.
fn enter_namespaces(init_pidfd: RawFd) -> Result<(), SetupError> {
    // This is for the children of the caller.
    syscall::setns(init_pidfd, libc::CLONE_NEWPID as u64)
        .step(|| "entering the container's pid namespace".into())?;
    syscall::setns(init_pidfd, JOINED).step(|| "entering the container's namespaces".into())?;
    // setns(2) has changed the root and the working directory to the container's root already. Done again, since all
    // that follows relies on it.
    chdir("/").step(|| "changing to the container's root".into())
}

/// Opens a terminal of the container that the caller is in.
fn open_console(size: WindowSize) -> Result<Console, SetupError> {
    let root = File::open("/").step(|| "opening the container's root".into())?;
    Console::open(root, size)
}
