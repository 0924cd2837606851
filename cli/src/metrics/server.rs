//! An HTTP server for one text (RFC 9112). It reads the first line of a request and ignores its other headers. There
//! are no secrets in the text: whoever may connect may read it.

use std::{
    fs, io,
    os::unix::{fs::FileTypeExt, net::UnixStream as Probe},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use bulkhead_host_shim::operator::{Sampler, chain};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, sink},
    net::{TcpListener, UnixListener},
    signal::unix::{SignalKind, signal},
    sync::{Mutex, Semaphore},
    task::{spawn, spawn_blocking},
    time::{sleep, timeout},
};

use crate::metrics::exposition;

/// The most clients at the same time. Others wait until one of them has ended.
const MOST_CLIENTS: usize = 16;

/// How long a client may take to send its request.
const REQUEST: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

/// How long a client may take, from the connection to the end of the answer. Prometheus waits for 10 s unless it is
/// told otherwise.
const CLIENT: Duration = Duration::from_secs(15);

/// How long a client may take to close its connection after the answer, and the most that it may send meanwhile. If
/// the connection were closed at once, what the client has sent beyond its request would cost it the answer.
const LINGER: Duration = Duration::from_secs(1);
const MOST_MORE: u64 = 1 << 20;

/// A text that is younger is given again: a look at hundreds of pods costs processor time, and any user may ask.
const FRESH: Duration = Duration::from_secs(1);

/// The pause after a client could not be accepted, because there is no free descriptor.
const PAUSE: Duration = Duration::from_millis(100);

/// The longest request that is read, without its body.
const LONGEST_REQUEST: usize = 8 << 10;

/// What accepts clients.
pub(super) trait Listener {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// The next client.
    async fn client(&self) -> io::Result<Self::Stream>;
}

impl Listener for TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn client(&self) -> io::Result<Self::Stream> {
        Ok(self.accept().await?.0)
    }
}

impl Listener for UnixListener {
    type Stream = tokio::net::UnixStream;

    async fn client(&self) -> io::Result<Self::Stream> {
        Ok(self.accept().await?.0)
    }
}

/// A Unix socket that is removed with this value.
#[derive(Debug)]
pub(super) struct Socket(PathBuf);

impl Socket {
    /// Removes a socket that an earlier command has left. One that somebody serves is an error.
    pub(super) fn reserve(path: &Path) -> io::Result<Self> {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Ok(metadata) if metadata.file_type().is_socket() => match Probe::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)?,
                _ => return Err(io::ErrorKind::AddrInUse.into()),
            },
            Ok(_) => return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is not a socket")),
            Err(error) => return Err(error),
        }
        Ok(Self(path.into()))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Somebody has removed it already, or it was never made.
        drop(fs::remove_file(&self.0));
    }
}

