//! Devices that the VMM attaches while the guest runs, at places of the bus that the kernel has found empty at boot.

use std::{fs, io, path::Path};

/// The devices that the kernel's command line has announced, and the driver that probes them.
const DEVICES: &str = "/sys/bus/platform/devices";
const PREFIX: &str = "virtio-mmio.";
const BIND: &str = "/sys/bus/platform/drivers/virtio-mmio/bind";
const UNBIND: &str = "/sys/bus/platform/drivers/virtio-mmio/unbind";

/// The functions of the PCI bus, if the VM has one, and what makes the kernel look for new ones.
const FUNCTIONS: &str = "/sys/bus/pci/devices";
const RESCAN: &str = "/sys/bus/pci/rescan";

/// Has the kernel look again at the places in which it has found no device. A device that is there now is ready
/// afterwards.
pub(crate) fn probe() -> io::Result<()> {
    if fs::read_dir(FUNCTIONS).is_ok_and(|mut functions| functions.next().is_some()) {
        return fs::write(RESCAN, "1");
    }
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
    let place = device.parent().and_then(Path::file_name);
    let place =
        place.ok_or_else(|| io::Error::other(format!("{} has no place on the bus", device.display())))?;
    // A function of the PCI bus goes with its driver. A place on the command line stays.
    let remove = Path::new(FUNCTIONS).join(place).join("remove");
    if remove.exists() {
        return fs::write(remove, "1");
    }
    if !place.as_encoded_bytes().starts_with(PREFIX.as_bytes()) {
        return Err(io::Error::other(format!("{} has no place on the bus", device.display())));
    }
    fs::write(UNBIND, place.as_encoded_bytes())
}
