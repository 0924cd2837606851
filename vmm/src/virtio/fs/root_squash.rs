//! The server acts as root, after the guest's kernel has checked what a process may do. But some file systems map root
//! to nobody (`root_squash` of NFS). What root may not do there, the server does as the process.

use rustix::{
    fs::{Gid, fstatfs},
    io::Errno,
};

use super::{
    abi::{Header, Result, opcode},
    caller::Caller,
    file_server::{Answer, Request, Server},
    file_system_kind::NFS,
};
use crate::virtio::chain::Buffers;

/// `CEPH_SUPER_MAGIC` (statfs(2)).
const CEPH: i64 = 0x00c3_6400;
/// File systems whose servers may map root to nobody (`root_squash`). On others the server must not act as another
/// user than root. On procfs, for example, the host's kernel would then let it look into all processes of this user.
const MAY_SQUASH_ROOT: [i64; 2] = [NFS, CEPH];

/// The most groups that a request to a server of NFS can have (RFC 5531, AUTH_SYS).
const MOST_GROUPS: usize = 16;

impl Server {
    /// Does what the guest requests, as root or as the calling process.
    pub(super) fn answer(&mut self, request: Request) -> Result<Answer> {
        let Header { opcode, node, .. } = request.header;
        let Some(caller) = self.caller.filter(|_| is_of_paths(opcode)) else {
            return self.answer_once(request);
        };
        // The other node that it names.
        let other = match opcode {
            opcode::RENAME | opcode::RENAME2 | opcode::LINK => request.args.clone().u64()?,
            _ => node,
        };
        let Request { header, ref args, ref room, .. } = request;
        let again = Request { header, args: args.clone(), data: Buffers::default(), room: room.clone() };
        let (mut first, mut again) = (Some(request), Some(again));
        self.as_root_or(Some(caller), &[node, other], |server| {
            let request = first.take().or_else(|| again.take()).ok_or(Errno::IO)?;
            server.answer_once(request)
        })
    }

    /// Does something as root. If root may not do it to these nodes, and their file system may map root to nobody,
    /// does it again as `caller`, with the groups of the nodes and of the directories above them.
    pub(super) fn as_root_or<T>(
        &mut self,
        caller: Option<Caller>,
        nodes: &[u64],
        mut work: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let done = work(self);
        let (Err(Errno::ACCESS | Errno::PERM), Some(caller)) = (&done, caller) else { return done };
        let mut groups = Vec::new();
        for node in nodes {
            let way = self.tables().nodes.way_in_mount(*node);
            // From the top, which root reaches.
            if !self.may_squash_root(way.iter().rev().map(|(node, _)| *node)) {
                return done;
            }
            for group in way.into_iter().map(|(_, group)| Gid::from_raw(group)) {
                if groups.len() < MOST_GROUPS && !groups.contains(&group) {
                    groups.push(group);
                }
            }
        }
        caller.with_groups(&groups, || work(self))
    }

    /// Whether the file system of these nodes, which are in one mount, may map root to nobody. It is that of the
    /// first one which root reaches.
    fn may_squash_root(&mut self, mut nodes: impl Iterator<Item = u64>) -> bool {
        let reached = nodes.find_map(|node| self.path(node).ok());
        let kind = reached.and_then(|fd| fstatfs(&*fd).ok()).map(|stat| stat.f_type);
        kind.is_some_and(|kind| MAY_SQUASH_ROOT.contains(&kind))
    }
}

/// Whether a request reaches its file by a name, so that it has changed nothing if it is refused, and can be repeated.
/// Others are about open files.
fn is_of_paths(opcode: u32) -> bool {
    !matches!(
        opcode,
        opcode::READ
            | opcode::WRITE
            | opcode::FLUSH
            | opcode::FSYNC
            | opcode::FSYNCDIR
            | opcode::SYNCFS
            | opcode::RELEASE
            | opcode::RELEASEDIR
            | opcode::FALLOCATE
            | opcode::LSEEK
            | opcode::COPY_FILE_RANGE
    )
}
