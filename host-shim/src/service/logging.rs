//! The shim's log: the `log` FIFO of the bundle, which containerd reads and copies into its own log.

use std::{fs::OpenOptions, os::unix::fs::OpenOptionsExt, path::Path, sync::Arc};

use nix::libc;
use tracing::{Level, level_filters::LevelFilter};
use tracing_subscriber::{fmt, layer::SubscriberExt, registry, reload, util::SubscriberInitExt};

use crate::{
    service::log_format::{Lines, Spans},
    types::{config::LogFormat, log},
};

/// Logs to `fifo` from now on. The shim never waits for the reader: if there is none, or the FIFO is full, lines are
/// lost. A pod may choose another level, unless the level is fixed.
pub(crate) fn to_fifo(fifo: &Path, format: LogFormat, level: Level, is_fixed: bool) {
    let file = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(fifo);
    // Not there: the shim was started by hand, or its containerd has gone. There is no other place to say so.
    let Ok(file) = file else { return };
    let (filter, handle) = reload::Layer::new(LevelFilter::from_level(level));
    if !is_fixed {
        // It fails only if there is no log any more.
        log::on_change(move |level| drop(handle.reload(LevelFilter::from_level(level))));
    }
    let lines = fmt::layer()
        .event_format(Lines::new(format))
        .with_writer(Arc::new(file))
        .with_ansi(false)
        .log_internal_errors(false);
    let spans = (format == LogFormat::Json).then_some(Spans);
    registry().with(filter).with(spans).with(lines).init();
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

#[cfg(test)]
mod tests {
    use std::io::Read;

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn a_pod_changes_the_level_while_the_log_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        let mut reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        to_fifo(&path, LogFormat::Text, Level::INFO, false);
        tracing::debug!("before");
        log::set_level(Level::DEBUG);
        tracing::debug!(pod = "demo", "after");
        log::set_level(Level::ERROR);
        tracing::warn!("too late");
        let mut text = vec![0; 64 << 10];
        let length = reader.read(&mut text).unwrap();
        let text = String::from_utf8_lossy(&text[..length]);
        // Other tests of this process log too.
        let ours: Vec<_> = text.lines().filter(|line| !line.is_empty()).collect();
        assert!(ours.iter().any(|line| line.trim() == "DEBUG after pod=\"demo\""), "{text}");
        assert!(!text.contains("before") && !text.contains("too late"), "{text}");
    }
}
