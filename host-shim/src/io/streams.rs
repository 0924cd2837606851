//! The streams of a process. They are copied between vsock connections of the guest and containerd's FIFOs, files and
//! loggers.
//!
//! containerd expects this of a shim: An output stream is closed after its last byte was written. A reader that goes
//! away blocks the process like a full pipe, and sends no SIGPIPE. Standard input ends when CloseIO was called and
//! all other writers have closed it.

use std::{
    fmt,
    fs::{self, File},
    io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use bulkhead_agent_api::agent;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::unix::pipe,
    runtime::Handle,
    task::{JoinHandle, JoinSet},
};

use crate::{
    guest::agent::AgentError,
    host::blocking,
    io::{
        file_writer::FileWriter,
        logger::{Logger, LoggerError, Ready, Source},
    },
    types::{error::chain, lock::lock, stdio_endpoint::Endpoint},
    vm::vsock::{GuestStream, Vsock, VsockError},
};

/// How long Delete waits for the reader of a process's output. Then the rest of the output is dropped.
pub(crate) const DRAIN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// The capacity of a pipe.
const BUFFER: usize = 64 << 10;

/// The buffer of a stream that only has the VMM's answer.
const ANSWER: usize = 64;

/// The number of streams of a process, and the index of each.
const STREAMS: u32 = 3;
const STDIN: u32 = 0;
const STDOUT: u32 = 1;
const STDERR: u32 = 2;

/// Why the streams of a process were not opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StdioError {
    #[error("{stream}: cannot open {path}")]
    Open { stream: &'static str, path: PathBuf, source: io::Error },
    #[error("{stream}: no connection to the guest")]
    Guest { stream: &'static str, source: VsockError },
    #[error(transparent)]
    Logger(#[from] LoggerError),
}

/// Keeps standard input open until CloseIO: a writer of the FIFO that writes nothing.
pub(crate) struct StdinGate(Mutex<Option<pipe::Sender>>);

impl StdinGate {
    fn new(writer: Option<pipe::Sender>) -> Self {
        Self(Mutex::new(writer))
    }

    /// Closes the writer, so that standard input ends with its other writers.
    pub(crate) fn close(&self) {
        drop(lock(&self.0).take());
    }
}

impl fmt::Debug for StdinGate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("StdinGate")
    }
}

/// The tasks that copy a process's streams.
#[derive(Debug)]
pub(crate) struct Streams {
    input: Option<JoinHandle<()>>,
    outputs: JoinSet<()>,
    logger: Option<Logger>,
}

/// Streams that are being copied.
#[derive(Debug)]
pub(crate) struct OpenStdio {
    pub(crate) streams: Streams,
    pub(crate) gate: StdinGate,
}

/// The host's ends of a process's streams.
pub(crate) struct Ends {
    stdin: Option<pipe::Receiver>,
    gate: StdinGate,
    stdout: Option<Output>,
    stderr: Option<Output>,
    logger: Option<Logger>,
    /// The id of the first.
    first: u32,
}

/// Opens the host's end of each stream.
pub(crate) async fn open(
    vsock: &Vsock,
    [stdin, stdout, stderr]: [&Endpoint; 3],
    source: Source<'_>,
) -> Result<Ends, StdioError> {
    let mut gate = StdinGate::new(None);
    let mut reader = None;
    if let Endpoint::Path(path) = stdin {
        let failed = |source| StdioError::Open { stream: "stdin", path: path.clone(), source };
        // Without this writer the stream would end before the first client opens it.
        let (receiver, sender) = on_thread(path, |path| {
            let receiver = pipe::OpenOptions::new().open_receiver(path)?;
            Ok((receiver, pipe::OpenOptions::new().open_sender(path)?))
        })
        .await
        .map_err(failed)?;
        reader = Some(receiver);
        gate = StdinGate::new(Some(sender));
    }
    let (mut logger, mut log_stdout, mut log_stderr) = (None, None, None);
    if let Endpoint::Logger(plan) = stdout {
        let ready: Ready = plan.start(source).await?;
        (logger, log_stdout, log_stderr) = (Some(ready.logger), Some(ready.stdout), Some(ready.stderr));
    }
    let stdout = open_output("stdout", stdout, log_stdout).await?;
    let stderr = open_output("stderr", stderr, log_stderr).await?;
    Ok(Ends { stdin: reader, gate, stdout, stderr, logger, first: vsock.stream_ids(STREAMS) })
}

