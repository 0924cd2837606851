//! All devices, by a guest that changes rings, descriptors and requests while the device reads them. A value that the
//! device reads twice differs the second time.

use anyhow::Result;

use crate::{balloon, fs, input::Input, meddle, mem, net, queue, registers, vsock};

/// The targets whose programs run here. What must hold for them must hold here too.
const DEVICES: [bulkhead_fuzz::Target; 7] =
    [queue::run, registers::run, vsock::run, fs::run, net::run, balloon::run, mem::run];

/// Runs a program. The first bytes are the changes, and the rest is the program.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let device = input.choose(&DEVICES);
    meddle::plan(&mut input);
    let performed = device(input.bytes(bytes.len()));
    meddle::end();
    performed
}
