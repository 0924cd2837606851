//! One command of the user's, run under a deadline, and what is expected of how it ended.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::pty::openpty;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::termios::{OptionalActions, OutputModes, Winsize, tcgetattr, tcsetattr, tcsetwinsize};

/// How much of a stream an error shows.
const SHOWN: usize = 2000;
/// A command that was not given another deadline.
const DEFAULT_LIMIT: Duration = Duration::from_secs(120);

/// A command that has not been started.
pub(crate) struct Cmd {
    inner: Command,
    input: Option<Vec<u8>>,
    limit: Duration,
}

impl Cmd {
    /// A command without arguments, with an empty standard input.
    pub(crate) fn new(program: &str) -> Self {
        Self { inner: Command::new(program), input: None, limit: DEFAULT_LIMIT }
    }

    /// Adds arguments.
    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.inner.args(args);
        self
    }

    /// What the command reads from its standard input, which then ends.
    pub(crate) fn input(mut self, bytes: Vec<u8>) -> Self {
        self.input = Some(bytes);
        self
    }

    /// Deadline from the start to the end.
    pub(crate) fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs it to its end.
    pub(crate) fn run(mut self) -> Result<Finished> {
        let input = self.input.take();
        let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
        let mut running = self.spawn(stdin, Stdio::piped())?;
        if let Some(bytes) = input
            && let Some(mut pipe) = running.child.stdin.take()
        {
            // A thread, since the command may not read before its output is read. It ends when the command
            // ends (EPIPE), and a command that does not read all of its input is no error of the test's.
            thread::spawn(move || {
                let _ = pipe.write_all(&bytes);
            });
        }
        running.finish()
    }

    /// Starts it with a standard input that stays open until [`Running::close_input`].
    pub(crate) fn start(self) -> Result<Running> {
        self.spawn(Stdio::piped(), Stdio::piped())
    }

    /// Starts it in a terminal of its own, as a user does: that is its standard input and output, and sends it the
    /// signals that a terminal sends.
    pub(crate) fn start_in_terminal(mut self, size: Size) -> Result<Running> {
        let pty = openpty(None, None).context("cannot open a terminal")?;
        let terminal = File::from(pty.master);
        set_size(&terminal, size)?;
        let slave: OwnedFd = pty.slave;
        keep_line_ends(&slave)?;
        let stdin = slave.try_clone().context("cannot duplicate the terminal")?;
        // Whoever was started in the background ignores what a terminal's keys send.
        let mut inner = Command::new("env");
        inner
            .args(["--default-signal=INT,QUIT", "setsid", "--ctty"])
            .arg(self.inner.get_program())
            .args(self.inner.get_args());
        self.inner = inner;
        let mut running = self.spawn(Stdio::from(stdin), Stdio::from(slave))?;
        let shown = terminal.try_clone().context("cannot duplicate the terminal")?;
        // A terminal that nobody has open any more answers with an error, which ends this as an end of file does.
        running.stdout = Collected::from_reader(Some(shown));
        running.terminal = Some(terminal);
        Ok(running)
    }

    fn spawn(mut self, stdin: Stdio, stdout: Stdio) -> Result<Running> {
        let shown = shown(&self.inner);
        let started = Instant::now();
        let mut child = self
            .inner
            .stdin(stdin)
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start: {shown}"))?;
        let stdout = Collected::from_reader(child.stdout.take());
        let stderr = Collected::from_reader(child.stderr.take());
        Ok(Running { child, terminal: None, shown, started, limit: self.limit, stdout, stderr })
    }
}

/// Has a terminal show line ends as they come: those of a terminal in a container have their carriage return, and
/// ctr leaves it to its own terminal to add one.
fn keep_line_ends(terminal: &OwnedFd) -> Result<()> {
    let mut modes = tcgetattr(terminal).context("cannot read the modes of a terminal")?;
    modes.output_modes.remove(OutputModes::ONLCR);
    tcsetattr(terminal, OptionalActions::Now, &modes).context("cannot set the modes of a terminal")
}

