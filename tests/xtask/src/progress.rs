//! What a person sees while something takes long: the step, that it is still going on, how far it is, and how long it
//! took.
//!
//! Where stderr is a terminal that can move its cursor, bars at the end of the output show that something goes on. They
//! are taken away while anything else is printed. Elsewhere a line every 15 s says it.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Pause between two signs of life of a long step.
const TICK: Duration = Duration::from_secs(15);

/// The same for a bar.
const BAR_TICK: Duration = Duration::from_millis(200);

/// Pause between two looks at a log that grows.
const LOG_TICK: Duration = Duration::from_millis(500);

/// Lines of a log shown when a logged command fails.
const SHOWN_LINES: usize = 20;

/// What a bar looks like, with and without a known end.
const COUNTED: &str = "    [{bar:20}] {pos} of {len}  {elapsed_precise}  {prefix}  {wide_msg}";
const UNCOUNTED: &str = "    {spinner} {elapsed_precise}  {prefix}  {wide_msg}";

/// All bars of this process. They are hidden unless stderr is a terminal, and if TERM is unset or `dumb`.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Says that something goes on, and how far it is, if there is a terminal. It is gone when this is dropped.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    pub(crate) fn new(what: &str) -> Bar {
        let bar =
            BARS.add(ProgressBar::no_length().with_style(style(UNCOUNTED)).with_prefix(what.to_owned()));
        if !bar.is_hidden() {
            bar.enable_steady_tick(BAR_TICK);
        }
        Bar(bar)
    }

    /// Shows how much is done, of how much if that is known, and a note.
    pub(crate) fn show(&self, done: u64, of: Option<u64>, note: String) {
        if self.0.length() != of {
            self.0.set_style(style(if of.is_some() { COUNTED } else { UNCOUNTED }));
            of.map_or_else(|| self.0.unset_length(), |of| self.0.set_length(of));
        }
        self.0.set_message(note);
        self.0.set_position(done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        // A panic while something was printed has left the bars as they are.
        if !std::thread::panicking() {
            self.0.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner());
    style.progress_chars("=> ").tick_chars("|/-\\ ")
}

/// Prints something while no bar is on the terminal. It must end with a line's end.
pub(crate) fn apart<T>(print: impl FnOnce() -> T) -> T {
    BARS.suspend(print)
}

/// Prints a line on stderr.
pub(crate) fn say(line: &str) {
    apart(|| eprintln!("{line}"));
}

/// Prints what a program writes to one of its streams. If there is a terminal, it prints whole lines: a bar that is
/// drawn after the beginning of a line would take it away.
#[derive(Default)]
pub(crate) struct Lines {
    begun: Vec<u8>,
}

impl Lines {
    pub(crate) fn print(&mut self, data: &[u8], to: &mut impl Write) -> io::Result<()> {
        if BARS.is_hidden() {
            to.write_all(data)?;
            return to.flush();
        }
        let Some(lines) = self.complete(data) else { return Ok(()) };
        apart(|| to.write_all(&lines).and_then(|()| to.flush()))
    }

    /// Adds data. Returns the lines that are complete, if there are any.
    fn complete(&mut self, data: &[u8]) -> Option<Vec<u8>> {
        self.begun.extend_from_slice(data);
        let end = self.begun.iter().rposition(|byte| *byte == b'\n')? + 1;
        Some(self.begun.drain(..end).collect())
    }

    /// Prints the line that has no end, if there is one, and ends it.
    pub(crate) fn finish(mut self, to: &mut impl Write) -> io::Result<()> {
        if self.begun.is_empty() {
            return Ok(());
        }
        self.print(b"\n", to)
    }
}

/// Runs `body`, and says on stderr what is done, that it still is, and at the end how long it took.
pub(crate) fn step<T>(what: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    counted_step(what, |_| body())
}

/// The same. `body` gets the bar, to show how far it is.
pub(crate) fn counted_step<T>(what: &str, body: impl FnOnce(&Bar) -> Result<T>) -> Result<T> {
    let start = Instant::now();
    say(&format!("==> {what}"));
    let bar = Bar::new(what);
    let (done, is_done) = mpsc::channel::<()>();
    let result = std::thread::scope(|scope| {
        if BARS.is_hidden() {
            scope.spawn(move || {
                while is_done.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                    eprintln!("    {what}: {:.0} s", start.elapsed().as_secs_f64());
                }
            });
        }
        let result = body(&bar);
        drop(done);
        result
    });
    drop(bar);
    let verdict = if result.is_ok() { "done" } else { "failed" };
    say(&format!("    {what}: {verdict}, {:.1} s", start.elapsed().as_secs_f64()));
    result
}

