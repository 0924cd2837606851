//! Other programs, which may hang or say too much.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::process::CommandExt,
    process::{ChildStdout, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// How long a program may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// The most that is read of its output.
const MOST: u64 = 16 << 20;

/// The longest line that is read in one piece.
const LONGEST_LINE: u64 = 64 << 10;

/// How long after its limit a program that was killed may take to end. One that hangs in the host's kernel goes on.
const KILLED: Duration = Duration::from_secs(1);

/// How often a program that has closed its output is asked whether it has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// Runs a program, and returns its standard output. It fails if the program does not exist, fails, or takes too long.
pub(crate) fn output(program: &str, arguments: &[&str]) -> io::Result<String> {
    output_within(program, arguments, LIMIT)
}

fn output_within(program: &str, arguments: &[&str], limit: Duration) -> io::Result<String> {
    let mut command = Command::new(program);
    command.args(arguments).stderr(Stdio::null());
    answer(command, &[], limit)
}

/// Runs a command, which reads `input`, and returns its standard output. It fails as [`output`] does.
pub(crate) fn answer(mut command: Command, input: &[u8], limit: Duration) -> io::Result<String> {
    command.stdin(stdin_for(input));
    answer_as_it_is(command, input, limit, |_| ())
}

/// The same for a command that this one ends in its own way. So the keys of a terminal do not end it: it has a process
/// group of its own. Calls `started` with its pid when it has been started. That is not yet another process's then.
pub(crate) fn answer_and_tell(
    mut command: Command,
    input: &[u8],
    limit: Duration,
    started: impl FnOnce(u32) + Send + 'static,
) -> io::Result<String> {
    command.stdin(stdin_for(input)).process_group(0);
    answer_as_it_is(command, input, limit, started)
}

/// [`answer_and_tell`] for a command that has this file as its standard input.
pub(crate) fn answer_on(
    mut command: Command,
    stdin: File,
    limit: Duration,
    started: impl FnOnce(u32) + Send + 'static,
) -> io::Result<String> {
    command.stdin(stdin).process_group(0);
    answer_as_it_is(command, &[], limit, started)
}

fn stdin_for(input: &[u8]) -> Stdio {
    if input.is_empty() { Stdio::null() } else { Stdio::piped() }
}

/// [`answer`] for a command whose standard input is set already.
fn answer_as_it_is(
    command: Command,
    input: &[u8],
    limit: Duration,
    started: impl FnOnce(u32) + Send + 'static,
) -> io::Result<String> {
    let text = read_by(command, input, limit, started, |stdout| {
        let mut text = Vec::new();
        stdout.take(MOST).read_to_end(&mut text).map(|_| text)
    })?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Runs a program, and returns the last lines of its standard output that are wanted. It fails as [`output`] does.
pub(crate) fn last_lines(
    program: &str,
    arguments: &[&str],
    most: usize,
    is_wanted: impl Fn(&str) -> bool + Send + 'static,
) -> io::Result<Vec<String>> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
    read_by(command, &[], LIMIT, |_| (), move |stdout| last_of(BufReader::new(stdout), most, is_wanted))
}

/// The last lines of a text that are wanted. Only the beginning of a long line is looked at and taken: what comes later
/// in it must not be taken for a line.
pub(crate) fn last_of(
    mut text: impl BufRead,
    most: usize,
    is_wanted: impl Fn(&str) -> bool,
) -> io::Result<Vec<String>> {
    let mut lines = VecDeque::new();
    let mut is_new = true;
    loop {
        let mut line = Vec::new();
        if text.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(lines.into());
        }
        let is_begun = std::mem::replace(&mut is_new, line.ends_with(b"\n"));
        let line = String::from_utf8_lossy(&line);
        if is_begun && is_wanted(&line) {
            lines.push_back(line.trim_end().to_owned());
        }
        if lines.len() > most {
            lines.pop_front();
        }
    }
}

/// Does something in a thread. None: it has not ended within the limit, and its thread is left alone. Nothing ends a
/// process or a thread that waits in the host's kernel, for example for a disk.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new().spawn(move || {
        // Nobody receives it after the limit.
        _ = sender.send(work());
    })?;
    Ok(receiver.recv_timeout(limit).ok())
}

/// Runs a command, which reads `input` if its standard input is a pipe, and returns what `read` makes of its standard
/// output. Calls `started` when the program has been started.
fn read_by<T: Send + 'static>(
    command: Command,
    input: &[u8],
    limit: Duration,
    started: impl FnOnce(u32) + Send + 'static,
    read: impl FnOnce(ChildStdout) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let late = late(&command, limit);
    let input = input.to_vec();
    // The start of a program whose file is on a disk that hangs does not end either.
    let ended = within(limit + KILLED, move || run(command, input, limit, started, read))?;
    ended.unwrap_or(Err(late))
}