/// Columns and rows of a terminal.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) width: u16,
    pub(crate) height: u16,
}

fn set_size(terminal: &File, Size { width, height }: Size) -> Result<()> {
    tcsetwinsize(terminal, Winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 })
        .context("cannot set the size of a terminal")
}

/// The command line as a person would type it.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| {
            let word = word.to_string_lossy();
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
            if !word.is_empty() && word.chars().all(plain) { word.into_owned() } else { format!("'{word}'") }
        })
        .collect::<Vec<_>>()
        .join(" ")
}

/// What a stream has brought so far, filled by a thread.
struct Collected {
    state: Mutex<Stream>,
    changed: Condvar,
}

struct Stream {
    bytes: Vec<u8>,
    ended: bool,
}

impl Collected {
    fn from_reader(reader: Option<impl Read + Send + 'static>) -> Arc<Self> {
        let state = Mutex::new(Stream { bytes: Vec::new(), ended: reader.is_none() });
        let collected = Arc::new(Self { state, changed: Condvar::new() });
        if let Some(mut reader) = reader {
            let sink = Arc::clone(&collected);
            thread::spawn(move || {
                let mut chunk = vec![0; 64 * 1024];
                loop {
                    let got = reader.read(&mut chunk).unwrap_or(0);
                    let mut stream = sink.lock();
                    stream.bytes.extend_from_slice(chunk.get(..got).unwrap_or_default());
                    stream.ended = got == 0;
                    sink.changed.notify_all();
                    if got == 0 {
                        return;
                    }
                }
            });
        }
        collected
    }

