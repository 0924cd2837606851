//! The network device, by a guest that sends any packet. The host behind its tap device answers as Linux does. Needs
//! root, for a network namespace and a tap device in it.

use std::{cell::RefCell, net::UdpSocket, process::Command};

use anyhow::{Context, Result, ensure};
use bulkhead_vmm::{
    netns,
    virtio::net::{Net, NetThreads, Tap},
};

use nix::sys::socket::{setsockopt, sockopt::UdpGsoSegment};

use crate::{
    guest::{BUFFERS, Buffer, Guest},
    input::Input,
};

const TAP: &str = "fuzz0";
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const RX: usize = 0;
const TX: usize = 1;
/// The pairs of queues, and the control queue.
const PAIRS: usize = 2;
const CONTROL: usize = 2 * PAIRS;
const COMMAND_AREA: u64 = BUFFERS + 0x7_0000;
/// Bytes of `struct virtio_net_hdr` with `num_buffers`.
const HEADER: usize = 12;
const TX_AREA: u64 = BUFFERS + 0x4_0000;
const ADDRESS: &str = "10.9.8.2:7001";

thread_local! {
    // Making a tap device takes milliseconds. So each thread has one for all runs, in a network namespace of its own.
    static GUEST: RefCell<Option<Guest>> = const { RefCell::new(None) };
}

/// Runs the program.
pub fn run(bytes: &[u8]) -> Result<()> {
    GUEST.with_borrow_mut(|guest| {
        let guest = match guest {
            Some(guest) => guest,
            None => guest.insert(plug_in()?),
        };
        perform(guest, bytes)
    })
}

fn plug_in() -> Result<Guest> {
    netns::enter(None).context("cannot make a network namespace: run this as root")?;
    let tap = Tap::create(TAP, PAIRS).context("cannot make a tap: modprobe tun")?;
    let card = Net::new(tap, MAC, &NetThreads::start(PAIRS)?);
    let up = Command::new("ip").args(["address", "add", "10.9.8.1/24", "dev", TAP]).status()?.success()
        && Command::new("ip").args(["link", "set", TAP, "up"]).status()?.success()
        && Command::new("ip")
            .args(["neighbour", "add", "10.9.8.2", "lladdr", "02:00:00:00:00:01", "dev", TAP])
            .status()?
            .success();
    ensure!(up, "ip cannot set the tap up");
    Ok(Guest::new(Box::new(card), "net")?)
}

fn perform(guest: &mut Guest, bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    guest.start();
    while !input.is_over() {
        // The low bits say what is done, and the high ones by which pair.
        let act = input.u8();
        let pair = usize::from(act >> 7);
        match act % 8 {
            _ if act & 0x78 == 0x78 => command(guest, &mut input),
            0 => guest.misbehave(&mut input),
            1 | 2 => offer_room(guest, pair, &mut input),
            3 => {
                ask_for_an_address(guest);
            }
            _ => match input.u8() {
                0..128 => send(guest, pair, [0; HEADER].to_vec(), &mut input),
                240..248 => send_datagrams(guest, pair, &mut input),
                248.. => get_datagrams(guest, &mut input)?,
                _ => {
                    let header = input.bytes(HEADER).to_vec();
                    send(guest, pair, header, &mut input);
                }
            },
        }
    }
    guest.behave();
    guest.start();
    guest.offer(RX, &[Buffer { address: BUFFERS, len: 0x1_0000, write: true }]);
    guest.kick(RX);
    ask_for_an_address(guest);
    ensure!(guest.used(TX) == 1, "the card does not send for its next driver");
    Ok(())
}

fn offer_room(guest: &mut Guest, pair: usize, input: &mut Input) {
    let address = BUFFERS + u64::from(input.u16());
    let lens = [input.u16(), input.u16()];
    let buffer = |len: u16| Buffer { address, len: len.into(), write: true };
    let rx = RX + 2 * pair;
    guest.offer(rx, &lens.map(buffer)[..1 + input.below(2)]);
    guest.kick(rx);
}

