//! A file server for FUSE (linux/fuse.h) with files of one digit each, which answers what it is told to.

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::AsFd;
use std::path::Path;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc::{S_IFDIR, S_IFREG};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::stuck::Hung;

/// What is answered to a request. None: nothing, ever.
pub(super) type Answer = Option<std::result::Result<Vec<u8>, Errno>>;

/// What a server does with a request: its code and its body.
pub(super) type Handler = Box<dyn Fn(u32, &[u8]) -> Answer + Send>;

/// A mounted file system. When this is dropped, it goes, and what still waits for it fails.
pub(super) struct Files {
    stop: Option<PipeWriter>,
    server: Option<JoinHandle<()>>,
    _hung: Hung,
}

impl Files {
    /// Mounts it, with files of so many bytes. The handler gets the requests to read, to write and to sync.
    pub(super) fn mount(place: &Path, size: u64, handler: Handler) -> Result<Self> {
        let hung = Hung::mount(place)?;
        let requests = hung.requests()?;
        let (stopped, stop) = pipe()?;
        let server = thread::spawn(move || {
            // If it fails, the case does: nothing is answered any more.
            let _ = serve(requests, &stopped, size, &handler);
        });
        Ok(Self { stop: Some(stop), server: Some(server), _hung: hung })
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        drop(self.stop.take());
        // It closes its copy of the requests. The file system then goes with the other one.
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// Answers the requests of the kernel, until the other end of `stopped` is closed.
fn serve(mut requests: File, stopped: &PipeReader, size: u64, handler: &Handler) -> Result<()> {
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
        let body = request.get(IN_HEADER..).context("no header")?;
        let Some(answer) = answer(code, node, size, body, handler) else { continue };
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
pub(super) mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const OPEN: u32 = 14;
    pub(in super::super) const READ: u32 = 15;
    pub(in super::super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(in super::super) const FSYNC: u32 = 20;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
}

/// The answer to a request.
fn answer(code: u32, node: u64, size: u64, args: &[u8], handler: &Handler) -> Answer {
    Some(match code {
        // The version, and the most that may be written. All else is left to the kernel.
        opcode::INIT => Ok([&numbers(&[7, 31, 0, 0, 0, 4096]), [0; 40].as_slice()].concat()),
        opcode::LOOKUP => match args {
            [name @ b'0'..=b'9', 0] => {
                let node = u64::from(*name);
                Ok([&node.to_ne_bytes(), [0; 32].as_slice(), &attributes(node, size)].concat())
            }
            _ => Err(Errno::ENOENT),
        },
        opcode::GETATTR => Ok([[0; 16].as_slice(), &attributes(node, size)].concat()),
        opcode::OPEN | opcode::OPENDIR => Ok(vec![0; 16]),
        opcode::STATFS => Ok(vec![0; 80]),
        opcode::READDIR | opcode::RELEASE | opcode::RELEASEDIR => Ok(Vec::new()),
        opcode::READ | opcode::WRITE | opcode::FSYNC => return handler(code, args),
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return None,
        _ => Err(Errno::ENOSYS),
    })
}

/// `fuse_attr`: of the root, which is node 1, or of a file.
fn attributes(node: u64, size: u64) -> Vec<u8> {
    let is_root = node == 1;
    let size = if is_root { 0 } else { size };
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