    fn lock(&self) -> MutexGuard<'_, Stream> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the stream satisfies `enough` or has ended; false when the deadline came first.
    fn wait_until(&self, deadline: Instant, enough: impl Fn(&[u8]) -> bool) -> bool {
        let mut stream = self.lock();
        while !stream.ended && !enough(&stream.bytes) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(stream, left);
            stream = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn so_far(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }
}

/// A command that runs. Dropping it kills it.
pub(crate) struct Running {
    child: Child,
    // Its other end is the command's.
    terminal: Option<File>,
    shown: String,
    started: Instant,
    limit: Duration,
    stdout: Arc<Collected>,
    stderr: Arc<Collected>,
}

impl Running {
    /// Writes to the command's standard input, or types in its terminal.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let input: &mut dyn Write = match (&mut self.terminal, &mut self.child.stdin) {
            (Some(terminal), _) => terminal,
            (None, Some(pipe)) => pipe,
            (None, None) => bail!("standard input is closed"),
        };
        input
            .write_all(bytes)
            .and_then(|()| input.flush())
            .with_context(|| format!("cannot write to the standard input of: {}", self.shown))
    }

    /// Makes the window of its terminal this large.
    pub(crate) fn resize(&self, size: Size) -> Result<()> {
        let terminal = self.terminal.as_ref().ok_or_else(|| anyhow!("no terminal: {}", self.shown))?;
        set_size(terminal, size)
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the command's standard input.
    pub(crate) fn close_input(&mut self) {
        self.child.stdin = None;
    }

    /// Whether the standard output contains `text` after so long at most.
    pub(crate) fn says_within(&self, text: &str, limit: Duration) -> bool {
        self.comes_by(Instant::now() + limit, text)
    }

    fn comes_by(&self, deadline: Instant, text: &str) -> bool {
        let has = |bytes: &[u8]| contains(bytes, text);
        self.stdout.wait_until(deadline, has);
        has(&self.stdout.so_far())
    }

    fn deadline(&self) -> Instant {
        self.started + self.limit
    }

    /// Waits until the standard output contains `text`.
    pub(crate) fn wait_for(&self, text: &str) -> Result<()> {
        if self.comes_by(self.deadline(), text) {
            return Ok(());
        }
        Err(mismatch(
            &format!("{text:?} on standard output within {} s", self.limit.as_secs()),
            "it did not appear",
            &Finished {
                command: self.shown.clone(),
                status: None,
                stdout: self.stdout.so_far(),
                stderr: self.stderr.so_far(),
                took: self.started.elapsed(),
            },
        ))
    }

    /// Waits for the end of the command and of its output.
    pub(crate) fn finish(&mut self) -> Result<Finished> {
        let deadline = self.deadline();
        let Some(status) = self.status_by(deadline)? else {
            let _ = self.child.kill();
            return Err(self.too_late("its end"));
        };
        let took = self.started.elapsed();
        let none = |_: &[u8]| false;
        if !self.stdout.wait_until(deadline, none) || !self.stderr.wait_until(deadline, none) {
            return Err(self.too_late("the end of its output, which something else still holds open"));
        }
        Ok(Finished {
            command: self.shown.clone(),
            status: status.code(),
            stdout: self.stdout.so_far(),
            stderr: self.stderr.so_far(),
            took,
        })
    }

    /// Waits until the command has ended; None when the deadline came first.
    ///
    /// std has no wait with a deadline. Asking again and again would take time from the host's one processor.
    fn status_by(&mut self, deadline: Instant) -> Result<Option<ExitStatus>> {
        let context = || format!("cannot wait for the end of: {}", self.shown);
        let child = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).with_context(context)?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Timespec::try_from(left).unwrap_or_default();
            match poll(&mut [PollFd::new(&child, PollFlags::IN)], Some(&limit)) {
                Ok(0) if left.is_zero() => return Ok(None),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return self.child.try_wait().with_context(context),
                Err(error) => return Err(error).with_context(context),
            }
        }
    }

    fn too_late(&self, what: &str) -> anyhow::Error {
        mismatch(
            &format!("{what} within {} s", self.limit.as_secs()),
            "it still runs",
            &Finished {
                command: self.shown.clone(),
                status: None,
                stdout: self.stdout.so_far(),
                stderr: self.stderr.so_far(),
                took: self.started.elapsed(),
            },
        )
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a command ended.
pub(crate) struct Finished {
    /// The command line.
    pub(crate) command: String,
    /// Exit status; None when a signal ended the command itself.
    pub(crate) status: Option<i32>,
    /// All of its standard output.
    pub(crate) stdout: Vec<u8>,
    /// All of its standard error.
    pub(crate) stderr: Vec<u8>,
    /// From its start to its end.
    pub(crate) took: Duration,
}

impl Finished {
    /// Expects the exit status 0.
    pub(crate) fn succeeds(&self) -> Result<&Self> {
        self.exits(0)
    }

    /// Expects this exit status.
    pub(crate) fn exits(&self, expected: i32) -> Result<&Self> {
        if self.status == Some(expected) {
            return Ok(self);
        }
        let came =
            self.status.map_or("death by a signal".to_owned(), |status| format!("exit status {status}"));
        Err(mismatch(&format!("exit status {expected}"), &came, self))
    }

    /// Expects failure with this text in the message, in capitals or not.
    pub(crate) fn fails_with(&self, text: &str) -> Result<&Self> {
        let message = String::from_utf8_lossy(&self.stderr);
        if self.status == Some(0) || self.status.is_none() {
            return Err(mismatch("a failure", &format!("exit status {:?}", self.status), self));
        }
        if !message.to_lowercase().contains(&text.to_lowercase()) {
            return Err(mismatch(&format!("a message with {text:?}"), &format!("{message:?}"), self));
        }
        Ok(self)
    }

    /// Expects a message of one line.
    pub(crate) fn says_one_line(&self) -> Result<&Self> {
        let message = String::from_utf8_lossy(&self.stderr);
        let lines = message.trim_end().lines().count();
        if lines == 1 {
            return Ok(self);
        }
        Err(mismatch("a message of one line", &format!("{lines} lines: {message:?}"), self))
    }

    /// Expects that it took no longer.
    pub(crate) fn within(&self, limit: Duration) -> Result<&Self> {
        if self.took <= limit {
            return Ok(self);
        }
        let came = format!("{:.1} s", self.took.as_secs_f64());
        Err(mismatch(&format!("an answer within {} s", limit.as_secs()), &came, self))
    }

    /// Expects exactly this standard output.
    pub(crate) fn prints(&self, expected: &str) -> Result<&Self> {
        if self.stdout == expected.as_bytes() {
            return Ok(self);
        }
        Err(mismatch(&format!("{expected:?} on standard output"), &format!("{:?}", self.text()), self))
    }

    /// Expects exactly this standard error.
    pub(crate) fn complains(&self, expected: &str) -> Result<&Self> {
        if self.stderr == expected.as_bytes() {
            return Ok(self);
        }
        let came = tail(&self.stderr);
        Err(mismatch(&format!("{expected:?} on standard error"), &format!("{came:?}"), self))
    }

    /// Expects exactly these bytes on standard output, without showing them: there may be many.
    pub(crate) fn prints_bytes(&self, expected: &[u8]) -> Result<&Self> {
        same_bytes("standard output", &self.stdout, expected)
            .map_err(|e| mismatch(&e.expected, &e.came, self))?;
        Ok(self)
    }

    /// Like [`Finished::prints_bytes`] for the standard error.
    pub(crate) fn complains_bytes(&self, expected: &[u8]) -> Result<&Self> {
        same_bytes("standard error", &self.stderr, expected)
            .map_err(|e| mismatch(&e.expected, &e.came, self))?;
        Ok(self)
    }

    /// Expects that something about the result holds; `expected` says what.
    pub(crate) fn check(&self, expected: &str, holds: bool) -> Result<&Self> {
        if holds {
            return Ok(self);
        }
        Err(mismatch(expected, &format!("{:?}", self.text()), self))
    }

    /// The standard output as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The value of a line `key=value` or `key: value` of the standard output.
    pub(crate) fn value(&self, key: &str) -> Result<String> {
        let text = self.text();
        let value = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix(key))
            .find_map(|rest| rest.strip_prefix('=').or_else(|| rest.strip_prefix(':')));
        let value =
            value.ok_or_else(|| mismatch(&format!("a line {key}=..."), &format!("{text:?}"), self))?;
        Ok(value.trim().to_owned())
    }

    /// Expects the line `key=value` on standard output.
    pub(crate) fn says(&self, key: &str, value: &str) -> Result<&Self> {
        let came = self.value(key)?;
        if came == value {
            return Ok(self);
        }
        Err(mismatch(&format!("{key}={value}"), &format!("{key}={came}"), self))
    }
}

