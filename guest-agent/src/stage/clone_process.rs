//! The last steps of a helper: it drops its rights, and clones the container's process. Then the first steps of that
//! process.

use std::convert::Infallible;

use nix::unistd::setsid;

use super::{
    Report, SetupError, Step,
    console::Console,
    execute_program::{Filters, ReadyProcess},
    process_attributes,
    stage_socket::StageSocket,
};
use crate::{
    seccomp_filter,
    stage_config::{ProcessConfig, SeccompFilter},
    syscall::{self, Cloned, SingleThread},
};

/// What a helper has prepared for the process.
pub(super) struct NewProcess<'a> {
    pub(super) process: &'a ProcessConfig,
    pub(super) console: Option<Console>,
    pub(super) env: Vec<String>,
}

impl<'a> NewProcess<'a> {
    /// Clones the process, which reports that it is ready and goes on with `next`. Returns in the helper only.
    pub(super) fn clone(
        self,
        agent: &mut StageSocket,
        thread: SingleThread,
        next: impl FnOnce(ReadyProcess<'a>, &mut StageSocket) -> Result<Infallible, SetupError>,
    ) -> Result<(), SetupError> {
        let Self { process, console, env } = self;
        let Filters { early, late } = Filters::of(process);
        let is_allowed = early.is_none_or(|filter| allows_clone(filter, process));
        if is_allowed && process_attributes::scheduler_outlives_clone(process) {
            process_attributes::set_scheduler(process)?;
            process_attributes::install(early)?;
            let program = ReadyProcess::find(process, env, late)?;
            return clone(agent, thread, |agent| {
                begin(process, console, agent)?;
                next(program, agent)
            });
        }
        // With this filter or scheduler, the helper could not clone the process any more. So the process applies them
        // itself. Until then it has the helper's privileges, and whoever may trace the process can use them.
        clone(agent, thread, |agent| {
            process_attributes::set_scheduler(process)?;
            process_attributes::install(early)?;
            let program = ReadyProcess::find(process, env, late)?;
            begin(process, console, agent)?;
            next(program, agent)
        })
    }
}

fn clone(
    agent: &mut StageSocket,
    thread: SingleThread,
    process: impl FnOnce(&mut StageSocket) -> Result<Infallible, SetupError>,
) -> Result<(), SetupError> {
    match syscall::clone_sibling(thread).step(|| "cloning the process into the container".into())? {
        Cloned::Parent(pid) => agent.report(&Report::Cloned(pid)).step(|| "reporting the process id".into()),
        Cloned::Child(_) => match process(agent)? {},
    }
}

/// The process leads a session of its own.
fn begin(
    process: &ProcessConfig,
    console: Option<Console>,
    agent: &mut StageSocket,
) -> Result<(), SetupError> {
    setsid().step(|| "making a session".into())?;
    let master = console.map(Console::take).transpose()?;
    process_attributes::set_process_limit(process)?;
    agent.report_ready(master).step(|| "reporting that the process is ready".into())
}

/// Whether a filter lets the helper clone the process, and lets the process do what is left to do before its program.
/// runc needs less of a filter: it installs the filter in the process itself.
fn allows_clone(filter: &SeccompFilter, process: &ProcessConfig) -> bool {
    let mut calls = vec![(libc::SYS_clone, [syscall::SIBLING, 0, 0, 0, 0, 0]), (libc::SYS_setsid, [0; 6])];
    if process.terminal.is_some() {
        calls.push((libc::SYS_ioctl, [0, libc::TIOCSCTTY, 0, 0, 0, 0]));
        calls.extend((0..3).map(|to| (libc::SYS_dup2, [0, to, 0, 0, 0, 0])));
    }
    if process_attributes::has_process_limit(process) {
        calls.push((libc::SYS_prlimit64, [0, u64::from(libc::RLIMIT_NPROC), 0, 0, 0, 0]));
    }
    calls.into_iter().all(|(number, arguments)| seccomp_filter::allows(&filter.program, number, arguments))
}
