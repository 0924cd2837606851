//! A collector of OpenTelemetry of the tests' own. It takes spans as containerd exports them: OTLP by HTTP, with
//! Protocol Buffers.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use prost::Message;

/// Where the tests' containerd 2 exports its spans to (containerd.rs), whether anything listens or not.
pub(crate) const ADDRESS: &str = "127.0.0.1:1";

/// How often it looks whether it is to end, and whether a span has come.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a client may pause in a request.
const SILENCE: Duration = Duration::from_secs(20);
/// The most that a request may have: its head, and its body.
const HEAD: usize = 16 << 10;
const BODY: usize = 16 << 20;
/// The most spans that are kept.
const SPANS: usize = 100_000;

/// A span that has ended. The ids are as W3C Trace Context writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) trace: String,
    pub(crate) id: String,
    /// Empty, if it has none.
    pub(crate) parent: String,
    pub(crate) name: String,
    /// The `service.name` of who exports it.
    pub(crate) service: String,
    /// Since 1970.
    pub(crate) begin_ns: u64,
    pub(crate) end_ns: u64,
}

/// What has come.
#[derive(Default)]
struct Come {
    spans: Vec<Span>,
    /// Why the last request that was refused was.
    refused: Option<String>,
}

/// Collects until it is dropped.
pub(crate) struct Collector {
    ended: Arc<AtomicBool>,
    come: Arc<Mutex<Come>>,
    thread: Option<JoinHandle<()>>,
}

impl Collector {
    /// Serves `/v1/traces` at this address.
    pub(crate) fn start(address: &str) -> Result<Self> {
        let failed = || format!("cannot collect spans at {address}");
        TcpListener::bind(address).and_then(Self::on).with_context(failed)
    }

    fn on(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (ended, come) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Come>>::default());
        let (of_thread, to) = (Arc::clone(&ended), Arc::clone(&come));
        let thread = thread::spawn(move || serve(&listener, &of_thread, &to));
        Ok(Self { ended, come, thread: Some(thread) })
    }

    /// Waits for something that is found among the spans.
    pub(crate) fn find<T>(
        &self,
        what: &str,
        limit: Duration,
        look: impl Fn(&[Span]) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            let come = lock(&self.come);
            if let Some(found) = look(&come.spans) {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                let (refused, spans) = (&come.refused, &come.spans);
                bail!("expected  {what}\ncame      {spans:?}, the last refused request: {refused:?}");
            }
            drop(come);
            thread::sleep(PAUSE);
        }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The span with this id, the one that it is a part of, and so on up to the first whose parent is not among them.
pub(crate) fn ancestry<'s>(spans: &'s [Span], trace: &str, id: &str) -> Vec<&'s Span> {
    let mut found: Vec<&Span> = Vec::new();
    let mut id = id;
    // A circle has no end, but not more spans than there are.
    while let Some(span) = spans.iter().find(|span| span.trace == trace && span.id == id) {
        if found.len() == spans.len() {
            break;
        }
        found.push(span);
        id = &span.parent;
    }
    found
}

fn lock(come: &Mutex<Come>) -> MutexGuard<'_, Come> {
    come.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One request after the other: there is one exporter.
fn serve(listener: &TcpListener, ended: &AtomicBool, come: &Mutex<Come>) {
    while !ended.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = answer(stream, come) {
                    lock(come).refused = Some(format!("{error:#}"));
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PAUSE),
            Err(error) => {
                lock(come).refused = Some(format!("it does not listen any more: {error}"));
                return;
            }
        }
    }
}

/// Takes the spans of one request.
fn answer(mut stream: TcpStream, come: &Mutex<Come>) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    // It is kept before the answer, so that who has the answer finds it.
    let kept = body(&mut stream).and_then(|body| keep(spans(&body)?, come));
    let status = if kept.is_ok() { "200 OK" } else { "400 Bad Request" };
    if let Err(error) = kept {
        lock(come).refused = Some(format!("{error:#}"));
    }
    // The client is to use a new connection for its next request.
    let head = "Content-Type: application/x-protobuf\r\nContent-Length: 0\r\nConnection: close";
    write!(stream, "HTTP/1.1 {status}\r\n{head}\r\n\r\n").context("no answer")
}

fn keep(spans: Vec<Span>, come: &Mutex<Come>) -> Result<()> {
    let mut come = lock(come);
    ensure!(come.spans.len() + spans.len() <= SPANS, "more than {SPANS} spans");
    come.spans.extend(spans);
    Ok(())
}

/// The body of a request with spans.
fn body(stream: &mut impl Read) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        ensure!(head.len() < HEAD, "a head of more than {HEAD} bytes");
        stream.read_exact(&mut byte).context("no whole head")?;
        head.extend(byte);
    }
    let head = String::from_utf8_lossy(&head).to_lowercase();
    let field = |name: &str| {
        head.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
    };
    let length = field("content-length").and_then(|length| length.parse().ok());
    let length: usize = length.with_context(|| format!("no length: {head}"))?;
    ensure!(length <= BODY, "a body of {length} bytes");
    // First the whole request: a connection that is closed before would be reset, with the answer.
    let mut body = vec![0; length];
    stream.read_exact(&mut body).context("no whole body")?;
    ensure!(head.starts_with("post /v1/traces http/1.1\r\n"), "no request with spans: {head}");
    ensure!(
        field("content-type").as_deref() == Some("application/x-protobuf"),
        "no Protocol Buffers: {head}"
    );
    ensure!(field("content-encoding").is_none(), "compressed: {head}");
    Ok(body)
}

