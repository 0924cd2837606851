//! Every device, by a guest that changes rings, descriptors and requests while the device reads them: whatever is read
//! twice is another the second time.

use anyhow::Result;

use crate::{balloon, fs, input::Input, meddle, mem, net, queue, registers, vsock};

/// What is attacked besides: the programs are those of these targets, and so is what must hold.
const DEVICES: [bulkhead_fuzz::Target; 7] =
    [queue::run, registers::run, vsock::run, fs::run, net::run, balloon::run, mem::run];

/// Performs the acts of a program, the rest of the bytes, with the changes that come before it.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let device = input.choose(&DEVICES);
    meddle::plan(&mut input);
    let performed = device(input.bytes(bytes.len()));
    meddle::end();
    performed
}
