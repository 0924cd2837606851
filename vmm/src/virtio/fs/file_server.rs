//! The file server: FUSE requests in, answers out.

use std::{ffi::CStr, os::fd::OwnedFd, rc::Rc, time::Duration};

use nix::sys::resource::{Resource, getrlimit};
use rustix::{
    fs::Statx,
    io::{Errno, fcntl_dupfd_cloexec},
};

use super::{
    abi::{
        Args, Body, Header, IN_HEADER, MAJOR, MINOR, OLDEST_MINOR, OUT_HEADER, Result, WRITE_IN, encode_dev,
        feature, opcode,
    },
    handles::{self, Handles},
    nodes::{self, Nodes},
};
use crate::virtio::{
    chain::{Buffers, Chain},
    iovecs::Iovecs,
};

/// How long the guest may cache a name, including one that does not exist, and the attributes of a file. The host changes
/// shared files while the guest runs (it binds a mount, or replaces a configuration), and cannot notify the guest. The guest
/// sees such a change after this time at the latest. It checks the contents of a file whenever it opens the file or reads its
/// attributes.
pub(super) const CACHED_FOR: Duration = Duration::from_secs(1);

/// What is offered to the driver. Not writing back late: pages would linger in the guest, where the host does not see
/// them.
const FEATURES: u32 = feature::ASYNC_READ
    | feature::ATOMIC_O_TRUNC
    | feature::BIG_WRITES
    | feature::DONT_MASK
    | feature::AUTO_INVAL_DATA
    | feature::DO_READDIRPLUS
    | feature::READDIRPLUS_AUTO
    | feature::ASYNC_DIO
    | feature::PARALLEL_DIROPS
    | feature::POSIX_ACL
    | feature::MAX_PAGES
    | feature::HANDLE_KILLPRIV_V2
    | feature::SETXATTR_EXT;
/// Pages of the data of a request (`max_pages`).
const MAX_PAGES: u16 = 256;
/// Bytes of the data of a request (`max_write`). A longer request is an error. Otherwise a guest, whose buffers may overlap, could
/// make one request take a long time and much memory of the host.
pub(super) const LONGEST_DATA: usize = MAX_PAGES as usize * 4096;
/// Requests that the driver makes without waiting for them, and how many of them make it slow down.
const MAX_BACKGROUND: u16 = 64;
const CONGESTED: u16 = 48;
/// The longest arguments are those of SETXATTR: 64 KiB and a name. All others would fit twice.
const LONGEST_ARGS: usize = 0x2_1000;

/// How much the server may hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) nodes: nodes::Limits,
    pub(super) handles: handles::Limits,
}

impl Limits {
    /// A process that may open few files leaves half of them to whatever else it does.
    pub(super) fn of_this_process() -> Self {
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft as usize);
        Self {
            nodes: nodes::Limits {
                idle: 1 << 17,
                paths: 512.min(files / 16),
                anchors: (1 << 14).min(files / 4),
            },
            handles: handles::Limits { handles: 1 << 18, files: 1024.min(files / 8) },
        }
    }
}

/// The server of one directory, for one driver.
pub(super) struct Server {
    pub(super) nodes: Nodes,
    pub(super) handles: Handles,
    pub(super) iovecs: Iovecs,
    root: Rc<OwnedFd>,
    limits: Limits,
}

/// A request, copied out of the guest's reach but for what WRITE writes, and what READ may fill.
pub(super) struct Request<'a, 'm> {
    pub(super) header: Header,
    pub(super) args: Args<'a>,
    pub(super) data: Buffers<'m>,
    /// Room for the answer's body.
    pub(super) room: Buffers<'m>,
}

/// What a request is answered with.
pub(super) enum Answer {
    Body(Body),
    /// So many bytes were put into the room.
    Filled(usize),
}

impl From<Body> for Answer {
    fn from(body: Body) -> Self {
        Self::Body(body)
    }
}

/// Nothing but that it is done.
pub(super) fn done() -> Answer {
    Answer::Body(Body::default())
}

