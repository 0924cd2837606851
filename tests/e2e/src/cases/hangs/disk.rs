//! A block device that stops answering.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::super::devices::attach;
use super::super::jail::Vmm;
use super::files::{Files, opcode};
use crate::command::{Cmd, wait_until};
use crate::cri::messages as cri;
use crate::ctr::Host;
use crate::fixtures::scratch;
use crate::pods::Pod;

/// The shim gives a killed container 20 s, and a killed VMM a few.
const ENDS: Duration = Duration::from_secs(35);
/// A disk has a minute to be mounted.
const COMES: Duration = Duration::from_secs(90);
/// One of several containers of a pod has 100 s.
const POD_ENDS: Duration = Duration::from_secs(120);
/// Bytes.
const SIZE: u64 = 16 << 20;

/// A process that reads from it waits, and its kernel cannot kill it. Nor can the host's kernel kill the VMM, which
/// reads from the disk for it. All else goes on, and the pod is ended and deleted. What the VMM keeps goes when the
/// disk has answered.
pub(super) fn pod_ends(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let disk = Disk::new()?;
        let task = host.container().flags(["--device", &disk.path]).detach(&["sleep", "1000"])?;
        let vmm = Vmm::of(&task)?;
        let read = |block: u32| {
            let script = "exec dd of=/dev/null bs=4096 count=1 iflag=direct";
            ["sh".to_owned(), "-c".to_owned(), format!("{script} if={} skip={block}", disk.path)]
        };
        let [first, other] = [0, 1000].map(read);
        task.exec(&first.each_ref().map(String::as_str))?.succeeds()?;
        disk.hang();
        let _stuck = task.start_exec("stuck", &other.each_ref().map(String::as_str))?;
        let limit = host.patience(Duration::from_secs(10));
        wait_until("a request to wait for the disk", limit, || Ok(disk.waiting() > 0))?;
        task.exec(&["echo", "alive"])?.succeeds()?.prints("alive\n")?;
        let killed = Instant::now();
        task.kill("SIGKILL")?;
        task.wait_for_state("STOPPED")?;
        task.ends(137)?;
        within(host, ENDS, killed)?;
        ensure!(!vmm.has_ended(), "expected  a VMM that waits for its disk\ncame      its end");
        drop(disk);
        wait_until("the VMM to end", limit, || Ok(vmm.has_ended()))?;
        Cmd::new("bulkhead").args(["gc"]).run()?.succeeds()?;
        Ok(())
    })
}

/// While a disk hangs, another container of the pod asks for a disk of its own. The thread of the VMM that serves
/// disks does not get to it, and in the guest its probe holds the bus. So the container is refused in time, and the pod
/// is ended all the same.
pub(super) fn another_comes(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    pods.with_disks(host, || {
        pods.leave_nothing(host, || {
            let disk = Disk::new()?;
            let pod = Pod::start(host)?;
            let device = cri::Device {
                host_path: disk.path.clone(),
                container_path: "/dev/data".into(),
                permissions: "rwm".into(),
            };
            let script =
                "until test -e /go; do sleep 0.1; done; exec dd if=/dev/data of=/dev/null skip=1000 count=1";
            let reads = pod.container().named("reads", 0).config(|config| config.devices = vec![device]);
            let reads = reads.start(&["sh", "-c", script])?;
            disk.hang();
            reads.exec(&["touch", "/go"])?.succeeds()?;
            let limit = host.patience(Duration::from_secs(10));
            wait_until("a request to wait for the disk", limit, || Ok(disk.waiting() > 0))?;
            let asked = Instant::now();
            let comes = pod.container().named("comes", 0).create(&["true"])?;
            let refused = comes.start().err().context("it has started")?;
            let is_late = format!("{refused:#}").contains("does not answer MountDisk in time");
            ensure!(is_late, "expected  a disk that is not mounted in time\ncame      {refused:#}");
            within(host, COMES, asked)?;
            let stopped = Instant::now();
            pod.stop()?;
            within(host, POD_ENDS, stopped)?;
            drop(disk);
            pod.remove()?;
            Cmd::new("bulkhead").args(["gc"]).run()?.succeeds()?;
            Ok(())
        })
    })
}

fn within(host: &Host, limit: Duration, since: Instant) -> Result<()> {
    let (took, limit) = (since.elapsed(), host.patience(limit));
    ensure!(took <= limit, "expected  an answer within {limit:?}\ncame      it after {took:?}");
    Ok(())
}

/// A loop device on a file whose server stops answering.
struct Disk {
    path: String,
    hangs: Arc<AtomicBool>,
    waiting: Arc<AtomicUsize>,
    // It goes before its directory.
    files: Option<Files>,
    _directory: TempDir,
}

impl Disk {
    fn new() -> Result<Self> {
        let directory = scratch()?;
        let place = directory.path().join("files");
        fs::create_dir(&place)?;
        let (hangs, waiting) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (is_hung, counted) = (hangs.clone(), waiting.clone());
        let handler = move |code, args: &[u8]| {
            if is_hung.load(Ordering::SeqCst) {
                counted.fetch_add(1, Ordering::SeqCst);
                return None;
            }
            // fuse_read_in and fuse_write_in: the handle, the offset, and how many bytes.
            let count: [u8; 4] = args.get(16..20).and_then(|bytes| bytes.try_into().ok()).unwrap_or_default();
            Some(Ok(match code {
                opcode::READ => vec![0; u32::from_ne_bytes(count) as usize],
                opcode::WRITE => [count, [0; 4]].concat(),
                _ => Vec::new(),
            }))
        };
        let files = Files::mount(&place, SIZE, Box::new(handler))?;
        let path = attach(&place.join("0"))?;
        Ok(Self { path, hangs, waiting, files: Some(files), _directory: directory })
    }

    /// From now on it answers nothing.
    fn hang(&self) {
        self.hangs.store(true, Ordering::SeqCst);
    }

    /// How many requests have got no answer.
    fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Requests that wait fail now, and the device can be let go.
        drop(self.files.take());
        _ = Cmd::new("losetup").args(["--detach", &self.path]).run();
    }
}
