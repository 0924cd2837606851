//! Locks of files: those of fcntl(2), of processes as well as of open file descriptions, and those of flock(2).
//!
//! The guest's kernel decides between its own processes, and then asks for the same lock here, so that it holds against
//! other pods and processes of the host, too. No request waits for a lock: while somebody else has it, the guest asks
//! again. It asks for the end of each lock, even when a process ends (kernel-config/patches/fuse-file-locks.patch).

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use rustix::{fs::OFlags, io::Errno};

use super::{
    abi::{Body, Result},
    file_server::{Answer, Request, Server, done},
    lock_owners::{Kind, Locked, Owner, Wanted},
};
use crate::lock;

impl Server {
    /// SETLK: locks or unlocks a range of a file. EAGAIN: somebody else has a lock that excludes this one.
    pub(super) fn set_lock(&mut self, mut request: Request) -> Result<Answer> {
        let wanted = Wanted::parse(request.header.node, &mut request.args)?;
        loop {
            let owned = match wanted.kind {
                Some(_) => self.add_owner(wanted.owner)?,
                None => match self.tables().locks.get(wanted.owner) {
                    Some(owned) => owned,
                    None => return Ok(done()),
                },
            };
            let mut locked = lock(&owned);
            if locked.is_removed {
                continue;
            }
            let changed = self.change(&wanted, &mut locked);
            self.tables().locks.changed(wanted.owner, &owned, &mut locked);
            return changed.map(|()| done());
        }
    }

    /// GETLK: answers who would exclude this lock.
    pub(super) fn get_lock(&mut self, mut request: Request) -> Result<Answer> {
        let node = request.header.node;
        let wanted = Wanted::parse(node, &mut request.args)?;
        if wanted.owner.is_flock || wanted.kind.is_none() {
            return Err(Errno::INVAL);
        }
        let owned = self.tables().locks.get(wanted.owner);
        let locked = owned.as_ref().map(|owned| lock(owned));
        let of_another: OwnedFd;
        let file: BorrowedFd = match locked.as_ref().and_then(|locked| locked.file.as_ref()) {
            Some(file) => file.as_fd(),
            None => {
                of_another = self.open_node(node, OFlags::RDONLY)?.0;
                of_another.as_fd()
            }
        };
        Ok(wanted.excluded_by(file, Body::default())?.into())
    }

    fn add_owner(&self, owner: Owner) -> Result<Arc<Mutex<Locked>>> {
        let mut tables = self.tables();
        let device = tables.nodes.device(owner.node).ok_or(Errno::STALE)?;
        tables.locks.add(owner, device)
    }

    fn change(&mut self, wanted: &Wanted, locked: &mut Locked) -> Result<()> {
        if locked.is_split_by(wanted) && !self.tables().locks.has_room(1) {
            return Err(Errno::NOLCK);
        }
        let writes = wanted.kind == Some(Kind::Write) && !wanted.owner.is_flock;
        if wanted.kind.is_some() && (locked.file.is_none() || writes && !locked.is_writable) {
            self.open_to_lock(wanted.owner, locked, writes)?;
        }
        match locked.set(wanted) {
            // NFS wants a file that is open for writing for an exclusive flock.
            Err(Errno::BADF) if !locked.is_writable => {
                self.open_to_lock(wanted.owner, locked, true)?;
                locked.set(wanted)
            }
            set => set,
        }
    }

    fn open_to_lock(&mut self, owner: Owner, locked: &mut Locked, writes: bool) -> Result<()> {
        let flags = if writes { OFlags::RDWR } else { OFlags::RDONLY };
        let (file, _) = self.open_node(owner.node, flags)?;
        locked.replace(owner, file, writes)
    }
}
