//! Logs the standard error of programs that the shim starts. Its last line may be the reason of a failure.

use std::time::Duration;

use crate::types::text::{LINE, one_line};

use tokio::{
    io::{AsyncRead, AsyncReadExt},
    time::Instant,
};

/// How many lines of one program are logged in one [`WINDOW`]. A VMM that its guest has taken over must not fill the
/// host's disk.
const LINES: usize = 100;
const WINDOW: Duration = Duration::from_secs(600);

/// Logs the lines of a program's standard error, each cut to [`LINE`] bytes. Returns the last line.
pub(crate) async fn read_lines(who: String, stderr: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut stderr) = stderr else { return String::new() };
    let (mut line, mut last) = (Vec::new(), String::new());
    let mut budget = Budget { since: Instant::now(), said: 0 };
    let mut buffer = [0; 1024];
    loop {
        let read = stderr.read(&mut buffer).await.unwrap_or(0);
        let ended = read == 0;
        let bytes = buffer.get(..read).unwrap_or_default();
        for byte in bytes.iter().chain(ended.then_some(&b'\n')) {
            if *byte == b'\n' {
                let text = one_line(String::from_utf8_lossy(&line).trim());
                if !text.is_empty() {
                    budget.say(Instant::now(), &who, &text);
                    last = text;
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

/// How many lines of one program were logged in this window.
struct Budget {
    since: Instant,
    said: usize,
}

impl Budget {
    /// Logs a line, unless there were too many in this window. Returns whether it did.
    fn say(&mut self, now: Instant, who: &str, line: &str) -> bool {
        if now.duration_since(self.since) >= WINDOW {
            *self = Self { since: now, said: 0 };
        }
        let is_said = self.said < LINES;
        if is_said {
            tracing::warn!(program = who, line, "a program on the host says");
            self.said += 1;
            if self.said == LINES {
                tracing::warn!(
                    program = who,
                    seconds = WINDOW.as_secs(),
                    "too many lines: for a time none is logged"
                );
            }
        }
        is_said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_logged_in_part() {
        let since = Instant::now();
        let mut budget = Budget { since, said: 0 };
        assert_eq!((0..1000).filter(|_| budget.say(since, "vmm", "flood")).count(), LINES);
        assert!(!budget.say(since + WINDOW - Duration::from_nanos(1), "vmm", "flood"));
        assert!(budget.say(since + WINDOW, "vmm", "later"));
    }

    #[tokio::test]
    async fn long_lines_are_cut() {
        let who = || "child".to_owned();
        let text = [vec![b'x'; 3 * LINE], b"\nlast".to_vec()].concat();
        assert_eq!(read_lines(who(), Some(text.as_slice())).await, "last");
        assert_eq!(read_lines(who(), Some(vec![b'y'; 3 * LINE].as_slice())).await.len(), LINE);
    }
}