/// The spans of a body.
fn spans(body: &[u8]) -> Result<Vec<Span>> {
    let message = TracesData::decode(body).context("no spans")?;
    let of_resource = |resource: ResourceSpans| {
        let attributes = resource.resource.map(|resource| resource.attributes).unwrap_or_default();
        let name = attributes.into_iter().find(|attribute| attribute.key == "service.name");
        let service = name.and_then(|name| name.value?.string_value).unwrap_or_default();
        let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
        spans.map(move |span| span.shown(&service)).collect::<Vec<_>>()
    };
    Ok(message.resource_spans.into_iter().flat_map(of_resource).collect())
}

/// The message of opentelemetry/proto/trace/v1/trace.proto that a body is, as far as it is read here.
#[derive(Clone, PartialEq, Message)]
struct TracesData {
    #[prost(message, repeated, tag = "1")]
    resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct AnyValue {
    #[prost(string, optional, tag = "1")]
    string_value: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct ScopeSpans {
    #[prost(message, repeated, tag = "2")]
    spans: Vec<ExportedSpan>,
}

#[derive(Clone, PartialEq, Message)]
struct ExportedSpan {
    #[prost(bytes = "vec", tag = "1")]
    trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    span_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    name: String,
    #[prost(fixed64, tag = "7")]
    start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    end_time_unix_nano: u64,
}

impl ExportedSpan {
    fn shown(self, service: &str) -> Span {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Span {
            trace: hex(&self.trace_id),
            id: hex(&self.span_id),
            parent: hex(&self.parent_span_id),
            name: self.name,
            service: service.to_owned(),
            begin_ns: self.start_time_unix_nano,
            end_ns: self.end_time_unix_nano,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Field `tag` of a message, with a length.
    fn field(tag: u8, bytes: &[u8]) -> Vec<u8> {
        [&[tag << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
    }

    /// A span as opentelemetry-proto encodes it, written by hand.
    fn encoded(id: u8, parent: u8, name: &str) -> Vec<u8> {
        let time = |tag: u8, nanos: u64| [&[tag << 3 | 1][..], &nanos.to_le_bytes()].concat();
        let span = [
            field(1, &[0xab; 16]),
            field(2, &[id; 8]),
            field(4, &[parent; 8]),
            field(5, name.as_bytes()),
            vec![6 << 3, 2],
            time(7, 1_000),
            time(8, 3_000),
        ]
        .concat();
        let name = [field(1, b"service.name"), field(2, &field(1, b"containerd"))].concat();
        let resource = field(1, &field(1, &name));
        let scope = field(2, &[field(1, &field(1, b"otelgrpc")), field(2, &span)].concat());
        field(1, &[resource, scope].concat())
    }

    /// What a collector answers to this.
    fn post(address: &str, head: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        let length = body.len();
        write!(stream, "POST {head}\r\nContent-Length: {length}\r\n\r\n").unwrap();
        stream.write_all(body).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn spans_come_by_http() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let collector = Collector::on(listener).unwrap();
        let head = "/v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf";
        for body in [encoded(2, 1, "RunPodSandbox"), encoded(3, 2, "Create")] {
            let answer = post(&address, head, &body);
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        }
        let limit = Duration::from_secs(20);
        let trace = "ab".repeat(16);
        let found = collector.find("two spans", limit, |spans| {
            let found = ancestry(spans, &trace, &"03".repeat(8));
            (found.len() == 2).then(|| found.into_iter().cloned().collect::<Vec<_>>())
        });
        let found = found.unwrap();
        assert_eq!(found[0].name, "Create");
        let whole = Span {
            trace,
            id: "02".repeat(8),
            parent: "01".repeat(8),
            name: "RunPodSandbox".into(),
            service: "containerd".into(),
            begin_ns: 1_000,
            end_ns: 3_000,
        };
        assert_eq!(found[1], whole);
        for (head, body) in [
            (head, &b"nonsense"[..]),
            ("/v1/metrics HTTP/1.1\r\nContent-Type: application/x-protobuf", b""),
            ("/v1/traces HTTP/1.1\r\nContent-Type: application/json", b"{}"),
            ("/v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\nContent-Encoding: gzip", b""),
        ] {
            let answer = post(&address, head, body);
            assert!(answer.starts_with("HTTP/1.1 400 "), "{head}: {answer}");
        }
        let none = collector.find("a third", Duration::ZERO, |spans| spans.get(2).cloned());
        assert!(none.unwrap_err().to_string().contains("compressed"));
    }

    #[test]
    fn a_circle_of_parents_ends() {
        let body = [encoded(1, 2, "a"), encoded(2, 1, "b")].concat();
        let spans = spans(&body).unwrap();
        assert_eq!(ancestry(&spans, &"ab".repeat(16), &"01".repeat(8)).len(), 2);
        assert_eq!(ancestry(&spans, &"cd".repeat(16), &"01".repeat(8)), [] as [&Span; 0]);
    }
}
