//! How the guest reaches its devices: by a PCI bus, if the configuration says so.

use std::path::Path;

use anyhow::{Result, ensure};

use super::Case;
use super::devices::Loop;
use super::templates::template_of;
use crate::ctr::Host;
use crate::fixtures::{CONFIGURATION, Replaced};
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("a_clone_with_a_pci_bus_serves_files_and_gets_a_disk_with_messages_of_its_own", pci),
    Case::bulkhead("a_slot_of_the_pci_bus_has_one_disk_after_another", reused).since(1, 7),
];

/// The driver of each function, and how often each of its messages has interrupted a processor.
const SCRIPT: &str = "for it in /sys/bus/pci/devices/*; do readlink $it/driver; done; \
                      grep PCI-MSIX /proc/interrupts";

fn pci(host: &Host) -> Result<()> {
    let _configured = Replaced::file(Path::new(CONFIGURATION), "transport = \"pci\"\n")?;
    let disk = Loop::new()?;
    let task = host.container().flags(["--device", disk.path()]).detach(&["sleep", "1000"])?;
    template_of(&task)?;
    let read = task.exec(&["head", "-c", "11", disk.path()])?;
    read.succeeds()?.prints("of the host")?;
    let found = task.exec(&["sh", "-c", SCRIPT])?;
    let text = found.succeeds()?.text().to_owned();
    // The devices that a VM is born with are at least those for randomness, sockets and files, and a card.
    let drivers = text.lines().filter(|line| line.ends_with("/virtio-pci")).count();
    ensure!(drivers >= 6, "expected  functions with the driver virtio-pci\ncame      {text:?}");
    // The disk came after the boot. Its only queue has interrupted the guest.
    let disks = text.lines().find(|line| line.ends_with("-req.0") && line.contains("PCI-MSIX"));
    let count = disks.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    ensure!(count.is_some_and(|count| count > 0), "expected  interrupts of a disk\ncame      {text:?}");
    task.dies()
}

/// Each prints the place of the disk that is its root.
const PLACE: &str =
    "disk=$(sed -n 's,^/dev/\\([a-z]*\\) / .*,\\1,p' /proc/mounts); readlink /sys/block/$disk";

fn reused(host: &Host) -> Result<()> {
    let _configured = Replaced::file(Path::new(CONFIGURATION), "transport = \"pci\"\n")?;
    let pods = host.pods()?;
    pods.with_disks(host, || {
        let pod = Pod::start(host)?;
        // Each read is a request to the disk, also when that is about to be taken away.
        let reads = "while :; do cat /sys/block/*/serial >/dev/null 2>&1; sleep 0.1; done";
        let stays = pod.container().named("stays", 0).start(&["sh", "-c", reads])?;
        let mut places = Vec::new();
        for attempt in 0..2 {
            let container = pod.container().named("comes", attempt).start(&["sh", "-c", PLACE])?;
            places.push(container.finish()?.succeeds()?.text().to_owned());
            container.remove()?;
        }
        let is_one = places[0] == places[1] && places[0].contains("/pci0000:00/");
        ensure!(is_one, "expected  one place of the bus for both disks\ncame      {places:?}");
        stays.exec(&["true"])?.succeeds()?;
        pod.remove()
    })
}
