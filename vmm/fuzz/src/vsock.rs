//! The vsock device, by a guest that sends any packet, with clients and a listener of the host that come and go.

use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use bulkhead_vmm::virtio::vsock::{self, Vsock};

use crate::{
    guest::{BUFFERS, Buffer, Guest},
    input::Input,
};

const CID: u64 = 3;
const HOST_CID: u64 = 2;
const HEADER: u32 = 44;
const RX: usize = 0;
const TX: usize = 1;
/// A port of the host with a listener.
const LISTENING: u32 = 9;
/// There are few ports, so that packets meet connections.
const GUEST_PORTS: u32 = 4;
/// The device assigns ports of the host from here on.
const FIRST_HOST_PORT: u32 = 1 << 30;
/// The addresses of the buffers for packets to the guest, and of those for packets from it, which are longer than a
/// page.
const RX_AREA: u64 = BUFFERS;
const TX_AREA: u64 = BUFFERS + 0x2_0000;

/// Runs the program.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("vsock.sock");
    let listener = UnixListener::bind(format!("{}_{LISTENING}", path.display()))?;
    listener.set_nonblocking(true)?;
    let mut guest = Guest::new(Box::new(Vsock::new(vsock::listen(&path)?, path.clone(), CID)?), "vsock")?;
    guest.start();
    let mut host = Host { path: &path, listener, streams: Vec::new() };
    while !input.is_over() {
        match input.below(16) {
            0 => guest.misbehave(&mut input),
            1..=3 => offer_room(&mut guest, &mut input),
            4..=9 => send(&mut guest, &mut input),
            _ => host.act(&mut input)?,
        }
        guest.settle();
    }
    drop(host);
    guest.behave();
    serves_the_next_driver(&mut guest, &path).context("after its reset")
}

/// A buffer for packets to the guest, which may be too short.
fn offer_room(guest: &mut Guest, input: &mut Input) {
    let len = if input.u8() < 240 { 4096 } else { input.u16().into() };
    let address = RX_AREA + u64::from(input.u8() % 32) * 4096;
    guest.offer(RX, &[Buffer { address, len, write: true }]);
    guest.kick(RX);
}

/// A packet with any header.
fn send(guest: &mut Guest, input: &mut Input) {
    let len = u32::from(input.u16());
    let said = if input.u8() < 240 { len } else { input.u32() };
    let mut header = Vec::new();
    let cid = |input: &mut Input, usual: u64| if input.u8() < 250 { usual } else { input.u64() };
    header.extend(cid(input, CID).to_le_bytes());
    header.extend(cid(input, HOST_CID).to_le_bytes());
    header.extend((u32::from(input.u8()) % GUEST_PORTS).to_le_bytes());
    let host_port = [LISTENING, LISTENING, FIRST_HOST_PORT, FIRST_HOST_PORT + 1, FIRST_HOST_PORT + 2, 1];
    header.extend(input.choose(&host_port).to_le_bytes());
    header.extend(said.to_le_bytes());
    header.extend(if input.u8() < 250 { 1u16 } else { input.u16() }.to_le_bytes());
    // The operations, and two numbers that are none.
    header.extend((u16::from(input.u8()) % 10).to_le_bytes());
    header.extend((u32::from(input.u8()) % 4).to_le_bytes());
    header.extend(input.choose(&[0, 1, 64, 4096, 1 << 18, u32::MAX]).to_le_bytes());
    header.extend(if input.u8() < 200 { 0 } else { input.u32() }.to_le_bytes());
    guest.write(TX_AREA, &header);
    let buffers = [
        Buffer { address: TX_AREA, len: HEADER, write: false },
        Buffer { address: TX_AREA + u64::from(HEADER), len, write: false },
    ];
    guest.offer(TX, &buffers);
    guest.kick(TX);
}

/// The host's side: clients of the device, and connections from the guest to the listener.
struct Host<'p> {
    path: &'p Path,
    listener: UnixListener,
    streams: Vec<UnixStream>,
}

impl Host<'_> {
    fn act(&mut self, input: &mut Input) -> Result<()> {
        let chosen = input.below(self.streams.len().max(1));
        match (input.below(7), self.streams.get_mut(chosen)) {
            (0 | 1, _) => self.connect(input)?,
            (2, _) => self.streams.extend(self.listener.accept().ok().map(|(stream, _)| stream)),
            (3, Some(stream)) => {
                // The device has closed the connection, or its buffer is full. Both are legal.
                let _ = stream.write(&vec![7; input.u16().into()]);
            }
            (4, Some(stream)) => drop(stream.read(&mut vec![0; input.u16().into()])),
            (5, Some(stream)) => {
                let _ = stream.shutdown(input.choose(&[Shutdown::Read, Shutdown::Write, Shutdown::Both]));
            }
            (6, Some(_)) => drop(self.streams.swap_remove(chosen)),
            _ => {}
        }
        for stream in &self.streams {
            stream.set_nonblocking(true)?;
        }
        Ok(())
    }

    /// A client that sends a CONNECT line or something similar.
    fn connect(&mut self, input: &mut Input) -> Result<()> {
        if self.streams.len() >= 8 {
            return Ok(());
        }
        let mut stream = UnixStream::connect(self.path)?;
        let port = |input: &mut Input| u32::from(input.u8()) % GUEST_PORTS;
        let line = match input.u8() {
            ..160 => format!("CONNECT {}\n", port(input)).into_bytes(),
            160..240 => format!("CONNECT {} {}\n", port(input), port(input)).into_bytes(),
            _ => input.bytes(24).to_vec(),
        };
        stream.write_all(&line)?;
        self.streams.push(stream);
        Ok(())
    }
}

/// A legal guest and a client of the host can connect as if nothing had happened.
fn serves_the_next_driver(guest: &mut Guest, path: &Path) -> Result<()> {
    guest.start();
    let mut client = UnixStream::connect(path)?;
    client.write_all(b"CONNECT 1\n")?;
    guest.settle();
    guest.offer(RX, &[Buffer { address: RX_AREA, len: 4096, write: true }]);
    guest.kick(RX);
    ensure!(guest.used(RX) == 1, "the client's request does not come to the guest");
    let request = guest.read(RX_AREA, HEADER as usize);
    ensure!(request[30] == 1, "expected  a request\ncame      {request:?}");
    Ok(())
}
