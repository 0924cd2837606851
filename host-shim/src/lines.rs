//! What children of the shim say: lines for the log, the last of which may be the reason of a failure.

use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes kept of one line.
const LINE: usize = 4096;

/// Logs what a child says on its standard error, each line cut to [`LINE`] bytes; answers the last one.
pub(crate) async fn read_lines(who: String, stderr: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut stderr) = stderr else { return String::new() };
    let (mut line, mut last) = (Vec::new(), String::new());
    let mut buffer = [0; 1024];
    loop {
        let read = stderr.read(&mut buffer).await.unwrap_or(0);
        let ended = read == 0;
        let bytes = buffer.get(..read).unwrap_or_default();
        for byte in bytes.iter().chain(ended.then_some(&b'\n')) {
            if *byte == b'\n' {
                let text = String::from_utf8_lossy(&line).trim().to_owned();
                if !text.is_empty() {
                    tracing::warn!("{who}: {text}");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn long_lines_are_cut() {
        let who = || "child".to_owned();
        let text = [vec![b'x'; 3 * LINE], b"\nlast".to_vec()].concat();
        assert_eq!(read_lines(who(), Some(text.as_slice())).await, "last");
        assert_eq!(read_lines(who(), Some(vec![b'y'; 3 * LINE].as_slice())).await.len(), LINE);
    }
}
