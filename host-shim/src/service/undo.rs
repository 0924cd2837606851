//! `undo`: undoes what a dead shim has left of a pod, for `delete`.
//!
//! It is a process of its own, because containerd kills `delete` after five seconds. It has a session of its own, and
//! none of containerd's streams. It stays in the cgroup of containerd, as the shim was: systemd kills only the main
//! process of that unit when it stops (`KillMode=process`), and its journal shows there what this process logs.
//!
//! It may be killed at any time: what it has not undone is still in the journals.

use std::{
    path::Path,
    process::{self, ExitCode},
    thread,
    time::{Duration, Instant},
};

use crate::{
    host::{
        journal::UndoError,
        state_dir::{self, STATE_ROOT},
    },
    service::args::Args,
    types::error::chain,
};

/// How long it may take. Each step has a limit of its own, except for system calls that hang with the host's storage.
const MOST: Duration = Duration::from_secs(180);

/// What takes longer than this is said when it is done.
const SOON: Duration = Duration::from_secs(2);

/// The process. It logs why it fails.
pub(crate) fn run(args: &Args) -> ExitCode {
    // An error: it is the leader of a session already, because somebody has started it by hand.
    _ = nix::unistd::setsid();
    let _span = tracing::error_span!("pod", namespace = args.namespace, id = args.id).entered();
    give_up_in(MOST);
    let begun = Instant::now();
    if let Err(error) = undo(args) {
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

/// Undoes it, and runs the `poststop` hooks. Blocks.
pub(super) fn undo(args: &Args) -> Result<(), UndoError> {
    let path = state_dir::path_of(Path::new(STATE_ROOT), &args.address, &args.namespace, &args.id);
    state_dir::clean(&path).map(state_dir::Cleaned::run_hooks)
}

/// Ends this process after some time, and with it the lock on the state directory.
fn give_up_in(within: Duration) {
    let give_up = move || {
        thread::sleep(within);
        tracing::error!("what a dead shim has left takes too long to undo; it is tried again");
        process::exit(1);
    };
    // Without a thread it goes on without this limit.
    drop(thread::Builder::new().spawn(give_up));
}