struct Difference {
    expected: String,
    came: String,
}

/// Compares long streams and says where they part, rather than print them.
fn same_bytes(what: &str, came: &[u8], expected: &[u8]) -> Result<(), Difference> {
    if came == expected {
        return Ok(());
    }
    let at = came.iter().zip(expected).take_while(|(a, b)| a == b).count();
    Err(Difference {
        expected: format!("{} bytes on {what}", expected.len()),
        came: format!("{} bytes, of which the first {at} are as expected", came.len()),
    })
}

/// An error that shows what was expected, what came, and of which command.
fn mismatch(expected: &str, came: &str, of: &Finished) -> anyhow::Error {
    let mut text = format!("expected  {expected}\ncame      {came}\ncommand   {}", of.command);
    for (name, bytes) in [("stdout", &of.stdout), ("stderr", &of.stderr)] {
        let shown = tail(bytes);
        if !shown.trim().is_empty() && !came.contains(shown.trim()) {
            text.push_str(&format!("\n{name}    {}", shown.trim_end().replace('\n', "\n          ")));
        }
    }
    text.push_str(&format!("\nafter     {:.1} s", of.took.as_secs_f64()));
    anyhow!(text)
}

fn tail(bytes: &[u8]) -> String {
    let start = bytes.len().saturating_sub(SHOWN);
    String::from_utf8_lossy(bytes.get(start..).unwrap_or_default()).into_owned()
}

