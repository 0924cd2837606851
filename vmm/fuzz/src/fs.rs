//! The virtio-fs device, by a guest that sends any FUSE request. It never reaches a file outside of the shared
//! directory.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Once,
};

use anyhow::{Context, Result, ensure};
use bulkhead_vmm::virtio::fs::Fs;
use bulkhead_vmm_api::ShareConfig;
use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    signal::{SigHandler, Signal, signal},
};

use crate::{
    guest::{BUFFERS, Buffer, Guest},
    input::Input,
};

const REQUESTS: usize = 1;
const ANSWER: u64 = BUFFERS + 0x2_0000;
const ANSWER_LEN: u32 = 0x2_0000;
/// FUSE_INIT, and the last opcode of Linux 6.12.
const INIT: u32 = 26;
const LAST_OPCODE: u32 = 53;
/// FUSE_IOCTL.
const IOCTL: u32 = 39;
/// The ioctls that the server knows (FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IOC_GETVERSION, FS_IOC_FSGETXATTR and
/// FS_IOC_FSSETXATTR), and FS_IOC_SETVERSION.
const IOCTLS: [u32; 6] = [0x8008_6601, 0x4008_6602, 0x8008_7601, 0x801c_581f, 0x401c_5820, 0x4008_7602];
/// Bytes of `fuse_in_header`.
const HEADER: usize = 40;
/// The contents of a file beside the shared directory.
const SECRET: &[u8] = b"the host's";
/// The size limit for files. The device does not limit it, and a guest would fill the disk.
const LONGEST_FILE: u64 = 1 << 20;

/// Names that the guest tries.
const NAMES: [&str; 12] =
    ["file", "dir", "link", "up", "new", ".", "..", "../secret", "/", "/proc/self/exe", "", "user.attribute"];

/// Runs the program on a share of each kind.
pub fn run(bytes: &[u8]) -> Result<()> {
    limit_files();
    [false, true].into_iter().try_for_each(|exclusive| run_on(exclusive, bytes))
}

fn run_on(exclusive: bool, bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let outside = tempfile::tempdir()?;
    let share = share_in(outside.path()).context("cannot make what is shared")?;
    let config = ShareConfig { tag: "share".into(), dir: share.clone(), exclusive };
    let mut guest = Guest::new(Box::new(Fs::with_threads(&config, &share, 1, 1)?), "fs")?;
    guest.start();
    while !input.is_over() {
        match input.below(12) {
            0 => guest.misbehave(&mut input),
            1 => init(&mut guest, &mut input),
            _ => request(&mut guest, &mut input),
        }
    }
    guest.behave();
    guest.start();
    init(&mut guest, &mut Input::new(&[]));
    ensure!(guest.used(REQUESTS) == 1, "the device does not answer its next driver");
    is_untouched(outside.path())
}

/// Makes a directory to share, beside a file that must not be reached.
fn share_in(outside: &Path) -> Result<PathBuf> {
    let share = outside.join("share");
    fs::create_dir(&share)?;
    fs::write(outside.join("secret"), SECRET)?;
    fs::write(share.join("file"), b"the guest's")?;
    fs::create_dir(share.join("dir"))?;
    symlink("../secret", share.join("link"))?;
    symlink("..", share.join("up"))?;
    Ok(share)
}

fn is_untouched(outside: &Path) -> Result<()> {
    let mut names: Vec<_> = fs::read_dir(outside)?.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    ensure!(names == ["secret", "share"], "the guest made or removed something outside: {names:?}");
    let secret = fs::read(outside.join("secret"))?;
    ensure!(secret == SECRET, "the guest changed a file outside: {secret:?}");
    Ok(())
}

/// Sends FUSE_INIT. If the input has ended, its version is 7.38.
fn init(guest: &mut Guest, input: &mut Input) {
    let mut body = Vec::new();
    for usual in [7, 38, 0x2_0000, 0x3fff_fffb] {
        let word: u32 = if input.u8() < 200 { usual } else { input.u32() };
        body.extend(word.to_le_bytes());
    }
    send(guest, INIT, 0, 0, &body, ANSWER_LEN);
}

/// Sends a request. Its body consists of numbers, names and bytes in an order that may be right.
fn request(guest: &mut Guest, input: &mut Input) {
    let opcode = u32::from(input.u8()) % (LAST_OPCODE + 2);
    let node = if input.u8() < 250 { number(input) } else { input.u64() };
    let uid = input.choose(&[0, 0, 1000, u32::MAX]);
    let mut body = if opcode == IOCTL { ioctl(input) } else { Vec::new() };
    for _ in 0..input.below(12) {
        match input.below(5) {
            0 => body.extend(number(input).to_le_bytes()),
            1 => body.extend(input.u32().to_le_bytes()),
            2 => body.extend([0; 16]),
            3 => {
                body.extend(input.choose(&NAMES).as_bytes());
                body.push(0);
            }
            _ => {
                let count = input.u8().into();
                body.extend(input.bytes(count));
            }
        }
    }
    let room = if input.u8() < 220 { ANSWER_LEN } else { input.u16().into() };
    send(guest, opcode, node, uid, &body, room);
}

/// `fuse_ioctl_in` of an ioctl. Its argument may follow.
fn ioctl(input: &mut Input) -> Vec<u8> {
    let mut body = number(input).to_le_bytes().to_vec();
    let command = if input.u8() < 200 { input.choose(&IOCTLS) } else { input.u32() };
    for word in [input.u8().into(), command, 0, 0] {
        body.extend(word.to_le_bytes());
    }
    for usual in [[0, 4, 28], [4, 8, 28]] {
        let size: u32 = if input.u8() < 200 { input.choose(&usual) } else { input.u32() };
        body.extend(size.to_le_bytes());
    }
    body
}

/// The number of a node or a handle: the low 20 bits are an index, the others a serial number.
fn number(input: &mut Input) -> u64 {
    let count = u64::from(input.u8()) % 8;
    count << 20 | (count + 1)
}

fn send(guest: &mut Guest, opcode: u32, node: u64, uid: u32, body: &[u8], room: u32) {
    let mut header = Vec::new();
    header.extend(((HEADER + body.len()) as u32).to_le_bytes());
    header.extend(opcode.to_le_bytes());
    header.extend(1u64.to_le_bytes());
    header.extend(node.to_le_bytes());
    for word in [uid, uid, 1, 0] {
        header.extend(word.to_le_bytes());
    }
    guest.write(BUFFERS, &header);
    guest.write(BUFFERS + HEADER as u64, body);
    let buffers = [
        Buffer { address: BUFFERS, len: HEADER as u32, write: false },
        Buffer { address: BUFFERS + HEADER as u64, len: body.len() as u32, write: false },
        Buffer { address: ANSWER, len: room, write: true },
    ];
    guest.offer(REQUESTS, &buffers);
    guest.kick(REQUESTS);
    let answer = guest.read(ANSWER, guest.written(REQUESTS).min(ANSWER_LEN) as usize);
    assert!(!contains(&answer, SECRET), "the guest read a file outside of its directory by opcode {opcode}");
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

fn limit_files() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // A write beyond the limit is an error then, and not a signal.
        #[allow(unsafe_code)]
        // SAFETY: no signal handler is installed.
        let ignored = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
        let limited = getrlimit(Resource::RLIMIT_FSIZE)
            .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_FSIZE, LONGEST_FILE.min(hard), hard));
        assert!(ignored.is_ok() && limited.is_ok(), "cannot limit the length of files");
    });
}
