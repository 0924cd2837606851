//! The registers and rings of a device, by a driver that follows no order. The device is the entropy device, because
//! every request to it is legal.

use anyhow::{Result, ensure};
use bulkhead_vmm::virtio::rng::Rng;

use crate::{
    guest::{BUFFERS, Buffer, Guest},
    input::Input,
};

/// Runs the program.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let mut guest = Guest::new(Box::new(Rng::new()?), "rng")?;
    while !input.is_over() {
        match input.below(8) {
            0 => guest.start(),
            1 => {
                let len = input.u16().into();
                guest.offer(0, &[Buffer { address: BUFFERS, len, write: input.u8() & 1 == 0 }]);
                guest.kick(0);
            }
            _ => guest.misbehave(&mut input),
        }
    }
    // Whatever was done before, the device serves its next driver.
    guest.behave();
    guest.start();
    guest.offer(0, &[Buffer { address: BUFFERS, len: 16, write: true }]);
    guest.kick(0);
    ensure!(guest.used(0) == 1, "the device does not serve after its reset");
    Ok(())
}
