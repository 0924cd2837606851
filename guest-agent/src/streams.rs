//! Standard streams. Each is a vsock connection of its own. The shim opens it and names it in CreateContainer or
//! ExecProcess by its source port.
//!
//! A process gets pipes or a terminal rather than the connections themselves, since programs rely on what pipes do:
//! /dev/stdout can be opened again, and a write without a reader raises SIGPIPE.

use std::{
    collections::HashMap,
    io::{self, ErrorKind},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    unistd::write,
};
use rustix::{buffer::spare_capacity, io::read};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, unix::AsyncFd},
    sync::Notify,
    time::timeout,
};

use crate::{reaper::ExitReceiver, syscall};

/// How long a named stream may take to be connected.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a connection waits to be named. Those of a process that could not be made are never named.
const ABANDONED: Duration = Duration::from_secs(30);

/// Connections that no process has asked for yet. More are refused.
const MAX_WAITING: usize = 256;

/// How long a process's output may stay unread after the process has exited. The shim, which closes the connection
/// when the process is deleted, is the one that decides; this is for a shim that never does.
const STALLED_OUTPUT: Duration = Duration::from_secs(600);

/// As much as a pipe holds. A buffer's pages are not touched before there is something for them.
const BUFFER: usize = 64 << 10;

/// A stream that was named but not connected in time.
#[derive(Debug, thiserror::Error)]
#[error(
    "no connection for stream {id} arrived on vsock port {} within {PATIENCE:?}",
    bulkhead_agent_api::STREAM_PORT
)]
pub struct StreamMissing {
    id: u32,
}

/// A connection from the host. In a guest this is a vsock connection.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<C: AsyncRead + AsyncWrite + Send + Unpin> Connection for C {}

/// Connections by their ids, until containers take them.
#[derive(Default)]
pub struct StreamTable {
    waiting: Mutex<HashMap<u32, Box<dyn Connection>>>,
    arrived: Notify,
}

impl StreamTable {
    /// Adds a connection. One that cannot be added is closed.
    pub fn add(self: &Arc<Self>, id: u32, connection: impl Connection + 'static) {
        {
            let mut waiting = self.lock();
            if id == 0 || waiting.len() >= MAX_WAITING || waiting.contains_key(&id) {
                eprintln!("bulkhead-agent: stream {id} is zero or taken, or too many are waiting");
                return;
            }
            waiting.insert(id, Box::new(connection));
        }
        self.arrived.notify_waiters();
        let table = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(ABANDONED).await;
            table.lock().remove(&id);
        });
    }

    /// Takes the connection of this id, which may be on its way still.
    pub async fn take(&self, id: u32) -> Result<Box<dyn Connection>, StreamMissing> {
        let taken = async {
            loop {
                let arrived = self.arrived.notified();
                if let Some(connection) = self.lock().remove(&id) {
                    return connection;
                }
                arrived.await;
            }
        };
        timeout(PATIENCE, taken).await.map_err(|_| StreamMissing { id })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Box<dyn Connection>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The agent's end of a pipe to a process, or of its terminal. Clones are the same; it is closed with the last.
#[derive(Clone)]
pub struct End(Arc<AsyncFd<OwnedFd>>);

impl End {
    /// Takes over a descriptor whose other users, if it has any, do not mind that it never blocks.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&descriptor, FcntlArg::F_GETFL)?);
        fcntl(&descriptor, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self(syscall::register(descriptor)?))
    }

    /// Behind what `buffer` holds, as much as it has room for.
    async fn read(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        self.0.async_io(Interest::READABLE, |end| Ok(read(end, spare_capacity(buffer))?)).await
    }

    /// The same of what is there now. Events are not relied on: that of the last bytes may not have been delivered yet.
    fn read_now(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        Ok(read(self.0.get_ref(), spare_capacity(buffer))?)
    }

    async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.0.async_io(Interest::WRITABLE, |end| Ok(write(end, bytes)?)).await
    }
}