impl Server {
    /// Serves the directory `root`.
    pub(super) fn new(root: &OwnedFd, limits: Limits) -> Result<Self> {
        let root = Rc::new(fcntl_dupfd_cloexec(root, 0)?);
        let nodes = Nodes::new(root.clone(), limits.nodes)?;
        Ok(Self { nodes, handles: Handles::new(limits.handles), iovecs: Iovecs::default(), root, limits })
    }

    /// Serves one request, and returns the length of what was written for it. A request that leaves no room for an
    /// answer, and wants one, is not served.
    pub(super) fn serve(&mut self, chain: Chain) -> u32 {
        let Chain { mut readable, mut writable, .. } = chain;
        let len = readable.len();
        let Some(header) = readable.read_array::<IN_HEADER>() else { return 0 };
        let Ok(header) = Header::parse(&header) else { return 0 };
        let mut args = Vec::new();
        let copied = if header.len as usize == len {
            let count = if header.opcode == opcode::WRITE { WRITE_IN } else { LONGEST_ARGS };
            args = readable.split_front(count).to_vec();
            header.opcode == opcode::WRITE || readable.is_empty()
        } else {
            false
        };
        match header.opcode {
            opcode::FORGET | opcode::BATCH_FORGET if copied => {
                // There is nobody to be told what is wrong with it.
                let _ = self.forget(&header, Args::new(&args));
                return 0;
            }
            // Nothing is interrupted: it is answered before this one is looked at.
            opcode::INTERRUPT => return 0,
            _ => {}
        }
        if writable.len() < OUT_HEADER {
            return 0;
        }
        let mut front = writable.split_front(OUT_HEADER);
        let (unique, space) = (header.unique, writable.len());
        let answer = if copied {
            let room = writable.clone();
            self.answer(Request { header, args: Args::new(&args), data: readable, room })
        } else {
            Err(Errno::IO)
        };
        let (error, body) = match answer {
            Ok(Answer::Body(body)) if body.len() <= space => (0, writable.write(body.as_bytes())),
            Ok(Answer::Body(_)) => (Errno::IO.raw_os_error(), 0),
            Ok(Answer::Filled(count)) => (0, count),
            Err(error) => (error.raw_os_error(), 0),
        };
        // No answer has more than the 1 MiB and a page that were asked for.
        let len = (OUT_HEADER + body) as u32;
        front.write(Body::default().u32(len).u32(-error as u32).u64(unique).as_bytes());
        len
    }

    fn answer(&mut self, request: Request) -> Result<Answer> {
        match request.header.opcode {
            opcode::INIT => init(request.args),
            opcode::DESTROY => self.destroy(),
            opcode::LOOKUP => self.look_up(request),
            opcode::GETATTR => self.get_attributes(request),
            opcode::SETATTR => self.set_attributes(request),
            opcode::STATX => self.get_extended_attributes(request),
            opcode::STATFS => self.stat_file_system(request),
            opcode::SETXATTR => self.set_xattr(request),
            opcode::GETXATTR => self.get_xattr(request),
            opcode::LISTXATTR => self.list_xattrs(request),
            opcode::REMOVEXATTR => self.remove_xattr(request),
            opcode::READLINK => self.read_link(request),
            opcode::SYMLINK => self.make_symlink(request),
            opcode::MKNOD => self.make_node(request),
            opcode::MKDIR => self.make_directory(request),
            opcode::LINK => self.make_link(request),
            opcode::UNLINK => self.remove_name(request, false),
            opcode::RMDIR => self.remove_name(request, true),
            opcode::RENAME => self.rename(request, false),
            opcode::RENAME2 => self.rename(request, true),
            opcode::CREATE => self.create(request),
            opcode::TMPFILE => self.make_nameless(request),
            opcode::OPEN => self.open(request),
            opcode::OPENDIR => self.open_directory(request),
            opcode::READ => self.read(request),
            opcode::WRITE => self.write(request),
            opcode::READDIR => self.read_directory(request, false),
            opcode::READDIRPLUS => self.read_directory(request, true),
            opcode::FLUSH => self.flush(request),
            opcode::FSYNC | opcode::FSYNCDIR => self.sync(request),
            opcode::RELEASE | opcode::RELEASEDIR => self.release(request),
            opcode::FALLOCATE => self.allocate(request),
            opcode::LSEEK => self.seek(request),
            opcode::COPY_FILE_RANGE => self.copy_range(request),
            // The driver does without: locks and access(2) are its kernel's own matter.
            _ => Err(Errno::NOSYS),
        }
    }

