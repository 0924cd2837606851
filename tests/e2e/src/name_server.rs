//! A name server of the tests' own, which knows a few names.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};

/// A name that it knows, and its address.
pub(crate) const KNOWN: &str = "known.e2e.test";
pub(crate) const ADDRESS: [u8; 4] = [192, 0, 2, 7];

/// A name whose answer is too long for UDP: [`LINES`] texts of 200 bytes.
pub(crate) const LONG: &str = "long.e2e.test";
const LINES: u16 = 20;

const PORT: u16 = 53;

/// How often it looks whether it is to end.
const PAUSE: Duration = Duration::from_millis(50);

/// Types of records (RFC 1035, 3.2.2).
const A: [u8; 2] = [0, 1];
const TXT: [u8; 2] = [0, 16];

/// Serves until it is dropped.
pub(crate) struct NameServer {
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl NameServer {
    /// Serves at this address, in this thread's network namespace.
    pub(crate) fn start(address: &str) -> Result<Self> {
        let failed = || format!("cannot serve names at {address}");
        let udp = UdpSocket::bind((address, PORT)).with_context(failed)?;
        let tcp = TcpListener::bind((address, PORT)).with_context(failed)?;
        udp.set_read_timeout(Some(PAUSE))?;
        tcp.set_nonblocking(true)?;
        let ended = Arc::new(AtomicBool::new(false));
        let (of_udp, of_tcp) = (Arc::clone(&ended), Arc::clone(&ended));
        let threads = vec![
            thread::spawn(move || serve_udp(&udp, &of_udp)),
            thread::spawn(move || serve_tcp(&tcp, &of_tcp)),
        ];
        Ok(Self { ended, threads })
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve_udp(socket: &UdpSocket, ended: &AtomicBool) {
    let mut buffer = [0; 4096];
    while !ended.load(Ordering::Relaxed) {
        if let Ok((length, asker)) = socket.recv_from(&mut buffer)
            && let Some(answer) = answer(&buffer[..length], false)
        {
            let _: Result<usize, _> = socket.send_to(&answer, asker);
        }
    }
}

fn serve_tcp(listener: &TcpListener, ended: &AtomicBool) {
    while !ended.load(Ordering::Relaxed) {
        match listener.accept() {
            // An error is the client's, which says so.
            Ok((connection, _)) => _ = serve_connection(connection),
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PAUSE),
            Err(_) => return,
        }
    }
}

fn serve_connection(mut connection: TcpStream) -> std::io::Result<()> {
    connection.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut length = [0; 2];
    connection.read_exact(&mut length)?;
    let mut question = vec![0; u16::from_be_bytes(length).into()];
    connection.read_exact(&mut question)?;
    let answer = answer(&question, true).unwrap_or_default();
    connection.write_all(&[&(answer.len() as u16).to_be_bytes()[..], &answer].concat())
}

/// The question for a record of this type, in the form that goes over UDP.
pub(crate) fn question(name: &str, kind: [u8; 2]) -> Vec<u8> {
    // A number, "recursion desired", and one question.
    let mut question = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        question.push(label.len() as u8);
        question.extend(label.as_bytes());
    }
    // The root, the type, and the class of the internet.
    question.push(0);
    question.extend(kind);
    question.extend([0, 1]);
    question
}

/// [`LONG`]'s question over TCP.
pub(crate) fn long_question() -> Vec<u8> {
    let question = question(LONG, TXT);
    [&(question.len() as u16).to_be_bytes()[..], &question].concat()
}

/// How long its answer is, at least.
pub(crate) const LONG_ANSWER: u64 = LINES as u64 * 200;

/// None: this is no question.
fn answer(question: &[u8], is_tcp: bool) -> Option<Vec<u8>> {
    let mut name = Vec::new();
    let mut rest = question.get(12..)?;
    loop {
        let (length, after) = rest.split_first()?;
        let (label, after) = after.split_at_checked(usize::from(*length))?;
        rest = after;
        if label.is_empty() {
            break;
        }
        name.push(String::from_utf8_lossy(label).to_lowercase());
    }
    let kind: [u8; 2] = rest.get(..2)?.try_into().ok()?;
    let asked = &question[12..question.len() - rest.len() + 4];
    let (code, truncated, records) = match name.join(".").as_str() {
        KNOWN if kind == A => (0, 0, record(A, &ADDRESS)),
        KNOWN => (0, 0, Vec::new()),
        LONG if is_tcp => (0, 0, record(TXT, &[&[200], &[b'x'; 200][..]].concat()).repeat(LINES.into())),
        LONG => (0, 2, Vec::new()),
        // There is no such name.
        _ => (3, 0, Vec::new()),
    };
    let count = match records.len() {
        0 => 0_u16,
        _ if kind == TXT => LINES,
        _ => 1,
    };
    // An answer, with recursion.
    let head = [question[0], question[1], 0x81 | truncated, 0x80 | code, 0, 1];
    Some([&head[..], &count.to_be_bytes(), &[0; 4], asked, &records].concat())
}

/// A record of the name that was asked for. It is valid for a second.
fn record(kind: [u8; 2], data: &[u8]) -> Vec<u8> {
    [&[0xc0, 12][..], &kind, &[0, 1, 0, 0, 0, 1], &(data.len() as u16).to_be_bytes(), data].concat()
}

/// The address of [`ADDRESS`] as text.
pub(crate) fn known_address() -> String {
    SocketAddr::from((ADDRESS, 0)).ip().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_answers_what_it_was_asked() {
        let known = answer(&question(KNOWN, A), false).unwrap();
        assert_eq!(known[..8], [0x12, 0x34, 0x81, 0x80, 0, 1, 0, 1]);
        assert!(known.ends_with(&ADDRESS));
        let truncated = answer(&question(LONG, TXT), false).unwrap();
        assert_eq!((truncated[2] & 2, truncated.len()), (2, question(LONG, TXT).len()));
        assert!(answer(&question(LONG, TXT), true).unwrap().len() as u64 > LONG_ANSWER);
        assert_eq!(answer(&question("other", A), false).unwrap()[3] & 15, 3);
        assert!(answer(b"short", false).is_none());
    }
}
