//! Roots on disks, which the blockfile snapshotter makes: each is a file with a file system in it.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use super::super::Case;
use crate::ctr::{Host, IMAGE, Runtime};
use crate::pods::{Pod, Pods};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("containers_of_a_pod_come_and_go", come_and_go).since(1, 7),
    Case::both("a_container_that_is_killed_leaves_what_it_wrote", kept).since(1, 7),
    Case::both("what_is_no_file_system_is_refused", damaged).since(1, 7),
];

/// With the roots of pause and of the one that stays, more than a VM has places for devices.
const MANY: u32 = 9;

fn come_and_go(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    pods.with_disks(host, || {
        pods.leave_nothing(host, || {
            let pod = Pod::start(host)?;
            // Each read is a request to the disk, also when that is about to be taken away.
            let reads = "while :; do cat /sys/block/*/serial >/dev/null 2>&1; sleep 0.1; done";
            let stays = pod.container().named("stays", 0).start(&["sh", "-c", reads])?;
            stays
                .sh("echo text > /file; grep -c '^/dev/.* / ext4 ' /proc/mounts")?
                .succeeds()?
                .prints("1\n")?;
            for attempt in 0..MANY {
                let script = "test ! -e /file && echo other > /file && cat /file";
                let container = pod.container().named("comes", attempt).start(&["sh", "-c", script])?;
                container.finish()?.succeeds()?.prints("other\n")?;
                container.remove()?;
            }
            let read_only = pod.container().named("reads", 0);
            let read_only = read_only.security(|security| security.readonly_rootfs = true);
            read_only.sh("touch /file")?.exits(1)?.fails_with("Read-only file system")?;
            stays.exec(&["cat", "/file"])?.succeeds()?.prints("text\n")?;
            pod.remove()
        })
    })
}

/// A container of ctr whose root is on a disk.
struct OnDisk<'p> {
    pods: &'p Pods,
    id: String,
}

impl<'p> OnDisk<'p> {
    fn create(host: &Host, pods: &'p Pods, command: &[&str]) -> Result<Self> {
        let id = host.new_id();
        let create = pods.ctr().args(["containers", "create", "--snapshotter", "blockfile", "--runtime"]);
        let create = create.args([host.runtime().in_containerd(), IMAGE, &id]).args(command);
        create.run()?.succeeds()?;
        Ok(Self { pods, id })
    }

    /// The file with the file system.
    fn disk(&self) -> Result<PathBuf> {
        let mounts =
            self.pods.ctr().args(["snapshots", "--snapshotter", "blockfile", "mounts", "/mnt", &self.id]);
        let mounts = mounts.run()?;
        let path = mounts.succeeds()?.text();
        let path =
            path.split_whitespace().find(|word| word.starts_with("/var/")).context("no disk is mounted")?;
        Ok(path.into())
    }

    fn remove(self) -> Result<()> {
        self.pods.ctr().args(["containers", "rm", &self.id]).run()?.succeeds()?;
        Ok(())
    }
}

fn kept(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    pods.with_disks(host, || {
        let script = "echo kept > /kept; echo ready; sleep 1000";
        let container = OnDisk::create(host, pods, &["sh", "-c", script])?;
        pods.ctr().args(["tasks", "start", "--detach", &container.id]).run()?.succeeds()?;
        let exec = ["sh", "-c", "until test -s /kept; do sleep 0.1; done"];
        let exec = pods.ctr().args(["tasks", "exec", "--exec-id", "waits", &container.id]).args(exec);
        exec.run()?.succeeds()?;
        pods.ctr().args(["tasks", "rm", "--force", &container.id]).run()?;
        // The text is in the file system on the host now.
        let disk = fs::read(container.disk()?).context("cannot read the disk")?;
        ensure!(disk.windows(5).any(|bytes| bytes == b"kept\n"), "the disk has not what was written");
        container.remove()
    })
}

fn damaged(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    pods.with_disks(host, || {
        pods.leave_nothing(host, || {
            let container = OnDisk::create(host, pods, &["true"])?;
            let disk = container.disk()?;
            let length = fs::metadata(&disk).context("cannot look at the disk")?.len();
            let file = fs::File::create(&disk).and_then(|file| file.set_len(length));
            file.context("cannot empty the disk")?;
            let start = pods.ctr().args(["tasks", "start", &container.id]).run()?;
            start.fails_with(match host.runtime() {
                Runtime::Runc => "failed to mount rootfs component",
                Runtime::Bulkhead => "rootfs[0]",
            })?;
            container.remove()
        })
    })
}
