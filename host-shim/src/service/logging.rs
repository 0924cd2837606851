//! The shim's log: the `log` FIFO of the bundle, which containerd reads and copies into its own log.

use std::{
    fs::OpenOptions,
    io,
    os::unix::{fs::OpenOptionsExt, net::UnixDatagram},
    path::Path,
    process,
    sync::Arc,
};

use nix::libc;
use tracing::{Level, level_filters::LevelFilter};
use tracing_subscriber::{fmt, layer::SubscriberExt, registry, reload, util::SubscriberInitExt};

use crate::{
    host::placeholder_process::PROGRAM,
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

/// Logs to stderr while somebody reads it, and then to the host's syslog: systemd's journal shows it in the log of the
/// unit in whose cgroup this process is, which is containerd's.
pub(crate) fn to_stderr_or_syslog() {
    tracing_subscriber::fmt()
        .with_ansi(false)
        .event_format(Lines::new(LogFormat::Text))
        .with_writer(|| StderrOrSyslog)
        .with_max_level(Level::WARN)
        .init();
}

/// Each write is one line.
struct StderrOrSyslog;

impl io::Write for StderrOrSyslog {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if io::stderr().write_all(line).is_err() {
            // If there is no syslog either, the line is lost.
            drop(to_syslog(line, Path::new(SYSLOG)));
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The socket of the host's syslog (syslog(3)).
const SYSLOG: &str = "/dev/log";
/// A warning of a daemon (RFC 5424, 6.2.1).
const PRIORITY: u8 = 3 * 8 + 4;

/// Never waits for the reader.
fn to_syslog(line: &[u8], socket: &Path) -> io::Result<usize> {
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    let mut message = format!("<{PRIORITY}>{PROGRAM}[{}]: ", process::id()).into_bytes();
    message.extend(line.trim_ascii_end());
    sender.send_to(&message, socket)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn a_line_for_syslog_names_this_program() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert!(to_syslog(b"nobody listens\n", &path).is_err());
        let syslog = UnixDatagram::bind(&path).unwrap();
        to_syslog(b" WARN pod{id=\"demo\"}: done\n", &path).unwrap();
        let mut text = [0; 100];
        let length = syslog.recv(&mut text).unwrap();
        let expected =
            format!("<28>containerd-shim-bulkhead-v2[{}]:  WARN pod{{id=\"demo\"}}: done", process::id());
        assert_eq!(String::from_utf8_lossy(&text[..length]), expected);
    }

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