impl AsFd for End {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

/// Copies from the connection to a process's standard input, until either side ends.
pub async fn forward_input(mut connection: impl AsyncRead + Unpin, end: End) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        buffer.clear();
        if connection.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
        let mut left = &buffer[..];
        while !left.is_empty() {
            match end.write(left).await {
                Ok(written) => left = &left[written..],
                // The process closed its input: what is left has no reader.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Copies a process's output to the connection. Ends when the last writer has closed the output. Also ends when `ended`
/// reports the end of the process and everything that was written is read, so a writer that outlives the process delays
/// nothing. Then shuts the connection down, and closes it after the host has done so.
///
/// A reader takes as long as it likes while the process runs. After the end it must take something every
/// [`STALLED_OUTPUT`], or what is left is lost.
pub async fn forward_output(
    end: End,
    mut connection: impl AsyncRead + AsyncWrite + Unpin,
    ended: ExitReceiver,
) -> io::Result<()> {
    copy_output(&end, &mut connection, ended).await?;
    if connection.shutdown().await.is_err() {
        // The host has closed it.
        return Ok(());
    }
    // If this closed it, the kernel would reset the connection 8 s later (net/vmw_vsock, VSOCK_CLOSE_TIMEOUT), and what
    // the host has not read by then would be lost. The host sends nothing; its end is an end of the file or an error.
    let closed = async { while matches!(connection.read(&mut [0]).await, Ok(1)) {} };
    timeout(STALLED_OUTPUT, closed).await.map_err(|_| stalled())
}

async fn copy_output(
    end: &End,
    connection: &mut (impl AsyncWrite + Unpin),
    mut ended: ExitReceiver,
) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        buffer.clear();
        // Looked at before the read, so that nothing to read means that all was read.
        let is_over = ended.borrow().is_some();
        let read = if is_over {
            end.read_now(&mut buffer)
        } else {
            tokio::select! {
                read = end.read(&mut buffer) => read,
                Ok(_) = ended.wait_for(Option::is_some) => continue,
            }
        };
        match read {
            Ok(0) => return Ok(()),
            Ok(_) => write_all(connection, &buffer, &ended).await?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

fn stalled() -> io::Error {
    let reason = format!("nobody read the output for {STALLED_OUTPUT:?} after the end of the process");
    io::Error::new(ErrorKind::TimedOut, reason)
}

/// Writes for as long as the process runs; after its end, for as long as the reader goes on reading.
async fn write_all(
    connection: &mut (impl AsyncWrite + Unpin),
    mut left: &[u8],
    ended: &ExitReceiver,
) -> io::Result<()> {
    while !left.is_empty() {
        let no_progress = async {
            // An error: the guest is about to end.
            let _ = ended.clone().wait_for(Option::is_some).await;
            tokio::time::sleep(STALLED_OUTPUT).await;
        };
        let written = tokio::select! {
            written = connection.write(left) => written?,
            () = no_progress => return Err(stalled()),
        };
        if written == 0 {
            return Err(ErrorKind::WriteZero.into());
        }
        left = &left[written..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Write},
    };

    use rustix::{
        pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt},
        termios::{OptionalActions, tcgetattr, tcsetattr},
    };
    use tokio::sync::watch;

    use super::*;
    use crate::{reaper::Exit, terminal::Terminal};

    const ENDED: Option<Exit> = Some(Exit { status: 0, at_unix_ns: 0 });

    struct Output {
        writer: std::io::PipeWriter,
        reader: End,
    }

    fn output() -> Output {
        let (reader, writer) = std::io::pipe().unwrap();
        Output { writer, reader: End::new(reader.into()).unwrap() }
    }

    #[tokio::test]
    async fn output_is_forwarded_until_its_writers_are_gone() {
        let Output { mut writer, reader } = output();
        let (_alive, ended) = watch::channel(None);
        let (near, mut far) = tokio::io::duplex(1 << 20);
        let forward = tokio::spawn(forward_output(reader, near, ended));
        let wrote = tokio::task::spawn_blocking(move || writer.write_all(&[7; 300_000]));
        let mut received = Vec::new();
        far.read_to_end(&mut received).await.unwrap();
        wrote.await.unwrap().unwrap();
        // It is the host that closes the connection.
        assert!(!forward.is_finished());
        drop(far);
        forward.await.unwrap().unwrap();
        assert_eq!(received, [7; 300_000]);
    }

    #[tokio::test]
    async fn an_orphan_with_the_pipe_holds_nobody_up() {
        let Output { mut writer, reader } = output();
        let (exit, ended) = watch::channel(None);
        let (near, mut far) = tokio::io::duplex(1 << 20);
        writer.write_all(b"last words").unwrap();
        exit.send(ENDED).unwrap();
        let forward = tokio::spawn(forward_output(reader, near, ended));
        let mut received = String::new();
        far.read_to_string(&mut received).await.unwrap();
        assert_eq!(received, "last words");
        drop(far);
        forward.await.unwrap().unwrap();
        drop(writer);
    }

    #[tokio::test]
    async fn a_reader_that_is_slow_gets_all_after_the_end() {
        let Output { mut writer, reader } = output();
        let (exit, ended) = watch::channel(None);
        let (near, mut far) = tokio::io::duplex(16);
        writer.write_all(&[7; 60_000]).unwrap();
        drop(writer);
        let forward = tokio::spawn(forward_output(reader, near, ended));
        exit.send(ENDED).unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!forward.is_finished());
        let mut received = Vec::new();
        far.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, [7; 60_000]);
        drop(far);
        forward.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_has_stopped_is_given_up_after_the_end_only() {
        let (_writer, reader) = tokio::io::duplex(16);
        let mut connection = reader;
        let (exit, ended) = watch::channel(None);
        let begun = tokio::time::Instant::now();
        let mut writing = Box::pin(write_all(&mut connection, &[7; 1000], &ended));
        // As long as the process runs, it waits for its reader like for a full pipe.
        assert!(timeout(10 * STALLED_OUTPUT, &mut writing).await.is_err());
        exit.send(ENDED).unwrap();
        let error = writing.await.unwrap_err();
        assert_eq!((error.kind(), begun.elapsed()), (ErrorKind::TimedOut, 11 * STALLED_OUTPUT));
    }

    #[tokio::test]
    async fn the_end_of_the_process_wakes_a_waiting_copy() {
        let Output { writer, reader } = output();
        let (exit, ended) = watch::channel(None);
        let (near, far) = tokio::io::duplex(64);
        let forward = tokio::spawn(forward_output(reader, near, ended));
        tokio::task::yield_now().await;
        exit.send(ENDED).unwrap();
        drop(far);
        forward.await.unwrap().unwrap();
        drop(writer);
    }

    /// A terminal that adds and echoes nothing: both its ends.
    fn raw_terminal() -> (Terminal, File) {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        unlockpt(&master).unwrap();
        let slave = ioctl_tiocgptpeer(&master, flags).unwrap();
        let mut modes = tcgetattr(&slave).unwrap();
        modes.make_raw();
        tcsetattr(&slave, OptionalActions::Now, &modes).unwrap();
        (Terminal::new(master).unwrap(), slave.into())
    }

    #[tokio::test]
    async fn a_terminal_that_is_closed_and_opened_again_goes_on() {
        let (terminal, mut slave) = raw_terminal();
        let (exit, ended) = watch::channel(None);
        let (near, mut far) = tokio::io::duplex(64);
        let forward = tokio::spawn(forward_output(terminal.master().clone(), near, ended));
        let mut received = [0; 5];
        slave.write_all(b"first").unwrap();
        let name = rustix::pty::ptsname(terminal.master(), Vec::new()).unwrap();
        drop(slave);
        far.read_exact(&mut received).await.unwrap();
        assert_eq!(received, *b"first");
        let again = File::options().read(true).write(true).open(name.to_str().unwrap());
        again.unwrap().write_all(b"again").unwrap();
        far.read_exact(&mut received).await.unwrap();
        assert_eq!(received, *b"again");
        exit.send(ENDED).unwrap();
        drop(far);
        forward.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn what_is_typed_waits_for_its_reader() {
        let (terminal, mut slave) = raw_terminal();
        // More than a terminal holds.
        let typed = vec![b'x'; 100_000];
        let (mut near, far) = tokio::io::duplex(64);
        let forward = tokio::spawn(forward_input(far, terminal.master().clone()));
        let length = typed.len();
        let reading = tokio::task::spawn_blocking(move || {
            let mut received = vec![0; length];
            slave.read_exact(&mut received).map(|()| received)
        });
        near.write_all(&typed).await.unwrap();
        assert!(reading.await.unwrap().unwrap() == typed);
        drop(near);
        forward.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_never_comes_is_named() {
        let error = StreamTable::default().take(42).await.err().unwrap().to_string();
        assert!(error.contains("stream 42") && error.contains("1025"), "{error}");
    }
}
