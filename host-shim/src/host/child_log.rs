//! Logs the standard error of programs that the shim starts. Its last line may be the reason of a failure.

use std::time::Duration;

use tokio::{
    io::{AsyncRead, AsyncReadExt},
    time::Instant,
};

use crate::types::{
    log_limit::{LogLimit, Logged},
    pace::Pace,
    text::{LINE, one_line},
};

/// How many lines of one program are logged in one [`WINDOW`]. A VMM that its guest has taken over must not fill the
/// host's disk.
const LINES: u32 = 100;
const WINDOW: Duration = Duration::from_secs(600);

/// How many times something is read in each [`READ_TURN`], and how much each time. Otherwise a VMM that its guest has
/// taken over would make this process, which is not in the pod's cgroup, as busy as it likes, by many lines or by
/// single bytes. A program that says more waits at its full pipe.
const READS: u32 = 16;
const READ_BYTES: usize = 1024;
const READ_TURN: Duration = Duration::from_millis(100);

/// Logs the lines of a program's standard error, each cut to [`LINE`] bytes. Returns the last line.
pub(crate) async fn read_lines(who: String, stderr: Option<impl AsyncRead + Unpin>) -> String {
    read_own_lines(who, stderr, |_| true).await
}

/// Does the same with a program that also passes on what others say. Returns the last line that `is_own`.
pub(crate) async fn read_own_lines(
    who: String,
    stderr: Option<impl AsyncRead + Unpin>,
    mut is_own: impl FnMut(&str) -> bool,
) -> String {
    let Some(mut stderr) = stderr else { return String::new() };
    let (mut line, mut last) = (Vec::new(), String::new());
    let mut limit = LogLimit::new(LINES, WINDOW);
    let mut buffer = [0; READ_BYTES];
    let mut pace = Pace::new(READS, READ_TURN);
    loop {
        pace.turn().await;
        let read = stderr.read(&mut buffer).await.unwrap_or(0);
        let ended = read == 0;
        let bytes = buffer.get(..read).unwrap_or_default();
        for byte in bytes.iter().chain(ended.then_some(&b'\n')) {
            if *byte == b'\n' {
                let text = one_line(String::from_utf8_lossy(&line).trim());
                if !text.is_empty() {
                    log(&mut limit, &who, &text);
                    if is_own(&text) {
                        last = text;
                    }
                }
                line.clear();
            } else if line.len() < LINE {
                line.push(*byte);
            }
        }
        if ended {
            return last;
        }
    }
}

/// Logs a line, unless there were too many.
fn log(limit: &mut LogLimit, who: &str, line: &str) {
    let logged = limit.count(Instant::now());
    if logged == Logged::No {
        return;
    }
    tracing::warn!(program = who, line, "a program on the host says");
    if logged == Logged::Last {
        let seconds = limit.window().as_secs();
        tracing::warn!(program = who, seconds, "too many lines: for a time none is logged");
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn long_lines_are_cut() {
        let who = || "child".to_owned();
        let text = [vec![b'x'; 3 * LINE], b"\nlast".to_vec()].concat();
        assert_eq!(read_lines(who(), Some(text.as_slice())).await, "last");
        assert_eq!(read_lines(who(), Some(vec![b'y'; 3 * LINE].as_slice())).await.len(), LINE);
    }

    #[tokio::test]
    async fn what_a_program_passes_on_is_not_its_last_line() {
        let text = &b"first\nguest: one\nown\nguest: two\x1b[2J\n"[..];
        let mut passed_on = Vec::new();
        let is_own = |line: &str| {
            let of_guest = line.strip_prefix("guest: ");
            passed_on.extend(of_guest.map(str::to_owned));
            of_guest.is_none()
        };
        assert_eq!(read_own_lines("child".into(), Some(text), is_own).await, "own");
        assert_eq!(passed_on, ["one", "two [2J"]);
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_much_waits() {
        let begun = Instant::now();
        assert_eq!(read_lines("child".into(), Some(&b"short\n"[..])).await, "short");
        assert_eq!(begun.elapsed(), Duration::ZERO);
        // As much as a pipe gives, and single bytes.
        read_lines("child".into(), Some(b"\n".repeat(100 * READS as usize * READ_BYTES).as_slice())).await;
        assert!((READ_TURN * 99..READ_TURN * 110).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        let begun = Instant::now();
        let (mut child, shim) = duplex(1);
        let talks = async {
            for _ in 0..100 * READS {
                child.write_all(b"x").await.unwrap();
            }
            drop(child);
        };
        let (last, ()) = tokio::join!(read_lines("child".into(), Some(shim)), talks);
        assert_eq!(last.len(), 100 * READS as usize);
        assert!((READ_TURN * 99..READ_TURN * 110).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }
}
