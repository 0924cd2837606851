//! docker's name server in the guest. The host's end of it listens in the pod's network namespace on the host.
//!
//! Containers ask 127.0.0.11:53. As on the host, rules of nftables lead there what is meant for this address: so a
//! program can still listen on port 53 of all addresses. The shim gets the questions on a stream, asks docker, and
//! sends the answers back ([`bulkhead_agent_api::name_server`]).

use std::{
    io,
    net::{SocketAddr, SocketAddrV4, TcpListener as StdTcpListener, UdpSocket as StdUdpSocket},
    os::fd::{BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bulkhead_agent_api::{
    name_server::{ADDRESS, MAX_ANSWER, MAX_QUESTION, MAX_QUESTIONS, Message, read_bytes, with_length},
    nftables::{self, Protocol, Redirect},
};
use nix::sched::{CloneFlags, setns};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, split},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::NetworkError;

/// The table of nftables.
const TABLE: &str = "bulkhead-name-server";

/// Connections at one time. More are closed.
const MAX_CONNECTIONS: usize = 64;

/// How long a connection may take to ask, or a question to be answered.
const PATIENCE: Duration = Duration::from_secs(15);

/// How long nothing is taken after an error, for example if there are no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Questions on their way to the stream. More wait in their sockets.
const WAITING: usize = 16;

/// What listens in a container's network namespace.
pub struct Sockets {
    udp: StdUdpSocket,
    tcp: StdTcpListener,
    /// The socket that owns the rules.
    _rules: OwnedFd,
}

impl Sockets {
    /// Listens in the network namespace of the process `pidfd`. Leaves this thread in that namespace.
    pub fn inside(pidfd: BorrowedFd<'_>) -> Result<Self, NetworkError> {
        setns(pidfd, CloneFlags::CLONE_NEWNET).map_err(|errno| NetworkError::Namespace(errno.into()))?;
        Self::new().map_err(NetworkError::NameServer)
    }

    fn new() -> io::Result<Self> {
        // Any port, as docker's are.
        let any = SocketAddrV4::new(*ADDRESS.ip(), 0);
        let (udp, tcp) = (StdUdpSocket::bind(any)?, StdTcpListener::bind(any)?);
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        let redirect = |protocol, to: SocketAddr| Redirect {
            protocol,
            address: (*ADDRESS.ip()).into(),
            port: Some(ADDRESS.port()),
            to: to.port(),
        };
        let redirects =
            [redirect(Protocol::Udp, udp.local_addr()?), redirect(Protocol::Tcp, tcp.local_addr()?)];
        Ok(Self { udp, tcp, _rules: nftables::redirect(TABLE, &redirects)? })
    }
}

/// Who has asked.
enum Asker {
    Datagram(SocketAddr),
    Connection(oneshot::Sender<Vec<u8>>),
}

/// Who waits for the answers to which questions. The numbers count up, so a question takes the place of the oldest one.
struct Asked(Mutex<Places>);

struct Places {
    next: u32,
    /// The number of a question and who has asked it, at the number modulo the length.
    taken: Vec<Option<(u32, Asker)>>,
}

impl Asked {
    fn new() -> Self {
        Self(Mutex::new(Places { next: 0, taken: (0..MAX_QUESTIONS).map(|_| None).collect() }))
    }

    /// The number of this asker's question.
    fn add(&self, asker: Asker) -> u32 {
        let mut places = self.lock();
        let number = places.next;
        places.next = number.wrapping_add(1);
        if let Some(place) = places.taken.get_mut(number as usize % MAX_QUESTIONS) {
            *place = Some((number, asker));
        }
        number
    }

    fn take(&self, number: u32) -> Option<Asker> {
        let mut places = self.lock();
        let place = places.taken.get_mut(number as usize % MAX_QUESTIONS)?;
        place.take_if(|(asked, _)| *asked == number).map(|(_, asker)| asker)
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves until the stream ends.
pub async fn serve(stream: impl AsyncRead + AsyncWrite + Send + Unpin, sockets: Sockets) -> io::Result<()> {
    let (udp, tcp) = (UdpSocket::from_std(sockets.udp)?, TcpListener::from_std(sockets.tcp)?);
    let (reader, writer) = split(stream);
    let (asking, questions) = mpsc::channel(WAITING);
    let asked = Arc::new(Asked::new());
    tokio::select! {
        ended = send_questions(questions, writer) => ended,
        ended = read_answers(reader, &asked, &udp) => ended,
        ended = take_datagrams(&udp, &asked, asking.clone()) => ended,
        () = accept_connections(&tcp, &asked, asking) => Ok(()),
    }
}

async fn send_questions(
    mut questions: mpsc::Receiver<Message>,
    mut stream: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    while let Some(question) = questions.recv().await {
        question.write(&mut stream).await?;
    }
    Ok(())
}

async fn read_answers(mut stream: impl AsyncRead + Unpin, asked: &Asked, udp: &UdpSocket) -> io::Result<()> {
    loop {
        let Message { number, bytes, .. } = Message::read(&mut stream, MAX_ANSWER).await?;
        match asked.take(number) {
            // If it cannot be sent, whoever has asked is gone or asks again.
            Some(Asker::Datagram(asker)) if !bytes.is_empty() => _ = udp.send_to(&bytes, asker).await,
            Some(Asker::Connection(asker)) => _ = asker.send(bytes),
            _ => {}
        }
    }
}

async fn take_datagrams(udp: &UdpSocket, asked: &Asked, asking: mpsc::Sender<Message>) -> io::Result<()> {
    // One byte more than a question has, so that a longer one is not taken for one.
    let mut buffer = vec![0; MAX_QUESTION + 1];
    loop {
        let Ok((length, asker)) = udp.recv_from(&mut buffer).await else {
            sleep(PAUSE).await;
            continue;
        };
        if length > MAX_QUESTION {
            continue;
        }
        let number = asked.add(Asker::Datagram(asker));
        let bytes = buffer[..length].to_vec();
        let sent = asking.send(Message { number, protocol: Protocol::Udp, bytes }).await;
        sent.map_err(|_| io::ErrorKind::BrokenPipe)?;
    }
}

async fn accept_connections(tcp: &TcpListener, asked: &Arc<Asked>, asking: mpsc::Sender<Message>) {
    // They end with this function.
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = tcp.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((connection, _)) if connections.len() < MAX_CONNECTIONS => {
                let (asked, asking) = (Arc::clone(asked), asking.clone());
                // An error is that of the connection, which ends.
                connections.spawn(async move { answer_connection(connection, &asked, &asking).await });
            }
            Ok(_) => {}
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Answers one question after the other, as docker does.
async fn answer_connection(
    mut connection: TcpStream,
    asked: &Asked,
    asking: &mpsc::Sender<Message>,
) -> io::Result<()> {
    loop {
        let bytes = timeout(PATIENCE, read_bytes(&mut connection, MAX_QUESTION)).await??;
        let (asker, answer) = oneshot::channel();
        let number = asked.add(Asker::Connection(asker));
        let sent = asking.send(Message { number, protocol: Protocol::Tcp, bytes }).await;
        sent.map_err(|_| io::ErrorKind::BrokenPipe)?;
        let answer = timeout(PATIENCE, answer).await?.map_err(|_| io::ErrorKind::TimedOut)?;
        if answer.is_empty() {
            return Ok(());
        }
        timeout(PATIENCE, connection.write_all(&with_length(&answer)?)).await??;
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use bulkhead_agent_api::name_server::MAX_ANSWER;
    use nix::sched::unshare;
    use tokio::io::{AsyncReadExt, DuplexStream};

    use super::*;
    use crate::syscall;

    /// Does this in a network namespace of its own, where the name server is served. The stream's other end is the
    /// shim's.
    fn apart<F: Future<Output = ()>>(work: impl FnOnce(DuplexStream) -> F + Send) {
        let work = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("these tests make network namespaces: run them as root");
            syscall::loopback_up().unwrap();
            let sockets = Sockets::new().unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (shim, guest) = tokio::io::duplex(1 << 20);
                let served = tokio::spawn(serve(guest, sockets));
                work(shim).await;
                assert!(served.await.unwrap().is_err(), "the end of the stream ends all");
            });
        };
        thread::scope(|scope| scope.spawn(work).join().unwrap());
    }

    async fn asked(shim: &mut DuplexStream) -> Message {
        timeout(PATIENCE, Message::read(shim, MAX_QUESTION)).await.unwrap().unwrap()
    }

    async fn answer(shim: &mut DuplexStream, question: &Message, bytes: &[u8]) {
        let answer = Message { bytes: bytes.to_vec(), ..question.clone() };
        answer.write(shim).await.unwrap();
    }

    async fn client() -> UdpSocket {
        let client = UdpSocket::bind("0.0.0.0:0").await.unwrap();
        client.connect(SocketAddr::from(ADDRESS)).await.unwrap();
        client
    }

    async fn received(client: &UdpSocket) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(MAX_ANSWER);
        timeout(PATIENCE, client.recv_buf(&mut bytes)).await.unwrap().unwrap();
        bytes
    }

    #[test]
    fn each_asker_gets_its_own_answer() {
        apart(async |mut shim| {
            let (one, other) = (client().await, client().await);
            one.send(b"one").await.unwrap();
            let first = asked(&mut shim).await;
            other.send(b"other").await.unwrap();
            let second = asked(&mut shim).await;
            assert_eq!((first.protocol, &first.bytes[..]), (Protocol::Udp, &b"one"[..]));
            answer(&mut shim, &second, b"to the other").await;
            answer(&mut shim, &first, b"to the one").await;
            // Once only, and to nobody else.
            answer(&mut shim, &first, b"again").await;
            answer(&mut shim, &Message { number: 77, ..first }, b"to nobody").await;
            assert_eq!(received(&other).await, b"to the other");
            assert_eq!(received(&one).await, b"to the one");
            assert!(one.try_recv(&mut [0]).is_err());
        });
    }

    #[test]
    fn a_connection_asks_as_often_as_it_likes_and_ends_without_an_answer() {
        apart(async |mut shim| {
            let mut client = TcpStream::connect(SocketAddr::from(ADDRESS)).await.unwrap();
            for length in [1, MAX_ANSWER] {
                client.write_all(&with_length(b"question").unwrap()).await.unwrap();
                let question = asked(&mut shim).await;
                assert_eq!((question.protocol, &question.bytes[..]), (Protocol::Tcp, &b"question"[..]));
                answer(&mut shim, &question, &vec![7; length]).await;
                assert_eq!(read_bytes(&mut client, MAX_ANSWER).await.unwrap(), vec![7; length]);
            }
            client.write_all(&with_length(b"question").unwrap()).await.unwrap();
            let question = asked(&mut shim).await;
            answer(&mut shim, &question, b"").await;
            assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        });
    }

    #[test]
    fn port_53_of_all_addresses_is_a_programs() {
        apart(async |mut shim| {
            let own = UdpSocket::bind("0.0.0.0:53").await.unwrap();
            let _own = TcpListener::bind("0.0.0.0:53").await.unwrap();
            let client = client().await;
            client.send(b"of docker").await.unwrap();
            assert_eq!(asked(&mut shim).await.bytes, b"of docker");
            client.send_to(b"of the program", "127.0.0.1:53").await.unwrap();
            assert_eq!(received(&own).await, b"of the program");
        });
    }

    #[test]
    fn the_oldest_question_gives_way() {
        let asked = Asked::new();
        let datagram = |port| Asker::Datagram(SocketAddrV4::new(*ADDRESS.ip(), port).into());
        let first = asked.add(datagram(1));
        let second = asked.add(datagram(2));
        for port in 2..=MAX_QUESTIONS as u16 {
            asked.add(datagram(port));
        }
        assert!(asked.take(first).is_none());
        assert!(asked.take(second).is_some());
        assert!(asked.take(second).is_none());
    }
}
