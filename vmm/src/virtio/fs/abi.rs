//! The wire format of FUSE (linux/fuse.h): of version 7.38, with STATX of 7.39 and ALLOW_IDMAP of 7.41. POLLED_LOCKS is
//! in our guest kernel only. Numbers have the byte order of the host, which is that of the guest too.

use std::ffi::CStr;

use rustix::io::Errno;

pub(super) type Result<T> = std::result::Result<T, Errno>;

/// `fuse_in_header` and `fuse_out_header`, in bytes.
pub(super) const IN_HEADER: usize = 40;
pub(super) const OUT_HEADER: usize = 16;
/// Bytes of `fuse_write_in`. The data follows it.
pub(super) const WRITE_IN: usize = 40;
/// Where `flags` is in `fuse_write_in`: the flags of the open file, and those of the write.
pub(super) const WRITE_FLAGS: usize = 32;

/// Bytes of `fuse_dirent`. The name follows it.
pub(super) const DIRENT: usize = 24;

/// The node ID of the shared directory (FUSE_ROOT_ID).
pub(super) const ROOT: u64 = 1;

pub(super) const MAJOR: u32 = 7;
/// The minor version that the server announces.
pub(super) const MINOR: u32 = 38;
/// The oldest minor version with the structures of this file. It has introduced `fuse_init_out.max_pages`.
pub(super) const OLDEST_MINOR: u32 = 28;

/// `enum fuse_opcode`.
pub(super) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const GETLK: u32 = 31;
    pub(crate) const SETLK: u32 = 32;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const COPY_FILE_RANGE: u32 = 47;
    pub(crate) const SYNCFS: u32 = 50;
    pub(crate) const TMPFILE: u32 = 51;
    pub(crate) const STATX: u32 = 52;
}

/// `fuse_init_in.flags` and `fuse_init_out.flags`.
pub(super) mod feature {
    pub(crate) const ASYNC_READ: u32 = 1 << 0;
    pub(crate) const POSIX_LOCKS: u32 = 1 << 1;
    pub(crate) const ATOMIC_O_TRUNC: u32 = 1 << 3;
    pub(crate) const BIG_WRITES: u32 = 1 << 5;
    pub(crate) const DONT_MASK: u32 = 1 << 6;
    pub(crate) const FLOCK_LOCKS: u32 = 1 << 10;
    pub(crate) const AUTO_INVAL_DATA: u32 = 1 << 12;
    pub(crate) const DO_READDIRPLUS: u32 = 1 << 13;
    pub(crate) const READDIRPLUS_AUTO: u32 = 1 << 14;
    pub(crate) const ASYNC_DIO: u32 = 1 << 15;
    pub(crate) const PARALLEL_DIROPS: u32 = 1 << 18;
    pub(crate) const POSIX_ACL: u32 = 1 << 20;
    pub(crate) const MAX_PAGES: u32 = 1 << 22;
    pub(crate) const CACHE_SYMLINKS: u32 = 1 << 23;
    pub(crate) const HANDLE_KILLPRIV_V2: u32 = 1 << 28;
    pub(crate) const SETXATTR_EXT: u32 = 1 << 29;
    pub(crate) const INIT_EXT: u32 = 1 << 30;
}

/// `fuse_init_in.flags2` and `fuse_init_out.flags2`, with INIT_EXT.
pub(super) mod further_feature {
    pub(crate) const ALLOW_IDMAP: u32 = 1 << (40 - 32);
    /// Of our guest kernel alone: see `file_locks`.
    pub(crate) const POLLED_LOCKS: u32 = 1 << (63 - 32);
}

/// `FUSE_ATTR_FILE_SYSTEM_SHIFT`, which only our kernel has (kernel-config/patches/fuse-device-numbers.patch): the
/// upper 16 bits of `fuse_attr.flags` are the number of the file system that a file is on.
pub(super) const ATTR_FILE_SYSTEM_SHIFT: u32 = 16;
/// `FUSE_GETATTR_FH`: the request has a handle.
pub(super) const GETATTR_FH: u32 = 1;
/// `FUSE_WRITE_KILL_SUIDGID` and `FUSE_OPEN_KILL_SUIDGID`: clear the set-user-ID and set-group-ID bits.
pub(super) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
pub(super) const OPEN_KILL_SUIDGID: u32 = 1;
/// `FUSE_SETXATTR_ACL_KILL_SGID`: clear the set-group-ID bit.
pub(super) const SETXATTR_ACL_KILL_SGID: u32 = 1;
/// `FUSE_LK_FLOCK`: the lock is one of flock(2).
pub(super) const LOCK_IS_FLOCK: u32 = 1;
/// `FUSE_FSYNC_FDATASYNC`.
pub(super) const FSYNC_DATA: u32 = 1;
/// `FOPEN_DIRECT_IO`: the guest reads from the file without its page cache.
pub(super) const OPEN_DIRECT_IO: u32 = 1;
/// `FOPEN_KEEP_CACHE`: the pages of the file in the page cache of the guest are still valid.
pub(super) const OPEN_KEEP_CACHE: u32 = 1 << 1;
/// `FOPEN_NONSEEKABLE`: the file has no positions.
pub(super) const OPEN_NONSEEKABLE: u32 = 1 << 2;
/// `FOPEN_CACHE_DIR`: the guest may cache the entries of the directory.
pub(super) const OPEN_CACHE_DIR: u32 = 1 << 3;
/// `FOPEN_NOFLUSH`: the guest need not send FLUSH when the file is closed.
pub(super) const OPEN_NOFLUSH: u32 = 1 << 5;

