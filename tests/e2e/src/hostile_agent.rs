//! A guest whose first process is no agent: it says that it is ready, as the agent does, and then answers its shim what
//! no agent would. This very program is that process: `cargo xtask` puts it into an initramfs of its own.

use std::io::{Read, Write};
use std::thread;

use anyhow::{Context, Result};
use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockListener, VsockStream};

use crate::agent::{API_VERSION, READY_PORT, RPC_PORT, STREAM_PORT};
use crate::command::contains;
use crate::fixtures::noise;

/// Where it is in its initramfs: what the kernel starts there.
pub(crate) const INIT: &str = "/init";
/// The initramfs, beside this program where it is installed.
pub(crate) const INITRAMFS: &str = "hostile-agent.cpio";

/// Ports of the host that it tries to reach beside the one for its first word.
const OTHER_PORTS: std::ops::Range<u32> = 1..64;

/// Makes what is sent of the request that came.
type Answer = fn(&[u8]) -> Vec<u8>;

/// What it answers to the first request, which names its pod: the one whose name is in there.
pub(crate) const ANSWERS: [(&str, Answer); 5] = [
    // To a request that was never made, besides.
    ("unasked", |asked| {
        [frame(stream(asked), RESPONSE, &[]), frame([0, 0, 0xff, 1], RESPONSE, &[])].concat()
    }),
    ("unknown", |asked| frame(stream(asked), 0x7f, &[])),
    ("endless", |asked| {
        let mut header = frame(stream(asked), RESPONSE, &[]);
        header[..4].copy_from_slice(&u32::MAX.to_be_bytes());
        [header, noise(1 << 20)].concat()
    }),
    ("garbled", |asked| frame(stream(asked), RESPONSE, &noise(512))),
    ("closing", |_| Vec::new()),
];

/// In the name of a pod whose agent does as it is told, but tells of no end.
pub(crate) const OBEDIENT: &str = "obedient";
/// In the name of a pod whose agent does as it is told, up to the request whose name follows. Then it ends, or answers
/// no more.
pub(crate) const DIES: &str = "dies-at-";
pub(crate) const FREEZES: &str = "freezes-at-";
/// In the requests that are answered by the end of something.
const WAITING: &str = "WaitProcess";
/// The request for a signal to a process.
const SIGNAL: &str = "SignalProcess";
/// An answer whose payload, field 2, is a WaitProcessResponse with the exit status 137.
const KILLED: [u8; 5] = [0x12, 3, 0x08, 0x89, 0x01];

/// The type of an answer (ttrpc, PROTOCOL.md).
const RESPONSE: u8 = 2;

/// A frame of ttrpc: length of the message, stream, type, flags; then the message.
fn frame(stream: [u8; 4], kind: u8, message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u32).to_be_bytes();
    [&length[..], &stream, &[kind, 0], message].concat()
}

/// The stream of a request, to which its answer belongs.
fn stream(request: &[u8]) -> [u8; 4] {
    request.get(4..8).and_then(|bytes| bytes.try_into().ok()).unwrap_or_default()
}

/// Does so for ever.
pub(crate) fn serve() -> Result<()> {
    let listen = |port| VsockListener::bind_with_cid_port(VMADDR_CID_ANY, port).context("cannot listen");
    let listener = listen(RPC_PORT)?;
    // Whoever connects to this one waits for ever.
    let _streams = listen(STREAM_PORT)?;
    let mut ready = VsockStream::connect_with_cid_port(VMADDR_CID_HOST, READY_PORT).context("no host")?;
    ready.write_all(&API_VERSION.to_le_bytes())?;
    for port in OTHER_PORTS.chain([READY_PORT]) {
        thread::spawn(move || {
            // Where nobody listens, or nobody wants any more, that is the end of it.
            if let Ok(mut stream) = VsockStream::connect_with_cid_port(VMADDR_CID_HOST, port) {
                while stream.write_all(&noise(4096)).is_ok() {}
            }
        });
    }
    for connection in listener.incoming() {
        let connection = connection?;
        thread::spawn(move || answer(connection));
    }
    Ok(())
}

/// Answers the first request, and all that comes later with noise.
fn answer(mut connection: VsockStream) -> Result<()> {
    let asked = request(&mut connection)?;
    if [OBEDIENT, DIES, FREEZES].iter().any(|name| contains(&asked, name)) {
        return obey(connection, asked);
    }
    let (_, say) =
        ANSWERS.into_iter().find(|(name, _)| contains(&asked, name)).context("nothing was asked")?;
    let said = say(&asked);
    connection.write_all(&said)?;
    while !said.is_empty() {
        connection.write_all(&noise(4096))?;
    }
    Ok(())
}

/// The next frame.
fn request(connection: &mut VsockStream) -> Result<Vec<u8>> {
    let mut frame = vec![0; 10];
    connection.read_exact(&mut frame)?;
    let length = u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
    frame.resize(10 + length, 0);
    connection.read_exact(&mut frame[10..])?;
    Ok(frame)
}

/// Answers all requests with success and nothing else, and those for an end never. One that ends or freezes tells of
/// the ends of processes when it is asked for a signal. Otherwise its VMM is killed before the later requests.
fn obey(mut connection: VsockStream, first: Vec<u8>) -> Result<()> {
    let (dies, freezes) = (request_after(DIES, &first), request_after(FREEZES, &first));
    let is = |asked: &[u8], name: &Option<String>| name.as_ref().is_some_and(|name| contains(asked, name));
    let tells = dies.is_some() || freezes.is_some();
    let mut waiting = Vec::new();
    let mut asked = first;
    // The first request has the names of all roles in it: the pod's.
    let mut method = method_of(&asked);
    loop {
        if is(&method, &dies) {
            // The kernel does not go on without its first process.
            std::process::exit(1);
        }
        if is(&method, &freezes) {
            loop {
                thread::park();
            }
        }
        if contains(&method, WAITING) {
            waiting.push(stream(&asked));
        } else {
            connection.write_all(&frame(stream(&asked), RESPONSE, &[]))?;
        }
        if tells && contains(&method, SIGNAL) {
            for stream in waiting.drain(..) {
                connection.write_all(&frame(stream, RESPONSE, &KILLED))?;
            }
        }
        asked = request(&mut connection)?;
        method = method_of(&asked);
    }
}

/// The beginning of a request, which names the service and the method (ttrpc, request.proto).
fn method_of(request: &[u8]) -> Vec<u8> {
    const HEADER: usize = 10;
    const NAMES: usize = 48;
    request.iter().skip(HEADER).take(NAMES).copied().collect()
}

/// The letters after this word.
fn request_after(word: &str, asked: &[u8]) -> Option<String> {
    let at = asked.windows(word.len()).position(|window| window == word.as_bytes())?;
    let letters = asked.get(at + word.len()..)?.iter().take_while(|byte| byte.is_ascii_alphabetic());
    Some(letters.map(|byte| char::from(*byte)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_pod_says_at_which_request_its_agent_ends() {
        let first =
            [&[0; 10][..], b"bulkhead.agent.v1.Agent..StartSandbox..e2e-1-2-dies-at-Shutdown\x12"].concat();
        assert_eq!(request_after(DIES, &first).as_deref(), Some("Shutdown"));
        assert_eq!(request_after(FREEZES, &first), None);
        assert!(contains(&method_of(&first), "StartSandbox") && !contains(&method_of(&first), "Shutdown"));
    }
}
