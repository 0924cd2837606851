//! Executes the program of a process, or pause, after the setup of the process is complete.

use std::{
    convert::Infallible,
    ffi::CString,
    io,
    path::{Path, PathBuf},
};

use nix::unistd::execve;
use rustix::net::{Shutdown, shutdown};

use super::{
    Report, SetupError, Step, errno_text, find_program, pause_process::Pause, process_attributes,
    stage_socket::StageSocket,
};
use crate::stage_config::{ProcessConfig, SeccompFilter};

/// A process whose setup is complete.
pub(super) struct ReadyProcess<'a> {
    next: Next<'a>,
    /// The filter that is still to be installed.
    filter: Option<&'a SeccompFilter>,
}

/// What it does then.
enum Next<'a> {
    /// Executes a program that is there, with all that execve(2) wants.
    Execute { path: PathBuf, args: &'a [String], env: Vec<String> },
    /// Stays as it is.
    Pause(Pause),
}

impl<'a> ReadyProcess<'a> {
    /// Becomes the process's user, and finds its program in the container's root, as that user.
    pub(super) fn find(
        process: &'a ProcessConfig,
        env: Vec<String>,
        filter: Option<&'a SeccompFilter>,
    ) -> Result<Self, SetupError> {
        process_attributes::become_user(process)?;
        let path = find_program::find_program(&process.args[0], &env)?;
        Ok(Self { next: Next::Execute { path, args: &process.args, env }, filter })
    }

    /// Becomes the process's user, and the process that holds a pod.
    pub(super) fn pause(
        process: &ProcessConfig,
        filter: Option<&'a SeccompFilter>,
    ) -> Result<Self, SetupError> {
        process_attributes::become_user(process)?;
        let pause = Pause::new().step(|| "preparing pause".into())?;
        Ok(Self { next: Next::Pause(pause), filter })
    }

    pub(super) fn execute(self, agent: &mut StageSocket) -> Result<Infallible, SetupError> {
        agent.report(&Report::Executing).step(|| "reporting the start".into())?;
        process_attributes::install(self.filter)?;
        match self.next {
            Next::Execute { path, args, env } => Err(execute_program(&path, args, &env)),
            Next::Pause(pause) => {
                // As execve(2) would: the end of the socket says that all went well.
                shutdown(agent.socket(), Shutdown::Both).step(|| "parting from the agent".into())?;
                pause.run()
            }
        }
    }
}

/// Executes the container's program in place of this one (execve(2)). Returns only if that fails.
fn execute_program(program: &Path, args: &[String], env: &[String]) -> SetupError {
    let attempt = || -> io::Result<()> {
        let words = |words: &[String]| {
            words.iter().map(|word| CString::new(word.as_str())).collect::<Result<Vec<_>, _>>()
        };
        let path = CString::new(program.as_os_str().as_encoded_bytes())?;
        execve(&path, &words(args)?, &words(env)?)?;
        Ok(())
    };
    let cause = match attempt() {
        Ok(()) => "returned".to_owned(),
        Err(error) => errno_text(&error),
    };
    SetupError { step: format!("exec {}", program.display()), cause }
}

/// A process's filter, either to be installed early or late.
///
/// With noNewPrivileges it is installed last, and need not allow more than execve(2). Otherwise the installation needs
/// a capability that the process may lose in a later step. So it is early, and the filter must allow the steps that
/// follow, as with runc.
pub(super) struct Filters<'a> {
    pub(super) early: Option<&'a SeccompFilter>,
    pub(super) late: Option<&'a SeccompFilter>,
}

impl<'a> Filters<'a> {
    pub(super) fn of(process: &'a ProcessConfig) -> Self {
        match (process.no_new_privileges, process.common.seccomp.as_ref()) {
            (false, filter) => Self { early: filter, late: None },
            (true, filter) => Self { early: None, late: filter },
        }
    }
}
