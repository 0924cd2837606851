//! What the guest may go on believing, which spares it requests: that a name is not there, and the pages that it has of
//! a file that nobody has changed. The file server makes no use of either.
//!
//! It reads requests and answers where the guest can change them; what comes of that is an answer to the guest alone.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fuse_backend_rs::{
    abi::fuse_abi::{EntryOut, InHeader, Opcode, OpenIn, OpenOptions, OpenOut, OutHeader},
    api::{
        Vfs,
        filesystem::{Context, FileSystem},
    },
};
use vm_memory::ByteValued;

use super::CACHED_FOR;
use crate::virtio::chain::{Buffers, Chain};

const IN_HEADER: usize = size_of::<InHeader>();
const OUT_HEADER: usize = size_of::<OutHeader>();

/// FOPEN_NOFLUSH of fuse.h (7.35): a close of this file need not be told, only its release.
const NOFLUSH: u32 = 1 << 5;

/// A change that comes so soon after another may not show in a file's times, which have the granularity of a tick.
const SETTLES: Duration = Duration::from_secs(1);

/// Files whose versions are remembered. Beyond, all are forgotten, and read again.
const MOST_FILES: usize = 4096;

/// What a file was like when the guest opened it last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    size: i64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Completes the answers of the file server.
pub(super) struct Known {
    vfs: Arc<Vfs>,
    versions: HashMap<u64, Version>,
}

impl Known {
    /// Of a driver that knows nothing yet.
    pub(super) fn new(vfs: Arc<Vfs>) -> Self {
        Self { vfs, versions: HashMap::new() }
    }

    /// Completes the answer of `len` bytes to a request. Returns its length then.
    pub(super) fn complete(&mut self, mut chain: Chain, len: u32) -> u32 {
        let Some(request) = read::<InHeader, IN_HEADER>(&mut chain.readable) else { return len };
        let mut rest = chain.writable.clone();
        let Some(answer) = read::<OutHeader, OUT_HEADER>(&mut rest) else { return len };
        if request.opcode == Opcode::Lookup as u32 && answer.error == -libc::ENOENT {
            return not_there(chain.writable, request.unique).unwrap_or(len);
        }
        if request.opcode == Opcode::Open as u32 && answer.error == 0 {
            self.opened(request.nodeid, &mut chain.readable, rest);
        }
        len
    }

    /// Says what may be kept of a file that was opened.
    fn opened(&mut self, node: u64, asked: &mut Buffers, mut answer: Buffers) {
        let Some(asked) = read::<OpenIn, { size_of::<OpenIn>() }>(asked) else { return };
        let mut place = answer.clone();
        let Some(mut opened) = read::<OpenOut, { size_of::<OpenOut>() }>(&mut answer) else { return };
        if asked.flags as i32 & libc::O_ACCMODE == libc::O_RDONLY {
            opened.open_flags |= NOFLUSH;
        }
        if self.is_unchanged(node) {
            opened.open_flags |= OpenOptions::KEEP_CACHE.bits();
        }
        place.write(opened.as_slice());
    }

    /// Whether a file is as it was when the guest opened it before.
    fn is_unchanged(&mut self, node: u64) -> bool {
        let Ok((stat, _)) = self.vfs.getattr(&Context::default(), node.into(), None) else { return false };
        let version = Version {
            size: stat.st_size,
            modified: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
        };
        if self.versions.get(&node) == Some(&version) {
            return true;
        }
        if self.versions.len() >= MOST_FILES {
            self.versions.clear();
        }
        if version.has_settled() {
            self.versions.insert(node, version);
        } else {
            self.versions.remove(&node);
        }
        false
    }
}

impl Version {
    /// Whether the next change is sure to show.
    fn has_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(self.changed.0).is_ok_and(|changed| now.saturating_sub(SETTLES).as_secs() > changed)
    }
}

/// Answers that a name is not there for a while (`fuse_lookup_name` of Linux: an entry without a node). None: no room.
fn not_there(mut answer: Buffers, unique: u64) -> Option<u32> {
    let len = OUT_HEADER + size_of::<EntryOut>();
    if answer.len() < len {
        return None;
    }
    let header = OutHeader { len: len as u32, error: 0, unique };
    answer.write(header.as_slice());
    answer.write(EntryOut { entry_valid: CACHED_FOR.as_secs(), ..Default::default() }.as_slice());
    Some(header.len)
}

/// Copies a structure out of the guest's reach.
fn read<T: ByteValued + Default, const N: usize>(from: &mut Buffers) -> Option<T> {
    let mut value = T::default();
    value.as_mut_slice().copy_from_slice(&from.read_array::<N>()?);
    Some(value)
}
