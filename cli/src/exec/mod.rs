//! `bulkhead exec`: runs a program in a container that runs. It is a client of the pod's shim, as containerd is one.

mod directory;
mod error;
mod options;
mod program;
mod target;
#[cfg(test)]
mod tests;

use std::{
    io::Write,
    path::{Path, PathBuf},
    pin::pin,
    process::ExitCode,
    time::Duration,
};

use bulkhead_host_shim::operator::{chain, one_line, pod_address};
use containerd_shim_protos::types::task::Status;
use rustix::process::geteuid;
use tokio::time::timeout;

use self::{directory::ExecDirectory, error::ExecError, target::Target};
use crate::process::{
    attached,
    client::Process,
    runtime,
    signals::{Event, KILLED, Signals, interrupted, status_of},
    streams::{Fifos, Tail},
    terminal,
};
use crate::progress;

pub(crate) use self::{
    directory::{ROOT, leftovers},
    options::Options,
};

/// How long a program that is just being started is waited for after a signal.
const INTERRUPTED: Duration = Duration::from_secs(10);

/// How long this command waits at its end until leftovers of others are removed.
const LEFTOVERS: Duration = Duration::from_secs(5);

/// Runs the program in a pod below `root`, and returns its exit status, or 125 to 127.
pub(crate) fn main(options: &Options, root: &Path) -> ExitCode {
    match execute(options, root) {
        Ok(status) => status.into(),
        Err(error) => {
            // If stderr is closed, nobody reads it.
            _ = progress::Stderr.write_all(format!("bulkhead: {}\n", chain(&error)).as_bytes());
            error.status().into()
        }
    }
}

/// Removes what execs have left that were killed.
pub(crate) fn remove_leftovers() -> Vec<(PathBuf, Result<(), ExecError>)> {
    match runtime() {
        Ok(runtime) => runtime.block_on(directory::remove_leftovers()),
        Err(error) => {
            tracing::warn!(error = chain(&error), "what execs have left is not removed");
            Vec::new()
        }
    }
}

fn execute(options: &Options, root: &Path) -> Result<u8, ExecError> {
    if !geteuid().is_root() {
        return Err(ExecError::NotRoot);
    }
    if options.tty && options.interactive {
        terminal::check()?;
    }
    let target = target::find(root, options)?;
    let runtime = runtime()?;
    let status = runtime.block_on(async {
        // From now on, none of these signals ends this command before the directory is removed.
        let mut signals = Signals::catch()?;
        // What hangs there does not hold this command up.
        let leftovers = tokio::spawn(directory::remove_leftovers());
        let directory = ExecDirectory::create(target.shim_pid)?;
        let status = exec_in(&directory, &target, options, &mut signals).await;
        if let Ok(Ok(removed)) = timeout(LEFTOVERS, leftovers).await {
            for (path, result) in removed {
                if let Err(error) = result {
                    tracing::warn!(path = %path.display(), error = chain(&error), "a `bulkhead exec` has left this");
                }
            }
        }
        status
    });
    // A thread that reads the terminal is not waited for.
    runtime.shutdown_background();
    status
}

/// What a process needs that can be added.
struct Prepared {
    process: Process,
    spec: Vec<u8>,
    fifos: Fifos,
}

/// Runs the program, and removes the directory unless its process may still be there.
async fn exec_in(
    directory: &ExecDirectory,
    target: &Target,
    options: &Options,
    signals: &mut Signals,
) -> Result<u8, ExecError> {
    let prepared = tokio::select! {
        biased;
        came = signals.next() => Err(interrupted(came.signal).into()),
        prepared = prepare(directory, target, options) => prepared,
    };
    let Prepared { process, spec, fifos } = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            remove(directory);
            return Err(error);
        }
    };
    let status = run(&process, spec, fifos, signals).await;
    // What came before the removal, and what else comes of the first event, must not keep the program from being
    // killed.
    signals.take_waiting();
    let mut removal = pin!(process.remove());
    let removed = loop {
        tokio::select! {
            removed = &mut removal => break removed,
            came = signals.next() => if came.event == Event::Another {
                break Err(interrupted(came.signal));
            },
        }
    };
    match removed {
        Err(error) if has_shim(target) => {
            let path = directory.path().display();
            tracing::warn!(%path, error = chain(&error), "the program may still run; `bulkhead gc` ends it");
        }
        // With its shim the process is gone.
        _ => remove(directory),
    }
    status
}

fn remove(directory: &ExecDirectory) {
    // The program has its result all the same.
    directory.remove().unwrap_or_else(|error| tracing::warn!("{}", chain(&error)));
}

/// Whether the shim of the pod still lives.
fn has_shim(target: &Target) -> bool {
    pod_address(&target.state).is_ok_and(|address| address.shim_pid == Some(target.shim_pid))
}

/// Makes everything that the process needs, and asks the shim whether its container runs.
async fn prepare(
    directory: &ExecDirectory,
    target: &Target,
    options: &Options,
) -> Result<Prepared, ExecError> {
    let user = match &options.user {
        Some(user) => Some(program::user(&target.place, user).await?),
        None => None,
    };
    let window = if options.tty { terminal::size() } else { None };
    let spec = program::process(&target.spec, &target.place.bundle, options, user, window)?;
    let fifos = Fifos::make(directory.path(), options.interactive, options.tty)
        .map_err(|source| ExecError::Prepare { path: directory.path().into(), source })?;
    let process = directory.connect(&target.socket, &target.place.id).await?;
    // The socket has the same path for each pod of this name.
    if process.shim_pid().await? != target.shim_pid {
        return Err(ExecError::Replaced { pod: target.pod.clone() });
    }
    let container = one_line(&target.place.id);
    match process.container_status().await? {
        Status::CREATED => Err(ExecError::NotStarted { container }),
        Status::PAUSED => Err(ExecError::Paused { container }),
        Status::STOPPED => Err(ExecError::Ended { container }),
        _ => Ok(Prepared { process, spec, fifos }),
    }
}

/// Adds the process to its container, starts it, and follows it to its end.
async fn run(process: &Process, spec: Vec<u8>, fifos: Fifos, signals: &mut Signals) -> Result<u8, ExecError> {
    process.add(spec, &fifos).await?;
    let mut started = pin!(process.start());
    tokio::select! {
        biased;
        came = signals.next() => {
            // Only one that has started can be ended.
            _ = timeout(INTERRUPTED, started).await;
            return Err(ExecError::MayHaveRun { status: status_of(came.signal) });
        }
        result = &mut started => result?,
    }
    let ended = attached::follow(process, fifos, &Tail::default(), None, signals).await?;
    Ok(ended.status.unwrap_or(KILLED))
}
