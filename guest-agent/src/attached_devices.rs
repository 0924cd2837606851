//! Devices that the VMM attaches while the guest runs, at places of the bus that the kernel has found empty at boot.

use std::{fs, io, path::Path};

/// sysfs.
const SYS: &str = "/sys";

/// The devices that the kernel's command line has announced, and the driver that probes them.
const DEVICES: &str = "bus/platform/devices";
const PREFIX: &str = "virtio-mmio.";
const BIND: &str = "bus/platform/drivers/virtio-mmio/bind";
const UNBIND: &str = "bus/platform/drivers/virtio-mmio/unbind";

/// The functions of the PCI bus, if the VM has one, and what makes the kernel look for new ones.
const FUNCTIONS: &str = "bus/pci/devices";
const RESCAN: &str = "bus/pci/rescan";

/// The virtio devices, and the bit of their status that says that no driver could set the device up (virtio 1.3, 2.1).
const VIRTIO: &str = "bus/virtio/devices";
const FAILED: u32 = 128;

/// Has the kernel look again at the places in which it has found no device. A device that is there now is ready
/// afterwards.
pub(crate) fn probe() -> io::Result<()> {
    probe_in(Path::new(SYS))
}

/// Has the kernel forget devices that no driver could set up: the VMM may have taken them away meanwhile. Otherwise the
/// kernel would find no other device in their place. One that is there still is found by the next [`probe`].
pub(crate) fn forget_failed() -> io::Result<()> {
    forget_failed_in(Path::new(SYS))
}

fn probe_in(sys: &Path) -> io::Result<()> {
    forget_failed_in(sys)?;
    if fs::read_dir(sys.join(FUNCTIONS)).is_ok_and(|mut functions| functions.next().is_some()) {
        return fs::write(sys.join(RESCAN), "1");
    }
    for entry in fs::read_dir(sys.join(DEVICES))? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with(PREFIX) || entry.path().join("driver").exists() {
            continue;
        }
        match fs::write(sys.join(BIND), name.as_encoded_bytes()) {
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
    forget_in(Path::new(SYS), device)
}

fn forget_in(sys: &Path, device: &Path) -> io::Result<()> {
    let device = fs::canonicalize(device)?;
    let place = device.parent().and_then(Path::file_name).unwrap_or_default();
    // A function of the PCI bus goes with its driver. A place on the command line stays.
    let remove = sys.join(FUNCTIONS).join(place).join("remove");
    if remove.exists() {
        return fs::write(remove, "1");
    }
    if !place.as_encoded_bytes().starts_with(PREFIX.as_bytes()) {
        return Err(io::Error::other(format!("{} has no place on the bus", device.display())));
    }
    fs::write(sys.join(UNBIND), place.as_encoded_bytes())
}

fn forget_failed_in(sys: &Path) -> io::Result<()> {
    let Ok(devices) = fs::read_dir(sys.join(VIRTIO)) else { return Ok(()) };
    for device in devices {
        let device = device?.path();
        let status = fs::read_to_string(device.join("status")).unwrap_or_default();
        let status = u32::from_str_radix(status.trim().trim_start_matches("0x"), 16).unwrap_or_default();
        // Another thread may have it forgotten at the same time.
        if status & FAILED != 0 && !device.join("driver").exists() {
            match forget_in(sys, &device) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A directory like /sys, which is removed when this is dropped.
    struct Sys(PathBuf);

    impl Sys {
        fn with(test: &str, files: &[&str]) -> Self {
            let sys = Self(std::env::temp_dir().join(format!("bulkhead-{test}-{}", std::process::id())));
            for file in files {
                let path = sys.0.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            sys
        }

        fn written(&self, file: &str) -> String {
            fs::read_to_string(self.0.join(file)).unwrap()
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            _ = fs::remove_dir_all(&self.0);
        }
    }

    const PLATFORM: [&str; 4] = [
        "bus/platform/devices/virtio-mmio.0/driver",
        "bus/platform/devices/virtio-mmio.1/virtio1/serial",
        BIND,
        UNBIND,
    ];

    #[test]
    fn without_a_pci_bus_the_driver_probes_the_empty_places_of_the_command_line() {
        let sys = Sys::with("probe-mmio", &PLATFORM);
        // A kernel with PCI has the directory also where there is no bus.
        fs::create_dir_all(sys.0.join(FUNCTIONS)).unwrap();
        probe_in(&sys.0).unwrap();
        assert_eq!(sys.written(BIND), "virtio-mmio.1");
        forget_in(&sys.0, &sys.0.join("bus/platform/devices/virtio-mmio.1/virtio1")).unwrap();
        assert_eq!(sys.written(UNBIND), "virtio-mmio.1");
        let elsewhere = forget_in(&sys.0, &sys.0.join("bus/platform/drivers/virtio-mmio"));
        assert!(elsewhere.unwrap_err().to_string().ends_with("has no place on the bus"));
    }

    #[test]
    fn a_pci_bus_is_scanned_and_its_functions_are_removed() {
        let function = "bus/pci/devices/0000:00:03.0";
        let files = ["remove", "virtio1/serial"].map(|file| format!("{function}/{file}"));
        let files: Vec<&str> = files.iter().map(String::as_str).chain(PLATFORM).chain([RESCAN]).collect();
        let sys = Sys::with("probe-pci", &files);
        probe_in(&sys.0).unwrap();
        assert_eq!((sys.written(RESCAN).as_str(), sys.written(BIND).as_str()), ("1", ""));
        forget_in(&sys.0, &sys.0.join(function).join("virtio1")).unwrap();
        assert_eq!(sys.written(files[0]), "1");
    }

    #[test]
    fn a_device_that_no_driver_could_set_up_is_forgotten_before_the_bus_is_scanned() {
        let device = |number: u8, files: &[&str]| -> Vec<String> {
            let function = format!("bus/pci/devices/0000:00:0{number}.0");
            let files = files.iter().map(|file| format!("{function}/virtio{number}/{file}"));
            files.chain([format!("{function}/remove")]).collect()
        };
        let files: Vec<_> = [
            device(1, &["status", "driver"]),
            device(2, &["status"]),
            device(3, &["status"]),
            vec![RESCAN.to_owned()],
        ]
        .concat();
        let sys = Sys::with("probe-failed", &files.iter().map(String::as_str).collect::<Vec<_>>());
        fs::create_dir_all(sys.0.join(VIRTIO)).unwrap();
        for (number, status) in [(1, "0x0000008f\n"), (2, "0x00000083\n"), (3, "0x00000003\n")] {
            let place = format!("bus/pci/devices/0000:00:0{number}.0/virtio{number}");
            fs::write(sys.0.join(&place).join("status"), status).unwrap();
            let link = sys.0.join(VIRTIO).join(format!("virtio{number}"));
            std::os::unix::fs::symlink(sys.0.join(place), link).unwrap();
        }
        probe_in(&sys.0).unwrap();
        let removed =
            [1, 2, 3].map(|number| sys.written(&format!("bus/pci/devices/0000:00:0{number}.0/remove")));
        assert_eq!(removed, ["", "1", ""]);
        assert_eq!(sys.written(RESCAN), "1");
    }
}
