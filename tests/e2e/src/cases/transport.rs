//! How the guest reaches its devices: by a PCI bus, or, if the configuration says so, by what the kernel's command line
//! names (mmio).

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::Case;
use super::devices::Loop;
use super::templates::template_of;
use crate::command::{Cmd, wait_until};
use crate::ctr::{Host, Task};
use crate::fixtures::{CONFIGURATION, Replaced};
use crate::network::{Bridge, address_in};
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("a_clone_has_a_pci_bus_and_gets_a_disk_with_messages_of_its_own", pci),
    Case::bulkhead("a_slot_of_the_pci_bus_has_one_disk_after_another", reused_pci).since(1, 7),
    Case::bulkhead("a_clone_with_mmio_gets_a_disk_and_a_network_card", mmio),
    Case::bulkhead("a_slot_of_mmio_has_one_disk_after_another", reused_mmio).since(1, 7),
];

const MMIO: &str = "transport = \"mmio\"\n";
/// How long a card may take to come, on an ordinary machine.
const COMES: Duration = Duration::from_secs(20);

/// The driver of each function, and how often each of its messages has interrupted a processor.
const SCRIPT: &str = "for it in /sys/bus/pci/devices/*; do readlink $it/driver; done; \
                      grep PCI-MSIX /proc/interrupts";

/// Its VM is a clone, and reads from the disk that it got.
fn serves(task: &Task<'_>, disk: &Loop) -> Result<()> {
    template_of(task)?;
    task.exec(&["head", "-c", "11", disk.path()])?.succeeds()?.prints("of the host")?;
    Ok(())
}

fn pci(host: &Host) -> Result<()> {
    let disk = Loop::new()?;
    let task = host.container().flags(["--device", disk.path()]).detach(&["sleep", "1000"])?;
    serves(&task, &disk)?;
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

fn mmio(host: &Host) -> Result<()> {
    let _configured = Replaced::file(Path::new(CONFIGURATION), MMIO)?;
    let (disk, bridge) = (Loop::new()?, Bridge::new()?);
    let namespace = bridge.namespace(2)?;
    let flags = ["--null-io", "--device", disk.path()];
    let task = namespace.container(host).flags(flags).detach(&["sleep", "1000"])?;
    serves(&task, &disk)?;
    const NUMBER: u8 = 25;
    namespace.add("net1", NUMBER)?;
    let script =
        "ls /sys/bus/pci/devices; cd /sys/class; for it in block/vda net/*[0-9]; do readlink $it; done";
    wait_until("another card in the container", host.patience(COMES), || {
        Ok(task.exec(&["sh", "-c", script])?.text().contains("/net1"))
    })?;
    Cmd::new("ping").args(["-c", "2", "-W", "10", &address_in(NUMBER)]).run()?.succeeds()?;
    let found = task.exec(&["sh", "-c", script])?.text();
    let is_mmio = found.lines().all(|line| line.contains("/virtio-mmio.")) && found.lines().count() == 3;
    ensure!(is_mmio, "expected  a disk and two cards of virtio-mmio\ncame      {found:?}");
    task.dies()
}

/// Each prints the place of the disk that is its root.
const PLACE: &str =
    "disk=$(sed -n 's,^/dev/\\([a-z]*\\) / .*,\\1,p' /proc/mounts); readlink /sys/block/$disk";

fn reused_pci(host: &Host) -> Result<()> {
    reused(host, "/pci0000:00/")
}

fn reused_mmio(host: &Host) -> Result<()> {
    let _configured = Replaced::file(Path::new(CONFIGURATION), MMIO)?;
    reused(host, "/virtio-mmio.")
}

fn reused(host: &Host, bus: &str) -> Result<()> {
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
        let is_one = places[0] == places[1] && places[0].contains(bus);
        ensure!(is_one, "expected  one place of the bus for both disks\ncame      {places:?}");
        stays.exec(&["true"])?.succeeds()?;
        pod.remove()
    })
}
