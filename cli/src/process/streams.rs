//! The program's streams: FIFOs of the shim, which threads copy from and to those of this command.

use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{CWD, FileType, Mode, OFlags, fcntl_setfl, mknodat},
};
use tokio::sync::{mpsc, oneshot};

/// How much of the output a report has.
const TAIL: usize = 64 << 10;

/// The capacity of a pipe.
const BUFFER: usize = 64 << 10;

/// The last output of the program, of both streams as they came.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tail(Arc<Mutex<VecDeque<u8>>>);

impl Tail {
    fn add(&self, bytes: &[u8]) {
        let mut tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tail.extend(bytes);
        let surplus = tail.len().saturating_sub(TAIL);
        tail.drain(..surplus);
    }

    pub(crate) fn text(&self) -> String {
        let mut tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(tail.make_contiguous()).into_owned()
    }
}

/// A FIFO for each stream.
#[derive(Debug)]
pub(crate) struct Fifos {
    /// None: the program has no input.
    pub(crate) stdin: Option<PathBuf>,
    pub(crate) stdout: Output,
    /// None: the program has a terminal.
    pub(crate) stderr: Option<Output>,
}

/// The FIFO of a stream of output.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) path: PathBuf,
    reader: File,
}

impl Fifos {
    /// Makes them in a directory.
    pub(crate) fn make(directory: &Path, has_input: bool, has_terminal: bool) -> io::Result<Self> {
        let stdin = has_input.then(|| directory.join("stdin"));
        stdin.as_deref().map_or(Ok(()), make_fifo)?;
        let stdout = Output::make(directory.join("stdout"))?;
        let stderr = if has_terminal { None } else { Some(Output::make(directory.join("stderr"))?) };
        Ok(Self { stdin, stdout, stderr })
    }
}

fn make_fifo(path: &Path) -> io::Result<()> {
    Ok(mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?)
}

impl Output {
    fn make(path: PathBuf) -> io::Result<Self> {
        make_fifo(&path)?;
        // Without O_NONBLOCK it would wait for the shim. What is written from now on is not lost.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let reader = OpenOptions::new().read(true).custom_flags(flags).open(&path)?;
        fcntl_setfl(&reader, OFlags::empty())?;
        Ok(Self { path, reader })
    }
}

/// The streams of output that threads copy.
#[derive(Debug)]
pub(crate) struct Outputs {
    tail: Tail,
    /// Each thread sends how its stream has ended.
    sender: mpsc::UnboundedSender<io::Result<()>>,
    receiver: mpsc::UnboundedReceiver<io::Result<()>>,
    open: usize,
    /// How many threads wait for the reader of this command's output.
    writing: Arc<AtomicUsize>,
    /// How many bytes were read of all streams.
    read: Arc<AtomicU64>,
}

