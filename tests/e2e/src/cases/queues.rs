//! Network cards and disks have a queue for each processor, up to four.

use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::Case;
use super::devices::Loop;
use crate::ctr::{Host, Task};
use crate::fixtures::{CONFIGURATION, Replaced};
use crate::network::{Bridge, GATEWAY};
use crate::shim::{Shim, granted};

pub(super) const CASES: &[Case] = &[Case::bulkhead("each_processor_has_a_queue_and_data_pass_by_it", queues)];

/// Expects the card to use the queues of so many pairs, and the disk to have so many.
fn has(task: &Task<'_>, pairs: usize, of_disk: usize) -> Result<()> {
    let lines = |names: &[&str], count: usize| {
        let lines = names.iter().flat_map(|name| (0..count).map(move |number| format!("{name}{number}\n")));
        lines.collect::<String>()
    };
    let expected = lines(&["rx-", "tx-"], pairs) + &lines(&[""], of_disk);
    task.exec(&["sh", "-c", "ls /sys/class/net/eth0/queues; ls /sys/block/vda/mq"])?
        .succeeds()?
        .prints(&expected)?;
    Ok(())
}

/// Has a program on the processor of this number send packets and get answers, write to the disk, and have that made
/// durable. Linux chooses the queue by the processor.
fn works(task: &Task<'_>, disk: &Loop, processor: u32) -> Result<()> {
    // What is read comes from the disk, and not from the guest's memory.
    let script = format!(
        "ping -c 2 -W 10 {GATEWAY} >/dev/null && head -c 65536 /dev/zero | tr '\\0' {processor} | \
         dd of={0} bs=4096 seek={1} conv=fsync 2>/dev/null && \
         dd if={0} iflag=direct bs=4096 skip={1} count=16 2>/dev/null | tr -dc {processor} | wc -c",
        disk.path(),
        16 + 16 * processor
    );
    let mask = (1 << processor).to_string();
    task.exec(&["taskset", &mask, "sh", "-c", &script])?.succeeds()?.prints("65536\n")?;
    Ok(())
}

fn queues(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    for (vcpus, transport) in [(1, "mmio"), (2, "mmio"), (2, "pci")] {
        let text = format!("vcpus = {vcpus}\ntransport = \"{transport}\"\n");
        let _configured = Replaced::file(Path::new(CONFIGURATION), &text)?;
        let (namespace, disk) = (bridge.namespace(2)?, Loop::new()?);
        let container = namespace.container(host).flags(["--cpus", "0.5", "--device", disk.path()]);
        let task = container.detach(&["sleep", "1000"])?;
        has(&task, 1, vcpus)?;
        works(&task, &disk, 0)?;
        // All processors come online.
        granted(Shim::of(host, task.id())?.update(&json!({"cpu": {"quota": -1}})))?;
        has(&task, vcpus, vcpus)?;
        for processor in 0..vcpus as u32 {
            works(&task, &disk, processor)?;
        }
        task.dies()?;
    }
    Ok(())
}
