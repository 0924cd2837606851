//! `undo`: undoes what a dead shim has left of a pod, for `delete`.
//!
//! It is a process of its own, because containerd kills `delete` after five seconds. It has a session of its own, and
//! none of containerd's streams. It stays in the cgroup of containerd, as the shim was: systemd kills only the main
//! process of that unit when it stops (`KillMode=process`), and its journal shows there what this process logs.
//!
//! It may be killed at any time: what it has not undone is still in the journals.

use std::{
    fs::File,
    io,
    path::Path,
    process::{self, ExitCode},
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{Mode, OFlags, openat};

use crate::{
    host::{
        journal::UndoError,
        state_dir::{self, STATE_ROOT},
    },
    service::args::Args,
    types::error::chain,
};

/// How long it may take. Each step has a limit of its own, except for system calls that hang with the host's storage.
const MOST_TIME: Duration = Duration::from_secs(180);

/// What takes longer than this is said when it is done.
const SOON: Duration = Duration::from_secs(2);

/// The process. It logs why it fails.
pub(crate) fn run(args: &Args) -> ExitCode {
    // An error: it is the leader of a session already, because somebody has started it by hand.
    _ = nix::unistd::setsid();
    let _span = tracing::error_span!("pod", namespace = args.namespace, id = args.id).entered();
    give_up_in(MOST_TIME);
    let begun = Instant::now();
    let directory = match stdin_directory() {
        Ok(directory) => directory,
        Err(error) => {
            tracing::error!(
                error = chain(&error),
                "`undo` is for `delete`, which gives it a state directory"
            );
            return ExitCode::FAILURE;
        }
    };
    if let Err(error) = undo(args, directory) {
        tracing::error!(
            error = chain(&error),
            "what a dead shim has left cannot be undone; it is tried again"
        );
        return ExitCode::FAILURE;
    }
    let took = begun.elapsed();
    if took > SOON {
        let seconds = took.as_secs();
        tracing::warn!(seconds, "what a dead shim has left is undone");
    }
    ExitCode::SUCCESS
}

/// Undoes the pod that has this open state directory, and runs the `poststop` hooks. Blocks.
pub(super) fn undo(args: &Args, directory: File) -> Result<(), UndoError> {
    let path = state_dir::path_of(Path::new(STATE_ROOT), &args.address, &args.namespace, &args.id);
    state_dir::clean_opened(&path, directory).map(drop)
}

/// The state directory that `delete` has opened, by a file description of our own: a lock belongs to one. It says which
/// pod is meant: at its path there may be that of a new pod of the same id by now.
fn stdin_directory() -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(io::stdin(), ".", flags, Mode::empty())?.into())
}

/// Ends this process after some time, and with it the lock on the state directory, unless a system call hangs.
fn give_up_in(within: Duration) {
    let give_up = move || {
        thread::sleep(within);
        tracing::error!("what a dead shim has left takes too long to undo; it is tried again");
        process::exit(1);
    };
    // Without a thread it goes on without this limit.
    drop(thread::Builder::new().spawn(give_up));
}
