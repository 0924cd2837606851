//! The balloon device, by a guest that reports and inflates anything, while the VMM requests pages. It loses only its
//! own pages.

use anyhow::{Result, ensure};
use bulkhead_vmm::virtio::balloon::Balloon;

use crate::{
    guest::{BUFFERS, Buffer, Guest},
    input::Input,
};

const REPORTING: usize = 2;
const QUEUES: usize = 3;
const PAGE: u64 = 4096;
const MARK: [u8; 8] = *b"in use!\n";

/// Runs the program.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let device = Balloon::new()?;
    let control = device.control();
    let mut guest = Guest::new(Box::new(device), "balloon")?;
    guest.start();
    while !input.is_over() {
        match input.below(8) {
            0 => guest.misbehave(&mut input),
            1 => guest.start(),
            6 => control.request(u64::from(input.u32()) * PAGE)?,
            act => {
                let queue = if act < 6 { REPORTING } else { input.below(QUEUES) };
                let buffers: Vec<_> = (0..=input.below(40)).map(|_| buffer(&mut input)).collect();
                guest.offer(queue, &buffers);
                guest.kick(queue);
            }
        }
    }
    guest.behave();
    gives_back_what_is_reported(&mut guest)
}

/// A list of pages, which may be too short, too long, or something else.
fn buffer(input: &mut Input) -> Buffer {
    let usual = input.u8();
    let address = if usual < 240 { BUFFERS + u64::from(input.u8()) * PAGE } else { input.u64() };
    let len = if usual % 8 < 6 { u32::from(input.u8() % 16) * PAGE as u32 } else { input.u32() };
    Buffer { address, len, write: usual % 16 != 15 }
}

/// A legal driver loses the pages that it reports, and no others.
fn gives_back_what_is_reported(guest: &mut Guest) -> Result<()> {
    guest.start();
    let (reported, kept) = (BUFFERS, BUFFERS + PAGE);
    for page in [reported, kept] {
        guest.write(page, &MARK);
    }
    guest.offer(REPORTING, &[Buffer { address: reported, len: PAGE as u32, write: true }]);
    guest.kick(REPORTING);
    ensure!(guest.used(REPORTING) == 1, "the device does not serve after its reset");
    ensure!(guest.read(reported, MARK.len()) == [0; MARK.len()], "the page was not given back");
    ensure!(guest.read(kept, MARK.len()) == MARK, "a page is lost that was not reported");
    Ok(())
}