impl Outputs {
    pub(crate) fn new(tail: Tail) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self { tail, sender, receiver, open: 0, writing: Arc::default(), read: Arc::default() }
    }

    /// Copies a stream until the shim closes it. The shim must have opened it.
    pub(crate) fn copy(&mut self, output: Output, to: BorrowedFd<'_>) -> io::Result<()> {
        let to = File::from(to.try_clone_to_owned()?);
        let (sender, tail) = (self.sender.clone(), self.tail.clone());
        let (writing, read) = (Arc::clone(&self.writing), Arc::clone(&self.read));
        self.open += 1;
        thread::spawn(move || {
            let write = |bytes: &[u8]| {
                tail.add(bytes);
                read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                writing.fetch_add(1, Ordering::Relaxed);
                let written = write_all(&to, bytes);
                writing.fetch_sub(1, Ordering::Relaxed);
                written
            };
            let copied = copy(&output.reader, write);
            let has_failed = copied.is_err();
            // Nobody waits for it after a deadline.
            _ = sender.send(copied);
            if has_failed {
                // The shim waits for a reader before it says that the program, which is killed now, has ended.
                _ = copy(&output.reader, |_| Ok(()));
            }
        });
        Ok(())
    }

    /// Whether a stream has not ended.
    pub(crate) fn are_open(&self) -> bool {
        self.open > 0
    }

    /// Waits for the end of a stream. The error is one of writing.
    pub(crate) async fn next(&mut self) -> io::Result<()> {
        // The sender lives as long as this.
        let ended = self.receiver.recv().await.unwrap_or(Ok(()));
        self.open -= 1;
        ended
    }

    /// Waits for the end of all streams, when the program has ended: at most `limit` after the last time that a reader
    /// was waited for. A reader may take its time for what the program has written, until `cancelled` or until it is
    /// `late`. No more than `most` bytes that the program has written are still to be read: what comes beyond them is
    /// a child's, which is not followed. Returns the first error of writing.
    pub(crate) async fn drain(
        &mut self,
        limit: Duration,
        most: u64,
        cancelled: impl Future,
        late: impl Future,
    ) -> io::Result<()> {
        let (mut cancelled, mut late) = (pin!(cancelled), pin!(late));
        let before = self.read.load(Ordering::Relaxed);
        let mut written = Ok(());
        while self.are_open() {
            tokio::select! {
                ended = self.next() => written = written.and(ended),
                _ = &mut cancelled => break,
                _ = &mut late => {
                    tracing::warn!("the rest of the output is lost: nobody reads it");
                    break;
                }
                () = tokio::time::sleep(limit) => {
                    if self.writing.load(Ordering::Relaxed) == 0 {
                        tracing::warn!("the rest of the output is lost: its end does not come");
                        break;
                    }
                    if self.read.load(Ordering::Relaxed) - before > most {
                        tracing::warn!("the program has ended, and its child writes on: the rest is lost");
                        break;
                    }
                }
            }
        }
        written
    }
}

/// Copies standard input to the FIFO. The shim must have it open. The receiver learns of the end of standard input, or
/// that nobody reads it any more.
pub(crate) fn copy_input(fifo: PathBuf) -> io::Result<oneshot::Receiver<()>> {
    let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (sender, receiver) = oneshot::channel();
    // It is not waited for, because a terminal may never bring anything.
    thread::spawn(move || {
        let opened = OpenOptions::new().write(true).open(fifo);
        // An error means that the program reads no more, or that standard input is closed. For the program this is
        // the end in both cases.
        _ = opened.and_then(|fifo| copy(&input, |bytes| write_all(&fifo, bytes)));
        _ = sender.send(());
    });
    Ok(receiver)
}

fn copy(mut from: &File, mut write: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = match from.read(&mut buffer) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                wait_for(from, PollFlags::IN)?;
                continue;
            }
            other => other?,
        };
        match buffer.get(..length) {
            None | Some([]) => return Ok(()),
            Some(bytes) => write(bytes)?,
        }
    }
}

