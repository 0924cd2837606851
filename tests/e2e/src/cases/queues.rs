//! Network cards and disks have a queue for each processor, up to four. A VM with one processor has one: the unit tests
//! of the devices say so, and all other cases here run in such VMs if the host has one processor.

use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::Case;
use super::devices::Loop;
use crate::ctr::Host;
use crate::fixtures::{CONFIGURATION, Replaced};
use crate::network::{Bridge, GATEWAY};
use crate::shim::{Shim, granted};

pub(super) const CASES: &[Case] = &[Case::bulkhead("each_processor_has_a_queue_and_data_pass_by_it", queues)];

const QUEUES: &str = "ls /sys/class/net/eth0/queues; ls /sys/block/vda/mq";

/// A program on the processor of this number sends packets and gets answers, writes to the disk, has that made durable,
/// and reads it from the disk again. Linux chooses the queue by the processor.
fn works(disk: &Loop, processor: u32) -> String {
    format!(
        "taskset {mask} sh -c 'ping -c 1 -W 10 {GATEWAY} >/dev/null && \
         head -c 65536 /dev/zero | tr \"\\0\" {processor} | dd of={0} bs=4096 seek={1} conv=fsync 2>/dev/null && \
         dd if={0} iflag=direct bs=4096 skip={1} count=16 2>/dev/null | tr -dc {processor} | wc -c'; ",
        disk.path(),
        16 + 16 * processor,
        mask = 1 << processor,
    )
}

fn queues(host: &Host) -> Result<()> {
    let _configured = Replaced::file(Path::new(CONFIGURATION), "vcpus = 2\n")?;
    let bridge = Bridge::new()?;
    let (namespace, disk) = (bridge.namespace(2)?, Loop::new()?);
    let container = namespace.container(host).flags(["--cpus", "0.5", "--device", disk.path()]);
    let task = container.detach(&["sleep", "1000"])?;
    // One processor is online, and the driver of the card uses no more pairs. A disk has its queues from the start.
    task.exec(&["sh", "-c", QUEUES])?.succeeds()?.prints("rx-0\ntx-0\n0\n1\n")?;
    granted(Shim::of(host, task.id())?.update(&json!({"cpu": {"quota": -1}})))?;
    let script = format!("{QUEUES}; {}{}", works(&disk, 0), works(&disk, 1));
    let expected = "rx-0\nrx-1\ntx-0\ntx-1\n0\n1\n65536\n65536\n";
    task.exec(&["sh", "-c", &script])?.succeeds()?.prints(expected)?;
    task.dies()
}