/// A command of the control queue: mostly how many pairs are in use. The device refuses it if it comes too often.
fn command(guest: &mut Guest, input: &mut Input) {
    let mut bytes = vec![4, 0, input.u8() % 4, 0];
    match input.u8() {
        0..192 => {}
        192..224 => bytes = input.bytes(8).to_vec(),
        _ => bytes.truncate(input.below(5)),
    }
    guest.write(COMMAND_AREA, &bytes);
    let answer = Buffer { address: COMMAND_AREA + 64, len: u32::from(input.u8() % 4), write: true };
    guest.offer(CONTROL, &[Buffer { address: COMMAND_AREA, len: bytes.len() as u32, write: false }, answer]);
    guest.kick(CONTROL);
}

/// A packet with this header and any contents.
fn send(guest: &mut Guest, pair: usize, mut packet: Vec<u8>, input: &mut Input) {
    let count = input.u8().into();
    packet.extend(input.bytes(count));
    offer_packet(guest, pair, &packet, input);
}

/// UDP datagrams that the guest leaves together, with a header that may lie.
fn send_datagrams(guest: &mut Guest, pair: usize, input: &mut Input) {
    let payload = usize::from(input.u16()) % 2048;
    let mut packet = vec![1, 5, 42, 0];
    packet.extend(input.u16().to_le_bytes());
    packet.extend([34, 0, 6, 0, 0, 0]);
    packet.extend([0xff; 6]);
    packet.extend(MAC);
    packet.extend([8, 0, 0x45, 0]);
    packet.extend((28 + payload as u16).to_be_bytes());
    packet.extend([0, 1, 0, 0, 64, 17, 0, 0, 10, 9, 8, 2, 10, 9, 8, 1]);
    packet.extend([0x1b, 0x59, 0x1b, 0x58]);
    packet.extend((8 + payload as u16).to_be_bytes());
    packet.extend([0, 0]);
    packet.resize(packet.len() + payload, b'x');
    // One byte of the headers is any other.
    if input.u8() < 128
        && let Some(byte) = packet.get_mut(input.below(HEADER + 42))
    {
        *byte = input.u8();
    }
    offer_packet(guest, pair, &packet, input);
}

/// The host sends datagrams that the guest has to split.
fn get_datagrams(guest: &mut Guest, input: &mut Input) -> Result<()> {
    let (count, size) = (usize::from(input.u16()), i32::from(input.u8()) * 8 + 8);
    let socket = UdpSocket::bind("10.9.8.1:0")?;
    setsockopt(&socket, UdpGsoSegment, &size)?;
    // More datagrams than are allowed are refused, and those that find no room are lost.
    let _ = socket.send_to(&vec![b'x'; count], ADDRESS);
    guest.kick(RX);
    Ok(())
}

fn offer_packet(guest: &mut Guest, pair: usize, packet: &[u8], input: &mut Input) {
    guest.write(TX_AREA, packet);
    // The length may be more than was written, and more than that of any packet.
    let len = packet.len() as u32 + if input.u8() < 200 { 0 } else { u32::from(input.u16()) * 2 };
    let split = u32::from(input.u8()).min(len);
    let buffers = [
        Buffer { address: TX_AREA, len: split, write: false },
        Buffer { address: TX_AREA + u64::from(split), len: len - split, write: false },
    ];
    let tx = TX + 2 * pair;
    guest.offer(tx, &buffers);
    guest.kick(tx);
}

/// An ARP request. The host answers it by a packet for the guest.
fn ask_for_an_address(guest: &mut Guest) {
    let mut packet = vec![0; HEADER];
    packet.extend([0xff; 6]);
    packet.extend(MAC);
    packet.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    packet.extend(MAC);
    packet.extend([10, 9, 8, 2, 0, 0, 0, 0, 0, 0, 10, 9, 8, 1]);
    guest.write(TX_AREA, &packet);
    guest.offer(TX, &[Buffer { address: TX_AREA, len: packet.len() as u32, write: false }]);
    guest.kick(TX);
}
