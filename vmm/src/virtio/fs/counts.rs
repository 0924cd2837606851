//! How many requests of each kind a share was sent.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use super::abi::opcode;

/// Room for all opcodes of Linux's driver. A guest may send any other number.
const OPCODES: usize = 64;

/// The names of the opcodes (`enum fuse_opcode`) that the driver of Linux sends to virtio-fs.
const NAMES: &[(u32, &str)] = &[
    (opcode::LOOKUP, "LOOKUP"),
    (opcode::FORGET, "FORGET"),
    (opcode::GETATTR, "GETATTR"),
    (opcode::SETATTR, "SETATTR"),
    (opcode::READLINK, "READLINK"),
    (opcode::SYMLINK, "SYMLINK"),
    (opcode::MKNOD, "MKNOD"),
    (opcode::MKDIR, "MKDIR"),
    (opcode::UNLINK, "UNLINK"),
    (opcode::RMDIR, "RMDIR"),
    (opcode::RENAME, "RENAME"),
    (opcode::LINK, "LINK"),
    (opcode::OPEN, "OPEN"),
    (opcode::READ, "READ"),
    (opcode::WRITE, "WRITE"),
    (opcode::STATFS, "STATFS"),
    (opcode::RELEASE, "RELEASE"),
    (opcode::FSYNC, "FSYNC"),
    (opcode::SETXATTR, "SETXATTR"),
    (opcode::GETXATTR, "GETXATTR"),
    (opcode::LISTXATTR, "LISTXATTR"),
    (opcode::REMOVEXATTR, "REMOVEXATTR"),
    (opcode::FLUSH, "FLUSH"),
    (opcode::INIT, "INIT"),
    (opcode::OPENDIR, "OPENDIR"),
    (opcode::READDIR, "READDIR"),
    (opcode::RELEASEDIR, "RELEASEDIR"),
    (opcode::FSYNCDIR, "FSYNCDIR"),
    (opcode::GETLK, "GETLK"),
    (opcode::SETLK, "SETLK"),
    (opcode::CREATE, "CREATE"),
    (opcode::INTERRUPT, "INTERRUPT"),
    (opcode::DESTROY, "DESTROY"),
    (opcode::IOCTL, "IOCTL"),
    (opcode::BATCH_FORGET, "BATCH_FORGET"),
    (opcode::FALLOCATE, "FALLOCATE"),
    (opcode::READDIRPLUS, "READDIRPLUS"),
    (opcode::RENAME2, "RENAME2"),
    (opcode::LSEEK, "LSEEK"),
    (opcode::COPY_FILE_RANGE, "COPY_FILE_RANGE"),
    (opcode::SYNCFS, "SYNCFS"),
    (opcode::TMPFILE, "TMPFILE"),
    (opcode::STATX, "STATX"),
];
/// Requests with another opcode.
const OTHERS: &str = "OTHER";

/// Counts requests. All threads of a share count at the same time.
pub(super) struct Counts {
    /// By opcode. The first one, which is no opcode, counts requests with unknown opcodes.
    requests: [AtomicU64; OPCODES],
}

impl Counts {
    pub(super) fn new() -> Self {
        Self { requests: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Counts a request. The opcode is a number of the guest.
    pub(super) fn add(&self, opcode: u32) {
        let index = if name_of(opcode).is_some() { opcode as usize } else { 0 };
        if let Some(count) = self.requests.get(index) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The number of requests of each kind of which there was any.
    pub(super) fn by_name(&self) -> BTreeMap<String, u64> {
        let named = (0u32..).zip(&self.requests).map(|(opcode, count)| {
            (name_of(opcode).unwrap_or(OTHERS).to_owned(), count.load(Ordering::Relaxed))
        });
        named.filter(|(_, count)| *count > 0).collect()
    }
}

fn name_of(opcode: u32) -> Option<&'static str> {
    NAMES.iter().find(|(number, _)| *number == opcode).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_counted_by_its_name() {
        let counts = Counts::new();
        assert!(counts.by_name().is_empty());
        for number in [opcode::LOOKUP, opcode::STATX, opcode::LOOKUP, 0, 63, 64, u32::MAX] {
            counts.add(number);
        }
        let expected = [("LOOKUP", 2), ("OTHER", 4), ("STATX", 1)];
        assert_eq!(counts.by_name(), expected.map(|(name, count)| (name.to_owned(), count)).into());
        assert!(NAMES.iter().all(|(number, _)| (*number as usize) < OPCODES));
    }
}