fn write_all(mut to: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => bytes = bytes.get(length..).unwrap_or_default(),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => wait_for(to, PollFlags::OUT)?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Waits for a stream that does not block. This command has not asked for that: whoever shares the stream with it has.
pub(crate) fn wait_for(stream: impl AsFd, event: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(&stream, event)], None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_output_is_kept() {
        let tail = Tail::default();
        tail.add(b"first\n");
        tail.add(&vec![b'x'; TAIL - 5]);
        tail.add(b"last\n");
        let text = tail.text();
        assert_eq!(text.len(), TAIL);
        assert!(text.starts_with("x") && text.ends_with("xlast\n"));
    }

    /// Writes the bytes as the shim does, and returns how the stream has ended.
    async fn written(bytes: &[u8], to: impl AsFd) -> io::Result<()> {
        let dir = tempfile::tempdir().unwrap();
        let fifos = Fifos::make(dir.path(), false, true).unwrap();
        assert!(fifos.stdin.is_none() && fifos.stderr.is_none());
        let mut writer = OpenOptions::new().write(true).open(&fifos.stdout.path).unwrap();
        let mut outputs = Outputs::new(Tail::default());
        outputs.copy(fifos.stdout, to.as_fd()).unwrap();
        writer.write_all(bytes).unwrap();
        drop(writer);
        let ended = outputs.next().await;
        assert!(!outputs.are_open());
        ended
    }

    #[tokio::test]
    async fn output_comes_whole_and_ends_with_its_writer() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|number| number.to_le_bytes()[0]).collect();
        let target = tempfile::NamedTempFile::new().unwrap();
        written(&bytes, &target).await.unwrap();
        assert_eq!(std::fs::read(target.path()).unwrap(), bytes);
    }

    #[tokio::test]
    async fn a_slow_reader_gets_all_that_the_program_has_written() {
        let bytes = vec![b'x'; 300_000];
        let dir = tempfile::tempdir().unwrap();
        let fifos = Fifos::make(dir.path(), false, true).unwrap();
        let mut shim = OpenOptions::new().write(true).open(&fifos.stdout.path).unwrap();
        let (mut reader, to) = io::pipe().unwrap();
        let mut outputs = Outputs::new(Tail::default());
        outputs.copy(fifos.stdout, to.as_fd()).unwrap();
        drop(to);
        let (written, limit) = (bytes.clone(), Duration::from_millis(20));
        let shim = thread::spawn(move || shim.write_all(&written).unwrap());
        let read = thread::spawn(move || {
            // Longer than the limit.
            thread::sleep(10 * limit);
            let mut read = Vec::new();
            reader.read_to_end(&mut read).unwrap();
            read
        });
        let never = std::future::pending::<()>;
        outputs.drain(limit, bytes.len() as u64, never(), never()).await.unwrap();
        assert!(!outputs.are_open());
        shim.join().unwrap();
        assert_eq!(read.join().unwrap(), bytes);
    }

    #[tokio::test]
    async fn a_reader_that_goes_away_is_an_error() {
        let (reader, to) = io::pipe().unwrap();
        drop(reader);
        // Nothing that is still written keeps the shim.
        let error = written(&vec![b'x'; 300_000], &to).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn output_that_cannot_be_written_is_an_error_also_after_the_end_of_the_program() {
        let dir = tempfile::tempdir().unwrap();
        let fifos = Fifos::make(dir.path(), false, true).unwrap();
        let mut shim = OpenOptions::new().write(true).open(&fifos.stdout.path).unwrap();
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut outputs = Outputs::new(Tail::default());
        outputs.copy(fifos.stdout, full.as_fd()).unwrap();
        shim.write_all(b"x").unwrap();
        drop(shim);
        let never = std::future::pending::<()>;
        let limit = Duration::from_secs(60);
        let error = outputs.drain(limit, u64::MAX, never(), never()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }

    #[tokio::test]
    async fn a_slow_reader_of_a_pipe_that_does_not_block_gets_everything() {
        let bytes = vec![b'x'; 300_000];
        let (mut reader, to) = io::pipe().unwrap();
        fcntl_setfl(&to, OFlags::NONBLOCK).unwrap();
        let read = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            let mut read = Vec::new();
            reader.read_to_end(&mut read).unwrap();
            read
        });
        let written = written(&bytes, &to).await;
        drop(to);
        written.unwrap();
        assert_eq!(read.join().unwrap(), bytes);
    }

    #[test]
    fn input_that_does_not_block_ends_when_its_writer_ends_it() {
        let (from, mut writer) = io::pipe().unwrap();
        fcntl_setfl(&from, OFlags::NONBLOCK).unwrap();
        let write = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            writer.write_all(b"late").unwrap();
        });
        let mut came = Vec::new();
        let from = File::from(std::os::fd::OwnedFd::from(from));
        copy(&from, |bytes| {
            came.extend_from_slice(bytes);
            Ok(())
        })
        .unwrap();
        write.join().unwrap();
        assert_eq!(came, b"late");
    }
}