/// Runs a command that says something on stderr now and then, within a step.
pub(crate) fn run_said(command: &mut Command) -> io::Result<ExitStatus> {
    if BARS.is_hidden() {
        return command.status();
    }
    let mut child = command.stderr(Stdio::piped()).spawn()?;
    for line in child.stderr.take().into_iter().flat_map(|stderr| BufReader::new(stderr).split(b'\n')) {
        let line = [line?, b"\n".into()].concat();
        Lines::default().print(&line, &mut io::stderr())?;
    }
    child.wait()
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

/// The same. The bar shows how many lines are in the log, and the last one. If such a command has succeeded before, the
/// bar shows of how many lines too: as many as there were then, which the file `record` says.
pub(crate) fn run_counted(command: &mut Command, log: &Path, record: &Path, bar: &Bar) -> Result<()> {
    let before = fs::read_to_string(record).ok().and_then(|text| text.parse().ok());
    // What is in it is of another run.
    File::create(log).with_context(|| format!("cannot write the log {}", log.display()))?;
    let (done, is_done) = mpsc::channel::<()>();
    let lines = std::thread::scope(|scope| {
        let watch = scope.spawn(move || {
            loop {
                let is_over = is_done.recv_timeout(LOG_TICK) != Err(RecvTimeoutError::Timeout);
                let (lines, last) = growth(&fs::read(log).unwrap_or_default());
                bar.show(lines, before.filter(|most| lines <= *most), last);
                if is_over {
                    return lines;
                }
            }
        });
        let result = run_logged(command, log);
        drop(done);
        result.map(|()| watch.join().unwrap_or_default())
    })?;
    fs::write(record, lines.to_string()).with_context(|| format!("cannot write {}", record.display()))
}

/// The number of lines of a log, and the last one that is complete, as it can be shown.
fn growth(log: &[u8]) -> (u64, String) {
    let (mut lines, mut last) = (0, &[][..]);
    for line in log.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
        (lines, last) = (lines + 1, line);
    }
    let words: Vec<_> = String::from_utf8_lossy(last).split_whitespace().map(str::to_owned).collect();
    (lines, words.join(" ").replace(char::is_control, ""))
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

    #[test]
    fn only_whole_lines_are_printed_while_there_are_bars() {
        let mut lines = Lines::default();
        assert_eq!(lines.complete(b"one ... "), None);
        assert_eq!(lines.complete(b"ok\ntwo"), Some(b"one ... ok\n".into()));
        assert_eq!(lines.complete(b"\n"), Some(b"two\n".into()));
        assert_eq!(lines.begun, b"");
    }

    #[test]
    fn a_log_grows_by_lines() {
        assert_eq!(growth(b""), (0, String::new()));
        assert_eq!(growth(b"  CC      fs/a.o\n  LD"), (1, "CC fs/a.o".into()));
        assert_eq!(growth(b"a\n\xff\x1b[2Jb\n"), (2, "\u{fffd}[2Jb".into()));
    }

    #[test]
    fn the_lines_of_a_log_are_recorded_if_its_command_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let (log, record) = (dir.path().join("log"), dir.path().join("record"));
        let run =
            |script| run_counted(Command::new("sh").args(["-c", script]), &log, &record, &Bar::new("x"));
        run("seq 7").unwrap();
        assert_eq!(fs::read_to_string(&record).unwrap(), "7");
        assert!(run("seq 3; exit 1").unwrap_err().to_string().ends_with("1\n2\n3"));
        assert_eq!(fs::read_to_string(&record).unwrap(), "7");
    }
}
