//! The kernel's command line.

use linux_loader::cmdline::Cmdline;
use vm_memory::GuestAddress;

use super::layout;

/// COMMAND_LINE_SIZE of Linux on x86, with its final NUL.
const CAPACITY: usize = 2048;

/// What every guest gets.
const ALWAYS: &[&str] = &[
    // A guest that reboots writes 0xfe to port 0x64, which is how the VMM learns that it wants to end;
    // anything else the kernel could try (ACPI, a triple fault) is absent or looks like a crash.
    "reboot=k",
    // A guest that panics must end, not hang: the VM's end is what the shim waits for.
    "panic=-1",
    // KVM keeps the vCPUs' clocks in step: no test at the start of each vCPU, no watchdog later.
    "tsc=reliable",
    // The devices reach all of the guest's memory: no 64 MiB of bounce buffers for a guest that has some
    // above 4 GiB.
    "swiotlb=noforce",
    // Per-CPU memory in chunks of what a CPU needs, 168 KiB, instead of 2 MiB: to the second chunk, which the first
    // container takes, belong eight bytes of accounting for each four of its own, and all of them are written to.
    "percpu_alloc=page",
    // A kernel that finds one vCPU would take the LOCK prefix out of its 7,500 atomic instructions one by one, which was a sixth
    // of its boot in the rig, and put them back when there is another.
    "noreplace-smp",
    // Memory that is plugged can be used at once, and for all that there is (ZONE_NORMAL): the kernel describes what comes
    // next in what came before, and a small VM that grows large has no other place for page tables and file names. Movable
    // memory alone could be unplugged more surely, which is not asked for.
    "memhp_default_state=online",
];

/// A word that the kernel cannot be given.
#[derive(Debug, thiserror::Error)]
#[error("kernel_args: cannot add {word:?} to the kernel's command line")]
pub struct CmdlineError {
    word: String,
    source: linux_loader::cmdline::Error,
}

/// A virtio-mmio device, as the kernel is told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmioDevice {
    /// Where its registers start.
    pub address: u64,
    /// Its interrupt.
    pub gsi: u32,
}

/// The command line of a guest with these `devices`; `extra` words come last, so that they win.
pub fn build(console: bool, devices: &[MmioDevice], extra: &[String]) -> Result<Cmdline, CmdlineError> {
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
        // Every character of a serial port is an exit, and so is every step of probing for one.
        add("quiet")?;
        add("8250.nr_uarts=0")?;
    }
    for device in devices {
        cmdline
            .add_virtio_mmio_device(layout::VIRTIO_MMIO_SIZE, GuestAddress(device.address), device.gsi, None)
            .map_err(error("virtio_mmio.device"))?;
    }
    for word in extra {
        cmdline.insert_str(word).map_err(error(word))?;
    }
    Ok(cmdline)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(console: bool, devices: &[MmioDevice], extra: &[String]) -> String {
        build(console, devices, extra).unwrap().as_cstring().unwrap().into_string().unwrap()
    }

    #[test]
    fn without_a_console_the_kernel_is_quiet_and_looks_for_no_serial_port() {
        let line = text(false, &[], &[]);
        assert!(line.contains("quiet 8250.nr_uarts=0"), "{line}");
        assert!(!line.contains("console="), "{line}");
    }

    #[test]
    fn with_a_console_the_kernel_talks_to_it() {
        let line = text(true, &[], &[]);
        assert!(line.contains("console=ttyS0"), "{line}");
        assert!(!line.contains("quiet"), "{line}");
    }

    #[test]
    fn devices_are_announced_and_the_users_words_come_last() {
        let devices = [MmioDevice { address: 0xd000_0000, gsi: 5 }];
        let line = text(false, &devices, &["loglevel=7".into()]);
        assert!(line.ends_with("virtio_mmio.device=4K@0xd0000000:5 loglevel=7"), "{line}");
    }

    #[test]
    fn a_word_that_the_kernel_could_not_read_is_named() {
        let error = build(false, &[], &["a\nb".into()]).unwrap_err();
        assert!(error.to_string().contains("\"a\\nb\""), "{error}");
        let error = build(false, &[], &["x".repeat(4096)]).unwrap_err();
        assert!(error.to_string().starts_with("kernel_args"), "{error}");
    }

    #[test]
    fn all_devices_fit() {
        let devices: Vec<_> = (layout::FIRST_VIRTIO_GSI..=layout::LAST_GSI)
            .map(|gsi| MmioDevice { address: 0xd000_0000, gsi })
            .collect();
        assert!(text(false, &devices, &[]).len() < CAPACITY);
    }
}
