//! The guest's network cards. One is there from the start. The VMM attaches others later, at places of the bus that the
//! kernel has found empty at boot.

use std::{fs, io};

use super::netlink::Socket;

/// The devices that the kernel's command line has announced, and the driver that probes them.
const DEVICES: &str = "/sys/bus/platform/devices";
const PREFIX: &str = "virtio-mmio.";
const BIND: &str = "/sys/bus/platform/drivers/virtio-mmio/bind";

/// The card that has this permanent address, among the interfaces of the network namespace of `guest`, which is the
/// agent's own.
pub(super) fn find(guest: &Socket, card: &[u8; 6]) -> io::Result<Option<u32>> {
    if let Some(index) = guest.find(card)? {
        return Ok(Some(index));
    }
    probe()?;
    guest.find(card)
}

/// Has the kernel look again at the places in which it has found no device.
fn probe() -> io::Result<()> {
    for entry in fs::read_dir(DEVICES)? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with(PREFIX) || entry.path().join("driver").exists() {
            continue;
        }
        match fs::write(BIND, name.as_encoded_bytes()) {
            // There is still none.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
            other => other?,
        }
    }
    Ok(())
}
