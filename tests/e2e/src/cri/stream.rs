//! The streams of an Exec or Attach: a WebSocket to containerd's streaming server, which speaks `v4.channel.k8s.io`
//! (k8s.io/kubelet, cri/streaming): the first byte of a message names the stream that the rest belongs to.

use std::io::ErrorKind;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use tungstenite::client::IntoClientRequest;
use tungstenite::http::HeaderValue;
use tungstenite::{Error, Message, WebSocket};

use crate::command::{Finished, contains};

const PROTOCOL: &str = "v4.channel.k8s.io";

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
/// Brings the outcome as a JSON `Status` of Kubernetes when all is over.
const OUTCOME: u8 = 3;
const RESIZE: u8 = 4;

/// An open connection to a process's streams.
pub(crate) struct Stream {
    socket: WebSocket<TcpStream>,
    what: String,
    started: Instant,
    limit: Duration,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    outcome: Vec<u8>,
}

fn connect(url: &str, limit: Duration) -> Result<WebSocket<TcpStream>> {
    let mut request = url.replacen("http", "ws", 1).into_client_request()?;
    request.headers_mut().insert("Sec-WebSocket-Protocol", HeaderValue::from_static(PROTOCOL));
    let authority = request.uri().authority().context("no host in the URL")?.as_str().to_owned();
    let tcp = TcpStream::connect(authority)?;
    tcp.set_read_timeout(Some(limit))?;
    let (socket, _) = tungstenite::client(request, tcp).map_err(|error| anyhow!("{error}"))?;
    Ok(socket)
}

/// What came back from a forwarded port.
#[derive(Debug, PartialEq)]
pub(crate) struct Forwarded {
    pub(crate) data: Vec<u8>,
    /// Why the port was not reached.
    pub(crate) error: String,
}

impl Forwarded {
    /// Sends `bytes` to the port of the URL that answered PortForward, and reads until the end.
    pub(crate) fn exchange(url: &str, port: u16, bytes: &[u8], limit: Duration) -> Result<Self> {
        const DATA: u8 = 0;
        const ERROR: u8 = 1;
        /// Each channel begins with the port's number.
        const NUMBER: usize = 2;
        let url = format!("{url}?port={port}");
        let mut socket = connect(&url, limit).with_context(|| format!("cannot open {url}"))?;
        for part in bytes.chunks(16 << 10) {
            socket.send(Message::binary([&[DATA], part].concat())).context("cannot write to a port")?;
        }
        let (mut data, mut error) = (Vec::new(), Vec::new());
        loop {
            let message = match socket.read() {
                Ok(Message::Binary(message)) => message,
                Ok(Message::Close(_)) | Err(Error::ConnectionClosed | Error::AlreadyClosed) => break,
                Ok(_) => continue,
                Err(error) => return Err(error).context("cannot read from a port"),
            };
            match message.split_first() {
                Some((&DATA, bytes)) => data.extend_from_slice(bytes),
                Some((&ERROR, bytes)) => error.extend_from_slice(bytes),
                other => bail!("expected  a message of a port\ncame      {other:?}"),
            }
        }
        data.drain(..NUMBER.min(data.len()));
        error.drain(..NUMBER.min(error.len()));
        Ok(Self { data, error: String::from_utf8_lossy(&error).into_owned() })
    }
}

impl Stream {
    /// Connects to the URL that answered Exec or Attach. All that it is used for may take as long as `limit`.
    pub(crate) fn open(url: &str, what: &str, limit: Duration) -> Result<Self> {
        let started = Instant::now();
        let socket =
            connect(url, limit).with_context(|| format!("cannot open the streams of {what} at {url}"))?;
        let what = what.to_owned();
        Ok(Self { socket, what, started, limit, stdout: Vec::new(), stderr: Vec::new(), outcome: Vec::new() })
    }

    /// Writes to the process's standard input.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.send(STDIN, bytes)
    }

    /// Gives the process's terminal this size.
    pub(crate) fn resize(&mut self, columns: u16, rows: u16) -> Result<()> {
        self.send(RESIZE, format!(r#"{{"Width":{columns},"Height":{rows}}}"#).as_bytes())
    }

    fn send(&mut self, stream: u8, bytes: &[u8]) -> Result<()> {
        let message = [&[stream], bytes].concat();
        self.socket.send(Message::binary(message)).with_context(|| format!("cannot write to {}", self.what))
    }

    /// Waits until the standard output contains `text`.
    pub(crate) fn wait_for(&mut self, text: &str) -> Result<()> {
        while !contains(&self.stdout, text) {
            if !self.receive()? {
                bail!("expected  {text:?} from {}\ncame      {:?} and the end", self.what, self.shown());
            }
        }
        Ok(())
    }

    /// Waits for the end of the streams. The exit status is that of the process.
    pub(crate) fn finish(mut self) -> Result<Finished> {
        while self.receive()? {}
        let status = self.exit_status()?;
        Ok(Finished {
            command: self.what,
            status: Some(status),
            stdout: self.stdout,
            stderr: self.stderr,
            took: self.started.elapsed(),
        })
    }

    fn exit_status(&self) -> Result<i32> {
        let shown = String::from_utf8_lossy(&self.outcome);
        let outcome: Value = serde_json::from_slice(&self.outcome)
            .with_context(|| format!("the outcome of {} is {shown:?}", self.what))?;
        if outcome.get("status").and_then(Value::as_str) == Some("Success") {
            return Ok(0);
        }
        let cause = outcome.pointer("/details/causes/0/message").and_then(Value::as_str);
        cause
            .and_then(|status| status.parse().ok())
            .with_context(|| format!("no exit status of {} in {shown}", self.what))
    }

    /// Takes in one message; false when there are no more.
    fn receive(&mut self) -> Result<bool> {
        let left = self.limit.saturating_sub(self.started.elapsed()).max(Duration::from_millis(1));
        self.socket.get_ref().set_read_timeout(Some(left)).context("cannot set a time limit")?;
        let message = match self.socket.read() {
            Ok(Message::Binary(message)) => message,
            Ok(Message::Close(_)) | Err(Error::ConnectionClosed | Error::AlreadyClosed) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Error::Io(error)) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                bail!(
                    "expected  more from {} within {} s\ncame      {:?} so far",
                    self.what,
                    self.limit.as_secs(),
                    self.shown()
                )
            }
            Err(error) => return Err(error).with_context(|| format!("the streams of {} broke", self.what)),
        };
        match message.split_first() {
            Some((&STDOUT, bytes)) => self.stdout.extend_from_slice(bytes),
            Some((&STDERR, bytes)) => self.stderr.extend_from_slice(bytes),
            Some((&OUTCOME, bytes)) => self.outcome.extend_from_slice(bytes),
            Some((stream, _)) => bail!("{} has no stream {stream}", self.what),
            None => {}
        }
        Ok(true)
    }

    fn shown(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}
