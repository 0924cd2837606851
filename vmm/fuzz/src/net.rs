//! The network device, by a guest that sends any packet. The host behind its tap device answers as Linux does. Needs
//! root, for a network namespace and a tap device in it.

use std::{cell::RefCell, process::Command};

use anyhow::{Context, Result, ensure};
use bulkhead_vmm::{
    netns,
    virtio::net::{Net, NetThread, Tap},
};

use crate::{
    guest::{BUFFERS, Buffer, Guest},
    input::Input,
};

const TAP: &str = "fuzz0";
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const RX: usize = 0;
const TX: usize = 1;
/// Bytes of `struct virtio_net_hdr` with `num_buffers`.
const HEADER: usize = 12;
const TX_AREA: u64 = BUFFERS + 0x4_0000;

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
    let tap = Tap::create(TAP).context("cannot make a tap: modprobe tun")?;
    let card = Net::new(tap, MAC, &NetThread::start()?);
    let up = Command::new("ip").args(["address", "add", "10.9.8.1/24", "dev", TAP]).status()?.success()
        && Command::new("ip").args(["link", "set", TAP, "up"]).status()?.success();
    ensure!(up, "ip cannot set the tap up");
    Ok(Guest::new(Box::new(card), "net")?)
}

fn perform(guest: &mut Guest, bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    guest.start();
    while !input.is_over() {
        match input.below(8) {
            0 => guest.misbehave(&mut input),
            1 | 2 => offer_room(guest, &mut input),
            3 => {
                ask_for_an_address(guest);
            }
            _ => send(guest, &mut input),
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

fn offer_room(guest: &mut Guest, input: &mut Input) {
    let address = BUFFERS + u64::from(input.u16());
    let lens = [input.u16(), input.u16()];
    let buffer = |len: u16| Buffer { address, len: len.into(), write: true };
    guest.offer(RX, &lens.map(buffer)[..1 + input.below(2)]);
    guest.kick(RX);
}

/// A packet with any header and contents.
fn send(guest: &mut Guest, input: &mut Input) {
    let mut packet = Vec::new();
    if input.u8() < 128 {
        packet.extend([0; HEADER]);
    } else {
        packet.extend(input.bytes(HEADER));
    }
    let count = input.u8().into();
    packet.extend(input.bytes(count));
    guest.write(TX_AREA, &packet);
    // The length may be more than was written, and more than that of any packet.
    let len = packet.len() as u32 + if input.u8() < 200 { 0 } else { u32::from(input.u16()) * 2 };
    let split = u32::from(input.u8()).min(len);
    let buffers = [
        Buffer { address: TX_AREA, len: split, write: false },
        Buffer { address: TX_AREA + u64::from(split), len: len - split, write: false },
    ];
    guest.offer(TX, &buffers);
    guest.kick(TX);
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
