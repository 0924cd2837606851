//! `bulkhead console`: what the guest of a pod writes to its serial console.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::MetadataExt,
    path::Path,
};

use bulkhead_host_shim::operator::{CONSOLE, one_line};

use crate::{error::CommandError, pod, watch::Watch};

/// How much is read at a time.
const BLOCK: usize = 64 << 10;

/// The most that is shown, bytes. A VMM writes 4 MiB and a last line. A VMM that its guest has taken over may write
/// without end.
const MOST: usize = (4 << 20) + 4096;

/// The longest line that is shown in one piece, bytes. [`one_line`] keeps three times as much: each byte that is no
/// UTF-8 becomes a character of three bytes.
const LONGEST_LINE: usize = 1365;

/// Shows the console from its beginning until the pod ends.
pub(crate) fn console(
    out: &mut impl Write,
    root: &Path,
    wanted: &str,
    namespace: Option<&str>,
) -> Result<(), CommandError> {
    let pods = pod::names(root)?;
    let pod = pod::find(&pods, wanted, namespace)?;
    let path = pod.path.join(CONSOLE);
    let file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(CommandError::NoConsole { pod: pod.id.clone() });
        }
        other => other.map_err(|source| CommandError::Read { path: path.clone(), source })?,
    };
    follow(out, file, &path)
}

fn follow(out: &mut impl Write, mut file: File, path: &Path) -> Result<(), CommandError> {
    let read_error = |source| CommandError::Read { path: path.into(), source };
    let own = file.metadata().map_err(read_error)?;
    let mut watch = Watch::new();
    watch.set(vec![path.to_owned()]);
    let (mut lines, mut block) = (Lines::default(), vec![0; BLOCK]);
    let mut is_last = false;
    let mut left = MOST;
    loop {
        loop {
            match file.read(&mut block) {
                Ok(0) => break,
                Ok(length) => {
                    let shown = length.min(left);
                    lines.show(out, block.get(..shown).unwrap_or_default())?;
                    left -= shown;
                    if shown < length {
                        lines.end(out)?;
                        return Err(CommandError::LongConsole { path: path.into() });
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(error)),
            }
        }
        if is_last {
            return lines.end(out);
        }
        out.flush().map_err(CommandError::Output)?;
        // The pod has ended if its file is gone, or is that of another pod of the same name.
        let there = fs::symlink_metadata(path);
        is_last = !there.is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino()));
        if !is_last {
            watch.wait().map_err(read_error)?;
        }
    }
}

/// What a guest has written, as lines that do nothing to a terminal.
#[derive(Debug, Default)]
struct Lines {
    /// The beginning of a line whose end is to come.
    begun: Vec<u8>,
}

impl Lines {
    fn show(&mut self, out: &mut impl Write, bytes: &[u8]) -> Result<(), CommandError> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            for part in piece.chunks(LONGEST_LINE) {
                if self.begun.len() + part.len() > LONGEST_LINE {
                    self.print(out)?;
                }
                self.begun.extend(part);
            }
            if piece.ends_with(b"\n") {
                self.print(out)?;
            }
        }
        Ok(())
    }

    fn print(&mut self, out: &mut impl Write) -> Result<(), CommandError> {
        let text = String::from_utf8_lossy(&self.begun);
        // The serial console of Linux ends a line by two characters.
        let line = text.trim_end_matches(['\r', '\n']);
        writeln!(out, "{}", one_line(line)).map_err(CommandError::Output)?;
        self.begun.clear();
        Ok(())
    }

    /// The guest has not ended its last line.
    fn end(mut self, out: &mut impl Write) -> Result<(), CommandError> {
        if !self.begun.is_empty() {
            self.print(out)?;
        }
        out.flush().map_err(CommandError::Output)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use super::*;

    /// A reader that hands on what is shown.
    struct Shown(mpsc::Sender<String>);

    impl Write for Shown {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(String::from_utf8(bytes.to_vec()).unwrap()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_console_is_followed_until_the_pod_ends() {
        const LIMIT: Duration = Duration::from_secs(20);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/demo");
        fs::create_dir_all(path.join("console")).unwrap();
        fs::write(path.join(CONSOLE), "boots\r\n\u{1b}[2Jone ").unwrap();
        let (sender, receiver) = mpsc::channel();
        let root = dir.path().to_owned();
        let command = thread::spawn(move || console(&mut Shown(sender), &root, "demo", None));
        let until = |wanted: &str| {
            let mut text = String::new();
            while !text.contains(wanted) {
                text += &receiver.recv_timeout(LIMIT).unwrap();
            }
            text
        };
        assert_eq!(until("\n"), "boots\n");
        let mut file = fs::OpenOptions::new().append(true).open(path.join(CONSOLE)).unwrap();
        file.write_all(b"line\nlast words").unwrap();
        assert_eq!(until("line\n"), " [2Jone line\n");
        // Another pod of the same name has a file of its own.
        fs::rename(path.join(CONSOLE), dir.path().join("old")).unwrap();
        fs::write(path.join(CONSOLE), "of another pod\n").unwrap();
        assert_eq!(until("\n"), "last words\n");
        command.join().unwrap().unwrap();
    }

    #[test]
    fn a_line_without_end_is_shown_in_pieces() {
        let (mut lines, mut out) = (Lines::default(), Vec::new());
        for _ in 0..5 {
            lines.show(&mut out, &[b'x'; 1000]).unwrap();
            assert!(lines.begun.len() <= LONGEST_LINE);
        }
        lines.show(&mut out, &[b'y'; 10_000]).unwrap();
        lines.end(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().all(|line| line.len() <= LONGEST_LINE));
        assert_eq!(text.replace('\n', "").len(), 15_000);
        let (mut lines, mut out) = (Lines::default(), Vec::new());
        lines.show(&mut out, &[0xff; 4000]).unwrap();
        lines.end(&mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap().matches('\u{fffd}').count(), 4000);
    }

    #[test]
    fn a_vmm_that_writes_without_end_is_not_followed_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/demo");
        fs::create_dir_all(path.join("console")).unwrap();
        fs::write(path.join(CONSOLE), vec![b'x'; MOST + 1]).unwrap();
        let mut out = Vec::new();
        let error = console(&mut out, dir.path(), "demo", None).unwrap_err().to_string();
        assert!(error.contains("longer than the 4 MiB"), "{error}");
        assert_eq!(out.iter().filter(|byte| **byte == b'x').count(), MOST);
    }

    #[test]
    fn a_pod_without_a_console_is_an_error_that_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("c/ns/demo")).unwrap();
        let error = console(&mut Vec::new(), dir.path(), "demo", None).unwrap_err().to_string();
        assert!(
            error.starts_with("the pod demo has no console") && error.contains("console = true"),
            "{error}"
        );
        let error = console(&mut Vec::new(), dir.path(), "none", None).unwrap_err().to_string();
        assert!(error.contains("there is no pod with the id none"), "{error}");
    }
}
