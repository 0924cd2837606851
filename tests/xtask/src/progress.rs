//! What a person sees while something takes long: the step, that it is still going on, and how long it took.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Pause between two signs of life of a long step.
const TICK: Duration = Duration::from_secs(15);

/// Lines of a log shown when a logged command fails.
const SHOWN_LINES: usize = 20;

/// Runs `body`, and says on stderr what is done, every 15 s that it still is, and at the end how long it took.
pub(crate) fn step<T>(what: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    eprintln!("==> {what}");
    let (done, is_done) = mpsc::channel::<()>();
    let result = std::thread::scope(|scope| {
        scope.spawn(move || {
            while is_done.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                eprintln!("    {what}: {:.0} s", start.elapsed().as_secs_f64());
            }
        });
        let result = body();
        drop(done);
        result
    });
    let verdict = if result.is_ok() { "done" } else { "failed" };
    eprintln!("    {what}: {verdict}, {:.1} s", start.elapsed().as_secs_f64());
    result
}

/// Runs `command` to its end with its output in the file `log`. If it fails, the error shows the end of the log.
pub(crate) fn run_logged(command: &mut Command, log: &Path) -> Result<()> {
    let context = || format!("cannot write the log {}", log.display());
    let output = File::create(log).with_context(context)?;
    let status = command
        .stdin(Stdio::null())
        .stdout(output.try_clone().with_context(context)?)
        .stderr(output)
        .status()
        .with_context(|| format!("cannot run {command:?}"))?;
    if status.success() {
        return Ok(());
    }
    bail!("{command:?}: {status}; the end of {}:\n{}", log.display(), tail(log));
}

/// The last lines of a log.
pub(crate) fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_command_shows_the_end_of_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("x.log");
        let error =
            run_logged(Command::new("sh").args(["-c", "seq 100; echo why >&2; exit 3"]), &log).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("exit status: 3") && text.ends_with("100\nwhy"), "{text}");
        assert!(!text.contains("\n50\n"), "{text}");
    }
}