impl Ends {
    /// The ids of the streams, for a request to the agent.
    pub(crate) fn ids(&self) -> agent::Stdio {
        let mut ids = agent::Stdio::new();
        let id = |is_there: bool, place| if is_there { self.first + place } else { 0 };
        ids.stdin = id(self.stdin.is_some(), STDIN);
        ids.stdout = id(self.stdout.is_some(), STDOUT);
        ids.stderr = id(self.stderr.is_some(), STDERR);
        ids
    }

    /// Connects the streams while `asked` asks the agent for the process. The agent waits for the streams.
    pub(crate) async fn connect_while<E: From<StdioError> + From<AgentError>>(
        self,
        vsock: &Vsock,
        asked: impl Future<Output = Result<(), AgentError>>,
    ) -> Result<OpenStdio, E> {
        let connected = async { Ok::<_, E>(self.connect(vsock).await?) };
        let (open, ()) = tokio::try_join!(connected, async { Ok(asked.await?) })?;
        Ok(open)
    }

    /// Connects each stream with the guest and begins to copy.
    pub(crate) async fn connect(self, vsock: &Vsock) -> Result<OpenStdio, StdioError> {
        let Self { stdin, gate, stdout, stderr, logger, first } = self;
        // All at once, because each takes a round trip to the guest.
        let (stdin, stdout, stderr) = tokio::try_join!(
            connect(vsock, "stdin", first + STDIN, stdin, ANSWER),
            connect(vsock, "stdout", first + STDOUT, stdout, BUFFER),
            connect(vsock, "stderr", first + STDERR, stderr, BUFFER),
        )?;
        let mut streams = Streams { input: None, outputs: JoinSet::new(), logger };
        if let Some((connection, reader)) = stdin {
            streams.input = Some(tokio::spawn(copy_input(reader, connection)));
        }
        if let Some((connection, writer)) = stdout {
            streams.outputs.spawn(copy_output("stdout", connection, writer));
        }
        if let Some((connection, writer)) = stderr {
            streams.outputs.spawn(copy_output("stderr", connection, writer));
        }
        Ok(OpenStdio { streams, gate })
    }
}

type Output = Box<dyn AsyncWrite + Send + Unpin>;

/// Opens the host's end of an output stream. `log` is the logger's pipe for it.
async fn open_output(
    stream: &'static str,
    endpoint: &Endpoint,
    log: Option<pipe::Sender>,
) -> Result<Option<Output>, StdioError> {
    let failed = |path: &Path, source| StdioError::Open { stream, path: path.into(), source };
    match endpoint {
        Endpoint::Nowhere => Ok(None),
        Endpoint::Logger(_) => Ok(log.map(|pipe| Box::new(pipe) as Output)),
        Endpoint::Path(path) => match on_thread(path, open_fifo).await.map_err(|e| failed(path, e))? {
            Some(writer) => Ok(Some(Box::new(writer))),
            None => Ok(Some(Box::new(append(path).await.map_err(|e| failed(path, e))?))),
        },
        Endpoint::File(path) => {
            if let Some(parent) = path.parent() {
                on_thread(parent, |parent| fs::create_dir_all(parent))
                    .await
                    .map_err(|e| failed(parent, e))?;
            }
            Ok(Some(Box::new(append(path).await.map_err(|e| failed(path, e))?)))
        }
    }
}

async fn append(path: &Path) -> io::Result<FileWriter> {
    let file = on_thread(path, |path| File::options().create(true).append(true).open(path)).await?;
    FileWriter::start(file)
}

/// Opens a FIFO for writing. Blocks. None: the path is not that of a FIFO.
fn open_fifo(path: &Path) -> io::Result<Option<pipe::Sender>> {
    if !fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo()) {
        return Ok(None);
    }
    // It is opened for reading too, so that it always has a reader, and no write fails with EPIPE.
    pipe::OpenOptions::new().read_write(true).open_sender(path).map(Some)
}