/// `fuse_open_in.flags` with which Linux opens a file or directory to send one of the ioctls for inode flags. It does
/// not look at what the answer says about caches, and cannot try again (fs/fuse/ioctl.c, fuse_priv_ioctl_prepare). A
/// 32-bit process without O_LARGEFILE opens a file to read it by the same flags; a 64-bit process always has that one.
pub(super) const OPENED_FOR_IOCTL: u32 = 0;

/// `fuse_setattr_in.valid`.
pub(super) mod set {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const FH: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    pub(crate) const KILL_SUIDGID: u32 = 1 << 11;
}

/// `fuse_in_header`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    pub(super) len: u32,
    pub(super) opcode: u32,
    pub(super) unique: u64,
    pub(super) node: u64,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// The number of the thread in the guest (`pid`). A hostile guest may write any.
    pub(super) thread: u32,
}

impl Header {
    pub(super) fn parse(bytes: &[u8; IN_HEADER]) -> Result<Self> {
        let mut args = Args::new(bytes);
        Ok(Self {
            len: args.u32()?,
            opcode: args.u32()?,
            unique: args.u64()?,
            node: args.u64()?,
            uid: args.u32()?,
            gid: args.u32()?,
            thread: args.u32()?,
        })
    }
}

/// The arguments of a request, copied from guest memory. Each call reads from the front. A missing argument is an
/// error.
#[derive(Clone)]
pub(super) struct Args<'a>(&'a [u8]);

impl<'a> Args<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_ne_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_ne_bytes)
    }

    pub(super) fn skip(&mut self, count: usize) -> Result<()> {
        self.bytes(count).map(drop)
    }

    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(front)
    }

    /// A string with its NUL: the target of a symbolic link, or the name of an extended attribute.
    pub(super) fn text(&mut self) -> Result<&'a CStr> {
        let text = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        self.skip(text.count_bytes() + 1)?;
        Ok(text)
    }

    /// A name in a directory. It is not a path, and not `.` or `..`.
    pub(super) fn name(&mut self) -> Result<&'a CStr> {
        let name = self.text()?;
        match name.to_bytes() {
            b"" | b"." | b".." => Err(Errno::INVAL),
            bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
            _ => Ok(name),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.bytes(N)?.try_into().map_err(|_| Errno::INVAL)
    }
}

/// The body of an answer. Each call appends a field.
#[derive(Default)]
pub(super) struct Body(Vec<u8>);

impl Body {
    pub(super) fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub(super) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub(super) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub(super) fn zeros(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// Appends `fuse_dirent`, padded to 8 bytes. Returns the unchanged body as an error if it would have more than
    /// `room` bytes.
    pub(super) fn dirent(self, room: usize, entry: &Dirent) -> std::result::Result<Self, Self> {
        let (len, padding) = (entry.name.count_bytes(), entry.name.count_bytes().next_multiple_of(8));
        if self.0.len() + DIRENT + padding > room {
            return Err(self);
        }
        let filled = self.u64(entry.ino).u64(entry.next).u32(len as u32).u32(entry.kind);
        Ok(filled.bytes(entry.name.to_bytes()).zeros(padding - len))
    }

    /// Removes all but the first `len` bytes.
    pub(super) fn cut(mut self, len: usize) -> Self {
        self.0.truncate(len);
        self
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// An entry of a directory.
pub(super) struct Dirent<'a> {
    pub(super) ino: u64,
    /// The offset of the next entry.
    pub(super) next: u64,
    /// `DT_*`.
    pub(super) kind: u32,
    pub(super) name: &'a CStr,
}

/// Encodes a device number for the guest's kernel, which decodes it by `new_decode_dev`.
pub(super) fn encode_dev(major: u32, minor: u32) -> u32 {
    minor & 0xff | (major & 0xfff) << 8 | (minor & !0xff) << 12
}

/// Decodes a device number that `new_encode_dev` has encoded.
pub(super) fn decode_dev(dev: u32) -> (u32, u32) {
    (dev >> 8 & 0xfff, dev & 0xff | dev >> 12 & 0xf_ff00)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_name() {
        for (bytes, name) in [
            (&b"file\0"[..], Some("file")),
            (b"...\0", Some("...")),
            (b"file", None),
            (b"", None),
            (b"\0", None),
            (b".\0", None),
            (b"..\0", None),
            (b"a/b\0", None),
            (b"/\0", None),
        ] {
            let found = Args::new(bytes).name();
            assert_eq!(found.ok().map(|name| name.to_str().unwrap()), name, "{bytes:?}");
        }
    }

    #[test]
    fn the_number_of_a_device_comes_back() {
        for (major, minor) in [(0, 0), (1, 5), (8, 0x12345), (0xfff, 0xf_ffff)] {
            assert_eq!(decode_dev(encode_dev(major, minor)), (major, minor));
        }
        assert_eq!(encode_dev(1, 5), 0x105);
    }

    #[test]
    fn a_dirent_is_padded_and_fits_or_is_left_out() {
        let entry = Dirent { ino: 1, next: 2, kind: 8, name: c"abc" };
        let body = Body::default().dirent(40, &entry).unwrap_or_else(|_| panic!("it fits"));
        assert_eq!(body.len(), 32);
        assert_eq!(&body.as_bytes()[16..], b"\x03\0\0\0\x08\0\0\0abc\0\0\0\0\0");
        assert!(body.dirent(63, &entry).is_err());
    }
}
