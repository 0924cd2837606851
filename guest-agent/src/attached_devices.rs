//! Devices that the VMM attaches while the guest runs, at places of the bus that the kernel has found empty at boot.

use std::{fs, io, path::Path};

/// The devices that the kernel's command line has announced, and the driver that probes them.
const DEVICES: &str = "/sys/bus/platform/devices";
const PREFIX: &str = "virtio-mmio.";
const BIND: &str = "/sys/bus/platform/drivers/virtio-mmio/bind";
const UNBIND: &str = "/sys/bus/platform/drivers/virtio-mmio/unbind";

/// Has the kernel look again at the places in which it has found no device. A device that is there now is ready
/// afterwards.
pub(crate) fn probe() -> io::Result<()> {
    for entry in fs::read_dir(DEVICES)? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with(PREFIX) || entry.path().join("driver").exists() {
            continue;
        }
        match fs::write(BIND, name.as_encoded_bytes()) {
            // There is still none, or somebody else probes it at the same time.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EBUSY)) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Has the kernel forget the virtio device, which `device` in sysfs leads to. The VMM has taken it away already, so
/// that [`probe`] finds its place empty.
pub(crate) fn forget(device: &Path) -> io::Result<()> {
    let device = fs::canonicalize(device)?;
    let place = device
        .parent()
        .and_then(Path::file_name)
        .filter(|name| name.as_encoded_bytes().starts_with(PREFIX.as_bytes()));
    let place =
        place.ok_or_else(|| io::Error::other(format!("{} has no place on the bus", device.display())))?;
    fs::write(UNBIND, place.as_encoded_bytes())
}