/// Opens something on a thread of its own, because the file system may hang.
async fn on_thread<T: Send + 'static>(
    path: &Path,
    open: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (path, runtime) = (path.to_owned(), Handle::current());
    let open = move || {
        // A pipe is registered with the runtime.
        let _entered = runtime.enter();
        open(&path)
    };
    blocking::run(open, drop).await.map_err(io::Error::other)?
}

/// Connects the host's end of a stream with the guest's. `buffer` is the size of the read buffer.
async fn connect<End>(
    vsock: &Vsock,
    stream: &'static str,
    id: u32,
    end: Option<End>,
    buffer: usize,
) -> Result<Option<(GuestStream, End)>, StdioError> {
    let Some(end) = end else { return Ok(None) };
    match vsock.connect_stream(id, buffer).await {
        Ok(connection) => Ok(Some((connection, end))),
        Err(source) => Err(StdioError::Guest { stream, source }),
    }
}

async fn copy_input(reader: impl AsyncRead + Unpin, mut connection: impl AsyncRead + AsyncWrite + Unpin) {
    let mut reader = BufReader::with_capacity(BUFFER, reader);
    match tokio::io::copy_buf(&mut reader, &mut connection).await {
        Ok(bytes) => tracing::debug!(stream = "stdin", bytes, "the stream ended"),
        // The process has closed its standard input.
        Err(e) => return tracing::debug!(stream = "stdin", error = chain(&e), "the process reads no more"),
    }
    if connection.shutdown().await.is_err() {
        return;
    }
    // Waits until the guest has read everything and closes its end. Closing this end earlier could drop bytes in
    // transit. Bytes that a guest sends here are ignored.
    drop(connection.read(&mut [0]).await);
}

async fn copy_output(stream: &'static str, mut connection: GuestStream, mut writer: impl AsyncWrite + Unpin) {
    let copied = tokio::io::copy_buf(&mut connection, &mut writer).await;
    // After an error too, because a file gets its last bytes with the flush.
    let flushed = writer.flush().await;
    match copied.and_then(|bytes| flushed.map(|()| bytes)) {
        Ok(bytes) => tracing::debug!(stream, bytes, "the stream ended"),
        Err(e) => tracing::warn!(stream, error = chain(&e), "the rest of the output is lost"),
    }
}

impl Streams {
    /// Waits until all output was written, at most `within`. Then the logger ends.
    pub(crate) async fn drain(&mut self, within: Duration) {
        self.stop_input();
        let drained = async { while self.outputs.join_next().await.is_some() {} };
        if tokio::time::timeout(within, drained).await.is_err() {
            tracing::warn!("the rest of the output is dropped, because nobody reads it");
            self.outputs.shutdown().await;
        }
        if let Some(logger) = self.logger.take() {
            logger.end().await;
        }
    }

    fn stop_input(&mut self) {
        if let Some(input) = self.input.take() {
            input.abort();
        }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.stop_input();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use bulkhead_agent_api::STREAM_PORT;
    use nix::{sys::stat::Mode, unistd::mkfifo};
    use tokio::{
        net::{UnixListener, UnixStream},
        time::{sleep, timeout},
    };

    use super::*;
    use crate::{
        testing::{Log, no_more_threads},
        vm::vsock::tests::accept,
    };

    /// The first id that a VM's streams get.
    const FIRST: u32 = 1;

    struct Guest {
        dir: tempfile::TempDir,
        listener: UnixListener,
        vsock: Vsock,
    }

    fn guest() -> Guest {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("vsock.sock")).unwrap();
        let vsock = Vsock::new(dir.path().join("vsock.sock"));
        Guest { dir, listener, vsock }
    }

    impl Guest {
        fn fifo(&self, name: &str) -> PathBuf {
            let path = self.dir.path().join(name);
            mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
            path
        }

        async fn stream(&self, id: u32) -> UnixStream {
            accept(&self.listener, &format!("CONNECT {STREAM_PORT} {}\n", FIRST + id)).await
        }

