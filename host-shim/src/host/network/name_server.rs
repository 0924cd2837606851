//! docker's name server, which listens at 127.0.0.11 in the pod's network namespace on the host.
//!
//! It may listen on any port. docker adds rules to the namespace that redirect port 53 to it. The guest's agent sends
//! what containers ask ([`bulkhead_agent_api::name_server`]), and gets the answers. A guest can reach nothing else by
//! this.

use std::{
    fs::{self, File},
    io,
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::Duration,
};

use bulkhead_agent_api::{
    name_server::{ADDRESS, MAX_ANSWER, MAX_QUESTION, MAX_QUESTIONS, Message, read_bytes, with_length},
    nftables::Protocol,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, split},
    net::{TcpStream, UdpSocket},
    sync::{mpsc, oneshot},
    task::AbortHandle,
    time::timeout,
};

use super::{NetworkError, failed, inside, netns};
use crate::{
    host::{blocking::STACK, process_id::ProcessId},
    types::{error::chain, pace::Pace},
};

/// How long an answer is waited for. docker gives up after 4 s for each of the servers that it asks.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// A guest may ask [`MAX_QUESTIONS`] in each of these times.
const WINDOW: Duration = Duration::from_millis(100);

/// Asks what the guest asks, on a thread of its own, until the stream ends or this is dropped.
#[derive(Debug)]
pub(crate) struct NameServer(
    #[expect(dead_code, reason = "dropping it ends the thread")] oneshot::Sender<()>,
);

impl NameServer {
    /// Asks in the network namespace of the process `vmm`.
    pub(crate) fn start(
        vmm: ProcessId,
        stream: impl AsyncRead + AsyncWrite + Send + 'static,
    ) -> Result<Self, NetworkError> {
        let netns = inside(vmm)?;
        let (end, ended) = oneshot::channel();
        let work = move || {
            if let Err(error) = serve(netns, stream, ended) {
                tracing::info!(
                    error = chain(&error),
                    "the guest is not told any more what docker's name server says"
                );
            }
        };
        // A socket belongs to the namespace of the thread that makes it.
        let thread = thread::Builder::new().name("name-server".into()).stack_size(STACK).spawn(work);
        thread.map_err(failed("starting a thread"))?;
        Ok(Self(end))
    }
}

/// Whether docker's name server listens in this thread's network namespace.
pub(super) fn listens_here() -> io::Result<bool> {
    // The second word of each line is the local address of a socket, as the kernel has it in memory, and its port.
    let sockets = fs::read_to_string("/proc/thread-self/net/udp")?;
    let address = format!("{:08X}:", u32::from_ne_bytes(ADDRESS.ip().octets()));
    let is_its = |line: &str| line.split_whitespace().nth(1).is_some_and(|local| local.starts_with(&address));
    Ok(sockets.lines().any(is_its))
}

fn serve(
    netns: File,
    stream: impl AsyncRead + AsyncWrite,
    ended: oneshot::Receiver<()>,
) -> Result<(), NetworkError> {
    netns::enter(&netns)?;
    drop(netns);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(failed("starting a runtime"))?.block_on(async {
        tokio::select! {
            relayed = relay(stream) => relayed.map_err(failed("asking docker's name server")),
            _ = ended => Ok(()),
        }
    })
}

/// Asks what comes on the stream, and sends the answers. Ends with the stream.
async fn relay(stream: impl AsyncRead + AsyncWrite) -> io::Result<()> {
    let (mut reader, mut writer) = split(stream);
    let (answering, mut answers) = mpsc::channel::<Message>(1);
    let read = async {
        let mut asked: Vec<Option<AbortHandle>> = vec![None; MAX_QUESTIONS];
        let mut pace = Pace::new(MAX_QUESTIONS as u32, WINDOW);
        loop {
            let question = match Message::read(&mut reader, MAX_QUESTION).await {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            };
            pace.turn().await;
            let place = question.number as usize % MAX_QUESTIONS;
            let answering = answering.clone();
            let asking = tokio::spawn(async move {
                // If this fails, all of it ends.
                _ = answering.send(ask(question).await).await;
            });
            // The agent expects no answer to the one that was there.
            if let Some(oldest) = asked.get_mut(place).and_then(|place| place.replace(asking.abort_handle()))
            {
                oldest.abort();
            }
        }
    };
    let write = async {
        while let Some(answer) = answers.recv().await {
            answer.write(&mut writer).await?;
        }
        Ok(())
    };
    tokio::select! {
        ended = read => ended,
        ended = write => ended,
    }
}

/// The answer. If there is none, it is empty.
async fn ask(Message { number, protocol, bytes }: Message) -> Message {
    let answer = timeout(PATIENCE, async {
        match protocol {
            Protocol::Udp => ask_by_udp(&bytes).await,
            Protocol::Tcp => ask_by_tcp(&bytes).await,
        }
    });
    let bytes = answer.await.ok().and_then(Result::ok).unwrap_or_default();
    Message { number, protocol, bytes }
}

/// Each question has a socket of its own. So no answer is taken for another one's, and after a restart of dockerd the
/// kernel does not go on with the rules of before.
async fn ask_by_udp(question: &[u8]) -> io::Result<Vec<u8>> {
    let socket = UdpSocket::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))).await?;
    socket.connect(SocketAddr::from(ADDRESS)).await?;
    socket.send(question).await?;
    socket.readable().await?;
    let mut answer = Vec::with_capacity(MAX_ANSWER);
    socket.recv_buf(&mut answer).await?;
    answer.shrink_to_fit();
    Ok(answer)
}

async fn ask_by_tcp(question: &[u8]) -> io::Result<Vec<u8>> {
    let mut connection = TcpStream::connect(SocketAddr::from(ADDRESS)).await?;
    connection.write_all(&with_length(question)?).await?;
    read_bytes(&mut connection, MAX_ANSWER).await
}
