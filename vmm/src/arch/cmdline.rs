//! The kernel command line.

use linux_loader::cmdline::Cmdline;
use vm_memory::GuestAddress;

use crate::layout::{self, Resources};

/// COMMAND_LINE_SIZE of Linux on x86. It includes the final NUL.
const CAPACITY: usize = 2048;

/// The arguments of every guest.
const ALWAYS: &[&str] = &[
    // A guest that reboots or powers off writes 0xfe to port 0x64, which ends the VM. The other methods of the kernel
    // are absent (ACPI), or look like a crash (triple fault).
    "reboot=k",
    // A guest that panics must reboot at once, because the shim waits for the end of the VM.
    "panic=-1",
    // KVM synchronizes the time stamp counters of the vCPUs. So the kernel need not test them, neither at the start
    // of each vCPU nor by a watchdog.
    "tsc=reliable",
    // Devices can access all guest memory. So a guest with memory above 4 GiB needs no bounce buffers, which take 64
    // MiB.
    "swiotlb=noforce",
    // Allocates per-CPU memory in chunks of 168 KiB instead of 2 MiB. The kernel allocates a second chunk for the
    // first container, and writes to eight bytes of accounting data for each four bytes of the chunk.
    "percpu_alloc=page",
    // With a single vCPU the kernel would remove the LOCK prefix from 7,500 atomic instructions, which took a sixth
    // of the boot time in the rig, and would restore it when there is a second vCPU.
    "noreplace-smp",
    // Plugged memory is online at once, in ZONE_NORMAL. The kernel needs memory of this zone for page tables, for
    // file names and for the descriptions of further memory, and a small VM that grows large has too little
    // otherwise. Memory in ZONE_MOVABLE could be unplugged more reliably, but nothing requests that.
    "memhp_default_state=online",
    // The table of tracked connections has 128 KiB. By the initial memory of a small VM it would be so small that each
    // lookup takes long when the VM has grown: the agent allows more connections then.
    "nf_conntrack.hashsize=16384",
];

/// An argument that cannot be added to the command line.
#[derive(Debug, thiserror::Error)]
#[error("kernel_args: cannot add {word:?} to the kernel command line")]
pub struct CmdlineError {
    word: String,
    source: linux_loader::cmdline::Error,
}

/// How the kernel finds the virtio devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices<'d> {
    /// Each is on the command line. The kernel does not look for a PCI bus.
    Mmio(&'d [Resources]),
    /// They are on the PCI bus.
    Pci,
}

/// The kernel accesses the bus by mechanism 1, without a test of it, and does not look for chips with faults.
const PCI: &str = "pci=conf1,noearly";
const NO_PCI: &str = "pci=off";

/// Builds the command line of a guest with these `devices`. The `extra` arguments come last, so that they override
/// others.
pub fn build(console: bool, devices: Devices<'_>, extra: &[String]) -> Result<Cmdline, CmdlineError> {
    let error = |word: &str| {
        let word = word.to_owned();
        move |source| CmdlineError { word, source }
    };
    let mut cmdline = Cmdline::new(CAPACITY).map_err(error(""))?;
    let mut add = |word: &str| cmdline.insert_str(word).map_err(error(word));
    for word in ALWAYS {
        add(word)?;
    }
    if console {
        add("console=ttyS0")?;
    } else {
        // Each character that is written to a serial port causes two exits, and each step of probing for a serial port
        // causes one. So the driver has no port, and only emergencies are written: those, and all that follows an oops
        // or a panic (console_verbose()), go to the port that `earlyprintk` sets up with nine exits. The level comes
        // first, because `earlyprintk` writes what the log has until then.
        add("loglevel=1")?;
        add("earlyprintk=ttyS0,115200,keep")?;
        add("8250.nr_uarts=0")?;
    }
    add(if devices == Devices::Pci { PCI } else { NO_PCI })?;
    if let Devices::Mmio(devices) = devices {
        for device in devices {
            cmdline
                .add_virtio_mmio_device(
                    layout::VIRTIO_MMIO_SIZE,
                    GuestAddress(device.address),
                    device.gsi,
                    None,
                )
                .map_err(error("virtio_mmio.device"))?;
        }
    }
    for word in extra {
        cmdline.insert_str(word).map_err(error(word))?;
    }
    Ok(cmdline)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(console: bool, devices: &[Resources], extra: &[String]) -> String {
        build(console, Devices::Mmio(devices), extra).unwrap().as_cstring().unwrap().into_string().unwrap()
    }

    #[test]
    fn without_a_console_the_kernel_says_emergencies_only_and_looks_for_no_serial_port() {
        let line = text(false, &[], &[]);
        assert!(line.contains("loglevel=1 earlyprintk=ttyS0,115200,keep 8250.nr_uarts=0"), "{line}");
        assert!(!line.contains(" console="), "{line}");
    }

    #[test]
    fn with_a_console_the_kernel_talks_to_it() {
        let line = text(true, &[], &[]);
        assert!(line.contains("console=ttyS0"), "{line}");
        assert!(!line.contains("loglevel") && !line.contains("earlyprintk"), "{line}");
    }

    #[test]
    fn devices_are_announced_and_the_users_words_come_last() {
        let devices = [Resources { address: 0xd000_0000, gsi: 5 }];
        let line = text(false, &devices, &["loglevel=7".into()]);
        assert!(line.ends_with("virtio_mmio.device=4K@0xd0000000:5 loglevel=7"), "{line}");
    }

    #[test]
    fn the_kernel_looks_for_a_bus_only_if_there_is_one() {
        let line = build(false, Devices::Pci, &[]).unwrap().as_cstring().unwrap().into_string().unwrap();
        assert!(line.ends_with(" pci=conf1,noearly"), "{line}");
        assert!(text(false, &[], &[]).ends_with(" pci=off"));
    }

    #[test]
    fn a_word_that_the_kernel_could_not_read_is_named() {
        let error = build(false, Devices::Mmio(&[]), &["a\nb".into()]).unwrap_err();
        assert!(error.to_string().contains("\"a\\nb\""), "{error}");
        let error = build(false, Devices::Mmio(&[]), &["x".repeat(4096)]).unwrap_err();
        assert!(error.to_string().starts_with("kernel_args"), "{error}");
    }

    #[test]
    fn all_devices_fit() {
        let devices: Vec<_> = (0..).map_while(layout::mmio_slot).collect();
        assert!(text(false, &devices, &[]).len() < CAPACITY);
    }
}