        /// The streams that go to these places, connected.
        async fn flow(&self, endpoints: [&Endpoint; 3]) -> Result<OpenStdio, StdioError> {
            open(&self.vsock, endpoints, SOURCE).await?.connect(&self.vsock).await
        }
    }

    const SOURCE: Source<'_> = Source { namespace: "default", id: "demo" };

    const WAIT: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn output_arrives_whole_and_then_ends() {
        let guest = guest();
        let path = guest.fifo("stdout");
        let (nowhere, stdout) = (Endpoint::Nowhere, Endpoint::Path(path.clone()));
        let ends = open(&guest.vsock, [&nowhere, &stdout, &nowhere], SOURCE).await.unwrap();
        let ids = ends.ids();
        assert_eq!((ids.stdin, ids.stdout, ids.stderr), (0, FIRST + STDOUT, 0));
        let (open, mut process) = tokio::join!(ends.connect(&guest.vsock), guest.stream(STDOUT));
        let mut open = open.unwrap();
        let mut client = pipe::OpenOptions::new().open_receiver(&path).unwrap();
        let sent = vec![7_u8; 5 << 20];
        let writing = sent.clone();
        tokio::spawn(async move { process.write_all(&writing).await.unwrap() });
        let mut received = Vec::new();
        timeout(WAIT, client.read_to_end(&mut received)).await.unwrap().unwrap();
        assert!(received == sent);
        open.streams.drain(WAIT).await;
    }

    #[tokio::test]
    async fn output_that_a_client_reads_late_arrives_whole() {
        let guest = guest();
        let path = guest.fifo("stdout");
        let (nowhere, stdout) = (Endpoint::Nowhere, Endpoint::Path(path.clone()));
        let mut client = pipe::OpenOptions::new().read_write(true).open_receiver(&path).unwrap();
        let opening = guest.flow([&nowhere, &stdout, &nowhere]);
        let (open, mut process) = tokio::join!(opening, guest.stream(STDOUT));
        let sent: Vec<u8> = (0..150_000_u32).map(|at| at as u8).collect();
        timeout(WAIT, process.write_all(&sent)).await.unwrap().unwrap();
        drop(process);
        sleep(Duration::from_millis(100)).await;
        let draining = tokio::spawn(async move { open.unwrap().streams.drain(WAIT).await });
        let mut received = vec![0; sent.len()];
        timeout(WAIT, client.read_exact(&mut received)).await.unwrap().unwrap();
        assert!(received == sent);
        draining.await.unwrap();
    }

    #[tokio::test]
    async fn output_nobody_reads_does_not_keep_delete() {
        let guest = guest();
        let path = guest.fifo("stderr");
        let (nowhere, stderr) = (Endpoint::Nowhere, Endpoint::Path(path));
        let opening = guest.flow([&nowhere, &nowhere, &stderr]);
        let (open, mut process) = tokio::join!(opening, guest.stream(STDERR));
        tokio::spawn(async move { process.write_all(&vec![0; 1 << 20]).await });
        timeout(WAIT, open.unwrap().streams.drain(Duration::from_millis(50))).await.unwrap();
    }

    #[tokio::test]
    async fn output_is_appended_to_a_file() {
        let guest = guest();
        let path = guest.dir.path().join("log");
        fs::write(&path, "before ").unwrap();
        let (nowhere, stdout) = (Endpoint::Nowhere, Endpoint::File(path.clone()));
        let opening = guest.flow([&nowhere, &stdout, &nowhere]);
        let (open, mut process) = tokio::join!(opening, guest.stream(STDOUT));
        process.write_all(b"after").await.unwrap();
        drop(process);
        open.unwrap().streams.drain(WAIT).await;
        assert_eq!(fs::read_to_string(&path).unwrap(), "before after");
    }

