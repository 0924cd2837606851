//! A volume whose disk takes long to write: what was written does not get to it, and everything else is served.

use std::fs::{self, File};
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc::{S_IFDIR, S_IFREG};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::command::wait_until;
use crate::ctr::Host;
use crate::fixtures::scratch;
use crate::stuck::Hung;

/// What each file contains.
const TEXT: &[u8] = b"text\n";
/// As many as the file server handles at once for one file system, if they sync.
const SYNCED: usize = 3;

pub(super) fn reads_go_on(host: &Host) -> Result<()> {
    let volume = scratch()?;
    let place = volume.path().join("slow");
    fs::create_dir(&place)?;
    let disk = SlowSyncs::mount(&place)?;
    let task = host.container().bind(volume.path(), "/vol", "rbind:rw").detach(&["sleep", "1000"])?;
    let script = "for it in 1 2 3 4 5 6; do sync /vol/slow/$it & done; wait";
    let _syncing = task.start_exec("syncing", &["sh", "-c", script])?;
    let read =
        wait_until("several syncs to wait for the disk", host.patience(Duration::from_secs(10)), || {
            Ok(disk.syncs() >= SYNCED)
        })
        .and_then(|()| task.exec(&["cat", "/vol/slow/0"])?.succeeds()?.prints("text\n").map(drop));
    // The processes that sync end now, and the container can be killed.
    drop(disk);
    read
}

/// A file system that has each file whose name is a digit, and hangs at FSYNC alone.
struct SlowSyncs {
    syncs: Arc<AtomicUsize>,
    stop: Option<PipeWriter>,
    server: Option<JoinHandle<()>>,
    _hung: Hung,
}

impl SlowSyncs {
    fn mount(place: &Path) -> Result<Self> {
        let hung = Hung::mount(place)?;
        let (requests, syncs) = (hung.requests()?, Arc::new(AtomicUsize::new(0)));
        let (stopped, stop) = pipe()?;
        let counted = syncs.clone();
        let server = thread::spawn(move || {
            // If it fails, the case does: nothing is answered any more.
            let _ = serve(requests, &stopped, &counted);
        });
        Ok(Self { syncs, stop: Some(stop), server: Some(server), _hung: hung })
    }

    /// How many FSYNC requests wait for an answer.
    fn syncs(&self) -> usize {
        self.syncs.load(Ordering::Relaxed)
    }
}

impl Drop for SlowSyncs {
    fn drop(&mut self) {
        drop(self.stop.take());
        // It closes its copy of the requests. The file system then goes with the other one.
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// Answers the requests of the kernel (linux/fuse.h), until the other end of `stopped` is closed.
fn serve(mut requests: File, stopped: &PipeReader, syncs: &AtomicUsize) -> Result<()> {
    const IN_HEADER: usize = 40;
    const LONGEST: usize = 1 << 16;
    let mut request = vec![0; LONGEST];
    loop {
        let mut ready = [
            PollFd::new(requests.as_fd(), PollFlags::POLLIN),
            PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut ready, PollTimeout::NONE)?;
        if ready[1].any() == Some(true) {
            return Ok(());
        }
        let count = match requests.read(&mut request) {
            // It was withdrawn meanwhile.
            Err(error) if error.raw_os_error() == Some(Errno::ENOENT as i32) => continue,
            read => read?,
        };
        let request = request.get(..count).context("no request")?;
        let number = |at: usize| -> Result<u64> {
            Ok(u64::from_ne_bytes(request.get(at..at + 8).context("a short request")?.try_into()?))
        };
        let code = (number(0)? >> 32) as u32;
        let (unique, node) = (number(8)?, number(16)?);
        let Some(answer) = answer(code, node, request.get(IN_HEADER..).context("no header")?, syncs) else {
            continue;
        };
        let (error, body) = answer.map_or_else(|error| (-(error as i32), Vec::new()), |body| (0, body));
        let mut reply = (16 + body.len() as u32).to_ne_bytes().to_vec();
        reply.extend(error.to_ne_bytes());
        reply.extend(unique.to_ne_bytes());
        reply.extend(body);
        match requests.write_all(&reply) {
            Err(error) if error.raw_os_error() == Some(Errno::ENOENT as i32) => {}
            written => written?,
        }
    }
}

/// `enum fuse_opcode`.
mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
}

/// The answer to a request. None: it gets none.
fn answer(
    code: u32,
    node: u64,
    args: &[u8],
    syncs: &AtomicUsize,
) -> Option<std::result::Result<Vec<u8>, Errno>> {
    Some(match code {
        // The version, and the most that may be written. All else is left to the kernel.
        opcode::INIT => Ok([&numbers(&[7, 31, 0, 0, 0, 4096]), [0; 40].as_slice()].concat()),
        opcode::LOOKUP => match args {
            [name @ b'0'..=b'9', 0] => {
                let node = u64::from(*name);
                Ok([&node.to_ne_bytes(), [0; 32].as_slice(), &attributes(node)].concat())
            }
            _ => Err(Errno::ENOENT),
        },
        opcode::GETATTR => Ok([[0; 16].as_slice(), &attributes(node)].concat()),
        opcode::OPEN | opcode::OPENDIR => Ok(vec![0; 16]),
        // fuse_read_in: the handle, and the offset.
        opcode::READ => match args.get(8..16) {
            Some(offset) if offset == [0; 8].as_slice() => Ok(TEXT.to_vec()),
            _ => Ok(Vec::new()),
        },
        opcode::STATFS => Ok(vec![0; 80]),
        opcode::READDIR | opcode::RELEASE | opcode::RELEASEDIR => Ok(Vec::new()),
        opcode::FSYNC => {
            syncs.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return None,
        _ => Err(Errno::ENOSYS),
    })
}

/// `fuse_attr`: of the root, which is node 1, or of a file.
fn attributes(node: u64) -> Vec<u8> {
    let is_root = node == 1;
    let size = if is_root { 0 } else { TEXT.len() as u64 };
    let (mode, links) = if is_root { (S_IFDIR | 0o755, 2) } else { (S_IFREG | 0o666, 1) };
    let [ino, size, zeros] = [node, size, 0].map(u64::to_ne_bytes);
    // ino, size, blocks, three times, their nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags
    let mut attributes = [ino, size, zeros, zeros, zeros, zeros].concat();
    attributes.extend(numbers(&[0, 0, 0, mode, links, 0, 0, 0, 4096, 0]));
    attributes
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}