/// Whether the text is anywhere in the bytes.
pub(crate) fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len().max(1)).any(|window| window == text.as_bytes())
}

/// Waits until `done` holds, asking every 100 ms; the error names what did not come.
pub(crate) fn wait_until(what: &str, limit: Duration, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    ensure!(!limit.is_zero(), "no time to wait for {what}");
    let deadline = Instant::now() + limit;
    while !done()? {
        if Instant::now() >= deadline {
            bail!("expected  {what} within {} s\ncame      it did not happen", limit.as_secs());
        }
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Cmd {
        Cmd::new("sh").args(["-c", script])
    }

    #[test]
    fn a_command_gets_its_input_and_is_seen_whole() {
        let input = vec![b'x'; 1_000_000];
        let finished = sh("cat; echo err >&2; exit 3").input(input.clone()).run().unwrap();
        finished.exits(3).unwrap().prints_bytes(&input).unwrap().complains("err\n").unwrap();
    }

    #[test]
    fn a_command_that_hangs_is_ended_and_reported() {
        let error = sh("echo begun; exec sleep 1000").limit(Duration::from_millis(300)).run().err().unwrap();
        let text = error.to_string();
        assert!(text.contains("expected  its end within") && text.contains("begun"), "{text}");
    }

    #[test]
    fn output_held_by_another_process_does_not_hang_the_wait() {
        let error = sh("sleep 2 & exit 0").limit(Duration::from_millis(300)).run().err().unwrap();
        assert!(error.to_string().contains("the end of its output"), "{error}");
    }

    #[test]
    fn a_wrong_status_says_what_was_expected_what_came_and_of_what() {
        let error = sh("echo why >&2; exit 4").run().unwrap().exits(7).err().unwrap();
        let text = error.to_string();
        for part in
            ["expected  exit status 7", "came      exit status 4", "sh -c 'echo why >&2; exit 4'", "why"]
        {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }

    #[test]
    fn a_missing_key_and_a_wrong_value_are_told_apart() {
        let finished = sh("echo 'one=1'; echo 'Two:\t2'").run().unwrap();
        finished.says("one", "1").unwrap().says("Two", "2").unwrap();
        assert!(finished.says("one", "2").err().unwrap().to_string().contains("came      one=1"));
        assert!(finished.value("three").err().unwrap().to_string().contains("a line three="));
    }

    #[test]
    fn long_outputs_are_compared_without_being_shown() {
        let error = sh("printf abcd").run().unwrap().prints_bytes(b"abxdef").err().unwrap();
        assert!(error.to_string().contains("4 bytes, of which the first 2 are as expected"), "{error}");
    }

    #[test]
    fn a_command_in_a_terminal_is_typed_to_and_sees_its_size() {
        let script = "trap 'stty size' WINCH; read word; echo got $word; while :; do sleep 0.01; done";
        let mut running = sh(script).start_in_terminal(Size { width: 80, height: 24 }).unwrap();
        running.write(b"it\n").unwrap();
        running.wait_for("it\ngot it\n").unwrap();
        running.resize(Size { width: 100, height: 40 }).unwrap();
        running.wait_for("40 100\n").unwrap();
        running.write(b"\x03").unwrap();
        assert_eq!(running.finish().unwrap().status, None);
    }

    #[test]
    fn a_conversation_waits_for_words() {
        let mut running = sh("read word; echo got $word; cat >/dev/null").start().unwrap();
        running.write(b"it\n").unwrap();
        running.wait_for("got it\n").unwrap();
        running.close_input();
        running.finish().unwrap().succeeds().unwrap();
    }
}