    #[test]
    fn output_arrives_in_a_file_when_the_host_has_no_threads_any_more() {
        // An idle thread of tokio would be used again.
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().thread_keep_alive(Duration::from_millis(1)).build().unwrap();
        runtime.block_on(async {
            let guest = guest();
            let path = guest.dir.path().join("log");
            let (nowhere, stdout) = (Endpoint::Nowhere, Endpoint::File(path.clone()));
            let opening = guest.flow([&nowhere, &stdout, &nowhere]);
            let (open, mut process) = tokio::join!(opening, guest.stream(STDOUT));
            process.write_all(b"before").await.unwrap();
            let arrived = async {
                while fs::read(&path).unwrap() != b"before" {
                    sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(WAIT, arrived).await.unwrap();
            sleep(Duration::from_millis(50)).await;
            no_more_threads();
            // More than one write has under way.
            let sent = vec![b'x'; 300_000];
            timeout(WAIT, process.write_all(&sent)).await.unwrap().unwrap();
            drop(process);
            open.unwrap().streams.drain(WAIT).await;
            assert!(fs::read(&path).unwrap() == [&b"before"[..], &sent].concat());
            // Another file is not opened, and that is an error.
            let error = guest.flow([&nowhere, &stdout, &nowhere]).await.unwrap_err();
            assert_eq!(error.to_string(), format!("stdout: cannot open {}", guest.dir.path().display()));
        });
    }

    #[tokio::test]
    async fn output_that_a_file_does_not_take_is_lost_and_the_log_says_so() {
        let log = Log::begin();
        let guest = guest();
        let (nowhere, stdout) = (Endpoint::Nowhere, Endpoint::Path("/dev/full".into()));
        let opening = guest.flow([&nowhere, &stdout, &nowhere]);
        let (open, mut process) = tokio::join!(opening, guest.stream(STDOUT));
        process.write_all(b"lost").await.unwrap();
        drop(process);
        timeout(WAIT, open.unwrap().streams.drain(WAIT)).await.unwrap();
        let lines = log.lines();
        assert!(lines.iter().any(|line| line.contains("the rest of the output is lost")), "{lines:?}");
        assert!(lines.iter().any(|line| line.contains("no space left")), "{lines:?}");
    }

    #[tokio::test]
    async fn stdin_ends_after_close_io_and_the_last_writer() {
        let guest = guest();
        let path = guest.fifo("stdin");
        let (nowhere, stdin) = (Endpoint::Nowhere, Endpoint::Path(path.clone()));
        let opening = guest.flow([&stdin, &nowhere, &nowhere]);
        let (open, mut process) = tokio::join!(opening, guest.stream(STDIN));
        let open = open.unwrap();
        // A client that comes and goes does not end it.
        for _ in 0..2 {
            fs::OpenOptions::new().write(true).open(&path).unwrap().write_all(b"hello").unwrap();
            let mut received = [0; 5];
            timeout(WAIT, process.read_exact(&mut received)).await.unwrap().unwrap();
        }
        assert!(timeout(Duration::from_millis(50), process.read_u8()).await.is_err());
        // CloseIO does not take what a client is still writing.
        let mut client = fs::OpenOptions::new().write(true).open(&path).unwrap();
        open.gate.close();
        sleep(Duration::from_millis(20)).await;
        client.write_all(b"last").unwrap();
        drop(client);
        let mut received = Vec::new();
        timeout(WAIT, process.read_to_end(&mut received)).await.unwrap().unwrap();
        assert_eq!(received, b"last");
    }

    #[tokio::test]
    async fn a_guest_that_talks_where_it_should_listen_is_not_heard() {
        let (mut guest, connection) = UnixStream::pair().unwrap();
        let copying = tokio::spawn(copy_input(&b"typed"[..], connection));
        // Without end: nobody takes it.
        let talking = async { while guest.write_all(&[0; 1 << 16]).await.is_ok() {} };
        timeout(WAIT, talking).await.unwrap();
        timeout(WAIT, copying).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_fifo_that_is_not_there_is_named() {
        let guest = guest();
        let (nowhere, stdin) = (Endpoint::Nowhere, Endpoint::Path("/nonexistent/in".into()));
        let opening = guest.flow([&stdin, &nowhere, &nowhere]);
        assert_eq!(opening.await.unwrap_err().to_string(), "stdin: cannot open /nonexistent/in");
    }
}
