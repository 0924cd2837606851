//! Connections to the guest's vsock ports, by way of the Unix socket that the VMM listens on.

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bulkhead_agent_api::STREAM_PORT;
use bulkhead_vmm_api::FIRST_HOST_PORT;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

/// How long the VMM may take to answer CONNECT. The guest answers with one packet.
const CONNECT: Duration = Duration::from_secs(10);

/// The first id of a stream.
const FIRST_STREAM: u32 = 1;

/// The longest answer to CONNECT that is read: `OK `, ten digits and the end of the line, or an error.
const LONGEST_ANSWER: u64 = 32;

/// Bytes of the agent's answers that are read at a time.
const RPC_BUFFER: usize = 8 << 10;

/// The Unix socket behind which the VMM reaches the guest's vsock ports. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Vsock {
    path: PathBuf,
    next_stream: Arc<AtomicU32>,
}

/// A connection into the guest.
pub(crate) type GuestStream = BufReader<UnixStream>;

/// Why there is no connection to a port of the guest.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VsockError {
    #[error("vsock")]
    Io(#[from] io::Error),
    #[error("the VMM refuses vsock port {port} (it answers {answer:?})")]
    Refused { port: u32, answer: String },
    #[error("no answer from vsock port {port} within {} s", CONNECT.as_secs())]
    Timeout { port: u32 },
}

impl Vsock {
    /// `path` is that of [`bulkhead_vmm_api::VmConfig::vsock`].
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, next_stream: Arc::new(AtomicU32::new(FIRST_STREAM)) }
    }

    /// Returns the first of `count` consecutive stream ids. An id is used again only after all others (agent.proto,
    /// Stdio).
    pub(crate) fn stream_ids(&self, count: u32) -> u32 {
        let following = |first: u32| Some(first + count).filter(|next| *next < FIRST_HOST_PORT - count);
        let next = |first| following(first).or(Some(FIRST_STREAM));
        match self.next_stream.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(first) | Err(first) => first,
        }
    }

    /// Connects to a port that the agent listens on.
    pub(crate) async fn connect(&self, port: u32) -> Result<GuestStream, VsockError> {
        self.within_time(port, format!("CONNECT {port}\n"), RPC_BUFFER).await
    }

    /// Connects the stream of this id, with a read buffer of this size in bytes.
    pub(crate) async fn connect_stream(&self, id: u32, buffer: usize) -> Result<GuestStream, VsockError> {
        self.within_time(STREAM_PORT, format!("CONNECT {STREAM_PORT} {id}\n"), buffer).await
    }

    async fn within_time(&self, port: u32, line: String, buffer: usize) -> Result<GuestStream, VsockError> {
        match tokio::time::timeout(CONNECT, self.handshake(port, &line, buffer)).await {
            Ok(result) => result,
            Err(_) => Err(VsockError::Timeout { port }),
        }
    }

    async fn handshake(&self, port: u32, line: &str, buffer: usize) -> Result<GuestStream, VsockError> {
        let mut stream = BufReader::with_capacity(buffer, UnixStream::connect(&self.path).await?);
        stream.write_all(line.as_bytes()).await?;
        let mut answer = Vec::new();
        (&mut stream).take(LONGEST_ANSWER).read_until(b'\n', &mut answer).await?;
        if answer.starts_with(b"OK ") {
            return Ok(stream);
        }
        Err(VsockError::Refused { port, answer: String::from_utf8_lossy(&answer).trim_end().to_owned() })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tokio::net::UnixListener;

    use super::*;

    /// The VMM's part of a connection, which is asked for by this `line`.
    pub(crate) async fn accept(listener: &UnixListener, line: &str) -> UnixStream {
        let (stream, _) = listener.accept().await.unwrap();
        // A buffer of one byte takes nothing of what follows the line.
        let mut reader = BufReader::with_capacity(1, stream);
        let mut asked = String::new();
        reader.read_line(&mut asked).await.unwrap();
        assert_eq!(asked, line);
        let mut stream = reader.into_inner();
        stream.write_all(b"OK 7000\n").await.unwrap();
        stream
    }

    #[tokio::test]
    async fn the_handshake_takes_no_byte_of_what_follows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let guest = async {
            let mut stream = accept(&listener, "CONNECT 1025\n").await;
            stream.write_all(b"hello").await.unwrap();
        };
        let (mut connection, ()) =
            tokio::join!(async { Vsock::new(path).connect(1025).await.unwrap() }, guest);
        let mut text = String::new();
        connection.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "hello");
    }

    #[tokio::test]
    async fn a_refused_port_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let vsock = Vsock::new(path);
        let (connection, accepted) = tokio::join!(vsock.connect(1024), async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_exact(&mut [0; 13]).await.unwrap();
        });
        let () = accepted;
        assert_eq!(connection.unwrap_err().to_string(), "the VMM refuses vsock port 1024 (it answers \"\")");
    }

    #[test]
    fn ids_of_streams_begin_again_before_they_are_the_vmms() {
        let vsock = Vsock::new("vsock.sock".into());
        assert_eq!((vsock.stream_ids(3), vsock.stream_ids(3)), (1, 4));
        vsock.next_stream.store(FIRST_HOST_PORT - 6, Ordering::Relaxed);
        assert_eq!((vsock.stream_ids(3), vsock.stream_ids(3)), (FIRST_HOST_PORT - 6, 1));
    }
}