/// Serves until a signal comes.
pub(super) async fn serve(listener: impl Listener, root: &Path) -> io::Result<()> {
    let (mut end, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let clients = Arc::new(Semaphore::new(MOST_CLIENTS));
    let source = Arc::new(Source { root: root.into(), sampler: Sampler::default(), last: Mutex::default() });
    let accepting = async {
        loop {
            let Ok(place) = Arc::clone(&clients).acquire_owned().await else { return };
            let Ok(stream) = listener.client().await else {
                sleep(PAUSE).await;
                continue;
            };
            let source = Arc::clone(&source);
            spawn(async move {
                // A client that is slow, or speaks no HTTP, has no answer.
                _ = timeout(CLIENT, answer(stream, source)).await;
                drop(place);
            });
        }
    };
    tokio::select! {
        () = accepting => {}
        _ = end.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Where the metrics come from.
struct Source {
    root: PathBuf,
    sampler: Sampler,
    /// The last text, and when the look at the pods began. Locked while the pods are looked at.
    last: Mutex<Option<(Instant, Arc<str>)>>,
}

impl Source {
    /// What the pods use now, or have used a moment ago. Clients that come while the pods are looked at wait for
    /// one more look together.
    async fn text(&self) -> io::Result<Arc<str>> {
        let asked = Instant::now();
        let mut last = self.last.lock().await;
        if let Some((begun, text)) = &*last
            && *begun + FRESH >= asked
        {
            return Ok(Arc::clone(text));
        }
        let (sampler, root, begun) = (self.sampler.clone(), self.root.clone(), Instant::now());
        let look = move || io::Result::Ok(exposition::text(&sampler.sample(&root)?));
        let text: Arc<str> = spawn_blocking(look).await??.into();
        *last = Some((begun, Arc::clone(&text)));
        Ok(text)
    }
}

/// What a client is told.
struct Response {
    status: &'static str,
    /// A further header.
    header: &'static str,
    kind: &'static str,
    body: Arc<str>,
}

impl Response {
    fn of(status: &'static str, body: impl Into<Arc<str>>) -> Self {
        Self { status, header: "", kind: "text/plain; charset=utf-8", body: body.into() }
    }
}

/// Answers one request, and closes the connection.
async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin, source: Arc<Source>) -> io::Result<()> {
    let line = timeout(REQUEST, request_line(&mut stream)).await??;
    let mut words = line.as_deref().unwrap_or_default().split(' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let path = target.map(|target| target.split_once('?').map_or(target, |(path, _)| path));
    let is_http = version.is_some_and(|version| version.starts_with("HTTP/1.")) && words.next().is_none();
    let response = match (method, path) {
        _ if line.is_none() => {
            Response::of("431 Request Header Fields Too Large", "the request is too long\n")
        }
        _ if !is_http => Response::of("400 Bad Request", "this is not a request of HTTP/1\n"),
        // This client may be given up. The look at the pods is then finished nevertheless, before the next one begins.
        (Some("GET" | "HEAD"), Some("/metrics")) => match spawn(async move { source.text().await }).await? {
            Ok(text) => Response { kind: exposition::CONTENT_TYPE, ..Response::of("200 OK", text) },
            Err(error) => Response::of("500 Internal Server Error", format!("{}\n", chain(&error))),
        },
        (Some("GET" | "HEAD"), _) => Response::of("404 Not Found", "the metrics are at /metrics\n"),
        _ => {
            let refused = Response::of("405 Method Not Allowed", "only GET and HEAD are possible\n");
            Response { header: "Allow: GET, HEAD\r\n", ..refused }
        }
    };
    let Response { status, header, kind, body } = response;
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{header}Connection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    if method != Some("HEAD") {
        stream.write_all(body.as_bytes()).await?;
    }
    stream.shutdown().await?;
    _ = timeout(LINGER, copy(&mut stream.take(MOST_MORE), &mut sink())).await;
    Ok(())
}

/// The first line of a request, when all its headers have come. None: it is too long.
async fn request_line(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<String>> {
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if request.len() >= LONGEST_REQUEST {
            return Ok(None);
        }
        let mut chunk = [0; 1024];
        match stream.read(&mut chunk).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => request.extend_from_slice(chunk.get(..read).unwrap_or_default()),
        }
    }
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    Ok(Some(String::from_utf8_lossy(line).into_owned()))
}

#[cfg(test)]
mod tests {
    use std::future::Future;

    use tokio::net::TcpStream;

    use super::*;

    async fn served<T>(root: &Path, client: impl AsyncFnOnce(std::net::SocketAddr) -> T) -> T {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        within(async {
            tokio::select! {
                done = client(address) => done,
                served = serve(listener, root) => panic!("{served:?}"),
            }
        })
        .await
    }

    async fn within<T>(work: impl Future<Output = T>) -> T {
        timeout(Duration::from_secs(60), work).await.unwrap()
    }

    async fn asked(root: &Path, request: &str) -> String {
        served(root, async |address| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            text
        })
        .await
    }

    #[tokio::test]
    async fn metrics_are_served_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let request = |first: &str| format!("{first} HTTP/1.1\r\nHost: node\r\n\r\n");
        let text = asked(dir.path(), &request("GET /metrics?name[]=x")).await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{text}");
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{text}");
        assert!(body.starts_with("# HELP bulkhead_build_info "), "{text}");
        let text = asked(dir.path(), &request("HEAD /metrics")).await;
        assert!(text.starts_with(head) && text.ends_with("\r\n\r\n"), "{text}");
        for (first, status) in [
            ("GET /", "404 "),
            ("GET /metrics/../metrics", "404 "),
            ("POST /metrics", "405 "),
            ("GET", "400 "),
            ("GET /metrics extra", "400 "),
            ("", "400 "),
        ] {
            let text = asked(dir.path(), &request(first)).await;
            assert!(text.starts_with(&format!("HTTP/1.1 {status}")), "{first}: {text}");
        }
        let text = asked(dir.path(), &request(&format!("GET /{}", "x".repeat(2 * LONGEST_REQUEST)))).await;
        assert!(text.starts_with("HTTP/1.1 431 "), "{text}");
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let text = asked(&file, &request("GET /metrics")).await;
        assert!(text.starts_with("HTTP/1.1 500 "), "{text}");
    }

    #[tokio::test]
    async fn clients_that_say_nothing_keep_others_waiting_for_a_moment_only() {
        let dir = tempfile::tempdir().unwrap();
        served(dir.path(), async |address| {
            let mut silent = Vec::new();
            for _ in 0..MOST_CLIENTS + 4 {
                let mut stream = TcpStream::connect(address).await.unwrap();
                stream.write_all(b"GET /metrics HTTP/1.1\r\n").await.unwrap();
                silent.push(stream);
            }
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
            // The first ones were closed without an answer.
            let mut none = Vec::new();
            _ = silent[0].read_to_end(&mut none).await;
            assert!(none.is_empty());
        })
        .await;
    }

    #[test]
    fn only_a_socket_that_nobody_serves_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(Socket::reserve(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        let socket = Socket::reserve(&path).unwrap();
        assert!(!path.exists());
        let _again = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(socket);
        assert!(!path.exists());
        fs::write(&path, "").unwrap();
        assert_eq!(Socket::reserve(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
}
