//! The shim's log: the `log` FIFO of the bundle, which containerd reads and copies into its own log.

use std::{fs::OpenOptions, os::unix::fs::OpenOptionsExt, path::Path, sync::Arc};

use nix::libc;
use tracing::Level;

/// Logs to `fifo` from now on. The shim never waits for the reader: if there is none, or the FIFO is full, lines are
/// lost.
pub(crate) fn to_fifo(fifo: &Path, level: Level) {
    let file = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(fifo);
    // Not there: the shim was started by hand, or its containerd has gone. There is no other place to say so.
    let Ok(file) = file else { return };
    tracing_subscriber::fmt()
        .with_writer(Arc::new(file))
        .with_max_level(level)
        .with_ansi(false)
        .with_target(false)
        .without_time()
        .log_internal_errors(false)
        .init();
}

/// Logs to stderr, for the commands that end soon.
pub(crate) fn to_stderr() {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(Level::WARN)
        .with_ansi(false)
        .with_target(false)
        .without_time()
        .init();
}