    /// The driver knows nothing any more.
    fn destroy(&mut self) -> Result<Answer> {
        self.nodes = Nodes::new(self.root.clone(), self.limits.nodes)?;
        self.handles = Handles::new(self.limits.handles);
        Ok(done())
    }

    fn forget(&mut self, header: &Header, mut args: Args) -> Result<()> {
        if header.opcode == opcode::FORGET {
            self.nodes.forget(header.node, args.u64()?);
            return Ok(());
        }
        let count = args.u32()?;
        args.skip(4)?;
        for _ in 0..count {
            let (node, lookups) = (args.u64()?, args.u64()?);
            self.nodes.forget(node, lookups);
        }
        Ok(())
    }

    /// A name that is not there is an answer too, without a node, which the guest may believe for a while.
    fn look_up(&mut self, mut request: Request) -> Result<Answer> {
        let name = request.args.name()?;
        match self.nodes.look_up(request.header.node, name) {
            Ok((node, stat)) => Ok(self.entry(node, &stat).into()),
            Err(Errno::NOENT) => {
                Ok(Body::default().zeros(16).u64(CACHED_FOR.as_secs()).zeros(ENTRY_OUT - 24).into())
            }
            Err(error) => Err(error),
        }
    }

    /// `fuse_entry_out` of what was just made at `name` in `parent`.
    pub(super) fn made(&mut self, parent: u64, name: &CStr) -> Result<Answer> {
        let (node, stat) = self.nodes.look_up(parent, name)?;
        Ok(self.entry(node, &stat).into())
    }

    /// `fuse_entry_out` of a node.
    pub(super) fn entry(&mut self, node: u64, stat: &Statx) -> Body {
        // Its generation is always the same, since its number is never used again.
        let body = Body::default().u64(node).u64(0).u64(CACHED_FOR.as_secs()).u64(CACHED_FOR.as_secs());
        self.attributes(body.zeros(8), stat)
    }

    /// Adds `fuse_attr`.
    pub(super) fn attributes(&mut self, body: Body, stat: &Statx) -> Body {
        let times = [&stat.stx_atime, &stat.stx_mtime, &stat.stx_ctime];
        let mut body = body.u64(self.nodes.inode(stat)).u64(stat.stx_size).u64(stat.stx_blocks);
        for time in times {
            body = body.u64(time.tv_sec as u64);
        }
        for time in times {
            body = body.u32(time.tv_nsec);
        }
        body.u32(stat.stx_mode.into())
            .u32(stat.stx_nlink)
            .u32(stat.stx_uid)
            .u32(stat.stx_gid)
            .u32(encode_dev(stat.stx_rdev_major, stat.stx_rdev_minor))
            .u32(stat.stx_blksize)
            .u32(0)
    }
}

/// `fuse_entry_out`, in bytes.
pub(super) const ENTRY_OUT: usize = 128;

/// Agrees on a version and on features.
fn init(mut args: Args) -> Result<Answer> {
    let (major, minor, max_readahead, wanted) = (args.u32()?, args.u32()?, args.u32()?, args.u32()?);
    let body = Body::default().u32(MAJOR).u32(MINOR);
    if major > MAJOR {
        // It asks again, with this one.
        return Ok(body.zeros(56).into());
    }
    if major < MAJOR || minor < OLDEST_MINOR {
        return Err(Errno::PROTO);
    }
    let body = body.u32(max_readahead).u32(FEATURES & wanted).u16(MAX_BACKGROUND).u16(CONGESTED);
    // Times are of nanoseconds.
    Ok(body.u32(LONGEST_DATA as u32).u32(1).u16(MAX_PAGES).zeros(34).into())
}