fn late(command: &Command, limit: Duration) -> io::Error {
    let program = command.get_program().to_string_lossy();
    io::Error::new(io::ErrorKind::TimedOut, format!("{program} has not ended within {limit:?}"))
}

/// [`read_by`] for a program that ends when it is killed.
fn run<T: Send + 'static>(
    mut command: Command,
    input: Vec<u8>,
    limit: Duration,
    started: impl FnOnce(u32),
    read: impl FnOnce(ChildStdout) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let begun = Instant::now();
    command.stdout(Stdio::piped());
    let mut child = command.spawn()?;
    started(child.id());
    let stdin = child.stdin.take();
    let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let (sender, receiver) = mpsc::channel();
    // The thread ends with the output, or with this command.
    thread::spawn(move || {
        // A program that does not read its input says why by its status.
        _ = stdin.map(|mut stdin| stdin.write_all(&input));
        // Nobody receives it after the limit.
        let _ = sender.send(read(stdout));
    });
    let text = receiver.recv_timeout(limit).map_err(|_| late(&command, limit));
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if text.is_err() || begun.elapsed() > limit => break None,
            None => thread::sleep(PAUSE),
        }
    };
    let Some(status) = status else {
        child.kill()?;
        child.wait()?;
        return Err(late(&command, limit));
    };
    if !status.success() {
        return Err(io::Error::other(format!("{}: {status}", command.get_program().to_string_lossy())));
    }
    text?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_has_an_output_a_failure_or_a_limit() {
        assert_eq!(output("echo", &["hello"]).unwrap(), "hello\n");
        assert_eq!(answer(Command::new("cat"), b"input", LIMIT).unwrap(), "input");
        let stdin = File::open("/proc/self/comm").unwrap();
        assert!(answer_on(Command::new("cat"), stdin, LIMIT, |_| ()).unwrap().ends_with('\n'));
        let lines =
            |most| last_lines("printf", &["a1\\nb\\na2\\na3"], most, |line| line.starts_with('a')).unwrap();
        assert_eq!(
            (lines(9), lines(2)),
            (vec!["a1".into(), "a2".into(), "a3".into()], vec!["a2".into(), "a3".into()])
        );
        let long = format!("a{}a\na4\n", "b".repeat(LONGEST_LINE as usize));
        let lines = last_of(long.as_bytes(), 9, |line| line.starts_with('a')).unwrap();
        assert_eq!((lines.len(), lines[0].len(), lines[1].as_str()), (2, LONGEST_LINE as usize, "a4"));
        assert!(output("false", &[]).unwrap_err().to_string().starts_with("false: exit status: 1"));
        assert_eq!(output("/nonexistent/program", &[]).unwrap_err().kind(), io::ErrorKind::NotFound);
        let begun = Instant::now();
        let late = output_within("sleep", &["60"], Duration::from_millis(50)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let deaf = output_within("sh", &["-c", "exec >&-; sleep 60"], Duration::from_millis(50)).unwrap_err();
        assert_eq!(deaf.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn what_hangs_in_the_kernel_is_left_alone() {
        assert_eq!(within(LIMIT, || 7).unwrap(), Some(7));
        let (never, ends) = mpsc::channel::<()>();
        let begun = Instant::now();
        assert_eq!(within(Duration::from_millis(20), move || ends.recv()).unwrap(), None);
        assert!(begun.elapsed() < Duration::from_secs(30));
        drop(never);
    }

    /// A terminal sends the signals of its keys to a process group.
    #[test]
    fn a_command_that_is_ended_in_order_has_a_process_group_of_its_own() {
        let command = || {
            let mut command = Command::new("sh");
            command.args(["-c", "read -r pid name state parent group rest < /proc/$$/stat; echo $group $$"]);
            command
        };
        let is_own = |answer: io::Result<String>| {
            let answer = answer.unwrap();
            let (group, pid) = answer.trim().split_once(' ').unwrap();
            group == pid
        };
        assert!(is_own(answer_and_tell(command(), &[], LIMIT, |_| ())));
        assert!(is_own(answer_on(command(), File::open("/dev/null").unwrap(), LIMIT, |_| ())));
        // The keys end this command, and with it what it only asks.
        assert!(!is_own(answer(command(), &[], LIMIT)));
    }
}
